// Evaluation: the curve of a suite, its numbers in words, and the order of its tasks.

import assert from "node:assert/strict";
import { test } from "node:test";

import { suiteHash } from "../../console/address.js";
import { shape } from "../../console/evaluation/geometry.js";
import { change, counts, ordered, outcome } from "../../console/evaluation/tasks.js";
import { joined, newest, withOlder } from "../../console/evaluation/versions.js";
import * as words from "../../console/evaluation/words.js";

const VERSION = {
    version: 7, step: 70, complete: true, n: 120, tasks: 30, mixed_versions: 0, mean: 0.5, standard_error: 0.1,
    pass_at: [], difference: null,
};

/** A version; what is not named is as above. */
const version = (number, more = {}) => ({ ...VERSION, version: number, ...more });

const suite = (versions, more = {}) =>
    ({ suite: "aime24", tasks: 30, repeats: 4, threshold: 1, versions, more: false, ...more });

// ---- words

test("an interval is 1.96 standard errors to both sides, and there is none with one task", () => {
    const [low, high] = words.interval(VERSION);
    assert.ok(Math.abs(low - 0.304) < 1e-12 && Math.abs(high - 0.696) < 1e-12);
    assert.equal(words.interval(version(7, { standard_error: null })), null);
    assert.equal(words.mean(VERSION), "0.500 (0.304 to 0.696)");
    assert.equal(words.mean(version(7, { standard_error: null })), "0.500 (no interval)");
    assert.equal(words.mean(version(7, { standard_error: 0 })), "0.500 (0.500 to 0.500)");
});

test("a difference has signs, and says whether the versions can be told apart", () => {
    const difference = { version: 6, tasks: 30, mean: 0.03, low: -0.01, high: 0.07, won: 5, lost: 3 };
    assert.equal(words.difference(difference), "+0.030 (−0.010 to +0.070)");
    assert.equal(words.wonAndLost(difference), "5 won, 3 lost of 30 tasks");
    const said = (low, high) => words.comparison({ ...difference, low, high })?.[2];
    assert.deepEqual([said(0.01, 0.2), said(-0.2, -0.01), said(-0.1, 0.1), said(0, 0), said(null, null)],
        ["higher", "lower", "no clear difference", "no clear difference", undefined]);
});

test("of pass@k the powers of two are shown and the largest k", () => {
    const passes = Array.from({ length: 12 }, (_, index) => ({ k: index + 1 }));
    assert.deepEqual(words.somePasses(passes).map(({ k }) => k), [1, 2, 4, 8, 12]);
    assert.deepEqual(words.somePasses([]), []);
    const pass = { k: 4, estimate: 0.4333, low: 0.26, high: 0.607, tasks: 30 };
    assert.equal(words.pass(pass, 30), "0.433 (0.260 to 0.607)");
    assert.equal(words.pass({ ...pass, tasks: 1, low: null, high: null }, 30), "0.433 (no interval), 1 of 30 tasks");
});

test("a point and a curve have sentences for those who do not see them", () => {
    const difference = { version: 6, tasks: 30, mean: 0.03, low: -0.01, high: 0.07, won: 5, lost: 3 };
    assert.equal(words.point(version(7, { difference, complete: false })),
        "v7 (step 70): mean 0.500 (0.304 to 0.696), 120 rollouts of 30 tasks, " +
        "+0.030 (−0.010 to +0.070) against v6, incomplete");
    assert.equal(words.point(version(7, { step: null, standard_error: null, n: 1, tasks: 1 })),
        "v7: mean 0.500 (no interval), 1 rollout of 1 task, complete");
    assert.equal(words.curve(suite([version(7), version(6, { mean: 0.25 })])),
        "Mean reward of 2 versions: newest v7 0.500 (0.304 to 0.696), from 0.250 to 0.500.");
    assert.equal(words.curve(suite([])), "No version has results yet.");
    assert.equal(words.suite(suite([])), "30 tasks, 4 rollouts each; a rollout passes from reward 1");
    assert.equal(words.suite(suite([], { tasks: null, repeats: 1, threshold: 0.5 })),
        "1 rollout of each task; a rollout passes from reward 0.5");
});

// ---- the curve

