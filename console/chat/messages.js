// Chat messages in one shape, whatever the producer sent: who speaks, and parts that are text, reasoning, calls of
// tools, images, or JSON that is none of these. Pure, and without trust in any of it.

/** Parts of a message that are shown; the message as JSON has them all. */
export const PARTS_MAX = 200;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** An own member: names such as `__proto__` and `constructor` are names like others. */
const member = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

const first = (object, ...names) => names.map((name) => member(object, name)).find((value) => value !== undefined);

const TEXTS = ["text", "input_text", "output_text", "refusal"];
const REASONING = ["reasoning", "thinking", "reasoning_text", "summary_text"];
const IMAGES = ["image_url", "input_image", "image"];

/** Images are shown only if the message has their bytes: nothing is fetched. */
const IMAGE_DATA = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;

function imageUrl(part) {
    const named = first(part, "image_url", "image", "url");
    const url = isObject(named) ? member(named, "url") : named;
    if (typeof url === "string") {
        return url;
    }
    const source = member(part, "source");
    if (isObject(source) && member(source, "type") === "base64") {
        return `data:${member(source, "media_type")};base64,${member(source, "data")}`;
    }
    return null;
}

function image(part) {
    const url = imageUrl(part);
    if (url === null) {
        return null;
    }
    // A long address is tested once; what is no image stays JSON.
    return IMAGE_DATA.test(url)
        ? { kind: "image", url, bytes: Math.floor(((url.length - url.indexOf(",") - 1) * 3) / 4) }
        : { kind: "link", text: url };
}

function toolCall(call) {
    const made = member(call, "function");
    const of = isObject(made) ? made : call;
    const name = first(of, "name");
    const given = first(of, "arguments", "input");
    return {
        kind: "call",
        name: typeof name === "string" ? name : "",
        id: typeof member(call, "id") === "string" ? member(call, "id") : "",
        text: typeof given === "string" ? given : null,
        value: typeof given === "string" ? undefined : given,
    };
}

/** One part of a content, or of a nested result of a tool. */
function partOf(part) {
    if (typeof part === "string") {
        return { kind: "text", text: part };
    }
    if (!isObject(part)) {
        return { kind: "json", value: part };
    }
    const type = member(part, "type");
    const text = first(part, "text", "thinking", "reasoning", "refusal", "content");
    if (TEXTS.includes(type) && typeof text === "string") {
        return { kind: "text", text };
    }
    if (REASONING.includes(type) && typeof text === "string") {
        return { kind: "reasoning", text };
    }
    if (["tool_use", "function_call", "tool_call"].includes(type)) {
        return toolCall(part);
    }
    if (type === "tool_result" && typeof member(part, "content") === "string") {
        return { kind: "text", text: member(part, "content") };
    }
    return (IMAGES.includes(type) ? image(part) : null) ?? { kind: "json", value: part };
}

function contentParts(content) {
    if (content === undefined || content === null || content === "") {
        return [];
    }
    return Array.isArray(content) ? content.slice(0, PARTS_MAX).map(partOf) : [partOf(content)];
}

/** Members that have a place of their own. */
const KNOWN = new Set([
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", "from",
    "value",
]);

const empty = (value) => value === null || value === undefined || (Array.isArray(value) && value.length === 0);

/**
 * { role, name, parts, hidden, rest } of a message. `rest` has the members that are shown as JSON, or undefined, and
 * `hidden` is the number of parts that are left out.
 */
export function readMessage(message) {
    if (!isObject(message)) {
        const part = typeof message === "string" ? { kind: "text", text: message } : { kind: "json", value: message };
        return { role: null, name: null, parts: [part], hidden: 0, rest: undefined };
    }
    const role = first(message, "role", "from");
    const name = first(message, "name", "tool_call_id");
    const content = first(message, "content", "value");
    const calls = member(message, "tool_calls");
    const reasoning = first(message, "reasoning_content", "reasoning", "thinking");
    const parts = [
        ...(typeof reasoning === "string" && reasoning !== "" ? [{ kind: "reasoning", text: reasoning }] : []),
        ...contentParts(content),
        ...(Array.isArray(calls) ? calls.slice(0, PARTS_MAX).map((call) =>
            (isObject(call) ? toolCall(call) : { kind: "json", value: call })) : []),
    ];
    const isUnread = (key, value) =>
        !KNOWN.has(key) || (key === "tool_calls" && !Array.isArray(value)) ||
        (["reasoning_content", "reasoning", "thinking"].includes(key) && typeof value !== "string") ||
        (["role", "from", "name", "tool_call_id"].includes(key) && typeof value !== "string");
    const rest = Object.entries(message).filter(([key, value]) => isUnread(key, value) && !empty(value));
    const sent = (Array.isArray(content) ? content.length : 0) + (Array.isArray(calls) ? calls.length : 0);
    const shown = (list) => (Array.isArray(list) ? Math.min(list.length, PARTS_MAX) : 0);
    return {
        role: typeof role === "string" ? role : null,
        name: typeof name === "string" ? name : null,
        parts,
        hidden: sent - shown(content) - shown(calls),
        // Without a prototype, so that `__proto__` is a member.
        rest: rest.length === 0 ? undefined : fromEntries(rest),
    };
}

function fromEntries(entries) {
    const object = Object.create(null);
    for (const [key, value] of entries) {
        object[key] = value;
    }
    return object;
}
