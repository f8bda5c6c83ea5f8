// The whole of a segment in one strip: what its parts are like, and where the window is. A click moves the window.

import * as format from "../format.js";
import { age, between, bound, sequential, signed } from "./scale.js";

const HEIGHT = 26;

/** The colours that are not those of a scale, from the tokens of the style. */
function tokensOf(element) {
    const style = getComputedStyle(element);
    const token = (name) => style.getPropertyValue(name).trim();
    return { prompt: token("--token-prompt"), masked: token("--token-masked"), trained: token("--token-trained"),
        withheld: token("--token-withheld"), window: token("--link") };
}

/**
 * The colour of each part in a mode. `end` is the end of the scale of the window, so that both have one legend; without
 * it, the parts have a scale of their own. Pure.
 */
export function colours(map, { mode, end, facts }, tokens) {
    const { response, masked_in: sent, trained } = map;
    const plain = (part) => {
        const ground = between(tokens.prompt, tokens.masked, response[part]);
        const withheld = Math.max(0, sent[part] - trained[part]);
        return between(between(ground, tokens.withheld, withheld), tokens.trained, trained[part]);
    };
    const quiet = (part) => between(tokens.prompt, tokens.masked, response[part]);
    const columns = {
        logprob: () => {
            const last = end ?? bound(map.logprob_mean) ?? 0;
            return (part) => sequential(map.logprob_mean[part], -last);
        },
        value: () => {
            const last = end ?? bound(map.value_mean ?? []) ?? 0;
            return (part) => signed(map.value_mean?.[part], last);
        },
        advantage: () => (part) => (trained[part] > 0 && end !== null ? signed(facts.advantage, end) : null),
        version: () => (part) => (facts.versions ? age(map.version_min?.[part], facts.versions) : null),
    };
    const of = Object.hasOwn(columns, mode) ? columns[mode]() : null;
    return response.map((_, part) => (of === null ? plain(part) : (of(part) ?? quiet(part))));
}

/** `<forebay-map>`: properties `map`, `total` (tokens), `from`, `to`, `mode`, `end`, `facts`. Sends `window-from`. */
class TokenMap extends HTMLElement {
    #canvas = document.createElement("canvas");
    #drawn = {};
    #isDue = false;
    #observer = new ResizeObserver(() => this.#later());
    #scheme = matchMedia("(prefers-color-scheme: dark)");
    #changed = () => this.#later();

    constructor() {
        super();
        // Custom elements get plain properties, and each change draws the strip again, once in a frame.
        for (const name of ["map", "total", "from", "to", "mode", "end", "facts"]) {
            Object.defineProperty(this, name, {
                get: () => this.#drawn[name],
                set: (value) => {
                    this.#drawn[name] = value;
                    this.#later();
                },
            });
        }
    }

    connectedCallback() {
        this.tabIndex = 0;
        this.role = "slider";
        this.ariaLabel = "First token of the window";
        this.replaceChildren(this.#canvas);
        this.#observer.observe(this);
        this.#scheme.addEventListener("change", this.#changed);
        this.addEventListener("click", this.#click);
        this.addEventListener("keydown", this.#key);
    }

    disconnectedCallback() {
        this.#observer.disconnect();
        this.#scheme.removeEventListener("change", this.#changed);
    }

    #later() {
        if (!this.#isDue) {
            this.#isDue = true;
            requestAnimationFrame(() => {
                this.#isDue = false;
                this.#draw();
            });
        }
    }

    #draw() {
        const { map, total, from, to, mode, end, facts } = this.#drawn;
        const width = this.clientWidth;
        if (!map || width === 0) {
            return;
        }
        this.ariaValueMin = "0";
        this.ariaValueMax = String(Math.max(0, total - 1));
        this.ariaValueNow = String(from);
        this.ariaValueText = `tokens ${format.count(from)} to ${format.count(to)} of ${format.count(total)}`;
        const scale = devicePixelRatio;
        this.#canvas.width = width * scale;
        this.#canvas.height = HEIGHT * scale;
        const brush = this.#canvas.getContext("2d");
        brush.scale(scale, scale);
        const tokens = tokensOf(this);
        const x = (token) => (total === 0 ? 0 : (token / total) * width);
        for (const [part, colour] of colours(map, { mode, end, facts }, tokens).entries()) {
            const left = x(part * map.tokens_per_bucket);
            brush.fillStyle = colour;
            // A little wider, so that no line of the ground shows between two parts.
            brush.fillRect(left, 4, x(Math.min(total, (part + 1) * map.tokens_per_bucket)) - left + 0.5, HEIGHT - 8);
        }
        if (to - from < total) {
            brush.strokeStyle = tokens.window;
            brush.lineWidth = 2;
            brush.strokeRect(x(from) + 1, 1, Math.max(4, x(to) - x(from) - 2), HEIGHT - 2);
        }
    }

    #move(from) {
        const detail = Math.max(0, Math.min(Math.max(0, this.total - 1), Math.round(from)));
        this.dispatchEvent(new CustomEvent("window-from", { bubbles: true, detail }));
    }

    #click = ({ offsetX }) => {
        const length = this.to - this.from;
        if (length < this.total) {
            const middle = (offsetX / this.clientWidth) * this.total;
            this.#move(Math.min(this.total - length, middle - length / 2));
        }
    };

    #key = (event) => {
        const length = this.to - this.from;
        const last = Math.max(0, this.total - length);
        const goals = {
            ArrowLeft: this.from - length / 4, ArrowRight: this.from + length / 4, PageUp: this.from - length,
            PageDown: this.from + length, Home: 0, End: last,
        };
        if (Object.hasOwn(goals, event.key) && length < this.total) {
            event.preventDefault();
            this.#move(Math.min(last, goals[event.key]));
        }
    };
}

customElements.define("forebay-map", TokenMap);
