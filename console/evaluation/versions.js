// The versions that a suite has results of, as the page has read them so far. Pure.

/**
 * A new answer with the older versions that were known before it, because an answer has only the newest ones. If more
 * versions have passed than an answer has, there is a gap, and what is behind it is forgotten.
 * @param {Suite[]} answer
 * @param {Suite[]} known
 * @returns {Suite[]}
 */
export function joined(answer, known) {
    return answer.map((suite) => {
        const before = known.find((each) => each.suite === suite.suite);
        const last = suite.versions.at(-1)?.version;
        if (before === undefined || last === undefined || !before.versions.some(({ version }) => version >= last)) {
            return suite;
        }
        const older = before.versions.filter(({ version }) => version < last);
        return older.length === 0 ? suite : { ...suite, versions: [...suite.versions, ...older], more: before.more };
    });
}

/**
 * A suite with the versions that the reader has asked for besides. They begin where the others ended when he asked.
 * @param {Suite} suite
 * @param {OlderVersions|undefined} older
 * @returns {Suite}
 */
export function withOlder(suite, older) {
    if (older === undefined || older.before !== suite.versions.at(-1)?.version) {
        return suite;
    }
    return { ...suite, versions: [...suite.versions, ...older.versions], more: older.more };
}

/**
 * The version whose numbers stand below the curve: the newest complete one. If nobody has said how many tasks the suite
 * has, no version is complete, and the newest one stands there.
 * @param {Suite} suite
 * @returns {SuiteVersion|null}
 */
export function newest({ versions, tasks }) {
    return versions.find(({ complete }) => complete) ?? (tasks === null ? versions[0] ?? null : null);
}
