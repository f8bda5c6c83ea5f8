//! How much memory the real process takes: under more bodies than it may hold, for a very long trajectory, for many
//! segments of long conversations, and for answers that nobody reads.

mod flood;
mod long;
mod rows;
mod unread;
