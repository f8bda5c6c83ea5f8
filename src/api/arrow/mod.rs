//! Arrow IPC streams: the rows of a batch on their way out, and trajectories on their way in, one row per segment.
//!
//! The names of columns are those of the JSON fields. Lists of numbers cross as they lie in memory, so that neither
//! side parses them.

mod read;
mod write;

pub(super) use read::bundle;
pub(super) use write::{Encoder, row_bytes};
