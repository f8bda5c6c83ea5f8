//! Admission: reserves room for rollouts before they start.

use forebay_domain::{
    admission::{Admit, Admitted, RoomRequest},
    ids::AdmissionId,
    refusal::Refusal,
};

use crate::buffer::{Buffer, error::BufferError};

pub(in crate::buffer) async fn admit(buffer: &Buffer, request: RoomRequest) -> Result<Admitted, BufferError> {
    let (policy, rollouts) = (request.policy.clone(), request.rollouts);
    let admit = Admit { request, admission_id: AdmissionId::mint(), now: buffer.clock.now() };
    let admitted = match buffer.store.write(admit.clone()).await? {
        Err(Refusal::UnknownPolicy(_)) => {
            buffer.create(&policy).await?;
            buffer.store.write(admit).await??
        }
        answer => answer?,
    };
    buffer.metrics.admitted(policy.as_str(), admitted.granted, rollouts);
    Ok(admitted)
}
