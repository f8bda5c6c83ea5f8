//! Sessions in the store: their rows, and their end in the transaction that ingests their rollouts.

pub mod attempts;
pub mod calls;
mod open;
pub(super) mod parked;
pub mod sweep;

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    formats::canonical::ContentDigest,
    ids::{PolicyName, PolicyPk, Run, SessionId, SessionPk, Version},
    pages::Page,
    refusal::Refusal,
    session::{EndSession, Session, SessionFilter, SessionKeyHash, SessionOutcome, SessionPolicy, notes::SessionNotes},
    staleness::stale_after,
    states::SessionState,
    tally::Tally,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::bounded_scan::{InOrder, Scan, examine, in_order};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, among_keys, args, key_list},
};

/// A session whose row is locked, as far as its end depends on it.
pub(super) struct EndingSession {
    pub(super) state: SessionState,
    pub(super) calls: u32,
    pub(super) attempt: u32,
    pub(super) due_at: Option<Timestamp>,
    pub(super) policies: Vec<PolicyPk>,
}

/// A session that ended, and what is written about it.
pub(super) struct EndedSession<'b> {
    pub(super) end: &'b EndSession,
    pub(super) outcome: SessionOutcome,
    pub(super) purge_at: Timestamp,
    pub(super) forget_at: Timestamp,
}

/// Locks the sessions that bundles end, in the order of their keys.
pub(super) async fn lock_ending(
    tx: &mut Tx<'_>,
    ends: &[&EndSession],
) -> Result<HashMap<SessionPk, EndingSession>, StoreError> {
    // The rows are locked first. Calls and other ends wait here, and find the session ended.
    const LOCK_ENDING: Statement = Statement {
        sqlite: "-- lock_ending_sessions
            SELECT session_pk, state, calls, attempt, due_us
            FROM session
            WHERE session_pk IN (SELECT value FROM json_each($1))",
        postgres: "-- lock_ending_sessions
            SELECT session_pk, state, calls, attempt, due_us
            FROM session
            WHERE session_pk = ANY ($1::bigint[])
            ORDER BY session_pk
            FOR NO KEY UPDATE",
    };
    const SELECT_POLICIES: Statement = among_keys!(
        "-- select_policies_of_ending
        SELECT session_pk, policy_pk
        FROM session_policy
        WHERE session_pk"
    );
    let mut locked = HashMap::new();
    if ends.is_empty() {
        return Ok(locked);
    }
    let keys = || args![key_list(ends.iter().map(|end| end.session_pk.0))];
    for mut row in tx.fetch_all(LOCK_ENDING, keys()).await? {
        let ending = EndingSession {
            state: row.get("state")?,
            calls: row.get("calls")?,
            attempt: row.get("attempt")?,
            due_at: row.get("due_us")?,
            policies: Vec::new(),
        };
        locked.insert(row.get("session_pk")?, ending);
    }
    for mut row in tx.fetch_all(SELECT_POLICIES, keys()).await? {
        if let Some(session) = locked.get_mut(&row.get("session_pk")?) {
            session.policies.push(row.get("policy_pk")?);
        }
    }
    Ok(locked)
}

/// Writes the ends of sessions. Room that their rollouts did not use is given back; a reset has given it back before.
pub(super) async fn write_ended(tx: &mut Tx<'_>, ended: &[EndedSession<'_>], now: Timestamp) -> Result<(), StoreError> {
    const END_SESSION: Statement = Statement::new(
        "-- end_session
        UPDATE session
        SET state = $2, reason = $3, end_digest = $4, outcome = $5, ended_us = $6, purge_us = $7, forget_us = $8,
            due_us = NULL
        WHERE session_pk = $1 AND state IN ('open', 'parked', 'finishing')",
    );
    const END_POLICIES: Statement = Statement::new(
        "-- end_session_policies
        UPDATE session_policy
        SET is_live = 0, is_parked = 0
        WHERE session_pk = $1",
    );
    const DELETE_ADMISSION: Statement = Statement::new(
        "-- delete_session_admission
        DELETE FROM admission
        WHERE admission_id = $1
        RETURNING policy_pk, granted - used AS unused",
    );
    for EndedSession { end, outcome, purge_at, forget_at } in ended {
        let outcome = serde_json::to_string(outcome).expect("an outcome is plain data");
        let values = args![
            end.session_pk,
            end.state,
            end.reason.as_deref(),
            end.request.as_bytes(),
            outcome,
            now,
            *purge_at,
            *forget_at,
        ];
        tx.guarded(END_SESSION, values, 1).await?;
        tx.execute(END_POLICIES, args![end.session_pk]).await?;
        for admission_id in &end.admissions {
            if let Some(mut row) = tx.fetch_optional(DELETE_ADMISSION, args![admission_id.as_bytes()]).await? {
                tx.tallies().add(row.get("policy_pk")?, Tally::Reserved, -row.get::<i64>("unused")?);
            }
        }
    }
    Ok(())
}

