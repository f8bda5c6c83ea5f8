// The draft of a policy's filters: fields for each filter, beside what the rules have now.

import { ApiError } from "../api.js";
import { kbd } from "../elements.js";
import * as format from "../format.js";
import { html, nothing, ref, repeat } from "../html.js";

/** Numbers of groups that the reader can choose. */
const GROUPS = [100, 500, 2000];

/**
 * What can happen to a match, by scope.
 * @type {Record<string, Filter["action"][]>}
 */
const ACTIONS = { rollout: ["drop", "mask"], group: ["drop"] };

let made = 0;

/**
 * A filter of the draft. `id` keeps the fields of a filter together when others are added, moved or removed.
 * @param {Filter} filter
 * @returns {Draft}
 */
export function entry({ name, scope, when, action }) {
    made += 1;
    return { id: made, name, scope, when, action };
}

/**
 * The filters as the service takes them.
 * @param {Draft[]} draft
 * @returns {Filter[]}
 */
export function filters(draft) {
    return draft.map(({ name, scope, when, action }) => ({ name, scope, when, action }));
}

/**
 * @param {TryContext} context
 * @param {Draft} rule
 * @param {Partial<Draft>} changes
 */
function change(context, rule, changes) {
    Object.assign(rule, changes);
    context.update({});
}

/**
 * @param {TryContext} context
 * @param {number} index
 * @param {number} by
 */
function move(context, index, by) {
    const draft = [...context.local.draft];
    draft.splice(index + by, 0, ...draft.splice(index, 1));
    context.update({ draft });
}

/** @type {(context: TryContext, index: number) => void} */
const without = (context, index) => context.update({ draft: context.local.draft.filter((_, each) => each !== index) });

/**
 * What the rules have instead of a filter of the draft.
 * @param {Draft} rule
 * @param {Filter[]} rules
 */
function before({ name, scope, when, action }, rules) {
    const now = rules.find((rule) => rule.name === name);
    if (now === undefined) {
        return html`<p class="quiet">new: the rules have no filter of this name</p>`;
    }
    const other = [now.scope !== scope && now.scope, now.action !== action && now.action].filter(Boolean);
    return now.when === when && other.length === 0 ? nothing
        : html`<p class="quiet">now <code class="untrusted undone">${format.visible(now.when)}</code>
            ${other.join(", ")}</p>`;
}

/**
 * @param {number} index
 * @param {unknown} problem
 */
function faults(index, problem) {
    const errors = problem instanceof ApiError ? problem.errors : [];
    const mine = errors.filter(({ pointer }) => pointer.startsWith(`/filter/${index}/`) ||
        pointer === `/filter/${index}`);
    return mine.map(({ pointer, detail }) => html`<p class="notice bad" role="alert">
        <code>${format.visible(pointer)}</code> ${format.visible(detail)}</p>`);
}

/**
 * @template {string} Option
 * @param {string} label
 * @param {Option} value
 * @param {Option[]} options
 * @param {(chosen: Option) => void} choose
 */
function select(label, value, options, choose) {
    /** @param {On<HTMLSelectElement>} event */
    const changed = ({ target }) => choose(options[target.selectedIndex]);
    return html`<label>${label} <select @change=${changed}>
        ${options.map((option) => html`<option .selected=${option === value}>${option}</option>`)}</select></label>`;
}

/**
 * Who comes from a reason edits the filter that it names.
 * @param {HTMLElement} field
 * @param {Draft} rule
 * @param {TryContext} context
 */
function focus(field, { name }, { params, local }) {
    if (name === params.filter && !local.isFocused) {
        local.isFocused = true;
        field.focus();
    }
}

/**
 * @param {Draft} rule
 * @param {number} index
 * @param {TryContext} context
 */
function fields(rule, index, context) {
    const { data, local } = context;
    /** @param {Partial<Draft>} changes */
    const set = (changes) => change(context, rule, changes);
    /** @param {Filter["scope"]} chosen */
    const scope = (chosen) => set({ scope: chosen,
        action: ACTIONS[chosen].includes(rule.action) ? rule.action : ACTIONS[chosen][0] });
    /** @param {On<HTMLInputElement>} event */
    const name = (event) => set({ name: event.target.value });
    /** @param {On<HTMLTextAreaElement>} event */
    const when = (event) => set({ when: event.target.value });
    const lines = Math.min(8, Math.max(2, Math.ceil(rule.when.length / 60)));
    return html`<fieldset class="filter">
        <legend>filter ${index + 1}</legend>
        <div class="toolbar">
            <label>name <input maxlength="64" autocomplete="off" spellcheck="false" .value=${rule.name}
                @input=${name}></label>
            ${select("scope", rule.scope, ["rollout", "group"], scope)}
            ${select("action", rule.action, ACTIONS[rule.scope], (action) => set({ action }))}
            <span class="spring"></span>
            <button type="button" ?disabled=${index === 0} aria-label=${`Move filter ${index + 1} up`}
                @click=${() => move(context, index, -1)}>↑</button>
            <button type="button" aria-label=${`Remove filter ${index + 1}`}
                @click=${() => without(context, index)}>Remove</button>
        </div>
        <label class="block">when <textarea class="mono" rows=${lines} maxlength="4096" spellcheck="false"
            .value=${rule.when} ${ref((field) => focus(field, rule, context))}
            @input=${when}></textarea></label>
        ${before(rule, data.rules.filter)}
        ${faults(index, local.problem)}
    </fieldset>`;
}

/** @param {TryContext} context */
function removed({ data, local }) {
    const gone = data.rules.filter.filter(({ name }) => !local.draft.some((rule) => rule.name === name));
    return gone.map(({ name, when }) => html`<p class="quiet">removed
        <span class="undone">${format.visible(name)}
            <code class="untrusted">${format.visible(when)}</code></span></p>`);
}

/**
 * The form. `run` tries the draft.
 * @param {TryContext} context
 * @param {(context: TryContext) => void} run
 */
export function form(context, run) {
    const { data, local } = context;
    /** @param {Event} event */
    const submit = (event) => {
        event.preventDefault();
        run(context);
    };
    /** @param {KeyboardEvent} event */
    const quick = (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
            submit(event);
        }
    };
    const add = () => context.update({
        draft: [...local.draft, entry({ name: "draft", scope: "group", when: "reward_std < 1e-6", action: "drop" })],
    });
    /** @param {On<HTMLSelectElement>} event */
    const groups = (event) => context.update({ groups: Number(event.target.value) });
    /** @param {On<HTMLInputElement>} event */
    const environment = (event) => context.update({ environment: event.target.value });
    const reset = () => context.update({ draft: data.rules.filter.map(entry) });
    return html`<form @submit=${submit} @keydown=${quick}>
        ${local.draft.length === 0 ? html`<p class="quiet">No filters: every rollout is kept.</p>` : nothing}
        ${repeat(local.draft, ({ id }) => id, (rule, index) => fields(rule, index, context))}
        ${removed(context)}
        <div class="toolbar">
            <button type="button" @click=${add}>Add a filter</button>
            <button type="button" @click=${reset}>Back to the rules</button>
        </div>
        <div class="toolbar">
            <label>over the last <select @change=${groups}>
                ${GROUPS.map((number) => html`<option value=${number} .selected=${number === local.groups}>
                    ${format.count(number)} groups</option>`)}</select></label>
            <label>environment <input type="search" autocomplete="off" spellcheck="false" .value=${local.environment}
                @input=${environment}></label>
            <button class="primary" ?disabled=${local.isTrying}>Try</button> ${kbd("Ctrl Enter")}
        </div>
    </form>`;
}
