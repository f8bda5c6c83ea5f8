// The steps of a policy, newest first.

/** { steps, next }. */
export function readSteps(get, policy, query) {
    return get(`./policies/${encodeURIComponent(policy)}/steps`, query);
}
