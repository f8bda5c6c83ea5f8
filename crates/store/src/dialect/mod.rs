//! Everything in which the databases differ, and nothing else.
//!
//! A [`Dialect`] runs operations: it decides which connection an operation gets, when its transaction commits, and how
//! values are bound and read. The statements themselves belong to the operations. If a statement needs a text for each
//! database, both stand side by side in a [`Statement`](super::sql::Statement).

mod postgres;
mod sqlite;

use std::sync::Arc;

use async_trait::async_trait;
use forebay_domain::formats::payload::Codec;

use super::{
    health::HealthReporter,
    object_care::ObjectCare,
    payloads::PlaceReader,
    segment_files::{Objects, Standing},
    sql::Tx,
};
use crate::{error::StoreError, peers::Peers};

pub(super) use postgres::Postgres;
pub(super) use sqlite::{
    Files, MODE, Names, SEGMENTS, Sqlite, SqliteReading, folder_of, mark_copy, missing_from, sync_folder, with_suffix,
};

/// One atomic operation on the store, as a value: it may run again when the database asks for a retry.
#[async_trait]
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

    /// The number of bytes that it writes, for bounding a commit.
    fn bytes(&self) -> usize {
        0
    }

    /// Runs inside a transaction. An error rolls back all its changes.
    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError>;
}

/// The queue in which an operation waits: leases and acks never wait behind megabytes of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
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

    /// How many transactions of ingest run at once. Posts that arrive meanwhile share the next one.
    const INGESTS: usize;

    /// Whether changes of tallies are appended and added to the tallies later.
    const APPENDS_TALLIES: bool = false;

    /// Runs an operation that writes, and answers after its commit is durable. It continues if the caller is dropped.
    async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError>;

    /// Runs an operation that only reads, on a consistent snapshot.
    async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError>;

    /// What the database lacks of its schema, as far as it does not find this out itself.
    async fn missing(&self) -> Result<Vec<String>, StoreError> {
        Ok(Vec::new())
    }

    /// What reads payloads that are not in the database, if there can be any.
    fn places(&self) -> Option<PlaceReader> {
        None
    }

    /// Whether it moves payloads to where the configuration wants them, by itself.
    fn is_moving_payloads(&self) -> bool {
        false
    }

    /// The care for payloads in an object store, if there is one.
    fn object_care(&self) -> Option<&ObjectCare> {
        None
    }

    /// Proves that the database owns its objects, which may have been copied or adopted since. `has_owned`: it did at the
    /// last proof.
    async fn prove_ownership(&self, _objects: &Objects, _has_owned: bool) -> Result<Standing, StoreError> {
        Ok(Standing::Unclaimed)
    }

    /// The connection to the other replicas, if the database can be shared.
    fn peers(&self) -> Option<Arc<dyn Peers>>;

    /// The health of the store, which every write updates.
    fn health_reporter(&self) -> &HealthReporter;

    /// Flushes and closes the database.
    async fn close(&self);
}
