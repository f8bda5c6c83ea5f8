//! The commands of the writer: operations that wait for their commit, and the request to end.
//!
//! Separate from the writer, which decides about commits and knows no operation.

use std::panic::AssertUnwindSafe;

use async_trait::async_trait;
use futures::FutureExt as _;
use tokio::sync::oneshot;
use tracing::Span;

use crate::{
    error::StoreError,
    op::{AnyOp, AnyOutput, Class},
    sql::Tx,
};

/// A command of any operation, waiting for its commit.
#[async_trait]
pub(super) trait Command: Send {
    /// Runs the operation. Returns whether it may be committed.
    async fn run(&mut self, tx: &mut Tx<'_>) -> bool;

    /// Answers the caller after the commit, or with the reason why there was none.
    fn answer(self: Box<Self>, committed: Result<(), StoreError>);

    fn bytes(&self) -> usize;

    /// Whether its caller expects an answer at once and it writes little.
    fn is_urgent(&self) -> bool;

    /// What it shows about the store once it is committed: the error with which it ended, or that writing works.
    fn finding(&self) -> Option<Result<(), &StoreError>> {
        None
    }

    /// The span of its caller.
    fn span(&self) -> Option<&Span> {
        None
    }

    /// Whether it asks the writer to end.
    fn closes(&self) -> bool {
        false
    }
}

pub(super) struct Pending {
    pub(super) op: Box<dyn AnyOp>,
    pub(super) outcome: Option<Result<AnyOutput, StoreError>>,
    pub(super) span: Span,
    pub(super) reply: oneshot::Sender<Result<AnyOutput, StoreError>>,
}

#[async_trait]
impl Command for Pending {
    async fn run(&mut self, tx: &mut Tx<'_>) -> bool {
        if self.op.is_abandonable() && self.reply.is_closed() {
            return false;
        }
        // A bug in one operation must not end the writer for all callers.
        let run = AssertUnwindSafe(self.op.run(tx)).catch_unwind();
        let outcome = run.await.unwrap_or_else(|_| Err(StoreError::Corrupt("an operation panicked".to_owned())));
        self.outcome.insert(outcome).is_ok()
    }

    fn answer(self: Box<Self>, committed: Result<(), StoreError>) {
        let outcome = match (committed, self.outcome) {
            // An operation's own error is more specific than that of its commit.
            (_, Some(Err(error))) | (Err(error), _) => Err(error),
            (Ok(()), Some(output)) => output,
            (Ok(()), None) => Err(StoreError::Closed),
        };
        // If the caller has gone, the outcome is the same.
        let _ = self.reply.send(outcome);
    }

    fn bytes(&self) -> usize {
        self.op.bytes()
    }

    fn is_urgent(&self) -> bool {
        self.op.class() == Class::Control
    }

    fn finding(&self) -> Option<Result<(), &StoreError>> {
        match self.outcome.as_ref()? {
            Ok(_) => self.op.probes().then_some(Ok(())),
            Err(error) => Some(Err(error)),
        }
    }

    fn span(&self) -> Option<&Span> {
        Some(&self.span)
    }
}

pub(super) struct Close {
    pub(super) reply: Option<oneshot::Sender<()>>,
}

#[async_trait]
impl Command for Close {
    async fn run(&mut self, _tx: &mut Tx<'_>) -> bool {
        true
    }

    fn answer(mut self: Box<Self>, _committed: Result<(), StoreError>) {
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(());
        }
    }

    fn bytes(&self) -> usize {
        0
    }

    fn is_urgent(&self) -> bool {
        true
    }

    fn closes(&self) -> bool {
        true
    }
}

/// A command that does nothing.
#[cfg(test)]
pub(super) struct Idle {
    pub(super) is_urgent: bool,
}

#[cfg(test)]
#[async_trait]
impl Command for Idle {
    async fn run(&mut self, _tx: &mut Tx<'_>) -> bool {
        true
    }

    fn answer(self: Box<Self>, _committed: Result<(), StoreError>) {}

    fn bytes(&self) -> usize {
        0
    }

    fn is_urgent(&self) -> bool {
        self.is_urgent
    }
}
