// What the suites of a policy say about its versions: the section of the screen of a policy.

import { isAborted, message } from "../api.js";
import { hash, suiteHash } from "../address.js";
import { badge, dataTable, facts, untrusted } from "../elements.js";
import * as format from "../format.js";
import { plural } from "../format.js";
import { html, nothing } from "../html.js";
import { curve } from "./chart.js";
import { newest, withOlder } from "./versions.js";
import * as words from "./words.js";

/** Versions that are read at once when the reader asks for older ones: the most that the service gives. */
const OLDER = 100;

/**
 * How a version differs from the one before, with a word that says whether that is more than chance.
 * @param {Schemas["EvalDifference"]|null} found
 */
export function difference(found) {
    if (found === null) {
        return format.real(null);
    }
    const said = words.comparison(found);
    return html`${words.difference(found)} ${said === null ? nothing : badge(...said)}`;
}

/**
 * The numbers of a version that stand below a curve.
 * @param {SuiteVersion} version
 */
export function numbers(version) {
    const { difference: found, mixed_versions: mixed } = version;
    return facts([
        ["mean reward", words.mean(version)],
        ...words.somePasses(version.pass_at).map((pass) => [`pass@${pass.k}`, words.pass(pass, version.tasks)]),
        ...(found === null ? [] : [
            [`against v${found.version}`, difference(found)],
            ["tasks", words.wonAndLost(found)],
        ]),
        ...(mixed === 0 ? [] : [["do not count", `${plural(mixed, "rollout")} with tokens of several versions`]]),
    ]);
}

/** @type {(policy: string, suite: string) => Column<SuiteVersion>[]} */
const columns = (policy, suite) => [
    {
        title: "version",
        cell: (version) => html`<a data-row class="short" href=${suiteHash(policy, suite, version.version)}>${
            words.named(version)}</a>`,
    },
    { title: "state", cell: ({ complete }) => (complete ? "complete" : "incomplete") },
    { title: "mean (95%)", number: true, cell: words.mean },
    { title: "against the version before (95%)", number: true, cell: ({ difference: found }) => difference(found) },
    { title: "won", number: true, cell: ({ difference: found }) => format.count(found?.won) },
    { title: "lost", number: true, cell: ({ difference: found }) => format.count(found?.lost) },
    { title: "tasks", number: true, cell: ({ tasks }) => format.count(tasks) },
    { title: "rollouts", number: true, cell: ({ n }) => format.count(n) },
];

/**
 * The curve of a suite, or with `numbers` a table of what it shows.
 * @param {Suite} suite
 * @param {CurveOptions & { numbers: boolean }} options
 */
export function versions(suite, { numbers: isTable, ...options }) {
    if (suite.versions.length === 0) {
        return nothing;
    }
    return isTable ? dataTable({
        caption: words.curve(suite),
        columns: columns(options.policy, suite.suite),
        rows: suite.versions,
        key: ({ version }) => version,
    }) : curve(suite, options);
}

/**
 * Reads the versions before those that are shown.
 * @param {Suite} answered the suite without the older versions that have been read
 * @param {Suite} shown
 * @param {EvaluationContext} context
 */
async function readOlder(answered, shown, context) {
    const { local, params: { policy } } = context;
    const name = answered.suite;
    const kept = shown.versions.slice(answered.versions.length);
    const before = { before: answered.versions.at(-1)?.version ?? 0, versions: kept, more: shown.more, said: "" };
    local.older.set(name, { ...before, isComing: true });
    context.update({});
    try {
        /** @type {`./policies/${string}/evals`} */
        const path = `./policies/${encodeURIComponent(policy)}/evals`;
        const query = { suite: name, before: shown.versions.at(-1)?.version, limit: OLDER };
        const found = (await context.get(path, query)).suites.find(({ suite }) => suite === name);
        const versions = [...kept, ...(found?.versions ?? [])];
        local.older.set(name, { ...before, versions, more: found?.more ?? false, isComing: false });
    } catch (error) {
        local.older.set(name, { ...before, isComing: false, said: isAborted(error) ? "" : message(error) });
        if (isAborted(error)) {
            return;
        }
    }
    context.update({});
}

/**
 * @param {Suite} answered
 * @param {EvaluationContext} context
 */
function panel(answered, context) {
    const { local, params: { policy } } = context;
    const older = local.older.get(answered.suite);
    const suite = withOlder(answered, older);
    const head = newest(suite);
    const id = `suite-${suite.suite}`;
    return html`<section class="panel" aria-labelledby=${id} data-rows>
        <h3 id=${id}>${untrusted(suite.suite)} <span class="quiet">${words.suite(suite)}</span></h3>
        ${versions(suite, {
            policy,
            numbers: context.numbers,
            pointed: local.pointed?.suite === suite.suite ? local.pointed.version : null,
            look: (version) => context.update({ pointed: version === null ? null : { suite: suite.suite, version } }),
        })}
        ${suite.more ? html`<p><button type="button" ?disabled=${older?.isComing ?? false}
            @click=${() => readOlder(answered, suite, context)}>Older versions</button>
            ${older?.said ? html`<span role="alert">${format.visible(older.said)}</span>` : nothing}</p>` : nothing}
        ${suite.tasks === null ? html`<p class="quiet">Nobody has said how many tasks the suite has, so no version is
            complete.</p>` : nothing}
        ${head === null ? html`<p class="quiet">${suite.versions.length === 0 ? words.curve(suite)
            : "No version is complete yet."}</p>` : html`
            <h4>${words.named(head)}, the newest ${head.complete ? "complete version" : "version"}:
                <a data-row href=${suiteHash(policy, suite.suite, head.version)}>its tasks</a></h4>
            ${numbers(head)}`}
    </section>`;
}

/**
 * The section; nothing if no suite has evaluated the policy.
 * @param {Suite[]} suites
 * @param {EvaluationContext} context
 */
export function evaluation(suites, context) {
    if (suites.length === 0) {
        return nothing;
    }
    return html`<section class="evaluation" aria-labelledby="evaluation-title">
        <h2 id="evaluation-title">Evaluation: mean rewards with intervals of 95%</h2>
        <p><a href=${hash(`policies/${context.params.policy}/rollouts`, { purpose: "eval" })}>all rollouts of
            suites</a></p>
        <div class="grid-2">${suites.map((suite) => panel(suite, context))}</div>
    </section>`;
}
