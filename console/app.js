// The page: one state, one render, and what changes the state: the address, answers, keys and the reader's choices.

import { html, nothing, render } from "./html.js";
import * as address from "./address.js";
import * as api from "./api.js";
import * as format from "./format.js";
import * as keys from "./keys.js";
import { INTERVALS, Poll } from "./poll.js";
import * as router from "./router.js";
import * as session from "./session.js";
import * as shell from "./shell.js";

const INTERVAL_NAME = `forebay interval ${new URL("./", document.baseURI).pathname}`;

/** @type {State} */
const state = {
    phase: "starting",
    me: null,
    said: "",
    isAsking: false,
    view: null,
    params: {},
    data: null,
    local: {},
    error: null,
    loadedAt: null,
    failedSince: null,
    failedFrom: 0,
    trouble: "",
    newer: "",
    numbers: false,
    isHelpOpen: false,
    interval: storedInterval(),
    resumeTo: INTERVALS[0],
};

/** @type {Poll|null} */
let poll = null;
let leave = new AbortController();
/**
 * The question that is on its way.
 * @type {{ signal: AbortSignal, answer: Promise<void> }|null}
 */
let loading = null;
let isScheduled = false;

function storedInterval() {
    const stored = Number(localStorage.getItem(INTERVAL_NAME) ?? INTERVALS[0]);
    return stored === 0 || INTERVALS.includes(stored) ? stored : INTERVALS[0];
}

// ---- drawing

/** Draws the page once after all changes of this turn. */
function changed() {
    if (!isScheduled) {
        isScheduled = true;
        queueMicrotask(() => {
            isScheduled = false;
            draw();
        });
    }
}

/** @param {AnyContext} context */
function screen(context) {
    if (state.view === null) {
        return html`<h1>No such screen</h1><p><a href=${address.hash("")}>All policies</a></p>`;
    }
    if (state.error !== null) {
        return shell.failure(state.error);
    }
    return state.data === null ? html`<p class="quiet" role="status">Loading</p>` : state.view.render(context);
}

function page() {
    if (state.phase === "starting") {
        return html`<main><p class="quiet" role="status">Loading</p></main>`;
    }
    if (state.phase === "login") {
        return shell.login(state, actions);
    }
    const context = makeContext();
    return html`${shell.header(state, context, actions)}
        <main id="main" tabindex="-1" aria-busy=${state.data === null && state.error === null ? "true" : "false"}>
            ${shell.trouble(state)}
            ${shell.newer(state, actions)}
            ${screen(context)}
        </main>
        ${shell.help(state, actions)}`;
}

function draw() {
    const title = state.phase === "open" && state.view ? state.view.title(makeContext()) : "";
    document.title = title ? `${format.visible(title)} · Forebay` : "Forebay";
    render(page(), document.body);
}

/** @returns {AnyContext} */
function makeContext() {
    const { signal } = leave;
    return {
        params: state.params,
        data: state.data,
        local: state.local,
        me: state.me,
        numbers: state.numbers,
        now: api.now,
        update(changes) {
            Object.assign(state.local, changes);
            changed();
        },
        get: (/** @type {string} */ path, /** @type {Changes=} */ query) =>
            api.json("GET", api.address(path, query), { signal }),
        post: (path, body) => api.json("POST", path, { body, signal }),
        getRaw: (path, query) => api.send("GET", api.address(path, query), { signal }),
        go,
        refresh,
    };
}

// ---- data

/** Loads what the screen shows; what is on its way is not asked for twice. */
function load() {
    if (loading?.signal !== leave.signal) {
        const { signal } = leave;
        const asked = { signal, answer: ask(signal) };
        const done = () => {
            loading = loading === asked ? null : loading;
        };
        asked.answer.then(done, done);
        loading = asked;
    }
    return loading.answer;
}

/**
 * Asks for what the screen shows. An answer for a screen that the reader has left is not used.
 * @param {AbortSignal} signal
 */
async function ask(signal) {
    const { view } = state;
    if (view === null) {
        return;
    }
    try {
        const data = await view.load(makeContext());
        if (signal.aborted) {
            return;
        }
        Object.assign(state, { data, error: null, loadedAt: api.now(), failedSince: null, newer: "" });
    } catch (error) {
        if (signal.aborted) {
            return;
        }
        failed(error);
        throw error;
    } finally {
        changed();
    }
}

async function peek() {
    const { view } = state;
    const { signal } = leave;
    if (!view?.peek || (state.data === null && isTemporary(state.error))) {
        return load();
    }
    if (state.data === null) {
        return;
    }
    try {
        const newer = await view.peek(makeContext());
        if (!signal.aborted) {
            Object.assign(state, { newer: newer ?? "", loadedAt: api.now(), failedSince: null });
        }
    } catch (error) {
        if (!signal.aborted) {
            failed(error);
            throw error;
        }
    } finally {
        changed();
    }
}

/**
 * Whether the same question may have an answer later.
 * @param {unknown} error
 */
function isTemporary(error) {
    return error === null || !(error instanceof api.ApiError) || error.status === 429 || error.status >= 500;
}

/** @param {unknown} error */
function failed(error) {
    if (error instanceof api.Unauthorized) {
        session.refused();
        toLogin(error.detail);
    } else if (error instanceof api.ApiError && !isTemporary(error)) {
        Object.assign(state, { error, data: null });
    } else {
        if (!(error instanceof api.ApiError) && !(error instanceof api.Unreachable)) {
            // A bug of the page: it is said on the screen, and the details are in the console.
            console.error(error);
        }
        const sentence = error instanceof api.ApiError ? `${error.title} (${error.status})` : api.message(error);
        state.trouble = format.visible(sentence);
        if (state.failedSince === null) {
            state.failedSince = state.loadedAt ?? api.now();
            state.failedFrom = performance.now() - (api.now() - state.failedSince);
        }
    }
}

