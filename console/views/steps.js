// The optimizer steps of a policy: what the trainer did with its time, and what each step consumed.

import "../charts.js";
import { stepHash } from "../address.js";
import { attempts } from "../batch/columns.js";
import { badge, dataTable, time, untrusted } from "../elements.js";
import * as format from "../format.js";
import { reward } from "../group/columns.js";
import { html, nothing } from "../html.js";
import { pageQuery, pager } from "../listing.js";
import { band } from "../step/band.js";
import { readSteps } from "../step/read.js";

/**
 * @param {Pick<Context, "params"|"now">} context
 * @returns {Column<Step>[]}
 */
function columns(context) {
    const { policy } = context.params;
    return [
        {
            title: "step",
            number: true,
            cell: ({ step }) => html`<a data-row href=${stepHash(policy, step)}>${step}</a>`,
        },
        {
            title: "state",
            cell: ({ undone }) => (undone ? badge("warn", "↩", "undone") : badge("good", "●", "counts")),
        },
        { title: "batches", number: true, cell: ({ batches }) => format.count(batches) },
        {
            title: "groups",
            number: true,
            cell: ({ groups, flat_groups: flat }) => html`${format.count(groups)}${flat > 0
                ? html` <span class="quiet">${format.count(flat)} flat</span>` : nothing}`,
        },
        { title: "rollouts", number: true, cell: ({ rollouts }) => format.count(rollouts) },
        { title: "tokens", number: true, cell: ({ tokens }) => format.count(tokens) },
        { title: "trained", number: true, cell: ({ trained_tokens: trained }) => format.count(trained) },
        { title: "reward all", number: true, cell: ({ reward_all: all }) => reward(all) },
        { title: "of trained", number: true, cell: ({ reward_trained: trained }) => reward(trained) },
        {
            title: "stale mean / max",
            number: true,
            cell: ({ staleness_mean: mean, staleness_max: max }) => `${format.real(mean, 1)} / ${format.count(max)}`,
        },
        { title: "waited", number: true, cell: ({ waited_ms: waited }) => format.duration(waited) },
        { title: "held", number: true, cell: ({ held_ms: held }) => format.duration(held) },
        { title: "deliveries", number: true, cell: (row) => attempts(row.attempts, row.batches) },
        { title: "version", number: true, cell: ({ version }) => format.count(version) },
        { title: "epoch", number: true, cell: ({ epoch }) => format.count(epoch) },
        { title: "acked before", number: true, cell: ({ acked_at: at }) => time(at, context) },
    ];
}

/** @param {Context} context */
async function newest({ get, params: { policy } }) {
    const { steps: [first] } = await readSteps(get, policy, { order: "newest", limit: 10 });
    return first ?? null;
}

/** @type {(row: Step|null) => string|null} */
const name = (row) => (row === null ? null : `${row.step} ${row.epoch} ${row.undone}`);

/** @type {View<Schemas["PolicySteps"] & { newest: string|null }>} */
export const view = {
    title: ({ params }) => `${params.policy}: steps`,
    isSame: (before, after) => before.policy === after.policy && after.id === undefined,
    async load(context) {
        const { policy } = context.params;
        const [page, first] = await Promise.all([
            readSteps(context.get, policy, pageQuery(context.params)),
            newest(context),
        ]);
        return { ...page, newest: name(first) };
    },
    async peek(context) {
        const first = await newest(context);
        return name(first) === context.data.newest ? "" : `The newest step is ${first?.step} now.`;
    },
    render(context) {
        const { steps, next } = context.data;
        const { policy } = context.params;
        const rows = steps.filter(({ undone }) => !undone);
        return html`<h1>${untrusted(policy)} <span class="quiet">steps</span></h1>
            ${band(rows, context.numbers)}
            <section class="panel">
                ${steps.length === 0 ? html`<p>No step has been acked in this run.</p>` : dataTable({
                    caption: "Steps: what the trainer consumed. A resume undoes the steps after its checkpoint",
                    columns: columns(context),
                    rows: steps,
                    key: ({ step, epoch }) => `${step} ${epoch}`,
                    rowClass: ({ undone }) => (undone ? "undone" : ""),
                })}
                ${pager(context, { examined: steps.length, next })}
            </section>`;
    },
};