test("a curve goes from the oldest version to the newest, in the distances of their numbers", () => {
    const { points, line } = shape(suite([version(30, { mean: 0.6 }), version(10), version(0, { mean: 0.3 })]));
    assert.deepEqual(points.map(({ version: { version: number } }) => number), [0, 10, 30]);
    const [first, second, third] = points;
    assert.deepEqual([first.x, third.x], [4, 96]);
    assert.ok(Math.abs(second.x - (4 + 92 / 3)) < 1e-9);
    assert.ok(third.y < second.y && second.y < first.y, "what is higher is further up");
    assert.equal(line.match(/[ML]/g).join(""), "MLL");
    assert.ok(points.every(({ bounds: [low, high], y }) => high < y && y < low), "the mean is inside of its interval");
    assert.equal(first.from, 0);
    assert.ok(Math.abs(points.reduce((sum, { width }) => sum + width, 0) - 100) < 1e-9, "columns fill the box");
});

test("zero is in the picture, and everything is inside of it", () => {
    const at = (shown) => shown.up.find(({ text }) => Number(text) === 0)?.at;
    const above = shape(suite([version(1), version(2, { mean: 0.9 })]));
    assert.equal(at(above), 100, "zero is the ground of rewards that are not negative");
    const below = shape(suite([version(1, { mean: -0.5 }), version(2, { mean: -0.9 })]));
    assert.equal(at(below), 0);
    const both = shape(suite([version(1, { mean: -1 }), version(2, { mean: 1 })]));
    assert.ok(Math.abs(at(both) - 50) < 1e-9);
    for (const { points } of [above, below, both]) {
        for (const { y, bounds } of points) {
            assert.ok([y, ...bounds].every((value) => value >= 0 && value <= 100));
        }
    }
});

test("the line and the band leave out what is incomplete, unless nobody can say what is complete", () => {
    const rows = [version(3), version(2, { complete: false }), version(1)];
    const { line, band, points } = shape(suite(rows));
    assert.equal(line.match(/[ML]/g).length, 2);
    assert.equal(band.match(/[ML]/g).length, 4);
    assert.equal(points.length, 3, "its point is there");
    const undeclared = shape(suite(rows.map((row) => ({ ...row, complete: false })), { tasks: null }));
    assert.equal(undeclared.line.match(/[ML]/g).length, 3);
    assert.equal(shape(suite(rows.map((row) => ({ ...row, complete: false })))).line, "");
});

test("the band ends at a version without an interval, and begins anew behind it", () => {
    const none = { standard_error: null };
    const of = (...errors) => shape(suite(errors.map((more, index) => version(index, more)).reverse())).band;
    assert.equal(of({}, {}, none, {}, {}).match(/Z/g).length, 2);
    assert.equal(of({}, none, {}), "", "a point alone has a whisker and no band");
    assert.equal(of(none, none), "");
});

test("a curve of one version or of none is drawn", () => {
    const one = shape(suite([version(7)]));
    assert.deepEqual([one.points[0].x, one.points[0].from, one.points[0].width], [50, 0, 100]);
    assert.deepEqual([one.line, one.band], ["", ""]);
    assert.deepEqual(one.across, [{ at: 50, text: "v7" }]);
    const zero = shape(suite([version(0, { mean: 0, standard_error: 0 })]));
    assert.equal(zero.points[0].y, 100);
    const none = shape(suite([]));
    assert.deepEqual([none.points, none.across, none.line], [[], [], ""]);
});

test("ticks are round numbers, few, and whole for versions", () => {
    const { across, up } = shape(suite([version(0), version(137, { mean: 0.7, standard_error: 0 })]));
    assert.deepEqual(across.map(({ text }) => text), ["v0", "v50", "v100"]);
    assert.deepEqual(up.map(({ text }) => text), ["0.0", "0.2", "0.4", "0.6"]);
    assert.deepEqual(shape(suite([version(4), version(5)])).across.map(({ text }) => text), ["v4", "v5"]);
    const small = shape(suite([version(1, { mean: 0.0031, standard_error: 0 })]));
    assert.deepEqual(small.up.map(({ text }) => text), ["0.000", "0.001", "0.002", "0.003"]);
    const large = shape(suite([version(1, { mean: -1500, standard_error: 0 })]));
    assert.deepEqual(large.up.map(({ text }) => text), ["−1500", "−1000", "−500", "0"]);
    for (const mean of [0.01, 0.3, 0.99, 1, 7, 12345]) {
        const { up: found } = shape(suite([version(1, { mean })]));
        assert.ok(found.length >= 2 && found.length <= 6, `${mean}: ${found.map(({ text }) => text)}`);
        assert.ok(found.every(({ at }) => at >= -1e-9 && at <= 100 + 1e-9));
    }
});

