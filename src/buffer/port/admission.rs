//! Admission in the store: room is reserved for rollouts that are about to start.

use async_trait::async_trait;
use forebay_domain::{
    admission::{Admit, Admitted},
    clock::Timestamp,
};

use crate::buffer::port::error::{Answer, StoreError};

/// The stage of admission.
#[async_trait]
pub trait AdmissionStore: Send + Sync {
    /// Reserves room for rollouts that are about to start.
    async fn admit(&self, admit: Admit) -> Answer<Admitted>;
    /// Sweep: gives back the room of expired admissions, up to `limit` of them. Returns how many there were.
    async fn expire_admissions(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError>;
}
