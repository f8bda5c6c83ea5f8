//! Stages 4 and 5 in the store: the next batch for a trainer, under the lock of its policy.
//!
//! It is the batch that the request already holds, else a batch that came back, else a new one cut from ready groups.

pub(super) mod line;
mod mask;

use std::collections::BTreeMap;

use async_trait::async_trait;
use forebay_client::wire::{BatchOrder, StalenessAction};
use serde::{Deserialize, Serialize};

use self::{
    line::{Found, Line},
    mask::Masking,
};
use super::{batch, name_of, policy, sweep, trained_versions};
use crate::{
    buffer::{
        batch::cut,
        ids::{BatchPk, ConsumerName, GroupPk, RequestId, Version},
        port::{Batch, Claim, ClaimAnswer, Claimed, Policy, StoreError},
        refusal::Refusal,
        staleness::{TrainedVersions, oldest_fresh},
        states::{BatchMove, BatchState, GroupMove, GroupState},
        tally::Tally,
        weights::BatchWeights,
    },
    clock::Timestamp,
    store::{
        dialect::Op,
        sql::{Row, Statement, Tx, among_keys, args, key_list, locking},
        tally::{CountedGroups, Recent},
    },
};

/// Ready groups that are read in addition if they may be stale, so that many stale groups are skipped in few steps.
const LOOKAHEAD_GROUPS: u32 = 256;

#[async_trait]
impl Op for Claim {
    type Output = Result<ClaimAnswer, Refusal>;

    const ABANDONABLE: bool = true;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        if let Err(refusal) = policy::check_epoch(self.epoch, policy.epoch) {
            return Ok(Err(refusal));
        }
        // Expired leases end here, too, in case the sweep has not ended them.
        let expired = sweep::expire_of_policy(tx, &policy, self.now).await?;
        let mut stale = 0;
        let claimed = if let Some(held) = held(tx, &policy, self).await? {
            Claimed::Held(Box::new(held))
        } else if let Some(batch) = returned(tx, &policy, self).await? {
            Claimed::Granted(Box::new(batch))
        } else {
            let cut = cut_new(tx, &policy, self, &mut stale).await?;
            cut.map_or(Claimed::Nothing, |batch| Claimed::Granted(Box::new(batch)))
        };
        Ok(Ok(ClaimAnswer { claimed, expired, stale }))
    }
}

impl Claim {
    fn expires_at(&self, policy: &Policy) -> Timestamp {
        self.now.plus_seconds(policy.rules.lease.ttl_s)
    }

    fn consumer(&self) -> &str {
        self.consumer.as_ref().map_or("", ConsumerName::as_str)
    }

    fn request_id(&self) -> Option<&str> {
        self.request_id.as_ref().map(RequestId::as_str)
    }
}

/// The current lease of the same request, renewed.
async fn held(tx: &mut Tx<'_>, policy: &Policy, claim: &Claim) -> Result<Option<Batch>, StoreError> {
    const SELECT_HELD: Statement = Statement::new(
        "-- select_held
        SELECT batch_pk
        FROM batch
        WHERE policy_pk = $1 AND run = $2 AND state = 'leased' AND consumer = $3 AND request_id = $4
            AND expires_us > $5",
    );
    const RENEW_LEASE: Statement = Statement::new(
        "-- renew_lease
        UPDATE batch
        SET expires_us = $2
        WHERE batch_pk = $1 AND state = 'leased'",
    );
    let Some(request_id) = claim.request_id() else { return Ok(None) };
    let values = args![policy.policy_pk, policy.run, claim.consumer(), request_id, claim.now];
    let Some(mut row) = tx.fetch_optional(SELECT_HELD, values).await? else { return Ok(None) };
    let held: BatchPk = row.get("batch_pk")?;
    tx.guarded(RENEW_LEASE, args![held, claim.expires_at(policy)], 1).await?;
    batch::get(tx, held).await.map(Some)
}

