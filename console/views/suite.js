// A suite at one version: its tasks beside those of the version before. It never changes by itself.

import { hash, rolloutHash, suiteHash } from "../address.js";
import { badge, dataTable, untrusted } from "../elements.js";
import { numbers, versions } from "../evaluation/section.js";
import { change, counts, ordered, outcome } from "../evaluation/tasks.js";
import * as words from "../evaluation/words.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import { reward } from "../group/columns.js";
import { html, nothing } from "../html.js";
import { PAGE } from "../listing.js";

/** Tasks that are read at once, the most that the service gives: their order is that of what was read. */
const TASKS = 500;

/**
 * @param {Get} get
 * @param {OfSuite} params
 * @param {{ before?: number, limit?: number }} query
 */
async function readSuite(get, { policy, suite }, query) {
    /** @type {`./policies/${string}/evals`} */
    const path = `./policies/${encodeURIComponent(policy)}/evals`;
    const { suites } = await get(path, { suite, ...query });
    return suites.find((each) => each.suite === suite) ?? null;
}

/**
 * The suite with the version: its newest versions, or those up to this one if it is older.
 * @param {Get} get
 * @param {OfSuite} params
 * @param {number} version
 */
async function readAround(get, params, version) {
    const found = await readSuite(get, params, {});
    const isIn = found === null || found.versions.some((each) => each.version === version);
    return isIn ? found : readSuite(get, params, { before: version + 1 });
}

/** @param {SuiteData} data */
function current({ suite, list }) {
    return suite?.versions.find(({ version }) => version === list.version) ?? null;
}

/**
 * Goes to a neighbour of the version on the curve: -1 is the older one.
 * @param {Context<SuiteData|null, SuiteLocal, OfSuite>} context
 * @param {number} step
 */
function turn({ data, go }, step) {
    const rows = data?.suite?.versions ?? [];
    const at = rows.findIndex(({ version }) => version === data?.list.version);
    const next = at === -1 ? undefined : rows[at - step];
    if (next !== undefined) {
        go({ version: next.version, after: null });
    }
}

/** @type {Record<TaskOutcome, [kind: string, glyph: string, word: string]>} */
const OUTCOMES = {
    lost: ["bad", "▼", "lost"],
    won: ["good", "▲", "won"],
    same: ["quiet", "=", "same"],
    new: ["info", "○", "only now"],
    missing: ["warn", "○", "only before"],
};

/**
 * The rollouts of a task by their rewards, each a link.
 * @param {Schemas["EvalTaskResult"]|null} result
 * @param {string} policy
 * @param {boolean} isFirst whether the first link is that of the row
 */
function rollouts(result, policy, isFirst) {
    if (result === null) {
        return nothing;
    }
    const more = result.n - result.rollouts.length;
    return html`${result.rollouts.map(({ rollout_id: id, reward: value, status }, index) => {
        const said = status === "completed" ? reward(value) : `${reward(value)} ${status}`;
        const title = `${said}: rollout ${format.visible(id)}`;
        return html`<a ?data-row=${isFirst && index === 0} href=${rolloutHash(policy, id)} title=${title}
            aria-label=${title}>${said}</a> `;
    })}${more > 0 ? html`<span class="quiet">${format.count(more)} more</span>` : nothing}`;
}

/** @param {Schemas["EvalTaskResult"]|null} result */
function passed(result) {
    return result === null ? format.real(null) : html`${words.real(result.mean)} <span class="quiet">${
        format.count(result.passed)} of ${format.count(result.n)} pass</span>`;
}

/**
 * @param {SuiteData} data
 * @param {string} policy
 * @returns {Column<EvalTask>[]}
 */
function columns({ list }, policy) {
    /** @type {(Column<EvalTask>|false)[]} */
    const all = [
        { title: "task", cell: ({ task }) => html`<span class="id mono">${untrusted(task)}</span>` },
        list.before !== null && { title: `since v${list.before}`, cell: (task) => badge(...OUTCOMES[outcome(task)]) },
        list.before !== null && {
            title: "difference", number: true, cell: (task) => format.signed(change(task), 3),
        },
        { title: `v${list.version} mean`, number: true, cell: ({ now }) => passed(now) },
        { title: `v${list.version} rollouts`, kind: "rewards", cell: ({ now }) => rollouts(now, policy, true) },
        list.before !== null && {
            title: `v${list.before} mean`, number: true, cell: (task) => passed(task.before),
        },
        list.before !== null && {
            title: `v${list.before} rollouts`,
            kind: "rewards",
            cell: ({ now, before }) => rollouts(before, policy, !now?.rollouts.length),
        },
    ];
    return all.filter((column) => column !== false);
}

