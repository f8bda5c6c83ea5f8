//! Consumers that wait for a batch, at whichever replica.
use async_trait::async_trait;
use forebay_domain::{clock::Timestamp, consumers::ConsumerWait, ids::PolicyPk};

use super::policy;
use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, args},
};

/// Writes which consumers wait at a process, and which do not any more.
pub struct WriteWaits {
    pub waits: Vec<ConsumerWait>,
    pub now: Timestamp,
}

#[async_trait]
impl Op for WriteWaits {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        // A consumer that has asked another replica shortly before waits since then.
        const WRITE_WAIT: Statement = Statement::new(
            "-- write_wait
            INSERT INTO waiting_consumer (policy_pk, consumer, since_us, asked_us, until_us)
            VALUES ($1, $2, $3, $4, $5)
            ON CONFLICT (policy_pk, consumer) DO UPDATE SET
                since_us = CASE
                    WHEN waiting_consumer.until_us >= excluded.asked_us
                        AND waiting_consumer.since_us < excluded.since_us THEN waiting_consumer.since_us
                    ELSE excluded.since_us
                END,
                asked_us = excluded.asked_us,
                until_us = excluded.until_us",
        );
        // If the consumer asks another replica since, it waits there.
        const END_WAIT: Statement = Statement::new(
            "-- end_wait
            DELETE FROM waiting_consumer
            WHERE policy_pk = $1 AND consumer = $2 AND asked_us <= $3",
        );
        // A process that was killed leaves rows.
        const FORGET_WAITS: Statement = Statement::new(
            "-- forget_waits
            DELETE FROM waiting_consumer
            WHERE policy_pk = $1 AND until_us < $2",
        );
        for wait in &self.waits {
            let Some(policy) = policy::find(tx, &wait.policy).await? else { continue };
            let (policy, consumer) = (policy.policy_pk, wait.consumer.as_str());
            if wait.is_over {
                tx.execute(END_WAIT, args![policy, consumer, wait.asked_at]).await?;
            } else {
                let values = args![policy, consumer, wait.since, wait.asked_at, wait.until];
                tx.guarded(WRITE_WAIT, values, 1).await?;
            }
            tx.execute(FORGET_WAITS, args![policy, self.now]).await?;
        }
        Ok(())
    }
}

/// Ends the wait of a consumer that gets a batch. Returns since when it has waited, if it has asked before and its wait
/// was not over.
pub(super) async fn granted(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    consumer: &str,
    now: Timestamp,
) -> Result<Option<Timestamp>, StoreError> {
    const END_GRANTED_WAIT: Statement = Statement::new(
        "-- end_granted_wait
        DELETE FROM waiting_consumer
        WHERE policy_pk = $1 AND consumer = $2
        RETURNING since_us, until_us",
    );
    let Some(mut row) = tx.fetch_optional(END_GRANTED_WAIT, args![policy, consumer]).await? else { return Ok(None) };
    let (since, until): (Timestamp, Timestamp) = (row.get("since_us")?, row.get("until_us")?);
    Ok((until >= now).then_some(since))
}
