// Replaces a language of the browser that is not valid, before the charts format numbers in it.
//
// A browser that is started with the locale `C` reports `en-US@posix`, with which `Intl` throws.

try {
    new Intl.NumberFormat(navigator.language);
} catch {
    Object.defineProperty(navigator, "language", { value: "en-US" });
}
