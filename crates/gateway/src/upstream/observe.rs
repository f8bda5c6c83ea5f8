//! Calls whose prompt the engine renders. It tells the ids of the prompt, so these can be recorded.

use std::time::Duration;

use forebay_bounds::work;

use super::{
    answer::EngineAnswer,
    body::{self, Wanted},
    call::{Answered, EngineCall},
    check,
    client::Upstream,
    error::UpstreamError,
    transport::{Post, Room},
};

/// The chat endpoint of all engines.
pub(super) const CHAT: &str = "/v1/chat/completions";

impl Upstream {
    /// Has the first of these workers that can be reached answer a call.
    pub(super) async fn complete_at(
        &self,
        call: &EngineCall<'_>,
        workers: &[usize],
    ) -> Result<Answered, UpstreamError> {
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

    /// Has the engine answer a request that it renders.
    pub(super) async fn answer(
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
