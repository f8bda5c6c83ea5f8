//! Stage 3 in the store: groups under their lock, and the decision that ends their open state.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    credit,
    finalize::{
        self, Cause, GroupDecision, GroupOutcome, GroupSnapshot, GroupTotals, Member, MemberAdvantage, ReadyGroup,
    },
    groups::{CloseGroup, DecidedGroup, DiscardGroup, Group},
    ids::{GroupId, GroupPk, IdKey, PolicyName, PolicyPk, RolloutPk, Run},
    ingest::decide::GroupFill,
    looking::journal::Happening,
    reasons,
    refusal::Refusal,
    rules::Rules,
    states::{GroupMove, GroupState},
    tally::Tally,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use super::{
    fill, journal,
    looking::ledger,
    policy, read_json,
    scores::{self, Unscored},
    trained_versions,
};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Arg, NewKeys, Row, Statement, Tx, among_keys, args, id_key_list, key_found, key_list, key_run, locking},
    tally::{CountedGroups, TallyDelta},
};

/// Rollouts whose reward components are read together. All components of a rollout take up to 20 KB, and a group may have
/// 65,536 rollouts; the rules read few of them.
const COMPONENTS_PAGE: usize = 1_024;

/// Rollouts whose turns are read or written together. The turns of one take up to 96 KiB with their advantages.
const TURNS_PAGE: usize = 64;

/// A group whose row is locked until the transaction ends.
#[derive(Clone, Debug)]
pub(super) struct LockedGroup {
    pub(super) group_pk: GroupPk,
    pub(super) policy_pk: PolicyPk,
    pub(super) run: Run,
    pub(super) group_id: String,
    pub(super) rules: Arc<Rules>,
    pub(super) fill: GroupFill,
    pub(super) reason: Option<String>,
    pub(super) min_size: u32,
    pub(super) environment: Option<String>,
    /// Group filters that could not be evaluated in its decision.
    pub(super) failed_filters: Vec<String>,
    /// Totals over its rollouts, if it was decided while locked.
    pub(super) totals: Option<GroupTotals>,
    pub(super) opened_at: Timestamp,
    pub(super) payload_bytes: i64,
}

macro_rules! select_group {
    ($tail:literal) => {
        concat!(
            "-- lock_group
            SELECT group_pk, policy_pk, run, group_id, rules_pk, environment, state, reason, size,
                min_size, kept, masked, dropped, scoring, payload_bytes, opened_us
            FROM rollout_group
            ",
            $tail
        )
    };
}

/// Locks a group by its id, in the current run of its policy.
pub(super) async fn lock(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    run: Run,
    group_id: &GroupId,
) -> Result<Option<LockedGroup>, StoreError> {
    const LOCK_GROUP: Statement = locking!(select_group!("WHERE policy_pk = $1 AND run = $2 AND group_key = $3"));
    let key = group_id.key();
    let Some(row) = tx.fetch_optional(LOCK_GROUP, args![policy, run, key]).await? else { return Ok(None) };
    let group = read(tx, row).await?;
    key_found(&group.group_id, |found| *found == key)?;
    Ok(Some(group))
}

/// Locks the groups of these keys that exist, in the order of the keys.
pub(super) async fn lock_all(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    run: Run,
    keys: &BTreeSet<IdKey>,
) -> Result<Vec<(IdKey, LockedGroup)>, StoreError> {
    const LOCK_GROUPS: Statement = Statement {
        sqlite: select_group!(
            "WHERE policy_pk = $1 AND run = $2 AND group_key IN (SELECT unhex(value) FROM json_each($3))"
        ),
        postgres: select_group!(
            "-- One lookup in the unique index for each key, as in `select_stored`; then locks in the order of the keys.
            WHERE group_pk = ANY (ARRAY(
                SELECT g.group_pk
                FROM unnest($3::bytea[]) AS k (group_key)
                CROSS JOIN LATERAL (
                    SELECT group_pk
                    FROM rollout_group
                    WHERE policy_pk = $1 AND run = $2 AND group_key = k.group_key
                    OFFSET 0
                ) AS g
            ))
            ORDER BY group_key
            FOR NO KEY UPDATE"
        ),
    };
    let rows = tx.fetch_all(LOCK_GROUPS, args![policy, run, id_key_list(keys.iter().copied())]).await?;
    let mut groups = Vec::with_capacity(rows.len());
    for row in rows {
        let group = read(tx, row).await?;
        groups.push((key_found(&group.group_id, |found| keys.contains(found))?, group));
    }
    Ok(groups)
}

