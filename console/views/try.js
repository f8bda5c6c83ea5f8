// A rehearsal of filters over what is stored. Nothing is changed by it, and nothing is asked without the reader.

import { absent, ApiError, isAborted, message, Unauthorized } from "../api.js";
import { untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { entry, filters, form } from "../try/draft.js";
import { names } from "../try/names.js";
import { outcome } from "../try/outcome.js";

const EXAMPLES = 20;

/** @type {(policy: string) => `./policies/${string}`} */
const path = (policy) => `./policies/${encodeURIComponent(policy)}`;

/** @param {TryContext} context */
async function run(context) {
    const { local, params } = context;
    if (local.isTrying) {
        return;
    }
    const tried = local.draft.map((rule) => ({ ...rule }));
    context.update({ isTrying: true, problem: null });
    const environment = local.environment.trim();
    const body = {
        filter: filters(tried), groups: local.groups, examples: EXAMPLES,
        ...(environment === "" ? {} : { environment }),
    };
    try {
        const result = await context.post(`${path(params.policy)}/filters/try`, body);
        context.update({ isTrying: false, result, tried });
    } catch (error) {
        if (isAborted(error)) {
            return;
        }
        if (error instanceof Unauthorized) {
            // The next question of the page finds the same and shows the login.
            context.refresh();
        }
        context.update({ isTrying: false, problem: error });
    }
}

/** @param {unknown} problem */
function said(problem) {
    if (problem === null) {
        return nothing;
    }
    if (!(problem instanceof ApiError)) {
        return html`<div class="notice bad" role="alert"><b>${format.visible(message(problem))}</b></div>`;
    }
    if (problem.type === "no-such-route") {
        return html`<p class="notice bad" role="alert">This service does not try filters.</p>`;
    }
    const title = problem.status === 403 ? "Trying takes a key of the role read or admin" : problem.title;
    const elsewhere = problem.errors.filter(({ pointer }) => !/^\/filter\/\d/.test(pointer));
    return html`<div class="notice bad" role="alert"><b>${format.visible(title)}</b>
        ${problem.detail ? format.visible(problem.detail) : nothing}
        ${elsewhere.map(({ pointer, detail }) => html`<p><code>${format.visible(pointer)}</code>
            ${format.visible(detail)}</p>`)}</div>`;
}

/** @type {View<TryData, TryLocal>} */
export const view = {
    title: ({ params }) => `${params.policy}: try a filter`,
    isSame: (before, after) => before.policy === after.policy,
    local: () => ({
        isBegun: false, draft: [], groups: 500, environment: "", result: null, tried: [], problem: null,
        isTrying: false, isFocused: false,
    }),
    async load(context) {
        const { policy } = context.params;
        const [{ rules }, known] = await Promise.all([
            context.get(path(policy)),
            context.get("./filters/variables").catch(absent(403, 404)),
        ]);
        if (!context.local.isBegun) {
            Object.assign(context.local, { isBegun: true, draft: rules.filter.map(entry) });
        }
        return { rules, known };
    },
    render(context) {
        const { data, local, params } = context;
        return html`<h1>${untrusted(params.policy)} <span class="quiet">try a filter: a rehearsal over what is stored,
                nothing is changed</span></h1>
            <div class="grid-2">
                <section class="panel" aria-labelledby="draft-title"><h2 id="draft-title">Draft</h2>
                    ${form(context, run)}
                    ${said(local.problem)}
                </section>
                <section class="panel" aria-labelledby="outcome-title" aria-busy=${local.isTrying ? "true" : "false"}>
                    <h2 id="outcome-title">Outcome</h2>
                    <div role="status">${local.isTrying ? "Trying" : nothing}</div>
                    ${outcome(local, params.policy)}
                </section>
            </div>
            ${names(data.known)}`;
    },
};
