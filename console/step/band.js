// The time of a trainer as a band: training, waiting for a batch, and neither.

import * as format from "../format.js";
import { html, nothing, styles } from "../html.js";

/** Steps of a band: more of them are narrower than a pixel. */
const STEPS = 60;

/** What the trainer did when, from steps in any order: [kind, from, to] in milliseconds, without overlaps. */
export function stretches(steps) {
    const newest = steps
        .filter(({ waited_ms: waited, held_ms: held }) => waited !== null && held !== null)
        .toSorted((a, b) => Date.parse(a.acked_at) - Date.parse(b.acked_at))
        .slice(-STEPS);
    const found = [];
    let reached = null;
    const add = (kind, from, to) => {
        // Two trainers, and two batches of a step, overlap: a moment is counted once.
        const begin = reached === null ? from : Math.max(from, reached);
        if (to > begin) {
            if (reached !== null && begin > reached) {
                found.push(["neither", reached, begin]);
            }
            found.push([kind, begin, to]);
            reached = to;
        }
    };
    for (const { acked_at: acked, held_ms: held, waited_ms: waited } of newest) {
        const end = Date.parse(acked);
        add("waiting", end - held - waited, end - held);
        add("training", end - held, end);
    }
    return found;
}

/** The shares of the band's time by kind. */
export function shares(found) {
    const sums = { training: 0, waiting: 0, neither: 0 };
    for (const [kind, from, to] of found) {
        sums[kind] += to - from;
    }
    const total = sums.training + sums.waiting + sums.neither;
    return Object.fromEntries(Object.entries(sums).map(([kind, sum]) => [kind, total > 0 ? sum / total : null]));
}

/** The band with its sentence; with `numbers`, the sentence alone. */
export function band(steps, numbers) {
    const found = stretches(steps);
    if (found.length === 0) {
        return nothing;
    }
    const share = shares(found);
    const [from, to] = [found[0][1], found.at(-1)[2]];
    const iso = (milliseconds) => new Date(milliseconds).toISOString();
    const sentence = html`training <b>${format.percent(share.training)}</b>,
        waiting for a batch <b>${format.percent(share.waiting)}</b>, neither <b>${format.percent(share.neither)}</b>`;
    const width = (part) => styles({ width: `${(100 * part) / (to - from)}%` });
    return html`<section class="panel" aria-labelledby="band-title">
        <h2 id="band-title">The trainer's time, ${format.duration(to - from)}</h2>
        <p>${sentence}</p>
        ${numbers ? nothing : html`<div class="band" aria-hidden="true">${found.map(([kind, begin, end]) =>
            html`<i class=${kind} ${width(end - begin)}></i>`)}</div>
            <p class="ends quiet"><span>${format.day(iso(from))}</span><span>${format.day(iso(to))}</span></p>`}
    </section>`;
}
