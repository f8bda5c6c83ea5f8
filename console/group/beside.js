// Siblings side by side: their messages in columns that scroll together, with what all have in common folded.

import { ApiError } from "../api.js";
import { rolloutHash } from "../address.js";
import { badge, idLink, kbd } from "../elements.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import { html, nothing, repeat } from "../html.js";
import { reward } from "./columns.js";
import { card, speaker } from "./message.js";

/** Messages of one rollout that are shown; the rest is on its screen. */
const MESSAGES = 60;

/** Messages of the common beginning that are shown when it is unfolded. */
const PREFIX = 20;

const by = (value, direction) => (rows) =>
    rows.toSorted((a, b) => format.compareReal(value(a), value(b), direction));

const highest = by((row) => row.reward, -1);

/** The best and the worst in turn, so that any number of columns shows both. */
function extremes(rows) {
    const left = highest(rows);
    const taken = [];
    while (left.length > 0) {
        taken.push(left.shift());
        // What has no reward is last in every order, so it is not the worst.
        const worst = left.findLastIndex(({ reward: value }) => value !== null);
        if (worst !== -1) {
            taken.push(...left.splice(worst, 1));
        }
    }
    return taken;
}

/** The orders of the columns. */
export const ORDERS = {
    "best and worst": extremes,
    "reward ↓": highest,
    "reward ↑": by((row) => row.reward, 1),
    "tokens ↓": by((row) => row.tokens, -1),
    "as they came": (rows) => rows,
};

/** The siblings of the columns: some of them, from `local.first` on. */
export function chosen({ siblings }, local) {
    const rows = ORDERS[local.order](siblings);
    const first = Math.min(local.first, Math.max(0, rows.length - 1));
    const shown = rows.slice(first, first + local.count);
    // The order decides which are shown; among them, the highest reward is on the left.
    return local.order === "best and worst" ? highest(shown) : shown;
}

/** Fetches the messages of the columns one after the other, and says so as they come. */
export async function fetchShown(context, data, local) {
    const { policy } = context.params;
    const { contents } = local;
    for (const { rollout_id: id } of chosen(data, local)) {
        // What failed is asked for again when the reader moves on.
        if (contents.has(id) && !contents.get(id).error) {
            continue;
        }
        contents.set(id, { isComing: true });
        const query = { policy, rollout_id: id, limit: 1, messages_limit: MESSAGES };
        try {
            const { messages } = await context.get("./trajectories/content", query);
            contents.set(id, { messages });
        } catch (error) {
            if (error?.name === "AbortError") {
                contents.delete(id);
                return;
            }
            contents.set(id, { error });
        }
        context.update({});
    }
}

/** How many messages are the same in all columns that have any. */
export function commonMessages(lists) {
    if (lists.length < 2) {
        return 0;
    }
    const [first, ...others] = lists;
    const same = (item, index) => {
        const text = JSON.stringify(item.message);
        return item.message !== null &&
            others.every((list) => list[index]?.message && JSON.stringify(list[index].message) === text);
    };
    const end = first.findIndex((item, index) => !same(item, index));
    return end === -1 ? first.length : end;
}

function refusal(error) {
    if (error instanceof ApiError && error.status === 403) {
        return "Messages are shown to keys with the role read or admin.";
    }
    if (error instanceof ApiError) {
        return `${error.title}: ${error.detail}`;
    }
    return error.message;
}

function column(row, common, mean, context) {
    const { local, params } = context;
    const { messages, error, isComing } = local.contents.get(row.rollout_id) ?? { isComing: true };
    const href = rolloutHash(params.policy, row.rollout_id);
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
            @scroll=${(event) => together(event, local)}>
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
const placed = new WeakMap();

function together({ currentTarget: moved }, { isTogether }) {
    if (placed.get(moved) === moved.scrollTop) {
        placed.delete(moved);
        return;
    }
    if (!isTogether) {
        return;
    }
    for (const other of moved.closest(".beside").querySelectorAll(".messages")) {
        if (other !== moved && other.scrollTop !== moved.scrollTop) {
            other.scrollTop = moved.scrollTop;
            placed.set(other, other.scrollTop);
        }
    }
}

function prefix(common, lists, context) {
    const { local } = context;
    if (common === 0) {
        return nothing;
    }
    const items = lists[0].slice(0, common);
    const roles = items.slice(0, 6).map(({ message, role }) => speaker(message, role)).join(", ");
    const open = (name) => {
        local.opened.add(name);
        context.update({});
    };
    const toggle = (event) => context.update({ isPrefixOpen: event.currentTarget.open });
    return html`<details class="panel" .open=${local.isPrefixOpen} @toggle=${toggle}>
        <summary>${plural(common, "message")} in common: ${roles}${common > 6 ? ", …" : ""}</summary>
        ${local.isPrefixOpen ? html`<div class="messages">${items.slice(0, PREFIX).map((item) =>
            card(item, { opened: local.opened, key: "common", open, href: "" }))}</div>` : nothing}
    </details>`;
}

/** Moves the columns by their number. */
export function turn(context, direction) {
    const { data, local } = context;
    if (data === null) {
        return;
    }
    const last = Math.max(0, data.siblings.length - local.count);
    const first = Math.min(Math.max(local.first + direction * local.count, 0), last);
    choose(context, { first });
}

function choose(context, changes) {
    context.update(changes);
    fetchShown(context, context.data, context.local);
}

/** The panel with its tools. */
export function beside(context) {
    const { data, local } = context;
    const { siblings } = data;
    if (siblings.length === 0) {
        return nothing;
    }
    const shown = chosen(data, local);
    const lists = shown.map((row) => local.contents.get(row.rollout_id)?.messages?.items).filter(Boolean);
    const common = local.isFolded ? commonMessages(lists) : 0;
    const isAll = local.count >= siblings.length;
    const check = (name) => (event) => context.update({ [name]: event.target.checked });
    return html`<section aria-labelledby="beside-title" class="beside">
        <div class="toolbar">
            <h2 id="beside-title">Side by side</h2>
            <label>order <select @change=${(event) => choose(context, { order: event.target.value, first: 0 })}>
                ${Object.keys(ORDERS).map((name) => html`<option .selected=${name === local.order}>${name}</option>`)}
            </select></label>
            <label>columns <select @change=${(event) => choose(context, { count: Number(event.target.value) })}>
                ${[2, 3, 4].map((count) => html`<option .selected=${count === local.count}>${count}</option>`)}
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
