// The groups of a policy, newest first.

import { dataTable, untrusted } from "../elements.js";
import { columns } from "../group/columns.js";
import { html, nothing } from "../html.js";
import { filters, hasNewer, pageQuery, pager } from "../listing.js";

const STATES = ["open", "ready", "batched", "stale", "discarded", "quarantined"];

const FIELDS = [
    { name: "state", label: "state", options: STATES },
    { name: "reason", label: "reason" },
    { name: "environment", label: "environment" },
];

/** @param {Context} context */
async function newestId({ get, params: { policy } }) {
    const { groups: [newest] } = await get("./groups", { policy, order: "newest", limit: 1 });
    return newest?.group_id ?? null;
}

/** @type {View<Schemas["GroupPage"] & { newest: string|null }>} */
export const view = {
    title: ({ params }) => `${params.policy}: groups`,
    isSame: (before, after) => before.policy === after.policy && after.id === undefined,
    async load(context) {
        const { policy, state, reason, environment, batch_id: batch } = context.params;
        const query = { policy, state, reason, environment, batch_id: batch, ...pageQuery(context.params) };
        const [page, newest] = await Promise.all([
            context.get("./groups", query),
            newestId(context),
        ]);
        return { ...page, newest };
    },
    peek: (context) => hasNewer(context, "groups", newestId),
    render(context) {
        const { groups } = context.data;
        return html`<h1>${untrusted(context.params.policy)} <span class="quiet">groups</span></h1>
            <section class="panel">
                ${filters(context, FIELDS)}
                ${groups.length === 0 ? html`<p>None found.</p>` : dataTable({
                    caption: "Groups: rollouts of one task that are compared with each other",
                    columns: columns(context),
                    rows: groups,
                    key: ({ group_id: id, run }) => `${run} ${id}`,
                })}
                ${pager(context, context.data)}
                ${context.params.state === "open" ? nothing : html`<p class="quiet">Rewards and tokens are those of kept
                    rollouts, from the decision on.</p>`}
            </section>`;
    },
};
