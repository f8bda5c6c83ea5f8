// Small templates that several screens use.

import { html, ref, repeat } from "./html.js";
import * as format from "./format.js";

/** The states of a policy: glyph and kind, so that no state is told by its colour alone. Worst first. */
export const STATES = {
    broken: ["✖", "bad"],
    stuck: ["■", "bad"],
    starved: ["▼", "bad"],
    untaken: ["△", "warn"],
    "held-back": ["▮", "warn"],
    stale: ["◷", "warn"],
    flat: ["≈", "warn"],
    dropping: ["▽", "warn"],
    fed: ["●", "good"],
    idle: ["○", "quiet"],
};

/** A word on a coloured ground. `kind` is good, bad, warn, info or quiet. */
export function badge(kind, glyph, text) {
    return html`<span class="badge ${kind}"><span aria-hidden="true">${glyph}</span> ${text}</span>`;
}

/** The state of a policy. */
export function stateBadge(state) {
    const [glyph, kind] = STATES[state] ?? ["?", "quiet"];
    return badge(kind, glyph, state);
}

/** Text that somebody else wrote: an id, a message, metadata. */
export function untrusted(text) {
    return html`<bdi class="untrusted">${format.visible(text)}</bdi>`;
}

/** A link to what an id names. */
export function idLink(href, id) {
    return html`<a class="mono" href=${href}>${untrusted(id)}</a>`;
}

/** A moment as the time since then, with the moment itself as its title. */
export function time(moment, context) {
    if (!moment) {
        return format.ago(null, 0);
    }
    return html`<time datetime=${moment} title=${`${format.day(moment)}, ${format.clockMs(moment)}`}>
        ${format.ago(moment, context.now())}</time>`;
}

/** A key of the keyboard. */
export function kbd(key) {
    return html`<kbd>${key}</kbd>`;
}

/** A remark with a coloured edge. */
export function notice(kind, content) {
    return html`<p class="notice ${kind}">${content}</p>`;
}

/** Names and values: facts([["reward", "1.0"]]). Values may be templates. */
export function facts(pairs) {
    return html`<dl class="facts">
        ${pairs.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>`;
}

/**
 * A table that scrolls sideways in its own box. `columns` are { title, cell(row), number }; `key` gives the key of a
 * row, so that a poll moves rows and does not rewrite them. `rowClass` is optional.
 */
export function dataTable({ caption, columns, rows, key, rowClass = () => "" }) {
    const kind = (column) => (column.number ? "number" : "");
    const row = (item) => html`<tr class=${rowClass(item)}>
        ${columns.map((column) => html`<td class=${kind(column)}>${column.cell(item)}</td>`)}
    </tr>`;
    return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
        <table data-rows>
            <caption class="quiet">${caption}</caption>
            <thead>
                <tr>${columns.map((column) => html`<th scope="col" class=${kind(column)}>${column.title}</th>`)}</tr>
            </thead>
            <tbody>${repeat(rows, key, row)}</tbody>
        </table>
    </div>`;
}

/** Under a list whose page examined a bounded number of rows: how many, and the link to look further. */
export function lookedThrough(examined, next, more) {
    if (!next) {
        return html`<p class="quiet">Looked through ${format.count(examined)}: there are no more.</p>`;
    }
    return html`<p class="quiet">Looked through ${format.count(examined)}. <a href=${more}>Look further</a></p>`;
}

function select(button, text) {
    const field = button.parentElement.querySelector("input");
    field.value = text;
    field.hidden = false;
    field.focus();
    field.select();
}

/**
 * A button that copies a text, or the text that a function makes when the button is pressed. Without the clipboard of
 * the browser, which plain HTTP does not have, the text appears in a field, selected.
 */
export function copyButton(text, label = "Copy") {
    const copy = async ({ currentTarget: button }) => {
        const copied = typeof text === "function" ? text() : text;
        try {
            await navigator.clipboard.writeText(copied);
            button.textContent = "Copied";
        } catch {
            select(button, copied);
        }
    };
    const blur = ({ currentTarget: button }) => {
        if (button.textContent === "Copied") {
            button.textContent = label;
        }
    };
    return html`<span class="copy">
        <button type="button" @click=${copy} @blur=${blur} ${ref((button) => (button.textContent = label))}></button>
        <input hidden readonly aria-label="Text to copy">
    </span>`;
}
