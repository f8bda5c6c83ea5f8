//! Opening of sessions, under the locks of the rows of their policies.
use std::sync::Arc;

use async_trait::async_trait;
use forebay_domain::{
    admission::{
        Room,
        refused::RoomFor,
        room::{Asked, AskedGroup},
    },
    clock::Timestamp,
    credit,
    ids::{GroupId, IdKey, SessionPk},
    ingest::{decide, new_rollout::NewRollout},
    policies::Policy,
    refusal::Refusal,
    rules::Rules,
    session::{KEYS_MAX, NewSession, OpenedSession, SessionKeyHash, check_rules},
    states::{SessionState, Verdict},
    tally::Tally,
};

use crate::{
    error::StoreError,
    op::Op,
    ops::{
        admission::{self, Reservation},
        evals, fill, policy, quotas,
    },
    sql::{Statement, Tx, args},
};

/// Seconds for which room stays reserved after a session should have expired, in case the sweep is late.
const ADMISSION_GRACE_S: u64 = 3_600;

#[async_trait]
impl Op for NewSession {
    type Output = Result<OpenedSession, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let mut policies = Vec::with_capacity(self.probes.len());
        // The probes are in the order of the policies' names, so replicas lock the rows in the same order.
        for probe in self.probes.iter() {
            let Some(policy) = policy::lock(tx, &probe.policy).await? else {
                return Ok(Err(Refusal::UnknownPolicy(probe.policy.clone())));
            };
            policies.push(policy);
        }
        for (policy, probe) in policies.iter().zip(self.probes.iter()) {
            if let Some(before) = opened_before(self, tx, policy, probe).await? {
                return Ok(before);
            }
        }
        let (mut sizes, mut max_calls, mut max_attempts) =
            (Vec::with_capacity(policies.len()), self.max_calls, u32::MAX);
        for (index, (policy, probe)) in policies.iter().zip(self.probes.iter()).enumerate() {
            match check(self, tx, policy, probe, index).await? {
                Ok((size, rules)) => {
                    sizes.push(size);
                    max_attempts = max_attempts.min(policy.rules.sessions.max_attempts);
                    // No more calls than the rollout may have turns: a session that is full ends as `truncated`, and one
                    // with too many turns would be refused its end.
                    if rules.compare_turns() {
                        max_calls = max_calls.min(credit::turns_max(size) as u32);
                    }
                }
                Err(refusal) => return Ok(Err(refusal)),
            }
        }
        insert(self, tx, &policies, &sizes, [max_calls, max_attempts]).await?;
        let Self { session_id, expires_at, .. } = *self;
        Ok(Ok(OpenedSession { session_id, expires_at, duplicate: false, attempt: 1, max_attempts }))
    }
}

/// The answer if a session of the rollout was opened before; none if it was not.
async fn opened_before(
    new: &NewSession,
    tx: &mut Tx<'_>,
    policy: &Policy,
    probe: &NewRollout,
) -> Result<Option<Result<OpenedSession, Refusal>>, StoreError> {
    // The lock keeps the session from ending before the key is there.
    const FIND_OPENED: Statement = Statement {
        sqlite: "-- find_opened_session
            SELECT s.session_pk, s.session_id, s.state, s.attempt, s.max_attempts, s.content_digest, s.expires_us
            FROM session_policy AS sp
            JOIN session AS s ON s.session_pk = sp.session_pk
            WHERE sp.policy_pk = $1 AND sp.run = $2 AND sp.rollout_key = $3",
        postgres: "-- find_opened_session
            SELECT s.session_pk, s.session_id, s.state, s.attempt, s.max_attempts, s.content_digest, s.expires_us
            FROM session_policy AS sp
            JOIN session AS s ON s.session_pk = sp.session_pk
            WHERE sp.policy_pk = $1 AND sp.run = $2 AND sp.rollout_key = $3
            FOR NO KEY UPDATE OF s",
    };
    const COUNT_KEYS: Statement = Statement::new(
        "-- count_session_keys
        SELECT COUNT(*) AS keys
        FROM session_key
        WHERE session_pk = $1 AND attempt = $2",
    );
    let key = probe.rollout_id.key();
    let row = tx.fetch_optional(FIND_OPENED, args![policy.policy_pk, policy.run, key]).await?;
    let Some(mut row) = row else { return Ok(None) };
    let (session_pk, state): (SessionPk, SessionState) = (row.get("session_pk")?, row.get("state")?);
    if row.get::<Vec<u8>>("content_digest")? != new.content.as_bytes() {
        return Ok(Some(Err(Refusal::SessionConflict(probe.rollout_id.to_string()))));
    }
    if !state.takes_calls() {
        return Ok(Some(Err(Refusal::SessionEnded(state))));
    }
    let attempt: u32 = row.get("attempt")?;
    let keys: u32 = tx.fetch_one(COUNT_KEYS, args![session_pk, attempt]).await?.get("keys")?;
    if keys >= KEYS_MAX {
        return Ok(Some(Err(Refusal::TooManySessionKeys(KEYS_MAX))));
    }
    insert_key(tx, session_pk, attempt, new.key).await?;
    let (session_id, expires_at) = (row.get("session_id")?, row.get("expires_us")?);
    Ok(Some(Ok(OpenedSession {
        session_id,
        expires_at,
        duplicate: true,
        attempt,
        max_attempts: row.get("max_attempts")?,
    })))
}

