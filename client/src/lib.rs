//! Wire types of the Forebay API, and an async client for agents and trainers written in Rust.
//!
//! The crate is separate from the service so that both sides, and every test, speak through the same types:
//!
//! - [`wire`]: requests, answers and problems, plain serde structs in the order of the API contract.
//! - `client` (feature `http`, on by default): a small client that retries what is safe to retry.
//! - `heartbeat` (feature `http`): keeps a lease alive while a trainer computes.

pub mod wire;

#[cfg(feature = "http")]
mod client;
#[cfg(feature = "http")]
mod heartbeat;

#[cfg(feature = "http")]
pub use client::{Client, ClientError, ClientOptions, RetryPolicy, TransportError, install_tls_provider};
#[cfg(feature = "http")]
pub use heartbeat::Heartbeat;
