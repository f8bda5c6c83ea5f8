// What lists have in common: filters that are part of the address, pages, and the remark that there is more by now.

import { hash, split } from "./address.js";
import * as format from "./format.js";
import { html, nothing } from "./html.js";
import { lookedThrough } from "./elements.js";

/** Rows of a page. */
export const PAGE = 100;

function field(context, { name, label, options }) {
    const value = context.params[name] ?? "";
    // A filter begins with the first page again.
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

/** Fields above a list: { name: parameter of the address, label, options }. */
export function filters(context, fields) {
    const isOldest = context.params.order === "oldest";
    const turn = (event) => context.go({ order: event.target.value, after: null });
    return html`<form class="toolbar" role="search" aria-label="Filters" @submit=${(event) => event.preventDefault()}>
        ${fields.map((each) => field(context, each))}
        <label>order <select @change=${turn}>
            <option value="" .selected=${!isOldest}>newest first</option>
            <option value="oldest" .selected=${isOldest}>oldest first</option>
        </select></label>
    </form>`;
}

/** The parameters of a page for the service. A cursor has its order. */
export function pageQuery({ after, order }) {
    return { after, limit: PAGE, order: after ? null : order === "oldest" ? "oldest" : "newest" };
}

/** Under a list: how much was looked through, and the ways to the next page and back to the first. */
export function pager({ params }, { examined, next }) {
    const { segments, query } = split(location.hash);
    const to = (after) => hash(segments.join("/"), { ...query, after });
    return html`<div class="row">${lookedThrough(examined, next, to(next))}
        ${params.after ? html`<a href=${to(null)}>First page</a>` : nothing}</div>`;
}

/** Whether a list has newer entries than the one that is shown: the sentence that says so, or "". */
export async function hasNewer({ get, params, data }, path, name, id) {
    if (params.after || params.order === "oldest") {
        return "";
    }
    const { [name]: [newest] } = await get(path, { policy: params.policy, order: "newest", limit: 1 });
    return newest !== undefined && newest[id] !== data.newest ? `There are newer ${name}.` : "";
}

/** The id of the newest entry of all, for `hasNewer`. */
export async function newestId({ get, params }, path, name, id) {
    const { [name]: [newest] } = await get(path, { policy: params.policy, order: "newest", limit: 1 });
    return newest?.[id] ?? null;
}

/** "3" or "3–5", for versions and rewards. */
export function range(least, most, show = format.count) {
    return least === most ? show(least) : `${show(least)} – ${show(most)}`;
}
