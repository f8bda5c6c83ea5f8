//! The log of steps in the store.

use async_trait::async_trait;
use forebay_domain::looking::steps::{ReadStepBuckets, ReadSteps, StepBuckets, StepPage};

use crate::buffer::port::error::StoreError;

/// What the batches of each step of a trainer had in all.
#[async_trait]
pub trait StepStore: Send + Sync {
    /// Steps one by one.
    async fn steps(&self, read: ReadSteps) -> Result<StepPage, StoreError>;
    /// Several steps together, in order.
    async fn step_buckets(&self, read: ReadStepBuckets) -> Result<StepBuckets, StoreError>;
}
