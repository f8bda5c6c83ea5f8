//! Admission in the store: room is reserved for rollouts that are about to start.

use async_trait::async_trait;

use super::{Answer, StoreError};
use crate::{
    buffer::{
        admission::{Admitted, RoomRequest},
        ids::AdmissionId,
    },
    clock::Timestamp,
};

/// The stage of admission.
#[async_trait]
pub trait AdmissionStore: Send + Sync {
    /// Reserves room for rollouts that are about to start.
    async fn admit(&self, admit: Admit) -> Answer<Admitted>;
    /// Sweep: gives back the room of expired admissions, up to `limit` of them. Returns how many there were.
    async fn expire_admissions(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError>;
}

/// A request for room.
#[derive(Clone, Debug)]
pub struct Admit {
    /// What is asked for.
    pub request: RoomRequest,
    /// The id of the admission, if room is reserved.
    pub admission_id: AdmissionId,
    /// The time of the request.
    pub now: Timestamp,
}