macro_rules! select_session {
    ($from:literal, $tail:literal) => {
        select_session!("", $from, $tail)
    };
    ($more:literal, $from:literal, $tail:literal) => {
        concat!(
            "-- select_session
            SELECT s.session_pk, s.session_id, s.state, s.reason, s.spec, s.max_calls, s.calls, s.bytes, s.segments,
                s.tokens, s.is_full, s.notes, s.attempt, s.max_attempts, s.opened_us, s.last_call_us, s.expires_us, s.due_us,
                s.ended_us, s.end_digest, s.outcome",
            $more,
            "
            FROM ",
            $from,
            "session AS s ",
            $tail
        )
    };
}

fn read(mut row: Row) -> Result<Session, StoreError> {
    let session_id: SessionId = row.get("session_id")?;
    let corrupt = |what: &str| StoreError::Corrupt(format!("session {session_id} has {what}"));
    let (spec, outcome): (String, Option<String>) = (row.get("spec")?, row.get("outcome")?);
    Ok(Session {
        session_pk: row.get("session_pk")?,
        session_id,
        state: row.get("state")?,
        reason: row.get("reason")?,
        spec: Arc::new(serde_json::from_str(&spec).map_err(|_| corrupt("a malformed specification"))?),
        policies: Vec::new(),
        max_calls: row.get("max_calls")?,
        calls: row.get("calls")?,
        bytes: row.get("bytes")?,
        segments: row.get("segments")?,
        tokens: row.get("tokens")?,
        is_full: row.get("is_full")?,
        notes: SessionNotes::of_number(row.get("notes")?),
        attempt: row.get("attempt")?,
        max_attempts: row.get("max_attempts")?,
        opened_at: row.get("opened_us")?,
        last_call_at: row.get("last_call_us")?,
        expires_at: row.get("expires_us")?,
        due_at: row.get("due_us")?,
        ended_at: row.get("ended_us")?,
        end: row.get::<Option<[u8; 32]>>("end_digest")?.map(ContentDigest::from_bytes),
        outcome: outcome
            .map(|outcome| serde_json::from_str(&outcome).map_err(|_| corrupt("a malformed outcome")))
            .transpose()?,
    })
}

/// Reads the warnings about the calls of a session.
fn read_warnings(stored: Option<String>) -> Result<Vec<String>, StoreError> {
    let read = stored.map(|stored| serde_json::from_str(&stored)).transpose();
    read.map(Option::unwrap_or_default).map_err(|_| StoreError::Corrupt("a session has malformed warnings".to_owned()))
}

