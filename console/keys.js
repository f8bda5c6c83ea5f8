// The keyboard: which key does what, on every screen and on the one that is shown.

const FIELDS = "input, textarea, select, [contenteditable]";

/**
 * Moves the focus to the next or previous row of the screen's list. Whether there is one.
 * @param {number} step
 */
function moveRow(step) {
    /** @type {NodeListOf<HTMLElement>} */
    const marked = document.querySelectorAll("[data-rows] [data-row]");
    const rows = [...marked];
    if (rows.length === 0) {
        return false;
    }
    const active = document.activeElement;
    const at = rows.findIndex((row) => row === active || row.contains(active));
    const next = at === -1 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + step, 0), rows.length - 1);
    rows[next].focus();
    return true;
}

/** @param {string} selector */
function jump(selector) {
    /** @type {HTMLElement|null} */
    const target = document.querySelector(selector);
    target?.focus();
    target?.scrollIntoView({ block: "nearest" });
    return target !== null;
}

/** @type {Record<string, (actions: Actions) => unknown>} */
const GLOBAL = {
    "/": () => jump("#ask"),
    "?": (actions) => actions.toggleHelp(),
    j: () => moveRow(1),
    k: () => moveRow(-1),
    p: (actions) => actions.togglePause(),
    t: (actions) => actions.toggleNumbers(),
    u: (actions) => actions.up(),
    w: (actions) => jump("#why") || actions.why(),
};

/**
 * Handles a key. The keys of the screen come before those of every screen; none works while the reader types.
 * @param {KeyboardEvent} event
 * @param {Key[]} ofView
 * @param {() => AnyContext} context
 * @param {Actions} actions
 */
export function pressed(event, ofView, context, actions) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) {
        return;
    }
    const { target } = event;
    if (target instanceof HTMLElement && target.closest(FIELDS)) {
        if (event.key === "Escape") {
            target.blur();
        }
        return;
    }
    // The dialog has its own keys: Escape closes it.
    if (target instanceof Element && target.closest("dialog") && event.key !== "?") {
        return;
    }
    const own = ofView.find(({ key }) => key === event.key);
    if (own) {
        event.preventDefault();
        own.run(context());
    } else if (Object.hasOwn(GLOBAL, event.key)) {
        if (GLOBAL[event.key](actions) !== false) {
            event.preventDefault();
        }
    }
}
