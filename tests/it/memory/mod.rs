//! The memory of the real process: under more bodies than its budget, for a very long trajectory, for conversations
//! with many segments, and for answers that are not read.

mod flood;
mod long;
mod rows;
mod unread;
