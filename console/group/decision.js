// Why a group was decided as it was, with the numbers that the filters saw.

import * as format from "../format.js";
import { plural } from "../format.js";
import { html, nothing } from "../html.js";
import { time, untrusted } from "../elements.js";
import { reward } from "./columns.js";
import { judged, statistics } from "./judged.js";

/**
 * What the service's own reasons mean.
 * @type {Record<string, string>}
 */
const REASONS = {
    incomplete: "too few rollouts when it had to be decided",
    exhausted: "too few rollouts when its posts were used up",
    "all-masked": "no rollout of it trains",
    reset: "its run was ended",
    "lineage-gap": "a forced resume found its payloads purged",
    "max-deliveries": "its deliveries are used up",
    "max-resumes": "too many resumes ended the lease of its batch",
    damaged: "a payload does not match its digest",
    stale: "it was behind the staleness bound when a batch was cut",
};

/**
 * @param {Filter} filter
 * @param {boolean} isMatch
 */
function filterLine({ name, when }, isMatch) {
    return html`<li><b>${name}</b> <code class="untrusted">${format.visible(when)}</code>
        ${isMatch ? "matches" : "does not match"}</li>`;
}

/**
 * @param {Statistics|null} found
 * @param {Group} group
 * @param {boolean} isWhole
 */
function numbers(found, group, isWhole) {
    if (found === null) {
        return "no reward counts";
    }
    const spread = `mean ${reward(found.mean)}, std ${format.real(found.deviation, 3)}, ` +
        `${reward(found.min)} to ${reward(found.max)}`;
    const part = isWhole ? "" : " (of those that are shown)";
    return `${plural(found.count, "reward")}${part}: ${spread}; ${plural(group.kept, "rollout")} kept, ` +
        `${format.count(group.masked)} masked`;
}

/**
 * @param {Group} group
 * @param {Pick<Context, "now">} context
 */
function open(group, context) {
    return html`<p><b>Open</b> since ${format.day(group.opened_at)} (${time(group.opened_at, context)}):
        ${group.arrived} of ${plural(group.size, "place")} taken.
        ${group.deadline_at ? html`It is decided at ${format.day(group.deadline_at)} at the latest, and then needs
            ${plural(group.min_size, "rollout")}.` : nothing}</p>`;
}

/**
 * What came of the decision. A group that was ready may be more than that by now.
 * @param {Group} group
 */
function outcome({ state, reason }) {
    const why = reason === null ? nothing : html` as ${untrusted(reason)}${REASONS[reason]
        ? `: ${REASONS[reason]}` : nothing}`;
    return state === "batched" ? html`→ <b>ready</b>; it is in a batch now` : html`→ <b>${state}</b>${why}`;
}

/**
 * The panel with the decision. `rules` are those of the policy now, or null.
 * @param {GroupData} data
 * @param {Pick<Context, "now">} context
 */
export function decision({ group, siblings, isWhole, rules }, context) {
    const found = statistics(siblings);
    const filters = judged(group, rules);
    const failed = group.failed_filters ?? [];
    const isOpen = group.decided_at === null;
    const lasted = Date.parse(group.decided_at ?? "") - Date.parse(group.opened_at);
    return html`<section class="panel decision" id="why" tabindex="-1" aria-labelledby="decision-title">
        <h2 id="decision-title">How it was decided</h2>
        ${isOpen ? open(group, context) : html`<p><b>Decided</b> ${format.day(group.decided_at)},
            ${format.duration(lasted)} after its first rollout.</p>`}
        <p>${isOpen ? "So far it has" : "It had"} <b>${numbers(found, group, isWhole)}</b>
            ${isOpen ? nothing : outcome(group)}</p>
        ${filters.length === 0 ? nothing : html`<ul class="plain">${filters.map(([rule, isMatch]) =>
            filterLine(rule, isMatch))}</ul>
            <p class="quiet">The texts are those of the rules now; the group has those of the moment at which it was
                opened.</p>`}
        ${failed.length === 0 ? nothing : html`<p class="notice warn">Could not be evaluated:
            ${failed.map((name) => html`<b>${format.visible(name)}</b> `)}</p>`}
    </section>`;
}
