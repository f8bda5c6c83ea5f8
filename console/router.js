// Which screen an address shows.

import { split } from "./address.js";
import { view as batch } from "./views/batch.js";
import { view as batches } from "./views/batches.js";
import { view as group } from "./views/group.js";
import { view as groups } from "./views/groups.js";
import { view as overview } from "./views/overview.js";
import { view as policy } from "./views/policy.js";
import { view as rollout } from "./views/rollout.js";
import { view as rollouts } from "./views/rollouts.js";
import { view as step } from "./views/step.js";
import { view as steps } from "./views/steps.js";
import { view as suite } from "./views/suite.js";
import { view as tryOut } from "./views/try.js";
import { view as why } from "./views/why.js";

/**
 * Segments that begin with a colon are parameters. `needs` is a query parameter that chooses between two screens.
 * @type {{ path: string, view: View<any, any, any>, needs?: string }[]}
 */
const ROUTES = [
    { path: "", view: overview },
    { path: "why", view: why },
    { path: "policies/:policy", view: policy },
    { path: "policies/:policy/batches", view: batch, needs: "id" },
    { path: "policies/:policy/batches", view: batches },
    { path: "policies/:policy/groups", view: group, needs: "id" },
    { path: "policies/:policy/groups", view: groups },
    { path: "policies/:policy/steps", view: step, needs: "id" },
    { path: "policies/:policy/steps", view: steps },
    { path: "policies/:policy/suites/:suite", view: suite },
    { path: "policies/:policy/try", view: tryOut },
    { path: "policies/:policy/rollouts", view: rollout, needs: "id" },
    { path: "policies/:policy/rollouts", view: rollouts },
    { path: "policies/:policy/rollout", view: rollout, needs: "id" },
];

/** The screens of a policy besides its own: title and last segment of the path. */
export const SCREENS = [
    ["Rollouts", "rollouts"],
    ["Groups", "groups"],
    ["Batches", "batches"],
    ["Steps", "steps"],
    ["Try a filter", "try"],
];

/**
 * @param {string} pattern
 * @param {string[]} segments
 */
function match(pattern, segments) {
    const parts = pattern === "" ? [] : pattern.split("/");
    if (parts.length !== segments.length) {
        return null;
    }
    /** @type {Params} */
    const params = {};
    for (const [index, part] of parts.entries()) {
        if (part.startsWith(":")) {
            params[part.slice(1)] = segments[index];
        } else if (part !== segments[index]) {
            return null;
        }
    }
    return params;
}

/**
 * The screen and the parameters of a hash; the screen is null if there is none.
 * @param {string} text
 * @returns {{ view: View<any, any, any>|null, params: Params }}
 */
export function resolve(text) {
    const { segments, query } = split(text);
    for (const route of ROUTES) {
        const params = match(route.path, segments);
        if (params !== null && (route.needs === undefined || query[route.needs] !== undefined)) {
            return { view: route.view, params: { ...query, ...params } };
        }
    }
    return { view: null, params: query };
}
