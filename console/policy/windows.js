// The windows of the charts over time.

/**
 * The windows of the charts over time: seconds, and the width of a bucket. The service may answer with wider ones.
 * @type {Record<string, [seconds: number, step: number]>}
 */
export const WINDOWS = {
    "10 min": [600, 60],
    "1 h": [3600, 60],
    "6 h": [6 * 3600, 60],
    "24 h": [24 * 3600, 60],
    "14 d": [14 * 86_400, 1200],
    "180 d": [180 * 86_400, 10_800],
};

/** The window of a policy whose first rollout of the last hour is younger than that, and of all others. */
const YOUNG = "10 min";
const USUAL = "1 h";

/**
 * The window that fits the age of the data. A policy that goes on after an hour of silence begins anew.
 * @param {Schemas["PolicySeries"]} hour
 * @param {number} to milliseconds
 */
export function fitting(hour, to) {
    const first = hour.at.find((_, index) => (hour.metrics.received?.[index] ?? 0) > 0);
    return first !== undefined && to / 1000 - first <= WINDOWS[YOUNG][0] ? YOUNG : USUAL;
}