/** Loads again because the reader asks for it. */
async function refresh() {
    let failure = null;
    try {
        await load();
    } catch (error) {
        failure = error;
    }
    poll?.answered(failure);
}

// ---- where the reader is

/** Shows the screen of the address. */
function enter() {
    if (state.phase !== "open") {
        return;
    }
    const before = state.view;
    const { view, params } = router.resolve(location.hash);
    const isSame = view === before && view?.isSame?.(state.params, params);
    leave.abort();
    leave = new AbortController();
    poll?.stop();
    poll = null;
    Object.assign(state, { view, params, error: null, newer: "", isHelpOpen: false });
    if (!isSame) {
        Object.assign(state, { data: null, local: view?.local?.(params) ?? {}, loadedAt: null, failedSince: null });
        window.scrollTo(0, 0);
        if (before !== null) {
            document.getElementById("main")?.focus({ preventScroll: true });
        }
    }
    changed();
    if (view === null) {
        return;
    }
    // A screen that never asks by itself still does until it has its data.
    const ask = view.live ? load : view.peek ? peek : () => (state.data === null ? load() : Promise.resolve());
    poll = new Poll(ask, state.interval);
    poll.start();
    refresh();
}

/**
 * Changes the query of the address: null removes a parameter. `replace` leaves no step for the way back.
 * @param {Changes} changes
 * @param {{ replace?: boolean }} options
 */
function go(changes, { replace = false } = {}) {
    const { segments, query } = address.split(location.hash);
    const target = address.hash(segments.join("/"), { ...query, ...changes });
    if (replace) {
        history.replaceState(null, "", target);
        enter();
    } else {
        location.hash = target;
    }
}

// ---- who reads

/** @param {string} said */
function toLogin(said) {
    leave.abort();
    poll?.stop();
    poll = null;
    Object.assign(state, { phase: "login", said, isAsking: false, isHelpOpen: false, me: null });
    // Nothing of what the key opened stays in the page.
    Object.assign(state, { view: null, params: {}, data: null, local: {}, error: null, loadedAt: null });
    Object.assign(state, { failedSince: null, newer: "" });
    changed();
}

/** Asks who the reader is, with the key that there is or without one, and opens the page or the login. */
async function open() {
    const key = session.current();
    try {
        state.me = await api.json("GET", "./whoami", { key });
    } catch (error) {
        if (key !== session.current()) {
            // Another tab has handed over its key meanwhile, and the page asks with that.
            return;
        }
        if (error instanceof api.Unauthorized) {
            if (key !== null) {
                session.refused();
            }
            toLogin(key === null ? "" : error.detail);
        } else {
            toLogin(error instanceof api.ApiError ? `${error.title}: ${error.detail}` : api.message(error));
        }
        return;
    }
    Object.assign(state, { phase: "open", said: "" });
    enter();
}

/** @type {Actions} */
const actions = {
    async logIn(key, inBrowser) {
        Object.assign(state, { isAsking: true, said: "" });
        changed();
        try {
            // A key can hold only what a header can.
            if (!/^[\x21-\x7e]+$/.test(key)) {
                throw new api.ApiError(401, { detail: "a key begins with fb_ and has no spaces" }, null);
            }
            state.me = await api.json("GET", "./whoami", { key });
        } catch (error) {
            toLogin(format.visible(api.message(error)));
            return;
        }
        session.keep(key, inBrowser);
        Object.assign(state, { phase: "open", isAsking: false });
        enter();
    },
    forget() {
        session.forget();
        toLogin("");
    },
    ask(id) {
        if (id !== "") {
            location.hash = address.hash("why", { id });
        }
    },
    /** The reasons for what is shown, where the screen itself has none. */
    why() {
        const { policy, id } = state.params;
        if (policy === undefined) {
            document.getElementById("ask")?.focus();
        } else if (id === undefined) {
            location.hash = address.hash(`policies/${policy}`);
        } else {
            location.hash = address.whyHash(id, policy);
        }
    },
    setInterval(interval) {
        if (state.interval !== 0) {
            state.resumeTo = state.interval;
        }
        state.interval = interval;
        localStorage.setItem(INTERVAL_NAME, String(interval));
        poll?.every(interval);
        changed();
    },
    togglePause() {
        const resumes = state.interval === 0;
        actions.setInterval(resumes ? state.resumeTo : 0);
        if (resumes) {
            refresh();
        }
    },
    toggleNumbers() {
        state.numbers = !state.numbers;
        changed();
    },
    toggleHelp() {
        state.isHelpOpen = !state.isHelpOpen;
        changed();
    },
    closeHelp() {
        state.isHelpOpen = false;
        changed();
    },
    up() {
        const target = address.above(location.hash);
        if (target !== null) {
            location.hash = target;
        }
    },
    skip(event) {
        event.preventDefault();
        document.getElementById("main")?.focus();
    },
    refresh,
};

session.listen((what) => {
    if (what === "forgotten") {
        toLogin("The key was forgotten in another tab.");
    } else {
        open();
    }
});
window.addEventListener("hashchange", enter);
document.addEventListener("keydown", (event) => {
    if (state.phase === "open") {
        keys.pressed(event, state.view?.keys ?? [], makeContext, actions);
    }
});

// Ages grow while the reader looks; what does not ask by itself has none that matter.
setInterval(() => {
    if (!document.hidden && state.phase === "open" && (state.view?.live || state.failedSince !== null)) {
        draw();
    }
}, 1000);

if (session.current() === null) {
    session.ask();
}
open();
changed();
