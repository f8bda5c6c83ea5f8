// The session that recorded a rollout: its calls, and where a prompt did not continue what was recorded.

import { badge, dataTable, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";

/** Calls that are shown. */
const CALLS_MAX = 500;

/** @type {Record<string, string>} */
const CAUSES = {
    system: "the tools, the template's arguments or a system message differ",
    rewrite: "the content of a message differs",
    reasoning: "the reasoning of an answer was dropped or changed",
    arguments: "a tool call's arguments are the same JSON in another spelling",
    tokens: "the same text has other ids",
};

/** @param {Schemas["SessionTurn"]} turn */
function divergence({ break: found }) {
    if (!found) {
        return nothing;
    }
    /**
     * @param {string|null|undefined} text
     * @param {number[]} ids
     */
    const side = (text, ids) => (text === undefined ? html`<code>${ids.join(" ")}</code>` : untrusted(text));
    return html`${badge("warn", "✂", "break")} after ${format.count(found.position)} tokens of call ${found.nearest}:
        ${CAUSES[found.cause] ?? "the reason is not known"}. Expected ${side(found.expected_text, found.expected)},
        found ${side(found.found_text, found.found)}`;
}

/** @type {Column<Schemas["SessionTurn"]>[]} */
const columns = [
    { title: "call", number: true, cell: ({ seq }) => String(seq) },
    { title: "agent", cell: ({ agent, model }) => untrusted(agent ?? model) },
    { title: "prompt", number: true, cell: ({ prompt_tokens: tokens }) => format.count(tokens) },
    { title: "sampled", number: true, cell: ({ sampled_tokens: tokens }) => format.count(tokens) },
    {
        title: "took",
        number: true,
        cell: ({ started_at: from, ended_at: to }) => format.duration(Date.parse(to) - Date.parse(from)),
    },
    { title: "finish", cell: ({ finish_reason: reason }) => untrusted(reason) },
    {
        title: "outcome",
        cell: ({ outcome, delivered, retry_count: retries }) => html`${format.visible(outcome)}${delivered
            ? nothing : ", not delivered"}${retries > 0 ? `, repeated ${format.count(retries)}×` : nothing}`,
    },
    { title: "break", cell: divergence },
];

/**
 * The panel; nothing without a session.
 * @param {Surroundings} around
 */
export function sessionPanel({ session }) {
    if (session === null) {
        return nothing;
    }
    const shown = session.turns.slice(0, CALLS_MAX);
    const breaks = session.assembly ? ` · ${format.plural(session.assembly.breaks, "break")}` : "";
    const attempts = session.attempt > 1 ? ` · ${format.plural(session.attempt, "attempt")}` : "";
    const rest = session.turns.length > shown.length ? ` The first ${format.count(shown.length)} are shown.` : "";
    return html`<section class="panel" aria-labelledby="session-title">
        <h2 id="session-title">recorded session <span class="mono">${session.session_id}</span> · ${session.state} ·
            ${format.plural(session.calls, "call")}${breaks}${attempts}</h2>
        ${session.reason ? html`<p>${untrusted(session.reason)}</p>` : nothing}
        ${shown.length === 0
            ? html`<p class="quiet">The calls themselves are deleted some time after a session has ended.</p>`
            : dataTable({
                caption: `The agent's calls in the order in which they were recorded.${rest}`,
                columns,
                rows: shown,
                key: ({ seq }) => seq,
            })}
    </section>`;
}
