//! Work for scorers in the store.
//!
//! Items come and go under the lock of their group. Leases are taken and end without that lock: they lock the rows of
//! items. Who looks for work passes over rows that others have locked, so that scorers do not wait for each other.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{GroupPk, LeaseToken, PolicyName, RequestId, RolloutPk},
    policies::Policy,
    refusal::{LostLease, Refusal},
    samples::pages,
    score_work::{
        ExtendWork, ExtendedWork, LeaseWork, LeasedWork, ROW_BYTES_MAX, ReleaseWork, RetryWork, WorkEvent, WorkItem,
        WorkRollout,
    },
    scoring::NewScore,
};
use forebay_wire::ScoreWorkPer;

use crate::{
    error::StoreError,
    op::Op,
    ops::{group::LockedGroup, policy, read_json, read_sealed},
    sql::{Arg, InsertRows, Row, Statement, Tx, among_keys, args, key_list},
};

/// The key that stands for all rollouts of a group.
const WHOLE_GROUP: RolloutPk = RolloutPk(0);

/// Rollouts of a group that are read at once.
const ROWS_PAGE: usize = 1_024;

/// How exactly is known when a scorer last asked.
const ASKED_US: i64 = 5_000_000;

pub(in crate::ops) static INSERT_WORK: InsertRows = InsertRows::new(
    "insert_score_work",
    "score_work",
    "policy_pk, group_pk, rollout_pk, name, state, since_us, attempts, attempts_max",
);

/// The rows of the work that a rollout which lacks these scores makes.
pub(in crate::ops) fn rows_of_rollout<'a>(
    group: &'a LockedGroup,
    rollout: RolloutPk,
    missing: &'a [String],
    now: Timestamp,
) -> impl Iterator<Item = Vec<Arg>> + 'a {
    missing.iter().filter_map(move |name| {
        let work = group.rules.work(name).filter(|work| work.per == ScoreWorkPer::Rollout)?;
        let (group_pk, policy_pk) = (group.group_pk, group.policy_pk);
        Some(args![policy_pk, group_pk, rollout, &**name, "open", now, 0_i64, work.max_attempts])
    })
}

/// Makes work of a group some of whose rollouts lack these scores, and opens it once the group takes no more rollouts.
pub(in crate::ops) async fn of_group(
    tx: &mut Tx<'_>,
    group: &LockedGroup,
    missing: &BTreeSet<&str>,
    now: Timestamp,
) -> Result<(), StoreError> {
    // Work that is there already keeps its place, its lease and its attempts.
    const PUT_GROUP_WORK: Statement = Statement::new(
        "-- put_group_work
        INSERT INTO score_work (policy_pk, group_pk, rollout_pk, name, state, since_us, attempts, attempts_max)
        VALUES ($1, $2, 0, $3, 'open', $4, 0, $5)
        ON CONFLICT (group_pk, name, rollout_pk) DO NOTHING",
    );
    const OPEN_GROUP_WORK: Statement = Statement::new(
        "-- open_group_work
        UPDATE score_work
        SET since_us = $2
        WHERE group_pk = $1 AND rollout_pk = 0 AND since_us > $2",
    );
    // The scorer of a group that does not get full sees it when it would have been decided, or while there is still half
    // of the time to score it.
    let deadline = group.opened_at.plus_seconds(group.rules.group.timeout_s);
    let since = deadline.min(now.plus_seconds(group.rules.scores.timeout_s / 2));
    for name in missing {
        let Some(work) = group.rules.work(name).filter(|work| work.per == ScoreWorkPer::Group) else { continue };
        let values = args![group.policy_pk, group.group_pk, *name, since, work.max_attempts];
        tx.execute(PUT_GROUP_WORK, values).await?;
    }
    let has_work = group.rules.scores.work.values().any(|work| work.per == ScoreWorkPer::Group);
    if has_work && group.fill.filled(group.rules.group.on_drop).is_some() {
        tx.execute(OPEN_GROUP_WORK, args![group.group_pk, now]).await?;
    }
    Ok(())
}

