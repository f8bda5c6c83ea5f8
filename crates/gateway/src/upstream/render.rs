//! Whether an engine renders a conversation as the gateway does, for the mode `exact`.
//!
//! vLLM tells the ids of a prompt without sampling behind them. They are asked for only to compare: a call would wait for
//! one more request, and what continues an answer must be rendered here anyway.

use serde::Deserialize;

use super::{
    body::{self, Wanted},
    client::Upstream,
    columns::Ids,
    error::UpstreamError,
    kind::EngineKind,
    probe::{self, probe_id},
    transport::{Post, Room},
};
use crate::request::Request;

const RENDER: &str = "/v1/chat/completions/render";

#[derive(Deserialize)]
struct Rendered {
    token_ids: Ids,
}

impl Upstream {
    /// The ids of the prompt that each worker makes of a request. A worker that does not tell is left out: other engines
    /// and older versions of vLLM have no such endpoint, and those that have it refuse what their template refuses.
    pub async fn rendered(&self, model: &str, request: &Request) -> Result<Vec<Vec<i32>>, UpstreamError> {
        let mut found = Vec::new();
        let workers = if self.options.kind == EngineKind::Vllm { self.options.urls.len() } else { 0 };
        for worker in 0..workers {
            let rid = probe_id();
            let call = probe::call(request, model, 1.0);
            let body = |rid: &str| body::write(&call, &self.options, rid, Wanted::Nothing);
            let (workers, bytes) = (&[worker][..], request.bytes);
            let post =
                Post { path: RENDER, workers, session: call.session, rid: &rid, bytes, body: &body, room: Room::Waits };
            let answer = match self.transport.post(&post, &mut 0).await {
                Err(UpstreamError::Refused { .. }) => continue,
                answer => answer?,
            };
            // Something in between may answer whatever it is asked.
            found.extend(serde_json::from_slice::<Rendered>(&answer).ok().map(|rendered| rendered.token_ids.ids));
        }
        Ok(found)
    }
}
