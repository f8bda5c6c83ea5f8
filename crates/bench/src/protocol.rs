//! The differences between the services that can be loaded: how groups are written, and how a trainer gets batches.
//!
//! There is one file per protocol. All have the same parts: the calls before the load, the bodies, and one round of a
//! trainer.

mod arrow;
pub(crate) mod atropos;
pub(crate) mod forebay;
pub(crate) mod slime;

use std::{
    fmt::{Debug, Write as _},
    time::Duration,
};

use async_trait::async_trait;
use clap::ValueEnum;
use serde::Serialize;

use crate::{
    template::Template,
    workload::{Group, PerBody, Rollout},
};

/// Pause of a trainer before it asks again, for services without long polls.
const POLL_PAUSE: Duration = Duration::from_millis(50);

/// The protocol of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ProtocolName {
    /// Bundles to `/trajectories`; trainers lease, read and ack batches
    Forebay,
    /// Items to `/buffer/write`; trainers poll `/get_rollout_data`
    Slime,
    /// Groups to `/scored_data`; trainers poll `/batch`
    Atropos,
}

impl ProtocolName {
    /// The usual address of such a service.
    pub(crate) fn usual_url(self) -> &'static str {
        match self {
            Self::Forebay => "http://127.0.0.1:8080",
            Self::Slime => "http://127.0.0.1:8889",
            Self::Atropos => "http://127.0.0.1:8000",
        }
    }
}

/// Format of trajectories and samples in Forebay's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    /// JSON bundles, samples as NDJSON
    Json,
    /// Arrow IPC streams for both
    Arrow,
}

/// The protocol of a service that can be loaded.
#[async_trait]
pub(crate) trait Protocol: Send + Sync {
    /// Makes the calls that the service needs before the load. Fails if the service does not answer.
    async fn prepare(&mut self) -> anyhow::Result<()>;

    /// Path that bodies are posted to.
    fn path(&self) -> &'static str;

    /// Content type of bodies.
    fn media(&self) -> &'static str {
        "application/json"
    }

    /// Writes a group as bodies, in the order in which they are posted. Their number is the same for every group.
    fn templates(&self, group: &Group, per_body: PerBody) -> Vec<Template>;

    /// Whether an answer with status 2xx means that the body was accepted.
    fn is_taken(&self, _answer: &[u8]) -> bool {
        true
    }

    /// One round of a trainer: takes the next batch and reads it completely. Returns `None` if there was no batch for a
    /// while.
    async fn take(&self) -> anyhow::Result<Option<Taken>>;
}

/// The result of one round of a trainer. Numbers that a protocol does not report are 0.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) groups: u64,
    pub(crate) rollouts: u64,
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
    /// Time until the batch was claimed, including the wait for it; `None` if the protocol claims by reading.
    pub(crate) lease: Option<Duration>,
    /// Time from the request for samples to their last byte.
    pub(crate) samples: Duration,
    /// Time of the ack; `None` if the protocol has no acks.
    pub(crate) ack: Option<Duration>,
}

/// Writes one body per rollout.
fn one_each(group: &Group, write: impl Fn(&mut Template, usize, &Rollout)) -> Vec<Template> {
    let template = |(index, rollout)| {
        let mut template = Template::new();
        write(&mut template, index, rollout);
        template.count(rollout);
        template
    };
    group.rollouts.iter().enumerate().map(template).collect()
}

/// Appends `"key": [...]` as Python's `json` writes it: with a space after each comma, and floats with all digits.
fn list<T: Debug>(text: &mut String, key: &str, values: impl IntoIterator<Item = T>) {
    let _ = write!(text, "\"{key}\": ");
    array(text, values);
}

/// Appends `[...]` in the same way.
fn array<T: Debug>(text: &mut String, values: impl IntoIterator<Item = T>) {
    text.push('[');
    for (index, value) in values.into_iter().enumerate() {
        let comma = if index == 0 { "" } else { ", " };
        let _ = write!(text, "{comma}{value:?}");
    }
    text.push(']');
}

/// Appends `"messages": [...]`: a question and its answer.
fn messages(text: &mut String, question: &str, answer: &str) {
    let (question, answer) = (serde_json::json!(question), serde_json::json!(answer));
    let _ = write!(
        text,
        r#""messages": [{{"role": "user", "content": {question}}}, {{"role": "assistant", "content": {answer}}}]"#
    );
}
