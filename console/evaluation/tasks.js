// The tasks of a suite at two versions: what became of each, and their order. Pure.

/**
 * What became of a task since the version before.
 * @param {EvalTask} task
 * @returns {TaskOutcome}
 */
export function outcome({ now, before }) {
    if (now === null || before === null) {
        return now === null ? "missing" : "new";
    }
    return now.mean < before.mean ? "lost" : now.mean > before.mean ? "won" : "same";
}

/**
 * How much a task changed, or null if it is of one version only.
 * @param {EvalTask} task
 */
export function change({ now, before }) {
    return now === null || before === null ? null : now.mean - before.mean;
}

/** @type {Record<TaskOutcome, number>} */
const PLACES = { lost: 0, won: 1, same: 2, new: 2, missing: 2 };

/**
 * The tasks that were lost, then those that were won, the largest changes first, and then the rest as it came.
 * @param {EvalTask[]} tasks
 */
export function ordered(tasks) {
    /** @param {EvalTask} task */
    const size = (task) => Math.abs(change(task) ?? 0);
    return tasks.toSorted((a, b) => PLACES[outcome(a)] - PLACES[outcome(b)] || size(b) - size(a));
}

/**
 * How many tasks had each outcome.
 * @param {EvalTask[]} tasks
 */
export function counts(tasks) {
    const found = { lost: 0, won: 0, same: 0, new: 0, missing: 0 };
    for (const task of tasks) {
        found[outcome(task)] += 1;
    }
    return found;
}
