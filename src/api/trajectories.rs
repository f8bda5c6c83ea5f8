//! `/trajectories`: agents hand in finished work and look up what became of it.

use std::{num::NonZero, sync::LazyLock};

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use forebay_client::wire::{
    self, BulkLine, Problem, Receipt, ReceiptGroup, RolloutState, StoryGroup, TrajectoryPage, TrajectoryStory, Verdict,
};
use serde::Deserialize;
use tokio::sync::Semaphore;
use utoipa::{IntoParams, ToSchema};

use super::{
    Api, arrow,
    body::{self, Media, ReadBody},
    budget::{Budget, IsPaid, paid},
    bulk::{self, LineWriter},
    decode::{self, Shape},
    document::ArrowStream,
    guard::Caller,
    params::{self, Query},
    problem::Failure,
};
use crate::{
    access::Grant,
    buffer::{
        Buffer,
        ids::{GroupId, ID_BYTES_MAX, RolloutId},
        ingest::NewRollout,
        refusal::{BufferError, Refusal},
        trajectory::TrajectoryLimits,
    },
    store::{Ingested, Story, StoryFilter},
};

/// Lines of one bulk body.
const BULK_LINES_MAX: usize = 16_384;

/// Bytes that a receipt is assumed to take before it is made: ids of 256 bytes are rare, and so are warnings.
const RECEIPT_BYTES: usize = 1 << 10;

/// Bodies longer than this would hold up an async worker for milliseconds.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// Lines of a bulk body that share a commit.
const BULK_LINES: usize = 64;

/// Payload bytes of bulk lines that share a commit.
const BULK_BYTES: usize = 8 << 20;

/// Hand in finished work
///
/// An object is one trajectory; an array is a bundle, all or nothing; NDJSON is bulk, every line on its own.
/// Answered after the commit is on disk.
#[utoipa::path(
    post,
    path = "/trajectories",
    operation_id = "post_trajectories",
    tag = "agents",
    request_body(
        content(
            (TrajectoryOrBundle = "application/json"),
            (wire::Trajectory = "application/x-ndjson"),
            (ArrowStream = "application/vnd.apache.arrow.stream"),
        ),
        description = "An object, an array of objects (a bundle), one object per line (bulk), or an Arrow IPC stream \
            (a bundle) with one row per segment, the rows of a rollout adjacent. Its columns are named as the JSON fields; \
            `sampling` is three of them, `temperature`, `top_p` and `top_k`; `reward_components`, `messages` and `metadata` \
            are JSON as text, the last two on the first row or on all rows of their rollout. `Content-Encoding` may be gzip or zstd; \
            the buffers inside of an Arrow stream may not be compressed."
    ),
    responses(
        (status = 201, description = "Stored; a bundle: at least one was new", body = ReceiptOrBundle),
        (status = 200, description = "Seen before, or bulk: a line per line",
            content((ReceiptOrBundle = "application/json"), (BulkLine = "application/x-ndjson"))),
        (status = 400, description = "Malformed; nothing stored", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such policy", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "`rollout-conflict` or `group-size-conflict`; nothing stored", body = Problem, content_type = "application/problem+json"),
        (status = 413, description = "Too large; nothing stored", body = Problem, content_type = "application/problem+json"),
        (status = 415, description = "Not a type that is taken", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "Invalid, with pointers; nothing stored", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "Over the policy's backlog", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "Over the byte budget, or the store cannot write", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn post(
    State(api): State<Api>,
    Caller(grant): Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let media = body::media(&headers)?;
    if !api.buffer.takes_work() {
        return Err(Failure::unwritable());
    }
    let body = body::read(&api.budgets.posts, api.limits, &headers, body).await?;
    let decode: Decode = match media {
        Media::Ndjson => return bulk(&api, grant, body).await,
        Media::Json => |bytes, limits| decode::body(&bytes, limits),
        Media::Arrow => |bytes, _| Ok((arrow::bundle(bytes)?, Shape::Array)),
    };
    let budget = api.budgets.posts.clone();
    api.to_the_end(|buffer| async move { whole(buffer, &budget, &grant, body, decode).await }).await
}

/// Reads the trajectories of a body.
type Decode = fn(Bytes, &TrajectoryLimits) -> Result<(Vec<wire::Trajectory>, Shape), Failure>;

/// Ingests one trajectory or one bundle.
async fn whole(
    buffer: Buffer,
    budget: &Budget,
    grant: &Grant,
    body: ReadBody,
    decode: Decode,
) -> Result<Response, Failure> {
    let ReadBody { bytes, mut shares } = body;
    let inline = bytes.len() <= INLINE_BYTES_MAX;
    let (decoder, grant) = (buffer.clone(), grant.clone());
    let read = move || {
        let (sent, shape) = decode(bytes, decoder.trajectory_limits())?;
        let prepared = prepare(&decoder, &grant, sent).map_err(|refusal| match shape {
            Shape::Array => Failure::from(refusal),
            Shape::Object => Failure::from(refusal).of_single_object(),
        });
        Ok::<_, Failure>((prepared?, shape))
    };
    let (bundle, shape) = run(inline, read).await??;
    // What pays for the body pays for the receipts, unless those are longer. Nothing is stored yet.
    let missing = (bundle.len() * RECEIPT_BYTES).saturating_sub(shares.bytes());
    if missing > 0 {
        shares.push(budget.take(missing)?);
    }
    let (status, receipts) = shape.answer(buffer.ingest(bundle).await)?;
    shares.shrink(receipts.len());
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((status, json, Extension(IsPaid), Body::from(paid(receipts.into(), shares))).into_response())
}

/// Long work goes to a thread, and no more of it at once than there are cores: more would only hold more memory.
async fn run<T: Send + 'static>(inline: bool, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failure> {
    static CORES: LazyLock<Semaphore> =
        LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)));
    if inline {
        return Ok(work());
    }
    let _core = CORES.acquire().await.map_err(|_| body::stopped())?;
    tokio::task::spawn_blocking(work).await.map_err(|_| body::stopped())
}

