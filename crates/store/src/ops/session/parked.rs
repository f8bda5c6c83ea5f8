//! The states of sessions as their policies count them, and the room of parked sessions.

use forebay_domain::{
    clock::Timestamp,
    ids::{PolicyPk, SessionPk},
    states::SessionState,
    tally::Tally,
};

use crate::{
    error::StoreError,
    sql::{Statement, Tx, args},
};

/// Notes that a session was moved to another state: its policies count their sessions by state, and know which are parked.
pub(super) async fn moved(
    tx: &mut Tx<'_>,
    session: SessionPk,
    from: SessionState,
    to: SessionState,
) -> Result<(), StoreError> {
    const NOTE_UNPARKED: Statement = Statement::new(
        "-- note_unparked_session
        UPDATE session_policy
        SET is_parked = 0
        WHERE session_pk = $1",
    );
    if from == to {
        return Ok(());
    }
    for policy in policies_of(tx, session).await? {
        count_move(tx, policy, from, to);
    }
    if from == SessionState::Parked {
        tx.execute(NOTE_UNPARKED, args![session]).await?;
    }
    Ok(())
}

/// Notes that an open session was parked.
pub(super) async fn parked(tx: &mut Tx<'_>, session: SessionPk, now: Timestamp) -> Result<(), StoreError> {
    const NOTE_PARKED: Statement = Statement::new(
        "-- note_parked_session
        UPDATE session_policy
        SET is_parked = 1, parked_us = $2
        WHERE session_pk = $1",
    );
    moved(tx, session, SessionState::Open, SessionState::Parked).await?;
    tx.execute(NOTE_PARKED, args![session, now]).await.map(drop)
}

/// Opens a session whose row is locked if it is parked, because its agent is at work after all.
pub(super) async fn unpark(
    tx: &mut Tx<'_>,
    session: SessionPk,
    state: SessionState,
    due_at: Timestamp,
) -> Result<(), StoreError> {
    const UNPARK: Statement = Statement::new(
        "-- unpark_session
        UPDATE session
        SET state = 'open', due_us = $2
        WHERE session_pk = $1 AND state = 'parked'",
    );
    if state != SessionState::Parked {
        return Ok(());
    }
    tx.guarded(UNPARK, args![session, due_at], 1).await?;
    moved(tx, session, state, SessionState::Open).await
}

/// A parked session keeps its room for this long, also where somebody waits for room: the program that looks after it needs
/// some time to see it and to start the agent again.
const PARKED_STAYS_S: i64 = 300;

/// Sessions that were parked later than this keep their room.
pub(in crate::ops) fn stays_since(now: Timestamp) -> Timestamp {
    Timestamp::from_micros(now.as_micros().saturating_sub(PARKED_STAYS_S * 1_000_000))
}

/// Makes the session of a policy due that has been parked longest, because its room is needed. The sweep ends it. While one
/// is due, no other becomes due: whoever waits for room asks many times.
pub(in crate::ops) async fn release_parked(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    now: Timestamp,
) -> Result<(), StoreError> {
    const RELEASE_PARKED: Statement = Statement::new(
        "-- release_parked_session
        UPDATE session
        SET due_us = $2
        WHERE session_pk = (
                SELECT session_pk
                FROM session_policy
                WHERE policy_pk = $1 AND is_parked = 1 AND COALESCE(parked_us, 0) <= $3
                ORDER BY COALESCE(parked_us, 0), session_pk
                LIMIT 1
            )
            AND state = 'parked' AND due_us > $2",
    );
    tx.execute(RELEASE_PARKED, args![policy, now, stays_since(now)]).await.map(drop)
}

pub(super) async fn policies_of(tx: &mut Tx<'_>, session: SessionPk) -> Result<Vec<PolicyPk>, StoreError> {
    const SELECT_POLICIES: Statement = Statement::new(
        "-- select_policies_of_session
        SELECT policy_pk
        FROM session_policy
        WHERE session_pk = $1",
    );
    let rows = tx.fetch_all(SELECT_POLICIES, args![session]).await?;
    rows.into_iter().map(|mut row| row.get("policy_pk")).collect()
}

fn count_move(tx: &mut Tx<'_>, policy: PolicyPk, from: SessionState, to: SessionState) {
    tx.tallies().add(policy, Tally::Sessions(from), -1);
    tx.tallies().add(policy, Tally::Sessions(to), 1);
}
