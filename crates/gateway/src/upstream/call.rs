//! One call of an agent as an engine is asked to answer it, and what comes of it. Both modes take and return the same.

use std::{pin::Pin, time::Duration};

use super::progress::Streaming;
use crate::{completion::Completion, request::Request};

/// The sampling of a session. It replaces the agent's in calls that are recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it.
    pub temperature: f64,
    /// 1 for the whole vocabulary.
    pub top_p: f64,
    /// -1 for the whole vocabulary.
    pub top_k: i64,
}

impl Default for Sampling {
    /// The distribution of the model itself.
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: -1 }
    }
}

/// One call of an agent, as an engine is asked to answer it.
#[derive(Clone, Copy)]
pub struct EngineCall<'a> {
    /// What the agent sent.
    pub request: &'a Request,
    /// The model's name at the engine.
    pub model: &'a str,
    /// The session's sampling.
    pub sampling: Sampling,
    /// How many tokens may be sampled at most, at least one, whatever the request says. `None` if only the engine's context
    /// bounds them.
    pub max_tokens: Option<u32>,
    /// The ids of the prompt in the mode `exact`. If absent, the engine renders the messages.
    pub exact: Option<ExactPrompt<'a>>,
    /// Where the answer goes while it is sampled, as far as the engine allows.
    pub streaming: Option<&'a Streaming>,
    /// The session. Its calls go to the same worker, which has the prompt in its cache.
    pub session: &'a str,
    /// A unique id of the call, by which `SGLang` can abort it.
    pub rid: &'a str,
    /// The policy's published version. It is read when a generation begins, also after an abort, and stands for what the
    /// engine does not say.
    pub version: &'a dyn PublishedVersion,
}

/// A prompt that the gateway rendered.
#[derive(Clone, Copy)]
pub struct ExactPrompt<'a> {
    /// Its ids, at least one.
    pub ids: &'a [i32],
    /// The ids that end an answer, besides those that the engine knows.
    pub stop_ids: &'a [i32],
    /// The text of ids without special tokens. It is needed only to parse an answer of SGLang that was continued.
    pub text: &'a (dyn Fn(&[i32]) -> String + Sync),
}

/// Reads the published version of a policy.
pub trait PublishedVersion: Sync {
    /// The version now.
    fn read(&self) -> Pin<Box<dyn Future<Output = i64> + Send + '_>>;
}

impl<F: Fn() -> i64 + Sync> PublishedVersion for F {
    fn read(&self) -> Pin<Box<dyn Future<Output = i64> + Send + '_>> {
        Box::pin(std::future::ready(self()))
    }
}

/// What an engine answered, and what it took.
#[derive(Clone, Debug)]
pub struct Answered {
    /// The checked answer.
    pub completion: Completion,
    /// How often the engine aborted the call, so that it was repeated and a partial answer was discarded, or continued
    /// in the mode `exact`.
    pub aborts: u32,
    /// How often the call was sent again because a connection broke before the first byte of the answer.
    pub reconnects: u32,
    /// How long it took to have the answer parsed after it was sampled, by requests of their own.
    pub parsing: Duration,
}
