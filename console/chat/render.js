// Messages of a rollout as a chat. Everything in them is hostile: it is shown as text, with control characters visible
// and its direction isolated, and nothing of it is fetched, linked or taken for markup.

import { copyButton, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing, repeat } from "../html.js";
import { jsonText } from "./json.js";
import { readMessage } from "./messages.js";

/** Characters of a text that are shown at first, and more with each press of the button. */
const TEXT_FIRST = 20_000;
const TEXT_MORE = 200_000;

/** Parts of all messages of a page, so that the page stays quick. */
const PAGE_PARTS_MAX = 1_000;

const LABEL_MAX = 80;

const ROLES = ["system", "developer", "user", "assistant", "tool"];
/**
 * Other names for the same roles.
 * @type {Record<string, string>}
 */
const ALIASES = { human: "user", gpt: "assistant", model: "assistant", function: "tool" };

/**
 * The beginning of a text, which does not end within a character.
 * @param {string} text
 * @param {number} length
 */
function cut(text, length) {
    const code = text.charCodeAt(length - 1);
    return text.slice(0, code >= 0xd800 && code <= 0xdbff ? length - 1 : length);
}

/** @type {(text: string) => string} */
const label = (text) => (text.length > LABEL_MAX ? `${cut(text, LABEL_MAX)}…` : text);

/**
 * A text of any length: its beginning, and a button for more.
 * @param {string} text
 * @param {string} key
 * @param {ChatContext} context
 * @param {string} kind
 */
function longText(text, key, context, kind = "") {
    const length = context.local.lengths[key] ?? TEXT_FIRST;
    const isWhole = text.length <= length;
    const more = () => context.update({ lengths: { ...context.local.lengths, [key]: length + TEXT_MORE } });
    return html`<div class="said ${kind}" dir="auto">${untrusted(isWhole ? text : cut(text, length))}</div>
        ${isWhole ? nothing : html`<p class="quiet">${format.short(length)} of ${format.short(text.length)} characters.
            <button type="button" @click=${more}>Show more</button></p>`}`;
}

/**
 * Something that is made when the reader opens it.
 * @param {unknown} summary
 * @param {string} key
 * @param {ChatContext} context
 * @param {() => unknown} content
 */
export function fold(summary, key, context, content) {
    const isOpen = context.local.open.has(key);
    /** @param {On<HTMLDetailsElement>} event */
    const toggled = ({ currentTarget: details }) => {
        if (details.open !== isOpen) {
            const open = new Set(context.local.open);
            open[details.open ? "add" : "delete"](key);
            context.update({ open });
        }
    };
    return html`<details .open=${isOpen} @toggle=${toggled}><summary>${summary}</summary>
        ${isOpen ? content() : nothing}</details>`;
}

/**
 * JSON, folded.
 * @param {string} title
 * @param {unknown} value
 * @param {string} key
 * @param {ChatContext} context
 */
export function jsonFold(title, value, key, context) {
    return fold(title, key, context, () => {
        const { text, isWhole } = jsonText(value);
        return html`<pre class="json" dir="ltr" tabindex="0">${format.visible(text)}</pre>
            ${isWhole ? nothing : html`<p class="quiet">The JSON is longer or deeper than what is shown.</p>`}`;
    });
}

/**
 * @param {{ url: string, bytes: number }} part
 * @param {string} key
 * @param {ChatContext} context
 */
function image({ url, bytes }, key, context) {
    return fold(`Image, ${format.bytes(bytes)}: show it`, key, context, () =>
        html`<img class="sent" alt="Image of the message" src=${url}>`);
}

/**
 * An image that the service has, which is fetched when the reader wants it.
 * @param {string} digest
 * @param {ChatContext} context
 * @param {ChatActions} actions
 */
function upload(digest, context, actions) {
    const found = context.local.images.get(digest);
    if (found?.url !== undefined) {
        return html`<img class="sent" alt="Image of the message" src=${found.url}>`;
    }
    return html`<p class="said quiet">Image ${digest.slice(0, 12)}.
        <button type="button" ?disabled=${found?.isComing} @click=${() => actions.showImage(digest)}>Show it</button>
        ${found?.error === undefined ? nothing : format.visible(found.error)}</p>`;
}

/**
 * @param {Extract<Part, { kind: "call" }>} part
 * @param {string} key
 * @param {ChatContext} context
 */
function call(part, key, context) {
    const id = part.id === "" ? nothing : html` <span class="quiet">${format.visible(label(part.id))}</span>`;
    return html`<div class="call"><p class="mono"><span class="quiet">calls</span>
            <b><bdi>${format.visible(label(part.name) || "a tool")}</bdi></b>${id}</p>
        ${part.text === null
            ? jsonFold("arguments", part.value, key, context)
            : longText(part.text, key, context, "mono")}
    </div>`;
}

/**
 * @param {Part} part
 * @param {string} key
 * @param {ChatContext} context
 * @param {ChatActions} actions
 */
