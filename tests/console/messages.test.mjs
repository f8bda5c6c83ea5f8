// Chat messages of any shape, and JSON as text.

import assert from "node:assert/strict";
import { test } from "node:test";

import { jsonText } from "../../console/chat/json.js";
import { readMessage } from "../../console/chat/messages.js";

// Messages are JSON text, because in a literal of JavaScript `__proto__` is no member.
const read = (text) => readMessage(JSON.parse(text));
const kinds = (text) => read(text).parts.map(({ kind }) => kind);

test("a message has a role, a name and parts", () => {
    const found = read(`{"role": "assistant", "name": "solver", "reasoning_content": "why", "content": "text",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "python", "arguments": "{}"}}],
        "score": 1}`);
    assert.deepEqual([found.role, found.name], ["assistant", "solver"]);
    assert.deepEqual(found.parts, [
        { kind: "reasoning", text: "why" },
        { kind: "text", text: "text" },
        { kind: "call", name: "python", id: "c1", text: "{}", value: undefined },
    ]);
    assert.equal(JSON.stringify(found.rest), "{\"score\":1}");
});

test("only images with their bytes are images", () => {
    const images = `{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "image_url", "image_url": {"url": "data:text/html,<script>"}},
        {"type": "image_url", "image_url": {"url": "//192.0.2.1/x.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/svg+xml", "data": "PHN2Zz4="}},
        {"type": "audio"}, "text", 7, {"type": "thinking", "thinking": "x"}]}`;
    assert.deepEqual(kinds(images), ["image", "link", "link", "link", "json", "text", "json", "reasoning"]);
    const digest = "0a".repeat(32);
    const stored = (/** @type {string} */ url) =>
        read(JSON.stringify({ content: [{ type: "image_url", image_url: { url } }] })).parts;
    assert.deepEqual(stored(`forebay:${digest}`), [{ kind: "upload", digest }]);
    for (const other of [`forebay:${digest}0`, `forebay:${digest.toUpperCase()}`, "forebay:../keys"]) {
        assert.equal(stored(other)[0]?.kind, "link");
    }
});

test("names that attack objects are names like others", () => {
    const found = read("{\"__proto__\": {\"role\": \"x\"}, \"constructor\": {\"name\": \"y\"}, \"content\": null}");
    assert.deepEqual([found.role, found.parts], [null, []]);
    assert.equal(JSON.stringify(found.rest), "{\"__proto__\":{\"role\":\"x\"},\"constructor\":{\"name\":\"y\"}}");
});

test("what is no message is shown as what it is", () => {
    for (const [message, kind] of [["\"text\"", "text"], ["7", "json"], ["null", "json"], ["[1, [2]]", "json"]]) {
        assert.deepEqual(kinds(message), [kind], message);
    }
    const odd = read(`{"role": 7, "content": {"a": 1}, "value": "x", "tool_calls": "none", "reasoning": {"b": 2},
        "name": "python", "tool_call_id": "c1"}`);
    assert.deepEqual([odd.role, odd.parts.map(({ kind }) => kind)], [null, ["json"]]);
    assert.equal(JSON.stringify(odd.rest), "{\"role\":7,\"value\":\"x\",\"tool_calls\":\"none\",\"reasoning\":{\"b\":2}}");
    assert.equal(odd.name, "python · c1");
});

test("a message of many parts shows the first ones and counts the others", () => {
    const many = read(`{"content": [${"1,".repeat(5_000)}1]}`);
    assert.deepEqual([many.parts.length, many.hidden], [200, 4_801]);
});

test("JSON of any depth and length is written", () => {
    const write = (text) => jsonText(JSON.parse(text));
    assert.deepEqual(write("{\"__proto__\": {\"a\": [1, {\"b\": null}]}, \"c\": [], \"d\": \"<x>\"}"), {
        text: "{\n  \"__proto__\": {\n    \"a\": [\n      1,\n      {\n        \"b\": null\n      }\n    ]\n  },\n" +
            "  \"c\": [],\n  \"d\": \"<x>\"\n}",
        isWhole: true,
    });
    const deep = write("[".repeat(10_000) + "]".repeat(10_000));
    assert.equal(deep.isWhole, false);
    assert.ok(deep.text.includes("…") && deep.text.length < 20_000);
    const long = write(`[${"123456,".repeat(500_000)}1]`);
    assert.deepEqual([long.isWhole, long.text.length], [false, 200_000]);
});