pub(super) async fn lock_by_key(tx: &mut Tx<'_>, group: GroupPk) -> Result<Option<LockedGroup>, StoreError> {
    const LOCK_GROUP_BY_KEY: Statement = locking!(select_group!("WHERE group_pk = $1"));
    match tx.fetch_optional(LOCK_GROUP_BY_KEY, args![group]).await? {
        Some(row) => read(tx, row).await.map(Some),
        None => Ok(None),
    }
}

async fn read(tx: &mut Tx<'_>, mut row: Row) -> Result<LockedGroup, StoreError> {
    Ok(LockedGroup {
        group_pk: row.get("group_pk")?,
        policy_pk: row.get("policy_pk")?,
        run: row.get("run")?,
        group_id: row.get("group_id")?,
        rules: tx.rules(row.get("rules_pk")?).await?,
        fill: fill(&mut row, "state")?,
        reason: row.get("reason")?,
        min_size: row.get("min_size")?,
        environment: row.get("environment")?,
        failed_filters: Vec::new(),
        totals: None,
        opened_at: row.get("opened_us")?,
        payload_bytes: row.get("payload_bytes")?,
    })
}

impl LockedGroup {
    /// The input of the decision, with the kept and masked rollouts of the group.
    pub(super) fn snapshot(&self, rollouts: Vec<Member>) -> GroupSnapshot {
        GroupSnapshot {
            size: self.fill.size,
            min_size: self.min_size,
            environment: self.environment.clone(),
            opened_at: self.opened_at,
            rollouts,
        }
    }

    /// Names of the group filters that could not be evaluated, in the form of the column.
    pub(super) fn failed_names(&self) -> Option<String> {
        Some(self.failed_filters.join(",")).filter(|names| !names.is_empty())
    }

    /// The time when the payloads of the group are purged, if it is discarded.
    pub(super) fn purge_at(&self, now: Timestamp) -> Timestamp {
        now.plus_seconds(self.rules.retention.dropped_s)
    }
}

/// Decides an open group whose rollouts are all stored, exactly once.
pub(super) async fn finalize(
    tx: &mut Tx<'_>,
    group: &mut LockedGroup,
    cause: Cause,
    now: Timestamp,
) -> Result<(), StoreError> {
    let members = members(tx, [(group.group_pk, &*group.rules)]).await?.remove(&group.group_pk).unwrap_or_default();
    let outcome = finalize::decide(&group.rules, &group.snapshot(members), cause, now);
    match settle(tx.tallies(), group, outcome, now) {
        GroupDecision::Ready(ready) => {
            set_advantages(tx, &ready.advantages).await?;
            let sequence = next_ready(tx, 1).await?.next();
            let sequence = sequence.ok_or_else(|| StoreError::Corrupt("the ready sequence is empty".to_owned()))?;
            write_ready(tx, group, &ready, sequence, now).await
        }
        GroupDecision::Discard(_) => write_discarded(tx, group, GroupState::Open, now).await,
    }
}

