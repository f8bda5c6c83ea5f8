//! How far an answer has got that reaches the agent while the engine samples it.
//!
//! It outlives the requests to the engine: the next one goes on behind it. How pieces are made is in `streaming`.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::value::RawValue;

use super::{answer::EngineAnswer, sampled::Sampled};
use crate::{
    completion::{Piece, ToolCall},
    dialect::{ClientTool, ClientTools},
};

/// Takes the pieces of one answer. It outlives the requests to the engine.
pub struct Streaming {
    tools: Arc<ClientTools>,
    pub(super) send: Box<dyn Fn(Piece) + Send + Sync>,
    progress: Mutex<Progress>,
}

/// How far an answer has got.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) sampled: Sampled,
    pub(super) pieces: Pieces,
    /// The end of the answer, which may still have to be parsed.
    pub(super) ended: Option<Ended>,
}

/// The engine's last part of an answer; none if the answer reached the bound of tokens in another way.
pub(super) struct Ended(pub(super) Option<EngineAnswer>);

/// What was made of the ids so far.
#[derive(Default)]
pub(super) struct Pieces {
    /// How many ids were parsed.
    pub(super) parsed: usize,
    /// What vLLM must be told to go on.
    pub(super) state: Option<Box<RawValue>>,
    pub(super) message: Spoken,
    /// How much of the thought and of the text was sent, in bytes.
    pub(super) reasoning: usize,
    pub(super) text: usize,
    /// The same of the arguments of the first call, if it has begun.
    pub(super) arguments: Option<usize>,
    /// The engine could not parse the ids.
    pub(super) failed: bool,
}

/// A message of which a part is known.
#[derive(Debug, Default)]
pub(super) struct Spoken {
    pub(super) reasoning: String,
    pub(super) content: String,
    pub(super) calls: Vec<ToolCall>,
}

impl Streaming {
    /// Sends pieces by this function. Each continues those of its kind. Calls of these tools have shapes of the client, most
    /// of which have no pieces.
    pub fn new(tools: Arc<ClientTools>, send: impl Fn(Piece) + Send + Sync + 'static) -> Self {
        Self { tools, send: Box::new(send), progress: Mutex::default() }
    }

    /// Whether calls of a function can be written in pieces.
    pub(super) fn has_pieces(&self, function: &str) -> bool {
        self.tools.get(function).is_none_or(|tool| matches!(tool, ClientTool::Function { .. }))
    }

    pub(super) fn take(&self) -> Progress {
        std::mem::take(&mut *self.progress.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps what the next request goes on from.
    pub(super) fn put(&self, progress: Progress) {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    }
}

impl Pieces {
    /// Whether anything was sent.
    pub(super) fn is_sent(&self) -> bool {
        self.reasoning + self.text > 0 || self.arguments.is_some()
    }

    /// How many ids were sent in some form.
    pub(super) fn parsed(&self) -> usize {
        self.parsed
    }
}
