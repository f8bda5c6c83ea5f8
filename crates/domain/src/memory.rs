//! Memory that a decision asks for before it takes it.

/// Asks for this many bytes of memory, for segments that are larger than the turns they are assembled from.
pub type Memory<'m> = dyn FnMut(usize) -> bool + 'm;

/// There is no memory for the segments that turns would be assembled into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory for the segments that the turns would be assembled into")]
pub struct NoMemory;
