//! Long versions of tests that otherwise run for seconds, for `make endure`.
//!
//! `FOREBAY_ENDURE` selects the long version, `FOREBAY_SEED` is the seed of random numbers, and `FOREBAY_REPORT` is a
//! file that gets a line for each count.

use std::io::Write as _;

/// Returns the short size, or the long size if the long version is selected.
pub(crate) fn size(short: usize, long: usize) -> usize {
    if std::env::var_os("FOREBAY_ENDURE").is_some() { long } else { short }
}

/// Whether the long versions run, for tests that have no short one.
pub(crate) fn is_long() -> bool {
    size(0, 1) == 1
}

/// For tests that run in every version.
pub(crate) fn is_any() -> bool {
    true
}

/// The seed of random numbers.
pub(crate) fn seed() -> u64 {
    std::env::var("FOREBAY_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7)
}

/// Reports a count: `what` was tried, how many times, and with which outcome.
pub(crate) fn report(what: &str, count: usize, outcome: &str) {
    eprintln!("{what}: {count} ({outcome})");
    let Some(path) = std::env::var_os("FOREBAY_REPORT") else { return };
    let line = format!("{what}\t{count}\t{}\t{outcome}\n", seed());
    let file = std::fs::File::options().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the report can be written");
}
