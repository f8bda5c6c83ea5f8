// One policy: its state and the reason first, then the way of rollouts, then charts.

import "../charts.js";
import { fromSee, hash } from "../address.js";
import { badge, kbd, stateBadge, untrusted } from "../elements.js";
import { evaluation } from "../evaluation/section.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { losses, strip } from "../policy/flow.js";
import { describe } from "../policy/journal.js";
import { load } from "../policy/load.js";
import { WINDOWS } from "../policy/windows.js";

/**
 * What the reader asks in each state.
 * @type {Record<string, string>}
 */
const QUESTIONS = {
    broken: "What is broken?",
    stuck: "What is stuck?",
    starved: "Why does the trainer wait?",
    untaken: "Why does nobody take what is ready?",
    "held-back": "Why are agents refused?",
    stale: "Why do groups go stale?",
    flat: "Why does training learn nothing?",
    dropping: "Why are rollouts lost?",
};

/**
 * @param {Schemas["WhyCause"]} cause
 * @param {string} policy
 */
function links(cause, policy) {
    const see = cause.see ? fromSee(cause.see, policy) : null;
    const draft = cause.filter ? hash(`policies/${policy}/try`, { filter: cause.filter }) : null;
    return html`${see ? html` <a data-row href=${see}>look at them</a>` : nothing}
        ${draft ? html` · <a data-row href=${draft}>try another filter</a>` : nothing}`;
}

/** @param {PolicyData} data */
function reasons({ policy, why }) {
    if (why.causes.length + why.ruled_out.length + why.unknown.length === 0) {
        return nothing;
    }
    /**
     * @param {Schemas["WhyCause"]} each
     * @param {number} index
     */
    const cause = (each, index) => html`<li>
        ${index === 0 ? badge("bad", "1", "cause") : badge("warn", String(index + 1), "adds")}
        <span>${format.visible(each.text)}${links(each, policy.policy)}</span></li>`;
    return html`<section class="panel why" id="why" tabindex="-1" data-rows aria-labelledby="why-title">
        <h2 id="why-title">${QUESTIONS[why.state] ?? "What is known"}</h2>
        ${why.causes.length === 0 ? nothing : html`<ol>${why.causes.map(cause)}</ol>`}
        ${why.ruled_out.length === 0 ? nothing : html`<p class="quiet"><b>Not the reason:</b>
            ${why.ruled_out.map(({ text }) => format.visible(text).replace(/\.$/, "")).join("; ")}.</p>`}
        ${why.unknown.length === 0 ? nothing : html`<p class="quiet"><b>Not known:</b>
            ${why.unknown.map(({ text }) => format.visible(text).replace(/\.$/, "")).join("; ")}.</p>`}
    </section>`;
}

/** @param {PolicyHistory} history */
function events(history) {
    const [length] = WINDOWS[history.window];
    const inside = history.journal.filter(({ at }) => Date.parse(at) > history.at - length * 1000).slice(0, 8);
    if (inside.length === 0) {
        return nothing;
    }
    return html`<section class="panel"><h2>▲ What was changed and what happened</h2>
        <ul class="events">${inside.map((entry) => html`<li>
            <span class="mono">${length > 86_400 ? format.day(entry.at) : format.clock(entry.at)}</span>
            ${describe(entry)}</li>`)}</ul>
    </section>`;
}

/** @param {Context<PolicyData, PolicyLocal>} context */
function graphs(context) {
    const { data, local, numbers } = context;
    if (data.history === null) {
        return data.isRefused
            ? html`<p class="quiet">The history needs a key with the role read, train or admin.</p>` : nothing;
    }
    const chosen = data.history.window;
    /** @param {On<HTMLSelectElement>} event */
    const choose = (event) => context.go({ window: event.target.value });
    /** @param {CustomEvent<ChartRange|null>} event */
    const zoom = ({ detail }) => context.update({ range: detail });
    return html`<div class="toolbar">
            <label>window <select @change=${choose}>${Object.keys(WINDOWS).map((name) =>
                html`<option .selected=${name === chosen}>${name}</option>`)}</select></label>
            ${local.range
                ? html`<button type="button" @click=${() => context.update({ range: null })}>Show all</button>`
                : nothing}
            <span class="quiet">drag over a chart to zoom, all charts follow; ${kbd("t")} shows numbers as
                tables</span>
        </div>
        <div class="grid-3 charts" @chart-range=${zoom}>${data.charts?.map((spec) => html`
            <forebay-chart class="panel" .spec=${spec} .range=${local.range} .numbers=${numbers}></forebay-chart>`)}
        </div>
        ${events(data.history)}`;
}

/** @type {View<PolicyData, PolicyLocal>} */
export const view = {
    title: ({ params, data }) => (data ? [params.policy, data.why?.state].filter(Boolean).join(": ") : params.policy),
    live: true,
    local: () => ({ range: null, pointed: null, older: new Map() }),
    isSame: (before, after) => before.policy === after.policy,
    load,
    render(context) {
        const { policy, why } = context.data;
        const step = policy.version_step === null ? "" : ` (step ${policy.version_step})`;
        return html`<h1>${untrusted(policy.policy)} ${stateBadge(why.state)}
                <span class="quiet">run ${policy.run} · epoch ${policy.epoch} · v${policy.version}${step}</span></h1>
            <p class="headline">${format.visible(why.headline)}</p>
            ${strip(context.data, context)}
            ${losses(context.data)}
            ${reasons(context.data)}
            ${graphs(context)}
            ${evaluation(context.data.evals.suites, context)}`;
    },
};
