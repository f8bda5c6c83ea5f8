// The table of the rollouts of a group.

import { rolloutHash } from "../address.js";
import { dataTable, lifeBadge, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { range } from "../listing.js";
import { reward, rowLink } from "./columns.js";

/** @type {(name: "reward"|"advantage"|"tokens") => Pick<Column<Rollout>, "value"|"number">} */
const real = (name) => ({ value: (row) => row[name], number: true });

/**
 * What the verdict, its reason and the filters that failed say about one rollout.
 * @param {Rollout} rollout
 */
function why({ verdict, reason, failed_filters: failed, policy_version_assumed: isAssumed }) {
    const parts = [];
    if (verdict === "masked") {
        parts.push(html`${untrusted(reason)}: counts in the baseline, trains nothing`);
    } else if (reason !== null) {
        parts.push(untrusted(reason));
    }
    if (failed && failed.length > 0) {
        parts.push(html`could not be evaluated: ${failed.map(format.visible).join(", ")}`);
    }
    if (isAssumed) {
        parts.push("version assumed");
    }
    return parts.map((part, index) => html`${index > 0 ? "; " : nothing}${part}`);
}

/**
 * The tokens that a rollout trains: the ledger's number is that of its mask, whatever the verdict.
 * @param {Rollout} rollout
 */
function trained({ verdict, trained_tokens: tokens }) {
    return verdict === "kept" ? tokens : verdict === "masked" ? 0 : null;
}

/**
 * Columns for rollouts of a policy; `group` is a column for their groups.
 * @param {string} policy
 * @param {{ group?: Column<Rollout>|null }} options
 * @returns {Column<Rollout>[]}
 */
export function columns(policy, { group = null } = {}) {
    return [
        {
            title: "rollout",
            cell: ({ rollout_id: id }) => html`<span class="id">${rowLink(rolloutHash(policy, id), id)}</span>`,
        },
        ...(group === null ? [] : [group]),
        { title: "verdict", cell: ({ verdict }) => lifeBadge(verdict) },
        { title: "status", cell: ({ status }) => status ?? format.count(null) },
        { title: "reward", ...real("reward"), cell: ({ reward: value }) => reward(value) },
        { title: "advantage", ...real("advantage"), cell: ({ advantage }) => format.signed(advantage) },
        { title: "tokens", ...real("tokens"), cell: ({ tokens }) => format.count(tokens) },
        { title: "trained", number: true, value: trained, cell: (row) => format.count(trained(row)) },
        {
            title: "versions",
            number: true,
            value: ({ versions }) => versions?.min ?? null,
            cell: ({ versions }) => (versions ? range(versions.min, versions.max) : format.count(null)),
        },
        { title: "why", kind: "prose", cell: why },
    ];
}

/** Which column is sorted at first: the reward, the highest first. */
export const BY_REWARD = { by: 3, direction: -1 };

/**
 * The table. The reader's order is in `local.sort`.
 * @param {Rollout[]} siblings
 * @param {GroupContext} context
 */
export function table(siblings, context) {
    return dataTable({
        caption: "Its rollouts; a heading sorts",
        columns: columns(context.params.policy),
        rows: siblings,
        key: ({ rollout_id: id }) => id,
        sort: context.local.sort,
        onSort: (sort) => context.update({ sort }),
    });
}
