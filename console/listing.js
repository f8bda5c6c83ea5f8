// What lists have in common: filters that are part of the address, pages, and the remark that there is more by now.

import { hash, split } from "./address.js";
import * as format from "./format.js";
import { html, nothing } from "./html.js";
import { lookedThrough } from "./elements.js";

/** Rows of a page. */
export const PAGE = 100;

/**
 * @param {Context} context
 * @param {ListFilter} filter
 */
function field(context, { name, label, options }) {
    const value = context.params[name] ?? "";
    // A filter begins with the first page again.
    /** @param {On<HTMLInputElement>} event */
    const choose = (event) => context.go({ [name]: event.target.value.trim(), after: null });
    if (options) {
        return html`<label>${label} <select @change=${choose}>
            <option value="" .selected=${value === ""}>any</option>
            ${options.map((option) => html`<option .selected=${option === value}>${option}</option>`)}
        </select></label>`;
    }
    return html`<label>${label} <input type="search" autocomplete="off" spellcheck="false" .value=${value}
        @change=${choose}></label>`;
}

/**
 * Fields above a list: { name: parameter of the address, label, options }.
 * @param {Context} context
 * @param {ListFilter[]} fields
 */
export function filters(context, fields) {
    const isOldest = context.params.order === "oldest";
    /** @param {On<HTMLSelectElement>} event */
    const turn = (event) => context.go({ order: event.target.value, after: null });
    /** @param {Event} event */
    const submit = (event) => event.preventDefault();
    return html`<form class="toolbar" role="search" aria-label="Filters" @submit=${submit}>
        ${fields.map((each) => field(context, each))}
        <label>order <select @change=${turn}>
            <option value="" .selected=${!isOldest}>newest first</option>
            <option value="oldest" .selected=${isOldest}>oldest first</option>
        </select></label>
    </form>`;
}

/**
 * The parameters of a page for the service. A cursor has its order.
 * @param {Params} params
 */
export function pageQuery({ after, order }) {
    return { after, limit: PAGE, order: after ? null : order === "oldest" ? "oldest" : "newest" };
}

/**
 * Under a list: how much was looked through, and the ways to the next page and back to the first.
 * @param {Context} context
 * @param {{ examined: number, next?: string|null }} page
 */
export function pager({ params }, { examined, next }) {
    const { segments, query } = split(location.hash);
    /** @param {string|null|undefined} after */
    const to = (after) => hash(segments.join("/"), { ...query, after });
    return html`<div class="row">${lookedThrough(examined, next, to(next))}
        ${params.after ? html`<a href=${to(null)}>First page</a>` : nothing}</div>`;
}

/**
 * Whether a list has newer entries than the one that is shown: the sentence that says so, or "".
 * @param {Context} context
 * @param {string} name
 * @param {(context: Context) => Promise<string|null>} newest gives the id of the newest entry
 */
export async function hasNewer(context, name, newest) {
    const { params, data } = context;
    if (params.after || params.order === "oldest") {
        return "";
    }
    const id = await newest(context);
    return id !== null && id !== data.newest ? `There are newer ${name}.` : "";
}

/**
 * "3" or "3–5", for versions and rewards.
 * @param {number} least
 * @param {number} most
 * @param {(value: number) => string} show
 */
export function range(least, most, show = format.count) {
    return least === most ? show(least) : `${show(least)} – ${show(most)}`;
}