/// The next batch that came back, delivered again as it was cut.
async fn returned(tx: &mut Tx<'_>, policy: &Policy, claim: &Claim) -> Result<Option<Batch>, StoreError> {
    // Ordered by the step that consumed the batch, so that a resumed trainer repeats its steps, and then by the cut.
    const SELECT_RETURNED: Statement = Statement::new(
        "-- select_returned
        SELECT batch_pk
        FROM batch
        WHERE policy_pk = $1 AND run = $2 AND state = 'returned'
        ORDER BY COALESCE(step, 9223372036854775807), batch_pk
        LIMIT 1",
    );
    const LEASE_AGAIN: Statement = Statement::new(
        "-- lease_again
        UPDATE batch
        SET state = 'leased', reason = NULL, lease = $2, consumer = $3, request_id = $4, epoch = $5, ttl_s = $6,
            expires_us = $7, attempt = attempt + 1
        WHERE batch_pk = $1 AND state = 'returned'",
    );
    let values = args![policy.policy_pk, policy.run];
    let Some(mut row) = tx.fetch_optional(SELECT_RETURNED, values).await? else { return Ok(None) };
    let batch = batch::get(tx, row.get("batch_pk")?).await?;
    let values = args![
        batch.batch_pk,
        claim.lease.as_str(),
        claim.consumer(),
        claim.request_id(),
        policy.epoch,
        policy.rules.lease.ttl_s,
        claim.expires_at(policy),
    ];
    let to = batch::after(&batch, BatchMove::Lease)?;
    tx.guarded(LEASE_AGAIN, values, 1).await?;
    batch::tally_move(tx, &batch, to).await?;
    batch::get(tx, batch.batch_pk).await.map(Some)
}

/// The columns of a ready group that cutting a batch needs.
struct Ready {
    group_pk: GroupPk,
    /// Its position in the line of ready groups.
    place: i64,
    rollouts: u64,
    samples: u64,
    trained_samples: u64,
    tokens: u64,
    trained_tokens: u64,
    reward_sum: f64,
    reward_count: i64,
    versions: Option<TrainedVersions>,
    payload_bytes: i64,
    failed_deliveries: u32,
    resumes: u32,
    delivered: bool,
    /// The changes by masking, if any token is masked.
    masking: Option<Masking>,
}

impl Ready {
    /// How many versions its oldest trained token is behind.
    fn staleness(&self, current: Version) -> i64 {
        self.versions.map_or(0, |versions| current.0.saturating_sub(versions.oldest.0).max(0))
    }

    /// Whether it is over a staleness bound. The bound applies only to the first delivery.
    fn is_over(&self, current: Version, max: u32) -> bool {
        !self.delivered && self.staleness(current) > i64::from(max)
    }
}

async fn cut_new(
    tx: &mut Tx<'_>,
    policy: &Policy,
    claim: &Claim,
    passed_over: &mut u64,
) -> Result<Option<Batch>, StoreError> {
    let mut line = Line::read(tx, policy, claim.now).await?;
    let mut ready = fresh_groups(tx, policy, claim, line.begin(), passed_over).await?;
    let tokens: Vec<u64> = ready.iter().map(|group| group.tokens).collect();
    let cut = cut(&policy.rules.batch, &tokens, claim.partial);
    let taken = cut.unwrap_or(0);
    // In any other order, the groups that were read are not the front of the line.
    let found = (policy.rules.batch.order == BatchOrder::Fifo).then(|| Found {
        first_left: ready.get(taken).map(|group| group.place),
        last_taken: ready[..taken].last().map(|group| group.place),
    });
    if cut.is_none() {
        line.write_if_moved(tx, policy, found).await?;
        return Ok(None);
    }
    ready.truncate(taken);
    let batch_pk = insert_batch(tx, policy, claim, &ready, &mut line).await?;
    line.write(tx, policy, found).await?;
    fill_batch(tx, batch_pk, &ready).await?;
    let cut = counted(ready.iter());
    tx.tallies().batches(policy.policy_pk, BatchState::Leased, 1);
    tx.tallies().move_groups(policy.policy_pk, cut, GroupMove::Cut)?;
    batch::get(tx, batch_pk).await.map(Some)
}

/// The numbers of ready groups for the tallies. The batch that they become part of is leased at once.
fn counted<'g>(groups: impl Iterator<Item = &'g Ready>) -> CountedGroups {
    let none =
        CountedGroups { state: GroupState::Ready, batch: Some(BatchState::Leased), groups: 0, rollouts: 0, bytes: 0 };
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
            SELECT group_pk, ready_seq, kept + masked AS rollouts, samples, trained_samples, tokens, trained_tokens,
                reward_sum, reward_count, version_min, version_max, payload_bytes, failed_deliveries, resumes, delivered
            FROM rollout_group
            WHERE policy_pk = $1 AND run = $2 AND state = 'ready' ",
            $tail
        ))
    };
}

