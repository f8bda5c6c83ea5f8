//! What the log of steps has, for people who look at it.
//!
//! Separate from [`steps`](crate::ops::steps), which acks write.
use async_trait::async_trait;
use forebay_domain::{
    looking::steps::{ReadStepBuckets, ReadSteps, Spread, StepBucket, StepBuckets, StepCursor, StepPage, StepRow},
    pages::Order,
};

use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, args},
};

macro_rules! select_steps {
    ($name:literal, $condition:literal, $order:literal) => {
        Statement::new(concat!(
            $name,
            "
            SELECT step, epoch, acked_us, batches, groups, flat_groups, rollouts, tokens, trained_tokens, reward_sum,
                reward_count, all_mean, stale_sum, stale_max, waited_us, held_us, attempts, version, undone
            FROM step_log
            WHERE policy_pk = $1 AND run = $2 AND ",
            $condition,
            "
            ORDER BY ",
            $order,
            "
            LIMIT $5"
        ))
    };
}

#[async_trait]
impl Op for ReadSteps {
    type Output = StepPage;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<StepPage, StoreError> {
        const SELECT_OLDEST_STEPS: Statement =
            select_steps!("-- select_oldest_steps", "step >= $3 AND (step > $3 OR epoch > $4)", "step, epoch");
        const SELECT_NEWEST_STEPS: Statement = select_steps!(
            "-- select_newest_steps",
            "step <= $3 AND (step < $3 OR epoch < $4)",
            "step DESC, epoch DESC"
        );
        let (statement, first) = match self.order {
            Order::Oldest => (SELECT_OLDEST_STEPS, StepCursor { step: -1, epoch: i64::MAX }),
            Order::Newest => (SELECT_NEWEST_STEPS, StepCursor { step: i64::MAX, epoch: i64::MAX }),
        };
        let after = self.after.unwrap_or(first);
        let values = args![self.policy, self.run, after.step, after.epoch, self.limit];
        let rows = tx.fetch_all(statement, values).await?;
        let steps: Vec<StepRow> = rows.into_iter().map(step).collect::<Result<_, _>>()?;
        let last = steps.last().map(|last| StepCursor { step: last.step, epoch: last.epoch });
        let next = last.filter(|_| steps.len() == self.limit as usize);
        Ok(StepPage { steps, next })
    }
}

fn step(mut row: Row) -> Result<StepRow, StoreError> {
    Ok(StepRow {
        step: row.get("step")?,
        epoch: row.get("epoch")?,
        acked_at: row.get("acked_us")?,
        batches: row.get("batches")?,
        groups: row.get("groups")?,
        flat_groups: row.get("flat_groups")?,
        rollouts: row.get("rollouts")?,
        tokens: row.get("tokens")?,
        trained_tokens: row.get("trained_tokens")?,
        reward_sum: row.get("reward_sum")?,
        reward_count: row.get("reward_count")?,
        reward_all: row.get("all_mean")?,
        stale_sum: row.get("stale_sum")?,
        stale_max: row.get("stale_max")?,
        waited_us: row.get("waited_us")?,
        held_us: row.get("held_us")?,
        attempts: row.get("attempts")?,
        version: row.get("version")?,
        undone: row.get("undone")?,
    })
}

