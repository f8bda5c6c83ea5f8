// Tokens as text: what a tokenizer file says of ids, where the cursor goes, and what is said of a token.

import assert from "node:assert/strict";
import { test } from "node:test";

import { describe, weight } from "../../console/tokens/describe.js";
import { moved } from "../../console/tokens/moves.js";
import { decode, parseTokenizer, UnknownTokenizer } from "../../console/tokens/vocabulary.js";

const texts = (file, ids) =>
    decode(parseTokenizer(typeof file === "string" ? file : JSON.stringify(file)), ids)
        .map(({ text, kind }) => [text, kind]);

test("byte-level tokens are decoded, also characters that are spread over several", () => {
    // The three bytes of 日 are spread over two tokens: e6 97, and a5. As text, because in a literal `__proto__` is no
    // member.
    const file = `{
        "model": {"type": "BPE", "vocab": {"Hi": 0, "Ġthere": 1, "æĹ": 2, "¥": 3, "Ċ": 4, "__proto__": 5}},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 9, "content": "<|end|>", "special": true}, {"id": 10, "content": "日"}]
    }`;
    assert.deepEqual(texts(file, [0, 1, 2, 3, 4, 5, 9, 10, 77]), [
        ["Hi", "text"],
        [" there", "text"],
        ["", "part"],
        ["日", "text"],
        ["\n", "text"],
        ["__proto__", "text"],
        ["<|end|>", "special"],
        ["日", "text"],
        ["77", "unknown"],
    ]);
    assert.deepEqual(texts(file, [2, 9, 2]), [["\ufffd", "text"], ["<|end|>", "special"], ["\ufffd", "text"]],
        "a character that is not completed");
});

test("the other families of tokenizers are decoded", () => {
    const pieces = {
        model: {
            type: "BPE", byte_fallback: true, vocab: { "▁Hi": 0, "▁": 1, "<0xE6>": 2, "<0x97>": 3, "<0xA5>": 4 },
        },
        decoder: { type: "Sequence", decoders: [{ type: "Replace" }, { type: "ByteFallback" }, { type: "Fuse" }] },
    };
    assert.deepEqual(texts(pieces, [0, 1, 2, 3, 4]),
        [[" Hi", "text"], [" ", "text"], ["", "part"], ["", "part"], ["日", "text"]]);
    const unigram = { model: { type: "Unigram", vocab: [["<unk>", 0], ["▁a", -1.5], ["b", -2]] } };
    assert.deepEqual(texts(unigram, [1, 2]), [[" a", "text"], ["b", "text"]]);
    const words = { model: { type: "WordPiece", vocab: { play: 0, "##ing": 1, well: 2 } } };
    assert.deepEqual(texts(words, [0, 1, 2]), [["play", "text"], ["ing", "text"], [" well", "text"]]);
    const levels = { model: { type: "WordLevel", vocab: { a: 0, b: 1 } } };
    assert.deepEqual(texts(levels, [0, 1]), [["a", "text"], [" b", "text"]]);
    assert.deepEqual(texts({ "Ġa": 0, b: 1 }, [0, 1]), [[" a", "text"], ["b", "text"]], "a vocabulary alone");
});

test("a file that is no tokenizer is refused with the reason", () => {
    const cases = [
        ["{", /The file is not JSON\./],
        ["[1]", /not a JSON object/],
        ["{\"model\": {}}", /`model\.vocab` is missing/],
        ["{\"model\": {\"vocab\": {\"a\": -1, \"b\": \"x\"}}}", /is empty/],
    ];
    for (const [file, said] of cases) {
        assert.throws(() => parseTokenizer(file), (error) => error instanceof UnknownTokenizer && said.test(error.message));
    }
});

test("the cursor stays within the tokens", () => {
    assert.equal(moved("ArrowRight", -1, 3), 0, "from a place before the first");
    assert.equal(moved("ArrowLeft", 0, 3), 0);
    assert.equal(moved("PageDown", 0, 3), 2);
    assert.equal(moved("End", 0, 3), 2);
    assert.equal(moved("ArrowRight", 0, 0), null, "there are no tokens");
    assert.equal(moved("x", 0, 3), null);
});

test("what is known of a token is said, and nothing else", () => {
    const window = {
        from: 10, to: 12, prompt_tokens: 11, tokens: [5, 6], loss_mask: [null, 1], trained_mask: [null, 1],
        logprobs: [null, Math.log(0.25)], teacher_logprobs: null, values: [null, -0.5], versions: [[7, 0, 1]],
    };
    const facts = { advantage: 0.5, weight: 0.000041 };
    const trained = describe(window, 1, { kind: "text", text: "a\n\u202e" }, facts);
    assert.equal(trained.title, "#11 · id 6 · \"a↵\\u{202e}\"");
    assert.deepEqual(trained.lines, [
        "mask 1 · logprob −1.39 (p 0.250)", "advantage +0.50 · weight 4.1e−5 · value −0.500 · version 7",
    ]);
    const prompt = describe(window, 0, null, facts);
    assert.deepEqual([prompt.title, prompt.lines], ["#10 · id 5", ["prompt", ""]]);
    assert.deepEqual([weight(0.25), weight(null)], ["0.25", "–"]);
});
