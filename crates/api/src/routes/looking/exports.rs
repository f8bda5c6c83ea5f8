//! `GET /exports`: the rollouts of a run, as lines or as Arrow record batches.

use std::{io, sync::Arc};

use arrow_schema::ArrowError;
use axum::{extract::State, http::HeaderMap, response::Response};
use bytes::Bytes;
use forebay_domain::ids::Run;
use forebay_exports::batch;
use forebay_service::{
    error::BufferError,
    looking::export::{ExportFilter, ExportReader, Expression},
};
use forebay_wire::{ARROW_STREAM, ExportSummary, ExportedRollout, Purpose, RolloutState, Verdict};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    codecs::arrow::Encoder,
    http::{
        accept::preferred,
        guard::Caller,
        pages::{self, Reader},
        params::{self, Query},
        problem::Failure,
    },
    openapi::{ArrowStream, NoSuchPolicy},
};

/// The media type of lines.
const NDJSON: &str = "application/x-ndjson";

/// The size at which a frame is sent.
const FRAME_BYTES: usize = 1 << 20;

/// The most bytes of an expression.
const WHERE_BYTES_MAX: usize = 4_096;

/// Which rollouts to export.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ExportQuery {
    /// Policy; `default` when absent.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// `eval`: the rollouts that evaluate the policy; `train` when absent.
    #[serde(default)]
    #[param(value_type = Option<Purpose>)]
    purpose: Purpose,
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
    /// `false`: each line is a trajectory alone, as `POST /trajectories` takes it. Default `true`. An Arrow stream has
    /// all columns in either case.
    results: Option<bool>,
    /// `true`: the last line is `{"summary": {"rollouts": 1, "filtered": 0, "unevaluated": 0, "purged": 0, "damaged": 0}}`
    /// with the numbers of rollouts that were exported and left out. A response without it is incomplete. After an Arrow
    /// stream, a second one follows, which has these numbers in one row. Default `false`.
    summary: Option<bool>,
}

/// Export rollouts
///
/// One line for each rollout whose payload is stored, or one row of an Arrow stream for each segment, group after group in the order in which the groups were opened,
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
        (status = 200, description = "The rollouts. `Accept` selects the format: one per line, or an Arrow IPC stream with a row per segment",
            content((ExportedRollout = "application/x-ndjson"), (ArrowStream = "application/vnd.apache.arrow.stream"))),
        NoSuchPolicy,
        (status = 406, description = "No acceptable representation"),
        (status = 422, description = "Invalid query, or an expression that cannot be compiled"),
        (status = 503, description = "Other readers use up the byte budget; retry"),
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<ExportQuery>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let policy = params::policy(&grant, "policy", query.policy.as_deref())?;
    let policy = match query.purpose {
        Purpose::Train => policy,
        Purpose::Eval => policy.evaluations(),
    };
    let format = negotiate(&headers)?;
    let filter = filter(&query)?;
    let reader = api.buffer.export(policy, query.run.map(Run), filter).await?;
    let has_summary = query.summary.unwrap_or(false);
    match format {
        Format::Ndjson => {
            let lines = Lines { has_results: query.results.unwrap_or(true), has_summary };
            pages::respond(&api, &headers, "exports", NDJSON, reader, lines).await
        }
        Format::Arrow => {
            let columns = Columns { encoder: Encoder::new(batch::schema()), has_summary };
            pages::respond(&api, &headers, "exports", ARROW_STREAM, reader, columns).await
        }
    }
}

impl Reader for ExportReader {
    type Page = std::vec::IntoIter<ExportedRollout>;

    async fn next_page_bytes(&mut self) -> Result<u64, BufferError> {
        Self::next_page_bytes(self).await
    }

    async fn next_page(&mut self) -> Result<Option<Self::Page>, BufferError> {
        Ok(Self::next_page(self).await?.map(Vec::into_iter))
    }
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

/// Formats of exports.
#[derive(Clone, Copy, Debug)]
enum Format {
    Ndjson,
    Arrow,
}

fn negotiate(headers: &HeaderMap) -> Result<Format, Failure> {
    let known = |media: &str| match media {
        NDJSON | "*/*" | "application/*" => Some(Format::Ndjson),
        ARROW_STREAM => Some(Format::Arrow),
        _ => None,
    };
    preferred(headers, Format::Ndjson, known).ok_or_else(|| {
        Failure::not_acceptable("exports are available as application/x-ndjson or application/vnd.apache.arrow.stream")
    })
}

/// Writes a line for each rollout.
struct Lines {
    has_results: bool,
    has_summary: bool,
}

impl pages::Writer<ExportReader> for Lines {
    fn page_copies(&self) -> u64 {
        // The text of a page is up to three times as long as the page.
        5
    }

    fn rows(&mut self, rollouts: &mut std::vec::IntoIter<ExportedRollout>) -> io::Result<(Vec<Bytes>, bool)> {
        let mut text = Vec::new();
        while text.len() < FRAME_BYTES {
            let Some(rollout) = rollouts.next() else { return Ok((vec![text.into()], true)) };
            if self.has_results {
                line(&mut text, &rollout)?;
            } else {
                line(&mut text, &rollout.trajectory)?;
            }
        }
        Ok((vec![text.into()], rollouts.as_slice().is_empty()))
    }

    fn end(&mut self, reader: &ExportReader) -> io::Result<Vec<Bytes>> {
        let mut text = Vec::new();
        if self.has_summary {
            line(&mut text, &ExportSummary { summary: reader.counts() })?;
        }
        Ok(vec![text.into()])
    }
}

fn line(text: &mut Vec<u8>, value: &impl serde::Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *text, value)?;
    text.push(b'\n');
    Ok(())
}

/// Writes a record batch for each page, with whole rollouts.
struct Columns {
    encoder: Encoder,
    has_summary: bool,
}

impl pages::Writer<ExportReader> for Columns {
    fn page_copies(&self) -> u64 {
        4
    }

    fn rows(&mut self, rollouts: &mut std::vec::IntoIter<ExportedRollout>) -> io::Result<(Vec<Bytes>, bool)> {
        if rollouts.as_slice().is_empty() {
            return Ok((Vec::new(), true));
        }
        let frames = batch::of(rollouts.as_slice()).and_then(|batch| self.encoder.batch(&batch));
        Ok((frames.map_err(unwritten)?, true))
    }

    fn end(&mut self, reader: &ExportReader) -> io::Result<Vec<Bytes>> {
        let mut frames = self.encoder.end().map_err(unwritten)?;
        if self.has_summary {
            let mut encoder = Encoder::new(batch::summary_schema());
            let summary = batch::summary(reader.counts()).and_then(|summary| encoder.batch(&summary));
            frames.extend(summary.map_err(unwritten)?);
            frames.extend(encoder.end().map_err(unwritten)?);
        }
        Ok(frames)
    }
}

fn unwritten(error: ArrowError) -> io::Error {
    tracing::error!(error = %error, "writing rollouts as Arrow failed");
    io::Error::other(error)
}
