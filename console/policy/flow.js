// The way of rollouts through a policy, stage by stage, and what was lost on it.

import { hash } from "../address.js";
import { time, untrusted } from "../elements.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import { html, nothing, styles } from "../html.js";

/**
 * The stages at which each state of a policy is caused or felt.
 * @type {Record<string, string[]>}
 */
const STARVING = {
    broken: ["received"],
    stuck: ["leased"],
    starved: ["ready", "leased"],
    untaken: ["leased"],
    "held-back": ["received"],
    stale: ["ready"],
    flat: ["trained"],
    dropping: ["verdicts"],
};

/** @type {(values: (number|null)[]|undefined) => number} */
const sum = (values) => (values ?? []).reduce((/** @type {number} */ total, value) => total + (value ?? 0), 0);

/**
 * The sum of a metric over the last minutes of the history, or null without any.
 * @param {PolicyHistory|null} history
 * @param {string} name
 * @param {number} minutes
 */
function recent(history, name, minutes) {
    const values = history?.hour.metrics[name]?.slice(-minutes).filter((value) => value !== null) ?? [];
    return values.length === 0 ? null : sum(values);
}

/**
 * The mean of a number over the last 15 minutes, without those before the first rollout of the hour.
 * @param {PolicyHistory|null} history
 * @param {string} name
 */
function rate(history, name) {
    const hour = history?.hour.metrics;
    const first = (hour?.received ?? []).findIndex((count) => (count ?? 0) > 0);
    const values = hour?.[name]?.slice(Math.max(0, first)).slice(-15).filter((value) => value !== null) ?? [];
    return values.length === 0 ? null : sum(values) / values.length;
}

/** @param {[token: string, value: number][]} parts */
function bar(parts) {
    const total = sum(parts.map(([, value]) => value));
    const visible = parts.filter(([, value]) => value > 0);
    return html`<div class="bar" aria-hidden="true">${visible.map(([token, value]) =>
        html`<i ${styles({ width: `${(100 * value) / total}%`, background: `var(${token})` })}></i>`,
    )}</div>`;
}

/**
 * @param {PolicyData} data
 * @param {Pick<Context, "now">} context
 */
function received({ policy, history }, context) {
    const lastPost = policy.waiting.last_post_at;
    return html`<p class="figure">${format.count(rate(history, "received"))} <span class="quiet">/ min</span></p>
        <p>${format.short(rate(history, "tokens_received"))} tokens / min</p>
        <p>${lastPost ? html`last post ${time(lastPost, context)} ago` : "no post yet"}</p>`;
}

/** @param {PolicyData} data */
function verdicts({ history }) {
    /** @param {string} name */
    const of = (name) => recent(history, name, 15) ?? 0;
    /** @type {[token: string, value: number][]} */
    const shares = [["--series-1", of("kept")], ["--series-6", of("masked")], ["--series-3", of("dropped")],
        ["--series-5", of("late")]];
    return html`${bar(shares)}
        <p>kept ${format.count(recent(history, "kept", 15))} · masked ${format.count(recent(history, "masked", 15))}</p>
        <p>dropped ${format.count(recent(history, "dropped", 15))} · late
            ${format.count(recent(history, "late", 15))}</p>`;
}

/** @param {PolicyData} data */
function open({ policy }) {
    const { open_groups: groups, fullest, reserved_rollouts: reserved = 0 } = policy.waiting;
    const [first] = fullest;
    const scoring = policy.rollouts.scoring ?? 0;
    return html`<p class="figure">${format.count(groups)}</p>
        ${first ? html`<p>fullest ${first.arrived} / ${first.size}</p>` : nothing}
        ${reserved > 0 ? html`<p>${plural(reserved, "rollout")} reserved</p>` : nothing}
        ${scoring > 0 ? html`<p>${plural(scoring, "rollout")} to score</p>` : nothing}`;
}

/** @param {PolicyData} data */
function ready({ policy }) {
    const { ready_groups: groups, needed_groups: needed, returned_batches: returned } = policy.waiting;
    const share = Math.min(groups, needed);
    return html`<p class="figure">${format.count(groups)} <span class="quiet">/ ${format.count(needed)}</span></p>
        ${bar([["--series-2", share], ["--quiet-ground", needed - share]])}
        <p>${returned > 0 ? `${plural(returned, "returned batch", "returned batches")} first` : nothing}</p>`;
}

/** @param {string|null|undefined} name */
function consumer(name) {
    return name ? untrusted(name) : "a trainer without a name";
}

/**
 * @param {PolicyData} data
 * @param {Pick<Context, "now">} context
 */
function leased({ policy }, context) {
    const { asking = [], holding = [] } = policy.waiting;
    const held = holding.slice(0, 2).map(({ consumer: name, since, attempt }) => html`<p>${consumer(name)} for
        ${time(since, context)}${attempt > 1 ? html`, attempt ${attempt}` : nothing}</p>`);
    const waits = asking.slice(0, 2).map(({ consumer: name, since }) => html`<p>${consumer(name)} asks since
        ${format.clock(since)}, ${time(since, context)}</p>`);
    return html`<p class="figure">${format.count(policy.batches.leased ?? 0)}</p>${held}${waits}
        ${policy.waiting.asking && held.length + waits.length === 0 ? html`<p>nobody asks</p>` : nothing}`;
}

