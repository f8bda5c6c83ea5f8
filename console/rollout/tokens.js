// The panel of tokens: the map of the segment, the colours, the window, and the card of one token.

import "../tokens/map.js";
import "../tokens/window.js";
import { copyButton, kbd } from "../elements.js";
import * as format from "../format.js";
import { html, nothing, styles } from "../html.js";
import { MODES, scaleOf } from "../tokens/scale.js";
import { forget, pick } from "../tokens/tokenizers.js";
import { decode } from "../tokens/vocabulary.js";
import { readTokenizer, WINDOW } from "./load.js";

/**
 * The mode that the address names.
 * @param {Params} params
 */
export function modeOf({ colour = "" }) {
    return MODES.some(({ name }) => name === colour) ? colour : "mask";
}

/**
 * What the colours need besides the window. The same object for the same data, so that nothing is drawn again.
 * @param {Shown} data
 * @param {RolloutContent} content
 * @param {number} segment
 * @returns {TokenFacts}
 */
function factsOf({ story, around }, content, segment) {
    const advantages = around.siblings.map(({ advantage }) => advantage).filter((each) => each !== null);
    return {
        advantage: story.advantage,
        advantages,
        weight: content.delivered?.loss_weights[segment] ?? null,
        versions: content.segments[segment]?.versions ?? null,
    };
}

/** @type {{ window: TokenWindow|null, tokenizer: Tokenizer|null, texts: TokenText[]|null }} */
let last = { window: null, tokenizer: null, texts: null };

/**
 * The texts of the window, decoded once.
 * @param {TokenWindow} window
 * @param {Tokenizer|null} tokenizer
 */
function textsOf(window, tokenizer) {
    if (tokenizer === null) {
        return null;
    }
    if (last.window !== window || last.tokenizer !== tokenizer) {
        last = { window, tokenizer, texts: decode(tokenizer, window.tokens) };
    }
    return last.texts;
}

/**
 * @param {string} mode
 * @param {RolloutContext} context
 */
function choices(mode, context) {
    return html`<div class="toolbar" role="group" aria-label="Colour of tokens"><span>colour</span>
        ${MODES.map(({ name, key, title }) => html`<button type="button" title=${`${title} (${key})`}
            aria-pressed=${name === mode ? "true" : "false"}
            @click=${() => context.go({ colour: name }, { replace: true })}>${title}</button>`)}
    </div>`;
}

const MARKS = [
    ["trained", "trained"],
    ["masked", "mask 0"],
    ["prompt", "prompt"],
];

/** @param {TokenWindow} window */
function withheld({ loss_mask: sent, trained_mask: trained }) {
    return sent.some((mask, index) => mask === 1 && trained[index] !== 1);
}

/**
 * @param {string} mode
 * @param {TokenScale} scale
 * @param {TokenWindow} window
 */
function legend(mode, scale, window) {
    /**
     * @param {string} kind
     * @param {string} text
     */
    const swatch = (kind, text) => html`<span class="swatch"><i data-kind=${kind}>ab</i> ${text}</span>`;
    const differs = withheld(window)
        ? swatch("withheld", "mask 1 as sent, not trained as delivered")
        : nothing;
    if (mode === "mask") {
        return html`<p class="legend-line">${MARKS.map(([kind, text]) => swatch(kind, text))} ${differs}</p>`;
    }
    if (scale.ends === null || scale.colours === null) {
        return html`<p class="legend-line">${scale.missing}</p>`;
    }
    const [low, high] = scale.ends;
    const others = window.tokens.some((_, index) => scale.ground(index) === null)
        ? swatch("masked", "prompt, mask 0, or no value")
        : nothing;
    const ramp = `linear-gradient(to right, ${scale.colours.join(", ")})`;
    return html`<p class="legend-line"><span>${low}</span>
        <i class="ramp" ${styles({ "background-image": ramp })}></i><span>${high}</span> ${others} ${differs}</p>`;
}

/**
 * @param {TokenWindow} window
 * @param {number} total
 * @param {RolloutContext} context
 */
function mover(window, total, context) {
    const { from, to } = window;
    if (to - from >= total) {
        return nothing;
    }
    const end = Math.max(0, total - WINDOW);
    /** @param {number} target */
    const go = (target) => context.go({ from: target === 0 ? null : String(target) }, { replace: true });
    /**
     * @param {string} text
     * @param {number} target
     */
    const button = (text, target) => html`<button type="button" ?disabled=${target === from}
        @click=${() => go(target)}>${text}</button>`;
    /** @param {On<HTMLFormElement>} event */
    const submit = (event) => {
        event.preventDefault();
        const wanted = Number(new FormData(event.target).get("token"));
        go(Math.min(end, Math.max(0, Math.trunc(wanted) || 0)));
    };
    return html`<form class="toolbar" @submit=${submit}>
        ${button("First", 0)} ${button("Previous", Math.max(0, from - WINDOW))}
        ${button("Next", Math.min(end, from + WINDOW))} ${button("Last", end)}
        <label>token <input name="token" inputmode="numeric" size="8" .value=${String(from)}></label>
    </form>`;
}

