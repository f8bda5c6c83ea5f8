// The story of a rollout as moments, oldest first. Pure: it says what the ledger says, and no more.

import * as format from "../format.js";

const GOOD = "good";
const BAD = "bad";
const OPEN = "open";

/** The rules that the service has built in, in words. */
const REASONS = {
    late: "its group had been decided before it came",
    full: "all places of its group were taken, by rollouts that wait for scores",
};

/** @param {Rollout} story */
function made({ policy_version: version, policy_version_assumed: isAssumed, versions }) {
    if (isAssumed) {
        return `the producer did not say by which version; v${version}, current then, stands in`;
    }
    if (versions !== null && versions.min !== versions.max) {
        return `made by v${versions.min} to v${versions.max}`;
    }
    return `made by v${version}`;
}

/**
 * @param {Rollout} story
 * @returns {Moment}
 */
function received(story) {
    return { title: "received", at: story.received_at, kind: GOOD, lines: [made(story)] };
}

/**
 * @param {Rollout} story
 * @returns {Moment}
 */
function judged(story) {
    if (story.scoring && story.scoring.length > 0) {
        return { title: "waits for scores", at: null, kind: OPEN, lines: [story.scoring.join(", ")] };
    }
    const reason = story.reason === null ? "" : ` by ${story.reason}`;
    const failed = story.failed_filters && story.failed_filters.length > 0
        ? [`could not be evaluated: ${story.failed_filters.join(", ")}`]
        : [];
    const meaning = {
        kept: "no rule objected",
        masked: "it keeps its place and its reward, but none of its tokens is trained",
        dropped: "it takes no place in its group",
        late: story.reason === "group-full" ? REASONS.full : REASONS.late,
    };
    return {
        title: `${story.verdict}${story.verdict === "late" ? "" : reason}`,
        at: null,
        kind: story.verdict === "kept" ? GOOD : BAD,
        lines: [meaning[story.verdict] ?? "", ...failed],
    };
}

/**
 * Whether a rollout evaluates its policy. It has a group of its own, which no screen shows.
 * @param {Pick<Rollout, "purpose">} story
 */
export function evaluates({ purpose }) {
    return purpose === "eval";
}

/**
 * Whether it is decided as a result of its suite.
 * @param {{ group?: Pick<Rollout["group"], "reason"> }} story
 */
export function isEvaluated({ group }) {
    return group?.reason === "evaluated";
}

/** @param {Group|null} group */
function rewards(group) {
    if (group === null || group.reward_mean === null) {
        return [];
    }
    const { reward_min: low, reward_max: high } = group;
    const spread = low === null ? "" : low === high ? ", all alike" : `, ${format.real(low)} to ${format.real(high)}`;
    return [`mean reward ${format.real(group.reward_mean, 3)}${spread}`];
}

/**
 * @param {Rollout} story
 * @param {Group|null} group
 * @returns {Moment}
 */
function decided(story, group) {
    const { state, reason, arrived, size } = story.group;
    if (isEvaluated(story)) {
        const lines = ["it is a result of its suite, and never trained"];
        return { title: "evaluated", at: story.decided_at, kind: GOOD, lines };
    }
    const places = `${format.count(arrived)} of ${format.count(size)} places taken`;
    if (state === "open") {
        const deadline = group?.deadline_at ? [`decided at ${format.day(group.deadline_at)} at the latest`] : [];
        return { title: "group open", at: null, kind: OPEN, lines: [places, ...deadline] };
    }
    const titles = {
        ready: "group ready",
        batched: "group ready",
        stale: "group ready, then stale",
        discarded: "group discarded",
        quarantined: "group quarantined",
    };
    const why = reason === null ? [] : [`because of ${reason}`];
    const stale = state === "stale" ? ["too old for the staleness bound when a batch was cut"] : [];
    return {
        title: titles[state] ?? `group ${state}`,
        at: story.decided_at,
        kind: ["ready", "batched"].includes(state) ? GOOD : BAD,
        lines: [places, ...why, ...stale, ...rewards(group)],
    };
}

