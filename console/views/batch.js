// One batch: what became of its leases, the weights at the cut, and its groups. It never changes by itself.

import { attempts, isUndone, staleness } from "../batch/columns.js";
import { contents, readContents } from "../batch/contents.js";
import { stepHash, whyHash } from "../address.js";
import { copyButton, facts, lifeBadge, time, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { range } from "../listing.js";
import { reward } from "../group/columns.js";

const none = format.count(null);

/**
 * @param {string|null|undefined} at
 * @param {Pick<Context, "now">} context
 */
const moment = (at, context) =>
    (at ? html`${format.day(at)} <span class="quiet">(${time(at, context)} ago)</span>` : none);

/**
 * @param {Batch} batch
 * @param {Context} context
 */
function lease(batch, context) {
    const { state, consumer, attempt, reason, step, expires_at: expires } = batch;
    const consumed = step === null ? none : html`<a class=${isUndone(batch) ? "undone" : ""}
        href=${stepHash(batch.policy, step)}>${step}</a>${isUndone(batch)
            ? " before a resume brought it back" : nothing}`;
    return facts([
        ["last holder", consumer ? untrusted(consumer) : none],
        ["delivery", attempts(attempt)],
        ["waited for it", format.duration(batch.waited_ms)],
        ["held", format.duration(batch.held_ms)],
        ["lease expires", state === "leased" && expires ? format.day(expires) : none],
        ["given back because", reason ? untrusted(reason) : none],
        ["cut", moment(batch.created_at, context)],
        ["acked", moment(batch.acked_at, context)],
        ["step", consumed],
        ["epoch of the last lease", batch.epoch],
    ]);
}

/**
 * @param {Batch} batch
 * @param {Rules|null} rules
 */
function weights({ metrics, policy_version: version, ...batch }, rules) {
    const { min, max, current } = version;
    return facts([
        ["version at the cut", format.count(current)],
        ["versions of trained tokens", min === null || max === null ? none : range(min, max)],
        ["staleness mean / max", staleness({ metrics })],
        ["reward of all rollouts", reward(metrics["reward/all"] ?? null)],
        ["reward of trained rollouts", reward(metrics["reward/trained"] ?? null)],
        ["rollouts", format.count(batch.rollouts)],
        ["rows of samples", format.count(batch.samples)],
        ["tokens", format.count(batch.tokens)],
        ...(rules === null ? [] : [["loss weighting now", rules.loss_weighting]]),
    ]);
}

/** @param {Batch} batch */
function others({ metrics }) {
    const known = ["reward/", "staleness/"];
    const rest = Object.entries(metrics).filter(([name]) => !known.some((start) => name.startsWith(start)));
    return rest.length === 0 ? nothing : html`<section class="panel"><h2>Further numbers for the trainer's log</h2>
        ${facts(rest.map(([name, value]) => [untrusted(name), format.real(value, Number.isInteger(value) ? 0 : 3)]))}
    </section>`;
}

/** @type {View<BatchData, { sort: Sort|null }, OfOne>} */
export const view = {
    title: ({ params }) => `batch ${format.shortId(params.id)}`,
    isSame: (before, after) => before.policy === after.policy && before.id === after.id,
    local: () => ({ sort: null }),
    async load(context) {
        const { policy, id } = context.params;
        const [batch, found, policy_] = await Promise.all([
            context.get(`./batches/${encodeURIComponent(id)}`),
            readContents(context, [id]),
            context.get(`./policies/${encodeURIComponent(policy)}`),
        ]);
        return { batch, found, rules: policy_.rules };
    },
    async peek({ get, params, data }) {
        const { state } = await get(`./batches/${encodeURIComponent(params.id)}`);
        return state === data.batch.state ? "" : `The batch is ${state} now.`;
    },
    render(context) {
        const { batch, found, rules } = context.data;
        return html`<h1>batch <span class="mono">${format.shortId(batch.batch_id)}</span> ${lifeBadge(batch.state)}
                ${copyButton(batch.batch_id, "Copy the id")}
                <a href=${whyHash(batch.batch_id, batch.policy)}>why</a></h1>
            <div class="grid-2">
                <section class="panel" aria-labelledby="lease-title"><h2 id="lease-title">Leases</h2>
                    ${lease(batch, context)}</section>
                <section class="panel" aria-labelledby="weights-title"><h2 id="weights-title">Contents and weights</h2>
                    ${weights(batch, rules)}</section>
            </div>
            ${contents(found, context)}
            ${others(batch)}`;
    },
};
