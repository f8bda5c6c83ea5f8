// What stands around every screen: the header, the login, messages about the connection, and the list of keys.

import { hash } from "./address.js";
import * as format from "./format.js";
import { html, nothing, ref } from "./html.js";
import { INTERVALS } from "./poll.js";
import { SCREENS } from "./router.js";

/** The keys that work on every screen. */
export const GLOBAL_KEYS = [
    ["/", "ask about a rollout, group, batch or session by its id"],
    ["j k", "next and previous row"],
    ["w", "why: the reasons"],
    ["t", "numbers as tables instead of charts"],
    ["p", "pause, and go on"],
    ["u", "one level up"],
    ["?", "this list"],
];

/**
 * The screen without a key.
 * @param {State} state
 * @param {Actions} actions
 */
export function login(state, actions) {
    /** @param {On<HTMLFormElement>} event */
    const submit = (event) => {
        event.preventDefault();
        const form = new FormData(event.target);
        actions.logIn(String(form.get("key")).trim(), form.get("keep") !== null);
    };
    return html`<main class="login">
        <form class="panel" @submit=${submit}>
            <h1>Forebay</h1>
            ${state.said ? html`<p role="alert" class="notice bad">${state.said}</p>` : nothing}
            <label for="key">Key</label>
            <input id="key" name="key" type="password" autocomplete="current-password" spellcheck="false" required
                aria-describedby="key-help" ${ref((field) => field.focus())}>
            <p id="key-help" class="quiet">It begins with <code>fb_</code> and has the role read, train, produce or
                admin. It stays in this tab, and other tabs of this page get it from here.</p>
            <label class="check"><input type="checkbox" name="keep"> Keep the key in this browser</label>
            <button class="primary" ?disabled=${state.isAsking}>Show</button>
        </form>
    </main>`;
}

/** @param {State} state */
function trail(state) {
    const { policy } = state.params;
    const links = [["Policies", hash("")]];
    if (policy) {
        /** @param {string} screen */
        const of = (screen) => hash(`policies/${policy}${screen}`);
        links.push([policy, of("")], ...SCREENS.map(([title, screen]) => [title, of(`/${screen}`)]));
    }
    const here = location.hash.split("?")[0] || hash("");
    return html`<nav aria-label="Screens">
        ${links.map(([title, href]) => html`<a href=${href} aria-current=${href === here ? "page" : nothing}>
            ${title}</a>`)}
    </nav>`;
}

/** @param {Actions} actions */
function asking(actions) {
    /** @param {On<HTMLFormElement>} event */
    const submit = (event) => {
        event.preventDefault();
        actions.ask(String(new FormData(event.target).get("id")).trim());
    };
    return html`<form class="ask" role="search" @submit=${submit}>
        <label for="ask">why</label>
        <input id="ask" name="id" type="search" autocomplete="off" spellcheck="false"
            placeholder="id of anything ( / )">
    </form>`;
}

/**
 * @param {State} state
 * @param {AnyContext} context
 * @param {Actions} actions
 */
function liveliness(state, context, actions) {
    if (!state.view?.live && !state.view?.peek) {
        return nothing;
    }
    /** @param {number} interval */
    const is = (interval) => state.interval === interval;
    /** @param {On<HTMLSelectElement>} event */
    const choose = (event) => actions.setInterval(Number(event.target.value));
    // A screen that a reader reads does not change under the eyes; it asks whether there is more.
    const age = state.interval === 0 ? "paused" : state.view.live ? "live" : "looked for news";
    return html`<span class="live">
        <span>${age} · ${state.loadedAt === null ? "–" : format.ago(new Date(state.loadedAt).toISOString(),
            context.now())} ago</span>
        <select aria-label="Ask again" @change=${choose}>
            <option value="0" ?selected=${is(0)} .selected=${is(0)}>paused</option>
            ${INTERVALS.map((interval) => html`<option value=${interval} ?selected=${is(interval)}
                .selected=${is(interval)}>every ${format.duration(interval)}</option>`)}
        </select>
        <button type="button" @click=${actions.togglePause}>${state.interval === 0 ? "Go on" : "Pause"}</button>
    </span>`;
}

/**
 * @param {State} state
 * @param {Actions} actions
 */
function whose(state, actions) {
    if (!state.me?.keys_required) {
        return nothing;
    }
    return html`<span class="key">key: <bdi>${format.visible(state.me.name ?? state.me.key_id)}</bdi> (${state.me.role})
        <button type="button" @click=${actions.forget}>Forget</button></span>`;
}

/**
 * The line at the top of every screen.
 * @param {State} state
 * @param {AnyContext} context
 * @param {Actions} actions
 */
export function header(state, context, actions) {
    return html`<header class="top">
        <a class="skip" href="#main" @click=${actions.skip}>Skip to the screen</a>
        <a class="brand" href=${hash("")}>Forebay</a>
        ${trail(state)}
        ${asking(actions)}
        <span class="spring"></span>
        ${liveliness(state, context, actions)}
        ${whose(state, actions)}
        <button type="button" aria-label="Keys" title="Keys (?)" @click=${actions.toggleHelp}>?</button>
    </header>`;
}

/**
 * What is wrong with the connection; the data on the screen is old.
 * @param {State} state
 */
export function trouble(state) {
    if (!state.failedSince) {
        return nothing;
    }
    const since = format.clock(new Date(state.failedSince).toISOString());
    const lasted = format.duration(Math.floor((performance.now() - state.failedFrom) / 1000) * 1000);
    const old = state.data === null ? "" : " What you see is from before.";
    return html`<p class="notice bad trouble" role="alert">${state.trouble}, since ${since}
        <span aria-hidden="true">(${lasted})</span>.${old} The page tries again by itself.</p>`;
}

/**
 * Why a screen has no data.
 * @param {any} error
 */
export function failure(error) {
    /** @type {Schemas["Violation"][]} */
    const violations = error.errors ?? [];
    return html`<section class="panel">
        <h1>${format.visible(error.title ?? "The service does not answer")}</h1>
        <p>${format.visible(error.detail ?? "")}</p>
        ${violations.map((each) => html`<p><code>${format.visible(each.pointer)}</code>
            ${format.visible(each.detail)}</p>`)}
    </section>`;
}

/**
 * The bar of a screen that does not change by itself.
 * @param {State} state
 * @param {Actions} actions
 */
export function newer(state, actions) {
    return state.newer
        ? html`<p class="notice info" role="status">${state.newer}
            <button type="button" @click=${actions.refresh}>Show</button></p>`
        : nothing;
}

/**
 * The list of keys.
 * @param {State} state
 * @param {Actions} actions
 */
export function help(state, actions) {
    if (!state.isHelpOpen) {
        return nothing;
    }
    /**
     * @param {string} key
     * @param {string} text
     */
    const row = (key, text) => html`<div><dt>${key.split(" ").map((each) => html`<kbd>${each}</kbd> `)}</dt>
        <dd>${text}</dd></div>`;
    return html`<dialog class="panel" aria-labelledby="help-title" @close=${actions.closeHelp}
        ${ref((dialog) => dialog.isConnected && dialog.showModal())}>
        <h2 id="help-title">Keys</h2>
        <dl class="facts keys">
            ${(state.view?.keys ?? []).map(({ key, help: text }) => row(key, text))}
            ${GLOBAL_KEYS.map(([key, text]) => row(key, text))}
        </dl>
        <button type="button" @click=${actions.closeHelp}>Close</button>
    </dialog>`;
}