/// Work whose lease came with a score.
pub(super) struct Held {
    work_pk: i64,
    group: GroupPk,
    rollout: RolloutPk,
    name: String,
    pub(super) scorer: String,
    pub(super) attempt: u32,
    attempts_max: u32,
    policy: PolicyName,
    /// Why its holder could not give a score.
    pub(super) failed: Option<String>,
}

/// The work of the leases that came with scores, if these are alive. The groups of the scores are locked.
pub(super) async fn held(
    tx: &mut Tx<'_>,
    scores: &[NewScore],
    now: Timestamp,
) -> Result<HashMap<String, Held>, StoreError> {
    const LOCK_HELD_WORK: Statement = Statement {
        sqlite: "-- lock_held_work
            SELECT work_pk, group_pk, rollout_pk, name, scorer, attempts, attempts_max
            FROM score_work
            WHERE lease = $1 AND expires_us > $2",
        postgres: "-- lock_held_work
            SELECT work_pk, group_pk, rollout_pk, name, scorer, attempts, attempts_max
            FROM score_work
            WHERE lease = $1 AND expires_us > $2
            FOR UPDATE",
    };
    // In the order of the leases, in which two requests with the same ones lock their rows.
    let mut leases: BTreeMap<&str, &PolicyName> = BTreeMap::new();
    for new in scores {
        leases.extend(new.lease.as_ref().map(|lease| (lease.as_str(), &new.policy)));
    }
    let mut found = HashMap::new();
    for (lease, policy) in leases {
        let Some(mut row) = tx.fetch_optional(LOCK_HELD_WORK, args![lease, now]).await? else { continue };
        let held = Held {
            work_pk: row.get("work_pk")?,
            group: row.get("group_pk")?,
            rollout: row.get("rollout_pk")?,
            name: row.get("name")?,
            scorer: row.get("scorer")?,
            attempt: row.get::<u32>("attempts")? + 1,
            attempts_max: row.get("attempts_max")?,
            policy: policy.clone(),
            failed: None,
        };
        found.insert(lease.to_owned(), held);
    }
    Ok(found)
}

impl Held {
    /// The work of a lease, if it is about this score of this rollout.
    pub(super) fn of<'h>(
        held: &'h mut HashMap<String, Self>,
        lease: &LeaseToken,
        (group, rollout, name): (GroupPk, RolloutPk, &str),
        index: usize,
    ) -> Result<&'h mut Self, Refusal> {
        let work = held.get_mut(lease.as_str()).ok_or(Refusal::LeaseLost(LostLease::OfWork))?;
        let is_about = work.group == group && (work.rollout == WHOLE_GROUP || work.rollout == rollout);
        if work.name != name {
            let detail = format!("is a lease of the score `{}`, not of `{name}`", work.name);
            return Err(Refusal::invalid(format!("/{index}/lease"), detail));
        }
        if !is_about {
            return Err(Refusal::invalid(format!("/{index}/lease"), "is a lease of the score of another rollout"));
        }
        Ok(work)
    }
}

/// Ends the work for scores that were given, and the attempts that failed. Returns what happened to work that was held.
pub(super) async fn settle(
    tx: &mut Tx<'_>,
    given: &BTreeSet<(GroupPk, RolloutPk, &str, ScoreWorkPer)>,
    held: &HashMap<String, Held>,
) -> Result<Vec<(PolicyName, WorkEvent)>, StoreError> {
    const END_WORK: Statement = Statement::new(
        "-- end_score_work
        DELETE FROM score_work
        WHERE group_pk = $1 AND rollout_pk = $2 AND name = $3
        RETURNING work_pk",
    );
    let (mut ended, mut reopened): (HashSet<i64>, HashSet<i64>) = (HashSet::new(), HashSet::new());
    let mut of_groups = BTreeSet::new();
    for (group, rollout, name, per) in given {
        match per {
            ScoreWorkPer::Group => {
                of_groups.insert((*group, *name));
            }
            ScoreWorkPer::Rollout => {
                for mut row in tx.fetch_all(END_WORK, args![*group, *rollout, *name]).await? {
                    ended.insert(row.get("work_pk")?);
                }
            }
        }
    }
    for (group, name) in of_groups {
        for mut row in end_of_group_if_scored(tx, group, name).await? {
            ended.insert(row.get("work_pk")?);
        }
        for mut row in reopen_if_scored(tx, group, name).await? {
            reopened.insert(row.get("work_pk")?);
        }
    }
    let mut events = Vec::new();
    for work in held.values() {
        if ended.contains(&work.work_pk) {
            events.push((work.policy.clone(), WorkEvent::Settled));
        } else if reopened.contains(&work.work_pk) {
            events.push((work.policy.clone(), WorkEvent::Reopened));
        } else if let Some(reason) = &work.failed {
            end_attempts(tx, vec![work.work_pk], Some(reason)).await?;
            let is_last = work.attempt >= work.attempts_max;
            events.push((work.policy.clone(), if is_last { WorkEvent::Exhausted } else { WorkEvent::Failed }));
        }
    }
    Ok(events)
}

