// What operators and time did to a policy, in words.

import * as format from "../format.js";
import { plural } from "../format.js";

/** @type {(names: unknown[]|undefined) => string} */
const list = (names) => (names ?? []).map(format.visible).join(", ");

/** @param {Record<string, any>} detail */
function rules(detail) {
    const parts = [
        ["filters added", detail.filters_added],
        ["filters removed", detail.filters_removed],
        ["filters changed", detail.filters_changed],
        ["settings changed", detail.settings_changed],
    ].filter(([, names]) => names?.length > 0);
    return `rules changed${parts.map(([what, names]) => `; ${what}: ${list(names)}`).join("")}`;
}

/** @type {Record<string, (detail: Record<string, any>) => string>} */
const KINDS = {
    "rules-changed": rules,
    resumed: ({ step, returned }) =>
        `resumed from ${step === null ? "nothing" : `step ${step}`}; ${plural(returned, "batch", "batches")} returned`,
    reset: ({ run }) => `reset: run ${run} began`,
    "batch-quarantined": ({ batch_id: id, failed_deliveries: failed }) =>
        `batch ${format.shortId(id)} quarantined after ${plural(failed ?? 0, "failed delivery", "failed deliveries")}`,
    "groups-quarantined": ({ count, reason }) => `${plural(count, "group")} quarantined: ${format.visible(reason)}`,
    readmitted: ({ batch_id: id }) => `batch ${format.shortId(id)} readmitted`,
    "group-closed": ({ group_id: id }) => `group ${format.visible(id)} closed by hand`,
    "group-discarded": ({ group_id: id }) => `group ${format.visible(id)} discarded by hand`,
    "leases-expired": ({ count }) => `${plural(count, "lease")} expired`,
    "backlog-full": () => "the backlog became full: agents are refused",
    "backlog-freed": () => "the backlog has room again",
    "filter-fails": ({ filter }) => `the filter ${format.visible(filter)} began to fail`,
};

/**
 * One entry as a sentence without its time: "rules changed; filters added: zero-variance (key ops)".
 * @param {Schemas["JournalEntry"]} entry
 */
export function describe({ kind, detail, key_id: key }) {
    const words = KINDS[kind]?.(detail ?? {}) ?? kind;
    return key ? `${words} (key ${format.visible(key)})` : words;
}
