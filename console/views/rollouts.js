// The stream of rollouts, newest first. It never refreshes by itself: it says how many arrived since.

import { hash, rolloutHash } from "../address.js";
import { badge, dataTable, idLink, lifeBadge, lookedThrough, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { isEvaluated, stateWords } from "../rollout/story.js";

/** Rollouts of a page. */
const LIMIT = 100;

const DAY = 86_400_000;

const VERDICTS = ["kept", "masked", "dropped", "late"];
const STATES = [
    "scoring", "open", "ready", "leased", "returned", "trained", "checkpointed", "discarded", "stale", "quarantined",
    "dropped", "late",
];
const OTHERS = ["purpose", "group_id", "step"];
const FILTERS = ["verdict", "state", "reason", "environment", ...OTHERS];

/** @param {Params} params */
function query({ policy, after, ...params }) {
    /** @param {Context} context */
    const filters = Object.fromEntries(FILTERS.map((name) => [name, params[name]]));
    return { policy, ...filters, order: "newest", after, limit: LIMIT };
}

/**
 * The list does not change by itself, so it has times of day and no ages.
 * @param {string} at
 * @param {Pick<Context, "now">} context
 */
function received(at, { now }) {
    const isToday = now() - Date.parse(at) < DAY;
    return html`<time datetime=${at} title=${`${format.day(at)}, ${format.clockMs(at)}`}>${isToday
        ? format.clock(at) : format.day(at)}</time>`;
}

/** @type {(context: Context) => Column<Rollout>[]} */
const columns = (context) => [
    { title: "received", cell: ({ received_at: at }) => received(at, context) },
    {
        title: "rollout",
        cell: ({ policy, rollout_id: id }) => html`<a data-row class="mono" href=${rolloutHash(policy, id)}>${
            untrusted(id)}</a>`,
    },
    {
        title: "group",
        cell: (story) => (isEvaluated(story) ? format.real(null) : idLink(
            hash(`policies/${story.policy}/groups`, { id: story.group.group_id }), story.group.group_id)),
    },
    { title: "environment", cell: ({ group }) => untrusted(group.environment) },
    {
        title: "verdict",
        cell: ({ verdict, reason }) => html`${lifeBadge(verdict)} ${reason === null ? nothing : untrusted(reason)}`,
    },
    { title: "state", cell: (story) => badge(...swap(stateWords(story))) },
    { title: "reward", number: true, cell: ({ reward }) => format.real(reward, 3) },
    { title: "advantage", number: true, cell: ({ advantage }) => format.signed(advantage) },
    { title: "tokens", number: true, cell: ({ tokens }) => format.count(tokens) },
    {
        title: "trained",
        number: true,
        cell: ({ verdict, trained_tokens: tokens }) => format.count(verdict === "kept" ? tokens : 0),
    },
    { title: "status", cell: ({ status }) => status ?? format.real(null) },
    { title: "version", number: true, cell: ({ policy_version: version }) => `v${version}` },
];

/** @type {(words: [glyph: string, kind: string, words: string]) => [string, string, string]} */
const swap = ([glyph, kind, words]) => [kind, glyph, words];

/** @param {Context} context */
function filters(context) {
    const { params } = context;
    /** @param {On<HTMLFormElement>} event */
    const apply = (event) => {
        event.preventDefault();
        const form = new FormData(event.target);
        /** @param {string} name */
        const chosen = (name) => String(form.get(name)).trim();
        const [verdict, state] = [chosen("verdict"), chosen("state")];
        context.go({ verdict, state, reason: chosen("reason"), environment: chosen("environment"), after: null });
    };
    /** @param {On<HTMLSelectElement>} event */
    const choose = ({ target }) => target.form?.requestSubmit();
    /**
     * @param {string} name
     * @param {string[]} values
     */
    const select = (name, values) => html`<label>${name} <select name=${name} @change=${choose}>
        <option value="" .selected=${!params[name]}>all</option>
        ${values.map((value) => html`<option .selected=${params[name] === value}>${value}</option>`)}</select></label>`;
    /** @param {string} name */
    const field = (name) => html`<label>${name} <input name=${name} type="search" autocomplete="off" spellcheck="false"
        size="14" .value=${params[name] ?? ""}></label>`;
    const others = OTHERS.filter((name) => params[name]);
    /** @param {string} name */
    const without = (name) => context.go({ [name]: null, after: null });
    return html`<form class="toolbar" aria-label="Which rollouts" @submit=${apply}>
        ${select("verdict", VERDICTS)} ${select("state", STATES)} ${field("reason")} ${field("environment")}
        <button type="submit">Filter</button>
        ${others.map((name) => html`<span class="chip">${name.replace("_id", "")} ${untrusted(params[name])}
            <button type="button" aria-label=${`Without ${name}`} @click=${() => without(name)}>×</button></span>`)}
    </form>`;
}

/** @type {View<Schemas["TrajectoryPage"]>} */
export const view = {
    title: ({ params }) => `${params.policy}: rollouts`,
    load: ({ get, params }) => get("./trajectories", query(params)),
    async peek({ get, params, data }) {
        // Pages behind the first do not change when rollouts arrive.
        if (params.after) {
            return "";
        }
        const { trajectories } = await get("./trajectories", query(params));
        const newest = data.trajectories[0]?.rollout_id;
        const at = trajectories.findIndex(({ rollout_id: id }) => id === newest);
        const count = at === -1 ? trajectories.length : at;
        const many = at === -1 && count === LIMIT ? `${count} or more rollouts` : format.plural(count, "rollout");
        return count === 0 ? "" : `${many} arrived since.`;
    },
    render(context) {
        const { data, params } = context;
        const { trajectories, next, examined } = data;
        const query_ = Object.fromEntries([...FILTERS, "after"].map((name) => [name, params[name]]));
        const path = `policies/${params.policy}/rollouts`;
        const newest = params.after
            ? html`<p><a href=${hash(path, { ...query_, after: null })}>Back to the newest</a></p>`
            : nothing;
        return html`<h1>${untrusted(params.policy)} <span class="quiet">rollouts, newest first</span></h1>
            ${filters(context)}
            ${newest}
            <section class="panel">
                ${trajectories.length === 0
                    ? html`<p>No rollout ${FILTERS.some((name) => params[name]) ? "matches" : "has arrived"}${
                        params.after || next ? " in this part" : ""}.</p>`
                    : dataTable({
                        caption: "In the order of arrival, the newest first.",
                        columns: columns(context),
                        rows: trajectories,
                        key: ({ run, rollout_id: id }) => `${run} ${id}`,
                    })}
                ${lookedThrough(examined, next, hash(path, { ...query_, after: next }))}
            </section>`;
    },
};
