//! An operation on the store, as a value.

use crate::{error::StoreError, sql::Tx};

/// One atomic operation on the store, as a value: it may run again when the database asks for a retry.
pub trait Op: Send + Sync + 'static {
    /// The answer once the operation is committed.
    type Output: Send + 'static;

    /// The queue in which it waits.
    const CLASS: Class = Class::Control;

    /// Whether it is skipped if its caller has gone before it commits. A lease granted to a caller that has gone would
    /// only block the batch.
    const ABANDONABLE: bool = false;

    /// Whether its commit shows that the database can write. Most other operations may have nothing to write.
    const PROBES: bool = false;

    /// Whether the service has work to do if this is written. Marks of the clock and snapshots are not work: an idle
    /// service would otherwise write them for ever, each because of the one before.
    const IS_WORK: bool = true;

    /// The number of bytes that it writes, for bounding a commit.
    fn bytes(&self) -> usize {
        0
    }

    /// Runs inside a transaction. An error rolls back all its changes.
    fn run(&self, tx: &mut Tx<'_>) -> impl Future<Output = Result<Self::Output, StoreError>> + Send;
}

/// The queue in which an operation waits: leases and acks never wait behind megabytes of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Small and urgent.
    Control,
    /// Ingest.
    Bulk,
}
