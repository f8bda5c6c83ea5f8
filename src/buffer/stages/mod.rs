//! The stages of a rollout, in the order in which it passes them. Each is followed by the calculations that it uses.

pub mod admission;

pub mod session;

pub mod ingest;

pub mod lease;

pub mod reading;

pub(in crate::buffer) mod payloads;

pub mod samples;

pub mod lineage;

pub mod export;

pub mod content;

pub mod series;

pub mod step_log;

pub mod dry_run;

pub mod sweep;
