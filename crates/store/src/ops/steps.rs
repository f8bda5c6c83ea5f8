//! The log of steps: what the batches of each step of a trainer had in all, written by their acks.
//!
//! Separate from the batches, whose rows are deleted with their rollouts. A step has one row for each epoch in which it
//! was acked.

use forebay_domain::{
    clock::Timestamp,
    ids::{PolicyPk, Step, Version},
    lease::Batch,
    looking::steps::STEPS_MAX,
    policies::Policy,
};
use forebay_wire::Settle;

use crate::{
    error::StoreError,
    sql::{Statement, Tx, args},
};

/// Bound of the sum of a batch's rewards, so that sums of several batches do not overflow.
const REWARD_SUM_MAX: f64 = 1e18;

/// The name of the mean of all rewards that arrived before the cut, in the metrics of a batch.
const REWARD_ALL: &str = "reward/all";

/// Adds to the row of a step, with the function that takes the greater of two numbers. The means are weighted by the
/// rollouts of their batches.
macro_rules! log_step {
    ($greatest:literal) => {
        concat!(
            "-- log_step
            INSERT INTO step_log (
                policy_pk, run, step, epoch, acked_us, batches, groups, flat_groups, rollouts, tokens, trained_tokens,
                reward_sum, reward_count, all_mean, stale_sum, stale_max, waited_us, held_us, attempts, version, undone
            )
            VALUES ($1, $2, $3, $4, $5, 1, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, 0)
            ON CONFLICT (policy_pk, run, step, epoch) DO UPDATE SET
                acked_us = excluded.acked_us,
                batches = step_log.batches + 1,
                groups = step_log.groups + excluded.groups,
                flat_groups = step_log.flat_groups + excluded.flat_groups,
                rollouts = step_log.rollouts + excluded.rollouts,
                tokens = step_log.tokens + excluded.tokens,
                trained_tokens = step_log.trained_tokens + excluded.trained_tokens,
                reward_sum = step_log.reward_sum + excluded.reward_sum,
                reward_count = step_log.reward_count + excluded.reward_count,
                all_mean = CASE
                    WHEN step_log.all_mean IS NULL THEN excluded.all_mean
                    WHEN excluded.all_mean IS NULL THEN step_log.all_mean
                    ELSE (step_log.all_mean * step_log.rollouts + excluded.all_mean * excluded.rollouts)
                        / (step_log.rollouts + excluded.rollouts)
                END,
                stale_sum = step_log.stale_sum + excluded.stale_sum,
                stale_max = ",
            $greatest,
            "(step_log.stale_max, excluded.stale_max),
                waited_us = step_log.waited_us + excluded.waited_us,
                held_us = step_log.held_us + excluded.held_us,
                attempts = step_log.attempts + excluded.attempts,
                version = ",
            $greatest,
            "(step_log.version, excluded.version)"
        )
    };
}

/// Totals over the groups of a batch.
#[derive(Debug, Default)]
struct GroupSums {
    flat: i64,
    reward_sum: f64,
    reward_count: i64,
    stale_sum: i64,
    stale_max: i64,
}

/// Adds a batch that is acked now to its step.
pub(super) async fn log(
    tx: &mut Tx<'_>,
    policy: &Policy,
    batch: &Batch,
    step: Step,
    now: Timestamp,
) -> Result<(), StoreError> {
    const LOG_STEP: Statement = Statement { sqlite: log_step!("MAX"), postgres: log_step!("GREATEST") };
    let sums = sums(tx, batch).await?;
    let values = args![
        policy.policy_pk,
        policy.run,
        step,
        policy.epoch,
        now,
        batch.groups,
        sums.flat,
        batch.rollouts,
        batch.tokens,
        batch.weights.trained_tokens,
        sums.reward_sum.clamp(-REWARD_SUM_MAX, REWARD_SUM_MAX),
        sums.reward_count,
        batch.metrics.get(REWARD_ALL).copied(),
        sums.stale_sum,
        sums.stale_max,
        batch.waited_us,
        batch.held_us(now),
        batch.attempt,
        batch.version_current,
    ];
    tx.guarded(LOG_STEP, values, 1).await
}