/// Reads sessions of rows, with their policies.
async fn read_all(tx: &mut Tx<'_>, rows: Vec<Row>) -> Result<Vec<Session>, StoreError> {
    const SELECT_SESSION_POLICIES: Statement = Statement {
        sqlite: "-- select_session_policies
            SELECT sp.session_pk, p.name AS policy, sp.run, p.run AS current_run, sp.version,
                p.version AS current_version, p.rules_pk, sp.oldest_version,
                sp.group_size, sp.admission_id, sp.calls, sp.sampled, sp.special_tokens, sp.warnings
            FROM session_policy AS sp
            JOIN policy AS p ON p.policy_pk = sp.policy_pk
            WHERE sp.session_pk IN (SELECT value FROM json_each($1))",
        postgres: "-- select_session_policies
            SELECT sp.session_pk, p.name AS policy, sp.run, p.run AS current_run, sp.version,
                p.version AS current_version, p.rules_pk, sp.oldest_version,
                sp.group_size, sp.admission_id, sp.calls, sp.sampled, sp.special_tokens, sp.warnings
            FROM session_policy AS sp
            CROSS JOIN LATERAL (SELECT name, run, version, rules_pk FROM policy WHERE policy_pk = sp.policy_pk OFFSET 0) AS p
            WHERE sp.session_pk = ANY ($1::bigint[])",
    };
    let mut sessions = rows.into_iter().map(read).collect::<Result<Vec<Session>, _>>()?;
    if sessions.is_empty() {
        return Ok(sessions);
    }
    let mut policies: BTreeMap<SessionPk, Vec<SessionPolicy>> = BTreeMap::new();
    let keys = key_list(sessions.iter().map(|session| session.session_pk.0));
    for mut row in tx.fetch_all(SELECT_SESSION_POLICIES, args![keys]).await? {
        let name: String = row.get("policy")?;
        let (run, current_run): (Run, Run) = (row.get("run")?, row.get("current_run")?);
        let (version, current_version, calls): (_, _, u32) =
            (row.get("version")?, row.get("current_version")?, row.get("calls")?);
        let rules = tx.rules(row.get("rules_pk")?).await?;
        // A call that begins now will be of the current version.
        let oldest = row.get::<Option<Version>>("oldest_version")?;
        let oldest = oldest.unwrap_or(if calls == 0 { current_version } else { version });
        let stale_after = stale_after(&rules.staleness, current_version, oldest).filter(|_| run == current_run);
        let policy = SessionPolicy {
            policy: PolicyName::stored(&name).map_err(|error| StoreError::Corrupt(error.to_string()))?,
            run,
            current_run,
            version,
            current_version,
            stale_after,
            group_size: row.get("group_size")?,
            admission_id: row.get("admission_id")?,
            calls,
            sampled: row.get("sampled")?,
            special_tokens: row.get("special_tokens")?,
            warnings: read_warnings(row.get("warnings")?)?,
        };
        policies.entry(row.get("session_pk")?).or_default().push(policy);
    }
    for session in &mut sessions {
        session.policies = policies.remove(&session.session_pk).unwrap_or_default();
        session.policies.sort_by(|one, other| one.policy.cmp(&other.policy));
    }
    Ok(sessions)
}

pub struct FindSession(pub SessionId);

#[async_trait]
impl Op for FindSession {
    type Output = Option<Session>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const BY_ID: Statement = Statement::new(select_session!("", "WHERE s.session_id = $1"));
        let rows = tx.fetch_all(BY_ID, args![self.0.as_bytes()]).await?;
        Ok(read_all(tx, rows).await?.pop())
    }
}

/// The session of a key, and the attempt that the key belongs to.
pub struct FindSessionOfKey(pub SessionKeyHash);

#[async_trait]
impl Op for FindSessionOfKey {
    type Output = Option<(Session, u32)>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const BY_KEY: Statement = Statement::new(select_session!(
            ", k.attempt AS key_attempt",
            "session_key AS k
            JOIN ",
            "ON s.session_pk = k.session_pk
            WHERE k.hash = $1"
        ));
        let Some(mut row) = tx.fetch_optional(BY_KEY, args![self.0.as_bytes()]).await? else { return Ok(None) };
        let attempt = row.get("key_attempt")?;
        Ok(read_all(tx, vec![row]).await?.pop().map(|session| (session, attempt)))
    }
}

