//! Has an engine answer a call. While the engine is paused, busy or gone, the call waits, so that an update of weights
//! costs no agent.

use std::{
    pin::Pin,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use forebay_domain::{
    ids::{PolicyName, SessionId},
    session::SessionPolicy,
};
use forebay_gateway::{
    DialectError, UpstreamError,
    upstream::{Answered, EngineCall, PublishedVersion},
};
use forebay_service::error::BufferError;

use crate::{Agents, call::Call, refusal, sampling, upstreams::Route};

/// A session that has room for fewer tokens than this bounds what the engine may sample. Engines refuse a bound that
/// does not fit into their context together with the prompt, so it is not named without need.
const ROOM_NAMED_BELOW: u64 = 128 << 10;

/// How often an engine is asked again that failed with status 500. It may fail again and again for the same call.
const FAILURES_MAX: u32 = 2;

/// How often a call that waits looks whether its session still exists. A session may end at another replica.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// An engine's answer, and the time that it took to sample it. In the mode `exact`, parsing an answer is a request of its
/// own, which the time does not contain.
pub(crate) struct Asked {
    pub(crate) answered: Answered,
    pub(crate) engine_time: Duration,
}

impl Call {
    /// Has the engine answer, unless the session ends before.
    pub(crate) async fn ask_until_ended(
        &self,
        route: &Route,
        policy: Option<&SessionPolicy>,
        prompt: Option<&[i32]>,
    ) -> Result<Asked, DialectError> {
        tokio::select! {
            biased;
            () = self.permit.cancelled() => Err(self.cancelled().await),
            refused = self.session_ended() => Err(refused),
            asked = self.ask(route, policy, prompt) => asked,
        }
    }

    /// Why a call was cancelled: its session ends, or another attempt has begun.
    async fn cancelled(&self) -> DialectError {
        match self.agents.buffer().keep_session(&self.permit).await {
            Err(error @ BufferError::Refused(_)) => refusal::of(error),
            Ok(()) | Err(BufferError::Store(_)) => DialectError::Closed { why: "it has ended or is ending".to_owned() },
        }
    }

    /// Returns when the session has ended. Until then, the session does not count as idle.
    async fn session_ended(&self) -> DialectError {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            match self.agents.buffer().keep_session(&self.permit).await {
                Err(error @ BufferError::Refused(_)) => return refusal::of(error),
                // The answer may be recorded all the same.
                Err(BufferError::Store(error)) => tracing::debug!(error = %error, "a session could not be kept alive"),
                Ok(()) => {}
            }
        }
    }

    async fn ask(
        &self,
        route: &Route,
        policy: Option<&SessionPolicy>,
        prompt: Option<&[i32]>,
    ) -> Result<Asked, DialectError> {
        // A client of events waits as long as it sees signs of life. While an engine works, nobody is answered early.
        let until = (!self.request.stream).then_some(self.times.answer_by);
        let metrics = self.agents.metrics();
        let mut max_tokens = self.request.max_tokens_within(self.room());
        let mut next = policy.map_or(0, |policy| policy.current_version.0);
        let mut engine_time = Duration::ZERO;
        let mut failures = 0;
        for attempt in 0_u32.. {
            let asked = Instant::now();
            let version = Published { call: self, policy, first: next, reads: AtomicU32::new(0) };
            let error = match self.ask_once(route, prompt, max_tokens, attempt, &version).await {
                Ok(answered) => {
                    engine_time += asked.elapsed().saturating_sub(answered.parsing);
                    metrics.engine_answered(route.name(), asked.elapsed(), answered.aborts);
                    return Ok(Asked { answered, engine_time });
                }
                Err(error) => error,
            };
            metrics.engine_failed(route.name(), error.name());
            failures += u32::from(matches!(error, UpstreamError::Failed { status: 500, .. }));
            // Agents ask for more than the context has room for. Without a bound, the engine samples until it is full.
            let leaves_bound = matches!(error, UpstreamError::ContextLength { .. }) && max_tokens.take().is_some();
            if !leaves_bound {
                self.hold(route, &error, failures, until).await?;
                // A pause is often an update, which the answer will come from.
                next = self.current_version(policy).await.unwrap_or(next);
            }
            engine_time += asked.elapsed();
        }
        Err(DialectError::Internal)
    }

    async fn ask_once(
        &self,
        route: &Route,
        prompt: Option<&[i32]>,
        max_tokens: Option<u32>,
        attempt: u32,
        version: &Published<'_>,
    ) -> Result<Answered, UpstreamError> {
        let text = |ids: &[i32]| route.exact.as_ref().map(|exact| exact.text(ids)).unwrap_or_default();
        let call = EngineCall {
            exact: route.exact.as_ref().zip(prompt).map(|(exact, ids)| exact.ids(ids, &text)),
            request: &self.request,
            model: &route.model,
            sampling: sampling::told(self.permit.sampling()),
            max_tokens,
            streaming: self.streaming.as_ref(),
            session: &self.permit.session_id().to_string(),
            rid: &format!("{attempt}-{}", self.id),
            version,
        };
        if version.policy.is_some() {
            return route.upstream.complete(&call).await;
        }
        let completion = route.upstream.forward(&call).await?;
        Ok(Answered { completion, aborts: 0, reconnects: 0, parsing: Duration::ZERO })
    }

    /// Waits before the engine is asked again, or fails if that would not help, if it would be too late, or if the service
    /// stops. `failures` is how often the engine failed with status 500.
    async fn hold(
        &self,
        route: &Route,
        error: &UpstreamError,
        failures: u32,
        until: Option<Instant>,
    ) -> Result<(), DialectError> {
        let pause = match error {
            UpstreamError::Busy { retry_after_s, .. } => {
                Some(Duration::from_secs(u64::from(*retry_after_s).clamp(1, 10)))
            }
            // With these statuses, a proxy says that the engine behind it is gone.
            UpstreamError::Unreachable { .. }
            | UpstreamError::Aborted { .. }
            | UpstreamError::Failed { status: 502 | 504, .. } => Some(Duration::from_secs(1)),
            UpstreamError::Failed { status: 500, .. } if failures <= FAILURES_MAX => Some(Duration::from_secs(1)),
            _ => None,
        };
        let refused = || {
            tracing::warn!(upstream.name = route.name(), error = %error, "an engine did not answer a call");
            Err(DialectError::from(error))
        };
        let in_time = |pause: &Duration| until.is_none_or(|until| Instant::now() + *pause < until);
        let Some(pause) = pause.filter(in_time) else { return refused() };
        let mut draining = self.agents.draining();
        match tokio::time::timeout(pause, draining.wait_for(|draining| *draining)).await {
            // Its client repeats the call.
            Ok(_) => refused(),
            Err(_) => Ok(()),
        }
    }

    /// The policy's published version; none if it cannot be read.
    async fn current_version(&self, policy: Option<&SessionPolicy>) -> Option<i64> {
        published(&self.agents, self.permit.session_id(), &policy?.policy).await
    }

    /// How many tokens may be sampled, if the session is nearly full.
    fn room(&self) -> Option<u32> {
        let left = self.permit.tokens_left();
        (left < ROOM_NAMED_BELOW).then_some(left.max(1) as u32)
    }
}

/// The published version of a session's policy; none if it cannot be read.
pub(crate) async fn published(agents: &Agents, session: SessionId, policy: &PolicyName) -> Option<i64> {
    let session = agents.buffer().session(session).await.ok()?;
    let found = session.policies.iter().find(|found| found.policy == *policy)?;
    Some(found.current_version.0)
}

/// The published version of a call's policy. Every read but the first one asks the store: an engine that aborts a call
/// often does so for an update.
struct Published<'a> {
    call: &'a Call,
    /// None if the call is not recorded.
    policy: Option<&'a SessionPolicy>,
    first: i64,
    reads: AtomicU32,
}

impl PublishedVersion for Published<'_> {
    fn read(&self) -> Pin<Box<dyn Future<Output = i64> + Send + '_>> {
        let is_first = self.reads.fetch_add(1, Ordering::Relaxed) == 0;
        Box::pin(async move {
            let read = if is_first { None } else { self.call.current_version(self.policy).await };
            read.unwrap_or(self.first)
        })
    }
}
