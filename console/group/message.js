// One chat message in a narrow column: who speaks, and the text. The screen of its rollout shows more of it.

import { jsonText } from "../chat/json.js";
import { readMessage } from "../chat/messages.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";

/** Who speaks, by the names that data sets give. */
const KINDS = new Map([["assistant", "assistant"], ["agent", "assistant"], ["gpt", "assistant"], ["model", "assistant"],
    ["tool", "tool"], ["function", "tool"], ["ipython", "tool"]]);

/** Characters that are shown before the reader asks for more, and after. */
const SHORT = 3_000;
const LONG = 100_000;

/** The parts of one message that are shown at most. */
const PARTS = 50;

const LABEL = 64;

/**
 * A part as [label, text].
 * @param {Part} part
 * @returns {[label: string, text: string]}
 */
function written(part) {
    switch (part.kind) {
        case "text":
            return ["", part.text];
        case "reasoning":
            return ["reasoning", part.text];
        case "call":
            return [`calls ${part.name || "a tool"}`, part.text ?? jsonText(part.value).text];
        case "image":
            return ["image", format.bytes(part.bytes)];
        case "upload":
            return ["image", part.digest.slice(0, 12)];
        case "link":
            return ["image elsewhere", part.text];
        default:
            return ["JSON", jsonText(part.value).text];
    }
}

/**
 * The parts of a message as [label, text].
 * @param {unknown} message
 * @returns {[label: string, text: string][]}
 */
export function parts(message) {
    const { parts: found, rest } = readMessage(message);
    const all = found.map(written);
    if (rest !== undefined) {
        all.push(["further fields", jsonText(rest).text]);
    }
    return all;
}

/**
 * Who speaks: "tool · python". `role` is that of a message that the service left out.
 * @param {unknown} message
 * @param {string|null|undefined} role
 */
export function speaker(message, role = null) {
    const read = message === null ? { role, name: null } : readMessage(message);
    const names = [read.role ?? "message", read.name].filter((name) => name !== null);
    return names.map((name) => format.visible(name.slice(0, LABEL))).join(" · ");
}

/**
 * @param {string} label
 * @param {string} text
 * @param {boolean} isOpen
 * @param {() => void} open
 */
function body(label, text, isOpen, open) {
    const limit = isOpen ? LONG : SHORT;
    const rest = text.length - limit;
    return html`${label === "" ? nothing : html`<p class="part">${format.visible(label.slice(0, LABEL))}</p>`}
        <div class="untrusted words" dir="auto">${format.visible(text.slice(0, limit))}</div>
        ${rest <= 0 ? nothing : html`<p class="quiet">${format.count(rest)} more characters
            ${isOpen ? "are in the rollout" : html`<button type="button" @click=${open}>Show</button>`}</p>`}`;
}

/**
 * One message of a column. `opened` has the messages whose whole text is shown.
 * @param {ChatItem} item
 * @param {{ opened: Set<string>, key: string, open: (name: string) => void, href: string }} place
 */
export function card({ index, message, role, bytes }, { opened, key, open, href }) {
    const name = `${key}/${index}`;
    const speaks = message === null ? role : readMessage(message).role;
    const kind = KINDS.get(speaks ?? "") ?? "other";
    const found = message === null ? [] : parts(message);
    return html`<article class="message ${kind}">
        <h4><bdi>${speaker(message, role)}</bdi></h4>
        ${message === null ? html`<p class="quiet">${format.bytes(bytes)}: too long for this place, it is
            <a href=${href}>in the rollout</a></p>` : nothing}
        ${found.slice(0, PARTS).map(([label, text]) => body(label, text, opened.has(name), () => open(name)))}
        ${found.length > PARTS
            ? html`<p class="quiet">and ${format.plural(found.length - PARTS, "part")}</p>`
            : nothing}
    </article>`;
}
