// JSON as indented text, for values of any depth and size: JSON.stringify recurses, and its indentation of deep values
// is larger than any text that a reader wants.

/** Levels that are indented. What is deeper is left out. */
const DEPTH_MAX = 64;

/** Characters of the text. */
export const JSON_TEXT_MAX = 200_000;

/** Characters of one text in it. */
const STRING_MAX = 20_000;

/** @param {unknown} value */
function scalar(value) {
    if (typeof value === "string" && value.length > STRING_MAX) {
        return `${JSON.stringify(value.slice(0, STRING_MAX))}… (${value.length} characters)`;
    }
    return JSON.stringify(value) ?? "null";
}

/** @type {(value: unknown) => value is object} */
const isNested = (value) => typeof value === "object" && value !== null;

/**
 * { text, isWhole }
 * @param {unknown} value
 * @returns {{ text: string, isWhole: boolean }}
 */
export function jsonText(value) {
    /** @type {string[]} */
    const lines = [];
    let length = 0;
    let isWhole = true;
    /**
     * @param {number} depth
     * @param {string} text
     */
    const write = (depth, text) => {
        lines.push(`${"  ".repeat(depth)}${text}`);
        length += text.length + 2 * depth + 1;
    };
    // What is still to be written, the next at the end: a value with what stands before and behind it, or a mark that
    // closes one.
    /** @type {{ value?: unknown, close?: string, depth: number, before: string, after: string }[]} */
    const rest = [{ value, depth: 0, before: "", after: "" }];
    for (let entry = rest.pop(); entry !== undefined; entry = rest.pop()) {
        const { value: next, close, depth, before, after } = entry;
        if (length > JSON_TEXT_MAX) {
            isWhole = false;
            break;
        }
        if (close !== undefined) {
            write(depth, close + after);
        } else if (!isNested(next)) {
            write(depth, before + scalar(next) + after);
        } else {
            const [open, shut] = Array.isArray(next) ? "[]" : "{}";
            const members = Array.isArray(next) ? next : Object.keys(next);
            if (members.length === 0) {
                write(depth, before + open + shut + after);
            } else if (depth >= DEPTH_MAX) {
                isWhole = false;
                write(depth, `${before}${open} … ${shut}${after}`);
            } else {
                write(depth, before + open);
                rest.push({ close: shut, depth, before: "", after });
                // No more than what can be shown, so that a list of millions is not copied.
                const shown = members.slice(0, JSON_TEXT_MAX / 2);
                for (const [index, member] of [...shown.entries()].reverse()) {
                    rest.push({
                        value: Array.isArray(next) ? member : /** @type {Json} */ (next)[member],
                        depth: depth + 1,
                        before: Array.isArray(next) ? "" : `${scalar(member)}: `,
                        after: index === members.length - 1 ? "" : ",",
                    });
                }
            }
        }
    }
    const text = lines.join("\n");
    return { text: text.slice(0, JSON_TEXT_MAX), isWhole: isWhole && text.length <= JSON_TEXT_MAX };
}
