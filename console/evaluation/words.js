// The numbers of an evaluation in words. Pure.

import * as format from "../format.js";
import { plural } from "../format.js";

/** Standard errors to both sides of a mean that make an interval of 95%. */
const ERRORS = 1.96;

/** @type {(value: number|null|undefined) => string} */
export const real = (value) => format.real(value, 3);

/** @type {(value: number|null|undefined) => string} */
const signed = (value) => format.signed(value, 3);

/**
 * The interval of 95% of a version's mean, or null with fewer than two tasks.
 * @param {Pick<SuiteVersion, "mean"|"standard_error">} version
 * @returns {[low: number, high: number]|null}
 */
export function interval({ mean, standard_error: error }) {
    return error === null ? null : [mean - ERRORS * error, mean + ERRORS * error];
}

/**
 * "0.410 to 0.630". A dash would look like a minus.
 * @param {number|null|undefined} low
 * @param {number|null|undefined} high
 * @param {(value: number|null|undefined) => string} show
 */
export function bounds(low, high, show = real) {
    return typeof low === "number" && typeof high === "number" ? `${show(low)} to ${show(high)}` : "no interval";
}

/**
 * "0.520 (0.410 to 0.630)"
 * @param {Pick<SuiteVersion, "mean"|"standard_error">} version
 */
export function mean(version) {
    const [low, high] = interval(version) ?? [null, null];
    return `${real(version.mean)} (${bounds(low, high)})`;
}

/**
 * "0.433 (0.260 to 0.607)", and of how many tasks if not all have so many rollouts.
 * @param {Schemas["PassAt"]} pass
 * @param {number} tasks
 */
export function pass({ estimate, low, high, tasks: of }, tasks) {
    return `${real(estimate)} (${bounds(low, high)})${of === tasks ? "" : `, ${of} of ${plural(tasks, "task")}`}`;
}

/**
 * "+0.030 (−0.010 to +0.070)"
 * @param {Schemas["EvalDifference"]} difference
 */
export function difference({ mean: value, low, high }) {
    return `${signed(value)} (${bounds(low, high, signed)})`;
}

/**
 * Whether a version can be told apart from the one before: kind, glyph and word of a badge; null without an interval.
 * @param {Schemas["EvalDifference"]} difference
 * @returns {[kind: string, glyph: string, word: string]|null}
 */
export function comparison({ low, high }) {
    if (low === null || high === null) {
        return null;
    }
    if (low > 0) {
        return ["good", "▲", "higher"];
    }
    return high < 0 ? ["bad", "▼", "lower"] : ["quiet", "≈", "no clear difference"];
}

/**
 * "5 won, 3 lost of 30 tasks"
 * @param {Schemas["EvalDifference"]} difference
 */
export function wonAndLost({ won, lost, tasks }) {
    return `${format.count(won)} won, ${format.count(lost)} lost of ${plural(tasks, "task")}`;
}

/**
 * The powers of two among the k of pass@k, and the largest: there may be 256.
 * @param {Schemas["PassAt"][]} passes
 */
export function somePasses(passes) {
    return passes.filter(({ k }, index) => Number.isInteger(Math.log2(k)) || index === passes.length - 1);
}

/** @type {(version: Pick<SuiteVersion, "version"|"step">) => string} */
export const named = ({ version, step }) => `v${version}${step === null ? "" : ` (step ${step})`}`;

/**
 * "120 rollouts of 30 tasks"
 * @param {Pick<SuiteVersion, "n"|"tasks">} version
 */
export function size({ n, tasks }) {
    return `${plural(n, "rollout")} of ${plural(tasks, "task")}`;
}

/**
 * What a point of a curve is, for those who do not see it.
 * @param {SuiteVersion} version
 */
export function point(version) {
    const compared = version.difference === null ? []
        : [`${difference(version.difference)} against v${version.difference.version}`];
    const state = version.complete ? "complete" : "incomplete";
    return [`${named(version)}: mean ${mean(version)}`, size(version), ...compared, state].join(", ");
}

/**
 * What a curve shows, in a sentence.
 * @param {Suite} suite
 */
export function curve({ versions }) {
    if (versions.length === 0) {
        return "No version has results yet.";
    }
    const means = versions.map((version) => version.mean);
    const [least, most] = [Math.min(...means), Math.max(...means)];
    const [last] = versions;
    return `Mean reward of ${plural(versions.length, "version")}: newest v${last.version} ${mean(last)}, ` +
        `from ${real(least)} to ${real(most)}.`;
}

/**
 * "30 tasks, 4 rollouts each; a rollout passes from reward 1"
 * @param {Pick<Suite, "tasks"|"repeats"|"threshold">} suite
 */
export function suite({ tasks, repeats, threshold }) {
    const rollouts = plural(repeats, "rollout");
    const many = tasks === null ? `${rollouts} of each task` : `${plural(tasks, "task")}, ${rollouts} each`;
    return `${many}; a rollout passes from reward ${threshold}`;
}
