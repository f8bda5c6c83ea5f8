//! Ready groups, in the order of delivery and after groups over the staleness bound are removed.

use forebay_domain::{
    batch::Candidate,
    clock::Timestamp,
    ids::{GroupPk, Version},
    policies::Policy,
    rules::Rules,
    staleness::{TrainedVersions, masks, oldest_fresh},
    states::{BatchState, GroupMove, GroupState},
    tally::Tally,
};
use forebay_wire::{BatchOrder, StalenessAction};

use super::mask::{self, Masking};
use crate::{
    error::StoreError,
    ops::trained_versions,
    sql::{Arg, Row, Statement, Tx, among_keys, args, key_list, locking},
    tally::{CountedGroups, Recent},
};

/// Ready groups that are read in addition if they may be stale, so that many stale groups are skipped in few steps.
const LOOKAHEAD_GROUPS: u32 = 256;

/// The columns of a ready group that cutting a batch needs.
pub(super) struct Ready {
    pub(super) group_pk: GroupPk,
    environment: Option<String>,
    /// Its position in the line of ready groups.
    pub(super) seq: i64,
    pub(super) rollouts: u64,
    pub(super) samples: u64,
    pub(super) trained_samples: u64,
    pub(super) tokens: u64,
    pub(super) trained_tokens: u64,
    pub(super) reward_sum: f64,
    pub(super) reward_count: i64,
    pub(super) versions: Option<TrainedVersions>,
    pub(super) payload_bytes: i64,
    pub(super) failed_deliveries: u32,
    pub(super) resumes: u32,
    delivered: bool,
    /// The changes by masking, if any token is masked.
    pub(super) masking: Option<Masking>,
}

impl Ready {
    /// The label of its environment; empty if it has none.
    pub(super) fn environment(&self) -> &str {
        self.environment.as_deref().unwrap_or_default()
    }

    /// What its selection depends on.
    pub(super) fn candidate(&self) -> Candidate<'_> {
        Candidate {
            environment: self.environment.as_deref(),
            rollouts: self.rollouts,
            samples: self.samples,
            tokens: self.tokens,
        }
    }

    /// How many versions its oldest trained token is behind.
    pub(super) fn staleness(&self, current: Version) -> i64 {
        self.versions.map_or(0, |versions| current.0.saturating_sub(versions.oldest.0).max(0))
    }

    /// Whether it is over a staleness bound. The bound applies only to the first delivery.
    fn is_over(&self, current: Version, max: u32) -> bool {
        !self.delivered && self.staleness(current) > i64::from(max)
    }
}

/// In which order ready groups are delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// In the order in which they became ready.
    Line,
    Freshest,
    /// Those that will be too old first come first. In the order of the line, slow groups stand behind younger ones, and
    /// more of them than a batch holds could have their last chance in the same one.
    Oldest,
}

impl Order {
    fn of(rules: &Rules) -> Self {
        match (rules.batch.order, rules.staleness.action) {
            (BatchOrder::Freshest, _) => Self::Freshest,
            (BatchOrder::Fifo, StalenessAction::Wait) if rules.staleness.max.is_some() => Self::Oldest,
            (BatchOrder::Fifo, _) => Self::Line,
        }
    }
}

/// Whether batches take ready groups from the front of the line.
pub(super) fn is_by_line(rules: &Rules) -> bool {
    Order::of(rules) == Order::Line
}

/// The numbers of ready groups for the tallies. The batch that they become part of is leased at once.
pub(super) fn counted<'g>(groups: impl Iterator<Item = &'g Ready>) -> CountedGroups {
    let none = CountedGroups {
        state: GroupState::Ready,
        batch: Some(BatchState::Leased),
        groups: 0,
        rollouts: 0,
        scoring: 0,
        bytes: 0,
    };
    groups.fold(none, |sum, group| CountedGroups {
        groups: sum.groups + 1,
        rollouts: sum.rollouts + group.rollouts as i64,
        bytes: sum.bytes + group.payload_bytes,
        ..sum
    })
}

/// The version that staleness measures, by which `freshest` orders groups. A group without trained tokens counts as
/// fresh.
macro_rules! freshness {
    () => {
        "COALESCE(version_min, 9223372036854775807)"
    };
}

