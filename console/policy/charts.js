// The six charts of a policy: columns of the service become lines with a name, a colour and a sentence.

import * as format from "../format.js";
import { describe } from "./journal.js";

const TOGETHER = "policy";

/** @type {(moment: string) => number} */
const seconds = (moment) => Date.parse(moment) / 1000;

/**
 * Columns of the charts over steps, one entry per step.
 * @param {Step[]} rows
 * @returns {StepColumns}
 */
export function ofSteps(rows) {
    /**
     * @param {"reward_trained"|"reward_all"|"staleness_mean"|"staleness_max"|"held_ms"|"waited_ms"} name
     * @returns {Values}
     */
    const column = (name, scale = 1) => rows.map(({ [name]: value }) => (value === null ? null : value * scale));
    return {
        note: `last of ${format.plural(rows.length, "step")}`,
        at: rows.map(({ step }) => step),
        times: rows.map(({ acked_at: at }) => seconds(at)),
        trained: column("reward_trained"),
        all: column("reward_all"),
        mean: column("staleness_mean"),
        max: column("staleness_max"),
        training: column("held_ms", 0.001),
        waiting: column("waited_ms", 0.001),
    };
}

/**
 * The same of a whole run in buckets. A bucket whose steps were all undone has no values.
 * @param {Schemas["StepBucket"][]} all
 * @returns {StepColumns}
 */
export function ofBuckets(all) {
    const buckets = all.filter(({ steps }) => steps > 0);
    /**
     * @param {"reward_trained"|"reward_all"|"staleness"|"held_ms"|"waited_ms"} name
     * @returns {Values}
     */
    const column = (name, scale = 1) => buckets.map(({ [name]: found }) => (found ? found.mean * scale : null));
    return {
        note: "last of the whole run",
        at: buckets.map(({ step_to: step }) => step),
        times: buckets.map(({ acked_at: at }) => seconds(at)),
        trained: column("reward_trained"),
        all: column("reward_all"),
        mean: column("staleness"),
        max: buckets.map(({ staleness_max: max }) => max),
        training: column("held_ms", 0.001),
        waiting: column("waited_ms", 0.001),
    };
}

/**
 * "kept: now 412, from 380 to 430" for each line.
 * @param {ChartLine[]} series
 * @param {ChartSpec["show"]} show
 */
function sentenceOf(series, show) {
    const parts = series.map(({ label, values }) => {
        const known = values.filter((value) => value !== null);
        if (known.length === 0) {
            return `${label}: nothing`;
        }
        const [least, most] = [Math.min(...known), Math.max(...known)];
        return `${label}: last ${show(known[known.length - 1])}, from ${show(least)} to ${show(most)}`;
    });
    return `${parts.join("; ")}.`;
}

/**
 * @param {string} title
 * @param {string} x
 * @param {{ at: number[], times: number[], note?: string }} points
 * @param {ChartLine[]} series
 * @param {ChartSpec["show"]} show
 * @param {Partial<ChartSpec>} more
 * @returns {ChartSpec}
 */
function spec(title, x, { at, times, note }, series, show, more = {}) {
    const isEmpty = series.every(({ values }) => values.every((value) => value === null));
    const none = x === "step" ? "No step has been acked in this run." : "Nothing has been recorded in this window.";
    const sentence = isEmpty ? none : sentenceOf(series, show);
    const points = isEmpty ? { at: [], times: [] } : { at, times };
    return { title, sentence, x, ...points, series, show, note: note ?? "last", together: TOGETHER, ...more };
}

/** @type {(label: string, values: Values, colour: number, more?: Partial<ChartLine>) => ChartLine} */
const line = (label, values, colour, more = {}) => ({ label, values, colour: `--series-${colour}`, ...more });

/** @type {(value: number|null) => string} */
const second = (value) => (value === null ? format.real(null) : format.duration(value * 1000));

/**
 * The specs of the charts, in the order in which they are shown.
 * @param {PolicyHistory} history
 * @param {Schemas["PolicyStatus"]} policy
 * @returns {ChartSpec[]}
 */
export function specs({ series, steps, journal }, policy) {
    const { at, metrics, step_s: step } = series;
    /** @param {string} name */
    const perMinute = (name) => (metrics[name] ?? at.map(() => null)).map((value) =>
        value === null ? null : value / (step / 60));
    /**
     * @param {number[]} x
     * @param {number|null} value
     */
    const flat = (x, value) => x.map(() => value);
    const marks = journal.map((entry) => ({ at: seconds(entry.at), text: describe(entry) }));
    const byTime = { at, times: at };
    const needed = policy.waiting.needed_groups;
    const bound = policy.rules.staleness?.max ?? null;
    return [
        spec("rollouts in / min, by verdict", "time", byTime, [
            line("kept", perMinute("kept"), 1, { fill: true }),
            line("dropped", perMinute("dropped"), 3),
            line("masked", perMinute("masked"), 6),
            line("late", perMinute("late"), 5),
        ], format.short, { marks, isWhole: true }),
        spec("tokens / min: received and trained", "time", byTime, [
            line("received", perMinute("tokens_received"), 1),
            line("trained", perMinute("acked_tokens"), 2),
        ], format.short, { marks, isWhole: true }),
        spec("groups ready, and what a batch needs", "time", byTime, [
            line("ready", metrics.ready_groups ?? flat(at, null), 1, { fill: true }),
            line("needed", flat(at, needed), 4, { dash: true }),
        ], format.count, { marks, isWhole: true }),
        spec("reward by step: all and trained rollouts", "step", steps, [
            line("all", steps.all, 5),
            line("trained", steps.trained, 2),
        ], format.real),
        spec("staleness by step", "step", steps, [
            line("max", steps.max, 3),
            line("mean", steps.mean, 1),
            ...(bound === null ? [] : [line("bound", flat(steps.at, bound), 4, { dash: true })]),
        ], (value) => format.real(value, 1)),
        spec("trainer by step: training and waiting", "step", steps, [
            line("training", steps.training, 2),
            line("waiting", steps.waiting, 4),
        ], second, { tick: (value) => `${format.real(value, Number.isInteger(value) ? 0 : 1)} s` }),
    ];
}
