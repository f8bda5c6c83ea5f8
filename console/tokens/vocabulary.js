// Token ids as text: what a tokenizer file says each id stands for. Only the vocabulary is needed, because nothing is
// split into tokens here. Three families are known: byte-level BPE, sentencepiece, and words.

/** The file is none that this page can use; the message says why. */
export class UnknownTokenizer extends Error {}

/** @type {(value: unknown) => value is Record<string, any>} */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** @type {(value: unknown) => value is number} */
const isId = (value) => typeof value === "number" && Number.isInteger(value) && value >= 0;

/**
 * The types of a decoder or pre-tokenizer and of those that it consists of.
 * @param {unknown} step
 * @returns {string[]}
 */
function types(step) {
    if (!isObject(step)) {
        return [];
    }
    const inner = step.decoders ?? step.pretokenizers;
    return [String(step.type ?? ""), ...(Array.isArray(inner) ? inner.flatMap(types) : [])];
}

/**
 * The pieces of a vocabulary with their ids: an object of BPE and words, or Unigram's list of pieces and scores.
 * @param {unknown[]|Record<string, unknown>} vocabulary
 * @returns {Generator<[id: number, piece: string]>}
 */
function* pieces(vocabulary) {
    if (Array.isArray(vocabulary)) {
        for (const [id, entry] of vocabulary.entries()) {
            if (Array.isArray(entry) && typeof entry[0] === "string") {
                yield [id, entry[0]];
            }
        }
    } else {
        for (const [piece, id] of Object.entries(vocabulary)) {
            if (isId(id)) {
                yield [id, piece];
            }
        }
    }
}

/**
 * "bytes", "sentencepiece", "wordpiece" or "words".
 * @param {Record<string, any>} file
 * @param {string[]} texts
 */
function familyOf(file, texts) {
    const found = [...types(file.decoder), ...types(file.pre_tokenizer)];
    const model = String(file.model?.type ?? "");
    if (found.includes("ByteLevel")) {
        return "bytes";
    }
    if (model === "WordPiece" || found.includes("WordPiece")) {
        return "wordpiece";
    }
    if (model === "Unigram" || file.model?.byte_fallback === true || found.some((type) =>
        ["Metaspace", "ByteFallback"].includes(type))) {
        return "sentencepiece";
    }
    if (model === "WordLevel") {
        return "words";
    }
    // An older file, or a vocabulary without its model: the sign for a space tells.
    /** @param {string} sign */
    const has = (sign) => texts.some((text) => text.startsWith(sign));
    return has("\u0120") ? "bytes" : has("\u2581") ? "sentencepiece" : has("##") ? "wordpiece" : "words";
}

/**
 * Reads `tokenizer.json` of Hugging Face, or a `vocab.json`: { family, pieces: Map of id to text, added }.
 * @param {string} text
 * @returns {Tokenizer}
 */
export function parseTokenizer(text) {
    let file;
    try {
        file = JSON.parse(text);
    } catch {
        throw new UnknownTokenizer("The file is not JSON. A tokenizer.json of Hugging Face is needed.");
    }
    if (!isObject(file)) {
        throw new UnknownTokenizer("The file is not a tokenizer.json of Hugging Face: it is not a JSON object.");
    }
    const model = isObject(file.model) ? file.model : { vocab: file };
    const vocabulary = model.vocab;
    if (!isObject(vocabulary) && !Array.isArray(vocabulary)) {
        throw new UnknownTokenizer("The file has no vocabulary: `model.vocab` is missing.");
    }
    const byId = new Map(pieces(vocabulary));
    const added = new Map();
    for (const entry of Array.isArray(file.added_tokens) ? file.added_tokens : []) {
        if (isId(entry?.id) && typeof entry.content === "string") {
            added.set(entry.id, { text: entry.content, isSpecial: entry.special === true });
        }
    }
    if (byId.size + added.size === 0) {
        throw new UnknownTokenizer("The vocabulary of the file is empty.");
    }
    return { family: familyOf(file, [...byId.values()]), pieces: byId, added };
}

/**
 * The characters by which byte-level BPE writes bytes: printable ones stand for themselves, the others follow 0xff.
 * @type {Map<string, number>}
 */
const BYTES = new Map();
{
    /** @param {number} byte */
    const isPlain = (byte) => (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    let next = 0x100;
    for (let byte = 0; byte < 256; byte += 1) {
        BYTES.set(String.fromCharCode(isPlain(byte) ? byte : next), byte);
        next += isPlain(byte) ? 0 : 1;
    }
}

const encoder = new TextEncoder();

/**
 * The bytes of a piece of byte-level BPE. Characters that stand for no byte are themselves.
 * @param {string} piece
 */
function levelBytes(piece) {
    const bytes = [];
    for (const character of piece) {
        const byte = BYTES.get(character);
        bytes.push(...(byte === undefined ? encoder.encode(character) : [byte]));
    }
    return Uint8Array.from(bytes);
}

const BYTE_PIECE = /^<0x([0-9A-Fa-f]{2})>$/;

/**
 * @param {string} family
 * @param {string} piece
 * @param {boolean} isFirst
 */
function pieceBytes(family, piece, isFirst) {
    if (family === "bytes") {
        return levelBytes(piece);
    }
    if (family === "sentencepiece") {
        const byte = BYTE_PIECE.exec(piece);
        return byte ? Uint8Array.of(Number.parseInt(byte[1], 16)) : encoder.encode(piece.replaceAll("\u2581", " "));
    }
    if (family === "wordpiece" && piece.startsWith("##")) {
        return encoder.encode(piece.slice(2));
    }
    return encoder.encode(isFirst ? piece : ` ${piece}`);
}

/**
 * What consecutive ids stand for: a list of { text, kind }. `kind` is "text", "special", "part" (bytes of a character
 * that a later token completes) or "unknown" (the vocabulary has no such id; the text is the id).
 * @param {Tokenizer} tokenizer
 * @param {number[]} ids
 * @returns {TokenText[]}
 */
export function decode(tokenizer, ids) {
    /** @type {TokenText[]} */
    const found = [];
    // A stream, because a character may be spread over several tokens. It is shown with the last of them.
    let decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const flush = () => {
        const rest = decoder.decode();
        const last = found.at(-1);
        if (rest !== "" && last !== undefined) {
            found[found.length - 1] = { text: last.text + rest, kind: "text" };
        }
    };
    for (const id of ids) {
        const added = tokenizer.added.get(id);
        const piece = tokenizer.pieces.get(id);
        if (added === undefined && piece !== undefined) {
            const bytes = pieceBytes(tokenizer.family, piece, found.length === 0);
            const text = decoder.decode(bytes, { stream: true });
            found.push({ text, kind: text === "" && bytes.length > 0 ? "part" : "text" });
            continue;
        }
        flush();
        found.push(added === undefined
            ? { text: String(id), kind: "unknown" }
            : { text: added.text, kind: added.isSpecial ? "special" : "text" });
    }
    flush();
    return found;
}
