// What is known of one token, as a line of text.

import * as format from "../format.js";
import { kindOf, versionsOf } from "./scale.js";

const WORDS = {
    prompt: "prompt",
    masked: "mask 0",
    withheld: "mask 1 as sent, not trained as delivered",
    trained: "mask 1",
};

/** 0.000041 -> "4.1e\u22125" */
export function weight(value) {
    if (typeof value !== "number" || !Number.isFinite(value)) {
        return format.real(null);
    }
    const small = value !== 0 && Math.abs(value) < 0.01;
    return (small ? value.toExponential(1) : String(Number(value.toPrecision(3)))).replaceAll("-", "\u2212");
}

function logprob(value) {
    const share = Math.exp(value);
    return `logprob ${format.real(value)} (p ${share < 0.001 ? weight(share) : share.toFixed(3)})`;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** The token at an index of a window: { title, lines }. `text` is that of `decode`, or null. */
export function describe(window, index, text, facts) {
    const { from, tokens, loss_mask: sent, trained_mask: trained } = window;
    const kind = kindOf(sent[index], trained[index]);
    const quoted = {
        text: () => ` · "${format.visible(text.text).replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5")}"`,
        special: () => ` · special "${format.visible(text.text)}"`,
        part: () => " · a part of the next character",
        unknown: () => " · not in the vocabulary",
    };
    const title = `#${format.count(from + index)} · id ${tokens[index]}${text === null ? "" : quoted[text.kind]()}`;
    const lines = [];
    const of = (column) => window[column]?.[index];
    const first = [WORDS[kind]];
    if (kind !== "prompt" && window.logprobs) {
        first.push(isNumber(of("logprobs")) ? logprob(of("logprobs")) : "no logprob");
    }
    if (isNumber(of("teacher_logprobs"))) {
        first.push(`teacher ${logprob(of("teacher_logprobs"))}`);
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
    const version = versionsOf(window)[index];
    if (version !== null) {
        second.push(`version ${version}`);
    }
    lines.push(second.join(" · "));
    return { title, lines };
}