// ---- versions

const numbers = ({ versions }) => versions.map(({ version: number }) => number);
const of = (...all) => all.map((number) => version(number));

test("a new answer keeps the older versions that were known", () => {
    const known = [suite(of(5, 4, 3, 2), { more: true })];
    const [found] = joined([suite(of(7, 6, 5), { more: true })], known);
    assert.deepEqual(numbers(found), [7, 6, 5, 4, 3, 2]);
    const fresh = { ...version(5), mean: 0.9 };
    const [changed] = joined([suite([version(6), fresh], { more: true })], known);
    assert.equal(changed.versions[1].mean, 0.9, "the answer counts");
    assert.equal(joined([suite(of(7, 6, 5))], [suite(of(5, 4), { more: false })])[0].more, false);
});

test("what is behind a gap is forgotten", () => {
    const [found] = joined([suite(of(40, 39), { more: true })], [suite(of(5, 4), { more: false })]);
    assert.deepEqual([numbers(found), found.more], [[40, 39], true]);
    assert.deepEqual(numbers(joined([suite([])], [suite(of(5))])[0]), []);
    assert.deepEqual(joined([], [suite(of(5))]), [], "a suite that is gone is gone");
    assert.deepEqual(numbers(joined([suite(of(2), { suite: "other" })], [suite(of(3, 1))])[0]), [2]);
});

test("older versions follow the others only where they were asked for", () => {
    const older = { before: 5, versions: of(4, 3), more: true, isComing: false, said: "" };
    const found = withOlder(suite(of(7, 6, 5), { more: true }), older);
    assert.deepEqual([numbers(found), found.more], [[7, 6, 5, 4, 3], true]);
    assert.deepEqual(numbers(withOlder(suite(of(9, 8)), older)), [9, 8], "a gap has come between them");
    assert.deepEqual(numbers(withOlder(suite(of(5)), undefined)), [5]);
});

test("the numbers below a curve are those of the newest complete version", () => {
    const rows = [version(3, { complete: false }), version(2), version(1)];
    assert.equal(newest(suite(rows)).version, 2);
    assert.equal(newest(suite(rows.slice(0, 1))), null);
    assert.equal(newest(suite(rows.slice(0, 1), { tasks: null })).version, 3, "no version can be complete");
    assert.equal(newest(suite([], { tasks: null })), null);
});

// ---- tasks

const task = (name, now, before) => {
    const result = (mean) => (mean === null ? null : { n: 4, passed: 0, mean, rollouts: [] });
    return { task: name, now: result(now), before: result(before) };
};

const TASKS = [
    task("a", 0.5, 0.5), task("b", 0.75, 0.5), task("c", 0.25, 0.5), task("d", null, 0.5), task("e", 0, 1),
    task("f", 1, null), task("g", 1, 0), task("h", 0.25, 0.25),
];

test("lost tasks come first, then won ones, the largest change first, and the rest as it came", () => {
    assert.deepEqual(ordered(TASKS).map((each) => each.task), ["e", "c", "g", "b", "a", "d", "f", "h"]);
    assert.deepEqual(ordered([]), []);
});

test("each task has one outcome", () => {
    assert.deepEqual(TASKS.map(outcome), ["same", "won", "lost", "missing", "lost", "new", "won", "same"]);
    assert.deepEqual(counts(TASKS), { lost: 2, won: 2, same: 2, new: 1, missing: 1 });
    assert.deepEqual(TASKS.slice(1, 6).map(change), [0.25, -0.25, null, -1, null]);
});

test("a suite at a version has an address", () => {
    assert.equal(suiteHash("math.solver", "aime-24", 7), "#/policies/math.solver/suites/aime-24?version=7");
});
