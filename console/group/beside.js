// Siblings side by side: their messages in columns that scroll together, with what all have in common folded.

import { ApiError, isAborted, message } from "../api.js";
import { rolloutHash } from "../address.js";
import { badge, idLink, kbd } from "../elements.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import { html, nothing, repeat } from "../html.js";
import { reward } from "./columns.js";
import { card, speaker } from "./message.js";
import { chosen, commonMessages, ORDERS } from "./order.js";

/** Messages of one rollout that are shown; the rest is on its screen. */
const MESSAGES = 60;

/** Messages of the common beginning that are shown when it is unfolded. */
const PREFIX = 20;

/**
 * Fetches the messages of the columns one after the other, and says so as they come.
 * @param {Context<any, GroupLocal>} context
 * @param {GroupData} data
 * @param {GroupLocal} local
 */
export async function fetchShown(context, data, local) {
    const { policy } = context.params;
    const { contents } = local;
    for (const { rollout_id: id } of chosen(data, local)) {
        // What failed is asked for again when the reader moves on.
        const before = contents.get(id);
        if (before && !before.error) {
            continue;
        }
        contents.set(id, { isComing: true });
        const query = { policy, rollout_id: id, limit: 1, messages_limit: MESSAGES };
        try {
            const { messages } = await context.get("./trajectories/content", query);
            contents.set(id, { messages });
        } catch (error) {
            if (isAborted(error)) {
                contents.delete(id);
                return;
            }
            contents.set(id, { error });
        }
        context.update({});
    }
}

/** @param {unknown} error */
function refusal(error) {
    if (error instanceof ApiError && error.status === 403) {
        return "Messages are shown to keys with the role read or admin.";
    }
    if (error instanceof ApiError) {
        return `${error.title}: ${error.detail}`;
    }
    return message(error);
}

/**
 * @param {Rollout} row
 * @param {number} common
 * @param {number|null} mean
 * @param {GroupContext} context
 */
function column(row, common, mean, context) {
    const { local, params } = context;
    const { messages, error, isComing } = local.contents.get(row.rollout_id) ?? { isComing: true };
    const href = rolloutHash(params.policy, row.rollout_id);
    /** @param {string} name */
    const open = (name) => {
        local.opened.add(name);
        context.update({});
    };
    const isGood = row.reward !== null && mean !== null && row.reward >= mean;
    const items = messages?.items.slice(common) ?? [];
    const rest = messages ? messages.count - messages.items.length : 0;
    return html`<section class="panel sibling" aria-label=${`rollout ${format.visible(row.rollout_id)}`}>
        <h3><span class="id">${idLink(href, row.rollout_id)}</span>
            ${row.reward === null ? badge("quiet", "?", "no reward")
                : badge(isGood ? "good" : "bad", isGood ? "▲" : "▽", `reward ${reward(row.reward)}`)}
            <span class="quiet">A ${format.signed(row.advantage)} · ${row.status ?? "no status"}
                ${row.verdict === "kept" ? nothing : `· ${row.verdict}`}</span></h3>
        <div class="messages" tabindex="0" role="region" aria-label=${`messages of ${format.visible(row.rollout_id)}`}
            @scroll=${(/** @type {On<Element>} */ event) => together(event, local)}>
            ${isComing ? html`<p class="quiet" role="status">Loading</p>` : nothing}
            ${error ? html`<p class="quiet">${format.visible(refusal(error))}</p>` : nothing}
            ${messages === null ? html`<p class="quiet">The agent sent no messages.</p>` : nothing}
            ${messages && items.length === 0 && rest === 0
                ? html`<p class="quiet">Nothing but what all have in common.</p>` : nothing}
            ${items.map((item) => card(item, { opened: local.opened, key: row.rollout_id, open, href }))}
            ${rest > 0 ? html`<p><a href=${href}>${plural(rest, "further message")}</a></p>` : nothing}
        </div>
    </section>`;
}

// The place that this page has given to a column: its event is not the reader's.
/** @type {WeakMap<Element, number>} */
const placed = new WeakMap();

/**
 * @param {On<Element>} event
 * @param {GroupLocal} local
 */