function partOf(part, key, context, actions) {
    switch (part.kind) {
        case "text":
            return longText(part.text, key, context);
        case "reasoning":
            return html`<div class="reasoning"><p class="quiet">reasoning</p>
                ${longText(part.text, key, context)}</div>`;
        case "call":
            return call(part, key, context);
        case "image":
            return image(part, key, context);
        case "upload":
            return upload(part.digest, context, actions);
        case "link":
            return html`<div class="said quiet">An image elsewhere, which is not fetched: ${longText(part.text, key,
                context)}</div>`;
        default:
            return jsonFold("JSON", part.value, key, context);
    }
}

/**
 * @param {Pick<Message, "role"|"name">} message
 * @param {number} index
 */
function heading({ role, name }, index) {
    const named = name === null ? nothing : html` · <bdi>${format.visible(label(name))}</bdi>`;
    return html`<h3><bdi>${role === null ? "no role" : format.visible(label(role))}</bdi>${named}
        <span class="quiet">#${format.count(index)}</span></h3>`;
}

/** @type {(role: string|null) => string} */
const kindOf = (role) => {
    const named = role ?? "";
    const known = Object.hasOwn(ALIASES, named) ? ALIASES[named] : named;
    return ROLES.includes(known) ? known : "other";
};

/**
 * A message that the service left out, because it is long.
 * @param {ChatItem} item
 * @param {ChatContext} context
 * @param {ChatActions} actions
 */
function omitted(item, context, actions) {
    const show = () => actions.showMessage(item.index);
    return html`<article class="message ${kindOf(item.role ?? null)}">
        ${heading({ role: item.role ?? null, name: null }, item.index)}
        <p>This message has ${format.bytes(item.bytes)}.
            <button type="button" ?disabled=${context.local.asking.has(item.index)} @click=${show}>Show it</button></p>
    </article>`;
}

/** @param {unknown} message */
function textOf(message) {
    const { parts } = readMessage(message);
    const texts = parts.map((part) => ("text" in part ? part.text : null));
    return texts.length > 0 && texts.every((text) => text !== null) ? texts.join("\n") : jsonText(message).text;
}

/**
 * @param {ChatItem} item
 * @param {{ left: number }} budget
 * @param {ChatContext} context
 * @param {ChatActions} actions
 */
function shown(item, budget, context, actions) {
    const message = readMessage(item.message);
    const parts = message.parts.slice(0, Math.max(1, budget.left));
    budget.left -= parts.length;
    const hidden = message.hidden + message.parts.length - parts.length;
    /** @param {string|number} name */
    const key = (name) => `${item.index}/${name}`;
    return html`<article class="message ${kindOf(message.role)}">
        <div class="row">${heading(message, item.index)}<span class="spring"></span>
            ${copyButton(() => textOf(item.message))}</div>
        ${parts.map((part, index) => partOf(part, key(index), context, actions))}
        ${parts.length === 0 ? html`<p class="quiet">no content</p>` : nothing}
        ${hidden > 0 ? jsonFold(`${format.plural(hidden, "more part")}: the message as JSON`, item.message, key("all"),
            context) : nothing}
        ${message.rest === undefined ? nothing : jsonFold(`more fields`, message.rest, key("rest"), context)}
    </article>`;
}

/**
 * @param {ChatPage} messages
 * @param {ChatActions} actions
 */
function pages({ count, from, items, next }, actions) {
    const to = from + items.length;
    if (from === 0 && next === null) {
        return nothing;
    }
    /**
     * @param {string} text
     * @param {number|null} target
     */
    const button = (text, target) => html`<button type="button" ?disabled=${target === null}
        @click=${() => actions.turn(target)}>${text}</button>`;
    return html`<p class="toolbar"><span>messages ${format.count(from + 1)} to ${format.count(to)} of
            ${format.count(count)}</span>
        ${button("First", from === 0 ? null : 0)} ${button("Next", next)}</p>`;
}

/** @type {{ about: unknown[], made: unknown }} */
let last = { about: [], made: null };

/**
 * The messages of the page. `actions` has `turn(from)` and `showMessage(index)`. The texts may have a megabyte, so
 * what was made of them is used again while nothing that it depends on has changed.
 * @param {ChatPage} messages
 * @param {ChatContext} context
 * @param {ChatActions} actions
 */
export function chat(messages, context, actions) {
    const { lengths, open, asking, images, messages: opened } = context.local;
    const about = [messages, context.params, lengths, open, asking, images, opened];
    if (last.made === null || about.some((each, index) => each !== last.about[index])) {
        last = { about, made: drawn(messages, context, actions) };
    }
    return last.made;
}

/**
 * @param {ChatPage} messages
 * @param {ChatContext} context
 * @param {ChatActions} actions
 */
function drawn(messages, context, actions) {
    const budget = { left: PAGE_PARTS_MAX };
    /** @param {ChatItem} item */
    const one = (item) => {
        const opened = context.local.messages.get(item.index);
        const message = item.message === null ? opened : item;
        return message === undefined ? omitted(item, context, actions) : shown(message, budget, context, actions);
    };
    // The budget is spent in the order of the messages, so they are not rendered lazily.
    const rendered = messages.items.map((item) => [item.index, one(item)]);
    return html`${pages(messages, actions)}
        <div class="chat">${repeat(rendered, ([index]) => index, ([, template]) => template)}</div>
        ${messages.items.length > 20 ? pages(messages, actions) : nothing}`;
}
