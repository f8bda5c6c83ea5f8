//! Sessions in the store: the calls of agents, from which rollouts are assembled.
//!
//! A session ends in the transaction that ingests its rollouts, so its end is part of [`Ingest`](forebay_domain::ingest::Ingest).

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{CallPk, SessionId, SessionPk},
    pages::Page,
    session::{
        CallTexts, Delivery, FindAnswer, KeepSession, NewSession, OpenedSession, RecordCall, RecordedCall, Session,
        SessionFilter, SessionKeyHash, StoredAnswer, StoredCall, notes::SessionNotes,
    },
};

use crate::buffer::port::error::{Answer, StoreError};

/// Sessions and their calls.
#[async_trait]
pub trait SessionStore: Send + Sync {
    /// Opens a session and reserves room for its rollouts, or adds a key to the session that the same request opened.
    async fn open_session(&self, open: NewSession) -> Answer<OpenedSession>;
    /// The session with a key.
    async fn session_of_key(&self, key: SessionKeyHash) -> Result<Option<Session>, StoreError>;
    /// One session.
    async fn session(&self, session_id: SessionId) -> Result<Option<Session>, StoreError>;
    /// Sessions in the order in which they were opened.
    async fn sessions(&self, filter: SessionFilter) -> Result<Page<Session>, StoreError>;
    /// Records a call. A call beyond the bounds of the session is refused.
    async fn record_call(&self, record: RecordCall) -> Answer<RecordedCall>;
    /// Moves the time at which an idle session expires. Refused if it has ended.
    async fn keep_session(&self, keep: KeepSession) -> Answer<()>;
    /// Remembers that a call was refused because a bound was reached.
    async fn mark_full(&self, session: SessionPk) -> Result<(), StoreError>;
    /// Adds to what a live session remembers of its calls.
    async fn note_session(&self, session: SessionPk, notes: SessionNotes) -> Result<(), StoreError>;
    /// Marks whether the agents received the answers of calls. A call that was delivered stays so.
    async fn mark_calls(&self, calls: Vec<CallPk>, delivery: Delivery) -> Result<(), StoreError>;
    /// Whether it is not known of a call that ended after a time whether its answer was delivered.
    async fn has_unmarked(&self, session: SessionPk, ended_after: Timestamp) -> Result<bool, StoreError>;
    /// The recorded answer to a request that its client repeats, which is not marked as delivered: of several, the first
    /// that is not being sent.
    async fn answer(&self, find: FindAnswer) -> Result<Option<StoredAnswer>, StoreError>;
    /// The calls of a session after a number, in order.
    async fn session_calls(&self, session: SessionPk, after: u32, limit: u32) -> Result<Vec<StoredCall>, StoreError>;
    /// The requests and responses of the calls of a session after a number, in order.
    async fn call_texts(&self, session: SessionPk, after: u32, limit: u32) -> Result<Vec<CallTexts>, StoreError>;
    /// Stops new calls of open sessions. Returns the sessions in the order of the request; a session that has ended is
    /// returned unchanged.
    async fn begin_finish(&self, sessions: Vec<SessionId>) -> Answer<Vec<Session>>;
    /// Permits new calls of sessions whose finish was refused.
    async fn reopen_sessions(&self, sessions: Vec<SessionId>) -> Result<(), StoreError>;
    /// Sweep: live sessions that are due, up to `limit`.
    async fn due_sessions(&self, now: Timestamp, limit: u32) -> Result<Vec<SessionId>, StoreError>;
    /// Sweep: deletes the calls and rows of ended sessions that are due, up to `limit` sessions each. Returns how many
    /// were done.
    async fn retire_sessions(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError>;
}
