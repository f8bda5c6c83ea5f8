//! Forebay: the durable rollout buffer between LLM agents and the trainers that learn from them.
//!
//! Agents POST complete trajectories. The buffer validates, filters, groups and stores them durably. A trainer leases
//! finalized batches. This crate is the program: [`server`] and [`tls`] run the listeners of [`forebay_api`],
//! [`forebay_agents`] and [`forebay_facades`], as [`config`] says. Below them are [`forebay_service`], the buffer, which
//! waits, wakes, leases and sweeps; [`forebay_store`], its atomic operations on SQLite and Postgres; and
//! [`forebay_domain`], what becomes of a rollout as pure decisions.

pub mod config;
pub mod server;
pub mod tls;
