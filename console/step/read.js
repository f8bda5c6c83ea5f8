// The steps of a policy, newest first.

/**
 * { steps, next }.
 * @param {Get} get
 * @param {string} policy
 * @param {Query<`./policies/${string}/steps`>} query
 */
export function readSteps(get, policy, query) {
    return get(`./policies/${encodeURIComponent(policy)}/steps`, query);
}