/// The mean and the bounds of a number in a bucket.
macro_rules! spread {
    ($name:literal, $value:literal) => {
        concat!(
            "AVG(",
            $value,
            ") AS ",
            $name,
            "_mean,
                MIN(",
            $value,
            ") AS ",
            $name,
            "_min,
                MAX(",
            $value,
            ") AS ",
            $name,
            "_max"
        )
    };
}

#[async_trait]
impl Op for ReadStepBuckets {
    type Output = StepBuckets;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<StepBuckets, StoreError> {
        // At most the bound of the log is read. Undone steps are counted and have no other part in the numbers.
        const SELECT_STEP_BUCKETS: Statement = Statement::new(concat!(
            "-- select_step_buckets
            SELECT bucket, MIN(step) AS step_from, MAX(step) AS step_to, MAX(acked_us) AS acked_us,
                CAST(SUM(1 - undone) AS BIGINT) AS steps, CAST(SUM(undone) AS BIGINT) AS undone,
                MAX(stale_most) AS stale_most, MAX(attempts_most) AS attempts_most, MAX(version_most) AS version_most,
                ",
            spread!("trained", "trained"),
            ",
                ",
            spread!("arrived", "arrived"),
            ",
                ",
            spread!("stale", "stale"),
            ",
                ",
            spread!("tokens", "tokens"),
            ",
                ",
            spread!("groups", "groups"),
            ",
                ",
            spread!("flat", "flat"),
            ",
                ",
            spread!("waited", "waited"),
            ",
                ",
            spread!("held", "held"),
            "
            FROM (
                SELECT (step - $3) / $5 AS bucket, step, acked_us, undone,
                    CASE WHEN undone = 0 THEN stale_max END AS stale_most,
                    CASE WHEN undone = 0 THEN attempts END AS attempts_most,
                    CASE WHEN undone = 0 THEN version END AS version_most,
                    CASE WHEN undone = 0 AND reward_count > 0 THEN reward_sum / reward_count END AS trained,
                    CASE WHEN undone = 0 THEN all_mean END AS arrived,
                    CASE WHEN undone = 0 AND groups > 0
                        THEN CAST(stale_sum AS DOUBLE PRECISION) / groups END AS stale,
                    CASE WHEN undone = 0 THEN CAST(tokens AS DOUBLE PRECISION) END AS tokens,
                    CASE WHEN undone = 0 THEN CAST(groups AS DOUBLE PRECISION) END AS groups,
                    CASE WHEN undone = 0 THEN CAST(flat_groups AS DOUBLE PRECISION) END AS flat,
                    CASE WHEN undone = 0 THEN CAST(waited_us AS DOUBLE PRECISION) / 1000 END AS waited,
                    CASE WHEN undone = 0 THEN CAST(held_us AS DOUBLE PRECISION) / 1000 END AS held
                FROM step_log
                WHERE policy_pk = $1 AND run = $2 AND step >= $3 AND step <= $4
            ) AS numbers
            GROUP BY bucket
            ORDER BY bucket"
        ));
        let values = args![self.policy, self.run, self.from, self.to, self.width];
        tx.fetch_all(SELECT_STEP_BUCKETS, values).await?.into_iter().map(bucket).collect()
    }
}

fn bucket(mut row: Row) -> Result<StepBucket, StoreError> {
    Ok(StepBucket {
        step_from: row.get("step_from")?,
        step_to: row.get("step_to")?,
        acked_at: row.get("acked_us")?,
        steps: row.get("steps")?,
        undone: row.get("undone")?,
        staleness_max: row.get("stale_most")?,
        attempts_max: row.get("attempts_most")?,
        version: row.get("version_most")?,
        reward_trained: spread(&mut row, "trained_mean", "trained_min", "trained_max")?,
        reward_all: spread(&mut row, "arrived_mean", "arrived_min", "arrived_max")?,
        staleness: spread(&mut row, "stale_mean", "stale_min", "stale_max")?,
        tokens: spread(&mut row, "tokens_mean", "tokens_min", "tokens_max")?,
        groups: spread(&mut row, "groups_mean", "groups_min", "groups_max")?,
        flat_groups: spread(&mut row, "flat_mean", "flat_min", "flat_max")?,
        waited_ms: spread(&mut row, "waited_mean", "waited_min", "waited_max")?,
        held_ms: spread(&mut row, "held_mean", "held_min", "held_max")?,
    })
}

fn spread(
    row: &mut Row,
    mean: &'static str,
    min: &'static str,
    max: &'static str,
) -> Result<Option<Spread>, StoreError> {
    let (mean, min, max): (Option<f64>, Option<f64>, Option<f64>) = (row.get(mean)?, row.get(min)?, row.get(max)?);
    Ok(mean.zip(min).zip(max).map(|((mean, min), max)| Spread { mean, min, max }))
}
