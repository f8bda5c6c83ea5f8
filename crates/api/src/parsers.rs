//! Parsers of requests, made public for the fuzz targets, the tests that replay their seeds, and `benches/decode.rs`.
//!
//! It is separate from the handlers because they need a store. Nothing else uses this module, and it is not part of the
//! public API.

use axum::http::{HeaderMap, HeaderValue, Uri, header};
use bytes::Bytes;
use forebay_domain::{
    refusal::Refusal,
    trajectory::{Trajectory, TrajectoryLimits},
};
use forebay_wire::{
    self as wire, AbortRequest, AckRequest, AdmissionRequest, BatchRequest, CheckpointRequest, CloseRequest,
    DiscardRequest, ExtendRequest, FinishRequest, KeyRequest, NackRequest, Object, PolicyRules, Problem, ResetRequest,
    ResumeRequest, ScoreRequest, SessionRequest, TryRequest, VersionRequest,
};
use serde::de::DeserializeOwned;

use crate::{
    codecs::{arrow, decode},
    http::{
        body::{self, BodyLimits},
        params,
        problem::Failure,
    },
    routes::{
        batches::{BatchQuery, ShardsQuery},
        groups::GroupQuery,
        looking::{
            content::ContentQuery,
            journal::JournalQuery,
            series::SeriesQuery,
            steps::StepQuery,
            why::{OverviewQuery, WhyQuery},
        },
        policies::{PolicyQuery, WaitQuery},
        samples::ShardQuery,
        scores::ScoreQuery,
        sessions::SessionQuery,
        trajectories::{self, StoryQuery},
    },
};

/// Decodes and checks the trajectories of a JSON body.
pub fn trajectories(bytes: &[u8], limits: &TrajectoryLimits) -> Result<Vec<Trajectory>, Box<Problem>> {
    checked(decode_json(bytes, limits)?, limits)
}

/// Reads and checks the trajectories of an Arrow stream.
pub fn arrow(bytes: &[u8], limits: &TrajectoryLimits) -> Result<Vec<Trajectory>, Box<Problem>> {
    checked(decode_arrow(Bytes::copy_from_slice(bytes))?, limits)
}

fn checked(sent: Vec<wire::Trajectory>, limits: &TrajectoryLimits) -> Result<Vec<Trajectory>, Box<Problem>> {
    let parse = |sent| Trajectory::parse(sent, limits);
    let invalid = |found| boxed(Refusal::Invalid(found).into());
    sent.into_iter().map(parse).collect::<Result<_, _>>().map_err(invalid)
}

/// Decodes the trajectories of a JSON body without checking them.
pub fn decode_json(bytes: &[u8], limits: &TrajectoryLimits) -> Result<Vec<wire::Trajectory>, Box<Problem>> {
    decode::body(bytes, limits).map(|(sent, _)| sent).map_err(boxed)
}

/// Reads the trajectories of an Arrow stream without checking them.
pub fn decode_arrow(bytes: Bytes) -> Result<Vec<wire::Trajectory>, Box<Problem>> {
    arrow::bundle(bytes).map_err(boxed)
}

/// The results of the fast path and of the general parser for a body that the fast path accepts.
#[must_use]
pub fn readings(
    bytes: &[u8],
    limits: &TrajectoryLimits,
) -> Option<(Vec<wire::Trajectory>, Option<Vec<wire::Trajectory>>)> {
    decode::readings(bytes, limits)
}

/// Splits a bulk body into its non-empty lines, numbered from 1.
pub fn lines(bytes: &[u8]) -> Result<Vec<(u64, &[u8])>, Box<Problem>> {
    trajectories::numbered_lines(bytes).map_err(boxed)
}

/// Decompresses a body.
pub fn expand(sent: &[u8], coding: &'static str, limits: BodyLimits) -> Result<Bytes, Box<Problem>> {
    let headers = HeaderMap::from_iter([(header::CONTENT_ENCODING, HeaderValue::from_static(coding))]);
    body::expand_alone(sent, &headers, limits).map_err(boxed)
}

/// Parses a body as the request of each control call, and returns the errors of the calls that refuse it.
#[must_use]
pub fn control(bytes: &[u8]) -> Vec<Problem> {
    fn refusal<T: DeserializeOwned>(bytes: &[u8]) -> Option<Problem> {
        body::parse::<Object<T>>(bytes).err().map(Failure::into_problem)
    }
    let refusals = [
        refusal::<AbortRequest>,
        refusal::<AckRequest>,
        refusal::<AdmissionRequest>,
        refusal::<BatchRequest>,
        refusal::<CheckpointRequest>,
        refusal::<CloseRequest>,
        refusal::<DiscardRequest>,
        refusal::<ExtendRequest>,
        refusal::<FinishRequest>,
        refusal::<KeyRequest>,
        refusal::<NackRequest>,
        refusal::<PolicyRules>,
        refusal::<ResetRequest>,
        refusal::<ResumeRequest>,
        refusal::<ScoreRequest>,
        refusal::<SessionRequest>,
        refusal::<TryRequest>,
        refusal::<VersionRequest>,
    ];
    refusals.iter().filter_map(|refusal| refusal(bytes)).collect()
}

/// Parses a query as that of each call that has one, and returns the errors of the calls that refuse it.
#[must_use]
pub fn query(text: &str) -> Vec<Problem> {
    fn refusal<T: DeserializeOwned>(uri: &Uri) -> Option<Problem> {
        params::query::<T>(uri).err().map(Failure::into_problem)
    }
    let Ok(uri) = Uri::try_from(format!("/?{text}")) else { return Vec::new() };
    let refusals = [
        refusal::<BatchQuery>,
        refusal::<ContentQuery>,
        refusal::<GroupQuery>,
        refusal::<JournalQuery>,
        refusal::<OverviewQuery>,
        refusal::<PolicyQuery>,
        refusal::<ScoreQuery>,
        refusal::<SeriesQuery>,
        refusal::<SessionQuery>,
        refusal::<ShardQuery>,
        refusal::<ShardsQuery>,
        refusal::<StepQuery>,
        refusal::<StoryQuery>,
        refusal::<WaitQuery>,
        refusal::<WhyQuery>,
    ];
    refusals.iter().filter_map(|refusal| refusal(&uri)).collect()
}

fn boxed(failure: Failure) -> Box<Problem> {
    Box::new(failure.into_problem())
}
