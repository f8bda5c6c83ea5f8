// All policies that the reader may see, worst first.

import { hash } from "../address.js";
import { badge, dataTable, stateBadge, STATES, time, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";

/** Pages of `/overview` that are read at most; policies are few. */
const PAGES = 10;

/** @param {Get} get */
async function all(get) {
    const policies = [];
    /** @type {string|null} */
    let after = null;
    let at = null;
    for (let page = 0; page < PAGES; page += 1) {
        /** @type {Schemas["Overview"]} */
        const answer = await get("./overview", { after, limit: 200 });
        policies.push(...answer.policies);
        ({ at, next: after } = answer);
        if (after === null) {
            break;
        }
    }
    return { policies, at, isWhole: after === null };
}

/** @param {Overview} policy */
function staleness({ staleness: found }) {
    if (!found) {
        return format.count(null);
    }
    return `${format.real(found.mean, 1)} / ${format.count(found.max)}`;
}

/** @type {Column<Overview>} */
const name = {
    title: "policy",
    cell: ({ policy }) => html`<a data-row href=${hash(`policies/${policy}`)}><b>${untrusted(policy)}</b></a>`,
};

/** @type {Column<Overview>} */
const ready = {
    title: "ready / need",
    number: true,
    cell: ({ ready_groups: groups, needed_groups: needed }) => `${format.count(groups)} / ${format.count(needed)}`,
};

/** @type {(title: string, value: (row: Overview) => number|null|undefined) => Column<Overview>} */
const number = (title, value) => ({ title, number: true, cell: (row) => format.count(value(row)) });

/** @type {(context: Pick<Context, "now">) => Column<Overview>[]} */
const columns = (context) => [
    name,
    { title: "state", cell: ({ state }) => stateBadge(state) },
    { title: "why", cell: ({ headline }) => html`<span class="headline">${format.visible(headline)}</span>` },
    number("in / min", ({ received_per_min: rate }) => (rate === null ? null : Math.round(rate))),
    ready,
    { title: "stale mean / max", number: true, cell: staleness },
    { title: "reward", number: true, cell: ({ reward }) => format.real(reward?.trained) },
    { title: "Δ 20 steps", number: true, cell: ({ reward }) => format.signed(reward?.change_20_steps) },
    number("lost 1 h", ({ lost_last_hour: lost }) => lost),
    { title: "last post", number: true, cell: ({ last_post_at: at }) => time(at, context) },
    { title: "version", number: true, cell: ({ version }) => `v${version}` },
];

/** @param {Overview[]} policies */
function summary(policies) {
    /** @param {string} kind */
    const of = (kind) => policies.filter(({ state }) => STATES[state]?.[1] === kind);
    const [bad, warn] = [of("bad"), of("warn")];
    // The glyph is that of the worst, which stands first.
    /** @param {Overview[]} list */
    const first = (list) => STATES[list[0].state][0];
    return html`${bad.length > 0 ? badge("bad", first(bad), `${bad.length} need you`) : nothing}
        ${warn.length > 0 ? badge("warn", first(warn), `${warn.length} to look at`) : nothing}`;
}

/** What a newcomer sees until the first rollout arrives. */
function welcome() {
    const url = new URL("./", document.baseURI).href.replace(/\/$/, "");
    const python = `import forebay
fb = forebay.Client("${url}")              # key=..., or FOREBAY_KEY, if the service has keys
print(fb.post(forebay.Trajectory(
    reward=1.0, segments=[forebay.Segment(tokens=[11, 12, 13], loss_mask=[1])])))`;
    const curl = `curl -s ${url}/trajectories -H 'content-type: application/json' -d '
  {"reward": 1.0, "segments": [{"tokens": [11, 12, 13], "loss_mask": [1]}]}'`;
    return html`<section class="panel">
        <h2>No rollout has arrived yet in the policies that you see</h2>
        <p>Forebay keeps what agents did until a trainer has learned from it. Here you see every rollout on its way:
            what was posted, how it was judged, which batch and step trained it, or why none did.</p>
        <p>Post one, from Python:</p>
        <pre>${python}</pre>
        <p>or from a shell:</p>
        <pre>${curl}</pre>
        <p><a href="./docs/">All calls of the API</a> · <code>forebay demo</code> shows this page with agents and
            trainers at work.</p>
    </section>`;
}

/** @type {View<Awaited<ReturnType<typeof all>>>} */
export const view = {
    title: ({ data }) => {
        const bad = (data?.policies ?? []).filter(({ state }) => STATES[state]?.[1] === "bad");
        return bad.length > 0 ? `${bad.length} need you` : "Policies";
    },
    live: true,
    load: ({ get }) => all(get),
    render(context) {
        const { policies, isWhole } = context.data;
        if (policies.length === 0) {
            return html`<h1>No policies</h1><p>A policy appears here with its rules or its first rollout, if the key may
                see it.</p>`;
        }
        const isNew = policies.every(({ last_post_at: at }) => at === null);
        return html`<h1>${format.plural(policies.length, "policy", "policies")} ${summary(policies)}</h1>
            ${isNew ? welcome() : nothing}
            <section class="panel overview">
                ${dataTable({
                    caption: "Worst first. Numbers are of the ledger, the same on each replica.",
                    columns: columns(context),
                    rows: policies,
                    key: ({ policy }) => policy,
                })}
                ${isWhole ? nothing : html`<p class="quiet">There are more policies; these are the worst.</p>`}
            </section>`;
    },
};
