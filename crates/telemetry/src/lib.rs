//! What the service tells about itself: its metrics, and which requests a line of its log is about.
//!
//! A crate of its own, because the store measures its commits and everything above it measures as well.

pub mod metrics;
pub mod requests;
