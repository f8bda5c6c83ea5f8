// What views take from lit-html, and two directives of our own.

import { html, noChange, nothing, render, svg } from "./vendor/lit-html/lit-html.js";
import { directive, Directive } from "./vendor/lit-html/directive.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";

export { html, nothing, render, repeat, svg };

/** @typedef {import("./vendor/lit-html/directive.js").ElementPart & { element: HTMLElement }} Part */

class Styles extends Directive {
    /** @param {Record<string, string>} properties */
    render(properties) {
        return noChange;
    }

    /**
     * @param {Part} part
     * @param {[Record<string, string>]} properties
     */
    update(part, [properties]) {
        for (const [name, value] of Object.entries(properties)) {
            part.element.style.setProperty(name, value);
        }
        return noChange;
    }
}

/**
 * Sets style properties of an element: html`<i ${styles({ width: "40%" })}></i>`. The content security policy refuses
 * style attributes and allows this.
 */
export const styles = directive(Styles);

class Ref extends Directive {
    /** @type {HTMLElement|null} */
    #known = null;

    /** @param {(element: any) => void} use */
    render(use) {
        return noChange;
    }

    /**
     * @param {Part} part
     * @param {[(element: any) => void]} use
     */
    update(part, [use]) {
        if (part.element !== this.#known) {
            this.#known = part.element;
            // The element is not in the document yet while its template is rendered.
            queueMicrotask(() => use(part.element));
        }
        return noChange;
    }
}

/** Calls a function once with the element: html`<dialog ${ref((dialog) => dialog.showModal())}></dialog>`. */
export const ref = directive(Ref);
