// One group: why it was decided as it was, its rollouts, and their messages side by side. It never changes by itself.

import { absent, ApiError } from "../api.js";
import { batchHash, hash, stepHash, whyHash } from "../address.js";
import { lifeBadge, untrusted } from "../elements.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import { beside, fetchShown, turn } from "../group/beside.js";
import { decision } from "../group/decision.js";
import { statistics } from "../group/judged.js";
import { BY_REWARD, table } from "../group/siblings.js";
import { html, nothing } from "../html.js";

/** Rollouts of a group that are shown; groups have at most 65,536. */
const SIBLINGS = 500;

/** Below this width, four columns have no room. */
const NARROW = 1000;

/** @param {Context<any, any, OfOne>} context */
async function readGroup({ get, params: { policy, id } }) {
    const { groups } = await get("./groups", { policy, group_id: id });
    if (groups.length === 0) {
        const detail = `The current run of ${policy} has no group ${id}: it was never posted here, or is forgotten.`;
        throw new ApiError(404, { title: "Unknown group", detail }, null);
    }
    return groups[0];
}

/** @type {(group: Group) => number} */
const posted = ({ arrived, dropped, late }) => arrived + dropped + late;

/**
 * @param {GroupData} data
 * @param {string} policy
 */
function place({ group, siblings }, policy) {
    const step = siblings.find((each) => each.step !== null)?.step ?? null;
    return html`<span class="quiet">${group.arrived} of ${group.size}
        ${group.environment === null ? nothing : html`· environment ${untrusted(group.environment)}`}
        ${group.batch_id === null ? nothing : html`· batch <a class="mono" href=${batchHash(policy, group.batch_id)}
            title=${group.batch_id}>${format.shortId(group.batch_id)}</a>`}
        ${step === null ? nothing : html`· <a href=${stepHash(policy, step)}>step ${step}</a>`}
        · <a href=${whyHash(group.group_id, policy)}>why</a></span>`;
}

/** @type {View<GroupData, GroupLocal, OfOne>} */
export const view = {
    title: ({ params }) => `group ${params.id}`,
    isSame: (before, after) => before.policy === after.policy && before.id === after.id,
    local: () => ({
        sort: BY_REWARD,
        order: "best and worst",
        count: window.innerWidth < NARROW ? 2 : 4,
        first: 0,
        isTogether: true,
        isFolded: true,
        isPrefixOpen: false,
        contents: new Map(),
        opened: new Set(),
    }),
    keys: [
        { key: "[", help: "the siblings before these", run: (context) => turn(context, -1) },
        { key: "]", help: "the next siblings side by side", run: (context) => turn(context, 1) },
    ],
    async load(context) {
        const { policy, id } = context.params;
        const [group, page, found] = await Promise.all([
            readGroup(context),
            context.get("./trajectories", { policy, group_id: id, limit: SIBLINGS }),
            context.get(`./policies/${encodeURIComponent(policy)}`).catch(absent(403, 404)),
        ]);
        const siblings = page.trajectories;
        const mean = statistics(siblings)?.mean ?? null;
        const data = { group, siblings, isWhole: page.next === null, rules: found?.rules ?? null, mean };
        // The table is shown at once; the messages come one by one.
        fetchShown(context, data, context.local);
        return data;
    },
    async peek(context) {
        const now = await readGroup(context);
        const { group } = context.data;
        const more = posted(now) - posted(group);
        if (more > 0) {
            return `${plural(more, "rollout")} arrived since.`;
        }
        return now.state === group.state ? "" : `The group is ${now.state} now.`;
    },
    render(context) {
        const { group, siblings, isWhole } = context.data;
        const { policy } = context.params;
        return html`<h1>group ${untrusted(group.group_id)} ${lifeBadge(group.state)} ${place(context.data, policy)}</h1>
            ${decision(context.data, context)}
            <section class="panel">
                ${siblings.length === 0 ? html`<p>Nothing of it is in the ledger any more.</p>`
                    : table(siblings, context)}
                ${isWhole ? nothing : html`<p class="quiet">These are the first ${format.count(siblings.length)};
                    <a href=${hash(`policies/${policy}/rollouts`, { group_id: group.group_id })}>all of them</a></p>`}
            </section>
            ${beside(context)}`;
    },
};
