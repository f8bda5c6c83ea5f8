//! How much memory the real process takes: under more bodies than it may hold, and for a very long trajectory.

mod flood;
mod long;