/** @param {PolicyData} data */
function trained({ policy }) {
    const batches = policy.batches.trained ?? 0;
    const from = policy.checkpoint_step;
    const unsaved = batches === 1 ? "batch not yet saved" : "batches not yet saved";
    return html`<p class="figure">${format.count(batches)}</p>
        <p>${batches === 0 ? "nothing waits for a checkpoint" : unsaved}</p>
        <p>${from === null || batches === 0 ? nothing : `steps after ${format.count(from)}`}</p>`;
}

/** @param {PolicyData} data */
function checkpointed({ policy }) {
    const groups = policy.groups.batched;
    return html`<p class="figure">${policy.checkpoint_step === null ? format.count(null)
        : html`<span class="quiet">step</span> ${format.count(policy.checkpoint_step)}`}</p>
        <p>${plural(policy.batches.checkpointed ?? 0, "batch", "batches")} saved</p>
        <p>${groups === undefined ? nothing : `${plural(groups, "group")} in batches`}</p>`;
}

/**
 * Name, title, content, and the list that shows what is in the stage: screen and query.
 * @type {[string, string, (data: PolicyData, context: Pick<Context, "now">) => unknown, [string, Changes?]][]}
 */
const STAGES = [
    ["received", "received", received, ["rollouts"]],
    ["verdicts", "verdicts, 15 min", verdicts, ["groups"]],
    ["open", "groups open", open, ["groups", { state: "open" }]],
    ["ready", "groups ready", ready, ["groups", { state: "ready" }]],
    ["leased", "batches leased", leased, ["batches", { state: "leased" }]],
    ["trained", "batches trained", trained, ["batches", { state: "trained" }]],
    ["checkpointed", "checkpointed", checkpointed, ["batches", { state: "checkpointed" }]],
];

/**
 * The stages side by side; the one that starves is marked.
 * @param {PolicyData} data
 * @param {Pick<Context, "now">} context
 */
export function strip(data, context) {
    const starving = STARVING[data.why?.state] ?? [];
    const { policy } = data.policy;
    return html`<ol class="strip" aria-label="The way of rollouts" data-rows>
        ${STAGES.map(([name, title, content, [screen, query]]) => html`<li
            class="stage ${starving.includes(name) ? "starving" : ""}">
            <h2><a data-row href=${hash(`policies/${policy}/${screen}`, query)}>${title}</a>${starving.includes(name)
                ? html`<span class="visually-hidden"> (look here)</span>` : nothing}
            </h2>${content(data, context)}</li>`)}
    </ol>`;
}

/**
 * What each rule lost in the last hour: [[rule, number]], the most first.
 * @param {PolicyHistory} history
 * @param {string} prefix
 * @returns {[rule: string, lost: number][]}
 */
function byRule(history, prefix) {
    return Object.entries(history.hour.metrics)
        .filter(([metric]) => metric.startsWith(`${prefix}.`))
        .map(([metric, values]) => /** @type {[string, number]} */ ([metric.slice(prefix.length + 1), sum(values)]))
        .filter(([, lost]) => lost > 0)
        .sort(([, first], [, second]) => second - first);
}

/**
 * Links to the lists of what was lost in the last hour, by reason.
 * @param {PolicyData} data
 */
export function losses({ policy, history }) {
    if (history === null) {
        return nothing;
    }
    /**
     * @param {string} screen
     * @param {Changes} query
     */
    const to = (screen, query) => hash(`policies/${policy.policy}/${screen}`, query);
    const groups = byRule(history, "discarded");
    // Of a rule that discards groups, the rollouts are those of the groups: groups and rollouts are never added up.
    const rollouts = byRule(history, "dropped").filter(([rule]) => !groups.some(([other]) => other === rule));
    /** @type {[reason: string, lost: number, noun: string, href: string][]} */
    const all = [];
    for (const [reason, lost] of groups) {
        all.push([reason, lost, "group", to("groups", { state: "discarded", reason })]);
    }
    for (const [reason, lost] of rollouts) {
        all.push([reason, lost, "rollout", to("rollouts", { verdict: "dropped", reason })]);
    }
    all.push(
        ["stale", sum(history.hour.metrics.stale_groups), "group", to("groups", { state: "stale" })],
        ["late", sum(history.hour.metrics.late), "rollout", to("rollouts", { verdict: "late" })],
        ["quarantined", policy.groups.quarantined ?? 0, "group", to("groups", { state: "quarantined" })],
    );
    const entries = all.filter(([, lost]) => lost > 0);
    return html`<p class="row losses" data-rows><span class="quiet">lost on the way, 1 h:</span>
        ${entries.length === 0 ? html`<span>nothing</span>` : nothing}
        ${entries.map(([reason, lost, noun, href]) => html`<span>
            ${reason === "other" ? reason : html`<a data-row href=${href}>${format.visible(reason)}</a>`}
            <b>${plural(lost, noun)}</b></span>`)}</p>`;
}
