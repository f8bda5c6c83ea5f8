//! Forebay: the durable rollout buffer between LLM agents and the trainers that learn from them.
//!
//! Agents POST complete trajectories; the buffer validates, filters and groups them durably; a trainer leases
//! finalized batches. A tour, in reading order:
//!
//! - [`buffer`]: the domain, one file per stage. Start at [`buffer::trajectory`].
//! - [`store`]: the same stages as atomic operations on SQLite or Postgres.
//! - [`access`]: keys, and which policies they see.
//! - [`api`]: HTTP in and out; no decisions.
//! - [`server`], [`tls`]: accept loop, background tasks, graceful stop.
//! - [`config`], [`clock`], [`metrics`], [`telemetry`]: what the others are given.

pub mod access;
pub mod api;
pub mod buffer;
pub mod clock;
pub mod config;
pub mod metrics;
mod panics;
pub mod server;
pub mod store;
pub mod telemetry;
pub mod tls;
