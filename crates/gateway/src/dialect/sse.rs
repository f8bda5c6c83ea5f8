//! Server-sent events.

use std::fmt::Write as _;

use serde_json::Value;

/// One event of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SseEvent {
    /// The event's name, which chat completions do not have.
    pub event: Option<&'static str>,
    /// The data.
    pub data: String,
}

impl SseEvent {
    pub(super) fn unnamed(data: &Value) -> Self {
        Self { event: None, data: data.to_string() }
    }

    pub(super) fn named(event: &'static str, data: &Value) -> Self {
        Self { event: Some(event), ..Self::unnamed(data) }
    }

    /// The event as it is written to the connection.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::with_capacity(self.data.len() + 64);
        if let Some(event) = self.event {
            writeln!(text, "event: {event}").expect("a string accepts all text");
        }
        for line in self.data.split('\n') {
            writeln!(text, "data: {line}").expect("a string accepts all text");
        }
        text.push('\n');
        text
    }
}
