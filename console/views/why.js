// Why: what became of a rollout, a group or a batch, as sentences from the ledger. It never changes by itself.

import { ApiError } from "../api.js";
import { batchHash, fromSee, groupHash, hash, rolloutHash } from "../address.js";
import { lifeBadge, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { lookUp } from "../why/lookup.js";

const OF_KIND = { rollout: rolloutHash, group: groupHash, batch: batchHash };

function sentence({ text, see }) {
    const href = see ? fromSee(see) : null;
    return html`<li><span class="untrusted">${format.visible(text)}</span>
        ${href === null ? nothing : html` <a data-row href=${href}>look</a>`}</li>`;
}

function others(title, findings) {
    return (findings ?? []).length === 0 ? nothing : html`<p class="quiet"><b>${title}</b>
        ${findings.map(({ text }) => format.visible(text).replace(/\.$/, "")).join("; ")}.</p>`;
}

/** Links to the screens of what was asked for. */
function screens({ kind, id, policy }) {
    const own = OF_KIND[kind];
    return html`<p class="row" data-rows>
        ${own
            ? html`<span>${kind} <a data-row class="mono" href=${own(policy, id)}>${untrusted(id)}</a></span>`
            : nothing}
        <span>policy <a data-row href=${hash(`policies/${policy}`)}>${untrusted(policy)}</a></span></p>`;
}

function found(answer) {
    const { state, headline, causes, ruled_out: excluded, unknown } = answer;
    return html`<section class="panel why" id="why" tabindex="-1" data-rows>
        <h2>${answer.kind ?? ""} ${state ? lifeBadge(state) : nothing}</h2>
        <p class="headline">${format.visible(headline)}</p>
        ${screens(answer)}
        <ol class="sentences">${causes.map(sentence)}</ol>
        ${others("Not the reason:", excluded)}
        ${others("Not known:", unknown)}
    </section>`;
}

function named(matches) {
    return html`<section class="panel" id="why" tabindex="-1" data-rows><ul class="plain">
        ${matches.map(({ kind, policy, state, href }) => html`<li><a data-row href=${href}>${kind}</a> of
            ${untrusted(policy)} ${lifeBadge(state)}</li>`)}</ul></section>`;
}

export const view = {
    title: ({ params }) => `why ${params.id ?? ""}`,
    async load({ get, params: { id, policy } }) {
        if (!id) {
            return {};
        }
        try {
            return await get("./why", { id, policy });
        } catch (error) {
            if (!(error instanceof ApiError) || error.type !== "no-such-route") {
                throw error;
            }
            const matches = await lookUp({ get }, id, policy);
            if (matches.length === 1) {
                // Its own screen says what became of it.
                location.replace(matches[0].href);
            }
            return { matches };
        }
    },
    render({ data, params }) {
        if (!params.id) {
            return html`<h1>Why?</h1><p>Ask with the id of a rollout, a group or a batch, in the field above.</p>`;
        }
        return html`<h1>why <span class="mono">${untrusted(params.id)}</span></h1>
            ${data.matches ? named(data.matches) : found(data)}`;
    },
};
