//! Sessions: the calls of an agent to an inference engine are recorded, and become its rollouts when the session ends.
//!
//! It is beside the other stages: opening a session is an [`admission`](crate::admission), its end is an
//! [`ingest`](crate::ingest) of trajectories that are assembled from the calls. The agent's requests and the engines
//! belong to the crate `forebay-agents`; this one receives finished calls.
//!
//! - `open`: checks what ingest would refuse at the end, and reserves room.
//! - `attempts`: starts agents again, and keeps what they go on from.
//! - `record`: permits calls and stores them.
//! - `delivery`: whether agents received the answers.
//! - `recent`: what is kept in memory of the sessions that were active last.
//! - `in_flight`: the calls of this process that have not ended.
//! - `ending`: what a request wants of the end of a session.
//! - `end`: has the calls assembled and ingests the rollouts; the session ends in the same transaction.
//! - `rollouts`: assembles the calls. `breaks` finds out why prompts do not continue earlier calls.
//! - `teacher`: has a teacher score the segments between assembling and ingest.
//! - `calls`: the recorded calls of a session. `turns`: the segments they make, and what became of each.
//! - `texts`: the calls of a session with their requests and answers.
//!
//! A call is stored with the part of its prompt that no earlier call of the session has (`session::paths` of the
//! domain), so that the table grows with the tokens of a conversation and not with their square. The end of a session
//! is refused if calls were recorded while they were assembled. The bounds of a session are checked with each call, so
//! that its rollouts can always be ingested.
//!
//! Calls in flight are known only to the process that forwards them. The end of an answer is sent after the commit of
//! its call, which goes on if the client disconnects, and the permit of the call is held until the answer is taken from
//! the body, so that a finish waits for it.

mod attempts;
mod breaks;
mod calls;
pub(crate) mod delivery;
pub mod end;
pub mod ending;
pub(crate) mod in_flight;
mod messages;
pub mod open;
pub mod recent;
pub mod record;
mod rollouts;
mod teacher;
pub mod texts;
pub mod turns;

use forebay_domain::{
    ids::SessionId,
    pages::Page,
    refusal::Refusal,
    session::{Session, SessionFilter},
};
use forebay_store::ops::session::FindSession;
use tracing::instrument;

use crate::{Buffer, error::BufferError, policies};

impl Buffer {
    #[instrument(level = "debug", skip_all, fields(session.id = %session_id))]
    pub async fn session(&self, session_id: SessionId) -> Result<Session, BufferError> {
        Ok(self.store.read(FindSession(session_id)).await?.ok_or(Refusal::Unknown("the session"))?)
    }

    /// Sessions that record rollouts of a policy, in the order in which they were opened.
    #[instrument(level = "debug", skip_all)]
    pub async fn sessions(&self, filter: SessionFilter) -> Result<Page<Session>, BufferError> {
        policies::existing_policy(self, &filter.policy.public()).await?;
        Ok(self.store.read(filter).await?)
    }
}
