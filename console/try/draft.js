// The draft of a policy's filters: fields for each filter, beside what the rules have now.

import { kbd } from "../elements.js";
import * as format from "../format.js";
import { html, nothing, ref, repeat } from "../html.js";

/** Numbers of groups that the reader can choose. */
const GROUPS = [100, 500, 2000];

/** What can happen to a match, by scope. */
const ACTIONS = { rollout: ["drop", "mask"], group: ["drop"] };

let made = 0;

/** A filter of the draft. `id` keeps the fields of a filter together when others are added, moved or removed. */
export function entry({ name, scope, when, action }) {
    made += 1;
    return { id: made, name, scope, when, action };
}

/** The filters as the service takes them. */
export function filters(draft) {
    return draft.map(({ name, scope, when, action }) => ({ name, scope, when, action }));
}

function change(context, rule, changes) {
    Object.assign(rule, changes);
    context.update({});
}

function move(context, index, by) {
    const draft = [...context.local.draft];
    draft.splice(index + by, 0, ...draft.splice(index, 1));
    context.update({ draft });
}

const without = (context, index) => context.update({ draft: context.local.draft.filter((_, each) => each !== index) });

/** What the rules have instead of a filter of the draft. */
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

function faults(index, problem) {
    const mine = (problem?.errors ?? []).filter(({ pointer }) => pointer?.startsWith(`/filter/${index}/`) ||
        pointer === `/filter/${index}`);
    return mine.map(({ pointer, detail }) => html`<p class="notice bad" role="alert">
        <code>${format.visible(pointer)}</code> ${format.visible(detail)}</p>`);
}

function select(label, value, options, choose) {
    return html`<label>${label} <select @change=${(event) => choose(event.target.value)}>
        ${options.map((option) => html`<option .selected=${option === value}>${option}</option>`)}</select></label>`;
}

/** Who comes from a reason edits the filter that it names. */
function focus(field, { name }, { params, local }) {
    if (name === params.filter && !local.isFocused) {
        local.isFocused = true;
        field.focus();
    }
}

function fields(rule, index, context) {
    const { data, local } = context;
    const set = (changes) => change(context, rule, changes);
    const scope = (chosen) => set({ scope: chosen,
        action: ACTIONS[chosen].includes(rule.action) ? rule.action : ACTIONS[chosen][0] });
    const lines = Math.min(8, Math.max(2, Math.ceil(rule.when.length / 60)));
    return html`<fieldset class="filter">
        <legend>filter ${index + 1}</legend>
        <div class="toolbar">
            <label>name <input maxlength="64" autocomplete="off" spellcheck="false" .value=${rule.name}
                @input=${(event) => set({ name: event.target.value })}></label>
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
            @input=${(event) => set({ when: event.target.value })}></textarea></label>
        ${before(rule, data.rules.filter)}
        ${faults(index, local.problem)}
    </fieldset>`;
}

function removed({ data, local }) {
    const gone = data.rules.filter.filter(({ name }) => !local.draft.some((rule) => rule.name === name));
    return gone.map(({ name, when }) => html`<p class="quiet">removed
        <span class="undone">${format.visible(name)}
            <code class="untrusted">${format.visible(when)}</code></span></p>`);
}

/** The form. `run` tries the draft. */
export function form(context, run) {
    const { data, local } = context;
    const submit = (event) => {
        event.preventDefault();
        run(context);
    };
    const quick = (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
            submit(event);
        }
    };
    const add = () => context.update({
        draft: [...local.draft, entry({ name: "draft", scope: "group", when: "reward_std < 1e-6", action: "drop" })],
    });
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
            <label>over the last <select @change=${(event) => context.update({ groups: Number(event.target.value) })}>
                ${GROUPS.map((number) => html`<option value=${number} .selected=${number === local.groups}>
                    ${format.count(number)} groups</option>`)}</select></label>
            <label>environment <input type="search" autocomplete="off" spellcheck="false" .value=${local.environment}
                @input=${(event) => context.update({ environment: event.target.value })}></label>
            <button class="primary" ?disabled=${local.isTrying}>Try</button> ${kbd("Ctrl Enter")}
        </div>
    </form>`;
}
