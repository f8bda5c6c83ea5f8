//! Admission: reserves room for rollouts before they start.

use forebay_domain::{
    admission::{Admit, Admitted, RoomRequest},
    ids::AdmissionId,
    refusal::Refusal,
};
use tracing::instrument;

use crate::{Buffer, error::BufferError};

impl Buffer {
    /// Reserves room for rollouts that are about to start. The admission lasts as long as their group may take.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn admit(&self, request: RoomRequest) -> Result<Admitted, BufferError> {
        let (policy, rollouts) = (request.policy.clone(), request.rollouts);
        let admit = Admit { request, admission_id: AdmissionId::mint(), now: self.clock.now() };
        let admitted = match self.store.write(admit.clone()).await? {
            Err(Refusal::UnknownPolicy(_)) => {
                self.create(&policy).await?;
                self.store.write(admit).await??
            }
            answer => answer?,
        };
        self.metrics.admitted(policy.as_str(), admitted.granted, rollouts);
        Ok(admitted)
    }
}
