// One chat message in a narrow column: who speaks, and the text. Every shape is possible, and every text is hostile.

import * as format from "../format.js";
import { html, nothing } from "../html.js";

/** Characters that are shown before the reader asks for more, and after. */
const SHORT = 3_000;
const LONG = 100_000;

/** The parts of one message that are shown at most. */
const PARTS = 50;

/** Who speaks, by the names that data sets give. */
const KINDS = new Map([["assistant", "assistant"], ["agent", "assistant"], ["gpt", "assistant"], ["model", "assistant"],
    ["tool", "tool"], ["function", "tool"], ["ipython", "tool"]]);

const isObject = (value) => value !== null && typeof value === "object";

/** What is not known is shown as JSON. */
function json(value) {
    return JSON.stringify(value, null, 1) ?? "";
}

function ofPart(part) {
    if (typeof part === "string") {
        return ["", part];
    }
    if (isObject(part) && typeof part.text === "string") {
        return [part.type === "text" ? "" : String(part.type ?? ""), part.text];
    }
    if (isObject(part) && typeof part.thinking === "string") {
        return ["reasoning", part.thinking];
    }
    return [isObject(part) ? String(part.type ?? "") : "", json(part)];
}

function ofCall(call) {
    const { name, arguments: sent } = isObject(call?.function) ? call.function : (call ?? {});
    if (typeof name !== "string") {
        return ["tool call", json(call)];
    }
    return [`tool call ${name}`, typeof sent === "string" ? sent : json(sent)];
}

/** The parts of a message as [label, text]. */
export function parts(message) {
    if (!isObject(message) || Array.isArray(message)) {
        return [["", json(message)]];
    }
    const found = [];
    const { role, name, content, tool_calls: calls, ...rest } = message;
    for (const key of ["reasoning_content", "reasoning", "thinking"]) {
        if (typeof rest[key] === "string" && rest[key] !== "") {
            found.push(["reasoning", rest[key]]);
            delete rest[key];
        }
    }
    if (Array.isArray(content)) {
        found.push(...content.map(ofPart));
    } else if (content !== null && content !== undefined && content !== "") {
        found.push(["", typeof content === "string" ? content : json(content)]);
    }
    if (Array.isArray(calls)) {
        found.push(...calls.map(ofCall));
    }
    delete rest.tool_call_id;
    if (Object.keys(rest).length > 0) {
        found.push(["further fields", json(rest)]);
    }
    return found;
}

/** Who speaks: "tool · python". */
export function speaker(message, role = null) {
    const known = isObject(message) ? message : {};
    const names = [known.role ?? role ?? "message", known.name].filter((name) => typeof name === "string");
    return names.map((name) => format.visible(name.slice(0, 64))).join(" · ");
}

function body(label, text, isOpen, open) {
    const limit = isOpen ? LONG : SHORT;
    const rest = text.length - limit;
    return html`${label === "" ? nothing : html`<p class="part">${format.visible(label.slice(0, 64))}</p>`}
        <div class="untrusted words">${format.visible(text.slice(0, limit))}</div>
        ${rest <= 0 ? nothing : html`<p class="quiet">${format.count(rest)} more characters
            ${isOpen ? "are in the rollout" : html`<button type="button" @click=${open}>Show</button>`}</p>`}`;
}

/** One message of a column. `opened` has the messages whose whole text is shown. */
export function card({ index, message, role, bytes }, { opened, key, open, href }) {
    const kind = KINDS.get(message?.role ?? role) ?? "other";
    const name = `${key}/${index}`;
    const found = message === null ? [] : parts(message);
    return html`<article class="message ${kind}">
        <h4>${speaker(message, role)}</h4>
        ${message === null ? html`<p class="quiet">${format.bytes(bytes)}: too long for this place, it is
            <a href=${href}>in the rollout</a></p>` : nothing}
        ${found.slice(0, PARTS).map(([label, text]) => body(label, text, opened.has(name), () => open(name)))}
        ${found.length > PARTS ? html`<p class="quiet">and ${format.plural(found.length - PARTS, "part")}</p>` : nothing}
    </article>`;
}
