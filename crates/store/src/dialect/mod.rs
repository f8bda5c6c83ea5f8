//! Everything in which the databases differ, and nothing else.
//!
//! A [`SqlDialect`] runs operations: it decides which connection an operation gets, when its transaction commits, and
//! how values are bound and read. The statements themselves belong to the operations. If a statement needs a text for
//! each database, both stand side by side in a [`Statement`](super::sql::Statement).

pub(super) mod postgres;
pub(super) mod sqlite;

use std::sync::Arc;

use async_trait::async_trait;

use super::{
    health::HealthReporter,
    object_care::ObjectCare,
    segment_files::{Objects, PlaceReader, Standing},
};
use crate::{
    error::StoreError,
    op::{AnyOp, AnyOutput, Op},
    peers::Peers,
};

/// A database that runs operations.
#[async_trait]
pub(super) trait SqlDialect: Send + Sync + 'static {
    /// How many transactions of ingest run at once. Posts that arrive meanwhile share the next one.
    fn ingests(&self) -> usize;

    /// Whether changes of tallies are appended and added to the tallies later.
    fn appends_tallies(&self) -> bool {
        false
    }

    /// Runs an operation that writes, and answers after its commit is durable. It continues if the caller is dropped.
    async fn write_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError>;

    /// Runs an operation that only reads, on a consistent snapshot.
    async fn read_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError>;

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

/// Runs operations and returns outputs of their own types.
pub(super) trait Runs {
    /// [`SqlDialect::write_any`].
    fn write<O: Op>(&self, op: O) -> impl Future<Output = Result<O::Output, StoreError>> + Send;

    /// [`SqlDialect::read_any`].
    fn read<O: Op>(&self, op: O) -> impl Future<Output = Result<O::Output, StoreError>> + Send;
}

impl<D: SqlDialect + ?Sized> Runs for D {
    async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        self.write_any(Box::new(op)).await.map(output::<O>)
    }

    async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        self.read_any(Box::new(op)).await.map(output::<O>)
    }
}

fn output<O: Op>(output: AnyOutput) -> O::Output {
    *output.downcast().expect("an operation answers with its own output")
}
