//! What time makes due: sessions that must end, and ended sessions whose rows go.
use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{PolicyPk, SessionId, SessionPk},
    states::SessionState,
    tally::Tally,
};

use crate::{
    error::StoreError,
    op::Op,
    ops::session::parked::policies_of,
    sql::{Statement, Tx, args, locking},
};

/// Sweep: live sessions that are due, up to `limit`.
pub struct DueSessions {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for DueSessions {
    type Output = Vec<SessionId>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // Sessions that are due at the same time end in the order in which they were opened, on every database.
        const SELECT_DUE_SESSIONS: Statement = Statement::new(
            "-- select_due_sessions
            SELECT session_pk, session_id
            FROM session
            WHERE due_us <= $1
            ORDER BY due_us, session_pk
            LIMIT $2",
        );
        let rows = tx.fetch_all(SELECT_DUE_SESSIONS, args![self.now, self.limit]).await?;
        rows.into_iter().map(|mut row| row.get("session_id")).collect()
    }
}

/// Sweep: deletes the calls and rows of ended sessions that are due, up to `limit` sessions each. Returns how many
/// were done.
pub struct RetireSessions {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for RetireSessions {
    type Output = u64;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<u64, StoreError> {
        // Rows are forgotten first, so that a session whose calls are purged now stays until the next slice.
        Ok(forget(tx, self.now, self.limit).await? + purge(tx, self.now, self.limit).await?)
    }
}

/// Deletes the calls, keys and saved states of ended sessions.
async fn purge(tx: &mut Tx<'_>, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
    const LOCK_PURGEABLE: Statement = locking!(
        "-- lock_purgeable_sessions
        SELECT session_pk
        FROM session
        WHERE purge_us <= $1
        ORDER BY purge_us
        LIMIT $2"
    );
    const DELETE_CALLS: Statement = Statement::new(
        "-- delete_calls
        DELETE FROM session_call
        WHERE session_pk = $1",
    );
    const DELETE_KEYS: Statement = Statement::new(
        "-- delete_session_keys
        DELETE FROM session_key
        WHERE session_pk = $1",
    );
    const DELETE_SAVED: Statement = Statement::new(
        "-- delete_session_saved
        DELETE FROM session_saved
        WHERE session_pk = $1",
    );
    const MARK_PURGED: Statement = Statement::new(
        "-- mark_session_purged
        UPDATE session
        SET purge_us = NULL
        WHERE session_pk = $1 AND purge_us IS NOT NULL",
    );
    let rows = tx.fetch_all(LOCK_PURGEABLE, args![now, limit]).await?;
    let purged = rows.len() as u64;
    for mut row in rows {
        let session: SessionPk = row.get("session_pk")?;
        tx.execute(DELETE_CALLS, args![session]).await?;
        tx.execute(DELETE_KEYS, args![session]).await?;
        tx.execute(DELETE_SAVED, args![session]).await?;
        tx.guarded(MARK_PURGED, args![session], 1).await?;
    }
    Ok(purged)
}

/// Deletes the rows of sessions whose calls are gone.
async fn forget(tx: &mut Tx<'_>, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
    const LOCK_FORGETTABLE: Statement = locking!(
        "-- lock_forgettable_sessions
        SELECT session_pk, state
        FROM session
        WHERE forget_us <= $1 AND purge_us IS NULL
        ORDER BY forget_us
        LIMIT $2"
    );
    const FORGET_SESSION_POLICIES: Statement = Statement::new(
        "-- forget_session_policies
        DELETE FROM session_policy
        WHERE session_pk = $1",
    );
    const FORGET_SESSION: Statement = Statement::new(
        "-- forget_session
        DELETE FROM session
        WHERE session_pk = $1",
    );
    let rows = tx.fetch_all(LOCK_FORGETTABLE, args![now, limit]).await?;
    let forgotten = rows.len() as u64;
    for mut row in rows {
        let (session, state): (SessionPk, SessionState) = (row.get("session_pk")?, row.get("state")?);
        for policy in policies_of(tx, session).await? {
            let policy: PolicyPk = policy;
            tx.tallies().add(policy, Tally::Sessions(state), -1);
        }
        tx.execute(FORGET_SESSION_POLICIES, args![session]).await?;
        tx.guarded(FORGET_SESSION, args![session], 1).await?;
    }
    Ok(forgotten)
}
