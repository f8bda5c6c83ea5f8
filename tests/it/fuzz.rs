//! Runs the fuzz targets on their seeds and on mutations of the seeds, with the project's own compiler.
//!
//! `make fuzz` does more: it is guided by coverage and detects memory errors. This test makes sure that the errors it
//! found stay fixed.

#[expect(unreachable_pub, reason = "the crate of the fuzz targets makes it public")]
#[path = "../../fuzz/src/checks.rs"]
mod checks;

use std::{fs, path::Path};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

/// Mutations of each seed.
const MUTATIONS: usize = 300;

/// Byte sequences that commonly break parsers.
const PIECES: &[&[u8]] = &[
    b"\"",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"\0",
    b"\n",
    b"\xff",
    b"\xef\xbb\xbf",
    b"-0",
    b"1e400",
    b"1e39",
    b"NaN",
    b"9223372036854775808",
    b"18446744073709551615",
    b"null",
    b"{}",
    b"[]",
    b"..",
    b"%00",
    b"&",
    b"=",
    b"\x28\xb5\x2f\xfd",
    b"\x1f\x8b\x08",
    b"\"segments\":",
    b"\"turns\":",
    b"\"after\":",
    b"\"metadata\":",
    b"\"role\":\"assistant\"",
    b"\"content\":[",
    b"\"type\":\"text\"",
    b"\"tool_calls\":",
    b"-9999.0",
];

/// The function that a target runs.
type Check = fn(&[u8]);

/// Every target with the folder of its seeds.
const TARGETS: [(&str, Check); 20] = [
    ("trajectory", checks::trajectory),
    ("bundle", checks::bundle),
    ("lines", checks::lines),
    ("arrow", checks::arrow),
    ("expand", checks::expand),
    ("canonical", checks::canonical),
    ("calls", checks::calls),
    ("unpack", checks::unpack),
    ("filter", checks::filter),
    ("rules", checks::rules),
    ("config", checks::config),
    ("control", checks::control),
    ("query", checks::query),
    ("ids", checks::ids),
    ("chat", checks::chat),
    ("messages", checks::messages),
    ("responses", checks::responses),
    ("engine", checks::engine),
    ("lineage", checks::lineage),
    ("import", checks::import),
];

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

/// The seeds of a target, in the order of their names.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = folder().join("seeds").join(target);
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = files.map(|file| file.expect("the folder can be read").path()).collect();
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a seed can be read")).collect()
}

/// Makes one to four small changes: flips a bit, inserts a sequence, or removes, doubles or copies a range from another
/// seed.
fn mutate(random: &mut StdRng, seed: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..random.random_range(1..=4) {
        let at = random.random_range(0..=bytes.len());
        let end = (at + random.random_range(0..16)).min(bytes.len());
        match random.random_range(0..5) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
            1 => drop(bytes.splice(at..at, PIECES[random.random_range(0..PIECES.len())].iter().copied())),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let stretch = bytes[at..end].repeat(random.random_range(1..8));
                drop(bytes.splice(at..at, stretch));
            }
            _ => {
                let from = random.random_range(0..=other.len());
                let to = (from + 16).min(other.len());
                drop(bytes.splice(at..end, other[from..to].iter().copied()));
            }
        }
    }
    bytes
}

#[test]
fn every_parser_withstands_its_seeds_and_their_mutations() {
    for (target, check) in TARGETS {
        let seeds = seeds(target);
        assert!(seeds.len() >= 3, "{target} has {} seeds", seeds.len());
        // The seed is fixed, so that a failure is the same on every machine. Finding new failures is the task of `make
        // fuzz`.
        let mut random = StdRng::seed_from_u64(0x0000_0f04_eba7);
        for (index, seed) in seeds.iter().enumerate() {
            check(seed);
            for _ in 0..MUTATIONS {
                let other = &seeds[random.random_range(0..seeds.len())];
                let bytes = mutate(&mut random, seed, other);
                let withstood = std::panic::catch_unwind(|| check(&bytes)).is_ok();
                let shown = String::from_utf8_lossy(&bytes);
                assert!(withstood, "{target}: a mutation of seed {index} fails: {shown:?}");
            }
        }
    }
}

#[test]
fn every_target_is_built_seeded_and_replayed() {
    let manifest: toml::Table =
        fs::read_to_string(folder().join("Cargo.toml")).expect("it is there").parse().expect("it is TOML");
    let built = manifest["bin"].as_array().expect("targets are binaries").iter();
    let mut built: Vec<&str> = built.map(|target| target["name"].as_str().expect("a name is text")).collect();
    let mut replayed: Vec<&str> = TARGETS.iter().map(|(target, _)| *target).collect();
    built.sort_unstable();
    replayed.sort_unstable();
    assert_eq!(built, replayed);
}
