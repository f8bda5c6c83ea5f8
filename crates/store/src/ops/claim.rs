//! Stages 4 and 5 in the store: the next batch for a trainer, under the lock of its policy.
//!
//! It is the batch that the request already holds, else a batch that came back, else a new one cut from ready groups.
//!
//! Stale groups are taken out before a new batch is cut, and where the rules say so, rollouts are waited for that the next
//! version would make stale (`waiting`). A claim begins to read the line of ready groups behind those
//! that were claimed before (`line`); each order of `batch.order` has an index. Loss weights are fixed here, as five
//! numbers in the batch's row, and stale tokens are masked here for all deliveries (`mask`).

pub(super) mod line;
mod mask;
mod metrics;
mod ready;
pub(super) mod turns;
pub mod waiting;

use async_trait::async_trait;
use forebay_domain::{
    batch::{BatchSize, Candidate, select},
    ids::BatchPk,
    lease::{Batch, Claim, ClaimAnswer, Claimed},
    policies::Policy,
    refusal::Refusal,
    staleness::TrainedVersions,
    states::{BatchMove, BatchState, GroupMove},
    tally::{LeaseEvent, Tally},
    weights::BatchWeights,
};
use std::collections::HashSet;

use self::{
    line::{Found, Line},
    metrics::metrics,
    ready::{Ready, counted, fresh_groups, fresh_of_environment, is_by_line},
};
use super::{batch, consumers, name_of, policy, sweep};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, among_keys, args, key_list},
};

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
        let (mut stale, mut waits) = (0, false);
        let claimed = if let Some(held) = held(tx, &policy, self).await? {
            Claimed::Held(Box::new(held))
        } else if let Some(batch) = returned(tx, &policy, self).await? {
            Claimed::Granted(Box::new(batch))
        } else {
            match cut_new(tx, &policy, self, &mut stale).await? {
                Cut::Batch(batch) => Claimed::Granted(batch),
                not_cut => {
                    waits = matches!(not_cut, Cut::Waits);
                    Claimed::Nothing
                }
            }
        };
        Ok(Ok(ClaimAnswer { claimed, expired, stale, waits }))
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
        WHERE policy_pk = $1 AND run = $2 AND state = 'returned' AND ($3 = 0 OR sample_count = $3)
        ORDER BY COALESCE(step, 9223372036854775807), batch_pk
        LIMIT 1",
    );
    const LEASE_AGAIN: Statement = Statement::new(
        "-- lease_again
        UPDATE batch
        SET state = 'leased', reason = NULL, lease = $2, consumer = $3, request_id = $4, epoch = $5, ttl_s = $6,
            expires_us = $7, granted_us = $8, waited_us = $9, attempt = attempt + 1
        WHERE batch_pk = $1 AND state = 'returned'",
    );
    let values = args![policy.policy_pk, policy.run, claim.exact_samples()];
    let Some(mut row) = tx.fetch_optional(SELECT_RETURNED, values).await? else { return Ok(None) };
    let batch = batch::get(tx, row.get("batch_pk")?).await?;
    let values = args![
        batch.batch_pk,
        claim.lease.as_str(),
        claim.consumer(),
        claim.request_id(),
        policy.epoch,
        claim.ttl_s(policy),
        claim.expires_at(policy),
        claim.now,
        grant(tx, policy, claim, LeaseEvent::Redelivered).await?,
    ];
    let to = batch::after(&batch, BatchMove::Lease)?;
    tx.guarded(LEASE_AGAIN, values, 1).await?;
    batch::tally_move(tx, &batch, to).await?;
    batch::get(tx, batch.batch_pk).await.map(Some)
}

/// Counts a lease that is granted, and ends the wait of its consumer. Returns how long the consumer waited, in
/// microseconds. It may have asked another replica before.
async fn grant(tx: &mut Tx<'_>, policy: &Policy, claim: &Claim, event: LeaseEvent) -> Result<i64, StoreError> {
    let elsewhere = consumers::granted(tx, policy.policy_pk, claim.consumer(), claim.now).await?;
    let since = elsewhere.map_or(claim.asking_since, |since| since.min(claim.asking_since));
    let waited_us = claim.now.micros_since(since).max(0);
    tx.tallies().lease(policy.policy_pk, event, claim.now);
    tx.tallies().happened(policy.policy_pk, Tally::Waited, 1, waited_us as f64 / 1e6, claim.now);
    Ok(waited_us)
}

/// The result of an attempt to cut a new batch.
enum Cut {
    Batch(Box<Batch>),
    /// There are too few groups.
    TooFew,
    /// There are enough groups, but a rollout is waited for.
    Waits,
}

