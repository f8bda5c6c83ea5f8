// Addresses of screens.

import assert from "node:assert/strict";
import { test } from "node:test";

import { above, fromSee, hash, split } from "../../console/address.js";

test("addresses hold any id", () => {
    const made = hash("policies/a.b/groups", { id: "x/y?#&", after: null });
    assert.equal(made, "#/policies/a.b/groups?id=x%2Fy%3F%23%26");
    assert.deepEqual(split(made), { segments: ["policies", "a.b", "groups"], query: { id: "x/y?#&" } });
});

test("calls of the API lead to the screens that show their answers", () => {
    const cases = [
        [
            "./groups?policy=p&state=discarded&reason=zero-variance&order=newest",
            "#/policies/p/groups?state=discarded&reason=zero-variance",
        ],
        ["./groups?policy=p&group_id=a%2Fb", "#/policies/p/groups?id=a%2Fb"],
        ["./trajectories?policy=p&rollout_id=r", "#/policies/p/rollout?id=r"],
        ["./policies/p/steps?order=newest", "#/policies/p/steps"],
        ["./policies/p", "#/policies/p"],
        ["./elsewhere", null],
    ];
    for (const [see, expected] of cases) {
        assert.equal(fromSee(see), expected, see);
    }
    assert.equal(fromSee("./batches/b%2F1", "p"), "#/policies/p/batches?id=b%2F1");
});

test("each screen has one above it, and the first has none", () => {
    const cases = [
        ["#/policies/p/groups?id=g", "#/policies/p/groups"],
        ["#/policies/p/rollout?id=r", "#/policies/p/rollouts"],
        ["#/policies/p/groups", "#/policies/p"],
        ["#/policies/p", "#/"],
        ["#/", null],
    ];
    for (const [from, expected] of cases) {
        assert.equal(above(from), expected, from);
    }
});
