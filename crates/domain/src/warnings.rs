//! Warnings: contents that are possible but probably a mistake. The rollout is stored as it was sent, and its producer
//! gets the warning by name.
//!
//! Separate from [`trajectory`](crate::trajectory), which refuses contents that are impossible.

use std::fmt;

use forebay_wire::{Retries, Sampling, Segment};

use crate::ids::Version;

/// The greatest log-probability of a trained token that is accepted. Engines round, so a value may be slightly above 0;
/// a greater one is refused.
pub const LOGPROB_MAX: f32 = 1e-2;

/// What vLLM writes if it has no log-probability of a token. Neither this nor anything below is accepted for a trained
/// token: the ratio to it is infinite.
pub const LOGPROB_NONE: f32 = -9999.0;

/// A token with a lower log-probability was almost certainly not sampled: its probability is below 4e-44.
pub const LOGPROB_LIKELY_MIN: f32 = -100.0;

/// The names of the warnings about the calls of sessions.
const OF_SESSIONS: [&str; 1] = ["part-left-out"];

/// A warning for the producer of a rollout that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Its name, one of a fixed set.
    pub name: &'static str,
    /// The finding, as a sentence.
    pub detail: String,
}

impl Warning {
    /// Creates a warning.
    pub fn new(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, detail: detail.into() }
    }

    /// The warning that a call of a session was stored with.
    pub fn of_session(stored: &str) -> Option<Self> {
        let (name, detail) = stored.split_once(": ")?;
        let name = OF_SESSIONS.into_iter().find(|known| *known == name)?;
        Some(Self::new(name, detail))
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.detail)
    }
}

/// A warning if answers that the agent received are in no segment.
pub fn delivered_dropped(calls: u64, retries: Retries) -> Option<Warning> {
    let why = match retries {
        Retries::Transport => "its client repeated these calls",
        Retries::Last | Retries::Keep => {
            "other calls had the same prompt; with `sessions.retries = \"transport\"` the policy trains all that were \
             delivered"
        }
    };
    let detail = || format!("the agent received answers that are in no segment ({calls}), because {why}");
    (calls > 0).then(|| Warning::new("delivered-dropped", detail()))
}

/// Warnings about a trajectory that need no policy.
pub fn warnings(sampling: &Sampling, segments: &[Segment]) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let above = Found::of(segments, |logprob| logprob > 0.0);
    if let Some(found) = above {
        warnings.push(Warning::new("logprobs-above-zero", format!("{found} above 0, probably because of rounding")));
    }
    if let Some(found) = Found::of(segments, |logprob| logprob < LOGPROB_LIKELY_MIN) {
        let detail = format!("{found} below {LOGPROB_LIKELY_MIN}: no sampled token is so improbable");
        warnings.push(Warning::new("logprobs-improbable", detail));
    }
    let Sampling { top_p, top_k, .. } = *sampling;
    if top_p < 1.0 || top_k != -1 {
        let detail = format!(
            "tokens were sampled with top_p {top_p} and top_k {top_k}: log-probabilities over the whole vocabulary are \
             not those of the distribution that was sampled from"
        );
        warnings.push(Warning::new("sampling-truncated", detail));
    }
    let untrained = |segment: &&Segment| !segment.loss_mask.contains(&1);
    let count = segments.iter().filter(untrained).count();
    if count > 0 {
        let detail = format!("{count} of {} segments have no 1 in `loss_mask` and train nothing", segments.len());
        warnings.push(Warning::new("mask-without-ones", detail));
    }
    warnings
}

/// A warning about the newest version that a trajectory states, given the current version.
pub fn version_warning(newest: Option<i64>, current: Version) -> Option<Warning> {
    let newest = newest.filter(|newest| *newest > current.0)?;
    let detail = format!("version {newest} is above the current one of the policy, {current}; it counts as fresh");
    Some(Warning::new("version-ahead", detail))
}

/// Unusual log-probabilities of trained tokens.
struct Found {
    count: usize,
    segment: usize,
    place: usize,
}

impl Found {
    fn of(segments: &[Segment], is_odd: impl Fn(f32) -> bool) -> Option<Self> {
        let mut found: Option<Self> = None;
        for (segment, sent) in segments.iter().enumerate() {
            let Some(logprobs) = &sent.logprobs else { continue };
            let odd = |place: &usize| sent.loss_mask[*place] == 1 && is_odd(logprobs[*place]);
            // Nearly always there is none, and counting alone is several times faster than searching.
            let count: usize =
                logprobs.iter().zip(&sent.loss_mask).map(|(&p, &bit)| usize::from(bit == 1 && is_odd(p))).sum();
            if count == 0 {
                continue;
            }
            let place = (0..logprobs.len()).find(odd).unwrap_or_default();
            found.get_or_insert(Self { count: 0, segment, place }).count += count;
        }
        found
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, segment, place } = self;
        write!(f, "log-probabilities of {count} trained tokens, first at /segments/{segment}/logprobs/{place}, are")
    }
}
