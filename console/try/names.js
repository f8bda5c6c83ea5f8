// The names that filters know, with what they mean.

import * as format from "../format.js";
import { html, nothing } from "../html.js";

/**
 * @param {Schemas["FilterVariable"][]} variables
 * @param {string} scope
 */
function table(variables, scope) {
    return html`<div class="scroll" tabindex="0" role="region" aria-label=${`variables of filters of scope ${scope}`}>
        <table>
            <caption>scope <b>${scope}</b></caption>
            <thead><tr><th scope="col">variable</th><th scope="col">type</th><th scope="col">meaning</th>
                <th scope="col">typical value</th></tr></thead>
            <tbody>${variables.filter((each) => each.scope === scope).map(({ name, type, meaning, typical }) => html`
                <tr>
                <th scope="row"><code>${name}</code></th><td>${type}</td><td>${plain(meaning)}</td>
                <td><code>${typical}</code></td></tr>`)}</tbody>
        </table>
    </div>`;
}

/**
 * The documentation has names between backticks.
 * @param {string} text
 */
function plain(text) {
    return text.split("`").map((part, index) => (index % 2 === 1 ? html`<code>${part}</code>` : part));
}

/** @type {(title: string, names: string[], write: (name: string) => string) => unknown} */
const list = (title, names, write) => (names?.length > 0 ? html`<p><b>${title}</b>
    ${names.map((name) => html`<code>${write(format.visible(name))}</code> `)}</p>` : nothing);

/**
 * The panel; `names` is the answer of `/filters/variables`, or null.
 * @param {Schemas["FilterNames"]|null} found
 */
export function names(found) {
    if (found === null) {
        return nothing;
    }
    return html`<section class="panel" aria-labelledby="names-title">
        <h2 id="names-title">Names that filters know</h2>
        ${table(found.variables, "group")}
        ${table(found.variables, "rollout")}
        ${list("functions", found.functions, (name) => `${name}(..)`)}
        ${list("methods", found.methods, (name) => `value.${name}(..)`)}
        ${list("macros", found.macros, (name) => (name === "has" ? "has(..)" : `list.${name}(x, ..)`))}
    </section>`;
}
