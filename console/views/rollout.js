// One rollout: its story, its messages, and its tokens.

import { hash, rolloutHash } from "../address.js";
import { message } from "../api.js";
import { chat, jsonFold } from "../chat/render.js";
import { badge, copyButton, facts, idLink, kbd, untrusted } from "../elements.js";
import * as format from "../format.js";
import { html, nothing } from "../html.js";
import { mark, matches, unmark } from "../rollout/find.js";
import { asked, load, peek, readImage, readMessage } from "../rollout/load.js";
import { sessionPanel } from "../rollout/session.js";
import { evaluates, moments, stateWords } from "../rollout/story.js";
import { tokenPanel } from "../rollout/tokens.js";
import { weight } from "../tokens/describe.js";
import { MODES } from "../tokens/scale.js";

/** How long the browser keeps the raw JSON for the tab that shows it. */
const RAW_KEPT_MS = 60_000;

/**
 * @param {Moment} moment
 * @param {string} policy
 */
function moment({ title, at, kind, lines, batch }, policy) {
    const id = batch === undefined
        ? nothing
        : html` <a class="mono" title=${batch} href=${hash(`policies/${policy}/batches`, { id: batch })}>${
            format.shortId(batch)}</a>`;
    return html`<li class=${kind}>
        <b>${format.visible(title)}</b>${id}
        ${at === null ? nothing : html`<time class="quiet" datetime=${at} title=${format.day(at)}>${format.clockMs(at)}
            </time>`}
        ${lines.filter((line) => line !== "").map((line) => html`<span class="quiet">${format.visible(line)}</span>`)}
    </li>`;
}

/** @param {Rollout} story */
function versions(story) {
    if (story.versions === null) {
        return `v${story.policy_version}${story.policy_version_assumed ? " (assumed)" : ""}`;
    }
    const { min, max } = story.versions;
    return min === max ? `v${min}` : `v${min} to v${max}`;
}

/**
 * The ledger counts tokens with mask 1, which are trained if the rollout is kept.
 * @param {Rollout} story
 */
function trained({ verdict, trained_tokens: tokens }) {
    return verdict === "kept" ? format.count(tokens) : `0 of ${format.count(tokens)} with mask 1`;
}

/** @param {RolloutContent|null} content */
function sampling(content) {
    return Object.entries(content?.sampling ?? {}).filter(([, value]) => value !== null)
        .map(([name, value]) => [format.visible(name), html`<span class="untrusted">${
            format.visible(typeof value === "object" ? JSON.stringify(value) : value)}</span>`]);
}

/** @param {Shown} shown */
function factsOf({ story, content }) {
    const weights = content?.delivered?.loss_weights ?? [];
    const components = Object.entries(content?.reward_components ?? {})
        .map(([name, value]) => [untrusted(name), format.real(value, 3)]);
    return facts([
        ["reward", format.real(story.reward, 3)],
        ...components,
        ["advantage", format.signed(story.advantage)],
        ["loss weight", weights.length === 0 ? format.real(null) : weight(weights[content?.window?.segment ?? 0])],
        ["tokens", format.count(story.tokens)],
        ["trained", trained(story)],
        ["versions", versions(story)],
        ["status", story.status ?? format.real(null)],
        ["environment", untrusted(content?.environment ?? story.group.environment)],
        ...sampling(content),
        ...(evaluates(story)
            ? [["suite", idLink(hash(`policies/${story.policy}/suites/${story.suite}`,
                { version: story.policy_version }), story.suite ?? "")],
            ["task", untrusted(story.task ?? "")]]
            : [["group", idLink(
                hash(`policies/${story.policy}/groups`, { id: story.group.group_id }), story.group.group_id)]]),
        ["execution", untrusted(story.execution_id)],
        ["run", format.count(story.run)],
        ...(content === null ? [] : [["stored copy", "digest and seal match"]]),
    ]);
}

/**
 * @param {RolloutContent|null} content
 * @param {RolloutContext} context
 */
function metadata(content, context) {
    if (content === null || content.metadata_bytes === 0) {
        return nothing;
    }
    const size = format.bytes(content.metadata_bytes);
    return content.metadata === null
        ? html`<p class="quiet">The metadata has ${size} and is not shown.</p>`
        : jsonFold(`metadata, ${size}`, content.metadata, "metadata", context);
}

/**
 * @param {RolloutContext} context
 * @param {Shown} shown
 */
function storyPanel(context, shown) {
    const { story, around, content } = shown;
    return html`<section class="panel story" aria-labelledby="story-title">
        <h2 id="story-title">its story</h2>
        <ol>${moments(story, around.group, around.batch).map((each) => moment(each, story.policy))}</ol>
        <h2>facts</h2>
        ${factsOf(shown)}
        ${metadata(content, context)}
    </section>`;
}

// ---- messages

/**
 * @param {RolloutContext} context
 * @returns {ChatActions}
 */
