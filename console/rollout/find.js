// Search in what the screen shows, with the highlights of the browser: the document stays as it is.

/** @typedef {{ node: Text, from: number }} Place */

/** Matches that are marked. */
const MATCHES_MAX = 1_000;

/**
 * The texts below an element as one text in lower case, and where each node begins in it.
 * @param {Iterable<Element>} roots
 */
function gather(roots) {
    /** @type {Place[]} */
    const nodes = [];
    let text = "";
    for (const root of roots) {
        const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
        for (let node = walker.nextNode(); node !== null; node = walker.nextNode()) {
            if (!(node instanceof Text)) {
                continue;
            }
            nodes.push({ node, from: text.length });
            // Lower case of one character can have two: such characters stay, so that places are the same.
            const lower = node.data.toLowerCase();
            text += lower.length === node.data.length ? lower : node.data;
        }
        text += "\n";
    }
    return { nodes, text };
}

/**
 * The node in which a place of the whole text lies.
 * @param {Place[]} nodes
 * @param {number} place
 */
function nodeAt(nodes, place) {
    let [low, high] = [0, nodes.length - 1];
    while (low < high) {
        const middle = Math.ceil((low + high) / 2);
        [low, high] = nodes[middle].from <= place ? [middle, high] : [low, middle - 1];
    }
    return nodes[low];
}

/**
 * The ranges of a text in elements, at most 1,000.
 * @param {Iterable<Element>} roots
 * @param {string} sought
 * @returns {StaticRange[]}
 */
export function matches(roots, sought) {
    const wanted = sought.toLowerCase();
    if (wanted === "") {
        return [];
    }
    const { nodes, text } = gather(roots);
    const found = [];
    for (let at = text.indexOf(wanted); at !== -1 && found.length < MATCHES_MAX; at = text.indexOf(wanted, at + 1)) {
        const first = nodeAt(nodes, at);
        const last = nodeAt(nodes, at + wanted.length - 1);
        const range = new StaticRange({
            startContainer: first.node,
            startOffset: Math.min(first.node.length, at - first.from),
            endContainer: last.node,
            endOffset: Math.min(last.node.length, at + wanted.length - last.from),
        });
        found.push(range);
    }
    return found;
}

/**
 * Marks matches, and one of them more than the others; brings that one into view.
 * @param {StaticRange[]} found
 * @param {number} current
 */
export function mark(found, current) {
    if (globalThis.Highlight !== undefined) {
        CSS.highlights.set("found", new Highlight(...found));
        CSS.highlights.set("found-here", new Highlight(...found.slice(current, current + 1)));
    }
    const range = found[current];
    if (range !== undefined) {
        range.startContainer.parentElement?.scrollIntoView({ block: "nearest" });
    }
}

/** Removes all marks. */
export function unmark() {
    globalThis.CSS?.highlights?.delete("found");
    globalThis.CSS?.highlights?.delete("found-here");
}
