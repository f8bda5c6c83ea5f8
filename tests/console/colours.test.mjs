// The contrast of every colour of the style, and the scales of tokens.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import * as scale from "../../console/tokens/scale.js";
import { colours } from "../../console/tokens/strip.js";

const read = (name) => readFileSync(new URL(`../../console/${name}`, import.meta.url), "utf8");

/** The colour tokens of the style by their names. In the dark scheme, some replace those of the light one. */
function tokens(scheme) {
    const found = {};
    for (const style of [read("style.css"), read("rollout.css")]) {
        const [light, dark] = ["^:root \\{", "^@media \\(prefers-color-scheme: dark\\) \\{\\s*:root \\{"]
            .map((start) => new RegExp(`${start}(.*?)\\}`, "ms").exec(style)[1]);
        for (const block of scheme === "dark" ? [light, dark] : [light]) {
            for (const [, name, colour] of block.matchAll(/--([a-z0-9-]+): (#[0-9a-f]{6});/g)) {
                found[name] = colour;
            }
        }
    }
    return found;
}

/** The relative luminance of `#rrggbb`, as WCAG 2.2 defines it. */
function luminance(colour) {
    const [red, green, blue] = [1, 3, 5].map((at) => {
        const value = Number.parseInt(colour.slice(at, at + 2), 16) / 255;
        return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(first, second) {
    const [light, dark] = [luminance(first), luminance(second)].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
}

/** Pairs of colour tokens that text is written in and on. */
const PAIRS = [
    ["text", ["ground", "panel", "quiet-ground", "bad-ground", "info-ground"]],
    ["text-quiet", ["ground", "panel", "quiet-ground"]],
    ["link", ["ground", "panel"]],
    ["panel", ["link"]],
    ["good", ["good-ground", "panel"]],
    ["bad", ["bad-ground", "panel"]],
    ["warn", ["warn-ground", "panel"]],
    ["info", ["info-ground", "panel"]],
    ["token-ink", ["token-trained", "token-withheld", "found", "found-here"]],
    ["text", ["role-system", "role-user", "role-assistant", "role-tool", "role-other"]],
    ["text-quiet", ["role-system", "role-user", "role-assistant", "role-tool", "role-other"]],
];

test("text and lines have enough contrast in both schemes", () => {
    for (const scheme of ["light", "dark"]) {
        const token = tokens(scheme);
        for (const [text, grounds] of PAIRS) {
            for (const ground of grounds) {
                const found = contrast(token[text], token[ground]);
                assert.ok(found >= 4.5, `${scheme}: ${text} on ${ground}: ${found}`);
            }
        }
        // Lines of charts are no text: 3:1.
        for (const series of [1, 2, 3, 4, 5, 6]) {
            const found = contrast(token[`series-${series}`], token.panel);
            assert.ok(found >= 3, `${scheme}: series-${series}: ${found}`);
        }
        assert.equal(token["token-ink"], scale.INK, "the style and the scales have one ink");
    }
});

test("text on every scale has enough contrast", () => {
    for (let step = -1; step <= 1; step += 0.05) {
        const grounds = [
            scale.sequential(-Math.abs(step), -1), scale.signed(step, 1), scale.age(step, { min: -1, max: 1 }),
        ];
        for (const ground of grounds) {
            assert.ok(contrast(scale.INK, ground) >= 4.5, `${scale.INK} on ${ground}`);
        }
    }
});

const WINDOW = {
    from: 10, to: 14, prompt_tokens: 11, loss_mask: [null, 1, 0, 1], trained_mask: [null, 0, 0, 1],
    logprobs: [null, -2, -9, null], values: [null, -3, Number.NaN, 3], versions: [[7, 0, 1], [8, 1, 9]],
    tokens: [1, 2, 3, 4],
};

test("scales are symmetric, and one outlier does not make all others alike", () => {
    const { bound, sequential, signed } = scale;
    const many = [...Array(99).keys()].map((index) => ((index % 2 ? -1 : 1) * index) / 98);
    assert.ok(bound([...many, 1000, Number.NaN, null]) <= 1, "the outlier is clipped");
    assert.equal(bound([Number.NaN, null]), null);
    assert.equal(signed(0, 5), signed(0, 0));
    assert.deepEqual([signed(7, 5), signed(-7, 5)], [signed(5, 5), signed(-5, 5)]);
    assert.notEqual(signed(5, 5), signed(-5, 5));
    assert.deepEqual([signed(null, 5), signed(Number.NaN, 5), sequential(undefined, -1)], [null, null, null]);
});

test("each mode colours the tokens that have a value, and says what is missing", () => {
    const facts = { advantage: -1, advantages: [-1, 2], versions: { min: 7, max: 8 } };
    const of = (mode) => {
        const found = scale.scaleOf(mode, WINDOW, facts);
        return { ...found, grounds: [0, 1, 2, 3].map(found.ground) };
    };
    const kinds = WINDOW.loss_mask.map((mask, index) => scale.kindOf(mask, WINDOW.trained_mask[index]));
    assert.deepEqual(kinds, ["prompt", "withheld", "masked", "trained"]);
    assert.deepEqual(scale.versionsOf(WINDOW), [null, 7, 8, 8]);
    assert.deepEqual(of("logprob").ends, ["0", "−2 (surprising)"], "a masked token does not count");
    assert.deepEqual(of("logprob").grounds.map((ground) => ground === null), [true, false, true, true]);
    assert.deepEqual(of("value").ends, ["−3", "+3"]);
    assert.deepEqual(of("value").grounds.slice(2), [null, scale.signed(3, 3)]);
    assert.deepEqual(of("advantage").ends, ["−2", "+2"], "siblings share a scale");
    assert.equal(of("advantage").grounds[1], null, "only what is trained has an advantage");
    assert.notEqual(of("version").grounds[1], of("version").grounds[2]);
    assert.equal(scale.scaleOf("value", { ...WINDOW, values: null }, facts).missing,
        "The segment has no critic values.");
});

test("the strip of a segment has the colours of the legend, and quiet ones where there is no value", () => {
    const style = { prompt: "#000000", masked: "#101010", trained: "#00ff00", withheld: "#ff0000" };
    const map = {
        response: [0, 1, 1], masked_in: [0, 1, 1], trained: [0, 1, 0], logprob_mean: [null, -1, -2],
        value_mean: null, version_min: null,
    };
    const of = (mode, end, facts = {}) => colours(map, { mode, end, facts }, style);
    assert.deepEqual(of("mask", null), [style.prompt, style.trained, style.withheld]);
    assert.deepEqual(of("logprob", 2), [style.prompt, scale.sequential(-1, -2), scale.sequential(-2, -2)]);
    assert.deepEqual(of("advantage", 1, { advantage: 1 }), [style.prompt, scale.signed(1, 1), style.masked]);
    assert.deepEqual(of("version", null, { versions: null }), [style.prompt, style.masked, style.masked]);
});