/// Opens the work of a whole group again for rollouts that came while it was leased, if its holder has scored all others.
async fn reopen_if_scored(tx: &mut Tx<'_>, group: GroupPk, name: &str) -> Result<Vec<Row>, StoreError> {
    const REOPEN_GROUP_WORK: Statement = Statement {
        sqlite: "-- reopen_group_work
            UPDATE score_work
            SET state = 'open', lease = NULL, scorer = NULL, request_id = NULL, expires_us = NULL
            WHERE group_pk = $1 AND rollout_pk = 0 AND name = $2 AND state = 'leased' AND NOT EXISTS (
                SELECT 1
                FROM scoring AS w, json_each(w.missing) AS m
                WHERE w.group_pk = $1 AND w.rollout_pk <= score_work.seen_pk AND m.value = $2
            )
            RETURNING work_pk",
        postgres: "-- reopen_group_work
            UPDATE score_work
            SET state = 'open', lease = NULL, scorer = NULL, request_id = NULL, expires_us = NULL
            WHERE group_pk = $1 AND rollout_pk = 0 AND name = $2 AND state = 'leased' AND NOT EXISTS (
                SELECT 1
                FROM scoring AS w
                WHERE w.group_pk = $1 AND w.rollout_pk <= score_work.seen_pk AND jsonb_exists(w.missing::jsonb, $2)
            )
            RETURNING work_pk",
    };
    tx.fetch_all(REOPEN_GROUP_WORK, args![group, name]).await
}

/// Ends the work of a whole group for a score that none of its rollouts lacks.
async fn end_of_group_if_scored(tx: &mut Tx<'_>, group: GroupPk, name: &str) -> Result<Vec<Row>, StoreError> {
    const END_GROUP_WORK: Statement = Statement {
        sqlite: "-- end_group_work
            DELETE FROM score_work
            WHERE group_pk = $1 AND rollout_pk = 0 AND name = $2 AND NOT EXISTS (
                SELECT 1
                FROM scoring AS w, json_each(w.missing) AS m
                WHERE w.group_pk = $1 AND m.value = $2
            )
            RETURNING work_pk",
        postgres: "-- end_group_work
            DELETE FROM score_work
            WHERE group_pk = $1 AND rollout_pk = 0 AND name = $2 AND NOT EXISTS (
                SELECT 1
                FROM scoring AS w
                WHERE w.group_pk = $1 AND jsonb_exists(w.missing::jsonb, $2)
            )
            RETURNING work_pk",
    };
    tx.fetch_all(END_GROUP_WORK, args![group, name]).await
}

/// Ends leases without a score. Work that has attempts left is open again, in its old place.
async fn end_attempts(tx: &mut Tx<'_>, work: Vec<i64>, failure: Option<&str>) -> Result<(), StoreError> {
    const END_ATTEMPTS: Statement = among_keys!(
        "-- end_attempts
        UPDATE score_work
        SET attempts = attempts + 1, failure = $2, lease = NULL, scorer = NULL, request_id = NULL, expires_us = NULL,
            state = CASE WHEN attempts + 1 >= attempts_max THEN 'exhausted' ELSE 'open' END
        WHERE state = 'leased' AND work_pk"
    );
    let count = work.len();
    tx.guarded(END_ATTEMPTS, args![key_list(work), failure], count).await
}

