//! Attempts of sessions: an agent that died is started again with a new key, and what the agent or its sandbox has stored to
//! go on from.

use std::time::Duration;

use forebay_domain::{
    ids::SessionId,
    session::{ResumeSession, SaveState, SavedState, Session, SessionKey, SessionKeyHash},
};
use forebay_store::ops::session::attempts::FindSavedState;
use tracing::instrument;

use crate::{Buffer, error::BufferError, session::open::Opened};

impl Buffer {
    /// Begins another attempt of a session, after the attempt `after` if it is named. The keys of earlier attempts permit
    /// nothing more, and their calls that are under way are given up.
    #[instrument(level = "debug", skip_all, fields(session.id = %session_id))]
    pub async fn resume_session(&self, session_id: SessionId, after: Option<u32>) -> Result<Opened, BufferError> {
        let key = SessionKey::mint();
        let now = self.clock.now();
        let resume = ResumeSession { session_id, key: SessionKeyHash::of(key.reveal()), after, now };
        let session = self.store.write(resume).await??;
        // Those at other replicas find out when they record their answers, and when they keep the session alive.
        self.in_flight.settle(session_id, Duration::ZERO).await;
        tracing::info!(session.id = %session_id, session.attempt = session.attempt, "a session was resumed");
        let rollout_id = session.spec.rollout_id.clone();
        let Session { attempt, max_attempts, expires_at, .. } = session;
        Ok(Opened { session_id, key, rollout_id, duplicate: true, attempt, max_attempts, expires_at })
    }

    /// Stores what an agent or its sandbox goes on from if it is started again. It replaces what was stored before.
    #[instrument(level = "debug", skip_all, fields(session.id = %save.session_id))]
    pub async fn save_state(&self, save: SaveState) -> Result<forebay_wire::SavedState, BufferError> {
        Ok(self.store.write(save).await??)
    }

    /// What was stored last; none if nothing was.
    #[instrument(level = "debug", skip_all, fields(session.id = %session_id))]
    pub async fn saved_state(&self, session_id: SessionId) -> Result<Option<SavedState>, BufferError> {
        Ok(self.store.read(FindSavedState(session_id)).await?)
    }
}
