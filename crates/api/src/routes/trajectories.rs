//! `/trajectories`: agents post finished rollouts and look up their state.

use std::collections::VecDeque;

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use forebay_bounds::{
    budget::{Budget, Share, Shares, paid},
    work,
};
use forebay_domain::{
    access::Grant,
    ids::{ExecutionId, GroupId, ID_BYTES_MAX, RolloutId},
    ingest::{Ingested, new_rollout::NewRollout},
    looking::ledger::{Story, StoryFilter},
    refusal::Refusal,
    trajectory::TrajectoryLimits,
};
use forebay_service::{Buffer, error::BufferError};
use forebay_wire::{
    self as wire, BulkLine, ListOrder, Receipt, RolloutState, StoryGroup, TrajectoryPage, TrajectoryStory, Verdict,
};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use crate::{
    Api,
    codecs::{
        arrow,
        decode::{self, Shape},
    },
    http::{
        body::{self, Media, ReadBody},
        budgets::IsPaid,
        guard::{Caller, owner},
        params::{self, Query},
        problem::Failure,
    },
    openapi::{ArrowStream, InvalidQuery, NoSuchPolicy},
    routes::bulk::{self, LineWriter},
};

/// The most lines of one bulk body.
const BULK_LINES_MAX: usize = 16_384;

/// The estimated size of a receipt before it is created. It is generous: ids of 256 bytes are rare, and so are
/// warnings.
const RECEIPT_BYTES: usize = 1 << 10;

/// The largest body that is decoded on an async worker thread. A larger one would block the thread for milliseconds.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// The most lines of a bulk body that share a commit.
pub(crate) const BULK_LINES: usize = 64;

/// The payload bytes at which bulk lines are committed.
pub(crate) const BULK_BYTES: usize = 8 << 20;

/// Post finished rollouts
///
/// A JSON object is one trajectory. An array is a bundle, which is stored as a whole or not at all. NDJSON is bulk:
/// every line is stored or refused on its own. The response is sent after the commit is on disk.
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
        description = "A JSON object, an array of objects (a bundle), one object per line (bulk), or an Arrow IPC stream \
            (a bundle). A stream has one row per segment, and the rows of a rollout are adjacent. Its columns have the names of the JSON fields. \
            Instead of `sampling` there are three columns: `temperature`, `top_p` and `top_k`. `reward_components`, `messages` and `metadata` \
            are columns of JSON text; `messages` and `metadata` are on the first row or on all rows of their rollout. `Content-Encoding` may be gzip or zstd. \
            The buffers inside an Arrow stream must not be compressed."
    ),
    responses(
        (status = 201, description = "Stored. For a bundle: at least one trajectory was new", body = ReceiptOrBundle),
        (status = 200, description = "All trajectories were stored before. For bulk: one line for each line of the request",
            content((ReceiptOrBundle = "application/json"), (BulkLine = "application/x-ndjson"))),
        (status = 400, description = "Malformed; nothing was stored"),
        NoSuchPolicy,
        (status = 409, description = "`rollout-conflict` or `group-size-conflict`; nothing was stored"),
        (status = 413, description = "Too large; nothing was stored"),
        (status = 422, description = "Invalid: `errors` has a pointer for each violation; nothing was stored"),
        (status = 429, description = "The policy's backlog is full"),
        (status = 503, description = "The byte budget is used up, or the store cannot write"),
    )
)]
pub(crate) async fn post(
    State(api): State<Api>,
    Caller(grant): Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let media = body::media(&headers)?;
    if !api.buffer.is_writable() {
        return Err(Failure::unwritable());
    }
    let body = body::read(&api.budgets.posts, owner(&grant), api.limits, &headers, body).await?;
    let decode: Decode = match media {
        Media::Ndjson => return bulk(&api, grant, body).await,
        Media::Json => |bytes, limits| decode::body(&bytes, limits),
        Media::Arrow => |bytes, _| Ok((arrow::bundle(bytes)?, Shape::Array)),
    };
    let budget = api.budgets.posts.clone();
    api.run_uncancelled(|buffer| async move { whole(buffer, &budget, &grant, body, decode).await }).await
}