/// Ends the work for rollouts of a group that wait no more, and that for the whole group if none waits for its score.
pub(super) async fn end_of_rollouts(
    tx: &mut Tx<'_>,
    group: &LockedGroup,
    rollouts: Vec<i64>,
) -> Result<(), StoreError> {
    const END_WORK_OF: Statement = among_keys!(
        "-- end_score_work_of
        DELETE FROM score_work
        WHERE group_pk = $2 AND rollout_pk"
    );
    if !group.rules.have_work() {
        return Ok(());
    }
    tx.execute(END_WORK_OF, args![key_list(rollouts), group.group_pk]).await?;
    for (name, work) in &group.rules.scores.work {
        if work.per == ScoreWorkPer::Group {
            end_of_group_if_scored(tx, group.group_pk, name).await?;
            reopen_if_scored(tx, group.group_pk, name).await?;
        }
    }
    Ok(())
}

/// Ends all work of groups that are decided.
pub(super) async fn end_of_groups(tx: &mut Tx<'_>, groups: Vec<i64>) -> Result<(), StoreError> {
    const END_WORK_OF_GROUPS: Statement = among_keys!(
        "-- end_score_work_of_groups
        DELETE FROM score_work
        WHERE group_pk"
    );
    tx.execute(END_WORK_OF_GROUPS, args![key_list(groups)]).await.map(drop)
}

/// An item that is leased, or that can be.
struct Candidate {
    work_pk: i64,
    since: Timestamp,
    group: GroupPk,
    group_id: String,
    rollout: RolloutPk,
    name: String,
    attempt: u32,
    attempts_max: u32,
    lease: Option<LeaseToken>,
}

fn read_candidate(mut row: Row) -> Result<Candidate, StoreError> {
    Ok(Candidate {
        work_pk: row.get("work_pk")?,
        since: row.get("since_us")?,
        group: row.get("group_pk")?,
        group_id: row.get("group_id")?,
        rollout: row.get("rollout_pk")?,
        name: row.get("name")?,
        attempt: row.get::<u32>("attempts")? + 1,
        attempts_max: row.get("attempts_max")?,
        lease: row.get::<Option<String>>("lease")?.as_deref().map(LeaseToken::presented),
    })
}

impl Candidate {
    /// The rollouts that it is about. As long as the item is there, at least one of them lacks the score.
    async fn rollouts(&self, tx: &mut Tx<'_>) -> Result<Vec<WorkRollout>, StoreError> {
        const SELECT_WORK_ROLLOUT: Statement = Statement::new(
            "-- select_work_rollout
            SELECT r.rollout_pk, r.rollout_id, r.verdict, r.reward, r.components, r.status, r.policy_version,
                r.segments, r.tokens, r.unpacked_bytes, r.trained_spans, r.seal, w.missing, s.value AS sent
            FROM rollout AS r
            JOIN scoring AS w ON w.rollout_pk = r.rollout_pk
            LEFT JOIN score AS s
                ON s.rollout_pk = r.rollout_pk AND s.name = 'reward' AND s.scorer = '' AND s.applied = 1
            WHERE r.rollout_pk = $1",
        );
        const SELECT_WORK_GROUP: Statement = Statement::new(
            "-- select_work_group
            SELECT r.rollout_pk, r.rollout_id, r.verdict, r.reward, r.components, r.status, r.policy_version,
                r.segments, r.tokens, r.unpacked_bytes, r.trained_spans, r.seal, w.missing, s.value AS sent
            FROM rollout AS r
            LEFT JOIN scoring AS w ON w.rollout_pk = r.rollout_pk
            LEFT JOIN score AS s
                ON s.rollout_pk = r.rollout_pk AND s.name = 'reward' AND s.scorer = '' AND s.applied = 1
            WHERE r.group_pk = $1 AND r.rollout_pk > $2 AND r.verdict IN ('kept', 'masked')
            ORDER BY r.rollout_pk
            LIMIT $3",
        );
        if self.rollout != WHOLE_GROUP {
            let rows = tx.fetch_all(SELECT_WORK_ROLLOUT, args![self.rollout]).await?;
            return rows.into_iter().map(|row| self.read(row)).collect();
        }
        // A group may have 65,536 rollouts, each with names of 16 KiB.
        let (mut found, mut bytes): (Vec<WorkRollout>, u64) = (Vec::new(), 0);
        loop {
            let after = found.last().map_or(RolloutPk(0), |rollout| rollout.row.rollout_pk);
            let rows = tx.fetch_all(SELECT_WORK_GROUP, args![self.group, after, ROWS_PAGE]).await?;
            let is_last = rows.len() < ROWS_PAGE;
            for row in rows {
                let mut rollout = self.read(row)?;
                bytes += rollout.row_bytes();
                if bytes > ROW_BYTES_MAX {
                    rollout.reward_components.clear();
                    rollout.is_cut = true;
                }
                found.push(rollout);
            }
            if is_last {
                return Ok(found);
            }
        }
    }

