// Addresses of screens: what stands behind `#` in the page's address. Ids are always in the query, because they may
// contain slashes. Nothing of it is sent to the service.

/**
 * hash("policies/a/groups", { id: "x/y", after: null }) -> "#/policies/a/groups?id=x%2Fy"
 * @param {string} path
 * @param {Changes} query
 */
export function hash(path, query = {}) {
    const search = new URLSearchParams();
    for (const [name, value] of Object.entries(query)) {
        if (value !== null && value !== undefined && value !== "") {
            search.append(name, String(value));
        }
    }
    const encoded = path.split("/").map(encodeURIComponent).join("/");
    const text = search.toString();
    return `#/${encoded}${text === "" ? "" : `?${text}`}`;
}

/** @param {string} segment */
function decoded(segment) {
    try {
        return decodeURIComponent(segment);
    } catch {
        return segment;
    }
}

/**
 * The path segments and the query of a hash.
 * @param {string} text
 * @returns {{ segments: string[], query: Record<string, string> }}
 */
export function split(text) {
    const [path, ...query] = text.replace(/^#\/?/, "").split("?");
    const segments = path.split("/").filter((segment) => segment !== "").map(decoded);
    return { segments, query: Object.fromEntries(new URLSearchParams(query.join("?"))) };
}

/**
 * Screens of one thing whose list has another name.
 * @type {Record<string, string>}
 */
const ABOVE = { rollout: "rollouts" };

/**
 * The hash one level up, or null at the top.
 * @param {string} text
 */
export function above(text) {
    const { segments, query } = split(text);
    if (segments.length === 0) {
        return null;
    }
    // From one thing to the list it is in, and from there to what contains the list.
    const name = segments[segments.length - 1];
    if (query.id !== undefined && segments.length > 1) {
        return hash([...segments.slice(0, -1), ABOVE[name] ?? name].join("/"));
    }
    return segments.length > 2 ? hash(segments.slice(0, 2).join("/")) : hash("");
}

/**
 * The address of one rollout.
 * @param {string} policy
 * @param {string} id
 */
export function rolloutHash(policy, id) {
    return hash(`policies/${policy}/rollout`, { id });
}

/**
 * The address of one group.
 * @param {string} policy
 * @param {string} id
 */
export function groupHash(policy, id) {
    return hash(`policies/${policy}/groups`, { id });
}

/**
 * The address of one batch.
 * @param {string} policy
 * @param {string} id
 */
export function batchHash(policy, id) {
    return hash(`policies/${policy}/batches`, { id });
}

/**
 * The address of one optimizer step.
 * @param {string} policy
 * @param {number} step
 */
export function stepHash(policy, step) {
    return hash(`policies/${policy}/steps`, { id: step });
}

/**
 * The address of a suite at a version.
 * @param {string} policy
 * @param {string} suite
 * @param {number} version
 */
export function suiteHash(policy, suite, version) {
    return hash(`policies/${policy}/suites/${suite}`, { version });
}

/**
 * The address of the answer for an id.
 * @param {string} id
 * @param {string|null} policy
 */
export function whyHash(id, policy = null) {
    return hash("why", { id, policy });
}

/** @type {Record<string, string>} */
const LISTS = { groups: "groups", trajectories: "rollouts", batches: "batches", steps: "steps" };
/** @type {Record<string, string>} */
const ONE = { trajectories: "rollout" };
/** @type {Record<string, string>} */
const IDS = { groups: "group_id", trajectories: "rollout_id", batches: "batch_id" };

/**
 * Maps a call of the API, such as "./groups?policy=p&state=ready", to the screen that shows its answer, or null.
 * @param {string} see
 * @param {string|null} ofPolicy
 */
export function fromSee(see, ofPolicy = null) {
    const [path, text = ""] = see.replace(/^\.?\//, "").split("?");
    const { policy, ...query } = Object.fromEntries(new URLSearchParams(text));
    const name = path.split("/");
    if (name[0] === "batches" && name.length === 2 && ofPolicy !== null) {
        return batchHash(ofPolicy, decoded(name[1]));
    }
    if (policy !== undefined && name.length === 1 && LISTS[name[0]] !== undefined) {
        const { [IDS[name[0]]]: id, ...rest } = query;
        delete rest.order;
        delete rest.limit;
        const screen = id === undefined ? LISTS[name[0]] : (ONE[name[0]] ?? LISTS[name[0]]);
        return hash(`policies/${policy}/${screen}`, { ...rest, id });
    }
    if (name[0] === "policies" && name.length >= 2) {
        const screen = { steps: "/steps", try: "/try", filters: "/try" }[name[2]] ?? "";
        return hash(`policies/${decoded(name[1])}${screen}`);
    }
    return null;
}
