//! `POST /start_rollout`: a trainer begins, for the first time or again.
//!
//! The original starts a generator in its own process. Here producers are programs of their own, and the call prepares the
//! policy for them. It never drops data.

use axum::{Json, extract::State};
use forebay_api::{
    http::{body::ReadBody, problem::Failure},
    routes::policies::parse_rules,
};
use forebay_domain::{ids::PolicyName, trajectory::GROUP_SIZE_MAX};
use forebay_service::{Buffer, error::BufferError};
use forebay_store::ops::policy::FindPolicy;
use serde_json::{Value, json};

use crate::{
    calls::{Call, Posted},
    slime::{
        body::{number, options},
        options::{NAME, Slime},
    },
};

pub(super) async fn start(
    State(slime): State<Slime>,
    call: Call,
    Posted(ReadBody { bytes, shares: _shares }): Posted,
) -> Result<Json<Value>, Failure> {
    let size = number(&options(&bytes)?, "num_repeat_per_sample", GROUP_SIZE_MAX)?;
    let reader = call.reader(NAME, &slime.policy)?;
    let policy = slime.policy.clone();
    let start = |buffer: Buffer| async move {
        if let Some(size) = size {
            set_group_size(&buffer, policy, size).await?;
        }
        buffer.give_back_reads(&reader).await
    };
    let returned = slime.api.run_uncancelled(start).await?;
    tracing::info!(policy.name = %slime.policy, returned_batches = returned, "a trainer of slime's protocol started");
    Ok(Json(json!({"message": "Rollout started"})))
}

/// Makes the size of a group a rule of the policy, so that it is durable and all replicas know it. It applies to groups
/// that are opened from then on.
async fn set_group_size(buffer: &Buffer, name: PolicyName, size: u32) -> Result<(), BufferError> {
    let known = buffer.store().read(FindPolicy(name.clone())).await?;
    if known.is_some_and(|policy| policy.rules.group.size == size) {
        return Ok(());
    }
    buffer.patch_policy(name, json!({"group": {"size": size}}), parse_rules).await
}
