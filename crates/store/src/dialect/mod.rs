//! Everything in which the databases differ, and nothing else.
//!
//! A [`SqlDialect`] runs operations: it decides which connection an operation gets, when its transaction commits, and
//! how values are bound and read. The statements themselves belong to the operations. If a statement needs a text for
//! each database, both stand side by side in a [`Statement`](super::sql::Statement).

pub(super) mod postgres;
pub(super) mod sqlite;

use crate::op::Op;
use std::sync::Arc;

use super::{
    health::HealthReporter,
    object_care::ObjectCare,
    segment_files::{Objects, PlaceReader, Standing},
};
use crate::{error::StoreError, peers::Peers};

/// A database that runs operations.
pub(super) trait SqlDialect: Send + Sync + 'static {
    /// How many transactions of ingest run at once. Posts that arrive meanwhile share the next one.
    const INGESTS: usize;

    /// Whether changes of tallies are appended and added to the tallies later.
    const APPENDS_TALLIES: bool = false;

    /// Runs an operation that writes, and answers after its commit is durable. It continues if the caller is dropped.
    fn write<O: Op>(&self, op: O) -> impl Future<Output = Result<O::Output, StoreError>> + Send;

    /// Runs an operation that only reads, on a consistent snapshot.
    fn read<O: Op>(&self, op: O) -> impl Future<Output = Result<O::Output, StoreError>> + Send;

    /// What the database lacks of its schema, as far as it does not find this out itself.
    fn missing(&self) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send {
        async { Ok(Vec::new()) }
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
    fn prove_ownership(
        &self,
        _objects: &Objects,
        _has_owned: bool,
    ) -> impl Future<Output = Result<Standing, StoreError>> + Send {
        async { Ok(Standing::Unclaimed) }
    }

    /// The connection to the other replicas, if the database can be shared.
    fn peers(&self) -> Option<Arc<dyn Peers>>;

    /// The health of the store, which every write updates.
    fn health_reporter(&self) -> &HealthReporter;

    /// Flushes and closes the database.
    fn close(&self) -> impl Future<Output = ()> + Send;
}
