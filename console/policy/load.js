// What the screen of a policy asks for: its state and the reasons each time, its history once a minute, and
// its suites four times a minute.

import { absent, ApiError } from "../api.js";
import { joined } from "../evaluation/versions.js";
import { readSteps } from "../step/read.js";
import * as charts from "./charts.js";
import { fitting, WINDOWS } from "./windows.js";

const MINUTE = 60_000;

/** Results of suites take minutes to arrive, so they need not be asked for as often as the state. */
const EVALS_MS = 15_000;

/** Steps in a chart: the newest ones, or all of the run in this many buckets. */
const STEPS = 200;

const HOUR_METRICS = "received,kept,masked,late,dropped,tokens_received,dropped.*,discarded.*,stale_groups";

const WINDOW_METRICS = "kept,masked,dropped,late,tokens_received,acked_tokens,ready_groups";

/** What stands for an answer that the key may not see. */
const REFUSED = Symbol("refused");

/** @type {(milliseconds: number) => string} */
const iso = (milliseconds) => new Date(milliseconds).toISOString();

/**
 * The steps of the charts as rows: the newest ones for the short windows, the whole run for the long ones.
 * @param {Get} get
 * @param {OfPolicy} params
 * @param {`./policies/${string}`} path
 * @param {string} window
 * @returns {Promise<StepColumns>}
 */
async function stepsOf(get, { policy }, path, window) {
    const { steps } = await readSteps(get, policy, { order: "newest", limit: STEPS });
    const newest = steps.filter(({ undone }) => !undone).reverse();
    const last = newest.at(-1)?.step ?? 0;
    if (WINDOWS[window][0] <= 6 * 3600 || last <= STEPS) {
        return charts.ofSteps(newest);
    }
    const { buckets } = await get(`${path}/steps`, { from: 0, to: last, points: STEPS });
    return charts.ofBuckets(buckets);
}

/**
 * The history of a policy, which changes once a minute.
 * @param {Context} context
 * @param {`./policies/${string}`} path
 * @param {number} acked
 * @returns {Promise<PolicyHistory>}
 */
async function readHistory({ get, now, params }, path, acked) {
    const to = now();
    /**
     * @param {number} seconds
     * @param {number} stepSeconds
     * @param {string} metrics
     */
    const series = (seconds, stepSeconds, metrics) =>
        get(`${path}/series`, { from: iso(to - seconds * 1000), to: iso(to), step_s: stepSeconds, metrics });
    const hour = await series(3600, 60, HOUR_METRICS);
    const named = windowOf(params);
    const window = named ?? fitting(hour, to);
    const [length, step] = WINDOWS[window];
    const [series_, steps, journal] = await Promise.all([
        series(length, step, WINDOW_METRICS),
        stepsOf(get, params, path, window),
        get(`${path}/journal`, { order: "newest", limit: 100 }),
    ]);
    return { at: to, named, window, hour, series: series_, steps, journal: journal.entries, acked };
}

/**
 * What suites say about the versions. A service that does not know suites has none, and neither has a key that may not
 * see them.
 * @param {Context<PolicyData|null>} context
 * @param {`./policies/${string}`} path
 * @returns {Promise<PolicyEvals>}
 */
async function readEvals({ data, get, now }, path) {
    const known = data?.evals ?? null;
    if (known !== null && now() - known.at < EVALS_MS) {
        return known;
    }
    const answer = await get(`${path}/evals`).catch(absent(403, 404));
    return { at: now(), suites: joined(answer?.suites ?? [], known?.suites ?? []) };
}

/**
 * Changes with each step that is acked.
 * @param {Schemas["PolicyStatus"]} policy
 */
function ackedBatches({ batches }) {
    return (batches.trained ?? 0) + (batches.checkpointed ?? 0);
}

/**
 * Whether the history that is shown is still the newest.
 * @param {PolicyHistory} history
 * @param {Schemas["PolicyStatus"]} policy
 * @param {Context} context
 */
function isFresh(history, policy, { now, params }) {
    return (
        history.named === windowOf(params) &&
        history.acked === ackedBatches(policy) &&
        now() - history.at < MINUTE
    );
}

/**
 * The window that the address names, if it does.
 * @param {Params} params
 */
function windowOf(params) {
    const { window = "" } = params;
    return Object.hasOwn(WINDOWS, window) ? window : null;
}

/**
 * A key that may not read something still sees the rest: agents have such keys.
 * @param {unknown} error
 * @returns {typeof REFUSED}
 */
function refused(error) {
    if (error instanceof ApiError && error.status === 403) {
        return REFUSED;
    }
    throw error;
}

/**
 * @param {Context<PolicyData|null>} context
 * @returns {Promise<PolicyData>}
 */
export async function load(context) {
    /** @type {`./policies/${string}`} */
    const path = `./policies/${encodeURIComponent(context.params.policy)}`;
    const [policy, why] = await Promise.all([
        context.get(path),
        context.get(`${path}/why`),
    ]);
    const known = context.data?.history ?? null;
    const isKnown = known !== null && isFresh(known, policy, context);
    const [read, evals] = await Promise.all([
        isKnown ? known
            : readHistory(context, path, ackedBatches(policy)).catch(refused).catch(absent(404)),
        readEvals(context, path),
    ]);
    const history = read === REFUSED ? null : read;
    const specs = history === null || isKnown ? context.data?.charts ?? null : charts.specs(history, policy);
    return { policy, why, history, charts: specs, isRefused: read === REFUSED, evals };
}
