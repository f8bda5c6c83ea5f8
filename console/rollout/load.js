// What the screen of a rollout asks for. The window of tokens and the page of messages change apart from the rest.

import { absent, ApiError, isAborted } from "../api.js";
import { tokenizerOf } from "../tokens/tokenizers.js";
import { evaluates } from "./story.js";

/** Tokens of a window: more marks take too long to draw. */
export const WINDOW = 4096;

/** Messages of a page. */
export const MESSAGES = 100;

const SIBLINGS = 1000;

/** @type {(text: string|undefined) => number} */
const whole = (text) => {
    const number = Number(text ?? 0);
    return Number.isSafeInteger(number) && number > 0 ? number : 0;
};

/**
 * What the address asks for.
 * @param {Params} params
 * @returns {Asked}
 */
export function asked({ policy = "", id = "", segment, from, messages }) {
    return { policy, id, segment: whole(segment), from: whole(from), messages: whole(messages) };
}

/** @type {(first: Asked, second: Asked) => boolean} */
const isAbout = (first, second) => first.policy === second.policy && first.id === second.id;

/** @type {Record<number, Refused["code"]>} */
const CODES = { 403: "role", 404: "absent", 410: "purged" };

/**
 * Why the content is not shown: { code, detail }.
 * @param {unknown} error
 * @returns {Refused}
 */
function refusal(error) {
    if (error instanceof ApiError) {
        const { status, type, title, detail } = error;
        const code = status === 500 && type.endsWith("damaged") ? "damaged" : CODES[status];
        if (code !== undefined) {
            return { code, title, detail };
        }
    }
    throw error;
}

/**
 * The content as text and as data: { raw, content }, or { refused }.
 * @param {Pick<RolloutContext, "get"|"getRaw">} context
 * @param {Asked} question
 * @param {number} tokens
 * @param {number} messages
 * @returns {Promise<Pick<RolloutData, "raw"|"content"|"refused">>}
 */
async function readContent({ getRaw }, question, tokens, messages) {
    const query = {
        policy: question.policy, rollout_id: question.id, segment: question.segment, from: question.from, limit: tokens,
        messages_from: question.messages, messages_limit: messages,
    };
    try {
        const raw = await (await getRaw("./trajectories/content", query)).text();
        return { raw, content: JSON.parse(raw), refused: null };
    } catch (error) {
        return { raw: null, content: null, refused: refusal(error) };
    }
}

/**
 * A message that was left out of its page because of its length.
 * @param {Pick<RolloutContext, "get"|"getRaw">} context
 * @param {Asked} question
 * @param {number} index
 * @returns {Promise<ChatItem|null>}
 */
export async function readMessage({ getRaw }, { policy, id }, index) {
    const query = { policy, rollout_id: id, limit: 0, messages_from: index, messages_limit: 1 };
    const answer = JSON.parse(await (await getRaw("./trajectories/content", query)).text());
    return answer.messages?.items.find((/** @type {ChatItem} */ item) => item.index === index) ?? null;
}

/** Types of images that browsers show, none of which has scripts. */
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/**
 * An image that the service has, as a data URL: a request of an `img` would have no key.
 * @param {Pick<RolloutContext, "getRaw">} context
 * @param {string} digest
 * @returns {Promise<string>}
 */
export async function readImage({ getRaw }, digest) {
    const blob = await (await getRaw(`./media/${digest}`)).blob();
    if (!IMAGE_TYPES.includes(blob.type)) {
        throw new Error(`It is of the type ${blob.type}, which is not shown.`);
    }
    return new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve(/** @type {string} */ (reader.result));
        reader.onerror = () => reject(reader.error);
        reader.readAsDataURL(blob);
    });
}

/**
 * @param {Pick<RolloutContext, "get"|"getRaw">} context
 * @param {{ policy: string, id: string }} rollout
 */
async function readSession({ get }, { policy, id }) {
    const found = await get("./sessions", { policy, rollout_id: id, limit: 1 }).catch(absent(403, 404));
    const session = found?.sessions[0] ?? null;
    if (session === null) {
        return null;
    }
    const turns = await get(`./sessions/${encodeURIComponent(session.session_id)}/turns`).catch(absent(403, 404));
    return { ...session, turns: turns?.turns ?? [] };
}

