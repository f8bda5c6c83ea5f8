//! Forebay: the durable rollout buffer between LLM agents and the trainers that learn from them.
//!
//! Agents POST complete trajectories. The buffer validates, filters, groups and stores them durably. A trainer leases
//! finalized batches. The modules, in reading order:
//!
//! - [`forebay_domain`]: a crate of its own, what becomes of a rollout as pure decisions.
//! - [`buffer`]: what waits, wakes, leases and sweeps.
//! - [`forebay_store`]: a crate of its own, the same stages as atomic operations on SQLite or Postgres.
//! - [`keyring`]: the keys of the store, kept in memory and at most a second old.
//! - [`api`]: the mapping between HTTP and the domain, without decisions.
//! - [`agents`]: the listener of agents, whose calls are recorded in sessions.
//! - [`facades`]: listeners that speak the protocols of other rollout buffers.
//! - [`server`], [`tls`]: accept loop, background tasks, graceful shutdown.
//! - `budget`: how much clients make the service hold, for all listeners.
//! - `framing`: which requests are ambiguous, for all listeners.
//! - [`config`], [`forebay_telemetry::metrics`], [`telemetry`]: what the other modules depend on.

pub mod agents;
pub mod api;
mod budget;
pub mod buffer;
pub mod config;
pub mod facades;
mod framing;
pub mod keyring;
mod panics;
pub mod server;
pub mod telemetry;
pub mod tls;