/// The kept and masked rollouts of groups with these rules, in the order of their arrival.
pub(super) async fn members<'r>(
    tx: &mut Tx<'_>,
    groups: impl IntoIterator<Item = (GroupPk, &'r Rules)>,
) -> Result<HashMap<GroupPk, Vec<Member>>, StoreError> {
    const SELECT_MEMBERS: Statement = among_keys!(
        "-- select_members
        SELECT rollout_pk, group_pk, verdict, reward, segments, trained_segments, tokens, trained_tokens, version_min,
            version_max
        FROM rollout
        WHERE group_pk",
        " AND verdict IN ('kept', 'masked')
        ORDER BY group_pk, rollout_pk"
    );
    let mut members: HashMap<GroupPk, Vec<Member>> = HashMap::new();
    let rules: HashMap<GroupPk, &Rules> = groups.into_iter().collect();
    let keys = key_list(rules.keys().map(|group| group.0));
    for mut row in tx.fetch_all(SELECT_MEMBERS, args![keys]).await? {
        members.entry(row.get("group_pk")?).or_default().push(Member {
            rollout_pk: row.get("rollout_pk")?,
            verdict: row.get("verdict")?,
            reward: row.get("reward")?,
            components: BTreeMap::new(),
            turns: Arc::default(),
            segments: row.get("segments")?,
            trained_segments: row.get("trained_segments")?,
            tokens: row.get("tokens")?,
            trained_tokens: row.get("trained_tokens")?,
            trained_versions: trained_versions(&mut row)?,
        });
    }
    let reading = members.iter_mut().filter(|(group, _)| rules[group].read_components());
    let mut reading: Vec<(&Rules, &mut Member)> =
        reading.flat_map(|(group, members)| members.iter_mut().map(|member| (rules[group], member))).collect();
    let keys: Vec<_> = reading.iter().map(|(rules, member)| (member.rollout_pk, *rules)).collect();
    let mut found = components(tx, &keys).await?;
    for (_, member) in &mut reading {
        member.components = found.remove(&member.rollout_pk).unwrap_or_default();
    }
    let reading = members.iter_mut().filter(|(group, _)| rules[group].compare_turns());
    let mut reading: Vec<&mut Member> = reading.flat_map(|(_, members)| members).collect();
    let keys: Vec<_> = reading.iter().map(|member| member.rollout_pk).collect();
    let mut found = turns(tx, &keys).await?;
    for member in &mut reading {
        // Damage must not keep a group from its decision. It is found when the batch is read: the payload says what the
        // turns were.
        let turns = found.remove(&member.rollout_pk).and_then(|of| credit::unpack(&of.turns));
        member.turns = turns.unwrap_or_default().into();
    }
    Ok(members)
}

/// The turns of a rollout, as its row has them.
pub(super) struct StoredTurns {
    pub(super) turns: Vec<u8>,
    /// None before its group is decided, and if it does not count in the baseline.
    pub(super) advantages: Option<Vec<f64>>,
}

/// The turns of rollouts that have some in their rows.
pub(super) async fn turns(
    tx: &mut Tx<'_>,
    rollouts: &[RolloutPk],
) -> Result<HashMap<RolloutPk, StoredTurns>, StoreError> {
    const SELECT_TURNS: Statement = among_keys!(
        "-- select_turns
        SELECT rollout_pk, turns, turn_advantages
        FROM rollout
        WHERE rollout_pk",
        " AND turns IS NOT NULL"
    );
    let mut found = HashMap::new();
    for page in rollouts.chunks(TURNS_PAGE) {
        let keys = key_list(page.iter().map(|rollout| rollout.0));
        for mut row in tx.fetch_all(SELECT_TURNS, args![keys]).await? {
            let rollout: RolloutPk = row.get("rollout_pk")?;
            let packed: Option<Vec<u8>> = row.get("turn_advantages")?;
            // If they are damaged, the seal of the group tells.
            let advantages = packed.and_then(|packed| credit::unpack_advantages(&packed));
            found.insert(rollout, StoredTurns { turns: row.get("turns")?, advantages });
        }
    }
    Ok(found)
}

/// Those reward components of rollouts that their rules read. A rollout without any is left out.
pub(super) async fn components(
    tx: &mut Tx<'_>,
    rollouts: &[(RolloutPk, &Rules)],
) -> Result<HashMap<RolloutPk, BTreeMap<String, f64>>, StoreError> {
    const SELECT_MEMBER_COMPONENTS: Statement = among_keys!(
        "-- select_member_components
        SELECT rollout_pk, components
        FROM rollout
        WHERE rollout_pk",
        " AND components IS NOT NULL"
    );
    let mut found = HashMap::new();
    for page in rollouts.chunks(COMPONENTS_PAGE) {
        let rules: HashMap<RolloutPk, &Rules> = page.iter().copied().collect();
        let keys = key_list(page.iter().map(|(rollout, _)| rollout.0));
        for mut row in tx.fetch_all(SELECT_MEMBER_COMPONENTS, args![keys]).await? {
            let rollout: RolloutPk = row.get("rollout_pk")?;
            let all: Option<BTreeMap<String, f64>> = read_json(&mut row, "components")?;
            found.insert(rollout, rules[&rollout].components_of(&all.unwrap_or_default()));
        }
    }
    Ok(found)
}

