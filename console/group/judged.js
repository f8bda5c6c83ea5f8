// What the filters of a group saw, and which of them decided. Pure.

/**
 * Whether a rollout counts in the baseline of its group.
 * @type {(rollout: Pick<Rollout, "verdict">) => boolean}
 */
const votes = ({ verdict }) => verdict === "kept" || verdict === "masked";

/**
 * Mean, deviation (of the population) and range of the rewards that group filters see; null without any.
 * @param {Rollout[]} siblings
 * @returns {Statistics|null}
 */
export function statistics(siblings) {
    const rewards = siblings.filter(votes).map(({ reward: value }) => value).filter((value) => value !== null);
    if (rewards.length === 0) {
        return null;
    }
    const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
    const deviation = Math.sqrt(rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / rewards.length);
    return { count: rewards.length, mean, deviation, min: Math.min(...rewards), max: Math.max(...rewards) };
}

/**
 * The group filters up to the one that matched: [rule, whether it matched].
 * @param {Group} group
 * @param {Rules|null} rules
 * @returns {[rule: Filter, isMatch: boolean][]}
 */
export function judged(group, rules) {
    const filters = (rules?.filter ?? []).filter(({ scope }) => scope === "group");
    const at = filters.findIndex(({ name }) => name === group.reason);
    if (at === -1 && (group.state === "discarded" || group.state === "open")) {
        // A rule that is gone, a reason of the service or of an operator: nothing is known of the filters of now.
        return [];
    }
    const seen = at === -1 ? filters : filters.slice(0, at + 1);
    const judged = seen.filter(({ name }) => !group.failed_filters?.includes(name));
    return judged.map((rule) => [rule, rule.name === group.reason]);
}
