//! A run in the offline format of Weights & Biases, which `wandb sync` uploads.
//!
//! A file is a log in the format of `LevelDB`: a header, and then blocks of 32 KiB with records. A record consists of
//! the CRC-32 (IEEE) of its type and data, the length of the data (u16), the type (u8: 1 whole, 2 first, 3 middle, 4
//! last part) and the data; all numbers are little-endian. The data are a protocol buffer `Record`
//! (`wandb_internal.proto`): here a run, its history and summary by step, and its end.
//!
//! This is separate from event files, because a run has one file even if the trainer is started several times. Each
//! start writes the file again, beginning with the steps in `metrics.jsonl`. They do not include the steps that a
//! killed trainer computed and the resumed trainer computes again.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use crc::{CRC_32_ISO_HDLC, Crc};
use jiff::Timestamp;
use rand::RngExt as _;
use serde_json::Value;

use super::protobuf::{bytes_field, int_field};

const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);

/// `:W&B`, a magic number and the version of the format.
const HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];

const BLOCK_BYTES: usize = 32_768;

/// Checksum, length and type of a record.
const RECORD_HEADER_BYTES: usize = 7;

/// Beginning of the name of a run's folder.
const FOLDER: &str = "offline-run-";

/// Number of characters of a run's id, as in ids that Weights & Biases generates.
const ID_CHARS: usize = 8;

/// Properties of a run that are known before its first step.
#[derive(Clone, Debug)]
pub struct RunDescription {
    /// Project to which the run belongs.
    pub project: String,
    /// Name that is displayed.
    pub name: String,
    /// The configuration: a JSON object.
    pub config: Value,
}

/// The open file of a run.
#[derive(Debug)]
pub(super) struct RunFile {
    file: File,
    /// Number of bytes written.
    length: usize,
    /// Number of records written.
    records: u64,
}

impl RunFile {
    /// Opens the run below `folder`, or creates one if there is none, and writes its file with the steps `done`.
    pub(super) fn create(folder: &Path, description: &RunDescription, done: &[Value]) -> io::Result<Self> {
        let now = Timestamp::now();
        let folder = match find(folder)? {
            Some(found) => found,
            None => folder.join(format!("{FOLDER}{}-{}", now.strftime("%Y%m%d_%H%M%S"), new_id())),
        };
        // `wandb sync` writes the summary there.
        fs::create_dir_all(folder.join("files"))?;
        let name = folder.to_string_lossy();
        let id = name.rsplit('-').next().unwrap_or_default();
        let path = folder.join(format!("run-{id}.wandb"));
        // `wandb sync` skips a run that this file marks as uploaded, and the run is about to change.
        match fs::remove_file(path.with_extension("wandb.synced")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = File::create(path)?;
        file.write_all(&HEADER)?;
        let mut run = Self { file, length: HEADER.len(), records: 0 };
        run.append(17, &run_record(id, description, now))?;
        for report in done {
            run.step(report)?;
        }
        Ok(run)
    }

    /// Appends the numbers of a step.
    pub(super) fn step(&mut self, report: &Value) -> io::Result<()> {
        let mut items: Vec<(&str, String)> = vec![("_step", report["step"].to_string())];
        items.extend(super::numbers(report).map(|(name, value)| (name, value.to_string())));
        let items: Vec<Vec<u8>> = items.iter().map(|(name, json)| item(name, json)).collect();
        let (mut history, mut summary, mut step) = (Vec::new(), Vec::new(), Vec::new());
        for item in &items {
            bytes_field(&mut history, 1, item);
            bytes_field(&mut summary, 1, item);
        }
        int_field(&mut step, 1, report["step"].as_u64().unwrap_or(0));
        bytes_field(&mut history, 2, &step);
        self.append(2, &history)?;
        self.append(3, &summary)
    }

    /// Marks the run as successful. Weights & Biases shows a run without this record as failed.
    pub(super) fn end(&mut self) -> io::Result<()> {
        let mut exit = Vec::new();
        int_field(&mut exit, 1, 0);
        self.append(18, &exit)
    }

    /// Appends a `Record` whose field `field` is `message`.
    fn append(&mut self, field: u64, message: &[u8]) -> io::Result<()> {
        self.records += 1;
        let mut record = Vec::new();
        int_field(&mut record, 1, self.records);
        bytes_field(&mut record, field, message);
        let framed = frame(self.length, &record);
        self.length += framed.len();
        self.file.write_all(&framed)
    }
}

/// Returns the folder of the newest run, if there is one. Names of folders contain the date.
fn find(folder: &Path) -> io::Result<Option<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(FOLDER) {
            found.push(entry.path());
        }
    }
    Ok(found.into_iter().max())
}

