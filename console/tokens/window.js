// The tokens of a window as text on coloured grounds, and the card of the token under the mouse or the cursor. An
// element of its own, because four thousand marks are made at once and then only coloured.

import { moved } from "./moves.js";
import { describe } from "./describe.js";
import { kindOf, scaleOf } from "./scale.js";
import * as format from "../format.js";

/**
 * Line ends are shown as a sign and end the line; spaces at the ends of tokens stay.
 * @param {TokenText} token
 */
function shown({ text, kind }) {
    if (kind === "part") {
        return "\u00b7";
    }
    if (kind === "unknown") {
        return `\u27e8${text}\u27e9`;
    }
    return format.visible(text).replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5\t");
}

/** `<forebay-tokens>`: properties `window`, `texts` (of `decode`, or null for ids), `mode`, `facts`. */
class Tokens extends HTMLElement {
    /** @type {TokenWindow|null} */
    #window = null;
    /** @type {TokenText[]|null} */
    #texts = null;
    #mode = "mask";
    /** @type {TokenFacts} */
    #facts = { advantage: null, advantages: [], weight: null, versions: null };
    /** @type {HTMLElement[]} */
    #marks = [];
    /** @type {number|null} */
    #at = null;
    #isDue = false;
    #isBuilt = false;

    /** @param {TokenWindow|null} window */
    set window(window) {
        this.#isBuilt &&= this.#window === window;
        this.#window = window;
        this.#later();
    }

    get window() {
        return this.#window;
    }

    /** @param {TokenText[]|null} texts */
    set texts(texts) {
        this.#isBuilt &&= this.#texts === texts;
        this.#texts = texts;
        this.#later();
    }

    /** @param {string} mode */
    set mode(mode) {
        this.#mode = mode;
        this.#later();
    }

    /** @param {TokenFacts} facts */
    set facts(facts) {
        this.#facts = facts;
        this.#later();
    }

    connectedCallback() {
        this.addEventListener("mouseover", this.#over);
        this.addEventListener("click", this.#over);
        this.addEventListener("keydown", this.#key);
        this.addEventListener("focus", this.#focus);
    }

    /** Properties come one after the other; the element is built once after all of them. */
    #later() {
        if (!this.#isDue) {
            this.#isDue = true;
            queueMicrotask(() => {
                this.#isDue = false;
                this.#update();
            });
        }
    }

    #update() {
        if (this.#window === null) {
            return;
        }
        if (!this.#isBuilt) {
            this.#build(this.#window);
        }
        this.#colour(this.#window);
    }

    /** @param {TokenWindow} window */
    #build({ tokens }) {
        this.#marks = tokens.map((id, index) => {
            const mark = document.createElement("span");
            const text = this.#texts?.[index];
            mark.textContent = text === undefined ? `${id} ` : shown(text);
            if (text !== undefined && text.kind !== "text") {
                mark.classList.add(text.kind);
            }
            mark.dataset.at = String(index);
            return mark;
        });
        this.replaceChildren(...this.#marks);
        this.#isBuilt = true;
        this.#at = null;
        this.#tell(null);
    }

    /** @param {TokenWindow} window */
    #colour(window) {
        const { ground } = scaleOf(this.#mode, window, this.#facts);
        for (const [index, mark] of this.#marks.entries()) {
            const kind = kindOf(window.loss_mask[index], window.trained_mask[index]);
            const colour = ground(index);
            mark.dataset.kind = kind;
            mark.classList.toggle("inked", colour !== null);
            // In the colours of a value, a token without one has a look of its own.
            mark.classList.toggle("absent", this.#mode !== "mask" && colour === null);
            mark.style.setProperty("--token-ground", colour ?? "transparent");
        }
    }

    /** @param {number} index */
    #select(index) {
        this.#marks[this.#at ?? -1]?.classList.remove("here");
        this.#at = index;
        const mark = this.#marks[index];
        mark.classList.add("here");
        const found = this.#window && describe(this.#window, index, this.#texts?.[index] ?? null, this.#facts);
        this.#tell(found);
        return mark;
    }

    /**
     * Says on the card what is known of a token.
     * @param {TokenCard|null} found
     */
    #tell(found) {
        const card = this.parentElement?.querySelector("forebay-token-card");
        if (card instanceof Card) {
            card.show(found);
        }
    }

    #over = (/** @type {Event} */ { target }) => {
        if (!(target instanceof HTMLElement)) {
            return;
        }
        const index = Number(target.dataset.at ?? Number.NaN);
        if (Number.isInteger(index) && index !== this.#at && target.parentElement === this) {
            this.#select(index);
        }
    };

    #focus = () => {
        if (this.#at === null && this.#marks.length > 0) {
            this.#select(0);
        }
    };

    #key = (/** @type {KeyboardEvent} */ event) => {
        const next = moved(event.key, this.#at ?? -1, this.#marks.length);
        if (next !== null && !event.ctrlKey && !event.metaKey && !event.altKey) {
            event.preventDefault();
            this.#select(next).scrollIntoView({ block: "nearest" });
        }
    };
}

const HINT = { title: "", lines: ["Point at a token, or move with the arrow keys."] };

/** `<forebay-token-card>`: what is known of one token. It changes with every move, so the page does not draw it. */
class Card extends HTMLElement {
    connectedCallback() {
        this.show(null);
    }

    /** @param {TokenCard|null} found */
    show(found) {
        const { title, lines } = found ?? HINT;
        /**
         * @param {string} text
         * @param {string} name
         */
        const line = (text, name) => {
            const element = document.createElement(name);
            element.textContent = text;
            return element;
        };
        this.replaceChildren(...(title === "" ? [] : [line(title, "b")]), ...lines.map((text) => line(text, "p")));
    }
}

customElements.define("forebay-token-card", Card);
customElements.define("forebay-tokens", Tokens);
