// What a draft of filters would have done, as rows of a table. Pure.

/** @type {Judged[]} */
const COLUMNS = ["as_decided", "rules_now", "draft"];

/**
 * The names that any column has under a field, the most frequent first.
 * @template {string} Field
 * @param {Record<Judged, Record<Field, Record<string, number>>>} tried
 * @param {Field} field
 */
function reasons(tried, field) {
    const names = new Set(COLUMNS.flatMap((column) => Object.keys(tried[column][field])));
    /** @param {string} name */
    const most = (name) => Math.max(...COLUMNS.map((column) => tried[column][field][name] ?? 0));
    return [...names].sort((first, second) => most(second) - most(first));
}

/**
 * @template Outcomes
 * @param {Record<Judged, Outcomes>} tried
 * @param {string} title
 * @param {(outcomes: Outcomes) => number} value
 * @returns {OutcomeRow}
 */
const row = (tried, title, value) => ({ title, values: COLUMNS.map((column) => value(tried[column])) });

/**
 * The rows of groups: [{ title, values: [as decided, by the rules now, by the draft] }].
 * @param {Pick<Tried, "groups">} result
 * @returns {OutcomeRow[]}
 */
export function groupRows({ groups }) {
    return [
        row(groups, "ready", ({ ready }) => ready),
        ...reasons(groups, "discarded").map((name) => row(groups, name, ({ discarded }) => discarded[name] ?? 0)),
        row(groups, "still waiting for rollouts", ({ open }) => open),
        row(groups, "cannot be judged", ({ unjudged }) => unjudged),
    ];
}

/**
 * The rows of rollouts.
 * @param {Pick<Tried, "rollouts">} result
 * @returns {OutcomeRow[]}
 */
export function rolloutRows({ rollouts }) {
    /** @param {"masked"|"dropped"} field */
    const named = (field) => reasons(rollouts, field).map((name) =>
        row(rollouts, `${field}: ${name}`, ({ [field]: found }) => found[name] ?? 0));
    return [
        row(rollouts, "kept", ({ kept }) => kept),
        ...named("masked"),
        ...named("dropped"),
        row(rollouts, "late", ({ late }) => late),
        row(rollouts, "cannot be judged", ({ unjudged }) => unjudged),
    ];
}