/// Decodes the trajectories of a body.
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
    let inline = is_short_work([&bytes]);
    let (decoder, grant) = (buffer.clone(), grant.clone());
    let mut memory = SegmentMemory::new(budget, shares.bytes());
    let read = move || {
        let (sent, shape) = decode(bytes, decoder.trajectory_limits())?;
        let prepared = prepare(&decoder, &grant, sent, &mut memory).map_err(|refusal| match shape {
            Shape::Array => Failure::from(refusal),
            Shape::Object => Failure::from(refusal).of_single_object(),
        });
        Ok::<_, Failure>((prepared?, shape, memory))
    };
    let (bundle, shape, memory) = run(inline, read).await??;
    memory.shares.into_iter().for_each(|share| shares.push(share));
    // The share of the body also covers the receipts, unless they are larger. Then more bytes are taken here, before
    // anything is stored.
    let missing = (bundle.len() * RECEIPT_BYTES).saturating_sub(shares.bytes());
    if missing > 0 {
        shares.push(budget.take(missing)?);
    }
    let (status, receipts) = shape.answer(buffer.ingest(bundle).await)?;
    shares.shrink(receipts.len());
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((status, json, Extension(IsPaid), Body::from(paid(receipts.into(), shares))).into_response())
}

/// Runs work here if it is short, and otherwise on a thread for long work.
pub(crate) async fn run<T: Send + 'static>(
    inline: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    if inline {
        return Ok(work());
    }
    work::on_thread(work).await.map_err(|_| body::stopped())
}

/// Whether bodies can be decoded on an async worker thread. Turns cannot, because their segments may be much larger than
/// the body.
fn is_short_work<'b>(bodies: impl IntoIterator<Item = &'b Bytes> + Clone) -> bool {
    let have_turns = |body: &Bytes| std::str::from_utf8(body).is_ok_and(|text| text.contains("\"turns\""));
    bodies.clone().into_iter().map(Bytes::len).sum::<usize>() <= INLINE_BYTES_MAX && !bodies.into_iter().any(have_turns)
}

/// Takes memory from the budget for segments that are larger than the turns they are assembled from.
pub(crate) struct SegmentMemory {
    budget: Budget,
    /// The bytes that the request holds already.
    posted: usize,
    shares: Vec<Share>,
}

impl SegmentMemory {
    pub(crate) fn new(budget: &Budget, posted: usize) -> Self {
        Self { budget: budget.clone(), posted, shares: Vec::new() }
    }

    /// Takes bytes, or returns false. One trajectory never needs more than is left of the whole budget, so that it can be
    /// stored while nothing else is.
    pub(crate) fn take(&mut self, bytes: usize) -> bool {
        let left = self.budget.bytes().saturating_sub(self.posted);
        let wanted = if self.shares.is_empty() { bytes.min(left) } else { bytes };
        self.budget.take(wanted).map(|share| self.shares.push(share)).is_ok()
    }

    /// Whether bytes were taken.
    pub(crate) fn is_held(&self) -> bool {
        !self.shares.is_empty()
    }
}

