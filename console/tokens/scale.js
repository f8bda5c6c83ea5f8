// The colours of tokens: what each token is (trained, masked, of the prompt) and the ground on which its text stands.
// Every ground is light, and its text is dark in both colour schemes, so that the contrast is the same in both.

/** The text on a coloured ground. */
export const INK = "#1b1f24";

/** @type {[string, string]} */
const SEQUENCE = ["#e2eee2", "#f0a45c"];
const SIGNED = { low: "#8fbcf0", middle: "#f2f1ee", high: "#f0a45c" };
/**
 * From the newest version to the oldest.
 * @type {[string, string]}
 */
const AGES = ["#e3e6f5", "#b9a3e8"];

/** One token in fifty may be beyond the end of a scale, so that a single one does not make all others alike. */
const SHARE = 0.98;

/** How a token can be coloured: name, key, and what the legend says. */
export const MODES = [
    { name: "mask", key: "m", title: "mask" },
    { name: "logprob", key: "l", title: "logprob" },
    { name: "advantage", key: "a", title: "advantage" },
    { name: "value", key: "v", title: "value" },
    { name: "version", key: "g", title: "version" },
];

/** @type {(value: unknown) => value is number} */
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** @type {(colour: string) => number[]} */
const channels = (colour) => [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));

/**
 * A colour between two others.
 * @param {string} from
 * @param {string} to
 * @param {number} share
 */
export function between(from, to, share) {
    const end = channels(to);
    const mixed = channels(from).map((channel, index) => Math.round(channel + (end[index] - channel) * share));
    return `#${mixed.map((channel) => channel.toString(16).padStart(2, "0")).join("")}`;
}

/** @type {(share: number) => number} */
const within = (share) => Math.min(1, Math.max(0, share));

/**
 * The value below which nearly all absolute values are; null if there is none. NaN and null do not count.
 * @param {(number|null)[]} values
 * @returns {number|null}
 */
export function bound(values) {
    const sizes = values.filter(isNumber).map(Math.abs).sort((first, second) => first - second);
    return sizes.length === 0 ? null : sizes[Math.min(sizes.length - 1, Math.ceil(sizes.length * SHARE) - 1)];
}

/**
 * A ground for a value from 0 to a bound, which may be negative.
 * @param {number|null|undefined} value
 * @param {number} end
 */
export function sequential(value, end) {
    return isNumber(value) ? between(...SEQUENCE, end === 0 ? 0 : within(value / end)) : null;
}

/**
 * A ground for a value around 0.
 * @param {number|null|undefined} value
 * @param {number} end
 */
export function signed(value, end) {
    if (!isNumber(value)) {
        return null;
    }
    const share = end === 0 ? 0 : Math.max(-1, Math.min(1, value / end));
    return share < 0 ? between(SIGNED.middle, SIGNED.low, -share) : between(SIGNED.middle, SIGNED.high, share);
}

/**
 * A ground for a version: the newest is the lightest.
 * @param {number|null|undefined} version
 * @param {{ min: number, max: number }} versions
 */
export function age(version, { min, max }) {
    return isNumber(version) ? between(...AGES, max === min ? 0 : within((max - version) / (max - min))) : null;
}

/**
 * What a token is: "prompt", "masked" (mask 0), "withheld" (sent with mask 1 and not trained), "trained".
 * @param {number|null|undefined} sent
 * @param {number|null|undefined} trained
 */
export function kindOf(sent, trained) {
    if (sent === null || sent === undefined) {
        return "prompt";
    }
    return trained === 1 ? "trained" : sent === 1 ? "withheld" : "masked";
}

/**
 * The version that generated each token of a window; null for the prompt and where none was sent.
 * @param {TokenWindow} window
 * @returns {(number|null)[]}
 */
export function versionsOf(window) {
    const { from, to, prompt_tokens: prompt, versions } = window;
    const found = new Array(to - from).fill(null);
    for (const [version, start, length] of versions ?? []) {
        const first = Math.max(0, prompt + start - from);
        const last = Math.min(found.length, prompt + start + length - from);
        found.fill(version, first, Math.max(first, last));
    }
    return found;
}

/** @type {(value: number) => string} */
const short = (value) => String(Number(value.toPrecision(3))).replace("-", "\u2212");

/** @type {Record<string, string>} */
const MISSING = {
    logprob: "The segment has no log-probabilities.",
    value: "The segment has no critic values.",
    advantage: "The rollout has no advantage: its group is not ready yet, or was left out.",
    version: "The producer sent no version by token.",
};

/**
 * @param {TokenScale["ground"]} ground
 * @param {number} end
 * @returns {Omit<TokenScale, "missing">}
 */
function around0(ground, end) {
    const { low, middle, high } = SIGNED;
    return { ground, end, ends: [`\u2212${short(end)}`, `+${short(end)}`], colours: [low, middle, high] };
}

/** @type {Record<string, (window: TokenWindow, facts: TokenFacts) => Omit<TokenScale, "missing">|null>} */
const SCALES = {
    logprob({ logprobs, loss_mask: mask }) {
        const end = logprobs ? bound(logprobs.filter((_, index) => mask[index] === 1)) : null;
        return logprobs === null || end === null ? null : {
            ground: (index) => (mask[index] === 1 ? sequential(logprobs[index], -end) : null),
            end,
            ends: ["0", `\u2212${short(end)} (surprising)`],
            colours: SEQUENCE,
        };
    },
    value({ values }) {
        const end = bound(values ?? []);
        return values === null || end === null ? null : around0((index) => signed(values[index], end), end);
    },
    advantage({ trained_mask: trained }, { advantage, advantages }) {
        const end = isNumber(advantage) ? bound([advantage, ...advantages]) : null;
        return end === null ? null : around0((index) => (trained[index] === 1 ? signed(advantage, end) : null), end);
    },
    version(window, { versions }) {
        const of = versionsOf(window);
        return !window.versions || !versions ? null : {
            ground: (index) => age(of[index], versions),
            end: null,
            ends: [`v${versions.max}`, versions.max === versions.min ? "the only one" : `v${versions.min} (oldest)`],
            colours: AGES,
        };
    },
};

/** @type {Record<string, "logprobs"|"values">} */
const HAS = { logprob: "logprobs", value: "values" };

/**
 * The scale of a mode for a window: { ground(index), end, ends, colours, missing }. `ground` is null for a token
 * without a value, and `end` is the value at the end of the scale. `facts` has the advantage of the rollout, the
 * advantages of its siblings, and the versions of the segment.
 * @param {string} mode
 * @param {TokenWindow} window
 * @param {TokenFacts} facts
 * @returns {TokenScale}
 */
export function scaleOf(mode, window, facts) {
    const scale = Object.hasOwn(SCALES, mode) ? SCALES[mode](window, facts) : null;
    if (scale !== null) {
        return { ...scale, missing: null };
    }
    const isElsewhere = window[HAS[mode]] !== undefined && window[HAS[mode]] !== null;
    const missing = isElsewhere ? "No token of this window has a value." : (MISSING[mode] ?? null);
    return { ground: () => null, end: null, ends: null, colours: null, missing };
}