/// Reads the groups of a batch. They are added up here, because Postgres refuses sums of floats that overflow.
async fn sums(tx: &mut Tx<'_>, batch: &Batch) -> Result<GroupSums, StoreError> {
    const SELECT_GROUP_SUMS: Statement = Statement::new(
        "-- select_group_sums
        SELECT kept + masked AS rollouts, reward_sum, reward_count, reward_min, reward_max, version_min, rules_pk
        FROM rollout_group
        WHERE batch_pk = $1 AND state = 'batched'",
    );
    let mut sums = GroupSums::default();
    for mut row in tx.fetch_all(SELECT_GROUP_SUMS, args![batch.batch_pk]).await? {
        let (low, high): (Option<f64>, Option<f64>) = (row.get("reward_min")?, row.get("reward_max")?);
        // Where turns or tokens have advantages of their own, a group may teach although its rollouts have equal rewards.
        let by_rollout = !tx.rules(row.get("rules_pk")?).await?.tokens_have_advantages();
        let is_flat = by_rollout && row.get::<i64>("rollouts")? > 1 && low.is_some() && low == high;
        sums.flat += i64::from(is_flat);
        sums.reward_sum += row.get::<f64>("reward_sum")?;
        sums.reward_count += row.get::<i64>("reward_count")?;
        let oldest: Option<Version> = row.get("version_min")?;
        let stale = oldest.map_or(0, |oldest| batch.version_current.0.saturating_sub(oldest.0).max(0));
        sums.stale_sum += stale;
        sums.stale_max = sums.stale_max.max(stale);
    }
    if sums.reward_sum.is_nan() {
        sums.reward_sum = 0.0;
    }
    Ok(sums)
}

/// Marks the steps that a resume goes back before. Returns how many it marked. If acks settle batches, a resume brings
/// none of them back, and their steps stay.
pub(super) async fn undo_after(tx: &mut Tx<'_>, policy: &Policy, step: Option<Step>) -> Result<u64, StoreError> {
    const UNDO_STEPS: Statement = Statement::new(
        "-- undo_steps
        UPDATE step_log
        SET undone = 1
        WHERE policy_pk = $1 AND run = $2 AND step > $3 AND undone = 0",
    );
    if policy.rules.settle == Settle::Ack {
        return Ok(0);
    }
    // Steps begin at 0.
    let after = step.map_or(-1, |step| step.0);
    tx.execute(UNDO_STEPS, args![policy.policy_pk, policy.run, after]).await
}

/// Deletes the steps of a policy beyond the newest ones.
pub(super) async fn trim(tx: &mut Tx<'_>, policy: PolicyPk) -> Result<(), StoreError> {
    const DELETE_RUNS_OF_STEPS: Statement = Statement::new(
        "-- delete_runs_of_steps
        DELETE FROM step_log
        WHERE policy_pk = $1
            AND run < (
                SELECT run FROM step_log WHERE policy_pk = $1 ORDER BY run DESC, step DESC, epoch DESC LIMIT 1 OFFSET $2
            )",
    );
    // Now the step at the bound, if there is one, is of the oldest run.
    const DELETE_STEPS: Statement = Statement::new(
        "-- delete_steps
        DELETE FROM step_log
        WHERE policy_pk = $1
            AND run = (SELECT MIN(run) FROM step_log WHERE policy_pk = $1)
            AND step < (
                SELECT step FROM step_log WHERE policy_pk = $1 ORDER BY run DESC, step DESC, epoch DESC LIMIT 1 OFFSET $2
            )",
    );
    for statement in [DELETE_RUNS_OF_STEPS, DELETE_STEPS] {
        tx.execute(statement, args![policy, STEPS_MAX - 1]).await?;
    }
    Ok(())
}
