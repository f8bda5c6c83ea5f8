//! The forms of trajectories and samples: JSON and Arrow.

pub(crate) mod arrow;
pub(crate) mod decode;
pub mod explain;
