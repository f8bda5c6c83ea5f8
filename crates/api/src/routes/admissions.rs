//! `/admissions`: reserves room for rollouts before they start.

use axum::{
    Json as Answer,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use forebay_domain::admission::RoomRequest;
use forebay_wire::{Admission, AdmissionRequest};

use crate::{
    Api,
    http::{body::Json, guard::Caller, params, problem::Failure},
    openapi::NoSuchPolicy,
};

/// Seconds after which a retry may find room: about the time in which a trainer takes a batch.
const RETRY_AFTER_S: u32 = 5;

/// Reserve room for rollouts before they start
///
/// Grants only as many rollouts as will still be fresh when a trainer reaches them. That number is
/// `(staleness.max + 1) * batch.groups * group.size`, minus the rollouts that are open, ready, leased, returned or
/// reserved, and at most what the policy's backlog has room for. A request that names its group gets room for the missing
/// places of a group that has begun always, and for a new group only if all of its places fit. Posts that name the
/// admission use it up. They are accepted even if the backlog is full, and they get the admission's `policy_version`
/// unless they bring their own. Unused room expires after the group timeout.
#[utoipa::path(
    post,
    path = "/admissions",
    operation_id = "post_admission",
    tag = "agents",
    request_body = AdmissionRequest,
    responses(
        (status = 201, description = "Room is reserved", body = Admission),
        (status = 200, description = "There is no room now: `granted` is 0, `reason` says why, and `Retry-After` when to try again", body = Admission),
        (status = 409, description = "`group-decided`: the group takes no more rollouts"),
        NoSuchPolicy,
    )
)]
pub(crate) async fn post(
    State(api): State<Api>,
    Caller(grant): Caller,
    Json(request): Json<AdmissionRequest>,
) -> Result<Response, Failure> {
    let policy = params::policy(&grant, "/policy", request.policy.as_deref())?;
    let admitted = api.buffer.admit(RoomRequest::parse(policy, request)?).await?;
    let expires_in_us = admitted.expires_at.micros_since(api.buffer.now()).max(0);
    let admission = Admission {
        admission_id: admitted.admission_id.to_string(),
        granted: admitted.granted,
        policy_version: admitted.version.0,
        expires_in_ms: expires_in_us as u64 / 1_000,
        reason: admitted.refused.map(|rule| rule.reason()),
    };
    if admitted.granted == 0 {
        let retry_after = [(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_S))];
        return Ok((StatusCode::OK, retry_after, Answer(admission)).into_response());
    }
    Ok((StatusCode::CREATED, Answer(admission)).into_response())
}
