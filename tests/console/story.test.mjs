// The story of a rollout: what the ledger says, as moments.

import assert from "node:assert/strict";
import { test } from "node:test";

import { moments, stateWords } from "../../console/rollout/story.js";

const STORY = {
    verdict: "kept", reason: null, state: "open", group: { state: "open", reason: null, arrived: 1, size: 4 },
    batches: [], step: null, policy_version: 3, policy_version_assumed: false, versions: null,
    received_at: "2026-01-01T00:00:00Z", decided_at: null, batched_at: null, acked_at: null, purged_at: null,
};
const titles = (story, group = null, batch = null) => moments({ ...STORY, ...story }, group, batch)
    .map(({ title }) => title);

test("a rollout that waits has been received and judged, and its group is open", () => {
    assert.deepEqual(titles({}), ["received", "kept", "group open"]);
});

test("a rollout without a place has no group in its story", () => {
    assert.deepEqual(titles({ verdict: "dropped", reason: "short", state: "dropped" }), ["received", "dropped by short"]);
    assert.deepEqual(titles({ verdict: "late", reason: "late", state: "late" }), ["received", "late"]);
});

test("a rollout that lacks scores says which", () => {
    const waits = { state: "scoring", scoring: ["judge", "tests"] };
    assert.deepEqual(titles(waits), ["received", "waits for scores", "group open"]);
    assert.deepEqual(moments({ ...STORY, ...waits }, null, null)[1].lines, ["judge, tests"]);
    const late = { verdict: "late", reason: "group-full", state: "late" };
    assert.match(moments({ ...STORY, ...late }, null, null)[1].lines[0], /wait for scores/);
});

test("the story of a checkpointed rollout ends with its checkpoint, and a purge comes last", () => {
    const group = { ...STORY.group, state: "batched", arrived: 4 };
    const story = {
        state: "checkpointed", group, batches: ["b1", "b2"], step: 7, purged_at: "2026-01-02T00:00:00Z",
    };
    const batch = { policy_version: { current: 5 }, consumer: "t", attempt: 2, reason: null };
    assert.deepEqual(titles(story, null, batch),
        ["received", "kept", "group ready", "batch", "trained by step 7", "checkpointed", "purged"]);
    const found = moments({ ...STORY, ...story }, null, batch)[3];
    assert.deepEqual([found.batch, found.lines],
        ["b2", ["t, attempt 2", "staleness 2 (current v5)", "in 2 batches so far"]]);
});

test("a result of a suite is evaluated, and not a group that was discarded", () => {
    const evaluated = { state: "discarded", group: { state: "discarded", reason: "evaluated", arrived: 1, size: 1 } };
    assert.deepEqual(titles(evaluated), ["received", "kept", "evaluated"]);
    assert.equal(moments({ ...STORY, ...evaluated }, null, null)[2].kind, "good");
    assert.deepEqual(stateWords({ ...STORY, ...evaluated }), ["●", "good", "evaluated"]);
});

test("a state has a glyph, a kind and words, also one of a newer service", () => {
    assert.deepEqual(stateWords({ state: "trained", step: 7 }), ["◐", "warn", "trained, step 7"]);
    assert.deepEqual(stateWords({ state: "unheard-of", step: null }), ["?", "quiet", "unheard-of"]);
});