#[async_trait]
impl Op for SessionFilter {
    type Output = Page<Session>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const BY_ROLLOUT: Statement = Statement::new(select_session!(
            "session_policy AS sp
            JOIN policy AS p ON p.policy_pk = sp.policy_pk AND p.run = sp.run
            JOIN ",
            "ON s.session_pk = sp.session_pk
            WHERE p.name = $1 AND sp.rollout_key = $2 AND sp.session_pk > $3 AND sp.session_pk <= $4
                AND (CAST($5 AS TEXT) IS NULL OR s.state = $5)"
        ));
        const BY_POLICY: InOrder = in_order!(
            select_session!(
                "session_policy AS sp
            JOIN policy AS p ON p.policy_pk = sp.policy_pk
            JOIN ",
                "ON s.session_pk = sp.session_pk
            WHERE p.name = $1 AND sp.session_pk > $2 AND sp.session_pk <= $5
                AND (CAST($3 AS TEXT) IS NULL OR s.state = $3)
            ORDER BY sp.session_pk"
            ),
            "LIMIT $4"
        );
        const EXAMINE_SESSIONS: InOrder = examine!(
            "-- examine_sessions",
            "session_pk",
            "session_policy
                    WHERE policy_pk = (SELECT policy_pk FROM policy WHERE name = $4)"
        );
        let policy = self.policy.as_str();
        if let Some(rollout_id) = &self.rollout_id {
            let (above, to) = self.from.range(None);
            let values = args![policy, rollout_id.key(), above, to, self.state];
            let rows = tx.fetch_all(BY_ROLLOUT, values).await?;
            let sessions = read_all(tx, rows).await?;
            return Scan::unfiltered(self.from).page(tx, sessions, u32::MAX, |session| session.session_pk.0).await;
        }
        let scan = match self.state {
            Some(_) => Scan::filtered(tx, self.from, EXAMINE_SESSIONS, args![policy]).await?,
            None => Scan::unfiltered(self.from),
        };
        let (above, to) = scan.range();
        let rows = tx.fetch_all(BY_POLICY.of(self.from), args![policy, above, self.state, self.limit, to]).await?;
        let sessions = read_all(tx, rows).await?;
        scan.page(tx, sessions, self.limit, |session| session.session_pk.0).await
    }
}

/// Stops new calls of open sessions. Returns the sessions in the order of the request; a session that has ended is
/// returned unchanged.
pub struct BeginFinish {
    pub sessions: Vec<SessionId>,
    pub now: Timestamp,
}

#[async_trait]
impl Op for BeginFinish {
    type Output = Result<Vec<Session>, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const STOP_CALLS: Statement = Statement::new(
            "-- stop_session_calls
            UPDATE session
            SET state = 'finishing'
            WHERE session_pk = $1 AND state = 'open'",
        );
        let mut found = Vec::with_capacity(self.sessions.len());
        for session_id in &self.sessions {
            let Some(session) = FindSession(*session_id).run(tx).await? else {
                return Ok(Err(Refusal::Unknown("the session")));
            };
            found.push(session);
        }
        // The rows are locked in the order of their keys, as everywhere.
        let mut order: Vec<usize> = (0..found.len()).collect();
        order.sort_by_key(|&index| found[index].session_pk);
        for index in order {
            let session_pk = found[index].session_pk;
            let Some(locked) = calls::Recording::lock(tx, session_pk).await? else { continue };
            if locked.state.takes_calls() {
                // A parked session is due when it expires, or was due because its room is needed. Somebody is there now.
                parked::unpark(tx, session_pk, locked.state, locked.due_at(self.now)).await?;
                tx.guarded(STOP_CALLS, args![session_pk], 1).await?;
                parked::moved(tx, session_pk, SessionState::Open, SessionState::Finishing).await?;
            }
            // The rows are read again under the lock.
            if let Some(session) = FindSession(self.sessions[index]).run(tx).await? {
                found[index] = session;
            }
        }
        Ok(Ok(found))
    }
}

/// Permits new calls of sessions whose finish was refused.
pub struct ReopenSessions(pub Vec<SessionId>);

#[async_trait]
impl Op for ReopenSessions {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        const REOPEN: Statement = Statement::new(
            "-- reopen_session
            UPDATE session
            SET state = 'open'
            WHERE session_id = $1 AND state = 'finishing'
            RETURNING session_pk",
        );
        // In the order of their ids, which is the order in which replicas lock several sessions here.
        let mut sessions = self.0.clone();
        sessions.sort_unstable();
        for session_id in sessions {
            let Some(mut row) = tx.fetch_optional(REOPEN, args![session_id.as_bytes()]).await? else { continue };
            parked::moved(tx, row.get("session_pk")?, SessionState::Finishing, SessionState::Open).await?;
        }
        Ok(())
    }
}
