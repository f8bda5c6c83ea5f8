//! Long versions: what `make torture` asks of tests that otherwise run for seconds.
//!
//! `FOREBAY_TORTURE` asks for the long version, `FOREBAY_SEED` names what randomness starts from, and
//! `FOREBAY_REPORT` a file that gets a line for each count.

use std::io::Write as _;

/// The short size, or the long one where it is asked for.
pub(crate) fn size(short: usize, long: usize) -> usize {
    if std::env::var_os("FOREBAY_TORTURE").is_some() { long } else { short }
}

/// What randomness starts from.
pub(crate) fn seed() -> u64 {
    std::env::var("FOREBAY_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7)
}

/// Tells how much was tried: `what`, how many, and what came of it.
pub(crate) fn report(what: &str, count: usize, outcome: &str) {
    eprintln!("{what}: {count} ({outcome})");
    let Some(path) = std::env::var_os("FOREBAY_REPORT") else { return };
    let line = format!("{what}\t{count}\t{}\t{outcome}\n", seed());
    let file = std::fs::File::options().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the report can be written");
}
