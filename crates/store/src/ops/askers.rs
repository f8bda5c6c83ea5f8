//! Consumers that wait for a batch, at whichever replica.
use forebay_domain::{askers::Asker, clock::Timestamp, ids::PolicyPk};

use super::policy;
use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, args},
};

/// Writes which consumers wait at a process, and which do not any more.
pub struct WriteAskers {
    pub askers: Vec<Asker>,
    pub now: Timestamp,
}

impl Op for WriteAskers {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        // A consumer that has asked another replica shortly before waits since then.
        const WRITE_ASKER: Statement = Statement::new(
            "-- write_asker
            INSERT INTO asker (policy_pk, consumer, since_us, asked_us, until_us)
            VALUES ($1, $2, $3, $4, $5)
            ON CONFLICT (policy_pk, consumer) DO UPDATE SET
                since_us = CASE
                    WHEN asker.until_us >= excluded.asked_us AND asker.since_us < excluded.since_us THEN asker.since_us
                    ELSE excluded.since_us
                END,
                asked_us = excluded.asked_us,
                until_us = excluded.until_us",
        );
        // If the consumer asks another replica since, it waits there.
        const END_ASKER: Statement = Statement::new(
            "-- end_asker
            DELETE FROM asker
            WHERE policy_pk = $1 AND consumer = $2 AND asked_us <= $3",
        );
        // A process that was killed leaves rows.
        const FORGET_ASKERS: Statement = Statement::new(
            "-- forget_askers
            DELETE FROM asker
            WHERE policy_pk = $1 AND until_us < $2",
        );
        for asker in &self.askers {
            let Some(policy) = policy::find(tx, &asker.policy).await? else { continue };
            let (policy, consumer) = (policy.policy_pk, asker.consumer.as_str());
            if asker.is_over {
                tx.execute(END_ASKER, args![policy, consumer, asker.asked_at]).await?;
            } else {
                let values = args![policy, consumer, asker.since, asker.asked_at, asker.until];
                tx.guarded(WRITE_ASKER, values, 1).await?;
            }
            tx.execute(FORGET_ASKERS, args![policy, self.now]).await?;
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
    const END_WAIT: Statement = Statement::new(
        "-- end_wait
        DELETE FROM asker
        WHERE policy_pk = $1 AND consumer = $2
        RETURNING since_us, until_us",
    );
    let Some(mut row) = tx.fetch_optional(END_WAIT, args![policy, consumer]).await? else { return Ok(None) };
    let (since, until): (Timestamp, Timestamp) = (row.get("since_us")?, row.get("until_us")?);
    Ok((until >= now).then_some(since))
}