/**
 * Where the texts come from, and the field for a file.
 * @param {RolloutContext} context
 */
function source(context) {
    const { policy } = context.params;
    const found = context.local.tokenizer;
    /** @param {On<HTMLInputElement>} event */
    const picking = async ({ target }) => {
        const [file] = target.files ?? [];
        if (file !== undefined) {
            context.update({ tokenizer: { policy, ...(await pick(policy, file)) } });
        }
    };
    /** @param {string} text */
    const field = (text) => html`<label class="pick">${text}
        <input type="file" accept=".json,application/json" @change=${picking}></label>`;
    if (found === null || found.policy !== policy) {
        return html`<p class="quiet">Looking for the tokenizer.</p>`;
    }
    const said = found.said === "" ? nothing : html`<p class="notice warn">${format.visible(found.said)}</p>`;
    if (found.tokenizer === null) {
        return html`${said}<p class="quiet">These are ids: the service stores no text of tokens, and no tokenizer is
            configured for this policy. ${field("Pick a tokenizer.json; it stays in this browser:")}</p>`;
    }
    const drop = async () => {
        await forget(policy);
        await readTokenizer(context, policy);
    };
    const from = found.isPicked
        ? html`Text by the file <bdi>${format.visible(found.name)}</bdi>, which stays in this browser.
            <button type="button" @click=${drop}>Forget the file</button>`
        : html`Text by the tokenizer that the operator configured. ${field("Use another file:")}`;
    return html`${said}<p class="quiet">${from}</p>`;
}

/** @param {Schemas["SegmentSummary"]} segment */
function kinds(segment) {
    return segment.kind === null ? nothing : html` · <bdi>${format.visible(segment.kind)}</bdi>`;
}

/**
 * The panel.
 * @param {RolloutContext} context
 * @param {Shown} shown
 * @param {RolloutContent} content
 */
export function tokenPanel(context, shown, content) {
    const { local } = context;
    const { window, map, segments } = content;
    if (window === null) {
        return html`<section class="panel tokens-panel" aria-labelledby="tokens-title">
            <h2 id="tokens-title">tokens</h2><p>This rollout has no segments, so it has no tokens.</p></section>`;
    }
    const found = local.tokenizer?.policy === context.params.policy ? local.tokenizer.tokenizer : null;
    const texts = textsOf(window, found);
    const segment = segments[window.segment];
    const mode = modeOf(context.params);
    const facts = factsOf(shown, content, window.segment);
    const scale = scaleOf(mode, window, facts);
    const total = segment?.tokens ?? window.to;
    /** @param {CustomEvent<number>} event */
    const move = ({ detail }) => context.go({ from: detail === 0 ? null : String(detail) }, { replace: true });
    const parts = { map, total, from: window.from, to: window.to, mode, end: scale.end, facts };
    const copied = () => (texts === null ? window.tokens.join(" ") : texts.map(({ text }) => text).join(""));
    const to = window.to === window.from ? window.to : window.to - 1;
    return html`<section class="panel tokens-panel" aria-labelledby="tokens-title">
        <div class="row"><h2 id="tokens-title">tokens ${format.count(window.from)} to ${format.count(to)} of
            ${format.count(total)}${segment ? kinds(segment) : nothing}</h2><span class="spring"></span>
            ${copyButton(copied)}</div>
        <forebay-map .parts=${parts} @window-from=${move}></forebay-map>
        ${mover(window, total, context)}
        ${choices(mode, context)}
        ${legend(mode, scale, window)}
        <forebay-tokens class="tokens ${texts === null ? "ids" : ""}" tabindex="0" role="group" dir="ltr"
            aria-label="Tokens of the window; the arrow keys move the cursor" data-colours=${mode}
            .window=${window} .texts=${texts} .mode=${mode} .facts=${facts}></forebay-tokens>
        <forebay-token-card class="card mono" aria-live="polite"></forebay-token-card>
        ${source(context)}
        <p class="quiet">${kbd("m")} ${kbd("l")} ${kbd("a")} ${kbd("v")} ${kbd("g")} change the colours. Messages and
            tokens are stored apart: only the tokens say what is trained.</p>
    </section>`;
}
