// The reader's key: kept with the tab, or with the browser if the reader asks for it, and handed to other tabs.

// Services behind one proxy share an origin, so all names have the path of the page.
const place = new URL("./", document.baseURI).pathname;
const NAME = `forebay key ${place}`;

let key = sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME);
/** @type {(what: "given"|"forgotten") => void} */
let onChange = () => {};

// Tabs of this origin, which no other site can join.
const tabs = new BroadcastChannel(`forebay ${place}`);

tabs.onmessage = (/** @type {MessageEvent} */ { data }) => {
    if (data === "ask" && key !== null) {
        tabs.postMessage({ key });
    } else if (data === "forget" && key !== null) {
        drop();
        onChange("forgotten");
    } else if (typeof data?.key === "string" && key === null) {
        key = data.key;
        sessionStorage.setItem(NAME, data.key);
        onChange("given");
    }
};

function drop() {
    key = null;
    sessionStorage.removeItem(NAME);
    localStorage.removeItem(NAME);
}

/** The key, or null. */
export function current() {
    return key;
}

/**
 * Calls `listener("given" | "forgotten")` if another tab hands over its key or forgets it.
 * @param {(what: "given"|"forgotten") => void} listener
 */
export function listen(listener) {
    onChange = listener;
}

/** Asks the other tabs for their key. */
export function ask() {
    tabs.postMessage("ask");
}

/**
 * Keeps a key that the service has accepted, and gives it to tabs that wait for one.
 * @param {string} accepted
 * @param {boolean} inBrowser
 */
export function keep(accepted, inBrowser) {
    key = accepted;
    sessionStorage.setItem(NAME, accepted);
    if (inBrowser) {
        localStorage.setItem(NAME, accepted);
    }
    tabs.postMessage({ key });
}

/** Forgets the key in this tab, in the browser's store and in the other tabs. */
export function forget() {
    drop();
    tabs.postMessage("forget");
}

/** Forgets a key that the service refuses. Other tabs find out by themselves. */
export function refused() {
    drop();
}
