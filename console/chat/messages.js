// Chat messages in one shape, whatever the producer sent: who speaks, and parts that are text, reasoning, calls of
// tools, images, or JSON that is none of these. Pure, and without trust in any of it.

/** Parts of a message that are shown; the message as JSON has them all. */
export const PARTS_MAX = 200;

/** @type {(value: unknown) => value is Json} */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** @type {(value: unknown) => value is string} */
const isText = (value) => typeof value === "string";

/**
 * An own member: names such as `__proto__` and `constructor` are names like others.
 * @type {(object: Json, name: string) => unknown}
 */
const member = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

/** @type {(object: Json, ...names: string[]) => unknown} */
const first = (object, ...names) => names.map((name) => member(object, name)).find((value) => value !== undefined);

const TEXTS = ["text", "input_text", "output_text", "refusal"];
const REASONING = ["reasoning", "thinking", "reasoning_text", "summary_text"];
const IMAGES = ["image_url", "input_image", "image"];

/** An image that the service has. */
const UPLOAD = /^forebay:([0-9a-f]{64})$/;

/** Other images are shown only if the message has their bytes: nothing is fetched. */
const IMAGE_DATA = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;

/** @param {Json} part */
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

/**
 * @param {Json} part
 * @returns {Part|null}
 */
function image(part) {
    const url = imageUrl(part);
    if (url === null) {
        return null;
    }
    const [, digest] = UPLOAD.exec(url) ?? [];
    if (digest !== undefined) {
        return { kind: "upload", digest };
    }
    // A long address is tested once; what is no image stays JSON.
    return IMAGE_DATA.test(url)
        ? { kind: "image", url, bytes: Math.floor(((url.length - url.indexOf(",") - 1) * 3) / 4) }
        : { kind: "link", text: url };
}

/**
 * @param {Json} call
 * @returns {Part}
 */
function toolCall(call) {
    const made = member(call, "function");
    const of = isObject(made) ? made : call;
    const name = first(of, "name");
    const given = first(of, "arguments", "input");
    const id = member(call, "id");
    return {
        kind: "call",
        name: typeof name === "string" ? name : "",
        id: isText(id) ? id : "",
        text: typeof given === "string" ? given : null,
        value: typeof given === "string" ? undefined : given,
    };
}

/**
 * One part of a content, or of a nested result of a tool.
 * @param {unknown} part
 * @returns {Part}
 */
function partOf(part) {
    if (typeof part === "string") {
        return { kind: "text", text: part };
    }
    if (!isObject(part)) {
        return { kind: "json", value: part };
    }
    const type = member(part, "type");
    const isOf = (/** @type {string[]} */ names) => isText(type) && names.includes(type);
    const text = first(part, "text", "thinking", "reasoning", "refusal", "content");
    if (isOf(TEXTS) && typeof text === "string") {
        return { kind: "text", text };
    }
    if (isOf(REASONING) && typeof text === "string") {
        return { kind: "reasoning", text };
    }
    if (isOf(["tool_use", "function_call", "tool_call"])) {
        return toolCall(part);
    }
    const result = member(part, "content");
    if (type === "tool_result" && isText(result)) {
        return { kind: "text", text: result };
    }
    return (isOf(IMAGES) ? image(part) : null) ?? { kind: "json", value: part };
}

/** @param {unknown} content */
function contentParts(content) {
    if (content === undefined || content === null || content === "") {
        return [];
    }
    return Array.isArray(content) ? content.slice(0, PARTS_MAX).map(partOf) : [partOf(content)];
}

/** @type {(value: unknown) => boolean} */
const empty = (value) => value === null || value === undefined || (Array.isArray(value) && value.length === 0);

/**
 * { role, name, parts, hidden, rest } of a message. `rest` has the members that have no place of their own, or is
 * undefined, and `hidden` is the number of parts that are left out.
 * @param {unknown} message
 * @returns {Message}
 */
export function readMessage(message) {
    if (!isObject(message)) {
        return { role: null, name: null, parts: [partOf(message)], hidden: 0, rest: undefined };
    }
    const placed = new Set();
    /**
     * The first of some members that is what is wanted; the others are of the rest.
     * @param {(value: unknown) => boolean} isWanted
     * @param {...string} names
     */
    const take = (isWanted, ...names) => {
        const name = names.find((each) => Object.hasOwn(message, each) && isWanted(message[each]));
        placed.add(name);
        return name === undefined ? undefined : message[name];
    };
    const role = take(isText, "role", "from");
    const names = [take(isText, "name"), take(isText, "tool_call_id")].filter(isText);
    const content = take((value) => !empty(value), "content", "value");
    const called = take(Array.isArray, "tool_calls");
    const calls = Array.isArray(called) ? called : [];
    const reasoning = take(isText, "reasoning_content", "reasoning", "thinking");
    /** @type {Part[]} */
    const parts = contentParts(content);
    if (isText(reasoning) && reasoning !== "") {
        parts.unshift({ kind: "reasoning", text: reasoning });
    }
    for (const call of calls.slice(0, PARTS_MAX)) {
        parts.push(isObject(call) ? toolCall(call) : { kind: "json", value: call });
    }
    const rest = Object.entries(message).filter(([key, value]) => !placed.has(key) && !empty(value));
    /** @param {unknown} list */
    const beyond = (list) => (Array.isArray(list) ? Math.max(0, list.length - PARTS_MAX) : 0);
    return {
        role: isText(role) ? role : null,
        name: names.length === 0 ? null : names.join(" · "),
        parts,
        hidden: beyond(content) + beyond(calls),
        rest: rest.length === 0 ? undefined : fromEntries(rest),
    };
}

/**
 * An object without a prototype, in which `__proto__` is a member.
 * @param {[string, unknown][]} entries
 * @returns {Json}
 */
function fromEntries(entries) {
    const object = Object.create(null);
    for (const [key, value] of entries) {
        object[key] = value;
    }
    return object;
}
