//! What the formats make of the hand-made files. It is a part of the content of rollouts: if it changed, a repeated import
//! would be a conflict. So a file in `formats/golden` changes only together with its source.

use std::{fs, path::PathBuf};

use serde_json::Value;

use crate::{Importer, Options, format};

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The trajectories of a file, as they are posted.
fn trajectories(name: &str) -> Vec<Value> {
    let of_format = name.split(['-', '.']).next().filter(|name| *name != "nemo").unwrap_or("nemo-gym");
    let format = format(of_format).expect("a file has the name of its format");
    let source = fs::read(folder("../../tests/it/imports").join(name)).expect("the file is there");
    let mut importer = Importer::new(format, &Options::default(), &source[..]);
    let mut found = Vec::new();
    while let Some(record) = importer.next_record().expect("a slice can be read") {
        let read = record.outcome.unwrap_or_else(|violations| panic!("{name}: {violations:?}"));
        let values = read.trajectories.iter().map(|one| serde_json::to_value(one).expect("it is JSON"));
        found.extend(values);
    }
    found
}

#[test]
fn documents_become_the_same_trajectories_in_every_version() {
    let versions = (0..=8).map(|minor| format!("atif-1.{minor}.json"));
    let others = ["chat.jsonl", "nemo-gym.jsonl", "verifiers.jsonl"].map(str::to_owned);
    for name in versions.chain(others) {
        let golden = folder("golden").join(&name).with_extension("jsonl");
        let expected = fs::read_to_string(&golden).unwrap_or_default();
        let expected: Vec<Value> = expected.lines().map(|line| line.parse().expect("a line is JSON")).collect();
        let found = trajectories(&name);
        assert!(!found.is_empty());
        if found != expected {
            let lines: Vec<String> = found.iter().map(Value::to_string).collect();
            panic!("{name} becomes something else than {}:\n{}\n", golden.display(), lines.join("\n"));
        }
    }
}
