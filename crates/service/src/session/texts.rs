//! The requests and answers of recorded calls, for whoever compares a new request with them.

use forebay_domain::{
    formats::call::unpack_text,
    ids::{PolicyName, SessionPk},
    session::CallTexts,
};
use forebay_store::{error::StoreError, ops::session::calls::FindTexts};
use tracing::instrument;

use crate::{
    Buffer,
    error::BufferError,
    session::{
        calls::{SessionCalls, in_own_task, one_of_few},
        record::CallPermit,
    },
};

/// Calls whose texts are read at once.
pub(super) const TEXTS_PAGE: u32 = 64;

/// The recorded calls of a session with their texts.
#[derive(Debug)]
pub struct RecordedTexts {
    session: SessionPk,
    calls: SessionCalls,
    texts: Vec<CallTexts>,
}

/// A recorded call with its texts.
#[derive(Clone, Debug)]
pub struct RecordedText {
    /// Its number in the session, from 1.
    pub seq: u32,
    /// The policy whose rollout it belongs to.
    pub policy: PolicyName,
    /// The part of the request that is kept, as JSON.
    pub request: String,
    /// The response, as JSON.
    pub response: String,
    /// The ids of the whole prompt.
    pub prompt: Vec<i32>,
    /// The sampled ids.
    pub ids: Vec<i32>,
}

impl RecordedTexts {
    /// The calls in the order of their numbers. Each prompt is put together when its turn comes, because together they
    /// grow with the square of the session's length.
    pub fn iter(&self) -> impl Iterator<Item = Result<RecordedText, StoreError>> {
        self.texts.iter().filter_map(|texts| self.text(texts).transpose())
    }

    fn text(&self, texts: &CallTexts) -> Result<Option<RecordedText>, StoreError> {
        // A call may have been recorded between the two reads.
        let Some(call) = self.calls.call(texts.seq) else { return Ok(None) };
        let unpack = |packed: &Vec<u8>| unpacked(packed, texts.seq, self.session);
        Ok(Some(RecordedText {
            seq: texts.seq,
            policy: call.policy.clone(),
            request: unpack(&texts.request)?,
            response: unpack(&texts.response)?,
            prompt: self.calls.prompt(call),
            ids: call.columns.ids.clone(),
        }))
    }
}

/// Calls of a session that were read together, because a conversation has calls that follow each other.
#[derive(Debug, Default)]
pub struct TextPage(Vec<CallTexts>);

#[derive(Clone, Debug)]
pub struct CallText {
    /// The part of the request that is kept, as JSON.
    pub request: String,
    /// The response, as JSON.
    pub response: String,
}

impl Buffer {
    /// The texts of one recorded call; none if there is no call with this number.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn recorded_text(
        &self,
        permit: &CallPermit,
        seq: u32,
        TextPage(calls): &mut TextPage,
    ) -> Result<Option<CallText>, BufferError> {
        let session = permit.session_pk();
        let find = |calls: &[CallTexts]| calls.binary_search_by_key(&seq, |texts| texts.seq).ok();
        if find(calls).is_none() {
            // Conversations are read from their end.
            *calls = page(self, session, seq.saturating_sub(TEXTS_PAGE)).await?;
        }
        let Some(texts) = find(calls).map(|index| &calls[index]) else { return Ok(None) };
        let unpack = |packed: &Vec<u8>| unpacked(packed, seq, session);
        Ok(Some(CallText { request: unpack(&texts.request)?, response: unpack(&texts.response)? }))
    }
}

pub(super) fn unpacked(packed: &[u8], seq: u32, session: SessionPk) -> Result<String, StoreError> {
    unpack_text(packed).map_err(|damage| StoreError::Corrupt(format!("call {seq} of session {session}: {damage}")))
}

impl Buffer {
    /// The recorded calls of the session with their requests and answers.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn recorded_texts(&self, permit: &CallPermit) -> Result<RecordedTexts, BufferError> {
        let (buffer, session) = (self.clone(), permit.session_pk());
        let reading = async move {
            let _few = one_of_few().await?;
            let mut texts: Vec<CallTexts> = Vec::new();
            loop {
                let after = texts.last().map_or(0, |texts| texts.seq);
                let page = page(&buffer, session, after).await?;
                let is_last = page.len() < TEXTS_PAGE as usize;
                texts.extend(page);
                if is_last {
                    let calls = SessionCalls::read(&buffer, session).await?;
                    return Ok(RecordedTexts { session, calls, texts });
                }
            }
        };
        Ok(in_own_task(reading).await?)
    }
}

/// The next calls of a session after a number.
pub(super) async fn page(buffer: &Buffer, session: SessionPk, after: u32) -> Result<Vec<CallTexts>, StoreError> {
    buffer.store.read(FindTexts { session, after, limit: TEXTS_PAGE }).await
}
