//! The memory of the real process: under more bodies than its budget, for a very long trajectory, for conversations
//! with many segments, for exports, and for answers that are not read.

mod exports;
mod flood;
mod long;
mod looking;
mod rows;
mod unread;
