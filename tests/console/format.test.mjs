// Numbers, times and text for people.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as format from "../../console/format.js";

process.env.TZ = "UTC";

const AT = "2026-01-01T02:10:31.004Z";
const NOW = 1_767_233_435_000;

test("numbers and times are written for people", () => {
    const cases = [
        ["count", [2677], "2,677"],
        ["count", [-1_234_567.4], "−1,234,567"],
        ["count", [null], "–"],
        ["short", [1_900_000], "1.9 M"],
        ["short", [999_950], "1.0 M"],
        ["short", [9999], "9,999"],
        ["bytes", [429_496_729], "0.4 GiB"],
        ["bytes", [12], "12 B"],
        ["real", [0.7134], "0.71"],
        ["real", [-0.001], "0.00"],
        ["real", ["NaN"], "–"],
        ["signed", [0.021], "+0.02"],
        ["signed", [-0.011], "−0.01"],
        ["signed", [0.001], "0.00"],
        ["percent", [0.97], "97%"],
        ["percent", [0.9999], ">99%"],
        ["percent", [1], "100%"],
        ["percent", [0.0001], "<0.1%"],
        ["percent", [0], "0%"],
        ["duration", [250_000], "4 min 10 s"],
        ["duration", [3_600_000], "1 h"],
        ["duration", [59_600], "1 min"],
        ["duration", [93_784_000], "1 d 2 h"],
        ["duration", [4], "4 ms"],
        ["ago", [AT, NOW], "3 s"],
        ["ago", [AT, NOW - 60_000], "0 s"],
        ["ago", [null, NOW], "–"],
        ["clock", [AT], "02:10:31"],
        ["clockMs", [AT], "02:10:31.004"],
        ["day", [AT], "1 Jan 02:10"],
        ["shortId", ["0197a5a0-0000-7000-8000-00000000003f"], "0197…003f"],
        ["shortId", ["a-short-id"], "a-short-id"],
        ["plural", [1, "rollout"], "1 rollout"],
        ["plural", [3, "batch", "batches"], "3 batches"],
    ];
    for (const [name, given, expected] of cases) {
        assert.equal(format[name](...given), expected, `${name}(${JSON.stringify(given)})`);
    }
});

test("characters that would change how text looks are shown", () => {
    const cases = [
        ["a\tb\nc", "a\tb\nc"],
        ["a\r\nb", "a\nb"],
        ["\u{1b}[31mred\u{7f}", "␛[31mred␡"],
        ["user\u{202e}nimda", "user\\u{202e}nimda"],
        ["\u{2066}x\u{200b}y\u{feff}", "\\u{2066}x\\u{200b}y\\u{feff}"],
        ["\u{85}\u{e0041}\u{3164}", "\\u{0085}\\u{e0041}\\u{3164}"],
        ["日本 🙂", "日本 🙂"],
        ["a\ud800b", "a\\u{d800}b"],
    ];
    for (const [text, expected] of cases) {
        assert.equal(format.visible(text), expected);
    }
});

test("what is not a number comes last in every order", () => {
    for (const [direction, expected] of [[-1, [3, 2, 1]], [1, [1, 2, 3]]]) {
        const sorted = [2, Number.NaN, null, 3, 1].sort((a, b) => format.compareReal(a, b, direction));
        assert.deepEqual(sorted.slice(0, 3), expected);
    }
});