function messageActions(context) {
    const { local } = context;
    return {
        turn: (from) => context.go({ messages: from === 0 ? null : String(from) }, { replace: true }),
        async showMessage(index) {
            context.update({ asking: new Set([...local.asking, index]) });
            const item = await readMessage(context, asked(context.params), index).catch(() => null);
            const asking = new Set([...local.asking].filter((each) => each !== index));
            const messages = new Map(local.messages);
            context.update({ asking, messages: item === null ? messages : messages.set(index, item) });
        },
        async showImage(digest) {
            /** @param {{ url?: string, error?: string, isComing?: boolean }} found */
            const note = (found) => context.update({ images: new Map(local.images.set(digest, found)) });
            note({ isComing: true });
            note(await readImage(context, digest).then((url) => ({ url }), (error) => ({ error: message(error) })));
        },
    };
}

/**
 * @param {RolloutContext} context
 * @param {RolloutContent} content
 */
function messagesPanel(context, { messages }) {
    const body = messages === null || messages.count === 0
        ? html`<p class="quiet">The producer sent no messages.</p>`
        : chat(messages, context, messageActions(context));
    return html`<section class="panel messages" aria-labelledby="messages-title">
        <h2 id="messages-title">messages as sent</h2>${body}</section>`;
}

// ---- search

/**
 * @param {RolloutContext} context
 * @param {string} sought
 * @param {number} step
 */
function find(context, sought, step) {
    const roots = [...document.querySelectorAll(".chat, .tokens")];
    const found = matches(roots, sought);
    const { local } = context;
    const isSame = sought === local.sought;
    const at = found.length === 0 ? 0 : isSame ? (local.foundAt + step + found.length) % found.length : 0;
    mark(found, at);
    context.update({ sought, foundAt: at, found: found.length });
}

/** @param {RolloutContext} context */
function searching(context) {
    const { local } = context;
    /** @param {On<HTMLFormElement>} event */
    const submit = (event) => {
        event.preventDefault();
        find(context, String(new FormData(event.target).get("sought")), 1);
    };
    /** @param {On<HTMLInputElement>} event */
    const typed = ({ target }) => find(context, target.value, 0);
    const count = local.found >= 1000 ? "1,000 or more" : format.count(local.found);
    const said = local.sought === "" ? "" : local.found === 0 ? "not found in what is shown"
        : `${format.count(local.foundAt + 1)} of ${count}`;
    return html`<form class="find" role="search" aria-label="In this rollout" @submit=${submit}>
        <label for="find">find</label>
        <input id="find" name="sought" type="search" autocomplete="off" spellcheck="false"
            placeholder="in what is shown ( f )" .value=${local.sought} @input=${typed}>
        <span class="quiet" role="status">${said}</span>
    </form>`;
}

// ---- around

/** @param {string} raw */
function openRaw(raw) {
    const address = URL.createObjectURL(new Blob([raw], { type: "text/plain;charset=utf-8" }));
    window.open(address, "_blank", "noopener");
    setTimeout(() => URL.revokeObjectURL(address), RAW_KEPT_MS);
}

/**
 * The place of the rollout among its siblings, from 0; -1 if there are too many to know.
 * @param {Pick<Shown, "story"|"around">} shown
 */
function place({ story, around }) {
    return around.siblings.findIndex(({ rollout_id: id }) => id === story.rollout_id);
}

/**
 * @param {number} step
 * @returns {(context: Pick<Context<RolloutData|null>, "data">) => void}
 */
function toSibling(step) {
    return ({ data }) => {
        if (!data?.around || !data.story) {
            return;
        }
        const { story, around } = data;
        const next = around.siblings[place({ story, around }) + step];
        if (next !== undefined) {
            location.hash = rolloutHash(next.policy, next.rollout_id);
        }
    };
}

/**
 * @param {number} step
 * @returns {(context: Pick<Context<RolloutData|null>, "data"|"go">) => void}
 */
function toSegment(step) {
    return ({ data, go }) => {
        const content = data?.content;
        if (!content?.window) {
            return;
        }
        const next = content.window.segment + step;
        if (next >= 0 && next < content.segments_total) {
            go({ segment: next === 0 ? null : String(next), from: null }, { replace: true });
        }
    };
}

/**
 * @param {RolloutContext} context
 * @param {Shown} shown
 */
function title(context, shown) {
    const { story, around, content, raw } = shown;
    const [glyph, kind, words] = stateWords(story);
    const at = place(shown);
    const more = around.hasMore ? "+" : "";
    const sibling = around.siblings.length < 2 ? nothing : html`<span class="quiet">sibling ${at + 1} of ${
        format.count(around.siblings.length)}${more}
        <button type="button" aria-label="Previous sibling" ?disabled=${at <= 0} @click=${() =>
            toSibling(-1)(context)}>${kbd("k")}</button>
        <button type="button" aria-label="Next sibling" ?disabled=${at + 1 >= around.siblings.length} @click=${() =>
            toSibling(1)(context)}>${kbd("j")}</button></span>`;
    const segments = content?.segments_total ?? 0;
    const segment = content?.window?.segment ?? 0;
    const many = segments < 2 ? nothing : html`<span class="quiet">segment ${format.count(segment + 1)} of ${
        format.count(segments)}
        <button type="button" aria-label="Previous segment" ?disabled=${segment === 0} @click=${() =>
            toSegment(-1)(context)}>${kbd("[")}</button>
        <button type="button" aria-label="Next segment" ?disabled=${segment + 1 >= segments} @click=${() =>
            toSegment(1)(context)}>${kbd("]")}</button></span>`;
    return html`<div class="row rollout-title">
        <h1>rollout <span class="mono">${untrusted(story.rollout_id)}</span></h1> ${badge(kind, glyph, words)}
        ${sibling} ${many}
        <a href=${hash("why", { id: story.rollout_id, policy: story.policy })}>why?</a>
        <span class="spring"></span>
        ${raw === null ? nothing : html`
            <button type="button" @click=${() => openRaw(raw)}>Open raw JSON</button>
            ${copyButton(raw, "Copy raw JSON")}`}
    </div>`;
}

