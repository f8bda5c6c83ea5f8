//! What the protocols of other rollout buffers remember, and the line of ready groups that they show.

use forebay_domain::{
    facades::{FacadeState, ReadyGroup},
    ids::PolicyName,
};
use forebay_store::ops::facades::{FindFacadeState, ListReadyGroups, WriteFacadeState};
use tracing::instrument;

use crate::{Buffer, error::BufferError};

impl Buffer {
    /// The first ready groups of the policy, in the order in which they became ready.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn ready_groups(&self, policy: PolicyName, limit: u32) -> Result<Vec<ReadyGroup>, BufferError> {
        Ok(self.store.read(ListReadyGroups { policy, limit }).await?)
    }

    /// The state of a foreign protocol. None if there is none, or if its revision is `known`.
    #[instrument(level = "debug", skip_all)]
    pub async fn facade_state(&self, name: String, known: u64) -> Result<Option<FacadeState>, BufferError> {
        Ok(self.store.read(FindFacadeState { name, known }).await?)
    }

    /// Replaces the state of a foreign protocol, if it still has the revision before this one. Returns whether it had.
    #[instrument(level = "debug", skip_all)]
    pub async fn write_facade_state(&self, name: String, state: FacadeState) -> Result<bool, BufferError> {
        Ok(self.store.write(WriteFacadeState { name, state }).await?)
    }
}
