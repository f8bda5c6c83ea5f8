//! The handlers, one file for each resource.

pub(crate) mod admissions;
pub(crate) mod batches;
pub(crate) mod bulk;
pub(crate) mod console;
pub(crate) mod evals;
pub(crate) mod groups;
pub(crate) mod imports;
pub(crate) mod keys;
pub(crate) mod looking;
pub(crate) mod media;
pub(crate) mod operations;
pub mod policies;
pub(crate) mod samples;
pub(crate) mod score_leases;
pub(crate) mod scores;
pub(crate) mod sessions;
pub mod tokenizers;
pub(crate) mod trajectories;
pub(crate) mod whoami;