/**
 * @param {Rollout} story
 * @param {Batch} batch
 */
function staleness(story, batch) {
    const age = batch.policy_version.current - story.policy_version;
    return `staleness ${format.count(age)} (current v${batch.policy_version.current})`;
}

/**
 * @param {Rollout} story
 * @param {Batch|null} batch
 * @returns {Moment}
 */
function batched(story, batch) {
    const id = story.batches.at(-1);
    const before = story.batches.length > 1 ? [`in ${format.count(story.batches.length)} batches so far`] : [];
    const lines = batch === null
        ? before
        : [[batch.consumer, `attempt ${batch.attempt}`].filter((each) => each).join(", "), staleness(story, batch),
            ...before];
    return { title: "batch", at: story.batched_at, kind: GOOD, batch: id, lines };
}

/**
 * What came of the batch.
 * @param {Rollout} story
 * @param {Batch|null} batch
 * @returns {Moment|null}
 */
function outcome(story, batch) {
    const state = story.state;
    if (state === "leased") {
        const until = batch?.expires_at ? [`the lease expires at ${format.clock(batch.expires_at)}`] : [];
        return { title: "leased: a trainer works on it", at: null, kind: OPEN, lines: until };
    }
    if (state === "returned") {
        const why = batch?.reason ? [`because of ${batch.reason}`] : [];
        return { title: "returned, waits for the next lease", at: null, kind: OPEN, lines: why };
    }
    if (state === "quarantined" && story.group.state === "batched") {
        return { title: "batch quarantined", at: null, kind: BAD, lines: batch?.reason ? [batch.reason] : [] };
    }
    return null;
}

/**
 * @param {Rollout} story
 * @returns {Moment}
 */
function trained(story) {
    const lines = story.state === "trained"
        ? [`no checkpoint covers it: a resume below step ${format.count(story.step)} brings it back`]
        : [];
    return { title: `trained by step ${format.count(story.step)}`, at: story.acked_at, kind: GOOD, lines };
}

/**
 * Moments { title, at, kind, lines, batch }: `kind` is good, bad or open, `batch` the id of a batch to link to.
 * @param {Rollout} story
 * @param {Group|null} group
 * @param {Batch|null} batch
 */
export function moments(story, group, batch) {
    const found = [received(story), judged(story)];
    if (story.verdict === "kept" || story.verdict === "masked") {
        found.push(decided(story, group));
    }
    if (story.batches.length > 0) {
        found.push(batched(story, batch));
    }
    const came = outcome(story, batch);
    if (came !== null) {
        found.push(came);
    }
    if (story.step !== null) {
        found.push(trained(story));
    }
    if (story.state === "checkpointed") {
        found.push({ title: "checkpointed", at: null, kind: GOOD, lines: ["a checkpoint covers its step: final"] });
    }
    if (story.purged_at !== null) {
        found.push({
            title: "purged", at: story.purged_at, kind: BAD, lines: ["its tokens and messages are deleted"],
        });
    }
    return found;
}

/** @type {Record<string, [glyph: string, kind: string]>} */
const STATES = {
    scoring: ["◌", "info"],
    open: ["○", "info"],
    ready: ["●", "good"],
    leased: ["◔", "info"],
    returned: ["↩", "warn"],
    trained: ["◐", "warn"],
    checkpointed: ["●", "good"],
    discarded: ["▽", "quiet"],
    stale: ["◷", "warn"],
    quarantined: ["■", "bad"],
    dropped: ["▽", "quiet"],
    late: ["◷", "quiet"],
};

/**
 * Glyph, kind and words of a rollout's state.
 * @param {Pick<Rollout, "state"|"step"> & { group?: Pick<Rollout["group"], "reason"> }} story
 * @returns {[glyph: string, kind: string, words: string]}
 */
export function stateWords({ state, step, group }) {
    if (isEvaluated({ group })) {
        return ["●", "good", "evaluated"];
    }
    const [glyph, kind] = STATES[state] ?? ["?", "quiet"];
    return [glyph, kind, state === "trained" && step !== null ? `trained, step ${step}` : state];
}