macro_rules! select_ready {
    ($name:literal, $tail:expr) => {
        locking!(concat!(
            $name,
            "
            SELECT group_pk, environment, ready_seq, kept + masked AS rollouts, samples, trained_samples, tokens,
                trained_tokens, reward_sum, reward_count, version_min, version_max, payload_bytes, failed_deliveries,
                resumes, delivered
            FROM rollout_group
            WHERE policy_pk = $1 AND run = $2 AND state = 'ready' ",
            $tail
        ))
    };
}

/// The first `limit` ready groups in the order of delivery, after groups over the staleness bound are removed.
pub(super) async fn fresh_groups(
    tx: &mut Tx<'_>,
    policy: &Policy,
    now: Timestamp,
    begin: i64,
    limit: u32,
    passed_over: &mut u64,
) -> Result<Vec<Ready>, StoreError> {
    const SELECT_READY: Statement = select_ready!("-- select_ready", "AND ready_seq >= $4 ORDER BY ready_seq LIMIT $3");
    const SELECT_FRESHEST: Statement =
        select_ready!("-- select_freshest", concat!("ORDER BY ", freshness!(), " DESC, ready_seq LIMIT $3"));
    const SELECT_OLDEST: Statement =
        select_ready!("-- select_oldest", concat!("ORDER BY ", freshness!(), ", ready_seq LIMIT $3"));
    let staleness = &policy.rules.staleness;
    // Masking reads the rollouts of a group, so groups that cannot be in this batch are not read.
    let is_dropped = staleness.max.is_some() && staleness.action == StalenessAction::Drop;
    let in_passing = limit + LOOKAHEAD_GROUPS * u32::from(is_dropped);
    let order = Order::of(&policy.rules);
    if order != Order::Line {
        take_out_left_behind(tx, policy, now, passed_over).await?;
    }
    let (statement, values) = match order {
        Order::Line => (SELECT_READY, args![policy.policy_pk, policy.run, in_passing, begin]),
        Order::Freshest => (SELECT_FRESHEST, args![policy.policy_pk, policy.run, limit]),
        Order::Oldest => (SELECT_OLDEST, args![policy.policy_pk, policy.run, limit]),
    };
    let mut ready = fresh(tx, policy, now, statement, values, passed_over).await?;
    ready.truncate(limit as usize);
    Ok(ready)
}

/// The first `limit` ready groups of an environment in the order of delivery, after groups over the staleness bound are
/// removed. An empty label stands for groups without one.
pub(super) async fn fresh_of_environment(
    tx: &mut Tx<'_>,
    policy: &Policy,
    now: Timestamp,
    label: &str,
    limit: u32,
    passed_over: &mut u64,
) -> Result<Vec<Ready>, StoreError> {
    const SELECT_READY_OF: Statement =
        select_ready!("-- select_ready_of", "AND COALESCE(environment, '') = $4 ORDER BY ready_seq LIMIT $3");
    // The ready groups of the environment are sorted, because this order has no index.
    const SELECT_FRESHEST_OF: Statement = select_ready!(
        "-- select_freshest_of",
        concat!("AND COALESCE(environment, '') = $4 ORDER BY ", freshness!(), " DESC, ready_seq LIMIT $3")
    );
    const SELECT_OLDEST_OF: Statement = select_ready!(
        "-- select_oldest_of",
        concat!("AND COALESCE(environment, '') = $4 ORDER BY ", freshness!(), ", ready_seq LIMIT $3")
    );
    let statement = match Order::of(&policy.rules) {
        Order::Line => SELECT_READY_OF,
        Order::Freshest => SELECT_FRESHEST_OF,
        Order::Oldest => SELECT_OLDEST_OF,
    };
    let values = args![policy.policy_pk, policy.run, limit, label];
    fresh(tx, policy, now, statement, values, passed_over).await
}

