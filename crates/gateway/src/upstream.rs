//! The client of inference engines. In the mode `observe` the engine renders the prompt and tells its ids. In the mode
//! `exact` the gateway sends ids.
//!
//! A call passes through the submodules in this order: `route` chooses the worker, `body` writes the engine's request
//! with what `allow` lets pass, `transport` sends it and takes the bytes of the answer from a budget, `answer` reads what
//! came back, with its lists in `columns`, and `check` makes a [`Completion`] of it or says what is wrong with it, for which
//! `versions` maps the engine's labels to spans. `exact` does the same for a call with ids, and continues it if the engine
//! aborts it, while `streaming` sends the agent what was sampled so far. [`probe`] makes such calls before any agent does, compares what `models` reads with the configuration, and
//! has `render` ask for prompts to compare. `score` has an engine report the log-probabilities of given ids, and `rescore`
//! those of ids that it has sampled.

mod allow;
mod answer;
mod body;
mod check;
mod columns;
mod error;
mod exact;
mod models;
mod options;
pub mod probe;
mod render;
mod rescore;
mod route;
mod score;
mod streaming;
mod transport;
mod versions;

pub use allow::check_pass;
pub use check::Fault;
pub use error::UpstreamError;
pub use exact::ExactPrompt;
pub use options::{EngineKind, Parsers, Secret, SpecialTokensInText, UpstreamOptions};
pub use rescore::Range;
pub use route::order;
pub use score::Scoring;
pub use streaming::Streaming;

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;

use forebay_bounds::work;

use self::{
    allow::Withheld,
    answer::EngineAnswer,
    body::Wanted,
    exact::Way,
    transport::{Post, Room, Transport},
};
use crate::{completion::Completion, request::Request};

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

/// The chat endpoint of all engines.
const CHAT: &str = "/v1/chat/completions";

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

/// An engine with one or more workers.
#[derive(Clone, Debug)]
pub struct Upstream {
    options: UpstreamOptions,
    transport: Transport,
    /// Whether the last probe found that SGLang's chat endpoint takes no ids, but `/generate` does.
    generates: Arc<AtomicBool>,
    /// Whether the last probe found that vLLM parses nothing, so that the gateway can decode its answers.
    speaks_plainly: Arc<AtomicBool>,
    /// Whether the last probe found that vLLM's endpoint of ids answers with events.
    sends_events: Arc<AtomicBool>,
    withheld: Arc<Withheld>,
}

impl Upstream {
    /// Creates a client. It does not connect yet.
    pub fn new(options: UpstreamOptions) -> Result<Self, UpstreamError> {
        let transport = Transport::new(&options)?;
        Ok(Self {
            options,
            transport,
            generates: Arc::default(),
            speaks_plainly: Arc::default(),
            sends_events: Arc::default(),
            withheld: Arc::default(),
        })
    }

    /// What the client was created with.
    #[must_use]
    pub fn options(&self) -> &UpstreamOptions {
        &self.options
    }

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

    /// Which endpoint takes the ids of prompts. `None` if the engine has none.
    fn way(&self) -> Option<Way> {
        let ways = Way::of(self.options.kind);
        ways.get(usize::from(self.generates.load(Ordering::Relaxed))).or(ways.first()).copied()
    }

    /// Has the first of these workers that can be reached answer a call.
    async fn complete_at(&self, call: &EngineCall<'_>, workers: &[usize]) -> Result<Answered, UpstreamError> {
        let (mut aborts, mut reconnects) = (0, 0);
        loop {
            let version = call.version.read().await;
            let rid = format!("{}-{aborts}", call.rid);
            let answer = match self.answer(call, &rid, Wanted::Recording, workers, &mut reconnects).await {
                // SGLang answers a call that was aborted while it was queued with an error.
                Err(error) if error.is_abort() => None,
                answer => Some(answer?).filter(|answer| !answer.is_aborted()),
            };
            if let Some(answer) = answer {
                let completion = check::completion(&answer, &rid, version, &self.options);
                let completion = completion.map_err(|fault| UpstreamError::untrusted(fault, self.options.kind))?;
                return Ok(Answered { completion, aborts, reconnects, parsing: Duration::ZERO });
            }
            aborts += 1;
            tracing::debug!(upstream.name = self.options.name, aborts, "the engine aborted a call");
            if aborts > self.options.aborts_max {
                return Err(UpstreamError::Aborted { times: aborts });
            }
            tokio::time::sleep(self.options.repeat_delay).await;
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

    async fn answer(
        &self,
        call: &EngineCall<'_>,
        rid: &str,
        wanted: Wanted,
        workers: &[usize],
        reconnects: &mut u32,
    ) -> Result<EngineAnswer, UpstreamError> {
        let body = |rid: &str| body::write(call, &self.options, rid, wanted);
        let bytes = call.request.bytes;
        let room = Room::Waits;
        let post = Post { path: CHAT, workers, session: call.session, rid, bytes, body: &body, room };
        let body = self.transport.post(&post, reconnects).await?;
        let read = work::run(body.len(), || EngineAnswer::read(&body)).await;
        read.map_err(|fault| UpstreamError::untrusted(fault, self.options.kind))
    }
}
