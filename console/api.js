// The one place that talks to the service.

import * as session from "./session.js";

/**
 * What a request has besides its method and address. `key` is for the login alone, which tries a key before it is kept.
 * @typedef {{ body?: unknown, headers?: Record<string, string>, signal?: AbortSignal, key?: string|null }} Options
 */

/** What the service answered instead of data: a problem of RFC 9457. */
export class ApiError extends Error {
    /**
     * @param {number} status
     * @param {Partial<Problem>} problem
     * @param {number|null} retryAfter
     */
    constructor(status, problem, retryAfter) {
        super(problem.detail ?? problem.title ?? `The service answered ${status}`);
        this.status = status;
        this.type = problem.type ?? "";
        this.title = problem.title ?? `The service answered ${status}`;
        this.detail = problem.detail ?? "";
        this.errors = problem.errors ?? [];
        /** Milliseconds after which the service wants to be asked again, or null. */
        this.retryAfter = retryAfter;
    }
}

/** The service did not answer. */
export class Unreachable extends Error {
    constructor() {
        super("The service does not answer");
    }
}

/**
 * What an error says.
 * @param {unknown} error
 */
export function message(error) {
    return error instanceof Error ? error.message : String(error);
}

/**
 * Whether a question has ended because the reader left the screen.
 * @param {unknown} error
 */
export function isAborted(error) {
    return error instanceof DOMException && error.name === "AbortError";
}

/** The service does not accept the key. */
export class Unauthorized extends ApiError {}

/** @type {{ at: number, measured: number, isExact: boolean }|null} */
let clock = null;

/** The time of the service in milliseconds: the newest `at` of its answers, and the time since then. */
export function now() {
    return clock === null ? Date.now() : clock.at + (performance.now() - clock.measured);
}

/**
 * @param {string|null} moment
 * @param {boolean} isExact
 */
function tellTime(moment, isExact) {
    const at = Date.parse(moment ?? "");
    // A header has whole seconds, and that of a proxy may be of another clock: it counts until an answer has `at`.
    if (!Number.isNaN(at) && (isExact || !clock?.isExact)) {
        clock = { at, measured: performance.now(), isExact };
    }
}

/**
 * "./groups" and { policy: "p", after: null } -> "./groups?policy=p"
 * @param {string} path
 * @param {Changes} query
 */
export function address(path, query = {}) {
    const search = new URLSearchParams();
    for (const [name, value] of Object.entries(query)) {
        if (value !== null && value !== undefined && value !== "") {
            search.append(name, String(value));
        }
    }
    const text = search.toString();
    return text === "" ? path : `${path}?${text}`;
}

/** @param {Response} response */
function wait(response) {
    const seconds = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
    return Number.isNaN(seconds) ? null : seconds * 1000;
}

/**
 * @param {Response} response
 * @returns {Promise<Partial<Problem>>}
 */
async function problem(response) {
    const body = await response.json().catch(() => null);
    return body !== null && typeof body === "object" ? body : {};
}

/**
 * Sends a request with the key and returns the response if it is a success or a 304.
 * @param {string} method
 * @param {string} url
 * @param {Options} options
 * @returns {Promise<Response>}
 */
export async function send(method, url, { body, headers = {}, signal, key = session.current() } = {}) {
    const sent = new Headers({ accept: "application/json", ...headers });
    if (key !== null) {
        sent.set("authorization", `Bearer ${key}`);
    }
    let payload;
    if (body !== undefined) {
        sent.set("content-type", "application/json");
        payload = JSON.stringify(body);
    }
    let response;
    try {
        response = await fetch(url, { method, headers: sent, body: payload, signal, cache: "no-store" });
    } catch (error) {
        if (signal?.aborted) {
            throw error;
        }
        throw new Unreachable();
    }
    tellTime(response.headers.get("date"), false);
    if (response.ok || response.status === 304) {
        return response;
    }
    const found = await problem(response);
    const Kind = response.status === 401 ? Unauthorized : ApiError;
    throw new Kind(response.status, found, wait(response));
}

/**
 * Sends a request and returns the answer's JSON.
 * @param {string} method
 * @param {string} url
 * @param {Options} options
 * @returns {Promise<any>}
 */
export async function json(method, url, options = {}) {
    const response = await send(method, url, options);
    let answer;
    try {
        answer = await response.json();
    } catch (error) {
        if (options.signal?.aborted) {
            throw error;
        }
        // The connection ended within the answer.
        throw new Unreachable();
    }
    if (typeof answer?.at === "string") {
        tellTime(answer.at, true);
    }
    return answer;
}

/**
 * For expected answers: `get(...).catch(absent(404, 410))` gives null for these.
 * @param {...number} statuses
 * @returns {(error: unknown) => null}
 */
export function absent(...statuses) {
    return (error) => {
        if (error instanceof ApiError && statuses.includes(error.status)) {
            return null;
        }
        throw error;
    };
}
