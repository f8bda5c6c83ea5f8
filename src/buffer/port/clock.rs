//! Service time in the store: the clock that replicas share.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    service_time::{ClockReading, CorrectClock},
};

use crate::buffer::port::error::StoreError;

/// The clock that replicas share.
#[async_trait]
pub trait ClockStore: Send + Sync {
    /// Reads the clock, and the time that the service has reached.
    async fn read_clock(&self) -> Result<ClockReading, StoreError>;
    /// Stores the time that the service has reached, if anything else was written since the last mark or if the mark
    /// answers a question.
    async fn mark_clock(&self, now: Timestamp, answers: Option<i64>) -> Result<(), StoreError>;
    /// Replaces the offset of service time. False if another replica has replaced it before.
    async fn correct_clock(&self, correct: CorrectClock) -> Result<bool, StoreError>;
    /// Asks running replicas to check the clock. Returns the number of the question.
    async fn ask_clock(&self) -> Result<i64, StoreError>;
}
