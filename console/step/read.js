// The steps of a policy, newest first.

import { ApiError } from "../api.js";

const sum = (rows, value) => rows.reduce((total, row) => total + (value(row) ?? 0), 0);

/** The mean over the rollouts of several batches, or null if one of them does not say it. */
function mean(batches, name) {
    const known = batches.every(({ metrics }) => metrics[name] !== undefined);
    return known
        ? sum(batches, ({ metrics, rollouts }) => metrics[name] * rollouts) / sum(batches, (each) => each.rollouts)
        : null;
}

/** A batch that a resume brought back was consumed by a step that does not count any more. */
const isUndone = ({ state }) => state !== "trained" && state !== "checkpointed";

function ofBatches(step, batches) {
    const [newest] = batches;
    const stale = batches.map(({ metrics }) => metrics["staleness/max"]).filter((value) => value !== undefined);
    return {
        step,
        epoch: newest.epoch,
        acked_at: newest.acked_at,
        batches: batches.length,
        groups: sum(batches, ({ groups }) => groups),
        rollouts: sum(batches, ({ rollouts }) => rollouts),
        tokens: sum(batches, ({ tokens }) => tokens),
        trained_tokens: null,
        flat_groups: null,
        reward_all: mean(batches, "reward/all"),
        reward_trained: mean(batches, "reward/trained"),
        staleness_mean: mean(batches, "staleness/mean"),
        staleness_max: stale.length === 0 ? null : Math.max(...stale),
        waited_ms: sum(batches, ({ waited_ms: waited }) => waited),
        held_ms: sum(batches, ({ held_ms: held }) => held),
        attempts: sum(batches, ({ attempt }) => attempt),
        version: newest.policy_version.current,
        undone: batches.every(isUndone),
    };
}

/** What batches say about the steps that consumed them. Those of one step are neighbours, or nearly so. */
export function stepsOf(batches) {
    const found = new Map();
    for (const batch of batches.filter(({ step }) => step !== null)) {
        found.set(batch.step, [...(found.get(batch.step) ?? []), batch]);
    }
    return [...found].map(([step, consumed]) => ofBatches(step, consumed));
}

/** { steps, next }; a service that has no steps says them by its batches. */
export async function readSteps(get, policy, query) {
    try {
        return await get(`./policies/${encodeURIComponent(policy)}/steps`, query);
    } catch (error) {
        if (!(error instanceof ApiError) || error.type !== "no-such-route") {
            throw error;
        }
    }
    const { batches, next } = await get("./batches", { policy, ...query });
    return { steps: stepsOf(batches), next };
}
