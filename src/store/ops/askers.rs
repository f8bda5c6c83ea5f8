//! Consumers that wait for a batch, at whichever replica.

use crate::{
    buffer::{ids::PolicyPk, port::StoreError},
    clock::Timestamp,
    store::sql::{Statement, Tx, args},
};

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
