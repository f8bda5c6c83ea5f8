// Which siblings stand side by side, in which order, and what their messages have in common. Pure.

import * as format from "../format.js";

/** @type {(value: (row: Rollout) => number|null|undefined, direction: number) => (rows: Rollout[]) => Rollout[]} */
const by = (value, direction) => (rows) =>
    rows.toSorted((a, b) => format.compareReal(value(a), value(b), direction));

const highest = by((row) => row.reward, -1);

/**
 * The best and the worst in turn, so that any number of columns shows both.
 * @param {Rollout[]} rows
 */
function extremes(rows) {
    const left = highest(rows);
    const taken = [];
    while (left.length > 0) {
        taken.push(...left.splice(0, 1));
        // What has no reward is last in every order, so it is not the worst.
        const worst = left.findLastIndex(({ reward: value }) => value !== null);
        if (worst !== -1) {
            taken.push(...left.splice(worst, 1));
        }
    }
    return taken;
}

/**
 * The orders of the columns.
 * @type {Record<string, (rows: Rollout[]) => Rollout[]>}
 */
export const ORDERS = {
    "best and worst": extremes,
    "reward ↓": highest,
    "reward ↑": by((row) => row.reward, 1),
    "tokens ↓": by((row) => row.tokens, -1),
    "as they came": (rows) => rows,
};

/**
 * The siblings of the columns: some of them, from `local.first` on.
 * @param {Pick<GroupData, "siblings">} data
 * @param {GroupLocal} local
 */
export function chosen({ siblings }, local) {
    const rows = ORDERS[local.order](siblings);
    const first = Math.min(local.first, Math.max(0, rows.length - 1));
    const shown = rows.slice(first, first + local.count);
    // The order decides which are shown; among them, the highest reward is on the left.
    return local.order === "best and worst" ? highest(shown) : shown;
}

/**
 * How many messages are the same in all columns that have any.
 * @param {ChatItem[][]} lists
 */
export function commonMessages(lists) {
    if (lists.length < 2) {
        return 0;
    }
    const [first, ...others] = lists;
    /**
     * @param {ChatItem} item
     * @param {number} index
     */
    const same = (item, index) => {
        const text = JSON.stringify(item.message);
        return item.message !== null &&
            others.every((list) => list[index]?.message && JSON.stringify(list[index].message) === text);
    };
    const end = first.findIndex((item, index) => !same(item, index));
    return end === -1 ? first.length : end;
}