/// The first ready groups in the order of delivery, after groups over the staleness bound are removed.
async fn fresh_groups(
    tx: &mut Tx<'_>,
    policy: &Policy,
    claim: &Claim,
    begin: i64,
    passed_over: &mut u64,
) -> Result<Vec<Ready>, StoreError> {
    const SELECT_READY: Statement = select_ready!("-- select_ready", "AND ready_seq >= $4 ORDER BY ready_seq LIMIT $3");
    const SELECT_FRESHEST: Statement =
        select_ready!("-- select_freshest", concat!("ORDER BY ", freshness!(), " DESC, ready_seq LIMIT $3"));
    // One more than a batch has, because whether the next group fits decides whether a batch is full.
    let limit = policy.rules.batch.groups + 1;
    let staleness = &policy.rules.staleness;
    let masks = staleness.action == StalenessAction::Mask;
    // Masking reads the rollouts of a group, so groups that cannot be in this batch are not read.
    let in_passing = limit + LOOKAHEAD_GROUPS * u32::from(staleness.max.is_some() && !masks);
    let (statement, values) = match policy.rules.batch.order {
        BatchOrder::Fifo => (SELECT_READY, args![policy.policy_pk, policy.run, in_passing, begin]),
        BatchOrder::Freshest => {
            take_out_left_behind(tx, policy, claim.now, passed_over).await?;
            (SELECT_FRESHEST, args![policy.policy_pk, policy.run, limit])
        }
    };
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
            ready.truncate(limit as usize);
            return Ok(ready);
        }
        *passed_over += stale.len() as u64;
        make_stale(tx, policy, &stale, claim.now).await?;
    }
}

/// Removes groups over the staleness bound from the end of the line, where `freshest` puts them. No claim would ever
/// reach them there, and they would count in the backlog for as long as there are fresher groups.
async fn take_out_left_behind(
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
    let stays = |group: &Ready| {
        staleness.action == StalenessAction::Mask && group.versions.is_some_and(|versions| versions.newest >= oldest)
    };
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
        place: row.get("ready_seq")?,
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
    tx.tallies().move_groups(policy.policy_pk, stale, GroupMove::GoStale)
}

async fn insert_batch(
    tx: &mut Tx<'_>,
    policy: &Policy,
    claim: &Claim,
    groups: &[Ready],
    line: &mut Line,
) -> Result<BatchPk, StoreError> {
    const INSERT_BATCH: Statement = Statement::new(
        "-- insert_batch
        INSERT INTO batch (
            batch_id, policy_pk, run, state, lease, consumer, request_id, epoch, ttl_s, expires_us, attempt,
            failed_deliveries, group_count, rollout_count, sample_count, token_count, loss_weighting, loss_constant,
            weight_samples, weight_tokens, version_current, version_min, version_max, metrics, live_bytes, created_us,
            resumes
        )
        VALUES (
            $1, $2, $3, 'leased', $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,
            $22, $23, $24, $25, $26
        )
        RETURNING batch_pk",
    );
    let sum = |of: fn(&Ready) -> u64| groups.iter().map(of).sum::<u64>();
    let failed = groups.iter().map(|group| group.failed_deliveries).max().unwrap_or(0);
    let resumes = groups.iter().map(|group| group.resumes).max().unwrap_or(0);
    let weights = BatchWeights {
        weighting: policy.rules.loss_weighting,
        constant: policy.rules.loss_constant.unwrap_or(1.0),
        rollouts: sum(|group| group.rollouts),
        samples: sum(|group| group.trained_samples),
        trained_tokens: sum(|group| group.trained_tokens),
    };
    let metrics = metrics(tx, policy, groups, line).await?;
    let versions = TrainedVersions::of_all(groups.iter().map(|group| group.versions));
    let values = args![
        claim.batch_id.as_bytes(),
        policy.policy_pk,
        policy.run,
        claim.lease.as_str(),
        claim.consumer(),
        claim.request_id(),
        policy.epoch,
        policy.rules.lease.ttl_s,
        claim.expires_at(policy),
        failed + 1,
        failed,
        groups.len(),
        weights.rollouts,
        sum(|group| group.samples),
        sum(|group| group.tokens),
        name_of(&weights.weighting),
        weights.constant,
        weights.samples,
        weights.trained_tokens,
        policy.version,
        versions.map(|versions| versions.oldest),
        versions.map(|versions| versions.newest),
        serde_json::to_string(&metrics).expect("names and finite numbers always serialize"),
        groups.iter().map(|group| group.payload_bytes).sum::<i64>(),
        claim.now,
        resumes,
    ];
    tx.fetch_one(INSERT_BATCH, values).await?.get("batch_pk")
}