/**
 * What stands around the rollout: its group, siblings, batch and session.
 * @param {Pick<RolloutContext, "get"|"getRaw">} context
 * @param {Rollout} story
 * @returns {Promise<Surroundings>}
 */
async function readSurroundings(context, story) {
    const { get } = context;
    const { policy } = story;
    const group = story.group.group_id;
    const batch = story.batches.at(-1);
    // A result of a suite is alone, and a group of its name would be another one.
    const isAlone = evaluates(story);
    const [groups, siblings, found, session] = await Promise.all([
        isAlone ? null : get("./groups", { policy, group_id: group, limit: 1 }).catch(absent(403, 404)),
        isAlone ? null
            : get("./trajectories", { policy, group_id: group, limit: SIBLINGS }).catch(absent(403, 404)),
        batch === undefined
            ? null
            : get(`./batches/${encodeURIComponent(batch)}`).catch(absent(403, 404, 410)),
        readSession(context, { policy, id: story.rollout_id }),
    ]);
    return {
        group: groups?.groups[0] ?? null,
        siblings: siblings?.trajectories ?? [story],
        hasMore: siblings?.next !== null && siblings?.next !== undefined,
        batch: found,
        session,
    };
}

/**
 * Only another window or other messages: the rest stays.
 * @param {Pick<RolloutContext, "get"|"getRaw"|"params">} context
 * @param {RolloutData} data
 * @param {Asked} question
 * @returns {Promise<RolloutData>}
 */
async function readPart(context, data, question) {
    const isMoved = question.segment !== data.asked.segment || question.from !== data.asked.from;
    const isTurned = question.messages !== data.asked.messages;
    if (!isMoved && !isTurned) {
        return data;
    }
    const [tokens, messages] = [isMoved ? WINDOW : 0, isTurned ? MESSAGES : 0];
    const { raw, content, refused } = await readContent(context, question, tokens, messages);
    if (content === null || data.content === null) {
        return { ...data, refused, content: null, asked: question, address: context.params };
    }
    return {
        ...data,
        raw,
        content: {
            ...content,
            window: isMoved ? content.window : data.content.window,
            messages: isTurned ? content.messages : data.content.messages,
        },
        asked: question,
        address: context.params,
    };
}

/**
 * @param {Context<RolloutData|null, RolloutLocal, OfOne>} context
 * @returns {Promise<RolloutData>}
 */
export async function load(context) {
    const question = asked(context.params);
    const { data } = context;
    // The same address again is a reader who wants news; another one of the same rollout is another part of it.
    if (data?.content && isAbout(data.asked, question) && data.address !== context.params) {
        const part = await readPart(context, data, question);
        return part === data ? { ...data, address: context.params } : part;
    }
    const first = await readContent(context, question, WINDOW, MESSAGES);
    let story = first.content?.story ?? null;
    if (story === null && first.refused?.code !== "absent") {
        const query = { policy: question.policy, rollout_id: question.id };
        story = await context.get("./trajectories", query).catch(absent(403, 404));
    }
    const around = story === null ? null : await readSurroundings(context, story);
    if (first.content !== null) {
        readTokenizer(context, question.policy);
    }
    return { ...first, story, around, asked: question, address: context.params };
}

/**
 * The tokenizer comes later than the tokens, because it may have many megabytes.
 * @param {Pick<RolloutContext, "getRaw"|"update">} context
 * @param {string} policy
 */
export async function readTokenizer({ getRaw, update }, policy) {
    try {
        update({ tokenizer: { policy, ...(await tokenizerOf(policy, getRaw)) } });
    } catch (error) {
        if (!isAborted(error)) {
            const said = "The tokenizer was not read.";
            update({ tokenizer: { policy, tokenizer: null, name: null, isPicked: false, said } });
        }
    }
}

/**
 * Whether the ledger knows more of the rollout than the screen.
 * @param {RolloutContext} context
 */
export async function peek({ get, data }) {
    const { story: shown } = data;
    if (shown === null) {
        return "";
    }
    const { policy, rollout_id: id } = shown;
    const story = await get("./trajectories", { policy, rollout_id: id });
    const isSame = story.state === shown.state && story.step === shown.step && story.purged_at === shown.purged_at &&
        story.group.arrived === shown.group.arrived && story.batches.length === shown.batches.length;
    if (isSame) {
        return "";
    }
    return story.state === shown.state ? "There is news of this rollout." : `This rollout is now ${story.state}.`;
}
