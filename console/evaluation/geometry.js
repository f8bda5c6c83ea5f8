// Where the parts of a curve are, in hundredths of its box. Pure.

import * as format from "../format.js";
import { interval } from "./words.js";

/** The box is wider than the points by this much on both sides, so that the first and the last are not cut off. */
const INSET = 4;

/** Room above the highest and below the lowest value. */
const ROOM = 0.08;

const Y_TICKS = 4;
const X_TICKS = 6;

/** @type {(value: number) => string} */
const digits = (value) => String(Number(value.toFixed(3)));

/**
 * A distance between ticks, so that at most about `most` of them fit: 1, 2 or 5 times a power of ten.
 * @param {number} width
 * @param {number} most
 */
function distance(width, most) {
    const power = 10 ** Math.floor(Math.log10(width / most));
    return power * ([1, 2, 5, 10].find((factor) => width / (power * factor) <= most) ?? 10);
}

/**
 * The round numbers between two ends.
 * @param {number} low
 * @param {number} high
 * @param {number} by
 */
function rounds(low, high, by) {
    const first = Math.ceil(low / by - 1e-9);
    const last = Math.floor(high / by + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => {
        const value = (first + index) * by;
        // The sum of rounded distances has an error: 0.30000000000000004.
        return Math.abs(value) < by / 2 ? 0 : Number(value.toPrecision(12));
    });
}

/**
 * Zero is always in the picture, because a curve that fills its box looks dramatic.
 * @param {number[]} values
 * @returns {[low: number, high: number]}
 */
function domain(values) {
    const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
    const room = (high - low) * ROOM;
    return low === high ? [0, 1] : [low === 0 ? 0 : low - room, high === 0 ? 0 : high + room];
}

/** @type {(x: number, y: number) => string} */
const at = (x, y) => `${digits(x)},${digits(y)}`;

/**
 * The line through points, oldest first.
 * @param {CurvePoint[]} points
 */
function line(points) {
    return points.length < 2 ? "" : `M${points.map(({ x, y }) => at(x, y)).join("L")}`;
}

/**
 * The band of intervals. It ends where a version has none, and begins anew behind it.
 * @param {CurvePoint[]} points
 */
function band(points) {
    /** @type {{ x: number, top: number, bottom: number }[][]} */
    const runs = [[]];
    for (const { x, bounds } of points) {
        if (bounds === null) {
            runs.push([]);
        } else {
            runs[runs.length - 1].push({ x, top: bounds[1], bottom: bounds[0] });
        }
    }
    return runs.filter((run) => run.length > 1).map((run) => {
        const there = run.map(({ x, top }) => at(x, top));
        const back = run.toReversed().map(({ x, bottom }) => at(x, bottom));
        return `M${[...there, ...back].join("L")}Z`;
    }).join("");
}

/**
 * The shape of a curve. The line and the band go through the complete versions, because the mean of other tasks is
 * another number; if nobody has said how many tasks there are, they go through all.
 * @param {Pick<Suite, "tasks"|"versions">} suite
 * @returns {CurveShape}
 */
export function shape({ tasks, versions }) {
    const rows = versions.toSorted((first, second) => first.version - second.version);
    const values = rows.flatMap((version) => [version.mean, ...(interval(version) ?? [])]);
    const [low, high] = domain(values);
    const [first, last] = [rows[0]?.version ?? 0, rows.at(-1)?.version ?? 0];
    /** @param {number} version */
    const x = (version) => (first === last ? 50
        : INSET + ((version - first) / (last - first)) * (100 - 2 * INSET));
    /** @param {number} value */
    const y = (value) => 100 * (1 - (value - low) / (high - low));
    const all = rows.map((version, index) => {
        const [before, here, after] = [rows[index - 1], version, rows[index + 1]].map((row) => row && x(row.version));
        const from = before === undefined ? 0 : (before + here) / 2;
        const to = after === undefined ? 100 : (here + after) / 2;
        const found = interval(version);
        return {
            version, x: here, y: y(version.mean), from, width: to - from,
            bounds: found === null ? null : /** @type {[number, number]} */ ([y(found[0]), y(found[1])]),
        };
    });
    const through = all.filter(({ version }) => version.complete || tasks === null);
    const by = first === last ? 1 : Math.max(1, distance(last - first, X_TICKS));
    return {
        points: all,
        line: line(through),
        band: band(through),
        across: rows.length === 0 ? [] : rounds(first, last, by).map((tick) => ({ at: x(tick), text: `v${tick}` })),
        up: rounds(low, high, distance(high - low, Y_TICKS)).map((tick) => ({
            at: y(tick), text: format.real(tick, decimals(distance(high - low, Y_TICKS))),
        })),
    };
}

/**
 * The decimals that a tick needs.
 * @param {number} by
 */
function decimals(by) {
    return Math.max(0, -Math.floor(Math.log10(by) + 1e-9));
}
