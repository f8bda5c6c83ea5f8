// <forebay-chart>: lines over time or over steps, drawn by uPlot, with a sentence for those who cannot see them and a
// table for those who want numbers.

import { html, nothing, render, styles } from "./html.js";
import * as format from "./format.js";

/** The table behind a chart shows this many of the newest rows. */
const ROWS = 200;

const HEIGHT = 150;

/**
 * What a chart shows before it has a spec.
 * @type {ChartSpec}
 */
const NOTHING = { title: "", sentence: "", x: "time", at: [], times: [], series: [], show: String, note: "" };

// Distances between the lines of an axis on which only whole numbers stand: 1, 2, 5, 10, 20 and so on.
const WHOLE = Array.from({ length: 48 }, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3));

/**
 * The value of a colour token for drawing on a canvas.
 * @param {Element} element
 * @param {string} token
 */
export function colour(element, token) {
    return getComputedStyle(element).getPropertyValue(token).trim();
}

/**
 * Calls a function when the reader's colours change, light or dark. Returns the function that ends it.
 * @param {() => void} listener
 * @returns {() => void}
 */
export function onScheme(listener) {
    const scheme = window.matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", listener);
    return () => scheme.removeEventListener("change", listener);
}

// Charts that are shown together have one cursor: a moment, which each of them looks up in its own points.
/** @type {Map<string, Set<Chart>>} */
const together = new Map();

/** @type {(number: number) => string} */
const twoDigits = (number) => String(number).padStart(2, "0");

/**
 * Labels of an axis of moments: the day where it begins, else the time.
 * @param {number[]} splits
 * @param {number} increment
 */
function moments(splits, increment) {
    return splits.map((split) => {
        const date = new Date(split * 1000);
        const time = `${twoDigits(date.getHours())}:${twoDigits(date.getMinutes())}`;
        return increment >= 86_400 || time === "00:00" ? format.day(date.toISOString()).split(" ", 2).join(" ") : time;
    });
}

/**
 * The index of the moment that is nearest.
 * @param {number[]} times
 * @param {number} moment
 */
function nearest(times, moment) {
    let best = 0;
    for (let index = 1; index < times.length; index += 1) {
        if (Math.abs(times[index] - moment) < Math.abs(times[best] - moment)) {
            best = index;
        }
    }
    return best;
}

/**
 * Has the properties `spec`, `numbers` and `range`, which is null for the whole; a drag over the chart asks for a range
 * with the event `chart-range`.
 */
class Chart extends HTMLElement {
    #spec = NOTHING;
    /** @type {ChartRange|null} */
    #range = null;
    #numbers = false;
    /** @type {uPlot|null} */
    #plot = null;
    /** @type {HTMLElement|null} */
    #place = null;
    /** @type {number|null} */
    #at = null;
    /** @type {(() => void)[]} */
    #undo = [];

    /** @param {ChartSpec} spec */
    set spec(spec) {
        if (spec !== this.#spec) {
            this.#spec = spec;
            this.#at = null;
            this.#redraw();
        }
    }

    /** @param {ChartRange|null} range */
    set range(range) {
        if (String(range) !== String(this.#range)) {
            this.#range = range;
            this.#zoom();
        }
    }

    /** @param {boolean} numbers */
    set numbers(numbers) {
        if (numbers !== this.#numbers) {
            this.#numbers = numbers;
            this.#redraw();
        }
    }

    connectedCallback() {
        const observer = new ResizeObserver(() => {
            const width = this.#place?.clientWidth ?? 0;
            if (this.#plot && width > 0 && width !== this.#plot.width) {
                this.#plot.setSize({ width, height: HEIGHT });
            }
        });
        observer.observe(this);
        this.#undo = [() => observer.disconnect(), onScheme(() => this.#redraw())];
        this.#redraw();
    }

    disconnectedCallback() {
        this.#undo.forEach((undo) => undo());
        this.#undo = [];
        this.#remove();
    }

    #remove() {
        this.#plot?.destroy();
        this.#plot = null;
        together.get(this.#spec.together ?? "")?.delete(this);
    }

    #redraw() {
        if (!this.isConnected || this.#spec === NOTHING) {
            return;
        }
        this.#remove();
        this.#renderText();
        this.#place = this.querySelector(".plot");
        if (this.#place === null) {
            return;
        }
        const { at, series, together: name } = this.#spec;
        this.#plot = new uPlot(this.#options(), [at, ...series.map(({ values }) => values)], this.#place);
        this.#zoom();
        if (name) {
            together.set(name, (together.get(name) ?? new Set()).add(this));
        }
    }

