//! The model test: random histories on the real buffer and on a pure reference of it, compared after every step.
//!
//! This is separate from the tests of single behaviours, which cover only cases that somebody thought of. The model
//! test finds other interleavings of posts, leases, expiry, resume, retention and restart.
//!
//! - [`view`]: what can be observed of a buffer, in types that both sides use.
//! - [`reference`]: the oracle, simple and independent of the service's code.
//! - [`operation`]: the operations of a history.
//! - [`system`], [`names`]: the real buffer behind the same types.
//! - [`clock`]: the clock of a replica, which follows that of the database wherever the history moves it.
//! - [`coverage`]: which operations met which states.
//! - [`run`]: runs histories, compares, shrinks and counts them.
//!
//! After every step the whole answer is compared, including the samples of a claimed batch. The whole ledger (rollouts,
//! groups, batches, policies, and tallies against a recount of the rows) is compared after every few steps and at the
//! end of each history, because reading it takes ten times as long as an operation.
//!
//! `FOREBAY_MODEL_STEPS` (per store) and `FOREBAY_MODEL_SEED` set the length of a run and its first seed. A larger
//! `FOREBAY_MODEL_LEDGER_EVERY` compares whole ledgers less often and so runs more steps in the same time. A failure
//! prints the seed of its history; with that seed and one step, the history runs again alone.
//!
//! Sessions are compared like everything else: what they answer, what they hold, and the segments that their calls become,
//! for which the reference has the oracle of the assembler's own tests.
//!
//! To add an operation: a variant in [`view::Call`] and [`operation::Operation`], its meaning in [`reference`], its
//! call in [`system`], and the states that it must meet in [`coverage`].

mod clock;
mod coverage;
mod names;
mod operation;
mod reference;
mod run;
mod system;
mod view;