    fn read(&self, mut row: Row) -> Result<WorkRollout, StoreError> {
        Ok(WorkRollout {
            row: read_sealed(&mut row, self.group_id.clone())?,
            scoring: read_json(&mut row, "missing")?.unwrap_or_default(),
            status: row.get("status")?,
            reward: row.get("sent")?,
            reward_components: read_json(&mut row, "components")?.unwrap_or_default(),
            is_cut: false,
        })
    }
}

#[async_trait]
impl Op for LeaseWork {
    type Output = Result<LeasedWork, Refusal>;

    const ABANDONABLE: bool = true;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const LEASE_WORK: Statement = Statement::new(
            "-- lease_work
            UPDATE score_work
            SET state = 'leased', lease = $2, scorer = $3, request_id = $4, expires_us = $5, seen_pk = $6
            WHERE work_pk = $1 AND (state = 'open' OR lease = $2)",
        );
        let Some(policy) = policy::find(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        let evaluations = policy::find(tx, &self.policy.evaluations()).await?;
        let policies: Vec<&Policy> = [Some(&policy), evaluations.as_ref()].into_iter().flatten().collect();
        if let Err(refusal) = asked(self, tx, &policies).await? {
            return Ok(Err(refusal));
        }
        let mut candidates = match &self.request_id {
            Some(request) => held_by(self, tx, &policies, request).await?,
            None => Vec::new(),
        };
        let held = !candidates.is_empty();
        let (mut left, mut next) = (false, None);
        if !held {
            (candidates, left) = open(self, tx, &policies).await?;
            next = if candidates.is_empty() { opens_next(self, tx, &policies).await? } else { None };
        }
        let expires_at = self.now.plus_seconds(self.ttl_s.unwrap_or(policy.rules.lease.ttl_s));
        let (mut items, mut bytes, mut row_bytes): (Vec<WorkItem>, u64, u64) = (Vec::new(), 0, 0);
        for candidate in candidates {
            let rollouts = candidate.rollouts(tx).await?;
            bytes += pages::bytes_of(&rollouts);
            row_bytes += rollouts.iter().map(WorkRollout::row_bytes).sum::<u64>();
            if !held && !items.is_empty() && (row_bytes > ROW_BYTES_MAX || bytes > self.bytes_max) {
                left = true;
                break;
            }
            let seen = rollouts.last().map(|rollout| rollout.row.rollout_pk);
            let lease = candidate.lease.unwrap_or_else(LeaseToken::mint);
            let request = self.request_id.as_ref().map(RequestId::as_str);
            let values = args![candidate.work_pk, lease.as_str(), &*self.scorer, request, expires_at, seen];
            tx.guarded(LEASE_WORK, values, 1).await?;
            items.push(WorkItem {
                lease,
                expires_at,
                attempt: candidate.attempt,
                attempts_max: candidate.attempts_max,
                name: candidate.name,
                per: if candidate.rollout == WHOLE_GROUP { ScoreWorkPer::Group } else { ScoreWorkPer::Rollout },
                group_id: candidate.group_id,
                rollouts,
            });
        }
        Ok(Ok(LeasedWork { items, held, left, next }))
    }
}

