// Numbers, times and text for people. All functions are pure and return text; what is absent becomes a dash.

const DASH = "–";
const MINUS = "\u2212";

/** @type {(value: unknown) => value is number} */
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** @type {(text: string) => string} */
const withMinus = (text) => text.replace("-", MINUS);

/**
 * 2677 -> "2,677"
 * @param {number|null|undefined} value
 */
export function count(value) {
    if (!isNumber(value)) {
        return DASH;
    }
    return withMinus(String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ","));
}

/**
 * 1900000 -> "1.9 M"; below 10,000 as `count`.
 * @param {number|null|undefined} value
 */
export function short(value) {
    if (!isNumber(value) || Math.abs(value) < 10_000) {
        return count(value);
    }
    const units = ["k", "M", "G", "T", "P"];
    let scaled = value / 1000;
    let unit = 0;
    while (Math.abs(scaled) >= 999.5 && unit < units.length - 1) {
        scaled /= 1000;
        unit += 1;
    }
    return `${withMinus(scaled.toFixed(Math.abs(scaled) < 99.95 ? 1 : 0))} ${units[unit]}`;
}

/**
 * 429496729 -> "0.4 GiB"
 * @param {number|null|undefined} value
 */
export function bytes(value) {
    if (!isNumber(value)) {
        return DASH;
    }
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let scaled = value;
    let unit = 0;
    while (Math.abs(scaled) >= 102.4 && unit < units.length - 1) {
        scaled /= 1024;
        unit += 1;
    }
    return unit === 0 ? `${count(scaled)} B` : `${withMinus(scaled.toFixed(1))} ${units[unit]}`;
}

/**
 * 0.7134 -> "0.71"
 * @param {number|null|undefined} value
 * @param {number} digits
 */
export function real(value, digits = 2) {
    if (!isNumber(value)) {
        return DASH;
    }
    const text = value.toFixed(digits);
    // A tiny negative number is shown as zero, without a sign.
    return withMinus(Number(text) === 0 ? text.replace("-", "") : text);
}

/**
 * 0.02 -> "+0.02"
 * @param {number|null|undefined} value
 * @param {number} digits
 */
export function signed(value, digits = 2) {
    const text = real(value, digits);
    return isNumber(value) && Number(value.toFixed(digits)) > 0 ? `+${text}` : text;
}

/**
 * 0.97 -> "97%"
 * @param {number|null|undefined} share
 */
export function percent(share) {
    if (!isNumber(share)) {
        return DASH;
    }
    const value = share * 100;
    const small = value !== 0 && Math.abs(value) < 0.95;
    const text = small ? (Math.abs(value) < 0.05 ? "<0.1" : value.toFixed(1)) : String(Math.round(value));
    // Neither "all" nor "none" is claimed of what is almost so.
    return share < 1 && text === "100" ? ">99%" : `${withMinus(text)}%`;
}

/**
 * 250000 -> "4 min 10 s"
 * @param {number|null|undefined} milliseconds
 */