/// The groups that a statement selects, after those over the staleness bound are removed.
async fn fresh(
    tx: &mut Tx<'_>,
    policy: &Policy,
    now: Timestamp,
    statement: Statement,
    values: Vec<Arg>,
    passed_over: &mut u64,
) -> Result<Vec<Ready>, StoreError> {
    let staleness = &policy.rules.staleness;
    let masks = masks(staleness);
    loop {
        let rows = tx.fetch_all(statement, values.clone()).await?;
        let mut ready = rows.into_iter().map(read_ready).collect::<Result<Vec<_>, _>>()?;
        if let (Some(max), true) = (staleness.max, masks) {
            let oldest = oldest_fresh(policy.version, max);
            for group in ready.iter_mut().filter(|group| group.is_over(policy.version, max)) {
                mask::apply(tx, group, oldest).await?;
            }
        }
        let is_stale = |group: &Ready| staleness.max.is_some_and(|max| group.is_over(policy.version, max));
        let stale: Vec<&Ready> = ready.iter().filter(|group| is_stale(group)).collect();
        if stale.is_empty() {
            return Ok(ready);
        }
        *passed_over += stale.len() as u64;
        make_stale(tx, policy, &stale, now).await?;
    }
}

/// Removes groups over the staleness bound from the end of the line, where `freshest` puts them, and which the shares of
/// environments may not reach. They would count in the backlog for as long as there are other groups.
pub(super) async fn take_out_left_behind(
    tx: &mut Tx<'_>,
    policy: &Policy,
    now: Timestamp,
    passed_over: &mut u64,
) -> Result<(), StoreError> {
    const SELECT_LEFT_BEHIND: Statement = select_ready!(
        "-- select_left_behind",
        concat!("AND delivered = 0 AND ", freshness!(), " < $3 ORDER BY ", freshness!(), " LIMIT $4")
    );
    let staleness = &policy.rules.staleness;
    let Some(max) = staleness.max else { return Ok(()) };
    let oldest = oldest_fresh(policy.version, max);
    // A group whose newest token is fresh keeps some tokens when it is masked, so it stays until its turn.
    let stays = |group: &Ready| masks(staleness) && group.versions.is_some_and(|versions| versions.newest >= oldest);
    loop {
        let values = args![policy.policy_pk, policy.run, oldest, LOOKAHEAD_GROUPS];
        let rows = tx.fetch_all(SELECT_LEFT_BEHIND, values).await?;
        let old = rows.into_iter().map(read_ready).collect::<Result<Vec<_>, _>>()?;
        let stale: Vec<&Ready> = old.iter().filter(|group| !stays(group)).collect();
        if stale.is_empty() {
            return Ok(());
        }
        *passed_over += stale.len() as u64;
        make_stale(tx, policy, &stale, now).await?;
    }
}

fn read_ready(mut row: Row) -> Result<Ready, StoreError> {
    Ok(Ready {
        group_pk: row.get("group_pk")?,
        environment: row.get("environment")?,
        seq: row.get("ready_seq")?,
        rollouts: row.get("rollouts")?,
        samples: row.get("samples")?,
        trained_samples: row.get("trained_samples")?,
        tokens: row.get("tokens")?,
        trained_tokens: row.get("trained_tokens")?,
        reward_sum: row.get("reward_sum")?,
        reward_count: row.get("reward_count")?,
        versions: trained_versions(&mut row)?,
        payload_bytes: row.get("payload_bytes")?,
        failed_deliveries: row.get("failed_deliveries")?,
        resumes: row.get("resumes")?,
        delivered: row.get("delivered")?,
        masking: None,
    })
}

async fn make_stale(tx: &mut Tx<'_>, policy: &Policy, stale: &[&Ready], now: Timestamp) -> Result<(), StoreError> {
    const MAKE_STALE: Statement = among_keys!(
        "-- make_stale
        UPDATE rollout_group
        SET state = 'stale', purge_us = $2
        WHERE state = 'ready' AND group_pk"
    );
    let keys = key_list(stale.iter().map(|group| group.group_pk.0));
    let purge_at = now.plus_seconds(policy.rules.retention.dropped_s);
    tx.guarded(MAKE_STALE, args![keys, purge_at], stale.len()).await?;
    let stale = counted(stale.iter().copied());
    tx.tallies().recent(policy.policy_pk, Recent::Stale, stale.groups, now);
    tx.tallies().happened(policy.policy_pk, Tally::Stale, stale.groups, stale.rollouts as f64, now);
    tx.tallies().move_groups(policy.policy_pk, stale, GroupMove::GoStale)
}
