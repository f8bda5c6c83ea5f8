//! The stages of a rollout, in the order in which it passes them. Each is followed by the calculations that it uses.

pub mod admission;

pub mod trajectory;

pub mod assemble;

pub mod session;

pub mod warnings;

pub mod surrogates;

pub mod ingest;

pub mod evaluation;

pub mod finalize;

pub mod advantage;

pub mod batch;

pub mod staleness;

pub mod weights;

pub mod lease;

pub mod reading;

pub(in crate::buffer) mod pages;

pub mod samples;

pub mod shard;

pub mod lineage;

pub mod export;

pub mod content;

pub mod series;

pub mod step_log;

pub mod dry_run;

pub mod sweep;
