//! `GET /exports`: streams the rollouts of a run page by page, so that an export is never held in memory as a whole.
//!
//! Exports take the bytes of their pages from the budget of [`samples`](super::samples), in the same way.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use forebay_client::wire::{ExportSummary, ExportedRollout, RolloutState, Verdict};
use futures::{TryStreamExt as _, stream};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{
    Api,
    accept::{accepted, asks_for_zstd},
    body,
    budget::{Budget, Share, paid},
    compression::Compressor,
    guard::Caller,
    openapi::NoSuchPolicy,
    params::{self, Query},
    problem::Failure,
    samples::FIRST_PAGE_WAIT,
};
use crate::buffer::{
    export::{ExportFilter, ExportReader, Expression},
    ids::Run,
    refusal::BufferError,
};

/// The media type of the response.
const NDJSON: &str = "application/x-ndjson";

/// The size at which a frame is sent.
const FRAME_BYTES: usize = 1 << 20;

/// How many times a page is held: as stored, unpacked, and as a response whose text is up to three times as long.
const PAGE_COPIES: u64 = 5;

/// The most bytes of an expression.
const WHERE_BYTES_MAX: usize = 4_096;

/// Which rollouts to export.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExportQuery {
    /// Policy; `default` when absent.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// Run of the policy; the current one when absent.
    #[param(minimum = 0)]
    run: Option<i64>,
    /// Only rollouts in these states, separated by commas.
    state: Option<String>,
    /// Only rollouts with these verdicts, separated by commas.
    verdict: Option<String>,
    /// Only rollouts with at least this reward.
    min_reward: Option<f64>,
    /// Only rollouts for which this CEL expression is true. It has the variables of filters of scope `rollout`, with the
    /// current version of the policy.
    #[serde(rename = "where")]
    #[param(max_length = 4096)]
    expression: Option<String>,
    /// `false`: each line is a trajectory alone, as `POST /trajectories` takes it. Default `true`.
    results: Option<bool>,
    /// `true`: the last line is `{"summary": {"rollouts": 1, "filtered": 0, "unevaluated": 0, "purged": 0, "damaged": 0}}`
    /// with the numbers of rollouts that were exported and left out. A response without it is incomplete. Default
    /// `false`.
    summary: Option<bool>,
}

/// Export rollouts
///
/// One line for each rollout whose payload is stored, group after group in the order in which the groups were opened,
/// and in a group by arrival. The export has every rollout that was acknowledged before it began, and none that arrived
/// later; `result` is what had become of a rollout when it was read. Trajectories are as posted, except that segments
/// stand in the place of turns. Rollouts whose stored data is damaged are left out and counted in the summary.
#[utoipa::path(
    get,
    path = "/exports",
    operation_id = "get_exports",
    tag = "operations",
    params(ExportQuery),
    responses(
        (status = 200, description = "The rollouts, one per line", body = ExportedRollout, content_type = "application/x-ndjson"),
        NoSuchPolicy,
        (status = 406, description = "No acceptable representation"),
        (status = 422, description = "Invalid query, or an expression that cannot be compiled"),
        (status = 503, description = "Other readers use up the byte budget; retry"),
    )
)]
pub(super) async fn get(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<ExportQuery>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let policy = params::policy(&grant, "policy", query.policy.as_deref())?;
    check_accept(&headers)?;
    let filter = filter(&query)?;
    let compressor = asks_for_zstd(&headers).then(|| Compressor::new(&api.compressors)).flatten();
    let mut reader = api.buffer.export(policy, query.run.map(Run), filter).await?;
    let budget = api.budgets.samples.clone();
    let granted = budget.wait_at_most(FIRST_PAGE_WAIT, page_cost(&mut reader).await?).await?;
    // The first page is read before the head is sent, so that an error can still become a problem document.
    let page = PaidPage::read(&mut reader, granted).await?;
    let mut head = HeaderMap::new();
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static(NDJSON));
    head.insert(header::VARY, HeaderValue::from_static("accept, accept-encoding"));
    if compressor.is_some() {
        head.insert(header::CONTENT_ENCODING, HeaderValue::from_static("zstd"));
    }
    let (has_results, has_summary) = (query.results.unwrap_or(true), query.summary.unwrap_or(false));
    let lines = Lines { budget, reader, page, is_first: true, ended: false, compressor, has_results, has_summary };
    let frames = stream::try_unfold(lines, Lines::frames)
        .map_ok(|frames| stream::iter(frames.into_iter().map(Ok::<_, std::io::Error>)));
    Ok((head, Body::from_stream(frames.try_flatten())).into_response())
}

fn filter(query: &ExportQuery) -> Result<ExportFilter, Failure> {
    let states: Vec<RolloutState> = names("state", query.state.as_deref())?;
    let verdicts: Vec<Verdict> = names("verdict", query.verdict.as_deref())?;
    if query.min_reward.is_some_and(|least| !least.is_finite()) {
        return Err(Failure::invalid("min_reward", "must be finite"));
    }
    let compile = |text: &String| match text.len() {
        ..=WHERE_BYTES_MAX => Expression::compile(text).map_err(|why| Failure::invalid("where", why)),
        _ => Err(Failure::invalid("where", format!("must be at most {WHERE_BYTES_MAX} bytes"))),
    };
    Ok(ExportFilter {
        states: states.into_iter().map(Into::into).collect(),
        verdicts: verdicts.into_iter().map(Into::into).collect(),
        min_reward: query.min_reward,
        expression: query.expression.as_ref().map(compile).transpose()?.map(Arc::new),
    })
}