/// Validates and packs trajectories, all of policies that the caller sees.
fn prepare(buffer: &Buffer, grant: &Grant, bundle: Vec<wire::Trajectory>) -> Result<Vec<NewRollout>, Refusal> {
    let prepared = buffer.prepare(bundle)?;
    prepared.iter().try_for_each(|rollout| grant.check(&rollout.policy))?;
    Ok(prepared)
}

impl Shape {
    /// The status and the receipts as JSON.
    fn answer(self, answer: Result<Vec<Ingested>, BufferError>) -> Result<(StatusCode, Vec<u8>), Failure> {
        let ingested = answer.map_err(|error| match self {
            Self::Array => Failure::from(error),
            Self::Object => Failure::from(error).of_single_object(),
        })?;
        let status = if ingested.iter().all(|one| one.duplicate) { StatusCode::OK } else { StatusCode::CREATED };
        let mut receipts: Vec<Receipt> = ingested.into_iter().map(receipt).collect();
        let text = match (self, receipts.pop()) {
            (Self::Object, Some(only)) => serde_json::to_vec(&only),
            (_, last) => {
                receipts.extend(last);
                serde_json::to_vec(&receipts)
            }
        };
        Ok((status, text.expect("receipts are plain data")))
    }
}

fn receipt(ingested: Ingested) -> Receipt {
    Receipt {
        policy: ingested.policy.to_string(),
        rollout_id: ingested.rollout_id.to_string(),
        group_id: ingested.group_id.to_string(),
        verdict: ingested.decision.verdict,
        warnings: ingested.warnings.iter().map(ToString::to_string).collect(),
        reason: ingested.decision.reason,
        duplicate: ingested.duplicate,
        group: ReceiptGroup { state: ingested.fill.state, arrived: ingested.fill.arrived(), size: ingested.fill.size },
    }
}

/// A line of a bulk body that may be stored, or why not.
struct Line {
    number: u64,
    prepared: Result<NewRollout, Failure>,
}

/// Ingests a bulk body, to its end also when the client hangs up, and answers line by line.
async fn bulk(api: &Api, grant: Grant, body: ReadBody) -> Result<Response, Failure> {
    let ReadBody { bytes, mut shares } = body;
    let lines: Vec<(u64, Bytes)> =
        numbered_lines(&bytes)?.into_iter().map(|(number, line)| (number, bytes.slice_ref(line))).collect();
    shares.push(api.budgets.posts.take(size_of_val(lines.as_slice()))?);
    let window = api.budgets.posts.take(bulk::window_bytes(lines.len().min(BULK_LINES)))?;
    let (writer, answer) = bulk::answer(window, api.limits.read_timeout);
    let ingest = |buffer: Buffer| async move {
        let ended = ingest_bulk(&buffer, &grant, lines, writer).await;
        drop(shares);
        ended
    };
    // If no line is answered, the reason is the task's.
    let ingested = api.to_the_end(ingest);
    let answered = answer.into_response();
    tokio::pin!(ingested, answered);
    tokio::select! {
        biased;
        answer = &mut answered => match answer {
            Some(response) => Ok(response),
            None => ingested.await.and_then(|()| Err(body::stopped())),
        },
        ended = &mut ingested => {
            ended?;
            answered.await.ok_or_else(body::stopped)
        }
    }
}

