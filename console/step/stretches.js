// What a trainer did with its time. Pure.

/** @typedef {[kind: "training"|"waiting"|"neither", from: number, to: number]} Stretch */

/** Steps of a band: more of them are narrower than a pixel. */
const STEPS = 60;

/**
 * What the trainer did when, from steps in any order: [kind, from, to] in milliseconds, without overlaps.
 * @param {Step[]} steps
 * @returns {Stretch[]}
 */
export function stretches(steps) {
    const newest = steps
        .filter(({ waited_ms: waited, held_ms: held }) => waited !== null && held !== null)
        .toSorted((a, b) => Date.parse(a.acked_at) - Date.parse(b.acked_at))
        .slice(-STEPS);
    /** @type {Stretch[]} */
    const found = [];
    /** @type {number|null} */
    let reached = null;
    /** @type {(...stretch: Stretch) => void} */
    const add = (kind, from, to) => {
        // Two trainers, and two batches of a step, overlap: a moment is counted once.
        const begin = reached === null ? from : Math.max(from, reached);
        if (to > begin) {
            if (reached !== null && begin > reached) {
                found.push(["neither", reached, begin]);
            }
            found.push([kind, begin, to]);
            reached = to;
        }
    };
    for (const { acked_at: acked, held_ms: held, waited_ms: waited } of newest) {
        const end = Date.parse(acked);
        add("waiting", end - held - waited, end - held);
        add("training", end - held, end);
    }
    return found;
}

/**
 * The shares of the band's time by kind.
 * @param {Stretch[]} found
 * @returns {Record<Stretch[0], number|null>}
 */
export function shares(found) {
    const sums = { training: 0, waiting: 0, neither: 0 };
    for (const [kind, from, to] of found) {
        sums[kind] += to - from;
    }
    const total = sums.training + sums.waiting + sums.neither;
    /** @param {number} sum */
    const share = (sum) => (total > 0 ? sum / total : null);
    return { training: share(sums.training), waiting: share(sums.waiting), neither: share(sums.neither) };
}
