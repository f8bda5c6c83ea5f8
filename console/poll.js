// When the page asks again: at the reader's interval, never while the tab is hidden, and more rarely while the service
// does not answer.

import { ApiError } from "./api.js";

/** The intervals that the reader can choose, in milliseconds; 0 is a pause. */
export const INTERVALS = [2_000, 5_000, 30_000];

const LONGEST_WAIT = 60_000;

// Tabs that were opened together must not ask together.
const JITTER = 0.2;

/** Asks again and again until it is stopped. */
export class Poll {
    #ask;
    #interval;
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    #timer;
    #failures = 0;
    #isStopped = true;
    #isAsking = false;
    /** @type {number|null} */
    #due = null;
    #onVisible = () => this.#visible();

    /**
     * `ask` is an async function; if it throws, the next wait is longer.
     * @param {() => Promise<unknown>} ask
     * @param {number} interval
     */
    constructor(ask, interval) {
        this.#ask = ask;
        this.#interval = interval;
    }

    /** The moment of the next question on the clock of `performance.now()`, or null. */
    get due() {
        return this.#due;
    }

    /** Begins with a wait: the screen has just been loaded. */
    start() {
        this.#isStopped = false;
        document.addEventListener("visibilitychange", this.#onVisible);
        this.#schedule();
    }

    stop() {
        this.#isStopped = true;
        document.removeEventListener("visibilitychange", this.#onVisible);
        this.#clear();
    }

    /**
     * Changes the interval; 0 pauses.
     * @param {number} interval
     */
    every(interval) {
        this.#interval = interval;
        this.#clear();
        this.#schedule();
    }

    /**
     * Notes how the last question ended, also of one that the reader asked by hand.
     * @param {unknown} error
     */
    answered(error) {
        this.#failures = error ? this.#failures + 1 : 0;
        this.#clear();
        this.#schedule((error instanceof ApiError ? error.retryAfter : null) ?? 0);
    }

    #clear() {
        clearTimeout(this.#timer);
        this.#timer = undefined;
        this.#due = null;
    }

    #schedule(least = 0) {
        if (this.#isStopped || this.#isAsking || this.#interval === 0 || document.hidden || this.#timer !== undefined) {
            return;
        }
        const backedOff = Math.min(this.#interval * 2 ** this.#failures, Math.max(LONGEST_WAIT, this.#interval));
        const wait = Math.max(least, backedOff) * (1 + JITTER * (2 * Math.random() - 1));
        this.#due = performance.now() + Math.max(least, wait);
        this.#timer = setTimeout(() => this.#run(), Math.max(least, wait));
    }

    async #run() {
        this.#clear();
        if (this.#isStopped || document.hidden) {
            return;
        }
        this.#isAsking = true;
        let failed = null;
        try {
            await this.#ask();
        } catch (error) {
            failed = error;
        }
        this.#isAsking = false;
        this.answered(failed);
    }

    #visible() {
        if (document.hidden) {
            this.#clear();
        } else if (!this.#isStopped && this.#interval !== 0 && !this.#isAsking) {
            // Once on return, because what is shown is old.
            this.#run();
        }
    }
}