function together({ currentTarget: moved }, { isTogether }) {
    if (placed.get(moved) === moved.scrollTop) {
        placed.delete(moved);
        return;
    }
    if (!isTogether) {
        return;
    }
    for (const other of moved.closest(".beside")?.querySelectorAll(".messages") ?? []) {
        if (other !== moved && other.scrollTop !== moved.scrollTop) {
            other.scrollTop = moved.scrollTop;
            placed.set(other, other.scrollTop);
        }
    }
}

/**
 * @param {number} common
 * @param {ChatItem[][]} lists
 * @param {GroupContext} context
 */
function prefix(common, lists, context) {
    const { local } = context;
    if (common === 0) {
        return nothing;
    }
    const items = lists[0].slice(0, common);
    const roles = items.slice(0, 6).map(({ message, role }) => speaker(message, role)).join(", ");
    /** @param {string} name */
    const open = (name) => {
        local.opened.add(name);
        context.update({});
    };
    /** @param {On<HTMLDetailsElement>} event */
    const toggle = (event) => context.update({ isPrefixOpen: event.currentTarget.open });
    return html`<details class="panel" .open=${local.isPrefixOpen} @toggle=${toggle}>
        <summary>${plural(common, "message")} in common: ${roles}${common > 6 ? ", …" : ""}</summary>
        ${local.isPrefixOpen ? html`<div class="messages">${items.slice(0, PREFIX).map((item) =>
            card(item, { opened: local.opened, key: "common", open, href: "" }))}</div>` : nothing}
    </details>`;
}

/**
 * Moves the columns by their number.
 * @param {Context<GroupData|null, GroupLocal, any>} context
 * @param {number} direction
 */
export function turn(context, direction) {
    const { data, local } = context;
    if (data === null) {
        return;
    }
    const last = Math.max(0, data.siblings.length - local.count);
    const first = Math.min(Math.max(local.first + direction * local.count, 0), last);
    choose(context, data, { first });
}

/**
 * @param {Context<GroupData|null, GroupLocal, any>} context
 * @param {GroupData} data
 * @param {Partial<GroupLocal>} changes
 */
function choose(context, data, changes) {
    context.update(changes);
    fetchShown(context, data, context.local);
}

/**
 * The panel with its tools.
 * @param {GroupContext} context
 */
export function beside(context) {
    const { data, local } = context;
    const { siblings } = data;
    if (siblings.length === 0) {
        return nothing;
    }
    const shown = chosen(data, local);
    const lists = shown.flatMap((row) => {
        const items = local.contents.get(row.rollout_id)?.messages?.items;
        return items ? [items] : [];
    });
    const common = local.isFolded ? commonMessages(lists) : 0;
    const isAll = local.count >= siblings.length;
    /** @param {"isTogether"|"isFolded"} name */
    const check = (name) => (/** @type {On<HTMLInputElement>} */ event) =>
        context.update({ [name]: event.target.checked });
    /** @param {On<HTMLSelectElement>} event */
    const order = (event) => choose(context, data, { order: event.target.value, first: 0 });
    /** @param {On<HTMLSelectElement>} event */
    const count = (event) => choose(context, data, { count: Number(event.target.value) });
    return html`<section aria-labelledby="beside-title" class="beside">
        <div class="toolbar">
            <h2 id="beside-title">Side by side</h2>
            <label>order <select @change=${order}>
                ${Object.keys(ORDERS).map((name) => html`<option .selected=${name === local.order}>${name}</option>`)}
            </select></label>
            <label>columns <select @change=${count}>
                ${[2, 3, 4].map((each) => html`<option .selected=${each === local.count}>${each}</option>`)}
            </select></label>
            <label><input type="checkbox" .checked=${local.isTogether} @change=${check("isTogether")}>scroll
                together</label>
            <label><input type="checkbox" .checked=${local.isFolded} @change=${check("isFolded")}>fold what all have in
                common</label>
            ${isAll ? nothing : html`<span>
                <button type="button" ?disabled=${local.first === 0} @click=${() => turn(context, -1)}>Previous</button>
                ${local.first + 1}–${Math.min(local.first + local.count, siblings.length)} of ${siblings.length}
                <button type="button" ?disabled=${local.first + local.count >= siblings.length}
                    @click=${() => turn(context, 1)}>Next</button>
                ${kbd("[")} ${kbd("]")}</span>`}
        </div>
        ${prefix(common, lists, context)}
        <div class="columns of-${shown.length}">${repeat(shown, ({ rollout_id: id }) => id, (row) =>
            column(row, common, data.mean, context))}</div>
    </section>`;
}
