// One optimizer step: its batches, the lowest rewards among its rollouts, and its groups. It never changes by itself.

import { ApiError } from "../api.js";
import { hash, stepHash } from "../address.js";
import { columns } from "../batch/columns.js";
import { contents, readContents } from "../batch/contents.js";
import { badge, dataTable, untrusted } from "../elements.js";
import { plural } from "../format.js";
import { html, nothing } from "../html.js";

/** Pages of batches that are looked through for those of the step, from the newest on. */
const PAGES = 10;
const PAGE = 1000;

/**
 * The batches that the step consumed. Batches are cut in about the order of the steps.
 * @param {Context} context
 * @param {number} step
 */
async function readBatches({ get, params: { policy } }, step) {
    /** @type {Batch[]} */
    const found = [];
    /** @type {string|null} */
    let after = null;
    for (let page = 0; page < PAGES; page += 1) {
        /** @type {Schemas["BatchPage"]} */
        const answer = await get("./batches", { policy, after, limit: PAGE, order: after ? null : "newest" });
        found.push(...answer.batches.filter((batch) => batch.step === step));
        const steps = answer.batches.map((batch) => batch.step).filter((each) => each !== null);
        if (answer.next === null || steps.some((each) => each < step)) {
            break;
        }
        after = answer.next;
    }
    return found;
}

/** @type {(batch: Batch) => boolean} */
const isUndone = ({ state }) => state === "returned" || state === "leased";

/** @type {View<StepData, { sort: Sort|null }, OfOne>} */
export const view = {
    title: ({ params }) => `${params.policy}: step ${params.id}`,
    isSame: (before, after) => before.policy === after.policy && before.id === after.id,
    local: () => ({ sort: null }),
    keys: [
        { key: "[", help: "the step before", run: ({ params, go }) => go({ id: Math.max(0, Number(params.id) - 1) }) },
        { key: "]", help: "the next step", run: ({ params, go }) => go({ id: Number(params.id) + 1 }) },
    ],
    async load(context) {
        const step = Number(context.params.id);
        const batches = Number.isInteger(step) && step >= 0 ? await readBatches(context, step) : [];
        if (batches.length === 0) {
            const { policy, id } = context.params;
            const detail = `None of the newest batches of ${policy} was consumed by step ${id}.`;
            throw new ApiError(404, { title: "No such step", detail }, null);
        }
        return { batches, found: await readContents(context, batches.map(({ batch_id: id }) => id)) };
    },
    render(context) {
        const { batches, found } = context.data;
        const { policy, id } = context.params;
        const step = Number(id);
        return html`<h1>${untrusted(policy)} <span class="quiet">step</span> ${step}
                ${batches.every(isUndone) ? badge("warn", "↩", "undone") : nothing}</h1>
            <p class="row">${step === 0 ? nothing : html`<a href=${stepHash(policy, step - 1)}>Step ${step - 1}</a>`}
                <a href=${stepHash(policy, step + 1)}>Step ${step + 1}</a>
                <a href=${hash(`policies/${policy}/rollouts`, { step })}>all its rollouts</a></p>
            <section class="panel" aria-labelledby="batches-title">
                <h2 id="batches-title">${plural(batches.length, "batch", "batches")}</h2>
                ${dataTable({
                    caption: "What the step consumed",
                    columns: columns(context),
                    rows: batches,
                    key: ({ batch_id }) => batch_id,
                })}
            </section>
            ${contents(found, context)}`;
    },
};