/// Notes that a scorer asks. Refuses names that no rules make work of, and that there is none of.
async fn asked(lease: &LeaseWork, tx: &mut Tx<'_>, policies: &[&Policy]) -> Result<Result<(), Refusal>, StoreError> {
    const FIND_WORK_NAMED: Statement = Statement::new(
        "-- find_work_named
        SELECT work_pk
        FROM score_work
        WHERE policy_pk = $1 AND name = $2
        LIMIT 1",
    );
    // A statement that changes nothing locks nothing, so that scorers do not wait for each other.
    const NOTE_ASKED: Statement = Statement::new(
        "-- note_asked
        UPDATE score_asked
        SET asked_us = $3
        WHERE policy_pk = $1 AND name = $2 AND asked_us < $4",
    );
    const FIRST_ASKED: Statement = Statement::new(
        "-- first_asked
        INSERT INTO score_asked (policy_pk, name, asked_us)
        VALUES ($1, $2, $3)
        ON CONFLICT (policy_pk, name) DO NOTHING",
    );
    // The first one is what callers know.
    let policy = policies[0];
    for name in &lease.names {
        let mut is_known = policy.rules.work(name).is_some();
        for policy in policies {
            if !is_known {
                is_known = tx.fetch_optional(FIND_WORK_NAMED, args![policy.policy_pk, &**name]).await?.is_some();
            }
        }
        if !is_known {
            let known = policy.rules.scores.work.keys().cloned().collect();
            return Ok(Err(Refusal::UnknownWork { name: name.clone(), policy: policy.name.clone(), known }));
        }
    }
    for name in &lease.names {
        let before = Timestamp::from_micros(lease.now.as_micros() - ASKED_US);
        if tx.execute(NOTE_ASKED, args![policy.policy_pk, &**name, lease.now, before]).await? == 0 {
            tx.execute(FIRST_ASKED, args![policy.policy_pk, &**name, lease.now]).await?;
        }
    }
    Ok(Ok(()))
}

/// What the same request holds.
async fn held_by(
    lease: &LeaseWork,
    tx: &mut Tx<'_>,
    policies: &[&Policy],
    request: &RequestId,
) -> Result<Vec<Candidate>, StoreError> {
    const LOCK_WORK_OF_REQUEST: Statement = Statement {
        sqlite: "-- lock_work_of_request
            SELECT w.work_pk, w.since_us, w.group_pk, g.group_id, w.rollout_pk, w.name, w.attempts, w.attempts_max,
                w.lease
            FROM score_work AS w
            JOIN rollout_group AS g ON g.group_pk = w.group_pk
            WHERE w.policy_pk = $1 AND w.scorer = $2 AND w.request_id = $3 AND w.expires_us > $4
            ORDER BY w.since_us, w.work_pk",
        postgres: "-- lock_work_of_request
            SELECT w.work_pk, w.since_us, w.group_pk, g.group_id, w.rollout_pk, w.name, w.attempts, w.attempts_max,
                w.lease
            FROM score_work AS w
            JOIN rollout_group AS g ON g.group_pk = w.group_pk
            WHERE w.policy_pk = $1 AND w.scorer = $2 AND w.request_id = $3 AND w.expires_us > $4
            ORDER BY w.since_us, w.work_pk
            FOR UPDATE OF w",
    };
    let mut held = Vec::new();
    for policy in policies {
        let values = args![policy.policy_pk, &*lease.scorer, request.as_str(), lease.now];
        for row in tx.fetch_all(LOCK_WORK_OF_REQUEST, values).await? {
            held.push(read_candidate(row)?);
        }
    }
    // A request for other names is another request.
    held.retain(|candidate| lease.names.contains(&candidate.name));
    Ok(held)
}