/// Applies a decision to an open group and to the counts. Returns the data that must still be written.
pub(super) fn settle(
    tallies: &mut TallyDelta,
    group: &mut LockedGroup,
    outcome: GroupOutcome,
    now: Timestamp,
) -> GroupDecision {
    group.failed_filters = outcome.failed_filters;
    group.totals = Some(outcome.totals);
    let rollouts = i64::from(group.fill.arrived());
    let by = match &outcome.decision {
        GroupDecision::Ready(_) => {
            tallies.happened(group.policy_pk, Tally::DecidedReady, 1, rollouts as f64, now);
            GroupMove::Accept
        }
        GroupDecision::Discard(reason) => {
            tallies.discarded(group.policy_pk, reason, 1, rollouts, now);
            group.reason = Some(reason.clone());
            GroupMove::Reject
        }
    };
    move_group(tallies, group, by).expect("a group is decided under its lock, while it is open");
    outcome.decision
}

/// Discards a group, if its state allows the move. Returns whether it did. The group is counted by `rule`, one of a
/// bounded set of names.
pub(super) async fn discard(
    tx: &mut Tx<'_>,
    group: &mut LockedGroup,
    by: GroupMove,
    reason: String,
    rule: &str,
    now: Timestamp,
) -> Result<bool, StoreError> {
    let before = group.fill.state;
    if move_group(tx.tallies(), group, by).is_none() {
        return Ok(false);
    }
    tx.tallies().discarded(group.policy_pk, rule, 1, i64::from(group.fill.arrived()), now);
    group.reason = Some(reason);
    if group.fill.scoring > 0 {
        scores::end_of_groups(tx, vec![group.group_pk.0]).await?;
        group.fill.scoring = 0;
    }
    write_discarded(tx, group, before, now).await?;
    Ok(true)
}

/// Writes the advantages of stored rollouts.
pub(super) async fn set_advantages(tx: &mut Tx<'_>, advantages: &[MemberAdvantage]) -> Result<(), StoreError> {
    const SET_ADVANTAGES: Statement = Statement {
        sqlite: "-- set_advantages
            UPDATE rollout
            SET advantage = $2
            WHERE rollout_pk = $1",
        postgres: "-- set_advantages
            UPDATE rollout
            SET advantage = v.advantage
            FROM UNNEST($1::bigint[], $2::float8[]) AS v (rollout_pk, advantage)
            WHERE rollout.rollout_pk = v.rollout_pk",
    };
    const SET_TURN_ADVANTAGES: Statement = Statement {
        sqlite: "-- set_turn_advantages
            UPDATE rollout
            SET turn_advantages = $2
            WHERE rollout_pk = $1",
        postgres: "-- set_turn_advantages
            UPDATE rollout
            SET turn_advantages = v.turn_advantages
            FROM UNNEST($1::bigint[], $2::bytea[]) AS v (rollout_pk, turn_advantages)
            WHERE rollout.rollout_pk = v.rollout_pk",
    };
    let of_rollouts = advantages.iter().map(|member| (member.rollout_pk.0, member.of_rollout.into())).collect();
    tx.set_each(SET_ADVANTAGES, of_rollouts).await?;
    let of_turns = |member: &MemberAdvantage| Some((member.rollout_pk.0, packed_turns(Some(member))?[..].into()));
    for page in advantages.chunks(TURNS_PAGE) {
        tx.set_each(SET_TURN_ADVANTAGES, page.iter().filter_map(of_turns).collect()).await?;
    }
    Ok(())
}

/// The advantages of the turns of a rollout as its row has them.
pub(super) fn packed_turns(advantage: Option<&MemberAdvantage>) -> Option<Vec<u8>> {
    advantage?.of_turns.as_deref().map(credit::pack_advantages)
}

/// The next numbers in the order in which groups become ready.
pub(super) async fn next_ready(tx: &mut Tx<'_>, count: usize) -> Result<NewKeys, StoreError> {
    const NEXT_READY: Statement = Statement {
        sqlite: "-- next_ready
            UPDATE ready_sequence
            SET value = value + $1
            RETURNING value AS last, $1 AS run",
        // The transaction gets its number before its positions. Claims rely on that; see `claim::line`.
        postgres: "-- next_ready
            SELECT nextval('ready_sequence') AS last, 1::bigint AS run
            FROM generate_series(1, $1)
            WHERE pg_current_xact_id() IS NOT NULL",
    };
    let mut numbers = Vec::with_capacity(count);
    if count > 0 {
        for mut row in tx.fetch_all(NEXT_READY, args![count]).await? {
            numbers.extend(key_run(&mut row)?);
        }
        numbers.sort_unstable();
    }
    Ok(numbers.into_iter())
}

