//! What the service tells about itself: its metrics with their dashboard, its log, its spans, and which requests a line of
//! the log is about.
//!
//! A crate of its own, because the store measures its commits and everything above it measures as well.

pub mod dashboard;
pub mod log;
pub mod metrics;
pub mod otlp;
pub mod panics;
pub mod requests;
