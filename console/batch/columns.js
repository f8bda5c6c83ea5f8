// The columns of lists of batches.

import { batchHash, stepHash } from "../address.js";
import { lifeBadge, time, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { reward } from "../group/columns.js";

/** @type {(batch: Batch, name: string) => number|null} */
const metric = (batch, name) => batch.metrics[name] ?? null;

/**
 * The staleness at the cut: mean and most.
 * @param {Pick<Batch, "metrics">} batch
 */
export function staleness({ metrics }) {
    const [mean, most] = [metrics["staleness/mean"], metrics["staleness/max"]];
    return mean === undefined ? format.count(null) : `${format.real(mean, 1)} / ${format.count(most)}`;
}

/**
 * More deliveries than batches are marked: something went wrong before.
 * @param {number} number
 * @param {number} batches
 */
export function attempts(number, batches = 1) {
    return number > batches ? html`<b class="marked">${number}</b>` : format.count(number);
}

/**
 * A batch that a resume has brought back was consumed by a step that does not count any more.
 * @type {(batch: Batch) => boolean}
 */
export const isUndone = ({ state, step }) => step !== null && (state === "returned" || state === "leased");

/**
 * Columns for batches of a policy.
 * @param {Pick<Context, "params"|"now">} context
 * @returns {Column<Batch>[]}
 */
export function columns(context) {
    const { policy } = context.params;
    return [
        {
            title: "batch",
            cell: ({ batch_id: id }) => html`<a data-row class="mono short" href=${batchHash(policy, id)} title=${id}>
                ${format.shortId(id)}</a>`,
        },
        { title: "state", cell: ({ state }) => lifeBadge(state) },
        {
            title: "step",
            number: true,
            cell: (batch) => (batch.step === null ? format.count(null) : html`<a
                class=${isUndone(batch) ? "undone" : ""}
                href=${stepHash(policy, batch.step)}>${batch.step}</a>`),
        },
        { title: "consumer", cell: ({ consumer }) => (consumer ? untrusted(consumer) : nothing) },
        { title: "groups", number: true, cell: ({ groups }) => format.count(groups) },
        { title: "rollouts", number: true, cell: ({ rollouts }) => format.count(rollouts) },
        { title: "tokens", number: true, cell: ({ tokens }) => format.count(tokens) },
        { title: "reward all", number: true, cell: (batch) => reward(metric(batch, "reward/all")) },
        { title: "trained", number: true, cell: (batch) => reward(metric(batch, "reward/trained")) },
        { title: "stale mean / max", number: true, cell: staleness },
        { title: "waited", number: true, cell: ({ waited_ms: waited }) => format.duration(waited) },
        { title: "held", number: true, cell: ({ held_ms: held }) => format.duration(held) },
        { title: "attempt", number: true, cell: ({ attempt }) => attempts(attempt) },
        { title: "version", number: true, cell: ({ policy_version: { current } }) => format.count(current) },
        { title: "cut before", number: true, cell: ({ created_at: at }) => time(at, context) },
        { title: "given back because", kind: "prose", cell: ({ reason }) => (reason ? untrusted(reason) : nothing) },
    ];
}
