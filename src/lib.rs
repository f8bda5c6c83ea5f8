//! Forebay: the durable rollout buffer between LLM agents and the trainers that learn from them.
//!
//! Agents POST complete trajectories. The buffer validates, filters, groups and stores them durably. A trainer leases
//! finalized batches. The modules, in reading order:
//!
//! - [`forebay_domain`]: a crate of its own, what becomes of a rollout as pure decisions.
//! - [`buffer`]: what waits, wakes, leases and sweeps.
//! - [`store`]: the same stages as atomic operations on SQLite or Postgres.
//! - [`access`]: keys, and which policies they may access.
//! - [`api`]: the mapping between HTTP and the domain, without decisions.
//! - [`agents`]: the listener of agents, whose calls are recorded in sessions.
//! - [`facades`]: listeners that speak the protocols of other rollout buffers.
//! - [`server`], [`tls`]: accept loop, background tasks, graceful shutdown.
//! - `budget`: how much clients make the service hold, for all listeners.
//! - `framing`: which requests are ambiguous, for all listeners.
//! - [`config`], [`metrics`], [`telemetry`]: what the other modules depend on.

pub mod access;
pub mod agents;
pub mod api;
mod budget;
pub mod buffer;
pub mod config;
pub mod facades;
mod framing;
pub mod metrics;
mod panics;
pub mod server;
pub mod store;
pub mod telemetry;
pub mod tls;