export function duration(milliseconds) {
    if (!isNumber(milliseconds)) {
        return DASH;
    }
    const seconds = Math.max(0, milliseconds) / 1000;
    if (seconds < 1) {
        return seconds === 0 ? "0 s" : `${Math.max(1, Math.round(seconds * 1000))} ms`;
    }
    if (seconds < 10 && !Number.isInteger(seconds)) {
        return `${seconds.toFixed(1)} s`;
    }
    const whole = Math.round(seconds);
    if (whole < 60) {
        return `${whole} s`;
    }
    /** @type {[number, string, number, string][]} */
    const pairs = [[86_400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
    const [large, largeUnit, small, smallUnit] = pairs.find(([size]) => whole >= size) ?? pairs[pairs.length - 1];
    const first = Math.floor(whole / large);
    const rest = Math.floor((whole % large) / small);
    return rest === 0 ? `${first} ${largeUnit}` : `${first} ${largeUnit} ${rest} ${smallUnit}`;
}

/**
 * The time since a moment in whole seconds: "2 s". The second argument is the time now, in milliseconds.
 * @param {string|null|undefined} moment
 * @param {number} now
 */
export function ago(moment, now) {
    const at = Date.parse(moment ?? "");
    return isNumber(at) && isNumber(now) ? duration(Math.max(0, Math.floor((now - at) / 1000)) * 1000) : DASH;
}

/** @type {(number: number) => string} */
const two = (number) => String(number).padStart(2, "0");

/** @param {string|null|undefined} moment */
function parsed(moment) {
    const date = new Date(moment ?? Number.NaN);
    return Number.isNaN(date.getTime()) ? null : date;
}

/**
 * The time of day where the reader is: "02:10:31".
 * @param {string|null|undefined} moment
 */
export function clock(moment) {
    const date = parsed(moment);
    return date ? `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}` : DASH;
}

/**
 * The same with milliseconds: "02:10:31.004".
 * @param {string|null|undefined} moment
 */
export function clockMs(moment) {
    const date = parsed(moment);
    return date ? `${clock(moment)}.${String(date.getMilliseconds()).padStart(3, "0")}` : DASH;
}

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/**
 * The day and time where the reader is: "11 Nov 02:10".
 * @param {string|null|undefined} moment
 */
export function day(moment) {
    const date = parsed(moment);
    return date
        ? `${date.getDate()} ${MONTHS[date.getMonth()]} ${two(date.getHours())}:${two(date.getMinutes())}`
        : DASH;
}

/**
 * A long id by its ends: "0197…3f".
 * @param {string|null|undefined} id
 */
export function shortId(id) {
    const text = id ?? DASH;
    return text.length > 12 ? `${text.slice(0, 4)}…${text.slice(-4)}` : text;
}

/**
 * plural(3, "rollout") -> "3 rollouts"
 * @param {number|null|undefined} number
 * @param {string} noun
 * @param {string} nouns
 */
export function plural(number, noun, nouns = `${noun}s`) {
    return `${count(number)} ${number === 1 ? noun : nouns}`;
}

// Controls that change the direction or the order of text, characters without width, line separators.
const HIDDEN = /[\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;
// Fillers that look like spaces.
const FILLERS = /[\u115f\u1160\u3164\uffa0]/g;
// Tags: letters that nobody sees and models read.
const TAGS = /[\u{e0000}-\u{e007f}]/gu;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
const MORE_CONTROLS = /[\u0080-\u009f]/g;
const LONE_SURROGATE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** @type {(character: string) => string} */
const escaped = (character) => `\\u{${Number(character.codePointAt(0)).toString(16).padStart(4, "0")}}`;

/**
 * Text of others with everything visible that would change how the text around it looks: control characters as their
 * pictures (so the escape sequences of terminals show as ␛[31m), direction controls and other invisible characters as
 * \u{202e}. Tabs and line ends stay.
 * @param {unknown} text
 */
export function visible(text) {
    return String(text ?? DASH)
        .replace(/\r\n/g, "\n")
        .replace(CONTROLS, (character) => {
            const code = character.charCodeAt(0);
            return String.fromCharCode(code === 0x7f ? 0x2421 : 0x2400 + code);
        })
        .replace(MORE_CONTROLS, escaped)
        .replace(HIDDEN, escaped)
        .replace(FILLERS, escaped)
        .replace(TAGS, escaped)
        .replace(LONE_SURROGATE, escaped);
}

/**
 * Compares numbers for a sort; NaN and null come last, also in a descending sort by `-1`.
 * @param {unknown} first
 * @param {unknown} second
 * @param {number} direction
 */
export function compareReal(first, second, direction = 1) {
    if (!isNumber(first) || !isNumber(second)) {
        return Number(isNumber(second)) - Number(isNumber(first));
    }
    return direction * (first - second);
}
