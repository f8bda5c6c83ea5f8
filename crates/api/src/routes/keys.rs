//! `/keys`: creates, lists and revokes keys, for operators. `forebay keys` does the same on the command line.

use axum::{Json as Answer, extract::State, http::StatusCode};
use forebay_domain::access::key::StoredKey;
use forebay_wire::{KeyCreated, KeyInfo, KeyPage, KeyRequest};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        body::Json,
        params::{self, KeyPath, Query},
        problem::Failure,
    },
    openapi::InvalidQuery,
};

/// Which keys to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct KeyQuery {
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most entries in the page, at most 1,000.
    limit: Option<u32>,
}

/// Create a key
///
/// The secret is only in this response and cannot be read again. Once the first key exists, every call needs a key.
#[utoipa::path(
    post,
    path = "/keys",
    operation_id = "create_key",
    tag = "operations",
    request_body = KeyRequest,
    responses(
        (status = 201, description = "The key and its secret", body = KeyCreated),
        (status = 409, description = "`first-key`: the first key must have role `admin` and all policies; or `too-many-keys`"),
    )
)]
pub(crate) async fn create(
    State(api): State<Api>,
    Json(request): Json<KeyRequest>,
) -> Result<(StatusCode, Answer<KeyCreated>), Failure> {
    let (stored, key) = api.guard.keyring.create(request).await?;
    Ok((StatusCode::CREATED, Answer(KeyCreated { key, info: stored.on_wire() })))
}

/// List keys in the order in which they were created, including revoked ones
#[utoipa::path(
    get,
    path = "/keys",
    operation_id = "list_keys",
    tag = "operations",
    params(KeyQuery),
    responses(
        (status = 200, description = "A page of keys, without secrets", body = KeyPage),
        InvalidQuery,
    )
)]
pub(crate) async fn list(State(api): State<Api>, Query(query): Query<KeyQuery>) -> Result<Answer<KeyPage>, Failure> {
    let limit = params::page_limit(query.limit)?;
    let after = query.after.as_deref().map_or(Ok(0), params::row_key)?;
    let keys = api.guard.keyring.list(after, limit).await?;
    let next = keys.last().filter(|_| keys.len() == limit as usize).map(|key| key.key_pk.0.to_string());
    Ok(Answer(KeyPage { keys: keys.iter().map(StoredKey::on_wire).collect(), next }))
}

/// Revoke a key
///
/// This replica rejects the key immediately, other replicas within a second. Repeating the call is safe and returns the
/// same response.
#[utoipa::path(
    delete,
    path = "/keys/{id}",
    operation_id = "revoke_key",
    tag = "operations",
    params(("id" = String, Path, description = "Public part of the key")),
    responses(
        (status = 200, description = "The revoked key", body = KeyInfo),
        (status = 404, description = "No such key"),
    )
)]
pub(crate) async fn revoke(State(api): State<Api>, KeyPath(key_id): KeyPath) -> Result<Answer<KeyInfo>, Failure> {
    Ok(Answer(api.guard.keyring.revoke(key_id).await?.on_wire()))
}
