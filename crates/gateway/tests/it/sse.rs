//! A small reader of server-sent events, written as clients write it: it is fed bytes in any pieces.

use forebay_gateway::{Dialect, dialect::SseEvent};
use serde_json::Value;

use crate::support::{completion, events, full_message};

/// An event as a client sees it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) event: Option<String>,
    pub(crate) data: String,
}

impl Seen {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|error| panic!("data is JSON, but: {error}: {}", self.data))
    }
}

/// Collects bytes until an event is whole.
#[derive(Default)]
pub(crate) struct Reader {
    bytes: Vec<u8>,
    event: Option<String>,
    data: Vec<String>,
    seen: Vec<Seen>,
}

impl Reader {
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte != b'\n' {
                self.bytes.push(byte);
                continue;
            }
            let line = String::from_utf8(std::mem::take(&mut self.bytes)).expect("a whole line is UTF-8");
            match line.split_once(": ") {
                None if line.is_empty() => self.dispatch(),
                Some(("event", name)) => self.event = Some(name.to_owned()),
                Some(("data", text)) => self.data.push(text.to_owned()),
                Some(("", _comment)) => {}
                _ => panic!("an unknown line: {line}"),
            }
        }
    }

    fn dispatch(&mut self) {
        let event = self.event.take();
        let data = std::mem::take(&mut self.data).join("\n");
        if !data.is_empty() {
            self.seen.push(Seen { event, data });
        }
    }
}

/// Reads what was written, byte by byte.
pub(crate) fn read(text: &str) -> Vec<Seen> {
    let mut reader = Reader::default();
    for byte in text.as_bytes() {
        reader.feed(std::slice::from_ref(byte));
    }
    assert!(reader.bytes.is_empty() && reader.data.is_empty(), "the stream ends with a whole event");
    reader.seen
}

/// Reads events.
pub(crate) fn read_events(events: &[SseEvent]) -> Vec<Seen> {
    read(&events.iter().map(SseEvent::encode).collect::<String>())
}

#[test]
fn characters_of_several_bytes_survive_any_split() {
    let events = events(Dialect::Chat, &completion(full_message()));
    let whole: String = events.iter().map(SseEvent::encode).collect();
    let expected = read(&whole);
    for size in [2, 3, 5, 7, 4096] {
        let mut reader = Reader::default();
        whole.as_bytes().chunks(size).for_each(|piece| reader.feed(piece));
        assert_eq!(reader.seen, expected, "pieces of {size} bytes");
    }
}

#[test]
fn data_with_line_breaks_stays_one_event() {
    let event = SseEvent { event: Some("x"), data: "{\n\"a\": 1\n}".to_owned() };
    let seen = read(&event.encode());
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].json()["a"], 1);
}