/// Validates and packs trajectories. The caller must be allowed to access all of their policies.
pub(crate) fn prepare(
    buffer: &Buffer,
    grant: &Grant,
    bundle: Vec<wire::Trajectory>,
    memory: &mut SegmentMemory,
) -> Result<Vec<NewRollout>, Refusal> {
    let prepared = buffer.prepare_within(bundle, &mut |bytes| memory.take(bytes))?;
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
        let mut receipts: Vec<Receipt> = ingested.iter().map(Ingested::receipt).collect();
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

/// A line of a bulk body: the rollout to store, or the error.
pub(crate) struct Line {
    pub(crate) number: u64,
    pub(crate) prepared: Result<NewRollout, Failure>,
}

/// Ingests a bulk body and sends the response line by line. It continues to the end even if the client disconnects.
async fn bulk(api: &Api, grant: Grant, body: ReadBody) -> Result<Response, Failure> {
    let ReadBody { bytes, mut shares } = body;
    let lines: Vec<(u64, Bytes)> =
        numbered_lines(&bytes)?.into_iter().map(|(number, line)| (number, bytes.slice_ref(line))).collect();
    shares.push(api.budgets.posts.take(size_of_val(lines.as_slice()))?);
    let window = api.budgets.posts.take(bulk::window_bytes(lines.len().min(BULK_LINES)))?;
    let (writer, answer) = bulk::answer(window, api.limits.read_timeout);
    let budget = api.budgets.posts.clone();
    let ingest = |buffer: Buffer| async move { ingest_bulk(&buffer, &grant, &budget, shares, lines, writer).await };
    // If the task ends before the first line of the response, its error is the response.
    let ingested = api.run_uncancelled(ingest);
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

/// Ingests slice by slice: each slice is stored and answered before the next one is decoded. The shares of the body are
/// held until the end.
async fn ingest_bulk(
    buffer: &Buffer,
    grant: &Grant,
    budget: &Budget,
    shares: Shares,
    lines: Vec<(u64, Bytes)>,
    mut writer: LineWriter,
) -> Result<(), Failure> {
    for slice in lines.chunks(BULK_LINES) {
        let mut rest: VecDeque<(u64, Bytes)> = slice.to_vec().into();
        while !rest.is_empty() {
            let inline = is_short_work(rest.iter().map(|(_, line)| line));
            let (decoder, grant) = (buffer.clone(), grant.clone());
            let mut memory = SegmentMemory::new(budget, shares.bytes());
            let decode = move || {
                let lines = decode_lines(&decoder, &grant, &mut rest, &mut memory);
                (lines, rest, memory)
            };
            let (lines, left, memory) = run(inline, decode).await?;
            rest = left;
            for answer in ingest_lines(buffer, lines).await {
                writer.line(&answer).await;
            }
            drop(memory);
        }
        writer.flush().await;
    }
    writer.end().await;
    Ok(())
}

/// The non-empty lines with their numbers, counted from 1.
pub(crate) fn numbered_lines(bytes: &[u8]) -> Result<Vec<(u64, &[u8])>, Failure> {
    let lines = bytes.split(|&byte| byte == b'\n').zip(1..).map(|(line, number)| (number, line));
    let held = lines.filter(|(_, line)| !line.iter().all(u8::is_ascii_whitespace));
    // One line too many is taken, to tell a body with the allowed number of lines from a longer one.
    let held: Vec<_> = held.take(BULK_LINES_MAX + 1).collect();
    if held.len() > BULK_LINES_MAX {
        return Err(Failure::invalid("", format!("a bulk body may have at most {BULK_LINES_MAX} lines")));
    }
    Ok(held)
}

/// Decodes lines from the front. If the lines so far hold all the memory for segments that there is, the rest is left for
/// later.
fn decode_lines(
    buffer: &Buffer,
    grant: &Grant,
    rest: &mut VecDeque<(u64, Bytes)>,
    memory: &mut SegmentMemory,
) -> Vec<Line> {
    let mut lines = Vec::with_capacity(rest.len());
    while let Some((number, line)) = rest.pop_front() {
        let holds_memory = !memory.shares.is_empty();
        let decoded = decode::line(&line, buffer.trajectory_limits());
        let prepared = decoded.and_then(|trajectory| match prepare(buffer, grant, vec![trajectory], memory) {
            Err(Refusal::NoMemory) if holds_memory => Ok(None),
            Err(refusal) => Err(refusal.into()),
            Ok(mut one) => one.pop().map(Some).ok_or_else(body::stopped),
        });
        let Some(prepared) = prepared.transpose() else {
            rest.push_front((number, line));
            break;
        };
        lines.push(Line { number, prepared: prepared.map_err(Failure::of_single_object) });
    }
    lines
}

pub(crate) async fn ingest_lines(buffer: &Buffer, lines: Vec<Line>) -> Vec<BulkLine> {
    let mut answers: Vec<BulkLine> = Vec::with_capacity(lines.len());
    let mut slice: Vec<(u64, NewRollout)> = Vec::new();
    let mut bytes = 0;
    for line in lines {
        match line.prepared {
            Err(failure) => answers.push(refused(line.number, failure)),
            Ok(rollout) => {
                bytes += rollout.payload_bytes();
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
    BulkLine { line, status: status.as_u16(), receipt: Some(ingested.receipt()), problem: None }
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

/// The receipt of one trajectory, or the receipts of a bundle in the order of its trajectories.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes an answer")]
enum ReceiptOrBundle {
    Receipt(Box<Receipt>),
    Bundle(Vec<Receipt>),
}

/// The story of one rollout, or a page of stories.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes an answer")]
enum StoryOrPage {
    Story(Box<TrajectoryStory>),
    Page(TrajectoryPage),
}

/// Which rollouts to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StoryQuery {
    /// Policy; when absent `default`, or with `execution_id` every policy that the caller may access.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// `eval`: the rollouts that evaluate the policy; `train` when absent. One rollout is found whatever it is for.
    #[serde(default)]
    #[param(value_type = Option<wire::Purpose>)]
    purpose: wire::Purpose,
    /// One rollout of the current run. The response is then its story instead of a page.
    #[param(min_length = 1, max_length = 256)]
    rollout_id: Option<String>,
    /// Only rollouts of this execution, of all runs.
    #[param(min_length = 1, max_length = 256)]
    execution_id: Option<String>,
    /// Only rollouts of this group of the current run; with `execution_id`, of all runs.
    #[param(min_length = 1, max_length = 256)]
    group_id: Option<String>,
    /// Only rollouts with this verdict.
    verdict: Option<Verdict>,
    /// Only rollouts with this reason.
    reason: Option<String>,
    /// Only rollouts in this state.
    state: Option<RolloutState>,
    /// Only rollouts of groups of this environment.
    #[param(min_length = 1, max_length = 256)]
    environment: Option<String>,
    /// Only rollouts used by this optimizer step.
    #[param(minimum = 0)]
    step: Option<i64>,
    /// Which entries come first. `oldest` when absent; an `after` has the order of its list.
    order: Option<ListOrder>,
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most entries in the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// Look up the state and history of rollouts
///
/// With `rollout_id` the response is the story of one rollout: its verdict, state, group and batches. Otherwise it is a
/// page of stories in the order of arrival, or the newest first. With `execution_id` and without `policy`, it has the
/// rollouts of all policies that the caller may access. With several filters, or with `verdict`, `reason`, `state`,
/// `environment` or `step`, a page ends after a bounded number of rollouts, whether they match or not. A page can
/// therefore be short or empty and still have a `next`.
#[utoipa::path(
    get,
    path = "/trajectories",
    operation_id = "get_trajectories",
    tag = "agents",
    params(StoryQuery),
    responses(
        (status = 200, description = "With `rollout_id` the story of one rollout, otherwise a page of stories", body = StoryOrPage),
        (status = 404, description = "No such policy or rollout"),
        InvalidQuery,
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<StoryQuery>,
) -> Result<Response, Failure> {
    let policy = || {
        let policy = params::policy(&grant, "policy", query.policy.as_deref())?;
        Ok::<_, Failure>(match query.purpose {
            wire::Purpose::Train => policy,
            wire::Purpose::Eval => policy.evaluations(),
        })
    };
    if let Some(rollout_id) = params::optional("rollout_id", query.rollout_id.as_deref(), RolloutId::parse)? {
        let policy = policy()?;
        let story = api.buffer.story(policy, rollout_id).await.map_err(Failure::from);
        let story = story.map_err(|failure| if query.policy.is_none() { failure.unnamed_policy() } else { failure })?;
        return Ok(axum::Json(story_on_wire(story)).into_response());
    }
    let limit = params::page_limit(query.limit)?;
    let execution_id = params::optional("execution_id", query.execution_id.as_deref(), ExecutionId::parse)?;
    let is_of_all_policies = execution_id.is_some() && query.policy.is_none() && query.purpose.is_default();
    let filter = StoryFilter {
        policy: if is_of_all_policies { None } else { Some(policy()?) },
        rollout_id: None,
        execution_id,
        group_id: params::optional("group_id", query.group_id.as_deref(), GroupId::parse)?,
        verdict: query.verdict.map(Into::into),
        reason: query.reason.map(|reason| params::text("reason", reason, ID_BYTES_MAX)).transpose()?,
        state: query.state.map(Into::into),
        step: query.step.map(|step| params::step("step", step)).transpose()?,
        environment: query.environment.map(|label| params::text("environment", label, ID_BYTES_MAX)).transpose()?,
        from: params::cursor(query.order, query.after.as_deref())?,
        limit,
    };
    let page = api.buffer.stories(filter, |policy| grant.sees(policy)).await?;
    let (next, examined) = (params::next(page.next), page.examined);
    let trajectories = page.entries.into_iter().map(story_on_wire).collect();
    Ok(axum::Json(TrajectoryPage { trajectories, next, examined }).into_response())
}

pub(crate) fn story_on_wire(story: Story) -> TrajectoryStory {
    let (suite, task) = story.evaluates.map(|of| (of.suite, of.task)).unzip();
    TrajectoryStory {
        policy: story.policy.to_string(),
        purpose: if story.policy.is_evaluations() { wire::Purpose::Eval } else { wire::Purpose::Train },
        suite,
        task,
        run: story.run.0,
        rollout_id: story.rollout_id,
        execution_id: story.execution_id.to_string(),
        verdict: story.verdict.into(),
        reason: story.reason,
        failed_filters: story.failed_filters,
        state: story.state.into(),
        scoring: story.scoring,
        group: StoryGroup {
            group_id: story.group_id,
            state: story.group.state.into(),
            reason: story.group_reason,
            environment: story.environment,
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
        trained_tokens: story.trained_tokens,
        response_tokens: story.response_tokens,
        status: story.status,
        attempts: story.attempts,
        versions: params::trained_versions(story.trained_versions),
        received_at: story.received_at.to_string(),
        decided_at: params::time(story.decided_at),
        batched_at: params::time(story.batched_at),
        acked_at: params::time(story.acked_at),
        purged_at: params::time(story.purged_at),
    }
}
