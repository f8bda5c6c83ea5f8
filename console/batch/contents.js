// What batches consist of: their groups, and the rollouts with the lowest rewards among them.

import { absent } from "../api.js";
import { groupHash } from "../address.js";
import { dataTable, idLink } from "../elements.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import * as ofGroups from "../group/columns.js";
import * as ofRollouts from "../group/siblings.js";
import { html, nothing } from "../html.js";

/** Groups of one batch that are shown. */
const GROUPS = 1000;

/** The lowest rewards are looked for in this many groups: those whose lowest reward is the lowest. */
const LOOKED = 4;

/** Rollouts of such a group that are looked at. */
const SIBLINGS = 1000;

/** Rollouts that are shown. */
const WORST = 10;

/** @type {(groups: Group[]) => Group[]} */
const byLowest = (groups) => groups.toSorted((a, b) => format.compareReal(a.reward_min, b.reward_min));

/**
 * @param {Context} context
 * @param {Group[]} groups
 */
async function readWorst({ get, params: { policy } }, groups) {
    const looked = byLowest(groups.filter(({ reward_min: least }) => least !== null)).slice(0, LOOKED);
    const pages = await Promise.all(looked.map(({ group_id: id }) =>
        get("./trajectories", { policy, group_id: id, limit: SIBLINGS })));
    return pages
        .flatMap(({ trajectories }) => trajectories)
        .filter(({ verdict, reward }) => verdict === "kept" && reward !== null)
        .toSorted((a, b) => format.compareReal(a.reward, b.reward))
        .slice(0, WORST);
}

/**
 * Reads the groups of batches and their worst rollouts. A key of a trainer may not: it gets null.
 * @param {Context} context
 * @param {string[]} batches
 */
export async function readContents(context, batches) {
    const { policy } = context.params;
    const read = async () => {
        const pages = await Promise.all(batches.map((id) =>
            context.get("./groups", { policy, batch_id: id, limit: GROUPS })));
        const groups = pages.flatMap((page) => page.groups);
        return { groups, isWhole: pages.every(({ next }) => next === null), worst: await readWorst(context, groups) };
    };
    return read().catch(absent(403));
}

/** @type {(policy: string) => Column<Rollout>} */
const groupColumn = (policy) => ({
    title: "group",
    cell: ({ group: { group_id: id } }) => html`<span class="id">${idLink(groupHash(policy, id), id)}</span>`,
});

/**
 * The panels. `local.sort` is the reader's order of the groups.
 * @param {Contents|null} found
 * @param {Context} context
 */
export function contents(found, context) {
    if (found === null) {
        return html`<p class="quiet">Its groups and rollouts are shown to keys with the role read, produce or
            admin.</p>`;
    }
    const { groups, worst, isWhole } = found;
    if (groups.length === 0) {
        return html`<p class="quiet">None of its groups is in the ledger of this run.</p>`;
    }
    return html`${worst.length === 0 ? nothing : html`<section class="panel" aria-labelledby="worst-title">
            <h2 id="worst-title">The lowest rewards</h2>
            ${dataTable({
                caption: `The worst rollouts that were trained, from ${plural(Math.min(LOOKED, groups.length), "group")}
                    with the lowest rewards`,
                columns: ofRollouts.columns(context.params.policy, { group: groupColumn(context.params.policy) }),
                rows: worst,
                key: ({ rollout_id: id }) => id,
            })}
        </section>`}
        <section class="panel" aria-labelledby="groups-title">
            <h2 id="groups-title">${plural(groups.length, "group")}${isWhole ? nothing : " of more"}</h2>
            ${dataTable({
                caption: "Its groups; a heading sorts",
                columns: ofGroups.columns(context, { isOfBatch: true }),
                rows: groups,
                key: ({ group_id: id }) => id,
                sort: context.local.sort,
                onSort: (sort) => context.update({ sort }),
            })}
        </section>`;
}