/// Stores slice by slice: what is decoded is stored and answered before the next slice is decoded.
async fn ingest_bulk(
    buffer: &Buffer,
    grant: &Grant,
    lines: Vec<(u64, Bytes)>,
    mut writer: LineWriter,
) -> Result<(), Failure> {
    for slice in lines.chunks(BULK_LINES) {
        let inline = slice.iter().map(|(_, line)| line.len()).sum::<usize>() <= INLINE_BYTES_MAX;
        let (slice, decoder, grant) = (slice.to_vec(), buffer.clone(), grant.clone());
        let lines = run(inline, move || decode_lines(&decoder, &grant, slice)).await?;
        for answer in ingest_lines(buffer, lines).await {
            writer.line(&answer).await;
        }
        writer.flush().await;
    }
    writer.end().await;
    Ok(())
}

/// The lines that hold something, with their numbers from 1.
pub(super) fn numbered_lines(bytes: &[u8]) -> Result<Vec<(u64, &[u8])>, Failure> {
    let lines = bytes.split(|&byte| byte == b'\n').zip(1..).map(|(line, number)| (number, line));
    let held = lines.filter(|(_, line)| !line.iter().all(u8::is_ascii_whitespace));
    // One more than allowed tells a full body from one with too many.
    let held: Vec<_> = held.take(BULK_LINES_MAX + 1).collect();
    if held.len() > BULK_LINES_MAX {
        return Err(Failure::invalid("", format!("a bulk body has at most {BULK_LINES_MAX} lines")));
    }
    Ok(held)
}

fn decode_lines(buffer: &Buffer, grant: &Grant, lines: Vec<(u64, Bytes)>) -> Vec<Line> {
    let decode = |(number, line): (u64, Bytes)| {
        let decoded = decode::line(&line, buffer.trajectory_limits());
        let prepared = decoded.and_then(|trajectory| {
            let mut one = prepare(buffer, grant, vec![trajectory])?;
            one.pop().ok_or_else(body::stopped)
        });
        Line { number, prepared: prepared.map_err(Failure::of_single_object) }
    };
    lines.into_iter().map(decode).collect()
}

async fn ingest_lines(buffer: &Buffer, lines: Vec<Line>) -> Vec<BulkLine> {
    let mut answers: Vec<BulkLine> = Vec::with_capacity(lines.len());
    let mut slice: Vec<(u64, NewRollout)> = Vec::new();
    let mut bytes = 0;
    for line in lines {
        match line.prepared {
            Err(failure) => answers.push(refused(line.number, failure)),
            Ok(rollout) => {
                bytes += rollout.payload.body.len();
                slice.push((line.number, rollout));
            }
        }
        if bytes >= BULK_BYTES {
            ingest_slice(buffer, std::mem::take(&mut slice), &mut answers).await;
            bytes = 0;
        }
    }
    ingest_slice(buffer, slice, &mut answers).await;
    answers.sort_by_key(|answer| answer.line);
    answers
}

async fn ingest_slice(buffer: &Buffer, slice: Vec<(u64, NewRollout)>, answers: &mut Vec<BulkLine>) {
    if slice.is_empty() {
        return;
    }
    let (numbers, bundles): (Vec<u64>, Vec<Vec<NewRollout>>) =
        slice.into_iter().map(|(number, rollout)| (number, vec![rollout])).unzip();
    match buffer.ingest_all(bundles).await {
        Err(error) => {
            let failure = Failure::from(error);
            answers.extend(numbers.into_iter().map(|number| refused(number, failure.clone())));
        }
        Ok(outcomes) => {
            for (number, outcome) in numbers.into_iter().zip(outcomes) {
                answers.push(match outcome {
                    Ok(mut stored) => accepted(number, stored.pop()),
                    Err(refusal) => refused(number, Failure::from(refusal).of_single_object()),
                });
            }
        }
    }
}

fn accepted(line: u64, ingested: Option<Ingested>) -> BulkLine {
    let Some(ingested) = ingested else { return refused(line, body::stopped()) };
    let status = if ingested.duplicate { StatusCode::OK } else { StatusCode::CREATED };
    BulkLine { line, status: status.as_u16(), receipt: Some(receipt(ingested)), problem: None }
}

