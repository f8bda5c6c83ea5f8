//! Session traces: one file per rollout in the format that the Hugging Face Hub calls STS and shows in its viewer.

use std::{
    fs::create_dir_all,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use forebay_wire::{ExportedRollout, Verdict};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::{
    ExportError, Writer, Written,
    conversation::{self, Conversation, Message, Unreadable},
};

/// Files of one folder. The Hub accepts no more than 10,000.
const FOLDER_FILES: u64 = 5_000;

/// Characters of ids that stay as they are in names of files.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// Bytes of an id in the name of a file.
const NAME_BYTES_MAX: usize = 160;

/// Writes a file for each rollout that has messages.
pub struct Traces {
    folder: PathBuf,
    harness: String,
    bytes: Arc<AtomicU64>,
    written: u64,
    without_messages: u64,
    unreadable: Unreadable,
}

impl Traces {
    /// Writes below an existing folder, and counts the bytes. The harness is the name of the agent's program.
    #[must_use]
    pub fn new(folder: PathBuf, harness: String, bytes: Arc<AtomicU64>) -> Self {
        Self { folder, harness, bytes, written: 0, without_messages: 0, unreadable: Unreadable::default() }
    }

    /// The path of the next file. It begins with a number, so that two ids never have the same name.
    fn path(&self, rollout_id: &str) -> PathBuf {
        let folder = format!("{:05}", self.written / FOLDER_FILES);
        let mut name = utf8_percent_encode(rollout_id, PLAIN).to_string();
        name.truncate(NAME_BYTES_MAX);
        self.folder.join(folder).join(format!("{:07}-{name}.jsonl", self.written))
    }
}

/// The first line of a trace.
#[derive(Serialize)]
struct Header<'a> {
    r#type: &'static str,
    harness: &'a str,
    id: String,
    name: String,
    policy: &'a str,
    group_id: &'a str,
    rollout_id: &'a str,
    environment: Option<&'a str>,
    reward: Option<f64>,
    advantage: Option<f64>,
    verdict: Verdict,
    policy_version: i64,
    step: Option<i64>,
    metadata: Option<&'a RawValue>,
}

/// A further line of a trace.
#[derive(Serialize)]
struct Line {
    r#type: &'static str,
    message: Trace,
}

/// A message with the names of the format.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    role: String,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "conversation::as_json")]
    tool_calls: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl Writer for Traces {
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError> {
        for rollout in rollouts {
            let Some(posted) = rollout.trajectory.messages.as_deref() else {
                self.without_messages += 1;
                continue;
            };
            let rollout_id = rollout.trajectory.rollout_id.as_deref().unwrap_or_default();
            let conversation = Conversation::read(posted.get());
            let row = (!conversation.is_lost()).then_some(self.written);
            self.unreadable.add(row, rollout_id, &conversation);
            if row.is_none() {
                continue;
            }
            let path = self.path(rollout_id);
            if self.written.is_multiple_of(FOLDER_FILES) {
                create_dir_all(path.parent().unwrap_or(&self.folder))?;
            }
            let mut text = serde_json::to_vec(&header(&self.harness, rollout))?;
            for message in conversation.messages {
                text.push(b'\n');
                serde_json::to_writer(&mut text, &Line { r#type: "message", message: message.into() })?;
            }
            text.push(b'\n');
            std::fs::write(path, &text)?;
            self.bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
            self.written += 1;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Written, ExportError> {
        let left_out = vec![(self.without_messages, "rollouts without messages")];
        Ok(Written { rows: self.written, left_out, unreadable: self.unreadable })
    }
}

fn header<'a>(harness: &'a str, rollout: &'a ExportedRollout) -> Header<'a> {
    let ExportedRollout { trajectory, result } = rollout;
    let policy = trajectory.policy.as_deref().unwrap_or_default();
    let rollout_id = trajectory.rollout_id.as_deref().unwrap_or_default();
    let reward = trajectory.reward.map_or_else(String::new, |reward| format!(" (reward {reward})"));
    Header {
        r#type: "session",
        harness,
        id: format!("{policy}/{}/{rollout_id}", result.run),
        name: format!("{rollout_id}{reward}"),
        policy,
        group_id: trajectory.group_id.as_deref().unwrap_or_default(),
        rollout_id,
        environment: trajectory.environment.as_deref(),
        reward: trajectory.reward,
        advantage: result.advantage,
        verdict: result.verdict,
        policy_version: result.policy_version,
        step: result.step,
        metadata: trajectory.metadata.as_deref(),
    }
}

impl From<Message> for Trace {
    fn from(message: Message) -> Self {
        let Message { role, content, tool_calls, tool_call_id, name, reasoning_content } = message;
        Self { role, content, reasoning_content, tool_calls, tool_call_id, name }
    }
}
