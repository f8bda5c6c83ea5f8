//! What differs between the services that can be loaded: how groups are written down, and how a trainer gets them back.
//!
//! One file per protocol, of the same shape: what has to be said first, the bodies, one round of a trainer.

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

/// How long a trainer waits before it asks again, where it cannot wait for an answer.
const POLL_PAUSE: Duration = Duration::from_millis(50);

/// Which service is loaded.
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
    /// Where such a service usually listens.
    pub(crate) fn usual_url(self) -> &'static str {
        match self {
            Self::Forebay => "http://127.0.0.1:8080",
            Self::Slime => "http://127.0.0.1:8889",
            Self::Atropos => "http://127.0.0.1:8000",
        }
    }
}

/// How trajectories and samples are written down in our own protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    /// JSON bundles, samples as NDJSON
    Json,
    /// Arrow IPC streams both ways
    Arrow,
}

/// A way to load a service.
#[async_trait]
pub(crate) trait Protocol: Send + Sync {
    /// Says what the service has to hear before the load. Also shows that it is there.
    async fn prepare(&mut self) -> anyhow::Result<()>;

    /// Path that bodies are posted to.
    fn path(&self) -> &'static str;

    /// Content type of bodies.
    fn media(&self) -> &'static str {
        "application/json"
    }

    /// A group as bodies, in the order in which they are posted; always the same number.
    fn templates(&self, group: &Group, per_body: PerBody) -> Vec<Template>;

    /// Whether an answer of success says that the body was taken.
    fn is_taken(&self, _answer: &[u8]) -> bool {
        true
    }

    /// One round of a trainer: the next batch, to its last byte; `None` when there was none for a while.
    async fn take(&self) -> anyhow::Result<Option<Taken>>;
}

/// What a trainer got in one round. What a protocol does not tell is 0.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) groups: u64,
    pub(crate) rollouts: u64,
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
    /// Until the batch was claimed, the wait for it included; `None` where reading claims.
    pub(crate) lease: Option<Duration>,
    /// From the request for samples to their last byte.
    pub(crate) samples: Duration,
    /// `None` where nothing is acknowledged.
    pub(crate) ack: Option<Duration>,
}

/// One body per rollout.
fn one_each(group: &Group, write: impl Fn(&mut Template, usize, &Rollout)) -> Vec<Template> {
    let template = |(index, rollout)| {
        let mut template = Template::new();
        write(&mut template, index, rollout);
        template.count(rollout);
        template
    };
    group.rollouts.iter().enumerate().map(template).collect()
}

/// Appends `"key": [...]` as Python's `json` writes it: a space after each comma, floats with all their digits.
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
