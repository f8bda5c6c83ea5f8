//! One request of a call with ids.
//!
//! Such a call takes several: they sample its answer, and have it parsed as a whole in `exact` and in parts in
//! `streaming`.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use serde::Deserialize;

use forebay_bounds::work;

use super::{
    body,
    call::{EngineCall, ExactPrompt},
    client::Upstream,
    error::UpstreamError,
    fault::Fault,
    kind::EngineKind,
    transport::{Post, Room},
};

/// vLLM's endpoint that parses ids.
pub(super) const DERENDER: &str = "/v1/chat/completions/derender";

/// Which endpoint takes the ids of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// SGLang's chat endpoint.
    Chat,
    /// SGLang's endpoint of ids.
    Generate,
    /// vLLM's endpoint of ids.
    Vllm,
}

impl Way {
    /// The ways of an engine, the best first.
    pub(super) fn of(kind: EngineKind) -> &'static [Self] {
        match kind {
            EngineKind::Sglang => &[Self::Chat, Self::Generate],
            EngineKind::Vllm => &[Self::Vllm],
            EngineKind::Openai => &[],
        }
    }

    /// Whether the engine must say which prompt it has read. The endpoints of ids cannot have rendered another one.
    pub(super) fn may_render(self) -> bool {
        self == Self::Chat
    }
}

/// One request of a call.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub(super) upstream: &'a Upstream,
    pub(super) way: Way,
    pub(super) call: &'a EngineCall<'a>,
    pub(super) prompt: &'a ExactPrompt<'a>,
    pub(super) workers: &'a [usize],
    pub(super) rid: &'a str,
}

impl Exchange<'_> {
    /// Whether vLLM has a parser for ids.
    pub(super) fn parses_ids(&self) -> bool {
        !self.upstream.speaks_plainly.load(Ordering::Relaxed)
    }

    /// The text of sampled ids.
    pub(super) fn text(&self, sampled: &[i32]) -> String {
        self.text_behind(self.prompt.ids, sampled)
    }

    /// The text of ids behind others. Some tokenizers write a space before a word only if something is before it, so the end
    /// of the others is decoded with them.
    pub(super) fn text_behind(&self, before: &[i32], ids: &[i32]) -> String {
        let tail = body::tail(before);
        let (before, whole) = ((self.prompt.text)(tail), (self.prompt.text)(&[tail, ids].concat()));
        whole.strip_prefix(&before).map_or_else(|| (self.prompt.text)(ids), str::to_owned)
    }

    pub(super) async fn post<T: for<'de> Deserialize<'de>>(
        &self,
        path: &'static str,
        body: &(dyn Fn(&str) -> Bytes + Sync),
        reconnects: &mut u32,
    ) -> Result<T, UpstreamError> {
        self.read(&self.request(path, body, Room::Waits), reconnects).await
    }

    pub(super) fn request<'b>(
        &'b self,
        path: &'static str,
        body: &'b (dyn Fn(&str) -> Bytes + Sync),
        room: Room,
    ) -> Post<'b> {
        // An id has up to seven bytes in a body.
        let bytes = self.call.request.bytes + 7 * self.prompt.ids.len();
        Post { path, workers: self.workers, session: self.call.session, rid: self.rid, bytes, body, room }
    }

    pub(super) async fn read<T: for<'de> Deserialize<'de>>(
        &self,
        post: &Post<'_>,
        reconnects: &mut u32,
    ) -> Result<T, UpstreamError> {
        let answer = self.upstream.transport.post(post, reconnects).await?;
        let read = work::run(answer.len(), || serde_json::from_slice(&answer)).await;
        let shape = |error: serde_json::Error| Fault::Shape { why: error.to_string() };
        read.map_err(|error| UpstreamError::untrusted(shape(error), self.upstream.options.kind))
    }
}