/**
 * Why the tokens and messages are not shown.
 * @param {RolloutContext} context
 * @param {Refused} refused
 */
function refusal({ me }, { code, detail }) {
    /** @type {Record<Refused["code"], string>} */
    const sentences = {
        purged: "The tokens and messages of this rollout are not stored any more.",
        damaged: "The stored copy of this rollout is damaged: it differs from its digest or seal. Nothing was changed.",
        role: `Tokens and messages can be read with a key with the role read or admin. This key has the role ${
            me?.role}.`,
        absent: "The rollout is not there any more.",
    };
    return html`<section class="panel" aria-labelledby="refused-title">
        <h2 id="refused-title">tokens and messages</h2>
        <p class="notice ${code === "damaged" ? "bad" : "warn"}" role="status">${sentences[code]}</p>
        ${code === "role" || detail === "" ? nothing : html`<p>The service says: ${untrusted(detail)}</p>`}
    </section>`;
}

/**
 * There is not even a story.
 * @param {RolloutContext} context
 */
function unknown({ data, params, me }) {
    const id = untrusted(params.id);
    if (data.refused?.code === "role") {
        return html`<h1>rollout <span class="mono">${id}</span></h1>
            <section class="panel"><p>Rollouts can be looked at with a key with the role read, produce or admin. This
            key has the role ${me?.role}.</p></section>`;
    }
    return html`<h1>No such rollout</h1><section class="panel"><p>In the current run of the policy
        ${untrusted(params.policy)}, no rollout has the id <span class="mono">${id}</span>: it was never posted, or the
        ledger has forgotten it. Those two cannot be told apart.</p><p>The service says: ${
        untrusted(data.refused?.detail)}</p></section>`;
}

/**
 * Whether other tokens or messages come, so that what was found is gone. Colours change none.
 * @param {Context<RolloutData|null, RolloutLocal, OfOne>} context
 */
function isAnotherPart({ data, params }) {
    const before = data?.asked;
    const next = asked(params);
    return before === undefined || before.segment !== next.segment || before.from !== next.from ||
        before.messages !== next.messages;
}

/** @type {Key<Pick<RolloutContext, "go">>[]} */
const colours = MODES.map(({ name, key, title: text }) => ({
    key,
    help: `colour the tokens by ${text}`,
    run: ({ go }) => go({ colour: name === "mask" ? null : name }, { replace: true }),
}));

/** @type {View<RolloutData, RolloutLocal, OfOne>} */
export const view = {
    title: ({ params }) => `${params.id} · ${params.policy}`,
    local: () => ({
        tokenizer: null, lengths: {}, open: new Set(), messages: new Map(), asking: new Set(), images: new Map(),
        sought: "", found: 0, foundAt: 0,
    }),
    isSame: (before, after) => before.policy === after.policy && before.id === after.id,
    load(context) {
        if (isAnotherPart(context)) {
            unmark();
            context.update({ sought: "", found: 0, foundAt: 0 });
        }
        return load(context);
    },
    peek,
    keys: [
        {
            key: "w",
            help: "why: what decided about it",
            run({ params }) {
                location.hash = hash("why", { id: params.id, policy: params.policy });
            },
        },
        { key: "j", help: "next sibling of the group", run: toSibling(1) },
        { key: "k", help: "previous sibling of the group", run: toSibling(-1) },
        { key: "[", help: "previous segment", run: toSegment(-1) },
        { key: "]", help: "next segment", run: toSegment(1) },
        ...colours,
        { key: "f", help: "find in what is shown", run: () => document.getElementById("find")?.focus() },
    ],
    render(context) {
        const { data } = context;
        const { story, around, content, refused } = data;
        if (story === null || around === null) {
            return unknown(context);
        }
        const shown = { ...data, story, around };
        return html`${title(context, shown)}
            ${content === null ? nothing : searching(context)}
            <div class="rollout">
                ${storyPanel(context, shown)}
                ${refused === null ? nothing : refusal(context, refused)}
                ${content === null ? nothing
                    : html`${messagesPanel(context, content)}${tokenPanel(context, shown, content)}`}
            </div>
            ${sessionPanel(around)}`;
    },
};
