//! Memory that a decision asks for before it takes it.

/// Asks for so many bytes of memory, for what is made of a trajectory besides itself: the segments of turns, and the bytes of
/// data URLs.
pub type Memory<'m> = dyn FnMut(usize) -> bool + 'm;

/// There is no memory for what is made of a trajectory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory for the segments of turns, or for the bytes of data URLs")]
pub struct NoMemory;