/// Writes that a stored group became ready.
pub(super) async fn write_ready(
    tx: &mut Tx<'_>,
    group: &LockedGroup,
    ready: &ReadyGroup,
    sequence: i64,
    now: Timestamp,
) -> Result<(), StoreError> {
    const MAKE_READY: Statement = Statement::new(
        "-- make_ready
        UPDATE rollout_group
        SET state = 'ready', samples = $2, trained_samples = $3, tokens = $4, trained_tokens = $5, reward_sum = $6,
            reward_count = $7, reward_min = $8, reward_max = $9, version_min = $10, version_max = $11,
            failed_filters = $12, decided_us = $13, deadline_us = NULL, ready_seq = $14, seal = $15
        WHERE group_pk = $1 AND state = 'open'",
    );
    let mut values = args![group.group_pk];
    values.extend(totals_args(&group.totals.unwrap_or_default()));
    values.extend(args![group.failed_names(), now, sequence, &ready.seal()[..]]);
    tx.guarded(MAKE_READY, values, 1).await
}

/// The totals of a group, in the order of the columns `samples, trained_samples, tokens, trained_tokens, reward_sum,
/// reward_count, reward_min, reward_max, version_min, version_max`.
pub(super) fn totals_args(totals: &GroupTotals) -> Vec<Arg> {
    args![
        totals.samples,
        totals.trained_samples,
        totals.tokens,
        totals.trained_tokens,
        totals.reward_sum,
        totals.reward_count,
        totals.reward_range.map(|range| range.0),
        totals.reward_range.map(|range| range.1),
        totals.trained_versions.map(|versions| versions.oldest),
        totals.trained_versions.map(|versions| versions.newest),
    ]
}

/// Writes that a stored group was discarded, and checks the state that it had before. Its totals are written if it was
/// decided; a group that is discarded in another way keeps what it has.
pub(super) async fn write_discarded(
    tx: &mut Tx<'_>,
    group: &LockedGroup,
    before: GroupState,
    now: Timestamp,
) -> Result<(), StoreError> {
    const DISCARD_GROUP: Statement = Statement::new(
        "-- discard_group
        UPDATE rollout_group
        SET state = 'discarded', reason = $3, decided_us = COALESCE(decided_us, $4), deadline_us = NULL,
            purge_us = $5, failed_filters = $6
        WHERE group_pk = $1 AND state = $2",
    );
    const REJECT_GROUP: Statement = Statement::new(
        "-- reject_group
        UPDATE rollout_group
        SET state = 'discarded', reason = $3, decided_us = $4, deadline_us = NULL, purge_us = $5, failed_filters = $6,
            samples = $7, trained_samples = $8, tokens = $9, trained_tokens = $10, reward_sum = $11,
            reward_count = $12, reward_min = $13, reward_max = $14, version_min = $15, version_max = $16
        WHERE group_pk = $1 AND state = $2",
    );
    let mut values =
        args![group.group_pk, before, group.reason.as_deref(), now, group.purge_at(now), group.failed_names()];
    let Some(totals) = &group.totals else { return tx.guarded(DISCARD_GROUP, values, 1).await };
    values.extend(totals_args(totals));
    tx.guarded(REJECT_GROUP, values, 1).await
}

/// Moves a group that is in no batch to another state, and updates its counts. None if the move is not allowed.
fn move_group(tallies: &mut TallyDelta, group: &mut LockedGroup, by: GroupMove) -> Option<()> {
    let to = group.fill.state.after(by)?;
    let moved = CountedGroups {
        state: group.fill.state,
        batch: None,
        groups: 1,
        rollouts: i64::from(group.fill.arrived()),
        scoring: i64::from(group.fill.scoring),
        bytes: group.payload_bytes,
    };
    tallies.move_groups(group.policy_pk, moved, by).ok()?;
    group.fill.state = to;
    Some(())
}