/// Refuses what ingest would refuse at the end of the session, and a rollout for which there is no room. Returns the
/// size of the group and its rules.
async fn check(
    new: &NewSession,
    tx: &mut Tx<'_>,
    policy: &Policy,
    probe: &NewRollout,
    index: usize,
) -> Result<Result<(u32, Arc<Rules>), Refusal>, StoreError> {
    const FIND_ROLLOUT: Statement = Statement::new(
        "-- find_rollout_of_session
        SELECT rollout_pk, verdict
        FROM rollout
        WHERE policy_pk = $1 AND run = $2 AND rollout_key = $3",
    );
    const FIND_GROUP: Statement = Statement::new(
        "-- find_group_of_session
        SELECT rules_pk, state, size, kept, masked, dropped, scoring
        FROM rollout_group
        WHERE policy_pk = $1 AND run = $2 AND group_key = $3",
    );
    let rollout_key = probe.rollout_id.key();
    let stored = args![policy.policy_pk, policy.run, rollout_key];
    if let Some(mut row) = tx.fetch_optional(FIND_ROLLOUT, stored).await? {
        let (rollout_id, verdict): (_, Verdict) = (probe.rollout_id.to_string(), row.get("verdict")?);
        return Ok(Err(Refusal::RolloutConflict { rollout_id, index, verdict }));
    }
    if policy.name.is_evaluations()
        && let Some(trained) = policy::find(tx, &policy.name.public()).await?
        && !evals::known(tx, &trained, [rollout_key]).await?.is_empty()
    {
        let rollout_id = probe.rollout_id.to_string();
        return Ok(Err(Refusal::RolloutConflict { rollout_id, index, verdict: Verdict::Kept }));
    }
    let (group_id, group_key) = group_of(probe);
    let group = args![policy.policy_pk, policy.run, group_key];
    let mut rules = policy.rules.clone();
    let (mut size, mut is_open, mut left) = (None, false, None);
    if let Some(mut row) = tx.fetch_optional(FIND_GROUP, group).await? {
        rules = tx.rules(row.get("rules_pk")?).await?;
        let found = fill(&mut row, "state")?;
        (size, is_open) = (Some(found.size), found.state.is_open());
        left = is_open.then(|| found.places_left(rules.group.on_drop));
    }
    let live = LiveSessions::of(tx, policy, group_key).await?;
    let (reserved, named_size) = admission::reserved_of(tx, policy, group_key).await?;
    let size = size.or(live.group_size).or(named_size);
    if let (Some(size), Some(declared)) = (size, probe.group_size)
        && declared != size
    {
        return Ok(Err(Refusal::GroupSizeConflict { group_id: group_id.as_str().to_owned(), index, size }));
    }
    let checked = decide::check(&rules, probe, Room::Reserved(policy.version), size.unwrap_or(rules.group.size));
    if let Err(refusal) = checked.and_then(|()| check_rules(&policy.name, &rules)) {
        return Ok(Err(refusal));
    }
    let size = size.or(probe.group_size).unwrap_or(rules.group.size);
    // Room is asked for by the rules of now, also if the group was opened under others.
    let group = AskedGroup {
        size,
        // Sessions of a decided group may go on, so that one that begins beside them is not refused either.
        missing: left.unwrap_or(size),
        reserved: reserved.max(live.sessions),
        has_begun: is_open || live.sessions > 0 || reserved > 0,
    };
    let environment = new.spec.environment.as_deref();
    if let Some(rule) = quotas::full_of_sessions(tx, &new.quotas, &policy.name).await? {
        admission::note(tx, policy, RoomFor::Session, environment, Some(&rule), new.now).await?;
        return Ok(Err(Refusal::NoRoom(policy.name.clone(), rule)));
    }
    let asked = Asked { rollouts: 1, group: Some(group), environment };
    let granted = admission::grant(tx, policy, RoomFor::Session, &asked, new.now).await?;
    Ok(granted.map(|_| (size, rules)).map_err(|rule| Refusal::NoRoom(policy.name.clone(), rule)))
}

