// Where the cursor goes in a row of things.

/** Tokens that Page Up and Page Down pass. */
const PAGE = 50;

/**
 * The next place for a key, or null for another key. -1 is a place before the first.
 * @param {string} key
 * @param {number} at
 * @param {number} count
 */
export function moved(key, at, count) {
    /** @type {Record<string, number>} */
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -PAGE, PageDown: PAGE };
    if (count === 0) {
        return null;
    }
    if (key === "Home") {
        return 0;
    }
    if (key === "End") {
        return count - 1;
    }
    return Object.hasOwn(steps, key) ? Math.min(count - 1, Math.max(0, at + steps[key])) : null;
}
