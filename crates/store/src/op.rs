//! An operation on the store, as a value.

use std::any::Any;

use async_trait::async_trait;

use crate::{error::StoreError, sql::Tx};

/// One atomic operation on the store, as a value: it may run again when the database asks for a retry.
///
/// Its future is boxed, so that it is compiled here. A native one is compiled by whoever polls it, and was compiled anew in
/// the crates of the API, the facades and the agents, in the program and in the tests, which took two thirds of a release
/// build after a change of one line.
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

    /// Whether the service has work to do if this is written. Marks of the clock and snapshots are not work: an idle
    /// service would otherwise write them for ever, each because of the one before.
    const IS_WORK: bool = true;

    /// The number of bytes that it writes, for bounding a commit.
    fn bytes(&self) -> usize {
        0
    }

    /// Runs inside a transaction. An error rolls back all its changes.
    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError>;
}

/// The output of an operation whose type is not known here.
pub(crate) type AnyOutput = Box<dyn Any + Send>;

/// An operation of any type. What runs operations is compiled once for all of them.
#[async_trait]
pub(crate) trait AnyOp: Send + Sync {
    /// [`Op::CLASS`].
    fn class(&self) -> Class;

    /// [`Op::ABANDONABLE`].
    fn is_abandonable(&self) -> bool;

    /// [`Op::PROBES`].
    fn probes(&self) -> bool;

    /// [`Op::bytes`].
    fn bytes(&self) -> usize;

    /// [`Op::run`].
    async fn run(&self, tx: &mut Tx<'_>) -> Result<AnyOutput, StoreError>;
}

#[async_trait]
impl<O: Op> AnyOp for O {
    fn class(&self) -> Class {
        O::CLASS
    }

    fn is_abandonable(&self) -> bool {
        O::ABANDONABLE
    }

    fn probes(&self) -> bool {
        O::PROBES
    }

    fn bytes(&self) -> usize {
        Op::bytes(self)
    }

    async fn run(&self, tx: &mut Tx<'_>) -> Result<AnyOutput, StoreError> {
        Ok(Box::new(Op::run(self, tx).await?))
    }
}

/// The queue in which an operation waits: leases and acks never wait behind megabytes of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Small and urgent.
    Control,
    /// Ingest.
    Bulk,
}
