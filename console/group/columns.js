// The columns of tables of groups.

import { batchHash, groupHash } from "../address.js";
import { lifeBadge, time, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { range } from "../listing.js";

/**
 * A reward with the digits that tell it from others.
 * @type {(value: number|null|undefined) => string}
 */
export const reward = (value) => format.real(value, Number.isInteger(value) ? 0 : 3);

/**
 * The rewards of a group's kept rollouts: "0.375 (0 – 1)". A group without spread trains nothing.
 * @param {Group} group
 */
function rewards({ reward_mean: mean, reward_min: least, reward_max: most }) {
    if (mean === null) {
        return reward(null);
    }
    return least === null || most === null || least === most ? html`${reward(mean)} <span class="quiet">flat</span>`
        : html`${reward(mean)} <span class="quiet">(${range(least, most, reward)})</span>`;
}

/**
 * How full a group is, and what did not count.
 * @param {Group} group
 */
function places({ arrived, size, masked, dropped, late }) {
    const rest = Object.entries({ masked, dropped, late }).filter(([, number]) => number > 0);
    return html`${format.count(arrived)} / ${format.count(size)}${rest.length === 0 ? nothing
        : html` <span class="quiet">${rest.map(([name, number]) => `${number} ${name}`).join(", ")}</span>`}`;
}

/** @type {(number: number|null|undefined) => string} */
const whole = (number) => format.count(number);

/**
 * Columns for groups of a policy. `isOfBatch` leaves out what all groups of a batch have in common.
 * @param {Pick<Context, "params"|"now">} context
 * @param {{ isOfBatch?: boolean }} options
 * @returns {Column<Group>[]}
 */
export function columns(context, { isOfBatch = false } = {}) {
    const { policy } = context.params;
    /** @type {(Column<Group>|false)[]} */
    const all = [
        {
            title: "group",
            cell: ({ group_id: id }) => html`<span class="id">${rowLink(groupHash(policy, id), id)}</span>`,
        },
        !isOfBatch && { title: "state", cell: ({ state }) => lifeBadge(state) },
        !isOfBatch && { title: "reason", cell: ({ reason }) => (reason ? untrusted(reason) : nothing) },
        {
            title: "environment",
            cell: ({ environment }) => (environment === null ? format.count(null) : untrusted(environment)),
        },
        { title: "rollouts", number: true, cell: places, value: ({ arrived }) => arrived },
        { title: "reward mean (range)", number: true, cell: rewards, value: ({ reward_mean: mean }) => mean },
        { title: "lowest", number: true, cell: ({ reward_min: least }) => reward(least),
            value: ({ reward_min: least }) => least },
        { title: "tokens", number: true, cell: ({ tokens }) => whole(tokens), value: ({ tokens }) => tokens },
        { title: "trained", number: true, cell: ({ trained_tokens: trained }) => whole(trained),
            value: ({ trained_tokens: trained }) => trained },
        { title: "versions", number: true, cell: ({ versions }) => (versions ? range(versions.min, versions.max)
            : whole(null)) },
        !isOfBatch && {
            title: "batch",
            cell: ({ batch_id: id }) => (id ? html`<a class="mono short" href=${batchHash(policy, id)} title=${id}>
                ${format.shortId(id)}</a>` : nothing),
        },
        { title: "decided", number: true, cell: ({ decided_at: at }) => (at ? html`${time(at, context)} ago`
            : format.count(null)) },
    ];
    return all.filter((column) => column !== false);
}

/**
 * The link of a row, which `j` and `k` move to.
 * @param {string} href
 * @param {string} id
 */
export function rowLink(href, id) {
    return html`<a data-row class="mono" href=${href}>${untrusted(id)}</a>`;
}