#[async_trait]
impl Op for CloseGroup {
    type Output = Result<DecidedGroup, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(policy) = policy::find(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        let Some(mut group) = lock(tx, policy.policy_pk, policy.run, &self.group_id).await? else {
            return Ok(Err(unknown(&self.policy, &self.group_id)));
        };
        if !group.fill.state.is_open() {
            return Ok(Err(Refusal::GroupDecided(group.fill.state)));
        }
        let unscored = scores::drop_unscored(tx, &mut group, &Unscored::All, self.now).await?;
        finalize(tx, &mut group, Cause::TimedOut, self.now).await?;
        let happening = Happening::GroupClosed(self.group_id.to_string());
        journal::write(tx, policy.policy_pk, &happening, self.by.as_ref(), self.now).await?;
        let group = ledger::group(tx, group.group_pk).await?;
        Ok(Ok(DecidedGroup { policy: policy.name, group, unscored }))
    }
}

fn unknown(policy: &PolicyName, group_id: &GroupId) -> Refusal {
    Refusal::UnknownInPolicy { what: "group", id: group_id.to_string(), policy: policy.clone() }
}

#[async_trait]
impl Op for DiscardGroup {
    type Output = Result<Group, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // Locks the policy first, as claims do, so that a ready group cannot become part of a batch meanwhile.
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        let Some(mut group) = lock(tx, policy.policy_pk, policy.run, &self.group_id).await? else {
            return Ok(Err(unknown(&self.policy, &self.group_id)));
        };
        if !discard(tx, &mut group, GroupMove::Discard, self.reason.clone(), reasons::BY_HAND, self.now).await? {
            return Ok(Err(Refusal::GroupDecided(group.fill.state)));
        }
        let (group_id, reason) = (self.group_id.to_string(), self.reason.clone());
        let happening = Happening::GroupDiscarded { group_id, reason };
        journal::write(tx, policy.policy_pk, &happening, self.by.as_ref(), self.now).await?;
        ledger::group(tx, group.group_pk).await.map(Ok)
    }
}

/// Sweep: open groups past their deadline, up to `limit`.
pub struct OverdueGroups {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for OverdueGroups {
    type Output = Vec<GroupPk>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // Groups with the same deadline are in the order of their opening, which becomes their order in batches.
        const SELECT_OVERDUE: Statement = Statement::new(
            "-- select_overdue
            SELECT group_pk
            FROM rollout_group
            WHERE deadline_us <= $1
            ORDER BY deadline_us, group_pk
            LIMIT $2",
        );
        let rows = tx.fetch_all(SELECT_OVERDUE, args![self.now, self.limit]).await?;
        rows.into_iter().map(|mut row| row.get("group_pk")).collect()
    }
}

/// Sweep: decides an overdue group. None if it was decided in the meantime.
pub struct DecideOverdue {
    pub group: GroupPk,
    pub cause: Cause,
    pub now: Timestamp,
}

#[async_trait]
impl Op for DecideOverdue {
    type Output = Option<DecidedGroup>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(mut group) = lock_by_key(tx, self.group).await? else { return Ok(None) };
        if !group.fill.state.is_open() {
            return Ok(None);
        }
        let (policy, run) = policy_of(tx, &group).await?;
        let mut unscored = 0;
        if run == group.run {
            let due = Unscored::Due { now: self.now, limit: usize::MAX };
            unscored = scores::drop_unscored(tx, &mut group, &due, self.now).await?;
            if group.fill.scoring > 0 {
                // It arrived when this group was found overdue, and has time of its own.
                return Ok(None);
            }
            finalize(tx, &mut group, self.cause, self.now).await?;
        } else {
            discard(tx, &mut group, GroupMove::Straggle, reasons::RESET.to_owned(), reasons::RESET, self.now).await?;
        }
        Ok(Some(DecidedGroup { policy, group: ledger::group(tx, group.group_pk).await?, unscored }))
    }
}

/// The policy of a group, and its current run.
pub(super) async fn policy_of(tx: &mut Tx<'_>, group: &LockedGroup) -> Result<(PolicyName, Run), StoreError> {
    const SELECT_POLICY_NAME: Statement = Statement::new(
        "-- select_policy_name
        SELECT name, run
        FROM policy
        WHERE policy_pk = $1",
    );
    let mut row = tx.fetch_one(SELECT_POLICY_NAME, args![group.policy_pk]).await?;
    let name: String = row.get("name")?;
    let name = PolicyName::stored(&name).map_err(|error| StoreError::Corrupt(error.to_string()))?;
    Ok((name, row.get("run")?))
}
