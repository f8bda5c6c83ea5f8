// A policy: the trainer's time, its charts, its journal, and what a draft of filters would have done.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ofBuckets, ofSteps, specs } from "../../console/policy/charts.js";
import { describe } from "../../console/policy/journal.js";
import { fitting } from "../../console/policy/windows.js";
import { shares, stretches } from "../../console/step/stretches.js";
import { groupRows, rolloutRows } from "../../console/try/rows.js";

test("a moment of two trainers is counted once, and a gap between steps is neither", () => {
    const begin = Date.parse("2026-01-01T00:00:00Z");
    const step = (acked_at, held_ms, waited_ms) => ({ acked_at: `2026-01-01T${acked_at}Z`, held_ms, waited_ms });
    const found = stretches([
        step("00:01:40", 50_000, 50_000),
        step("00:01:45", 55_000, 0),
        step("00:03:20", 45_000, 5_000),
        step("00:04:00", null, null),
    ]);
    assert.deepEqual(found.map(([kind, from, to]) => [kind, (from - begin) / 1000, (to - begin) / 1000]), [
        ["waiting", 0, 50],
        ["training", 50, 100],
        ["training", 100, 105],
        ["neither", 105, 150],
        ["waiting", 150, 155],
        ["training", 155, 200],
    ]);
    assert.deepEqual(shares(found), { training: 0.5, waiting: 0.275, neither: 0.225 });
    assert.deepEqual(shares([]), { training: null, waiting: null, neither: null });
});

const STEP = {
    step: 7, acked_at: "2026-01-01T00:00:10Z", reward_trained: 0.5, reward_all: null, staleness_mean: 1,
    staleness_max: 2, held_ms: 3000, waited_ms: 1000,
};

test("charts over steps have a value for each step, in seconds", () => {
    const columns = ofSteps([STEP]);
    assert.deepEqual([columns.at, columns.trained, columns.all, columns.training, columns.waiting],
        [[7], [0.5], [null], [3], [1]]);
    assert.equal(columns.times[0], Date.parse(STEP.acked_at) / 1000);
});

test("a bucket whose steps were all undone is not in a chart", () => {
    const bucket = (steps, step_to) => ({
        steps, step_to, acked_at: STEP.acked_at, reward_trained: { mean: 0.25 }, reward_all: null,
        staleness: { mean: 1 }, staleness_max: 3, held_ms: { mean: 2000 }, waited_ms: null,
    });
    const columns = ofBuckets([bucket(2, 10), bucket(0, 20)]);
    assert.deepEqual([columns.at, columns.trained, columns.all, columns.max, columns.training, columns.waiting],
        [[10], [0.25], [null], [3], [2], [null]]);
});

test("a chart says in a sentence what its lines show, or that there is nothing", () => {
    const series = {
        at: [0, 120], step_s: 120,
        metrics: { kept: [20, 40], ready_groups: [3, null] },
    };
    const policy = { waiting: { needed_groups: 4 }, rules: { staleness: { max: 8 } } };
    const found = specs({ series, steps: ofSteps([STEP]), journal: [] }, policy);
    assert.equal(found.length, 6);
    const [arrivals, tokens, ready, , staleness] = found;
    assert.match(arrivals.sentence, /^kept: last 20, from 10 to 20; dropped: nothing;/, "rates are per minute");
    assert.deepEqual([tokens.sentence, tokens.at], ["Nothing has been recorded in this window.", []]);
    assert.equal(ready.sentence, "ready: last 3, from 3 to 3; needed: last 4, from 4 to 4.");
    assert.deepEqual(staleness.series.map(({ label }) => label), ["max", "mean", "bound"]);
    const [, , , reward] = specs({ series, steps: ofSteps([]), journal: [] }, policy);
    assert.equal(reward.sentence, "No step has been acked in this run.");
});

test("entries of the journal are sentences, and names in them are made visible", () => {
    const said = (kind, detail, key_id = null) => describe({ kind, detail, key_id });
    assert.equal(said("rules-changed", { filters_added: ["zero"], filters_removed: [] }, "ops"),
        "rules changed; filters added: zero (key ops)");
    assert.equal(said("resumed", { step: null, returned: 1 }), "resumed from nothing; 1 batch returned");
    assert.equal(said("filter-fails", { filter: "a\u202eb" }), "the filter a\\u{202e}b began to fail");
    assert.equal(said("of-a-newer-service", {}), "of-a-newer-service");
});

test("what a draft would have done is a row for each outcome, the most frequent reason first", () => {
    const outcomes = (ready, discarded) => ({ ready, discarded, open: 0, unjudged: 0 });
    const groups = {
        as_decided: outcomes(5, { rare: 1 }), rules_now: outcomes(4, { often: 7 }), draft: outcomes(3, { often: 8 }),
    };
    assert.deepEqual(groupRows({ groups }).map(({ title, values }) => [title, values]), [
        ["ready", [5, 4, 3]],
        ["often", [0, 7, 8]],
        ["rare", [1, 0, 0]],
        ["still waiting for rollouts", [0, 0, 0]],
        ["cannot be judged", [0, 0, 0]],
    ]);
    const verdicts = (dropped) => ({ kept: 1, masked: {}, dropped, late: 0, unjudged: 0 });
    const rollouts = { as_decided: verdicts({}), rules_now: verdicts({ short: 2 }), draft: verdicts({}) };
    assert.deepEqual(rolloutRows({ rollouts }).map(({ title }) => title),
        ["kept", "dropped: short", "late", "cannot be judged"]);
});

test("the window of the charts fits the age of the data", () => {
    const to = 1_767_233_400_000;
    const minutes = Array.from({ length: 60 }, (_, index) => to / 1000 - 3600 + 60 * index);
    /** @type {(since: number) => any} */
    const hour = (since) => ({ at: minutes, metrics: { received: minutes.map((_, index) => (index < since ? null : 1)) } });
    assert.equal(fitting(hour(59), to), "10 min");
    assert.equal(fitting(hour(50), to), "10 min");
    assert.equal(fitting(hour(49), to), "1 h");
    assert.equal(fitting(hour(0), to), "1 h");
    assert.equal(fitting(hour(60), to), "1 h", "nothing came in this hour");
});
