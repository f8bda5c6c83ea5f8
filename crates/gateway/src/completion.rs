//! A complete answer of an engine, with what a trainer needs of it.
//!
//! An engine's answer becomes a [`Completion`] only after it was checked (`upstream::check`), so whoever has one may
//! rely on the lengths.

use serde::{Deserialize, Serialize};

/// One recorded call: what was sampled, behind which ids, and what the agent is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// The exact ids that the engine sampled behind.
    pub prompt_tokens: Vec<i32>,
    /// The sampled ids. It may be empty if the engine sampled nothing.
    pub tokens: Vec<i32>,
    /// The log-probability of each sampled id under the policy: log-softmax of logits divided by the temperature.
    pub logprobs: Vec<f32>,
    /// Which weight version sampled which ids. The spans tile `tokens`.
    pub spans: Vec<VersionSpan>,
    /// Whether the engine did not say the version of every id, so that some are the gateway's assumption.
    pub version_assumed: bool,
    /// Why the answer ended.
    pub finish: Finish,
    /// What ended the answer. `None` if it ended at its length, or because the model repeated itself.
    pub stop_matched: Option<StopMatch>,
    /// What the engine's parsers made of the ids.
    pub message: AssistantMessage,
    /// Counts for the agent.
    pub usage: Usage,
    /// What the engine calls its own configuration, if it says so.
    pub system_fingerprint: Option<String>,
}

impl Completion {
    /// Whether the last sampled id is the token that ended the answer.
    #[must_use]
    pub fn stopped_on_token(&self) -> bool {
        match self.stop_matched {
            Some(StopMatch::EndOfSequence) => !self.tokens.is_empty(),
            Some(StopMatch::Token(id)) => self.tokens.last() == Some(&id),
            Some(StopMatch::Text(_)) | None => false,
        }
    }

    /// How the answer ended, as agents see it. Engines answer `stop` for some answers with tool calls, after which
    /// some agents would not run the tools.
    pub(crate) fn outcome(&self) -> Finish {
        match self.finish {
            Finish::Stop if !self.message.tool_calls.is_empty() => Finish::ToolCalls,
            finish => finish,
        }
    }
}

/// A part of a message, while the engine samples the rest. The pieces of each kind are the beginning of its text, and come
/// in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Of its thought.
    Reasoning(String),
    /// Of its text.
    Text(String),
    /// The beginning of its first tool call.
    Call {
        /// The id that the tool's result refers to.
        id: String,
        /// The name of the tool.
        name: String,
    },
    /// Of the arguments of that call. The pieces are never a whole object, because some clients run a tool as soon as its
    /// arguments can be read.
    Arguments(String),
}

/// The ids `start..start + len` of a completion were sampled by `version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionSpan {
    /// The weight version.
    pub version: i64,
    /// The first sampled id of the span.
    pub start: u32,
    /// The number of ids, at least one.
    pub len: u32,
}

/// Why an answer ended. An engine's `abort` is never among them: such an answer is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended its turn, or sampled a stop text.
    Stop,
    /// The bound of tokens was reached.
    Length,
    /// The model ended its turn with tool calls.
    ToolCalls,
}

/// What ended an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopMatch {
    /// The model's own end token, which the engine does not name.
    EndOfSequence,
    /// This token.
    Token(i32),
    /// This text of the request's `stop`.
    Text(String),
}

/// An assistant's turn.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssistantMessage {
    /// The text.
    pub content: Option<String>,
    /// The reasoning before the text.
    pub reasoning: Option<String>,
    /// The tool calls after the text.
    pub tool_calls: Vec<ToolCall>,
}

/// One call of a tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The id that the tool's result refers to.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments as the model wrote them: usually the text of a JSON object, but a model may write anything.
    pub arguments: String,
}

/// Token counts of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Ids of the prompt.
    pub prompt_tokens: u64,
    /// Sampled ids.
    pub completion_tokens: u64,
    /// Ids of the prompt that the engine had in its cache, if it says so.
    pub cached_tokens: Option<u64>,
    /// Sampled ids that were reasoning, if the engine says so.
    pub reasoning_tokens: Option<u64>,
}