/** @param {EvalTask[]} tasks */
function summary(tasks) {
    const { lost, won, same, new: added, missing } = counts(tasks);
    const rest = [[added, "only now"], [missing, "only before"]].filter(([number]) => number !== 0);
    return [`${lost} lost`, `${won} won`, `${same} the same`, ...rest.map(([number, what]) => `${number} ${what}`)]
        .join(", ");
}

/** @param {Context<SuiteData, SuiteLocal, OfSuite>} context */
function tasksPanel(context) {
    const { data, local, params: { policy, suite, after } } = context;
    const { list, tasks } = data;
    const shown = tasks.slice(0, local.shown);
    const isPart = list.next !== null || after !== undefined;
    /** @param {string|null} name */
    const page = (name) => hash(`policies/${policy}/suites/${suite}`, { version: list.version, after: name });
    const compared = list.before === null ? `Its tasks at v${list.version}; there is no version before`
        : `Its tasks at v${list.version} and v${list.before}: ${summary(tasks)}`;
    return html`<section class="panel" aria-labelledby="tasks-title">
        <h2 id="tasks-title">Tasks${list.before === null ? nothing : ", the lost ones first"}</h2>
        ${tasks.length === 0 ? html`<p>None.</p>` : dataTable({
            caption: compared,
            columns: columns(data, policy),
            rows: shown,
            key: ({ task }) => task,
        })}
        ${shown.length < tasks.length ? html`<p><button type="button"
            @click=${() => context.update({ shown: local.shown + PAGE })}>${
            format.count(Math.min(PAGE, tasks.length - shown.length))} more</button>
            <span class="quiet">of ${format.count(tasks.length)}</span></p>` : nothing}
        ${isPart ? html`<p class="row"><span class="quiet">These are ${plural(tasks.length, "task")} of more, by name;
            the lost ones are first among them.</span>
            ${list.next === null ? nothing : html`<a href=${page(list.next)}>Next tasks</a>`}
            ${after === undefined ? nothing : html`<a href=${page(null)}>First tasks</a>`}</p>` : nothing}
    </section>`;
}

/** @type {View<SuiteData, SuiteLocal, OfSuite>} */
export const view = {
    title: ({ params, data }) =>
        `${params.policy}: ${params.suite}${data === null ? "" : ` at v${data.list.version}`}`,
    isSame: (before, after) =>
        before.policy === after.policy && before.suite === after.suite && before.after === after.after,
    local: () => ({ pointed: null, shown: PAGE }),
    keys: [
        { key: "[", help: "the version before", run: (context) => turn(context, -1) },
        { key: "]", help: "the next version", run: (context) => turn(context, 1) },
    ],
    async load({ get, params }) {
        const { policy, suite, version, after } = params;
        /** @type {`./policies/${string}/suites/${string}/tasks`} */
        const path = `./policies/${encodeURIComponent(policy)}/suites/${encodeURIComponent(suite)}/tasks`;
        const list = await get(path, { version, after, limit: TASKS });
        return { list, tasks: ordered(list.tasks), suite: await readAround(get, params, list.version) };
    },
    async peek({ get, params, data }) {
        const { version } = data.list;
        const found = await readSuite(get, params, { before: version + 1, limit: 1 });
        const now = found?.versions.find((each) => each.version === version);
        const more = (now?.n ?? 0) - (current(data)?.n ?? 0);
        return more > 0 ? `${plural(more, "rollout")} of this version came since.` : "";
    },
    render(context) {
        const { data, local, params: { policy } } = context;
        const { list, suite } = data;
        const version = current(data);
        return html`<h1>${untrusted(list.suite)} <span class="quiet">${version === null ? `at v${list.version}`
                : `at ${words.named(version)}, ${words.size(version)}`}</span>
                ${version === null ? nothing : version.complete ? badge("good", "●", "complete")
                    : badge("warn", "○", "incomplete")}</h1>
            ${suite === null || version === null ? nothing : html`<div class="grid-2">
                <section class="panel" aria-labelledby="versions-title">
                    <h2 id="versions-title">Versions</h2>
                    ${versions(suite, {
                        policy,
                        numbers: context.numbers,
                        pointed: local.pointed,
                        here: list.version,
                        look: (pointed) => context.update({ pointed }),
                    })}
                </section>
                <section class="panel" aria-labelledby="numbers-title">
                    <h2 id="numbers-title">v${list.version}</h2>
                    <p class="quiet">${words.suite(suite)}</p>
                    ${numbers(version)}
                </section></div>`}
            ${list.before === null ? nothing : html`<p><a href=${suiteHash(policy, list.suite, list.before)}>v${
                list.before}, the version before</a></p>`}
            ${tasksPanel(context)}`;
    },
};
