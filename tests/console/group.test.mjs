// What is summed up of a group, and how its rollouts stand side by side.

import assert from "node:assert/strict";
import { test } from "node:test";

import { judged, statistics } from "../../console/group/judged.js";
import { chosen, commonMessages } from "../../console/group/order.js";

test("rollouts that vote make the statistics of a group", () => {
    const siblings = [
        { verdict: "kept", reward: 1 },
        { verdict: "masked", reward: 0 },
        { verdict: "late", reward: 9 },
        { verdict: "dropped", reward: null },
    ];
    assert.deepEqual(statistics(siblings), { count: 2, mean: 0.5, deviation: 0.5, min: 0, max: 1 });
    assert.equal(statistics([]), null);
});

test("a filter behind the one that matched was not asked, and one that failed did not answer", () => {
    const group = (name) => ({ name, scope: "group" });
    const filter = [
        group("failed"), group("first"), { name: "of-rollouts", scope: "rollout" }, group("second"), group("third"),
    ];
    const answers = (state, reason) =>
        judged({ state, reason, failed_filters: ["failed"] }, { filter }).map(([{ name }, isMatch]) => [name, isMatch]);
    assert.deepEqual(answers("discarded", "second"), [["first", false], ["second", true]]);
    assert.deepEqual(answers("ready", null), [["first", false], ["second", false], ["third", false]]);
    assert.deepEqual(answers("discarded", "incomplete"), [], "nobody asked the filters");
    assert.deepEqual(answers("open", null), []);
});

test("messages that all columns begin with are found", () => {
    const common = (...lists) => commonMessages(lists.map((list) => list.map((message) => ({ message }))));
    assert.equal(common(["a", "b"], ["a", "c"]), 1);
    assert.equal(common(["a"], ["a"]), 1);
    assert.equal(common(["a"]), 0);
    assert.equal(common(["a", null], ["a", null]), 1, "what was left out is not known to be the same");
    assert.equal(common(["a"], ["a", "b"]), 1);
});

test("any number of columns shows the best and the worst, the best on the left", () => {
    const siblings = [3, 1, null, 5, 2].map((reward) => ({ reward }));
    const shown = (local) => chosen({ siblings }, { order: "best and worst", first: 0, ...local })
        .map(({ reward }) => reward);
    assert.deepEqual(shown({ count: 2 }), [5, 1]);
    assert.deepEqual(shown({ count: 4 }), [5, 3, 2, 1]);
    assert.deepEqual(shown({ count: 2, first: 4 }), [null], "what has no reward comes last");
    assert.deepEqual(shown({ count: 2, order: "as they came" }), [3, 1]);
});