async fn insert(
    new: &NewSession,
    tx: &mut Tx<'_>,
    policies: &[Policy],
    sizes: &[u32],
    [max_calls, max_attempts]: [u32; 2],
) -> Result<(), StoreError> {
    const INSERT_SESSION: Statement = Statement::new(
        "-- insert_session
        INSERT INTO session (
            session_id, state, spec, content_digest, max_calls, idle_s, calls, bytes, segments, tokens, is_full,
            opened_us, expires_us, due_us, attempt, max_attempts
        )
        VALUES ($1, 'open', $2, $3, $4, $5, 0, 0, 0, 0, 0, $6, $7, $8, 1, $9)
        RETURNING session_pk",
    );
    const INSERT_SESSION_POLICY: Statement = Statement::new(
        "-- insert_session_policy
        INSERT INTO session_policy (
            session_pk, policy_pk, run, rollout_key, group_key, group_size, admission_id, version, calls, sampled,
            is_live
        )
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 0, 0, 1)",
    );
    let spec = serde_json::to_string(&*new.spec).expect("a specification is plain data");
    let due_at = new.expires_at.min(new.now.plus_seconds(new.idle_s));
    let values = args![
        new.session_id.as_bytes(),
        spec,
        new.content.as_bytes(),
        max_calls,
        new.idle_s,
        new.now,
        new.expires_at,
        due_at,
        max_attempts,
    ];
    let session_pk: SessionPk = tx.fetch_one(INSERT_SESSION, values).await?.get("session_pk")?;
    let reserved_until: Timestamp = new.expires_at.plus_seconds(ADMISSION_GRACE_S);
    for (((policy, probe), size), admission_id) in
        policies.iter().zip(new.probes.iter()).zip(sizes).zip(&new.admissions)
    {
        let rollout_key = probe.rollout_id.key();
        let (_, group_key) = group_of(probe);
        let values = args![
            session_pk,
            policy.policy_pk,
            policy.run,
            rollout_key,
            group_key,
            *size,
            admission_id.as_bytes(),
            policy.version,
        ];
        tx.guarded(INSERT_SESSION_POLICY, values, 1).await?;
        let reservation = Reservation {
            admission_id: *admission_id,
            rollouts: 1,
            expires_at: reserved_until,
            group: Some((group_key, *size)),
            environment: new.spec.environment.as_deref(),
            granted_at: None,
        };
        admission::reserve(tx, policy, reservation).await?;
        tx.tallies().add(policy.policy_pk, Tally::Sessions(SessionState::Open), 1);
    }
    insert_key(tx, session_pk, 1, new.key).await
}

/// The group of a rollout, and its key.
fn group_of(probe: &NewRollout) -> (GroupId, IdKey) {
    let group_id = probe.group();
    let key = group_id.key();
    (group_id, key)
}

pub(super) async fn insert_key(
    tx: &mut Tx<'_>,
    session: SessionPk,
    attempt: u32,
    key: SessionKeyHash,
) -> Result<(), StoreError> {
    const INSERT_SESSION_KEY: Statement = Statement::new(
        "-- insert_session_key
        INSERT INTO session_key (hash, session_pk, attempt)
        VALUES ($1, $2, $3)",
    );
    tx.guarded(INSERT_SESSION_KEY, args![key.as_bytes(), session, attempt], 1).await
}

/// The live sessions of a group.
struct LiveSessions {
    sessions: u64,
    /// The size of the group that they were opened with.
    group_size: Option<u32>,
}

impl LiveSessions {
    async fn of(tx: &mut Tx<'_>, policy: &Policy, group_key: IdKey) -> Result<Self, StoreError> {
        const COUNT_LIVE_SESSIONS: Statement = Statement::new(
            "-- count_live_sessions
            SELECT COUNT(*) AS sessions, MAX(group_size) AS group_size
            FROM session_policy
            WHERE policy_pk = $1 AND run = $2 AND group_key = $3 AND is_live = 1",
        );
        let mut row = tx.fetch_one(COUNT_LIVE_SESSIONS, args![policy.policy_pk, policy.run, group_key]).await?;
        Ok(Self { sessions: row.get("sessions")?, group_size: row.get("group_size")? })
    }
}