/// When the next work opens that has a time for that.
async fn opens_next(lease: &LeaseWork, tx: &mut Tx<'_>, policies: &[&Policy]) -> Result<Option<Timestamp>, StoreError> {
    const SELECT_OPENS_NEXT: Statement = Statement::new(
        "-- select_opens_next
        SELECT since_us
        FROM score_work
        WHERE policy_pk = $1 AND name = $2 AND state = 'open' AND since_us > $3
        ORDER BY since_us
        LIMIT 1",
    );
    let mut next: Option<Timestamp> = None;
    for (name, policy) in of_each(lease, policies) {
        let values = args![policy.policy_pk, name, lease.now];
        if let Some(mut row) = tx.fetch_optional(SELECT_OPENS_NEXT, values).await? {
            let since = row.get("since_us")?;
            next = Some(next.map_or(since, |next| next.min(since)));
        }
    }
    Ok(next)
}

/// What a scorer asks for: each name, of what is trained and of what evaluates the policy.
fn of_each<'a>(lease: &'a LeaseWork, policies: &'a [&Policy]) -> impl Iterator<Item = (&'a str, &'a Policy)> {
    lease.names.iter().flat_map(move |name| policies.iter().map(move |policy| (&**name, *policy)))
}

/// The oldest open work, and whether more was locked than this. Each name is looked up on its own, because its part of the index is in order.
async fn open(lease: &LeaseWork, tx: &mut Tx<'_>, policies: &[&Policy]) -> Result<(Vec<Candidate>, bool), StoreError> {
    const LOCK_OPEN_WORK: Statement = Statement {
        sqlite: "-- lock_open_work
            SELECT w.work_pk, w.since_us, w.group_pk, g.group_id, w.rollout_pk, w.name, w.attempts, w.attempts_max,
                w.lease
            FROM score_work AS w
            CROSS JOIN rollout_group AS g
            WHERE w.policy_pk = $1 AND w.name = $2 AND w.state = 'open' AND w.since_us <= $3 AND g.group_pk = w.group_pk
                AND g.run = $5
            ORDER BY w.since_us, w.work_pk
            LIMIT $4",
        postgres: "-- lock_open_work
            SELECT w.work_pk, w.since_us, w.group_pk, g.group_id, w.rollout_pk, w.name, w.attempts, w.attempts_max,
                w.lease
            FROM score_work AS w
            JOIN rollout_group AS g ON g.group_pk = w.group_pk
            WHERE w.policy_pk = $1 AND w.name = $2 AND w.state = 'open' AND w.since_us <= $3 AND g.run = $5
            ORDER BY w.since_us, w.work_pk
            LIMIT $4
            FOR UPDATE OF w SKIP LOCKED",
    };
    let mut found = Vec::new();
    for (name, policy) in of_each(lease, policies) {
        let values = args![policy.policy_pk, name, lease.now, lease.max, policy.run];
        for row in tx.fetch_all(LOCK_OPEN_WORK, values).await? {
            found.push(read_candidate(row)?);
        }
    }
    found.sort_unstable_by_key(|candidate| (candidate.since, candidate.work_pk));
    let left = found.len() > lease.max as usize;
    found.truncate(lease.max as usize);
    Ok((found, left))
}

#[async_trait]
impl Op for ExtendWork {
    type Output = Result<ExtendedWork, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const EXTEND_WORK: Statement = Statement::new(
            "-- extend_work
            UPDATE score_work
            SET expires_us = $3
            WHERE lease = $1 AND policy_pk = $2 AND expires_us > $4",
        );
        let Some(policy) = policy::find(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        let evaluations = policy::find(tx, &self.policy.evaluations()).await?;
        let policies = [Some(policy.policy_pk), evaluations.map(|evaluations| evaluations.policy_pk)];
        let expires_at = self.now.plus_seconds(self.ttl_s.unwrap_or(policy.rules.lease.ttl_s));
        let mut in_order: Vec<usize> = (0..self.leases.len()).collect();
        // The order in which scores lock them.
        in_order.sort_unstable_by_key(|index| self.leases[*index].as_str());
        let mut held = vec![false; self.leases.len()];
        for index in in_order {
            for policy in policies.into_iter().flatten() {
                let values = args![self.leases[index].as_str(), policy, expires_at, self.now];
                held[index] |= tx.execute(EXTEND_WORK, values).await? == 1;
            }
        }
        Ok(Ok(ExtendedWork { expires_at, held }))
    }
}

