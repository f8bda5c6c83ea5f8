// The batches of a policy, newest first.

import { columns } from "../batch/columns.js";
import { dataTable, untrusted } from "../elements.js";
import { html } from "../html.js";
import { filters, hasNewer, pageQuery, pager } from "../listing.js";

const STATES = ["leased", "returned", "trained", "checkpointed", "quarantined", "split", "discarded"];

/** @param {Context} context */
async function newestId({ get, params: { policy } }) {
    const { batches: [newest] } = await get("./batches", { policy, order: "newest", limit: 1 });
    return newest?.batch_id ?? null;
}

/** @type {View<Schemas["BatchPage"] & { newest: string|null }>} */
export const view = {
    title: ({ params }) => `${params.policy}: batches`,
    isSame: (before, after) => before.policy === after.policy && after.id === undefined,
    async load(context) {
        const { policy, state } = context.params;
        const [page, newest] = await Promise.all([
            context.get("./batches", { policy, state, ...pageQuery(context.params) }),
            newestId(context),
        ]);
        return { ...page, newest };
    },
    peek: (context) => hasNewer(context, "batches", newestId),
    render(context) {
        const { batches } = context.data;
        return html`<h1>${untrusted(context.params.policy)} <span class="quiet">batches</span></h1>
            <section class="panel">
                ${filters(context, [{ name: "state", label: "state", options: STATES }])}
                ${batches.length === 0 ? html`<p>None found.</p>` : dataTable({
                    caption: "Batches: groups that one optimizer step consumes together",
                    columns: columns(context),
                    rows: batches,
                    key: ({ batch_id: id }) => id,
                })}
                ${pager(context, context.data)}
            </section>`;
    },
};
