// The colours of the strip of a segment. Pure.

import { age, between, bound, sequential, signed } from "./scale.js";

/**
 * The colour of each part in a mode. `end` is the end of the scale of the window, so that both have one legend; without
 * it, the parts have a scale of their own.
 * @param {Schemas["TokenMap"]} map
 * @param {Pick<MapParts, "mode"|"end"|"facts">} scale
 * @param {Record<"prompt"|"masked"|"trained"|"withheld", string>} tokens
 */
export function colours(map, { mode, end, facts }, tokens) {
    const { response, masked_in: sent, trained } = map;
    /** @param {number} part */
    const plain = (part) => {
        const ground = between(tokens.prompt, tokens.masked, response[part]);
        const withheld = Math.max(0, sent[part] - trained[part]);
        return between(between(ground, tokens.withheld, withheld), tokens.trained, trained[part]);
    };
    /** @param {number} part */
    const quiet = (part) => between(tokens.prompt, tokens.masked, response[part]);
    /** @type {Record<string, () => (part: number) => string|null>} */
    const columns = {
        logprob: () => {
            const last = end ?? bound(map.logprob_mean) ?? 0;
            return (part) => sequential(map.logprob_mean[part], -last);
        },
        value: () => {
            const last = end ?? bound(map.value_mean ?? []) ?? 0;
            return (part) => signed(map.value_mean?.[part], last);
        },
        advantage: () => (part) => (trained[part] > 0 && end !== null ? signed(facts.advantage, end) : null),
        version: () => (part) => (facts.versions ? age(map.version_min?.[part], facts.versions) : null),
    };
    const of = Object.hasOwn(columns, mode) ? columns[mode]() : null;
    return response.map((_, part) => (of === null ? plain(part) : (of(part) ?? quiet(part))));
}
