// Finds what an id names, in a service that does not answer for ids: by the lists that it has.

import { absent, ApiError } from "../api.js";
import { batchHash, groupHash, rolloutHash } from "../address.js";

/** Policies that are looked through. */
const POLICIES = 50;

/** A batch's id is a UUID: nothing else is asked for as one. */
const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;

const none = absent(403, 404, 422);

async function inPolicy(get, policy, id) {
    const [rollout, groups] = await Promise.all([
        get("./trajectories", { policy, rollout_id: id }).catch(none),
        get("./groups", { policy, group_id: id }).catch(none),
    ]);
    return [
        ...(rollout === null ? [] : [{ kind: "rollout", policy, state: rollout.state, href: rolloutHash(policy, id) }]),
        ...(groups?.groups ?? []).map(({ state }) => ({ kind: "group", policy, state, href: groupHash(policy, id) })),
    ];
}

/** What the id names: [{ kind, policy, state, href }]. */
export async function lookUp({ get }, id, policy) {
    const names = policy
        ? [policy]
        : (await get("./policies", { limit: POLICIES })).policies.map((each) => each.policy);
    const found = await Promise.all(names.map((name) => inPolicy(get, name, id)));
    const batch = UUID.test(id) ? await get(`./batches/${id}`).catch(none) : null;
    const ofBatch = batch === null ? [] : [{ kind: "batch", policy: batch.policy, state: batch.state,
        href: batchHash(batch.policy, id) }];
    const all = [...found.flat(), ...ofBatch];
    if (all.length === 0) {
        const known = "names no rollout, group or batch of a current run";
        const detail = `${id} ${known}: it was never posted here, or is forgotten.`;
        throw new ApiError(404, { title: "Unknown id", detail }, null);
    }
    return all;
}
