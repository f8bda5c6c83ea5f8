//! Everything in which the databases differ, and nothing else.
//!
//! A [`Dialect`] runs operations: it decides which connection an operation gets, when its transaction commits, and how
//! values are bound and read. The statements themselves are the operations'; where one needs two texts, both stand
//! side by side in a [`Statement`](super::sql::Statement).

mod postgres;
mod sqlite;

use std::sync::Arc;

use async_trait::async_trait;

pub(super) use postgres::Postgres;
pub(super) use sqlite::{Files, Names, Sqlite, folder_of, mark_copy, sync_folder, with_suffix};

use super::{Peers, StoreError, health::Vitals, sql::Tx};
use crate::buffer::payload::Codec;

/// One atomic operation on the store, as a value: it may run again when the database asks for a retry.
#[async_trait]
pub(super) trait Op: Send + Sync + 'static {
    /// What it answers once it is committed.
    type Output: Send + 'static;

    /// Which queue it waits in.
    const CLASS: Class = Class::Control;

    /// Nothing is done when the caller is gone before it commits: a lease granted to nobody helps nobody.
    const ABANDONABLE: bool = false;

    /// Its commit shows that the database can write: most others may have nothing to write.
    const PROBES: bool = false;

    /// Bytes that it writes, for bounding a commit.
    fn bytes(&self) -> usize {
        0
    }

    /// Runs inside a transaction; an error rolls back everything that it did.
    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError>;
}

/// Which queue an operation waits in: leases and acks never wait behind megabytes of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Small and urgent.
    Control,
    /// Ingest.
    Bulk,
}

/// A database that runs operations.
#[async_trait]
pub(super) trait Dialect: Send + Sync + 'static {
    /// The form in which payloads are packed.
    const PAYLOADS: Codec;

    /// Transactions of ingest that run at once; posts that come meanwhile share the next.
    const INGESTS: usize;

    /// Whether changes of tallies are appended, to be added to the tallies later.
    const APPENDS_TALLIES: bool = false;

    /// Runs an operation that writes; answers after its commit is durable. Goes on when the caller is dropped.
    async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError>;

    /// Runs an operation that only reads, on a consistent snapshot.
    async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError>;

    /// The way to the other replicas, where the database can be shared.
    fn peers(&self) -> Option<Arc<dyn Peers>>;

    /// What the last writes say about the next.
    fn vitals(&self) -> &Vitals;

    /// Flushes and closes.
    async fn close(&self);
}