/// A list of names, separated by commas.
fn names<T: serde::de::DeserializeOwned>(parameter: &str, list: Option<&str>) -> Result<Vec<T>, Failure> {
    let parse = |name: &str| {
        let named = serde_json::Value::String(name.trim().to_owned());
        serde_json::from_value(named).map_err(|error| Failure::invalid(parameter, error.to_string()))
    };
    list.map_or(Ok(Vec::new()), |list| list.split(',').map(parse).collect())
}

fn check_accept(headers: &HeaderMap) -> Result<(), Failure> {
    let mut entries = accepted(headers, header::ACCEPT).peekable();
    let takes =
        |(media, quality): (String, f32)| quality > 0.0 && matches!(media.as_str(), NDJSON | "*/*" | "application/*");
    if entries.peek().is_none() || entries.any(takes) {
        return Ok(());
    }
    Err(Failure::not_acceptable("exports are available as application/x-ndjson"))
}

/// The bytes that the next page of a reader takes from the budget.
async fn page_cost(reader: &mut ExportReader) -> Result<usize, BufferError> {
    let bytes = reader.next_page_bytes().await?.saturating_mul(PAGE_COPIES);
    Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// A page with its share of the budget. The share also covers the response made of the page, until it is written.
struct PaidPage {
    rollouts: std::vec::IntoIter<ExportedRollout>,
    share: Arc<Share>,
}

impl PaidPage {
    async fn read(reader: &mut ExportReader, share: Share) -> Result<Option<Self>, BufferError> {
        let page = reader.next_page().await?;
        Ok(page.map(|page| Self { rollouts: page.into_iter(), share: Arc::new(share) }))
    }
}

/// A response body that is being written.
#[expect(clippy::struct_excessive_bools, reason = "two are options of the caller")]
struct Lines {
    budget: Budget,
    reader: ExportReader,
    page: Option<PaidPage>,
    /// Whether the page that was read before the head is still to be written.
    is_first: bool,
    ended: bool,
    compressor: Option<Compressor>,
    has_results: bool,
    has_summary: bool,
}

impl Lines {
    /// Returns the next frames. An error closes the connection, so that the client never takes an incomplete export for
    /// a complete one.
    async fn frames(mut self) -> Result<Option<(Vec<Bytes>, Self)>, std::io::Error> {
        if self.ended {
            return Ok(None);
        }
        if self.page.is_none() && !std::mem::take(&mut self.is_first) {
            let cost = page_cost(&mut self.reader).await.map_err(|error| broken(error.into()))?;
            let share = self.budget.wait_for(cost).await;
            self.page = PaidPage::read(&mut self.reader, share).await.map_err(|error| broken(error.into()))?;
        }
        let write = move || self.write().map(|frames| (frames, self));
        let written = tokio::task::spawn_blocking(write).await.map_err(|_| broken(body::stopped()))??;
        Ok(Some(written))
    }

    /// Writes lines of the current page until a frame is full. After the last page, it writes the end of the body.
    fn write(&mut self) -> Result<Vec<Bytes>, std::io::Error> {
        self.is_first = false;
        let mut text = Vec::new();
        let Some(PaidPage { mut rollouts, mut share }) = self.page.take() else {
            self.ended = true;
            if self.has_summary {
                line(&mut text, &ExportSummary { summary: self.reader.counts() })?;
            }
            let mut frames = self.compress(text)?;
            frames.extend(self.compressor.as_mut().map(Compressor::end).transpose()?);
            return Ok(frames);
        };
        while text.len() < FRAME_BYTES
            && let Some(rollout) = rollouts.next()
        {
            if self.has_results {
                line(&mut text, &rollout)?;
            } else {
                line(&mut text, &rollout.trajectory)?;
            }
        }
        let frames = self.compress(text)?;
        if rollouts.as_slice().is_empty() {
            drop(rollouts);
            if let Some(share) = Arc::get_mut(&mut share) {
                share.shrink(frames.iter().map(Bytes::len).sum());
            }
        } else {
            self.page = Some(PaidPage { rollouts, share: Arc::clone(&share) });
        }
        Ok(frames.into_iter().map(|frame| paid(frame, Arc::clone(&share))).collect())
    }

    fn compress(&mut self, text: Vec<u8>) -> Result<Vec<Bytes>, std::io::Error> {
        match &mut self.compressor {
            Some(compressor) => compressor.parts(vec![text.into()]),
            None => Ok(vec![text.into()]),
        }
    }
}

fn line(text: &mut Vec<u8>, value: &impl serde::Serialize) -> Result<(), std::io::Error> {
    serde_json::to_writer(&mut *text, value)?;
    text.push(b'\n');
    Ok(())
}

fn broken(failure: Failure) -> std::io::Error {
    let problem = failure.into_problem();
    tracing::warn!(problem.kind = problem.kind, "a stream of an export was aborted");
    std::io::Error::other(problem.kind)
}
