// The time of a trainer as a band: training, waiting for a batch, and neither.

import * as format from "../format.js";
import { html, nothing, styles } from "../html.js";
import { shares, stretches } from "./stretches.js";

/**
 * The band with its sentence; with `numbers`, the sentence alone.
 * @param {Step[]} steps
 * @param {boolean} numbers
 */
export function band(steps, numbers) {
    const found = stretches(steps);
    if (found.length === 0) {
        return nothing;
    }
    const share = shares(found);
    const [from, to] = [found[0][1], found[found.length - 1][2]];
    /** @param {number} milliseconds */
    const iso = (milliseconds) => new Date(milliseconds).toISOString();
    const sentence = html`training <b>${format.percent(share.training)}</b>,
        waiting for a batch <b>${format.percent(share.waiting)}</b>, neither <b>${format.percent(share.neither)}</b>`;
    /** @param {number} part */
    const width = (part) => styles({ width: `${(100 * part) / (to - from)}%` });
    return html`<section class="panel" aria-labelledby="band-title">
        <h2 id="band-title">The trainer's time, ${format.duration(to - from)}</h2>
        <p>${sentence}</p>
        ${numbers ? nothing : html`<div class="band" aria-hidden="true">${found.map(([kind, begin, end]) =>
            html`<i class=${kind} ${width(end - begin)}></i>`)}</div>
            <p class="ends quiet"><span>${format.day(iso(from))}</span><span>${format.day(iso(to))}</span></p>`}
    </section>`;
}
