//! `POST /buffer/write`: an item becomes a rollout of the group of its instance.

use std::time::Duration;

use axum::{
    body::Body,
    extract::State,
    http::header,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use forebay_api::http::{
    body::{ReadBody, stopped},
    problem::Failure,
};
use forebay_bounds::{budget::paid, work};
use forebay_domain::{
    ids::PolicyName,
    ingest::{Ingested, new_rollout::NewRollout},
    refusal::Refusal,
    states::Verdict,
};
use forebay_service::{Buffer, error::BufferError};
use forebay_store::error::StoreError;
use forebay_wire::Violation;
use futures::stream;
use tokio::time::Instant;

use crate::{
    calls::{Call, Posted},
    slime::{
        body::text,
        generations::{self, Generation},
        item::Item,
        options::Slime,
    },
};

/// How long an item waits for room in the policy's backlog. slime's generator tries twice without a pause and then drops
/// the item, so it is better to let it wait.
const ROOM_WAIT: Duration = Duration::from_secs(30);

/// The pause between two tries.
const ROOM_PAUSE: Duration = Duration::from_millis(250);

/// The most generations that are tried, which writers of the same instance may decide meanwhile.
const TRIES_MAX: u32 = 64;

/// The tries after which the current generation is looked up again.
const TRIES_PER_LOOKUP: u32 = 4;

/// The largest item that is read on an async worker thread. A larger one would block the thread for milliseconds.
const INLINE_BYTES_MAX: usize = 64 << 10;

pub(super) async fn write(
    State(slime): State<Slime>,
    _call: Call,
    Posted(ReadBody { bytes, mut shares }): Posted,
) -> Result<Response, Failure> {
    let (instance_id, rollout) = prepare(slime.clone(), bytes.clone()).await?;
    let policy = slime.policy.clone();
    let store = |buffer: Buffer| async move { ingest(&buffer, &policy, &instance_id, rollout).await.map_err(refused) };
    let stored = slime.api.run_uncancelled(store).await?;
    // The answer repeats the item. It is not copied, so the share of the body also covers the answer.
    shares.shrink(bytes.len());
    let head = format!(r#"{{"success":true,"message":"{}","data":{{"data":["#, message(&stored));
    let tail = Bytes::from_static(br#"],"meta_info":"write to buffer"}}"#);
    let parts = [head.into(), paid(bytes, shares), tail].map(Ok::<Bytes, std::io::Error>);
    Ok(([(header::CONTENT_TYPE, "application/json")], Body::from_stream(stream::iter(parts))).into_response())
}

/// Reads an item, and packs it for the store.
async fn prepare(slime: Slime, bytes: Bytes) -> Result<(String, NewRollout), Failure> {
    let is_short = bytes.len() <= INLINE_BYTES_MAX;
    let read = move || {
        let mut item = Item::parse(text(&bytes)?, slime.options.reward_key.as_deref())
            .map_err(|found| refused(Refusal::Invalid(found)))?;
        generations::assign(&mut item);
        item.trajectory.policy = Some(slime.policy.to_string());
        let mut prepared = slime.buffer().prepare(vec![item.trajectory]).map_err(refused)?;
        Ok((item.instance_id, prepared.pop().ok_or_else(stopped)?))
    };
    if is_short {
        return read();
    }
    work::on_thread(read).await.map_err(|_| stopped())?
}

/// Stores an item in the open group of its instance.
async fn ingest(
    buffer: &Buffer,
    policy: &PolicyName,
    instance_id: &str,
    rollout: NewRollout,
) -> Result<Ingested, BufferError> {
    let deadline = Instant::now() + ROOM_WAIT;
    let mut generation = Generation::current(buffer, policy, instance_id).await?;
    let mut tries = 1;
    loop {
        let mut rollout = rollout.clone();
        (rollout.group_id, rollout.only_open) = (Some(generation.group_id()), true);
        let outcome = buffer.ingest(vec![rollout]).await;
        match outcome {
            Ok(mut stored) => return stored.pop().ok_or_else(|| StoreError::Closed.into()),
            Err(BufferError::Refused(Refusal::GroupDecided(_))) if tries < TRIES_MAX => {
                let next = generation.next();
                let is_far = tries % TRIES_PER_LOOKUP == 0;
                generation = if is_far { Generation::current(buffer, policy, instance_id).await? } else { next };
                tries += 1;
            }
            Err(BufferError::Refused(Refusal::BacklogFull(_))) if Instant::now() < deadline => {
                tokio::time::sleep(ROOM_PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// What the producer is told. An item that is stored and will not be trained is no error.
fn message(stored: &Ingested) -> String {
    let message = "Data has been successfully written to buffer";
    match (stored.decision.verdict, &stored.decision.reason) {
        (Verdict::Kept | Verdict::Masked, _) | (_, None) => message.to_owned(),
        (Verdict::Dropped | Verdict::Late, Some(reason)) => {
            let reason = serde_json::to_string(reason).expect("a text is always JSON");
            format!("{message}; it will not be trained: {}", reason.trim_matches('"'))
        }
    }
}

/// The error of an item, with the names that its fields have.
fn refused(error: impl Into<BufferError>) -> Failure {
    let found = match error.into() {
        BufferError::Refused(Refusal::Invalid(found)) => found,
        other => return other.into(),
    };
    let rename = |Violation { pointer, detail }| {
        let pointer = field(pointer.strip_prefix("/0").unwrap_or(&pointer));
        let needs_tokens = pointer == "/tokens" && detail.contains("requires `tokens`");
        let hint = if needs_tokens { "; items of text alone need a policy with `require = []`" } else { "" };
        Violation { pointer, detail: format!("{detail}{hint}") }
    };
    Refusal::Invalid(found.into_iter().map(rename).collect()).into()
}

/// The field of an item that a field of a trajectory is made of.
fn field(pointer: &str) -> String {
    if let Some(column) = pointer.strip_prefix("/segments/0/") {
        let names = [("logprobs", "rollout_log_probs"), ("teacher_logprobs", "teacher_log_probs")];
        let (name, rest) = column.split_at(column.find('/').unwrap_or(column.len()));
        let name = names.iter().find(|(ours, _)| *ours == name).map_or(name, |(_, theirs)| theirs);
        return format!("/{name}{rest}");
    }
    match pointer {
        "/rollout_id" => "/uid".to_owned(),
        "/group_id" | "/execution_id" => "/instance_id".to_owned(),
        "/segments" => "/tokens".to_owned(),
        // All of the item except its messages and tokens.
        "/metadata" => String::new(),
        other => other.to_owned(),
    }
}
