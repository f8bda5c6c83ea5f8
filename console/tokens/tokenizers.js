// The tokenizer of a policy: the operator's file, which the service serves, or a file that the reader picks. A picked
// file stays in this browser and is never sent anywhere.

import { absent } from "../api.js";
import { parseTokenizer, UnknownTokenizer } from "./vocabulary.js";

const place = new URL("./", document.baseURI).pathname;
const DATABASE = `forebay tokenizers ${place}`;
const STORE = "files";

/** Published files have up to 35 MB. */
const FILE_BYTES_MAX = 128 * 1024 * 1024;

/**
 * What was read in this tab, by policy: promises of { tokenizer, name, isPicked, said }.
 * @type {Map<string, Promise<FoundTokenizer>>}
 */
const read = new Map();

/**
 * @template Result
 * @param {IDBRequest<Result>} request
 * @returns {Promise<Result>}
 */
function settled(request) {
    return new Promise((resolve, reject) => {
        request.onsuccess = () => resolve(request.result);
        request.onerror = () => reject(request.error);
    });
}

/** @param {IDBTransactionMode} mode */
async function store(mode) {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    const database = await settled(request);
    return { files: database.transaction(STORE, mode).objectStore(STORE), close: () => database.close() };
}

/**
 * @template Result
 * @param {IDBTransactionMode} mode
 * @param {(files: IDBObjectStore) => IDBRequest<Result>} use
 * @returns {Promise<Result>}
 */
async function inStore(mode, use) {
    const { files, close } = await store(mode);
    try {
        return await settled(use(files));
    } finally {
        close();
    }
}

/**
 * The file that the reader picked for a policy. Browsers that keep nothing have none.
 * @param {string} policy
 * @returns {Promise<{ name: string, file: Blob }|undefined>}
 */
function picked(policy) {
    return inStore("readonly", (files) => files.get(policy)).catch(() => undefined);
}

/**
 * @param {string} text
 * @param {string|null} name
 * @param {boolean} isPicked
 * @returns {FoundTokenizer}
 */
function parsed(text, name, isPicked) {
    try {
        return { tokenizer: parseTokenizer(text), name, isPicked, said: "" };
    } catch (error) {
        if (!(error instanceof UnknownTokenizer)) {
            throw error;
        }
        return { tokenizer: null, name, isPicked, said: error.message };
    }
}

/**
 * @param {string} policy
 * @param {GetRaw} getRaw
 * @returns {Promise<FoundTokenizer>}
 */
async function readAny(policy, getRaw) {
    const own = await picked(policy);
    if (own !== undefined) {
        return parsed(await own.file.text(), own.name, true);
    }
    const response = await getRaw(`./policies/${encodeURIComponent(policy)}/tokenizer`).catch(absent(403, 404));
    if (response === null) {
        return { tokenizer: null, name: null, isPicked: false, said: "" };
    }
    return parsed(await response.text(), null, false);
}

/**
 * The tokenizer of a policy: { tokenizer or null, name, isPicked, said }. It is read once in a tab.
 * @param {string} policy
 * @param {GetRaw} getRaw
 */
export function tokenizerOf(policy, getRaw) {
    const known = read.get(policy);
    if (known !== undefined) {
        return known;
    }
    const asked = readAny(policy, getRaw);
    read.set(policy, asked);
    // What failed is asked again.
    asked.catch(() => read.delete(policy));
    return asked;
}

/**
 * Reads a file that the reader has picked, and keeps it for the policy if it is a tokenizer.
 * @param {string} policy
 * @param {File} file
 * @returns {Promise<FoundTokenizer>}
 */
export async function pick(policy, file) {
    if (file.size > FILE_BYTES_MAX) {
        return { tokenizer: null, name: null, isPicked: false, said: "The file is too large for a tokenizer." };
    }
    const found = parsed(await file.text(), file.name, true);
    if (found.tokenizer !== null) {
        read.set(policy, Promise.resolve(found));
        const kept = { name: file.name, file: new Blob([file]) };
        await inStore("readwrite", (files) => files.put(kept, policy)).catch(() => {});
    }
    return found;
}

/**
 * Forgets the file that the reader picked for a policy.
 * @param {string} policy
 */
export async function forget(policy) {
    read.delete(policy);
    await inStore("readwrite", (files) => files.delete(policy)).catch(() => {});
}