#[async_trait]
impl Op for ReleaseWork {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        const RELEASE_WORK: Statement = Statement::new(
            "-- release_work
            UPDATE score_work
            SET state = 'open', lease = NULL, scorer = NULL, request_id = NULL, expires_us = NULL
            WHERE lease = $1",
        );
        let mut leases: Vec<&str> = self.leases.iter().map(LeaseToken::as_str).collect();
        leases.sort_unstable();
        for lease in leases {
            tx.execute(RELEASE_WORK, args![lease]).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl Op for RetryWork {
    type Output = Result<u64, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const LOCK_EXHAUSTED_WORK: Statement = Statement {
            sqlite: "-- lock_exhausted_work
                SELECT work_pk
                FROM score_work
                WHERE policy_pk = $1 AND name = $2 AND state = 'exhausted'
                LIMIT $3",
            postgres: "-- lock_exhausted_work
                SELECT work_pk
                FROM score_work
                WHERE policy_pk = $1 AND name = $2 AND state = 'exhausted'
                LIMIT $3
                FOR UPDATE SKIP LOCKED",
        };
        const RETRY_WORK: Statement = among_keys!(
            "-- retry_work
            UPDATE score_work
            SET state = 'open', attempts = 0
            WHERE state = 'exhausted' AND work_pk"
        );
        let Some(policy) = policy::find(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        let evaluations = policy::find(tx, &self.policy.evaluations()).await?;
        let mut keys: Vec<i64> = Vec::new();
        for policy in [Some(&policy), evaluations.as_ref()].into_iter().flatten() {
            let values = args![policy.policy_pk, &*self.name, self.limit as usize - keys.len()];
            for mut row in tx.fetch_all(LOCK_EXHAUSTED_WORK, values).await? {
                keys.push(row.get("work_pk")?);
            }
        }
        let count = keys.len();
        if count > 0 {
            tx.guarded(RETRY_WORK, args![key_list(keys)], count).await?;
        }
        Ok(Ok(count as u64))
    }
}

/// Sweep: ends expired leases of work, up to `limit`. Returns what became of the work.
pub struct ExpireWork {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for ExpireWork {
    type Output = Vec<(PolicyName, WorkEvent)>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const LOCK_EXPIRED_WORK: Statement = Statement {
            sqlite: "-- lock_expired_work
                SELECT w.work_pk, w.attempts, w.attempts_max, p.name
                FROM score_work AS w
                JOIN policy AS p ON p.policy_pk = w.policy_pk
                WHERE w.expires_us <= $1
                ORDER BY w.expires_us
                LIMIT $2",
            postgres: "-- lock_expired_work
                SELECT w.work_pk, w.attempts, w.attempts_max, p.name
                FROM score_work AS w
                JOIN policy AS p ON p.policy_pk = w.policy_pk
                WHERE w.expires_us <= $1
                ORDER BY w.expires_us
                LIMIT $2
                FOR UPDATE OF w SKIP LOCKED",
        };
        let (mut keys, mut events) = (Vec::new(), Vec::new());
        for mut row in tx.fetch_all(LOCK_EXPIRED_WORK, args![self.now, self.limit]).await? {
            keys.push(row.get("work_pk")?);
            let name: String = row.get("name")?;
            let policy = PolicyName::stored(&name).map_err(|error| StoreError::Corrupt(error.to_string()))?;
            let is_last = row.get::<u32>("attempts")? + 1 >= row.get("attempts_max")?;
            events.push((policy, if is_last { WorkEvent::Exhausted } else { WorkEvent::Expired }));
        }
        if !keys.is_empty() {
            end_attempts(tx, keys, None).await?;
        }
        Ok(events)
    }
}
