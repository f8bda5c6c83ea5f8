// Why: what became of a rollout, group, batch or session, as sentences from the ledger. It never changes by itself.

import { batchHash, groupHash, hash, rolloutHash, whyHash } from "../address.js";
import { lifeBadge, time, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";

// Sessions have no screen of their own.
/** @type {Record<string, (policy: string, id: string) => string>} */
const OF_KIND = {
    rollout: rolloutHash, group: groupHash, batch: batchHash, session: (policy) => hash(`policies/${policy}`),
};

/**
 * @param {Schemas["LifeStep"]} step
 * @param {Pick<Context, "now">} context
 */
function sentence({ at, text, rule }, context) {
    return html`<li>${at === null ? nothing : html`<span class="quiet">${time(at, context)}</span> `}
        <span class="untrusted">${format.visible(text)}</span>
        ${rule ? html`<br><code class="untrusted">${format.visible(rule)}</code>` : nothing}</li>`;
}

/**
 * Links to the screens of what was asked for, and of what else has the id.
 * @param {Schemas["IdWhy"]} answer
 */
function screens({ kind, id, policy, also }) {
    const own = OF_KIND[kind];
    return html`<p class="row" data-rows>
        <span>${kind} <a data-row class="mono" href=${own(policy, id)}>${untrusted(id)}</a></span>
        <span>policy <a data-row href=${hash(`policies/${policy}`)}>${untrusted(policy)}</a></span>
        ${also.map((other) => html`<span>also a
            <a data-row href=${other.policy === policy ? OF_KIND[other.kind](policy, id) : whyHash(id, other.policy)}>
                ${other.kind}</a> of ${untrusted(other.policy)}</span>`)}</p>`;
}

/**
 * @param {Schemas["IdWhy"]} answer
 * @param {Pick<Context, "now">} context
 */
function found(answer, context) {
    const { kind, state, headline, causes } = answer;
    return html`<section class="panel why" id="why" tabindex="-1" data-rows>
        <h2>${kind} ${lifeBadge(state)}</h2>
        <p class="headline">${format.visible(headline)}</p>
        ${screens(answer)}
        <ol class="sentences">${causes.map((each) => sentence(each, context))}</ol>
    </section>`;
}

/** @type {View<{ answer: Schemas["IdWhy"]|null }, {}, Params>} */
export const view = {
    title: ({ params }) => `why ${params.id ?? ""}`,
    load: async ({ get, params: { id, policy } }) => ({
        answer: id ? await get("./why", { id, policy }) : null,
    }),
    render(context) {
        const { data, params } = context;
        if (data.answer === null) {
            return html`<h1>Why?</h1><p>Ask with the id of a rollout, group, batch or session, in the field above.</p>`;
        }
        return html`<h1>why <span class="mono">${untrusted(params.id)}</span></h1>${found(data.answer, context)}`;
    },
};
