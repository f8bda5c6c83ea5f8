//! `GET /whoami`: what the caller's key may do.
//!
//! It is separate from `/keys`, which only operators may call: the live page asks it whether a key is valid.

use axum::{Json as Answer, extract::State};
use forebay_wire::WhoAmI;

use crate::{Api, http::guard::Caller};

/// Look up what the caller's key may do
///
/// While the service needs no keys, every caller has the role `admin` for all policies.
#[utoipa::path(
    get,
    path = "/whoami",
    operation_id = "get_whoami",
    tag = "console",
    responses((status = 200, description = "The role and the policies of the caller", body = WhoAmI))
)]
pub(crate) async fn get(State(api): State<Api>, Caller(grant): Caller) -> Answer<WhoAmI> {
    let keyring = &api.guard.keyring;
    Answer(WhoAmI {
        role: grant.role,
        policies: grant.policies.as_slice().to_vec(),
        name: grant.key_id.as_ref().and_then(|key_id| keyring.name(key_id)),
        key_id: grant.key_id.map(|key_id| key_id.to_string()),
        keys_required: keyring.is_required(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        at: api.buffer.now().to_string(),
    })
}
