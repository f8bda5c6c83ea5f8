//! The client of inference engines. In the mode `observe` the engine renders the prompt and tells its ids. In the mode
//! `exact` the gateway sends ids.
//!
//! A `call` passes through the submodules in this order: `route` chooses the worker, `body` writes the engine's
//! request with what `allow` lets pass, `transport` sends it and takes the bytes of the answer from a budget,
//! `answer` reads what came back, with its lists in `columns`, and `check` makes a [`Completion`] of it or says which
//! [`Fault`] it has, for which `versions` maps the engine's labels to spans. `observe` repeats this if the engine
//! aborts the call. `exact` does the same for a call with ids, each of whose requests is an `exchange`, and continues
//! it behind what was `sampled`. In the meantime `streaming` sends the agent what was sampled so far, and notes in
//! `progress` what that was.
//!
//! [`probe`] makes such calls before any agent does, compares what `models` reads with the configuration, and has
//! `render` ask for prompts to compare. `score` has an engine report the log-probabilities of given ids, and
//! `rescore` those of ids that it has sampled. All of them use the connections of `client`.

mod allow;
mod answer;
mod body;
mod call;
mod check;
mod client;
mod columns;
mod error;
mod exact;
mod exchange;
mod fault;
mod kind;
mod models;
mod observe;
mod options;
pub mod probe;
mod progress;
mod render;
mod rescore;
mod route;
mod sampled;
mod score;
mod streaming;
mod transport;
mod versions;

pub use allow::check_pass;
pub use call::{Answered, EngineCall, ExactPrompt, PublishedVersion, Sampling};
pub use client::Upstream;
pub use error::UpstreamError;
pub use fault::Fault;
pub use kind::EngineKind;
pub use options::{Parsers, Secret, SpecialTokensInText, UpstreamOptions};
pub use progress::Streaming;
pub use rescore::Range;
pub use route::order;
pub use score::Scoring;

use bytes::Bytes;

use self::{answer::EngineAnswer, body::Wanted};
use crate::completion::Completion;

/// What would be recorded of an engine's answer, or what is wrong with it. [`Upstream::complete`] does the same with the
/// answers that it receives; tests of hostile answers need no engine. `version` is the version that the policy had when
/// the call began.
pub fn read_answer(body: &[u8], version: i64, options: &UpstreamOptions) -> Result<Completion, Fault> {
    check::completion(&EngineAnswer::read(body)?, "rid", version, options)
}

/// What an engine with these options is sent for a call that is recorded, if it renders the messages. Tests of hostile bodies need
/// no engine.
#[must_use]
pub fn engine_body(call: &EngineCall<'_>, options: &UpstreamOptions) -> Bytes {
    body::write(call, options, call.rid, Wanted::Recording)
}

impl Upstream {
    /// Has the engine answer a call, and checks the answer.
    ///
    /// If the engine aborts the call, as it does for some updates of the weights, the partial answer is discarded and
    /// the call is repeated. A call with ids is continued behind its partial answer if the whole answer can be parsed
    /// afterwards: always by vLLM, and by SGLang if [`UpstreamOptions::parsers`] are named. Dropping the future cancels
    /// the call at the engine.
    pub async fn complete(&self, call: &EngineCall<'_>) -> Result<Answered, UpstreamError> {
        self.withheld.tell(&self.options, call.request);
        let workers = route::order(call.session, &self.options.urls);
        match &call.exact {
            None => self.complete_at(call, &workers).await,
            Some(prompt) => exact::complete(self, call, prompt, &workers).await,
        }
    }

    /// Has the engine answer a call that is not recorded, with the agent's own sampling. The completion has no ids, so
    /// any engine with chat completions can answer.
    pub async fn forward(&self, call: &EngineCall<'_>) -> Result<Completion, UpstreamError> {
        self.withheld.tell(&self.options, call.request);
        let workers = route::order(call.session, &self.options.urls);
        let answer = self.answer(call, call.rid, Wanted::Nothing, &workers, &mut 0).await?;
        if answer.is_aborted() {
            return Err(UpstreamError::Aborted { times: 1 });
        }
        check::unrecorded(&answer, call.rid).map_err(|fault| UpstreamError::untrusted(fault, self.options.kind))
    }
}
