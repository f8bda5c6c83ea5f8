//! Sessions: the calls of agents are recorded, and become rollouts when the session ends.

mod attempts;
mod calls;
mod ends;
mod opening;
mod slow;

use std::time::Duration;

use forebay_domain::{refusal::Refusal, session::RecordedCall};
use forebay_service::{
    Buffer,
    error::BufferError,
    session::record::{CallPermit, NewCall, Replayed, SentCall},
};
use forebay_wire::VersionSpan;
use serde_json::{Value, json};

use crate::support::{TestApp, text};

/// A session with a break and a call that is dropped, so that all its metrics are exported.
pub(crate) async fn traffic(app: &TestApp) {
    let opened = open(app, json!({"rollout_id": "traffic"})).await;
    let prompt: Vec<i32> = (100..200).collect();
    record(app, &opened, call(&prompt, &[11, 12, E])).await;
    record(app, &opened, call(&[&prompt[..], &[17, E]].concat(), &[13, E])).await;
    try_record(app, &opened, call(&prompt, &[14, E])).await.expect("the call is recorded");
    finish(app, &opened, 1.0).await;
}

/// Records a call of a session and finishes it, or aborts it.
pub(crate) async fn end(app: &TestApp, opened: &Value, is_complete: bool) -> Value {
    record(app, opened, call(&[S, U, A], &[11, E])).await;
    if is_complete {
        return finish(app, opened, 1.0).await;
    }
    app.post(&path(opened, "/abort"), json!({"reason": "failed"})).await.expect(200)
}

/// Opens a session, which must succeed.
async fn open(app: &TestApp, request: Value) -> Value {
    app.post("/sessions", request).await.expect(201)
}

/// A call that ended on a stop token. Its versions are 0.
fn call(prompt: &[i32], ids: &[i32]) -> NewCall {
    NewCall {
        dialect: "chat".to_owned(),
        model: "any".to_owned(),
        prompt: prompt.to_vec(),
        ids: ids.to_vec(),
        logprobs: ids.iter().map(|&id| -(id as f32) / 128.0).collect(),
        versions: if ids.is_empty() { Vec::new() } else { vec![VersionSpan(0, 0, ids.len() as i64)] },
        finish_reason: "stop".to_owned(),
        stopped_on_token: true,
        body_digest: *blake3_of(prompt, ids).as_bytes(),
        response: json!({"sampled": ids}).to_string(),
        ..NewCall::default()
    }
}

fn blake3_of(prompt: &[i32], ids: &[i32]) -> blake3::Hash {
    blake3::hash(format!("{prompt:?}{ids:?}").as_bytes())
}

async fn permit(app: &TestApp, session: &Value) -> Result<CallPermit, BufferError> {
    let id = text(&session["session_id"]).parse().expect("it is an id");
    app.buffer.session_for_call(Some(id), text(&session["key"]), Duration::ZERO).await
}

/// The recorded answer, if the call repeats another one; any other call needs room.
pub(crate) async fn begin_call(
    buffer: &Buffer,
    permit: &CallPermit,
    body_digest: [u8; 32],
    retry_count: u32,
) -> Result<Option<Replayed>, BufferError> {
    let sent = SentCall { dialect: "chat".to_owned(), body_digest, retry_count };
    match buffer.repeated_call(permit, &sent).await? {
        Some(found) => Ok(Some(found)),
        None => buffer.require_room(permit).await.map(|()| None),
    }
}

async fn try_record(app: &TestApp, session: &Value, call: NewCall) -> Result<RecordedCall, BufferError> {
    let permit = permit(app, session).await?;
    app.buffer.record_call(&permit, call).await
}

/// Records a call whose answer is delivered.
async fn record(app: &TestApp, session: &Value, call: NewCall) -> RecordedCall {
    app.clock.advance_s(1.0);
    let recorded = try_record(app, session, call).await.expect("the call is recorded");
    app.buffer.mark_delivered(recorded.call_pk);
    recorded
}

fn path(session: &Value, call: &str) -> String {
    format!("/sessions/{}{call}", text(&session["session_id"]))
}

async fn finish(app: &TestApp, session: &Value, reward: f64) -> Value {
    app.post(&path(session, "/finish"), json!({"reward": reward})).await.expect(200)
}

async fn session(app: &TestApp, session: &Value) -> Value {
    app.get(&path(session, "")).await.expect(200)
}

#[track_caller]
fn refused<T: std::fmt::Debug>(outcome: Result<T, BufferError>) -> Refusal {
    match outcome {
        Err(BufferError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

/// Prompt, response and mask of the samples of the next batch, in order.
async fn segments(app: &TestApp) -> Vec<(Vec<i64>, Vec<i64>, Vec<i64>)> {
    let batch = app.lease().await;
    let rows = app.samples(&batch).await;
    let ids = |value: &Value| value.as_array().expect("a list").iter().map(|id| id.as_i64().expect("an id")).collect();
    let segment = |row: &Value| {
        let (tokens, mask): (Vec<i64>, Vec<i64>) = (ids(&row["tokens"]), ids(&row["loss_mask"]));
        let (prompt, response) = tokens.split_at(tokens.len() - mask.len());
        (prompt.to_vec(), response.to_vec(), mask)
    };
    rows.iter().map(segment).collect()
}

// Openers of turns, the stop token and the newline that a template adds.
const S: i32 = 1;
const U: i32 = 2;
const A: i32 = 3;
const T: i32 = 4;
const E: i32 = 5;
const N: i32 = 6;