    /** @returns {uPlot.Options} */
    #options() {
        const spec = this.#spec;
        const quiet = colour(this, "--text-quiet");
        const grid = { stroke: colour(this, "--line"), width: 1 };
        const font = "11px system-ui, sans-serif";
        const axis = { stroke: quiet, grid, ticks: { ...grid, size: 4 }, font };
        const isTime = spec.x === "time";
        const tick = spec.tick ?? spec.show;
        /** @type {uPlot.Series.Points.Show} */
        const few = (plot, index, from, to) => to - from < 30;
        /** @type {(line: ChartLine) => uPlot.Series} */
        const line = ({ label, colour: token, fill, dash }) => {
            const stroke = colour(this, token);
            return {
                label,
                stroke,
                width: 1.5,
                dash: dash ? [5, 4] : undefined,
                fill: fill ? `${stroke}22` : undefined,
                points: { show: dash ? false : few, size: 4 },
            };
        };
        return {
            width: Math.max(this.#place?.clientWidth ?? 0, 50),
            height: HEIGHT,
            legend: { show: false },
            cursor: { y: false, drag: { x: true, y: false, setScale: false } },
            scales: {
                x: { time: isTime, range: (plot, least, most) => this.#across(least, most) },
                y: { range: (plot, least, most) => this.#bounds(least, most) },
            },
            axes: [
                {
                    ...axis,
                    size: 28,
                    values: isTime ? (plot, splits, index, space, by) => moments(splits, by) : undefined,
                },
                {
                    ...axis,
                    size: 46,
                    incrs: spec.isWhole ? WHOLE : undefined,
                    values: (plot, splits) => splits.map((value) => tick(value)),
                },
            ],
            series: [{}, ...spec.series.map(line)],
            hooks: {
                draw: [(plot) => this.#drawMarks(plot)],
                setCursor: [(plot) => this.#moved(plot)],
                setSelect: [(plot) => this.#selected(plot)],
                ready: [(plot) => plot.over.addEventListener("dblclick", () => this.#ask(null))],
            },
        };
    }

    /**
     * A single point has some room around it: a scale without width cannot be drawn.
     * @template {number|null} Bound
     * @param {Bound} least
     * @param {Bound} most
     * @returns {[Bound|number, Bound|number]}
     */
    #across(least, most) {
        if (least === null || most === null || least !== most) {
            return [least, most];
        }
        const room = this.#spec.x === "time" ? 300 : 1;
        return [least - room, most + room];
    }

    /**
     * Zero is always in the picture, because a line that fills its box looks dramatic.
     * @param {number|null} least
     * @param {number|null} most
     * @returns {[number, number]}
     */
    #bounds(least, most) {
        const low = Math.min(0, least ?? 0);
        const high = Math.max(0, most ?? 0);
        return low === high ? [0, 1] : [low === 0 ? 0 : low - (high - low) * 0.05, high + (high - low) * 0.08];
    }

    /** @param {uPlot} plot */
    #drawMarks(plot) {
        const { marks = [] } = this.#spec;
        const { ctx: pen, bbox: box } = plot;
        pen.save();
        pen.strokeStyle = colour(this, "--info");
        pen.fillStyle = pen.strokeStyle;
        for (const { at } of marks) {
            const x = plot.valToPos(at, "x", true);
            if (x >= box.left && x <= box.left + box.width) {
                pen.setLineDash([2, 3]);
                pen.beginPath();
                pen.moveTo(x, box.top);
                pen.lineTo(x, box.top + box.height);
                pen.stroke();
                pen.beginPath();
                pen.moveTo(x, box.top + box.height - 7);
                pen.lineTo(x - 4, box.top + box.height);
                pen.lineTo(x + 4, box.top + box.height);
                pen.fill();
            }
        }
        pen.restore();
    }

    /**
     * The reader moved the cursor of this chart: the others follow.
     * @param {uPlot} plot
     */
    #moved(plot) {
        const index = plot.cursor.idx ?? null;
        this.#point(index);
        const moment = index === null ? null : this.#spec.times[index];
        for (const other of together.get(this.#spec.together ?? "") ?? []) {
            if (other !== this) {
                other.#follow(moment);
            }
        }
    }

    /** @param {number|null} moment */
    #follow(moment) {
        if (this.#plot === null || this.#spec.times.length === 0) {
            return;
        }
        const index = moment === null ? null : nearest(this.#spec.times, moment);
        const left = index === null ? -10 : this.#plot.valToPos(this.#spec.at[index], "x");
        // Without its hook, so that the charts do not follow each other in a circle.
        this.#plot.setCursor({ left, top: index === null ? -10 : 10 }, false);
        this.#point(index);
    }

    /**
     * Writes the values at the cursor into the legend.
     * @param {number|null} index
     */
    #point(index) {
        this.#at = index;
        this.#renderText();
    }

    /** @param {uPlot} plot */
    #selected(plot) {
        const { left, width } = plot.select;
        if (width > 4) {
            const first = nearest(this.#spec.at, plot.posToVal(left, "x"));
            const last = nearest(this.#spec.at, plot.posToVal(left + width, "x"));
            plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            this.#ask([this.#spec.times[first], this.#spec.times[last]]);
        }
    }

    /** @param {ChartRange|null} range */
    #ask(range) {
        this.dispatchEvent(new CustomEvent("chart-range", { detail: range, bubbles: true }));
    }

    #zoom() {
        if (this.#plot === null || this.#spec.at.length === 0) {
            return;
        }
        const { at, times } = this.#spec;
        let [min, max] = [at[0], at[at.length - 1]];
        if (this.#range !== null) {
            const [from, to] = this.#range;
            const inside = at.filter((_, index) => times[index] >= from && times[index] <= to);
            // A range without points is shown whole rather than empty.
            [min, max] = inside.length > 1 ? [inside[0], inside[inside.length - 1]] : [min, max];
        }
        [min, max] = this.#across(min, max);
        this.#plot.setScale("x", { min, max });
    }

    #renderText() {
        const { title, sentence, series, show, at, note } = this.#spec;
        const index = this.#at;
        /** @param {Values} values */
        const last = (values) => values.findLast((value) => value !== null) ?? null;
        /** @param {ChartLine} line */
        const entry = ({ label, values, colour: token, dash }) => html`<li>
            <i class=${dash ? "dashed" : ""} ${styles({ "border-color": `var(${token})` })}></i>
            ${label} <b>${show(index === null ? last(values) : values[index])}</b></li>`;
        const where = index === null ? note : this.#name(at[index]);
        render(html`<h3>${title}</h3>
            ${this.#numbers ? this.#table() : html`
                <div class="plot" role="img" aria-label=${`${title}. ${sentence}`}></div>
                <ul class="legend">${series.map(entry)}<li class="quiet">${where}</li></ul>`}
            ${at.length === 0 ? html`<p class="quiet">${sentence}</p>` : nothing}`, this);
    }

    /** @param {number} x */
    #name(x) {
        return this.#spec.x === "step" ? `step ${x}` : format.day(new Date(x * 1000).toISOString());
    }

    #table() {
        const { title, sentence, series, show, at } = this.#spec;
        const newest = at.map((_, index) => index).slice(-ROWS).reverse();
        return html`<p class="quiet">${sentence}</p>
            <div class="scroll tall" tabindex="0" role="region" aria-label=${title}>
                <table>
                    <thead><tr><th scope="col">${this.#spec.x}</th>
                        ${series.map(({ label }) => html`<th scope="col" class="number">${label}</th>`)}</tr></thead>
                    <tbody>${newest.map((index) => html`<tr><th scope="row">${this.#name(at[index])}</th>
                        ${series.map(({ values }) => html`<td class="number">${show(values[index])}</td>`)}</tr>`)}
                    </tbody>
                </table>
            </div>`;
    }
}

customElements.define("forebay-chart", Chart);
