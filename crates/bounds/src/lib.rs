//! What bounds the memory and the processors that clients can make the service use.
//!
//! - [`budget`]: bytes that clients make the service hold.
//! - [`work`]: work that grows with the bytes of clients, on as many threads as there are cores.
//!
//! It is a crate because every part that touches clients' or engines' bytes shares these bounds. If each part counted
//! the cores for itself, several times as much work would run at once, and each piece of it holds memory.

pub mod budget;
pub mod work;
