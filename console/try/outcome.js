// What a draft of filters would have done: three columns, what changes, and what to keep in mind.

import { groupHash, rolloutHash } from "../address.js";
import { copyButton, dataTable, idLink, notice, untrusted } from "../elements.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import { reward } from "../group/columns.js";
import { html, nothing } from "../html.js";
import { filters } from "./draft.js";
import { groupRows, rolloutRows } from "./rows.js";

/** Rewards of an example that are shown. */
const REWARDS = 16;

/**
 * @param {string} caption
 * @param {OutcomeRow[]} rows
 */
function table(caption, rows) {
    const shown = rows.filter(({ values }, index) => index === 0 || values.some((value) => value > 0));
    /** @type {(title: string, cell: (row: OutcomeRow) => unknown) => Column<OutcomeRow>} */
    const number = (title, cell) => ({ title, number: true, cell });
    return dataTable({
        caption,
        columns: [
            { title: "outcome", cell: ({ title }) => untrusted(title) },
            number("as decided", ({ values }) => format.count(values[0])),
            number("the rules now", ({ values }) => format.count(values[1])),
            number("the draft", ({ values }) => html`<b>${format.count(values[2])}</b>`),
            number("change", ({ values: [, now, draft] }) => (draft === now ? "" : format.signed(draft - now, 0))),
        ],
        rows: shown,
        key: ({ title }) => title,
    });
}

/** @type {(outcome: Schemas["TriedOutcome"]) => unknown} */
const words = ({ state, reason }) => (reason === null ? state : html`${state}: ${untrusted(reason)}`);

/**
 * @param {Tried} result
 * @param {string} policy
 */
function examples({ changes, changed_groups: changed }, policy) {
    if (changes.length === 0) {
        return html`<p><b>The draft decides every group as the rules do now.</b></p>`;
    }
    return html`<h3>${plural(changed, "group")} would be decided differently from the rules now</h3>
        ${dataTable({
            caption: changed > changes.length ? `The newest ${changes.length}` : "All of them",
            columns: [
                {
                    title: "group",
                    cell: ({ group_id: id }) => html`<span class="id">${idLink(groupHash(policy, id), id)}</span>`,
                },
                {
                    title: "rewards",
                    cell: ({ rewards }) => html`<span class="mono">${rewards.slice(0, REWARDS).map(reward).join(" ")}
                        ${rewards.length > REWARDS ? "…" : ""}</span>`,
                },
                { title: "was", cell: ({ was }) => words(was) },
                { title: "the rules now", cell: ({ now }) => words(now) },
                { title: "the draft", cell: ({ would_be: would }) => words(would) },
            ],
            rows: changes,
            key: ({ group_id: id }) => id,
        })}`;
}

/**
 * @param {Tried} result
 * @param {string} policy
 */
function failures({ failed, unjudged }, policy) {
    return html`${failed.map(({ filter, count, message, rollout_id: rollout, group_id: group }) => notice("bad",
            html`<b>${untrusted(filter)}</b> could not be evaluated on ${plural(count, "record")}, where it does not
                match:
            ${untrusted(message)}, at ${rollout ? idLink(rolloutHash(policy, rollout), rollout)
                : idLink(groupHash(policy, group), group)}`))}
        ${unjudged.map(({ reason, rollouts }) => notice("warn", html`${plural(rollouts, "rollout")} cannot be judged:
            ${untrusted(reason)}`))}`;
}

/** @param {Tried} result */
function lookedAt({ looked_at: looked }) {
    const span = looked.from === null ? "" : `, decided ${format.day(looked.from)} to ${format.day(looked.to)}`;
    return html`<p>${plural(looked.groups, "group")}, ${plural(looked.rollouts, "rollout")}${span}
        ${looked.complete ? nothing : html`<b>There was no time or memory for all: the oldest are missing.</b>`}</p>`;
}

/**
 * The command that sets the draft.
 * @param {string} policy
 * @param {Draft[]} draft
 */
export function curl(policy, draft) {
    const url = new URL(`./policies/${encodeURIComponent(policy)}`, document.baseURI).href;
    const body = JSON.stringify({ filter: filters(draft) }).replaceAll("'", "'\\''");
    return `curl -X PATCH '${url}' -H "authorization: Bearer $FOREBAY_KEY" ` +
        `-H 'content-type: application/merge-patch+json' -d '${body}'`;
}

/**
 * The panel, after a try.
 * @param {Pick<TryLocal, "result"|"tried">} local
 * @param {string} policy
 */
export function outcome({ result, tried }, policy) {
    if (result === null) {
        return html`<p class="quiet">What the draft would have done to the groups that were decided last. Nothing is
            changed by it.</p>`;
    }
    if (result.looked_at.groups === 0) {
        return html`<p>There are no decided groups to try it on.</p>`;
    }
    return html`${lookedAt(result)}
        ${table("What became of the groups", groupRows(result))}
        ${table("What became of their rollouts", rolloutRows(result))}
        ${result.notes.map(({ text }) => notice("warn", format.visible(text)))}
        ${failures(result, policy)}
        ${examples(result, policy)}
        <div class="toolbar">
            ${copyButton(() => JSON.stringify(filters(tried), null, 2), "Copy as JSON")}
            ${copyButton(() => curl(policy, tried), "Copy as curl")}
            <span class="quiet">setting it takes a key of the role admin</span>
        </div>`;
}
