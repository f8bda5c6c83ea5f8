//! Forebay: the durable rollout buffer between LLM agents and the trainers that learn from them.
//!
//! Agents POST complete trajectories; the buffer validates, filters and groups them durably; a trainer leases
//! finalized batches. A tour, in reading order:
//!
//! - [`buffer`]: the domain, one file per stage. Start at [`buffer::trajectory`].
//! - [`store`]: the same stages as atomic operations on SQLite or Postgres.




pub mod buffer;
pub mod store;
pub mod clock;
pub mod metrics;
