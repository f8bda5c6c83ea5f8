// The curve of a suite over versions. It is made of links, because each point leads to the tasks of its version.

import { suiteHash } from "../address.js";
import { badge } from "../elements.js";
import { html, nothing, repeat, styles, svg } from "../html.js";
import { shape } from "./geometry.js";
import * as words from "./words.js";

/** Above this number of points, they are drawn smaller and have only the band as their interval. */
const DENSE = 40;

/**
 * Moves the focus between the points: one of them is in the order of the tab key, and arrows lead to the others.
 * @param {On<SVGElement, KeyboardEvent>} event
 */
function move(event) {
    const { key, currentTarget, ctrlKey, metaKey, altKey } = event;
    const points = [...currentTarget.querySelectorAll("a")];
    const at = points.findIndex((point) => point === document.activeElement);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: points.length - 1 }[key];
    if (at === -1 || to === undefined || ctrlKey || metaKey || altKey) {
        return;
    }
    event.preventDefault();
    points[Math.min(Math.max(to, 0), points.length - 1)].focus();
}

/**
 * @param {CurvePoint} point
 * @param {{ href: string, isTabbed: boolean, isHere: boolean, isDense: boolean,
 *     look: (version: number|null) => void }} options
 */
function mark({ version, x, y, from, width, bounds }, { href, isTabbed, isHere, isDense, look }) {
    const come = () => look(version.version);
    const kind = `point${version.complete ? "" : " incomplete"}`;
    return svg`<a class=${kind} href=${href} tabindex=${isTabbed ? 0 : -1} ?data-row=${isTabbed}
        aria-label=${words.point(version)} aria-current=${isHere ? "true" : nothing}
        @mouseenter=${come} @focus=${come} @blur=${() => look(null)}>
        <rect x="${from}%" y="0" width="${width}%" height="100%"></rect>
        ${bounds === null || (isDense && version.complete) ? nothing
            : svg`<line x1="${x}%" x2="${x}%" y1="${bounds[0]}%" y2="${bounds[1]}%"></line>`}
        <circle cx="${x}%" cy="${y}%" r=${isDense ? 2 : 4}></circle>
    </a>`;
}

/**
 * The numbers of a point.
 * @param {SuiteVersion|undefined} version
 */
function legend(version) {
    if (version === undefined) {
        return nothing;
    }
    const { complete, difference } = version;
    return html`<ul class="legend">
        <li>${words.named(version)} <b>${words.mean(version)}</b></li>
        ${difference === null ? nothing
            : html`<li>against v${difference.version} <b>${words.difference(difference)}</b></li>`}
        <li>${words.size(version)}</li>
        <li>${complete ? badge("good", "●", "complete") : badge("warn", "○", "incomplete")}</li>
    </ul>`;
}

/**
 * The curve with the numbers of the point that the reader has chosen, or else of `here`, or of the newest one.
 * @param {Suite} suite
 * @param {CurveOptions} options
 */
export function curve(suite, { policy, pointed, here = null, look }) {
    const { points, line, band, across, up } = shape(suite);
    const versions = suite.versions.map(({ version }) => version);
    const shown = [pointed, here, versions[0]].find((each) => versions.includes(each ?? Number.NaN));
    return html`<div class="curve">
        <div class="up" aria-hidden="true">${up.map(({ at, text }) =>
            html`<span ${styles({ top: `${at}%` })}>${text}</span>`)}</div>
        <svg role="group" aria-label=${words.curve(suite)} @keydown=${move} @mouseleave=${() => look(null)}>
            ${up.map(({ at }) => svg`<line class="grid" x1="0" x2="100%" y1="${at}%" y2="${at}%"></line>`)}
            <svg viewBox="0 0 100 100" preserveAspectRatio="none" width="100%" height="100%" aria-hidden="true">
                <path class="band" d=${band}></path>
                <path class="line" d=${line}></path>
            </svg>
            ${repeat(points, ({ version: { version } }) => version, (point) => mark(point, {
                href: suiteHash(policy, suite.suite, point.version.version),
                isTabbed: point.version.version === shown,
                isHere: point.version.version === here,
                isDense: points.length > DENSE,
                look,
            }))}
        </svg>
        <div class="across" aria-hidden="true">${across.map(({ at, text }) =>
            html`<span ${styles({ left: `${at}%` })}>${text}</span>`)}</div>
    </div>
    ${legend(suite.versions.find(({ version }) => version === shown))}`;
}
