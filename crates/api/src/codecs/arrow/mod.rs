//! Arrow IPC streams, with one row per segment: responses with the rows of a batch or an export, and requests with trajectories.
//!
//! Columns have the names of the JSON fields. Lists of numbers are transferred in their memory layout, so that neither
//! side parses them.

mod read;
mod types;
pub(crate) mod uploads;
mod write;

pub(crate) use read::bundle;
pub(crate) use write::{Encoder, samples, samples_schema};
