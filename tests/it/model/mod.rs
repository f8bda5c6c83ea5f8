//! The model test: random histories on the real buffer and on a pure reference of it, compared after every step.
//!
//! Separate from the tests of single behaviours, which say what somebody thought of: this one finds the interleavings
//! of posts, leases, expiry, resume, retention and restart that nobody did.
//!
//! - [`view`]: what can be seen of a buffer; both sides speak in it.
//! - [`reference`]: the oracle, plain and independent.
//! - [`operation`]: what may happen.
//! - [`system`], [`names`]: the real buffer, told and seen in the same terms.
//! - [`clock`]: the clock of a replica, which follows that of the database wherever the history moves it.
//! - [`coverage`]: which operations met which states.
//! - [`run`]: histories, one after another, compared, shrunk and counted.
//!
//! Every answer is compared as a whole, every step, samples of a claimed batch included. So is the whole ledger
//! (rollouts, groups, batches, policies, and tallies against a recount of the rows), after every few steps and the last
//! one of each history, because reading it takes ten times as long as an operation.
//!
//! `FOREBAY_MODEL_STEPS` (per store) and `FOREBAY_MODEL_SEED` set the length of a run and its first seed;
//! `FOREBAY_MODEL_LEDGER_EVERY` trades comparisons of whole ledgers for steps. A failure prints the seed of its history:
//! with that seed and one step it runs again, alone.
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
