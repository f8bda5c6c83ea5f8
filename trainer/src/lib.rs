//! The trainer: a separate process that turns finalized batches into better policies.
//!
//! It talks to the buffer over HTTP only, and is the reference for everybody who writes another one. A tour, in the
//! order in which one step goes through it:
//!
//! 1. [`service`] and [`feed`]: one policy of a buffer; batches leased ahead, kept alive by heartbeats.
//! 2. [`rows`] and [`microbatch`]: samples become checked rows, rows become tensors under a token budget.
//! 3. [`model`] and [`head`]: Hugging Face decoders; log-probabilities over the vocabulary, a chunk at a time.
//! 4. [`loss`] and [`returns`]: every objective as a pure function of tensors.
//! 5. [`optimizer`]: updates, gradient clipping, schedules.
//! 6. [`learner`]: the above as one step: gradients of a batch, and moving the weights by them.
//! 7. [`state`] and [`checkpoint`]: what survives a crash, and weights as checkpoints that others read.
//! 8. [`publish`] and [`engine`]: weight versions for agents and inference engines, beside training.
//! 9. [`train`]: the loop, top to bottom, and [`report`], what it tells.
//! 10. [`rollout`] and [`generate`]: a small real agent, so that the loop closes on one machine.
//! 11. [`bench`]: the pace of a step, without a service.

pub mod service;

pub mod feed;

pub mod rows;

pub mod microbatch;

pub mod model;

pub mod head;

pub mod loss;

pub mod returns;

pub mod optimizer;

pub mod learner;

pub mod state;

pub mod checkpoint;

pub mod publish;

pub mod engine;

pub mod train;

pub mod report;

pub mod generate;

mod random;

pub mod rollout;

pub mod bench;

pub mod config;

/// An error and its causes in one line, for the log.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