fn new_id() -> String {
    let mut random = rand::rng();
    let letter = |index: u32| char::from_digit(index, 36).expect("the index is below 36");
    (0..ID_CHARS).map(|_| letter(random.random_range(0..36))).collect()
}

fn run_record(id: &str, description: &RunDescription, now: Timestamp) -> Vec<u8> {
    let (mut run, mut config, mut started) = (Vec::new(), Vec::new(), Vec::new());
    for (key, value) in description.config.as_object().into_iter().flatten() {
        bytes_field(&mut config, 1, &item(key, &value.to_string()));
    }
    int_field(&mut started, 1, now.as_second().max(0) as u64);
    bytes_field(&mut run, 1, id.as_bytes());
    bytes_field(&mut run, 3, description.project.as_bytes());
    bytes_field(&mut run, 4, &config);
    bytes_field(&mut run, 8, description.name.as_bytes());
    bytes_field(&mut run, 17, &started);
    run
}

/// Encodes an item of a history, a summary or a configuration: a key, and its value as JSON.
fn item(key: &str, json: &str) -> Vec<u8> {
    let mut item = Vec::new();
    bytes_field(&mut item, 1, key.as_bytes());
    bytes_field(&mut item, 16, json.as_bytes());
    item
}

/// Encodes a record that begins at `offset` of the file. The record has one part in each block that it touches. If a
/// block has no space for a header, its end is filled with zeros.
fn frame(offset: usize, mut data: &[u8]) -> Vec<u8> {
    let mut framed = Vec::new();
    let mut is_first = true;
    loop {
        let room = BLOCK_BYTES - (offset + framed.len()) % BLOCK_BYTES;
        if room < RECORD_HEADER_BYTES {
            framed.resize(framed.len() + room, 0);
            continue;
        }
        let (part, rest) = data.split_at(data.len().min(room - RECORD_HEADER_BYTES));
        let kind = match (is_first, rest.is_empty()) {
            (true, true) => 1_u8,
            (true, false) => 2,
            (false, false) => 3,
            (false, true) => 4,
        };
        let mut digest = CRC.digest();
        digest.update(&[kind]);
        digest.update(part);
        framed.extend(digest.finalize().to_le_bytes());
        framed.extend((part.len() as u16).to_le_bytes());
        framed.push(kind);
        framed.extend(part);
        if rest.is_empty() {
            return framed;
        }
        (data, is_first) = (rest, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_cut_at_the_ends_of_blocks() {
        let small = frame(7, b"ab");
        let mut digest = CRC.digest();
        digest.update(b"\x01ab");
        assert_eq!(small, [&digest.finalize().to_le_bytes()[..], b"\x02\x00\x01ab"].concat());

        let large = frame(BLOCK_BYTES - 10, &vec![9; BLOCK_BYTES]);
        let kinds = [large[6], large[10 + 6], large[10 + BLOCK_BYTES + 6]];
        assert_eq!(kinds, [2, 3, 4], "three bytes fit into the first block, and four are left after the second");
        assert_eq!(large.len(), BLOCK_BYTES + 3 * RECORD_HEADER_BYTES);

        let padded = frame(BLOCK_BYTES - 6, b"ab");
        assert_eq!(padded[..6], [0; 6], "no header fits into six bytes");
        assert_eq!(padded[6..], small);
    }
}
