// The whole of a segment in one strip: what its parts are like, and where the window is. A click moves the window.

import * as format from "../format.js";
import { colours } from "./strip.js";

const HEIGHT = 26;

const EMPTY = { from: 0, to: 0, total: 0 };

/**
 * The colours that are not those of a scale, from the tokens of the style.
 * @param {Element} element
 */
function tokensOf(element) {
    const style = getComputedStyle(element);
    /** @param {string} name */
    const token = (name) => style.getPropertyValue(name).trim();
    return { prompt: token("--token-prompt"), masked: token("--token-masked"), trained: token("--token-trained"),
        withheld: token("--token-withheld"), window: token("--link") };
}

/** `<forebay-map>`: its property `parts` says what is drawn, and each change draws it again. Sends `window-from`. */
class TokenMap extends HTMLElement {
    #canvas = document.createElement("canvas");
    /** @type {MapParts|null} */
    #parts = null;
    #isDue = false;
    #observer = new ResizeObserver(() => this.#later());
    #scheme = matchMedia("(prefers-color-scheme: dark)");
    #changed = () => this.#later();

    /** @param {MapParts} parts */
    set parts(parts) {
        this.#parts = parts;
        this.#later();
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
        const width = this.clientWidth;
        const brush = this.#canvas.getContext("2d");
        if (this.#parts === null || width === 0 || brush === null) {
            return;
        }
        const { map, total, from, to, mode, end, facts } = this.#parts;
        this.ariaValueMin = "0";
        this.ariaValueMax = String(Math.max(0, total - 1));
        this.ariaValueNow = String(from);
        this.ariaValueText = `tokens ${format.count(from)} to ${format.count(to)} of ${format.count(total)}`;
        const scale = devicePixelRatio;
        this.#canvas.width = width * scale;
        this.#canvas.height = HEIGHT * scale;
        brush.scale(scale, scale);
        const tokens = tokensOf(this);
        /** @param {number} token */
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

    /**
     * @param {number} from
     * @param {number} total
     */
    #move(from, total) {
        const detail = Math.max(0, Math.min(Math.max(0, total - 1), Math.round(from)));
        this.dispatchEvent(new CustomEvent("window-from", { bubbles: true, detail }));
    }

    #click = (/** @type {MouseEvent} */ { offsetX }) => {
        const { from, to, total } = this.#parts ?? EMPTY;
        if (to - from < total) {
            const middle = (offsetX / this.clientWidth) * total;
            this.#move(Math.min(total - (to - from), middle - (to - from) / 2), total);
        }
    };

    #key = (/** @type {KeyboardEvent} */ event) => {
        const { from, to, total } = this.#parts ?? EMPTY;
        const length = to - from;
        const last = Math.max(0, total - length);
        /** @type {Record<string, number>} */
        const goals = {
            ArrowLeft: from - length / 4, ArrowRight: from + length / 4, PageUp: from - length,
            PageDown: from + length, Home: 0, End: last,
        };
        if (Object.hasOwn(goals, event.key) && length < total) {
            event.preventDefault();
            this.#move(Math.min(last, goals[event.key]), total);
        }
    };
}

customElements.define("forebay-map", TokenMap);