async fn fill_batch(tx: &mut Tx<'_>, batch: BatchPk, groups: &[Ready]) -> Result<(), StoreError> {
    const BATCH_GROUPS: Statement = among_keys!(
        "-- batch_groups
        UPDATE rollout_group
        SET state = 'batched', batch_pk = $2, delivered = 1
        WHERE state = 'ready' AND group_pk"
    );
    const PLACE_GROUPS: Statement = Statement {
        sqlite: "-- place_groups
            INSERT INTO batch_group (batch_pk, place, group_pk)
            SELECT $2, key, value
            FROM json_each($1)",
        postgres: "-- place_groups
            INSERT INTO batch_group (batch_pk, place, group_pk)
            SELECT $2, v.place - 1, v.group_pk
            FROM unnest($1::bigint[]) WITH ORDINALITY AS v (group_pk, place)",
    };
    let keys = key_list(groups.iter().map(|group| group.group_pk.0));
    mask::write(tx, groups).await?;
    tx.guarded(BATCH_GROUPS, args![keys.clone(), batch], groups.len()).await?;
    tx.guarded(PLACE_GROUPS, args![keys, batch], groups.len()).await
}

/// The tallies when the previous batch was cut.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct TallyMark {
    rewards: i64,
    reward_sum: f64,
    dropped: BTreeMap<String, i64>,
}

/// Metrics for the trainer's log: about a new batch, and about the rollouts received since the previous one.
async fn metrics(
    tx: &mut Tx<'_>,
    policy: &Policy,
    groups: &[Ready],
    line: &mut Line,
) -> Result<BTreeMap<String, f64>, StoreError> {
    const SELECT_FLOW: Statement = Statement::new(
        "-- select_flow
        SELECT name, CAST(SUM(value) AS BIGINT) AS value, SUM(amount) AS amount
        FROM tally_now
        WHERE policy_pk = $1 AND (name = 'reward' OR name LIKE 'dropped.%')
        GROUP BY name",
    );
    let before: TallyMark = serde_json::from_str(&line.tally_mark).unwrap_or_default();
    let mut now = TallyMark::default();
    for mut row in tx.fetch_all(SELECT_FLOW, args![policy.policy_pk]).await? {
        let (name, value): (String, i64) = (row.get("name")?, row.get("value")?);
        match Tally::parse(&name) {
            Some(Tally::Dropped(rule)) => {
                now.dropped.insert(rule, value);
            }
            Some(Tally::Reward) => (now.rewards, now.reward_sum) = (value, row.get("amount")?),
            _ => {}
        }
    }
    let mut metrics = flow_metrics(&before, &now);
    metrics.extend(batch_metrics(policy.version, groups));
    let masked: u64 = groups.iter().filter_map(|group| group.masking.as_ref()).map(|masking| masking.tokens).sum();
    if masked > 0 {
        metrics.insert("staleness/masked-tokens".to_owned(), masked as f64);
    }
    line.tally_mark = serde_json::to_string(&now).expect("names and finite numbers always serialize");
    Ok(metrics)
}

fn flow_metrics(before: &TallyMark, now: &TallyMark) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    let rewards = now.rewards - before.rewards;
    if rewards > 0 {
        metrics.insert("reward/all".to_owned(), (now.reward_sum - before.reward_sum) / rewards as f64);
    }
    for (rule, total) in &now.dropped {
        let dropped = total - before.dropped.get(rule).copied().unwrap_or(0);
        if dropped > 0 {
            metrics.insert(format!("dropped/{rule}"), dropped as f64);
        }
    }
    metrics
}

fn batch_metrics(current: Version, groups: &[Ready]) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    let rewards: i64 = groups.iter().map(|group| group.reward_count).sum();
    let reward_sum: f64 = groups.iter().map(|group| group.reward_sum).sum();
    if rewards > 0 && reward_sum.is_finite() {
        metrics.insert("reward/trained".to_owned(), reward_sum / rewards as f64);
    }
    let staleness: Vec<i64> = groups.iter().map(|group| group.staleness(current)).collect();
    let mean = staleness.iter().sum::<i64>() as f64 / staleness.len().max(1) as f64;
    metrics.insert("staleness/mean".to_owned(), mean);
    metrics.insert("staleness/max".to_owned(), staleness.iter().copied().max().unwrap_or(0) as f64);
    metrics
}
