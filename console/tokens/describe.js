// What is known of one token, as a line of text.

import * as format from "../format.js";
import { kindOf, versionsOf } from "./scale.js";

/** @type {Record<string, string>} */
const WORDS = {
    prompt: "prompt",
    masked: "mask 0",
    withheld: "mask 1 as sent, not trained as delivered",
    trained: "mask 1",
};

/**
 * 0.000041 -> "4.1e\u22125"
 * @param {number|null|undefined} value
 */
export function weight(value) {
    if (typeof value !== "number" || !Number.isFinite(value)) {
        return format.real(null);
    }
    const small = value !== 0 && Math.abs(value) < 0.01;
    return (small ? value.toExponential(1) : String(Number(value.toPrecision(3)))).replaceAll("-", "\u2212");
}

/** @param {number} value */
function logprob(value) {
    const share = Math.exp(value);
    return `logprob ${format.real(value)} (p ${share < 0.001 ? weight(share) : share.toFixed(3)})`;
}

/** @type {(value: unknown) => value is number} */
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** @param {TokenText} token */
function quoted({ text, kind }) {
    switch (kind) {
        case "text":
            return `"${format.visible(text).replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5")}"`;
        case "special":
            return `special "${format.visible(text)}"`;
        case "part":
            return "a part of the next character";
        default:
            return "not in the vocabulary";
    }
}

/**
 * The token at an index of a window: { title, lines }. `text` is that of `decode`, or null.
 * @param {TokenWindow} window
 * @param {number} index
 * @param {TokenText|null} text
 * @param {TokenFacts} facts
 * @returns {TokenCard}
 */
export function describe(window, index, text, facts) {
    const { from, tokens, loss_mask: sent, trained_mask: trained } = window;
    const kind = kindOf(sent[index], trained[index]);
    const title = `#${format.count(from + index)} · id ${tokens[index]}${text === null ? "" : ` · ${quoted(text)}`}`;
    const lines = [];
    /** @param {"logprobs"|"teacher_logprobs"|"values"|"advantages"} column */
    const of = (column) => window[column]?.[index];
    const first = [WORDS[kind]];
    if (kind !== "prompt" && window.logprobs) {
        const sampled = of("logprobs");
        first.push(isNumber(sampled) ? logprob(sampled) : "no logprob");
    }
    const teacher = of("teacher_logprobs");
    if (isNumber(teacher)) {
        first.push(`teacher ${logprob(teacher)}`);
    }
    lines.push(first.join(" · "));
    const second = [];
    if (kind === "trained" && isNumber(facts.advantage)) {
        second.push(`advantage ${format.signed(facts.advantage)}`);
    }
    if (kind === "trained" && isNumber(facts.weight)) {
        second.push(`weight ${weight(facts.weight)}`);
    }
    if (window.values && kind !== "prompt") {
        second.push(isNumber(of("values")) ? `value ${format.signed(of("values"), 3)}` : "no value");
    }
    if (kind === "trained" && isNumber(of("advantages"))) {
        second.push(`own advantage ${format.signed(of("advantages"), 3)}`);
    }
    const version = versionsOf(window)[index];
    if (version !== null) {
        second.push(`version ${version}`);
    }
    lines.push(second.join(" · "));
    return { title, lines };
}
