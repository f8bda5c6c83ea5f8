//! `GET /trajectories/content`: what one rollout consists of, for people who look at it.
//!
//! It is separate from the ledger's calls, because it reads a payload: at most two are unpacked at a time, and their
//! bytes are taken from the budget of [`samples`](crate::routes::samples) until the answer is written.

use axum::{
    body::Body,
    extract::State,
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use forebay_bounds::budget::paid;
use forebay_domain::{
    clock::Timestamp,
    ids::RolloutId,
    looking::content::{Content, PAGE_MESSAGES_MAX, Part, WINDOW_TOKENS_MAX},
};
use forebay_service::looking::content::ContentReader;
use forebay_wire::{Delivered, TrajectoryContent};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        body,
        budgets::IsPaid,
        guard::Caller,
        pages::FIRST_PAGE_WAIT,
        params::{self, Query},
        problem::Failure,
    },
    openapi::InvalidQuery,
    routes::trajectories::story_on_wire,
};

/// How many rollouts are unpacked at a time, so that people who look leave the processor to agents and trainers.
pub(crate) const READERS_MAX: usize = 2;

/// The tokens of a window if the caller does not say.
const WINDOW_TOKENS: u64 = 4_096;

/// The messages of a page if the caller does not say.
const PAGE_MESSAGES: u64 = 100;

/// Which part of which rollout to look at.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ContentQuery {
    /// Policy; `default` when absent.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// The rollout of the current run.
    #[param(min_length = 1, max_length = 256)]
    rollout_id: String,
    /// Index of the segment, 0 when absent.
    segment: Option<u32>,
    /// Index of the first token of the window, 0 when absent.
    from: Option<u64>,
    /// The most tokens of the window, at most 16,384; 4,096 when absent.
    #[param(maximum = 16384)]
    limit: Option<u64>,
    /// Index of the first message, 0 when absent.
    messages_from: Option<u64>,
    /// The most messages, at most 1,000; 100 when absent. With 1, a message of any length is sent.
    #[param(maximum = 1000)]
    messages_limit: Option<u64>,
}

/// Look at what a rollout consists of
///
/// The answer has a window of the tokens of one segment, a map of the whole segment, and a page of the chat messages. It
/// shows the mask as it was sent beside the mask as it is delivered. Rollouts in every state can be looked at as long as
/// their payload is stored. The call changes nothing: a damaged rollout is reported and not quarantined.
#[utoipa::path(
    get,
    path = "/trajectories/content",
    operation_id = "get_trajectory_content",
    tag = "console",
    params(ContentQuery),
    responses(
        (status = 200, description = "A part of the rollout", body = TrajectoryContent),
        (status = 404, description = "No such policy or rollout"),
        (status = 410, description = "`purged`: the payload is not stored, and the detail names the rule that keeps it"),
        InvalidQuery,
        (status = 500, description = "`damaged`: the stored data differs from its digest or seal"),
        (status = 503, description = "Other readers use up the byte budget; retry"),
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<ContentQuery>,
) -> Result<Response, Failure> {
    let policy = params::policy(&grant, "policy", query.policy.as_deref())?;
    let rollout_id = RolloutId::parse(&query.rollout_id);
    let rollout_id = rollout_id.map_err(|error| Failure::invalid("rollout_id", error.to_string()))?;
    let part = part(&query)?;
    let reader = api.buffer.content(policy, rollout_id).await.map_err(|error| {
        let failure = Failure::from(error);
        if query.policy.is_none() { failure.unnamed_policy() } else { failure }
    })?;
    let bytes = usize::try_from(reader.bytes()).unwrap_or(usize::MAX);
    let (budget, readers) = (api.budgets.samples.clone(), api.content_readers.clone());
    let granted = async move {
        let reader = readers.acquire_owned().await.map_err(|_| body::stopped())?;
        Ok::<_, Failure>((reader, budget.wait_for(bytes).await))
    };
    let granted = tokio::time::timeout(FIRST_PAGE_WAIT, granted).await;
    let (permit, mut share) = granted.map_err(|_| crate::http::budgets::overloaded())??;
    // The task goes on if the client disconnects, so that the bytes are counted as long as they are in memory.
    let read = api.run_uncancelled(|buffer| async move {
        let now = buffer.now();
        let text = reader.read(part, move |reader, content| answer(reader, content, now)).await?;
        drop(permit);
        share.shrink(text.len());
        Ok::<_, forebay_service::error::BufferError>(paid(Bytes::from(text), share))
    });
    let mut response = Body::from(read.await?).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.extensions_mut().insert(IsPaid);
    Ok(response)
}

fn part(query: &ContentQuery) -> Result<Part, Failure> {
    let most = |name: &str, sent: Option<u64>, default: u64, most: u64| match sent.unwrap_or(default) {
        limit if limit <= most => Ok(limit),
        _ => Err(Failure::invalid(name, format!("must be at most {most}"))),
    };
    Ok(Part {
        segment: query.segment.unwrap_or(0),
        from: query.from.unwrap_or(0),
        limit: most("limit", query.limit, WINDOW_TOKENS, WINDOW_TOKENS_MAX)?,
        messages_from: query.messages_from.unwrap_or(0),
        messages_limit: most("messages_limit", query.messages_limit, PAGE_MESSAGES, PAGE_MESSAGES_MAX)?,
    })
}

/// The answer as JSON.
fn answer(reader: ContentReader, content: Content, now: Timestamp) -> Vec<u8> {
    let delivered = reader.batch.map(|batch| Delivered {
        batch_id: batch.batch_id.to_string(),
        state: batch.state.into(),
        attempt: batch.attempt,
        step: batch.step.map(|step| step.0),
        loss_weights: content.loss_weights,
    });
    let answer = TrajectoryContent {
        story: story_on_wire(reader.story),
        environment: content.environment,
        status: content.status,
        reward_components: content.reward_components,
        sampling: content.sampling,
        delivered,
        segments_total: content.segments_total as u32,
        segments: content.segments,
        window: content.window,
        map: content.map,
        messages: content.messages,
        metadata: content.metadata,
        metadata_bytes: content.metadata_bytes as u64,
        at: now.to_string(),
    };
    serde_json::to_vec(&answer).expect("an answer is plain data and checked JSON")
}
