//! Event files for `TensorBoard`.
//!
//! A file is a sequence of records in TensorFlow's `tfrecord` format. A record consists of the length of its data
//! (u64), the masked CRC-32C of the length, the data, and the masked CRC-32C of the data; all numbers are
//! little-endian. The data are a protocol buffer `Event`. These fields of it are used: `wall_time` (1), `step` (2),
//! `file_version` (3), `summary` (5) with a `tag` (1) and a `simple_value` (2) per number, and `session_log` (7). The
//! session log makes `TensorBoard` discard the steps that a killed trainer wrote and the resumed trainer computes
//! again.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crc::{CRC_32_ISCSI, Crc};

use super::protobuf::{bytes_field, double_field, float_field, int_field};

const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// Added to a rotated CRC (TensorFlow's `crc32c::Mask`), because a CRC over data that contain their own CRC detects
/// fewer errors.
const MASK_DELTA: u32 = 0xa282_ead8;

/// `SessionLog.START`.
const SESSION_START: u64 = 1;

/// An open event file.
#[derive(Debug)]
pub(super) struct EventFile {
    file: File,
}

impl EventFile {
    /// Creates a new file in `folder`. It covers the steps above `done`.
    pub(super) fn create(folder: &Path, done: i64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let now = now();
        let name = format!("events.out.tfevents.{}.{}.forebay", now.as_secs(), now.subsec_nanos());
        let mut events = Self { file: File::create_new(folder.join(name))? };
        let mut version = event(now, 0);
        bytes_field(&mut version, 3, b"brain.Event:2");
        events.append(&version)?;
        let mut session = Vec::new();
        int_field(&mut session, 1, SESSION_START);
        let mut start = event(now, done + 1);
        bytes_field(&mut start, 7, &session);
        events.append(&start)?;
        Ok(events)
    }

    /// Appends the numbers of a step, each under its tag.
    pub(super) fn step(&mut self, step: i64, numbers: &[(&str, f64)]) -> io::Result<()> {
        let mut summary = Vec::new();
        for (tag, number) in numbers {
            let mut value = Vec::new();
            bytes_field(&mut value, 1, tag.as_bytes());
            float_field(&mut value, 2, *number as f32);
            bytes_field(&mut summary, 1, &value);
        }
        let mut event = event(now(), step);
        bytes_field(&mut event, 5, &summary);
        self.append(&event)
    }

    fn append(&mut self, event: &[u8]) -> io::Result<()> {
        let length = (event.len() as u64).to_le_bytes();
        let record = [&length, &masked_crc(&length)[..], event, &masked_crc(event)[..]].concat();
        self.file.write_all(&record)
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn event(now: Duration, step: i64) -> Vec<u8> {
    let mut event = Vec::new();
    double_field(&mut event, 1, now.as_secs_f64());
    int_field(&mut event, 2, step.max(0) as u64);
    event
}

fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    CRC.checksum(bytes).rotate_right(15).wrapping_add(MASK_DELTA).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the data of a file's records, and checks their checksums.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_at(8);
            let count = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
            assert_eq!(rest[..4], masked_crc(length));
            let (event, rest) = rest[4..].split_at(count);
            assert_eq!(rest[..4], masked_crc(event));
            found.push(event.to_vec());
            bytes = &rest[4..];
        }
        found
    }

    #[test]
    fn checksums_are_masked_crc_32c() {
        // The check value of CRC-32C, and TensorFlow's mask of it.
        assert_eq!(CRC.checksum(b"123456789"), 0xe306_9283);
        assert_eq!(masked_crc(b"123456789"), 0xe306_9283_u32.rotate_right(15).wrapping_add(MASK_DELTA).to_le_bytes());
    }

    #[test]
    fn a_step_is_a_summary_of_tagged_numbers() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut events = EventFile::create(folder.path(), 6).expect("it can be written");
        events.step(300, &[("loss", -0.5)]).expect("it can be written");
        let path = fs::read_dir(folder.path()).expect("listed").next().expect("one file").expect("an entry").path();
        let [version, start, step] = &records(&fs::read(path).expect("it is there"))[..] else {
            panic!("three records")
        };
        // The first nine bytes are the wall time.
        assert_eq!(version[9..], *b"\x10\x00\x1a\x0dbrain.Event:2");
        assert_eq!(start[9..], *b"\x10\x07\x3a\x02\x08\x01");
        let expected = [&b"\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15"[..], &(-0.5_f32).to_le_bytes()].concat();
        assert_eq!(step[9..], expected);
    }
}
