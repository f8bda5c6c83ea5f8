// Small templates that several screens use.

import { html, nothing, ref, repeat } from "./html.js";
import * as format from "./format.js";

/**
 * The states of a policy: glyph and kind, so that no state is told by its colour alone. Worst first.
 * @type {Record<string, [glyph: string, kind: string]>}
 */
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

/**
 * A word on a coloured ground. `kind` is good, bad, warn, info or quiet.
 * @param {string} kind
 * @param {string} glyph
 * @param {unknown} text
 */
export function badge(kind, glyph, text) {
    return html`<span class="badge ${kind}"><span aria-hidden="true">${glyph}</span> ${text}</span>`;
}

/**
 * The states of groups and batches and the verdicts of rollouts: glyph and kind.
 * @type {Record<string, [glyph: string, kind: string]>}
 */
const LIVES = {
    open: ["○", "info"],
    ready: ["●", "good"],
    batched: ["◐", "good"],
    leased: ["◔", "info"],
    returned: ["↩", "warn"],
    trained: ["◐", "warn"],
    checkpointed: ["●", "good"],
    split: ["✂", "warn"],
    stale: ["◷", "warn"],
    discarded: ["▽", "quiet"],
    quarantined: ["■", "bad"],
    kept: ["●", "good"],
    masked: ["◍", "warn"],
    dropped: ["▽", "quiet"],
    late: ["◷", "quiet"],
};

/**
 * The state of a rollout, a group or a batch, or a verdict.
 * @param {string} state
 */
export function lifeBadge(state) {
    const [glyph, kind] = LIVES[state] ?? ["?", "quiet"];
    return badge(kind, glyph, state);
}

/**
 * The state of a policy; nothing if nobody has said it.
 * @param {string|null|undefined} state
 */
export function stateBadge(state) {
    if (!state) {
        return nothing;
    }
    const [glyph, kind] = STATES[state] ?? ["?", "quiet"];
    return badge(kind, glyph, state);
}

/**
 * Text that somebody else wrote: an id, a message, metadata.
 * @param {unknown} text
 */
export function untrusted(text) {
    return html`<bdi class="untrusted">${format.visible(text)}</bdi>`;
}

/**
 * A link to what an id names.
 * @param {string} href
 * @param {string} id
 */
export function idLink(href, id) {
    return html`<a class="mono" href=${href}>${untrusted(id)}</a>`;
}

/**
 * A moment as the time since then, with the moment itself as its title.
 * @param {string|null|undefined} moment
 * @param {Pick<Context, "now">} context
 */
export function time(moment, context) {
    if (!moment) {
        return format.ago(null, 0);
    }
    const title = `${format.day(moment)}, ${format.clockMs(moment)}`;
    return html`<time datetime=${moment} title=${title}>${format.ago(moment, context.now())}</time>`;
}

/**
 * A key of the keyboard.
 * @param {string} key
 */
export function kbd(key) {
    return html`<kbd>${key}</kbd>`;
}

/**
 * A remark with a coloured edge.
 * @param {string} kind
 * @param {unknown} content
 */
export function notice(kind, content) {
    return html`<p class="notice ${kind}">${content}</p>`;
}

/**
 * Names and values: facts([["reward", "1.0"]]). Values may be templates.
 * @param {unknown[][]} pairs
 */
export function facts(pairs) {
    return html`<dl class="facts">
        ${pairs.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>`;
}

/**
 * Rows in the order that the reader chose: { by: index of a column with `value(row)`, direction: 1 or -1 }.
 * @template Row
 * @param {Row[]} rows
 * @param {Column<Row>[]} columns
 * @param {Sort|null} sort
 * @returns {Row[]}
 */
export function sorted(rows, columns, sort) {
    const value = sort ? columns[sort.by]?.value : undefined;
    return sort && value ? rows.toSorted((a, b) => format.compareReal(value(a), value(b), sort.direction)) : rows;
}

/**
 * @template Row
 * @param {Column<Row>} column
 * @param {number} index
 * @param {{ sort: Sort|null, onSort: ((sort: Sort) => void)|null }} order
 */
function heading(column, index, { sort, onSort }) {
    if (!column.value || !onSort) {
        return html`<th scope="col" class=${column.number ? "number" : ""}>${column.title}</th>`;
    }
    const isSorted = sort?.by === index;
    const way = isSorted ? (sort.direction > 0 ? "ascending" : "descending") : nothing;
    const glyph = isSorted ? (sort.direction > 0 ? " ↑" : " ↓") : "";
    const choose = () => onSort({ by: index, direction: isSorted ? -sort.direction : -1 });
    return html`<th scope="col" class=${column.number ? "number" : ""} aria-sort=${way}>
        <button type="button" class="plain" @click=${choose}>${column.title}<span aria-hidden="true">${glyph}</span>
        </button></th>`;
}

/**
 * A table that scrolls sideways in its own box. With `onSort`, columns that have a `value` can be sorted by their
 * headings.
 * @template Row
 * @param {DataTable<Row>} table
 */
export function dataTable({ caption, columns, rows, key, rowClass = () => "", sort = null, onSort = null }) {
    /** @param {Column<Row>} column */
    const kind = (column) => (column.number ? "number" : (column.kind ?? ""));
    /** @param {Row} item */
    const row = (item) => html`<tr class=${rowClass(item)}>
        ${columns.map((column) => html`<td class=${kind(column)}>${column.cell(item)}</td>`)}
    </tr>`;
    return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
        <table data-rows>
            <caption class="quiet">${caption}</caption>
            <thead>
                <tr>${columns.map((column, index) => heading(column, index, { sort, onSort }))}</tr>
            </thead>
            <tbody>${repeat(sorted(rows, columns, sort), key, row)}</tbody>
        </table>
    </div>`;
}

/**
 * Under a list whose page examined a bounded number of rows: how many, and the link to look further.
 * @param {number} examined
 * @param {string|null|undefined} next
 * @param {string} more
 */
export function lookedThrough(examined, next, more) {
    if (!next) {
        return html`<p class="quiet">Looked through ${format.count(examined)}: there are no more.</p>`;
    }
    return html`<p class="quiet">Looked through ${format.count(examined)}. <a href=${more}>Look further</a></p>`;
}

/**
 * @param {HTMLElement} button
 * @param {string} text
 */
function select(button, text) {
    const field = button.parentElement?.querySelector("input");
    if (!field) {
        return;
    }
    field.value = text;
    field.hidden = false;
    field.focus();
    field.select();
}

/**
 * A button that copies a text, or the text that a function makes when the button is pressed. Without the clipboard of
 * the browser, which plain HTTP does not have, the text appears in a field, selected.
 * @param {string|(() => string)} text
 * @param {string} label
 */
export function copyButton(text, label = "Copy") {
    /** @param {On<HTMLButtonElement>} event */
    const copy = async ({ currentTarget: button }) => {
        const copied = typeof text === "function" ? text() : text;
        try {
            await navigator.clipboard.writeText(copied);
            button.textContent = "Copied";
        } catch {
            select(button, copied);
        }
    };
    /** @param {On<HTMLButtonElement>} event */
    const blur = ({ currentTarget: button }) => {
        if (button.textContent === "Copied") {
            button.textContent = label;
        }
    };
    return html`<span class="copy">
        <button type="button" @click=${copy} @blur=${blur} ${ref((button) => {
            button.textContent = label;
        })}></button>
        <input hidden readonly aria-label="Text to copy">
    </span>`;
}
