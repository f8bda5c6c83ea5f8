//! `POST /scored_data` and `/scored_data_list`: scored groups become rollouts of the policy.
//!
//! A body is stored as one bundle: all of its groups or none. Groups of other sizes than their environment's are answered
//! as `buffered`, because they are held until they add up to it.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::{Body, HttpBody},
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use forebay_api::http::{
    body::{ReadBody, pay, stopped},
    problem::Failure,
};
use forebay_bounds::{budget::Shares, work};
use forebay_domain::{
    batch::{self, Candidate},
    clock::Timestamp,
    facades::ReadyGroup,
    ids::RolloutId,
    ingest::{Ingested, new_rollout::NewRollout},
    refusal::Refusal,
};
use forebay_service::{Buffer, error::BufferError};
use forebay_wire::Violation;
use hyper::body::{Frame, SizeHint};
use serde_json::{Value, json};

use crate::atropos::{
    convert::{self, Names},
    retries::{Post, RETRY_WINDOW_S, digest},
    run::{Environment, Run},
    shared::Atropos,
    wire::ScoredData,
};

/// Bodies up to this size are decoded on the thread of the request.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// The most ready groups that are read to answer a call.
pub(super) const READY_MAX: u32 = 65_536;

/// How many numbers are tried for a post.
const NUMBERS_MAX: u32 = 16;

/// Reads the groups of a body.
pub(super) type Parse = fn(&[u8]) -> Result<Vec<ScoredData>, Violation>;

/// The environment and the size of a group that was posted.
struct Sent {
    env_id: Option<i64>,
    sequences: usize,
}

/// Stores the groups of a body, and answers with `answer`.
pub(super) async fn post(
    atropos: &Atropos,
    body: ReadBody,
    parse: Parse,
    answer: fn(&[Option<u64>]) -> Value,
) -> Result<Response, Failure> {
    let run = atropos.run().await?;
    let mut post = atropos.options.posts.begin(digest(&body.bytes));
    let sent = store(atropos, &run, &body.bytes, parse, &mut post).await?;
    let held = held(atropos, &run, &sent).await?;
    Ok(confirmed(post, &answer(&held)))
}

/// The body of `/scored_data`.
pub(super) fn one(body: &[u8]) -> Result<Vec<ScoredData>, Violation> {
    ScoredData::parse(body).map(|one| vec![one])
}

/// The answer of `/scored_data`, given how many sequences are held if the group is.
pub(super) fn answer_one(held: &[Option<u64>]) -> Value {
    match held.first().copied().flatten() {
        Some(held) => json!({"status": "buffered", "buffer_size": held}),
        None => json!({"status": "received"}),
    }
}

/// The answer of `/scored_data_list`.
pub(super) fn answer_list(held: &[Option<u64>]) -> Value {
    let mut answer = json!({"status": "received", "groups_processed": held.len()});
    let buffered: Vec<u64> = held.iter().copied().flatten().collect();
    if let Some(last) = buffered.last() {
        answer["buffered"] = json!(buffered.len());
        answer["last_buffer_size"] = json!(last);
    }
    answer
}

/// Stores the groups under the number of the post. If other processes have used the number, the ledger says whether the
/// post is a retry, and else which number is free.
async fn store(
    atropos: &Atropos,
    run: &Arc<Run>,
    body: &Bytes,
    parse: Parse,
    post: &mut Post,
) -> Result<Vec<Sent>, Failure> {
    for _ in 0..NUMBERS_MAX {
        let (sent, prepared, _repeated) = prepare(atropos, run, body, parse, post).await?;
        let stored = atropos.api.run_uncancelled(|buffer| async move {
            match buffer.ingest(prepared).await {
                Err(BufferError::Refused(Refusal::RolloutConflict { .. })) => Ok(None),
                Err(error) => Err(error),
                Ok(stored) => {
                    close_open(&buffer, &stored).await?;
                    Ok(Some(stored))
                }
            }
        });
        // The same body has other contents if its environment has registered meanwhile.
        let is_known = stored.await?.is_none_or(|stored| stored.iter().all(|one| one.duplicate));
        if !is_known || post.is_retry() {
            return Ok(sent);
        }
        let (last, received_at) = last_post(atropos, post).await?;
        let age_s = atropos.buffer().now().micros_since(received_at) / 1_000_000;
        if post.is_first() && age_s <= RETRY_WINDOW_S {
            post.renumber(last);
            return Ok(sent);
        }
        post.renumber(last + 1);
    }
    Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "Too many posts have this body at once").retry())
}