fn refused(line: u64, failure: Failure) -> BulkLine {
    let problem = failure.into_line();
    BulkLine { line, status: problem.status, receipt: None, problem: Some(problem) }
}

/// One trajectory, or a bundle.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes a body")]
enum TrajectoryOrBundle {
    Trajectory(Box<wire::Trajectory>),
    Bundle(Vec<wire::Trajectory>),
}

/// The receipt of one trajectory, or those of a bundle in its order.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes an answer")]
enum ReceiptOrBundle {
    Receipt(Receipt),
    Bundle(Vec<Receipt>),
}

/// One rollout's story, or a page of stories.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes an answer")]
enum StoryOrPage {
    Story(Box<TrajectoryStory>),
    Page(TrajectoryPage),
}

/// Which rollouts to look up.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StoryQuery {
    /// Policy; `default` when absent.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// One rollout of the current run: the answer is its story.
    #[param(min_length = 1, max_length = 256)]
    rollout_id: Option<String>,
    /// Rollouts of one group of the current run.
    #[param(min_length = 1, max_length = 256)]
    group_id: Option<String>,
    /// With this verdict.
    verdict: Option<Verdict>,
    /// With this reason.
    reason: Option<String>,
    /// In this state.
    state: Option<RolloutState>,
    /// Consumed by this optimizer step.
    #[param(minimum = 0)]
    step: Option<i64>,
    /// The `next` of the page before.
    after: Option<String>,
    /// Entries of the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// What became of rollouts
///
/// With `rollout_id` the answer is one story, else a page of stories in the order of arrival. With `verdict`, `reason`,
/// `state` or `step`, a page ends after a bounded number of rollouts of the policy, or of the group, whether they match or
/// not: it may be short, or empty, and still have a `next`.
#[utoipa::path(
    get,
    path = "/trajectories",
    operation_id = "get_trajectories",
    tag = "agents",
    params(StoryQuery),
    responses(
        (status = 200, description = "A story with `rollout_id`, else a page", body = StoryOrPage),
        (status = 404, description = "No such policy or rollout", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "Invalid query", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn get(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<StoryQuery>,
) -> Result<Response, Failure> {
    let policy = params::policy(&grant, "policy", query.policy.as_deref())?;
    if let Some(rollout_id) = params::optional("rollout_id", query.rollout_id.as_deref(), RolloutId::parse)? {
        let story = api.buffer.story(policy, rollout_id).await.map_err(Failure::from);
        let story = story.map_err(|failure| if query.policy.is_none() { failure.unnamed_policy() } else { failure })?;
        return Ok(axum::Json(story_on_wire(story)).into_response());
    }
    let limit = params::page_limit(query.limit)?;
    let filter = StoryFilter {
        policy,
        rollout_id: None,
        group_id: params::optional("group_id", query.group_id.as_deref(), GroupId::parse)?,
        verdict: query.verdict,
        reason: query.reason.map(|reason| params::text("reason", reason, ID_BYTES_MAX)).transpose()?,
        state: query.state,
        step: query.step.map(|step| params::step("step", step)).transpose()?,
        after: params::cursor(query.after.as_deref())?,
        limit,
    };
    let page = api.buffer.stories(filter).await?;
    let next = params::next(page.next);
    let trajectories = page.entries.into_iter().map(story_on_wire).collect();
    Ok(axum::Json(TrajectoryPage { trajectories, next }).into_response())
}

fn story_on_wire(story: Story) -> TrajectoryStory {
    TrajectoryStory {
        policy: story.policy.to_string(),
        run: story.run.0,
        rollout_id: story.rollout_id,
        verdict: story.verdict,
        reason: story.reason,
        failed_filters: story.failed_filters,
        state: story.state,
        group: StoryGroup {
            group_id: story.group_id,
            state: story.group.state,
            reason: story.group_reason,
            arrived: story.group.arrived(),
            size: story.group.size,
        },
        batches: story.batches.iter().map(ToString::to_string).collect(),
        step: story.step.map(|step| step.0),
        reward: story.reward,
        advantage: story.advantage,
        policy_version: story.policy_version.0,
        policy_version_assumed: story.version_assumed,
        segments: story.segments,
        tokens: story.tokens,
        received_at: story.received_at.to_string(),
        decided_at: params::time(story.decided_at),
        batched_at: params::time(story.batched_at),
        acked_at: params::time(story.acked_at),
        purged_at: params::time(story.purged_at),
    }
}