async fn cut_new(tx: &mut Tx<'_>, policy: &Policy, claim: &Claim, passed_over: &mut u64) -> Result<Cut, StoreError> {
    // While a rollout is waited for, groups are not read again and again.
    if policy.pause.is_some() && waiting::pauses(tx, policy, claim).await? {
        return Ok(Cut::Waits);
    }
    let mut line = Line::read(tx, policy).await?;
    let has_shares = !policy.rules.batch.environments.is_empty();
    // A claim of an exact number of samples has minimums of its own.
    let (taken, found, shares) = if has_shares && claim.exact_samples() == 0 {
        let (taken, shares) = turns::select(tx, policy, claim, line.begin(), passed_over).await?.unzip();
        (taken, None, shares)
    } else {
        let (taken, found) = from_line(tx, policy, claim, line.begin(), passed_over).await?;
        (taken, found, None)
    };
    let Some(taken) = taken else {
        line.write_if_moved(tx, policy, found).await?;
        return Ok(Cut::TooFew);
    };
    if policy.pause.is_none() && waiting::pauses(tx, policy, claim).await? {
        return Ok(Cut::Waits);
    }
    if let Some(shares) = shares {
        turns::keep(tx, policy.policy_pk, &shares).await?;
    }
    let batch_pk = insert_batch(tx, policy, claim, &taken, &mut line).await?;
    line.write(tx, policy, found).await?;
    fill_batch(tx, batch_pk, &taken).await?;
    tx.tallies().batches(policy.policy_pk, BatchState::Leased, 1);
    tx.tallies().move_groups(policy.policy_pk, counted(taken.iter()), GroupMove::Cut)?;
    let batch = batch::get(tx, batch_pk).await?;
    Ok(Cut::Batch(Box::new(batch)))
}

/// The groups of a new batch in the order of the line, if there are enough, and what the claim found of the line.
async fn from_line(
    tx: &mut Tx<'_>,
    policy: &Policy,
    claim: &Claim,
    begin: i64,
    passed_over: &mut u64,
) -> Result<(Option<Vec<Ready>>, Option<Found>), StoreError> {
    let rules = &policy.rules.batch;
    let limit = claim.size.candidates(rules);
    let mut ready = fresh_groups(tx, policy, claim.now, begin, limit, passed_over).await?;
    if ready.len() == limit as usize {
        behind(tx, policy, claim, &mut ready, passed_over).await?;
    }
    let candidates: Vec<Candidate<'_>> = ready.iter().map(Ready::candidate).collect();
    let selected = select(rules, &claim.size, &candidates, claim.partial);
    let (taken, left) = divide(ready, selected.as_deref().unwrap_or_default());
    // In any other order, the groups that were read are not the front of the line.
    let found = is_by_line(&policy.rules).then(|| Found {
        first_left: left.first().map(|group| group.seq),
        last_taken: taken.iter().map(|group| group.seq).max(),
    });
    Ok((selected.map(|_| taken), found))
}

/// Adds groups that are further behind in the line, of environments that have a minimum in a batch with an exact number
/// of samples.
async fn behind(
    tx: &mut Tx<'_>,
    policy: &Policy,
    claim: &Claim,
    ready: &mut Vec<Ready>,
    passed_over: &mut u64,
) -> Result<(), StoreError> {
    let BatchSize::Samples(packing) = &claim.size else { return Ok(()) };
    let read: HashSet<i64> = ready.iter().map(|group| group.group_pk.0).collect();
    for (label, _) in packing.environments.iter().filter(|(_, of)| of.min_share > 0.0) {
        let more = fresh_of_environment(tx, policy, claim.now, label, packing.samples, passed_over).await?;
        ready.extend(more.into_iter().filter(|group| !read.contains(&group.group_pk.0)));
    }
    Ok(())
}

/// The groups at the selected positions, in the order of the selection, and the others in their order.
fn divide(ready: Vec<Ready>, selected: &[usize]) -> (Vec<Ready>, Vec<Ready>) {
    let mut ready: Vec<Option<Ready>> = ready.into_iter().map(Some).collect();
    let taken = selected.iter().filter_map(|at| ready[*at].take()).collect();
    (taken, ready.into_iter().flatten().collect())
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
            resumes, granted_us, waited_us
        )
        VALUES (
            $1, $2, $3, 'leased', $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,
            $22, $23, $24, $25, $26, $27, $28
        )
        RETURNING batch_pk",
    );
    let sum = |of: fn(&Ready) -> u64| groups.iter().map(of).sum::<u64>();
    let failed = groups.iter().map(|group| group.failed_deliveries).max().unwrap_or(0);
    let resumes = groups.iter().map(|group| group.resumes).max().unwrap_or(0);
    let weights = BatchWeights {
        weighting: policy.rules.loss_weighting,
        constant: policy.rules.loss_constant.unwrap_or(1.0),
        groups: groups.len() as u64,
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
        claim.ttl_s(policy),
        claim.expires_at(policy),
        failed + 1,
        failed,
        weights.groups,
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
        claim.now,
        grant(tx, policy, claim, LeaseEvent::Granted).await?,
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
