// Runs before every document of a test: helpers, and a clock and a visibility that the test can take over.
(() => {
    const real = {
        setTimeout: window.setTimeout.bind(window),
        setInterval: window.setInterval.bind(window),
        clearTimeout: window.clearTimeout.bind(window),
        now: performance.now.bind(performance),
    };
    let held = null;

    const clickable = "a, button, label, summary, [role=button], option";

    const find = (selector) => {
        if (!selector.startsWith("text=")) {
            return document.querySelector(selector);
        }
        const text = selector.slice("text=".length);
        const all = [...document.querySelectorAll(clickable)];
        return all.find((element) => element.innerText.trim() === text) ?? null;
    };

    const timers = new Map();
    let next = 1_000_000_000;

    const add = (run, wait, every) => {
        next += 1;
        timers.set(next, { run, at: held + Math.max(0, Number(wait) || 0), every });
        return next;
    };

    window.forebayTest = {
        find,

        /** The middle of an element in the window, which is scrolled to it, once the element has come to rest. */
        async place(selector) {
            let before = null;
            for (let attempt = 0; attempt < 100; attempt += 1) {
                const element = find(selector);
                element?.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
                const { left, top, width, height } = element?.getBoundingClientRect() ?? {};
                const place = [left + width / 2, top + height / 2];
                if (element !== null && String(place) === before) {
                    return place;
                }
                before = String(place);
                await new Promise((again) => real.setTimeout(again, 20));
            }
            throw new Error(`${selector} does not come to rest`);
        },

        /** Whether the condition comes to hold in the next second; an exception counts as "not yet". */
        async until(condition) {
            for (let attempt = 0; attempt < 200; attempt += 1) {
                try {
                    if (condition()) {
                        return true;
                    }
                } catch {
                    // What it looks for is not there yet.
                }
                await new Promise((again) => real.setTimeout(again, 5));
            }
            return false;
        },

        hold() {
            held = real.now();
            window.setTimeout = (run, wait) => add(run, wait, null);
            window.setInterval = (run, wait) => add(run, wait, Math.max(1, wait));
            window.clearTimeout = (id) => timers.delete(id) || real.clearTimeout(id);
            window.clearInterval = window.clearTimeout;
            performance.now = () => held;
        },

        async pass(milliseconds) {
            const end = held + milliseconds;
            for (;;) {
                const due = [...timers].filter(([, timer]) => timer.at <= end).sort((a, b) => a[1].at - b[1].at)[0];
                if (due === undefined) {
                    break;
                }
                const [id, timer] = due;
                held = Math.max(held, timer.at);
                if (timer.every === null) {
                    timers.delete(id);
                } else {
                    timer.at += timer.every;
                }
                timer.run();
                // What the timer started may set further timers.
                await new Promise((again) => real.setTimeout(again, 0));
            }
            held = end;
        },

        hide(isHidden) {
            Object.defineProperty(document, "hidden", { configurable: true, get: () => isHidden });
            const visibility = isHidden ? "hidden" : "visible";
            Object.defineProperty(document, "visibilityState", { configurable: true, get: () => visibility });
            document.dispatchEvent(new Event("visibilitychange"));
        },

        /** Runs something that needs timers while those of the page stand still. */
        async inRealTime(run) {
            const taken = [window.setTimeout, window.setInterval, window.clearTimeout, performance.now];
            [window.setTimeout, window.setInterval, window.clearTimeout] =
                [real.setTimeout, real.setInterval, real.clearTimeout];
            performance.now = real.now;
            try {
                return await run();
            } finally {
                [window.setTimeout, window.setInterval, window.clearTimeout, performance.now] = taken;
            }
        },
    };
})();
