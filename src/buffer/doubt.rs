//! What is possible and yet hardly meant: the rollout is stored as it was sent, and its producer is told by name.
//!
//! Separate from [`trajectory`](super::trajectory), which refuses what is impossible.

use std::fmt;

use forebay_client::wire::{Sampling, Segment};

use super::ids::Version;

/// A log-probability of a trained token may be so far above 0, since engines round; above, it is refused.
pub const LOGPROB_MAX: f32 = 1e-2;

/// A token whose log-probability is below was hardly sampled: a probability of 1e-44.
pub const LOGPROB_LIKELY_MIN: f32 = -100.0;

/// What a producer should know about a rollout that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Its name, one of a fixed set.
    pub name: &'static str,
    /// What was found, as a sentence.
    pub detail: String,
}

impl Warning {
    /// A warning.
    pub fn new(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, detail: detail.into() }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.detail)
    }
}

/// What is doubtful in a trajectory by itself.
pub(super) fn doubts(sampling: &Sampling, segments: &[Segment]) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let above = Found::of(segments, |logprob| logprob > 0.0);
    if let Some(found) = above {
        warnings.push(Warning::new("logprobs-above-zero", format!("{found} above 0, as rounding makes them")));
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

/// What is doubtful about the newest version that a trajectory states, while this one is current.
pub(super) fn version_doubt(newest: Option<i64>, current: Version) -> Option<Warning> {
    let newest = newest.filter(|newest| *newest > current.0)?;
    let detail = format!("version {newest} is above the current one of the policy, {current}; it counts as fresh");
    Some(Warning::new("version-ahead", detail))
}

/// Log-probabilities of trained tokens that look odd.
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
            // Nearly always there is none, and only counting is several times faster.
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
