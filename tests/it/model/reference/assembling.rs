//! The assembling rule: the oracle that the tests of the assembler have too, which shares no code with the assembler.

#[path = "../../../../crates/domain/src/assemble/tests/oracle.rs"]
mod oracle;

use forebay_wire::{Retries, SessionAssembly, SessionDropped, VersionSpan};

use super::{Break, DropReason};
use crate::model::{
    names::logprob,
    view::{AgentCall, Segment},
};

/// Names of agents.
const AGENTS: [&str; 2] = ["main", "helper"];

/// A call as the oracle reads it.
#[derive(Clone, Debug)]
struct Recorded {
    ended: u64,
    prompt: Vec<i32>,
    ids: Vec<i32>,
    logprobs: Option<Vec<f32>>,
    versions: Option<Vec<VersionSpan>>,
    stopped_on_token: bool,
    agent: Option<&'static str>,
    undelivered: bool,
    abandoned: bool,
    retry_count: u32,
}

impl Recorded {
    fn full(&self) -> Vec<i32> {
        [&self.prompt[..], &self.ids].concat()
    }
}

/// What becomes of the calls of one policy.
#[derive(Clone, Debug, Default)]
pub(super) struct Assembled {
    pub(super) segments: Vec<Segment>,
    pub(super) totals: SessionAssembly,
    /// Whether all answers are empty, and the agent received one.
    pub(super) sampled_nothing: bool,
    /// What becomes of each call.
    pub(super) outcomes: Vec<&'static str>,
    /// By call: the nearest earlier call, and the number of ids that both begin with.
    pub(super) breaks: Vec<Option<(usize, usize)>>,
}

/// Assembles calls in the order of their ends, each with whether it was delivered, and whether it belongs to an attempt
/// that was given up.
pub(super) fn assemble(calls: &[(&AgentCall, bool, bool)], retries: Retries) -> Assembled {
    let recorded = calls.iter().enumerate().map(|(ended, (call, delivered, abandoned))| Recorded {
        ended: ended as u64,
        prompt: call.prompt.clone(),
        ids: call.ids.clone(),
        logprobs: Some(call.logprobs.iter().copied().map(logprob).collect()),
        versions: Some(call.versions.clone()),
        stopped_on_token: call.stopped,
        agent: call.agent.map(|agent| AGENTS[agent]),
        undelivered: !delivered,
        abandoned: *abandoned,
        retry_count: call.retries,
    });
    let recorded: Vec<Recorded> = recorded.collect();
    let expected = oracle::expected(&recorded, retries);
    let mut outcomes = vec!["trained"; calls.len()];
    let mut totals = SessionAssembly {
        calls: calls.len() as u64,
        segments: expected.segments.len() as u64,
        breaks: expected.breaks.len() as u64,
        sampled_tokens: recorded.iter().map(|call| call.ids.len() as u64).sum(),
        trimmed: expected.trimmed as u64,
        ..SessionAssembly::default()
    };
    for (&call, reason) in &expected.dropped {
        outcomes[call] = match reason {
            DropReason::Empty => "empty",
            DropReason::Undelivered => "undelivered",
            DropReason::Retry => "retry",
            DropReason::Abandoned => "abandoned",
        };
        *count(&mut totals.dropped, *reason) += 1;
        *count(&mut totals.dropped_tokens, *reason) += recorded[call].ids.len() as u64;
    }
    let owned: usize = expected.owned.iter().map(Vec::len).sum();
    assert_eq!(owned + expected.dropped.len(), calls.len(), "every call is in one segment or dropped");
    let mut breaks = vec![None; calls.len()];
    for Break { call, nearest, position, .. } in expected.breaks {
        breaks[call] = Some((nearest, position));
    }
    let segments = expected.segments.into_iter().map(|segment| Segment {
        kind: segment.kind,
        tokens: segment.tokens,
        mask: segment.loss_mask,
        logprobs: segment.logprobs.map(|logprobs| logprobs.into_iter().map(multiple).collect()),
        versions: segment.versions,
    });
    let segments: Vec<Segment> = segments.collect();
    totals.trained_tokens = segments.iter().flat_map(|segment| &segment.mask).map(|&bit| u64::from(bit)).sum();
    let sampled_nothing = totals.sampled_tokens == 0 && calls.iter().any(|(_, delivered, _)| *delivered);
    Assembled { segments, totals, sampled_nothing, outcomes, breaks }
}

/// The multiple of -1/128 that a log-probability is.
pub(crate) fn multiple(logprob: f32) -> i64 {
    (logprob * -128.0).round() as i64
}

fn count(dropped: &mut SessionDropped, reason: DropReason) -> &mut u64 {
    match reason {
        DropReason::Empty => &mut dropped.empty,
        DropReason::Undelivered => &mut dropped.undelivered,
        DropReason::Retry => &mut dropped.retry,
        DropReason::Abandoned => &mut dropped.abandoned,
    }
}

/// Adds the totals of another policy.
pub(super) fn add(totals: &mut SessionAssembly, other: &SessionAssembly) {
    let pairs = |one: &mut SessionDropped, other: &SessionDropped| {
        one.empty += other.empty;
        one.undelivered += other.undelivered;
        one.retry += other.retry;
        one.abandoned += other.abandoned;
        one.aborted += other.aborted;
    };
    totals.calls += other.calls;
    totals.segments += other.segments;
    totals.breaks += other.breaks;
    totals.sampled_tokens += other.sampled_tokens;
    totals.trained_tokens += other.trained_tokens;
    totals.trimmed += other.trimmed;
    pairs(&mut totals.dropped, &other.dropped);
    pairs(&mut totals.dropped_tokens, &other.dropped_tokens);
}
