//! Forebay: the durable rollout buffer between LLM agents and the trainers that learn from them.
//!
//! Agents POST complete trajectories. The buffer validates, filters, groups and stores them durably. A trainer leases
//! finalized batches. Below this crate are [`forebay_domain`], what becomes of a rollout as pure decisions;
//! [`forebay_store`], the same stages as atomic operations on SQLite or Postgres; and [`forebay_service`], the buffer,
//! which waits, wakes, leases and sweeps. The modules here, in reading order:
//!
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
pub mod config;
pub mod facades;
mod framing;
mod panics;
pub mod server;
pub mod telemetry;
pub mod tls;
