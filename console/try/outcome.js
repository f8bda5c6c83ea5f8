// What a draft of filters would have done: three columns, what changes, and what to keep in mind.

import { groupHash, rolloutHash } from "../address.js";
import { copyButton, dataTable, idLink, notice, untrusted } from "../elements.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import { reward } from "../group/columns.js";
import { html, nothing } from "../html.js";
import { filters } from "./draft.js";

const COLUMNS = ["as_decided", "rules_now", "draft"];

/** Rewards of an example that are shown. */
const REWARDS = 16;

/** The names that any column has under a field, the most frequent first. */
function reasons(tried, field) {
    const names = new Set(COLUMNS.flatMap((column) => Object.keys(tried[column][field] ?? {})));
    const most = (name) => Math.max(...COLUMNS.map((column) => tried[column][field]?.[name] ?? 0));
    return [...names].sort((first, second) => most(second) - most(first));
}

const row = (tried, title, value) => ({ title, values: COLUMNS.map((column) => value(tried[column])) });

/** The rows of groups: [{ title, values: [as decided, by the rules now, by the draft] }]. */
export function groupRows({ groups }) {
    return [
        row(groups, "ready", ({ ready }) => ready),
        ...reasons(groups, "discarded").map((name) => row(groups, name, ({ discarded }) => discarded[name] ?? 0)),
        row(groups, "still waiting for rollouts", ({ open }) => open),
        row(groups, "cannot be judged", ({ unjudged }) => unjudged),
    ];
}

/** The rows of rollouts. */
export function rolloutRows({ rollouts }) {
    const named = (field) => reasons(rollouts, field).map((name) =>
        row(rollouts, `${field}: ${name}`, ({ [field]: found }) => found[name] ?? 0));
    return [
        row(rollouts, "kept", ({ kept }) => kept),
        ...named("masked"),
        ...named("dropped"),
        row(rollouts, "late", ({ late }) => late),
        row(rollouts, "cannot be judged", ({ unjudged }) => unjudged),
    ];
}

function table(caption, rows) {
    const shown = rows.filter(({ values }, index) => index === 0 || values.some((value) => value > 0));
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

const words = ({ state, reason }) => (reason === null ? state : html`${state}: ${untrusted(reason)}`);

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

function failures({ failed, unjudged }, policy) {
    return html`${failed.map(({ filter, count, message, rollout_id: rollout, group_id: group }) => notice("bad",
            html`<b>${untrusted(filter)}</b> could not be evaluated on ${plural(count, "record")}, where it does not
                match:
            ${untrusted(message)}, at ${rollout ? idLink(rolloutHash(policy, rollout), rollout)
                : idLink(groupHash(policy, group), group)}`))}
        ${unjudged.map(({ reason, rollouts }) => notice("warn", html`${plural(rollouts, "rollout")} cannot be judged:
            ${untrusted(reason)}`))}`;
}

function lookedAt({ looked_at: looked }) {
    const span = looked.from === null ? "" : `, decided ${format.day(looked.from)} to ${format.day(looked.to)}`;
    return html`<p>${plural(looked.groups, "group")}, ${plural(looked.rollouts, "rollout")}${span}
        ${looked.complete ? nothing : html`<b>There was no time or memory for all: the oldest are missing.</b>`}</p>`;
}

/** The command that sets the draft. */
export function curl(policy, draft) {
    const url = new URL(`./policies/${encodeURIComponent(policy)}`, document.baseURI).href;
    const body = JSON.stringify({ filter: filters(draft) }).replaceAll("'", "'\\''");
    return `curl -X PATCH '${url}' -H "authorization: Bearer $FOREBAY_KEY" ` +
        `-H 'content-type: application/merge-patch+json' -d '${body}'`;
}

/** The panel, after a try. */
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