/// Reads a body, and makes packed rollouts of it. The shares pay for what each of them has of its group.
async fn prepare(
    atropos: &Atropos,
    run: &Arc<Run>,
    body: &Bytes,
    parse: Parse,
    post: &Post,
) -> Result<(Vec<Sent>, Vec<NewRollout>, Shares), Failure> {
    // Metadata has whole columns of numbers, so only the limit of the body bounds it.
    let buffer = atropos.buffer().with_metadata_max(atropos.api.limits().body_bytes_max);
    let policy = atropos.policy.to_string();
    let (run, bytes, names) = (Arc::clone(run), body.clone(), post.names());
    let budget = atropos.api.budgets().posts.clone();
    let read = move || {
        let groups = parse(&bytes).map_err(|found| Failure::invalid(found.pointer, found.detail))?;
        let mut repeated = Shares::default();
        pay(&budget, &mut repeated, groups.iter().map(ScoredData::repeated_bytes).sum())?;
        let mut sent = Vec::with_capacity(groups.len());
        let mut rollouts = Vec::new();
        for (place, scored) in groups.into_iter().enumerate() {
            sent.push(Sent { env_id: scored.env_id, sequences: scored.tokens.0.len() });
            let environment = scored.env_id.and_then(|env_id| run.environment(env_id)).map(Environment::label);
            let names = Names { policy: policy.clone(), group_id: names.group_id(place), environment };
            rollouts.extend(convert::rollouts(scored, &names));
        }
        Ok::<_, Failure>((sent, buffer.prepare(rollouts).map_err(of_sequences)?, repeated))
    };
    if body.len() <= INLINE_BYTES_MAX { read() } else { work::on_thread(read).await.map_err(|_| stopped())? }
}

/// The buffer names trajectories of a bundle, and the client knows sequences.
fn of_sequences(refusal: Refusal) -> Failure {
    let Refusal::Invalid(mut violations) = refusal else { return refusal.into() };
    for violation in &mut violations {
        let index = violation.pointer.split('/').nth(1).unwrap_or_default();
        violation.pointer = format!("/tokens/{index}");
    }
    Refusal::Invalid(violations).into()
}

/// Decides groups that lost sequences to filters: nobody will replace them.
async fn close_open(buffer: &Buffer, stored: &[Ingested]) -> Result<(), BufferError> {
    let groups: BTreeMap<_, _> = stored.iter().map(|one| (&one.group_id, one)).collect();
    for (group_id, last) in groups {
        if !last.fill.state.is_open() {
            continue;
        }
        match buffer.close_group(last.policy.clone(), group_id.clone()).await {
            // The same post at another replica has decided it.
            Ok(_) | Err(BufferError::Refused(Refusal::GroupDecided(_))) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The number of the last post with this body in the ledger, and when it came. The numbers have no gaps, so it is found
/// in few steps.
async fn last_post(atropos: &Atropos, post: &Post) -> Result<(u64, Timestamp), Failure> {
    let arrival = async |number: u64| -> Result<Option<Timestamp>, Failure> {
        let id = convert::rollout_id(&post.names().of(number).group_id(0), 0);
        let id = RolloutId::parse(&id).map_err(|error| Failure::invalid("", error.to_string()))?;
        match atropos.buffer().story(atropos.policy.clone(), id).await {
            Ok(story) => Ok(Some(story.received_at)),
            Err(BufferError::Refused(Refusal::UnknownInPolicy { .. })) => Ok(None),
            Err(error) => Err(error.into()),
        }
    };
    let (mut known, mut step) = (post.number(), 1);
    while arrival(known + step).await?.is_some() {
        known += step;
        step *= 2;
    }
    let mut unknown = known + step;
    while unknown - known > 1 {
        let middle = known.midpoint(unknown);
        if arrival(middle).await?.is_some() { known = middle } else { unknown = middle }
    }
    let received_at = arrival(known).await?;
    Ok((known, received_at.unwrap_or_else(|| atropos.buffer().now())))
}

/// For each group whether it is held, and then how many sequences of its environment are.
async fn held(atropos: &Atropos, run: &Run, sent: &[Sent]) -> Result<Vec<Option<u64>>, Failure> {
    let odd = |group: &Sent| {
        let environment = run.environment(group.env_id?)?;
        let is_odd = environment.connected && environment.group_size as usize != group.sequences;
        is_odd.then(|| environment.label())
    };
    let labels: Vec<Option<String>> = sent.iter().map(odd).collect();
    if labels.iter().all(Option::is_none) {
        return Ok(vec![None; sent.len()]);
    }
    let ready = atropos.buffer().ready_groups(atropos.policy.clone(), READY_MAX).await?;
    let held = held_back(run, &ready);
    let of_label = |label: &String| {
        let own = held.iter().map(|at| &ready[*at]).filter(|group| group.environment.as_ref() == Some(label));
        own.map(|group| group.samples).sum()
    };
    Ok(labels.iter().map(|label| label.as_ref().map(of_label)).collect())
}

/// The positions of groups that are held until others add up with them to the size of their environment.
pub(super) fn held_back(run: &Run, ready: &[ReadyGroup]) -> Vec<usize> {
    batch::held_back(&run.packing(), &ready.iter().map(candidate).collect::<Vec<_>>())
}

fn candidate(group: &ReadyGroup) -> Candidate<'_> {
    Candidate { environment: group.environment.as_deref(), rollouts: group.samples, samples: group.samples, tokens: 0 }
}

/// A response that tells its post once it was handed to the connection.
fn confirmed(post: Post, answer: &Value) -> Response {
    let body = Confirmed { post, answer: Some(answer.to_string().into()) };
    ([(header::CONTENT_TYPE, "application/json")], Body::new(body)).into_response()
}

struct Confirmed {
    post: Post,
    answer: Option<Bytes>,
}

impl HttpBody for Confirmed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let answer = self.answer.take();
        if answer.is_some() {
            self.post.answered();
        }
        Poll::Ready(answer.map(|answer| Ok(Frame::data(answer))))
    }

    fn is_end_stream(&self) -> bool {
        self.answer.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.answer.as_ref().map_or(0, |answer| answer.len() as u64))
    }
}
