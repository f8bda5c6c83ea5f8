//! The trainer: a separate process that turns finalized batches into better policies.
//!
//! The trainer talks to the buffer only over HTTP, and is the reference for anyone who writes another trainer. This is
//! the order in which one step uses its modules:
//!
//! 1. [`service`] and [`feed`]: one policy of a buffer; batches leased ahead, with heartbeats.
//! 2. [`rows`] and [`microbatch`]: samples become checked rows, rows become tensors under a token budget.
//! 3. [`model`] and [`head`]: Hugging Face decoders; log-probabilities over the vocabulary, one chunk at a time.
//! 4. [`returns`] and [`loss`]: advantages per token, and every objective as a pure function of tensors.
//! 5. [`optimizer`]: updates, gradient clipping, schedules.
//! 6. [`learner`]: one step made of the above: gradients of a batch, and the update of the weights.
//! 7. [`state`] and [`checkpoint`]: the state that survives a crash, and weights as checkpoints that other programs can
//!    read.
//! 8. [`publish`] and [`engine`]: weight versions for agents and inference engines, in parallel with training.
//! 9. [`train`]: the loop, from top to bottom, and [`report`], its metrics.
//! 10. [`rollout`], [`generate`] and [`published`]: a small real agent that plays with the newest version, so that the
//!     whole loop runs on one machine.
//! 11. [`serve`](mod@serve): a small inference server, for tests, examples and single machines.
//! 12. [`bench`](mod@bench): measures the speed of a step, without a service.

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

pub mod published;

pub mod generate;

mod random;

pub mod rollout;

pub mod serve;

pub mod bench;

pub mod config;

/// An error and its causes in one line, for the log.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
