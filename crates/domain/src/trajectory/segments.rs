//! Segments as they were posted: their columns, spans and turns are checked.

use std::collections::BTreeMap;

use forebay_wire::{ColumnUpload, MediaSpan, Segment, TurnSpan, VersionSpan};

use super::{TrajectoryLimits, VIOLATIONS_MAX, Violations};
use crate::{
    columns::{COLUMN_BYTES_MAX, COLUMNS_MAX},
    formats::canonical::escape,
    ids::BlobDigest,
    media::NAMED_MAX,
    warnings::{LOGPROB_MAX, LOGPROB_NONE},
};

/// Checks all segments.
pub(super) fn check(segments: &[Segment], limits: &TrajectoryLimits, found: &mut Violations) {
    if segments.len() > limits.segments_max {
        found.push("/segments", format!("must have at most {} segments", limits.segments_max));
        return;
    }
    let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
    if tokens > limits.tokens_max {
        found.push("/segments", format!("must have at most {} tokens, has {tokens}", limits.tokens_max));
        return;
    }
    for (index, segment) in segments.iter().enumerate() {
        check_segment(&format!("/segments/{index}"), segment, found);
    }
}

/// Replaces numbers that are ignored, because their mask is 0, and that are not finite. What is delivered to trainers is
/// then finite. An empty list of turns is removed, because it says the same as none.
pub(super) fn clear_ignored(segments: &mut [Segment]) {
    for segment in segments {
        segment.turns = segment.turns.take().filter(|turns| !turns.is_empty());
        for column in
            [&mut segment.logprobs, &mut segment.teacher_logprobs, &mut segment.advantages].into_iter().flatten()
        {
            if column.len() != segment.loss_mask.len() || column.iter().fold(true, |all, value| all & value.is_finite())
            {
                continue;
            }
            for (value, _) in column.iter_mut().zip(&segment.loss_mask).filter(|(_, bit)| **bit == 0) {
                *value = if value.is_finite() { *value } else { 0.0 };
            }
        }
    }
}

fn check_segment(at: &str, segment: &Segment, found: &mut Violations) {
    let Segment {
        kind,
        tokens,
        loss_mask,
        response_length,
        logprobs,
        teacher_logprobs,
        values,
        advantages,
        versions,
        turns,
        columns: uploaded,
        media,
    } = segment;
    let response = loss_mask.len();
    found.text(&format!("{at}/kind"), kind.as_deref());
    if tokens.len() <= response {
        let detail = format!(
            "must hold at least one prompt token before the {response} response tokens of `loss_mask`, has {}",
            tokens.len()
        );
        found.push(format!("{at}/tokens"), detail);
    }
    each(&format!("{at}/tokens"), tokens, |&id| id >= 0, "must be 0 or above", found);
    each(&format!("{at}/loss_mask"), loss_mask, |&bit| bit <= 1, "must be 0 or 1", found);
    if let Some(length) = *response_length
        && length as usize != response
    {
        found.push(format!("{at}/response_length"), format!("is {length}, but `loss_mask` covers {response} tokens"));
    }
    let columns = [
        ("logprobs", logprobs),
        ("teacher_logprobs", teacher_logprobs),
        ("values", values),
        ("advantages", advantages),
    ];
    for (name, column) in columns {
        let Some(column) = column else { continue };
        let pointer = format!("{at}/{name}");
        if column.len() != response {
            found.push(&pointer, format!("has {} entries for {response} response tokens", column.len()));
        }
        let detail =
            if name == "values" { "must be finite as a 32-bit float" } else { "must be finite where the mask is 1" };
        each(&pointer, column, |value| value.is_finite(), detail, found);
        if name.ends_with("logprobs") && column.len() == response {
            check_logprobs(&pointer, column, loss_mask, found);
        }
    }
    if let Some(spans) = versions {
        check_spans(&format!("{at}/versions"), spans, response, found);
    }
    if let Some(turns) = turns {
        check_turns(&format!("{at}/turns"), turns, loss_mask, found);
    }
    check_columns(&format!("{at}/columns"), uploaded, found);
    check_media(&format!("{at}/media"), media, tokens.len(), found);
}

/// Checks how columns are named. Whether they fit is decided by the rules of the policy.
fn check_columns(at: &str, columns: &BTreeMap<String, ColumnUpload>, found: &mut Violations) {
    if columns.len() > COLUMNS_MAX {
        found.push(at, format!("must be at most {COLUMNS_MAX} columns, are {}", columns.len()));
        return;
    }
    for (name, ColumnUpload { digest, bytes }) in columns {
        let at = format!("{at}/{}", escape(name));
        found.require(digest.parse::<BlobDigest>().is_ok(), &format!("{at}/digest"), NO_DIGEST);
        if !(1..=COLUMN_BYTES_MAX).contains(bytes) {
            found.push(format!("{at}/bytes"), format!("must be 1 to {COLUMN_BYTES_MAX}, is {bytes}"));
        }
    }
}

const NO_DIGEST: &str = "must be a BLAKE3 digest: 64 hexadecimal digits in lower case";

/// Checks where media stand among so many tokens.
fn check_media(at: &str, media: &[MediaSpan], tokens: usize, found: &mut Violations) {
    if media.len() > NAMED_MAX {
        found.push(at, format!("must be at most {NAMED_MAX}, are {}", media.len()));
        return;
    }
    let mut next = 0;
    for (index, MediaSpan(start, length, digest, kind)) in media.iter().enumerate() {
        let at = format!("{at}/{index}");
        if *start < next {
            let detail = format!("must be {next} or above: media are in order and do not overlap");
            found.push(format!("{at}/0"), detail);
        }
        next = start.saturating_add(*length).max(0);
        if *length < 1 {
            found.push(format!("{at}/1"), "must be 1 or above");
        } else if next > tokens as i64 {
            found.push(
                format!("{at}/1"),
                format!("must end at {tokens} or before, the end of the tokens, not at {next}"),
            );
        }
        found.require(digest.parse::<BlobDigest>().is_ok(), &format!("{at}/2"), NO_DIGEST);
        found.text(&format!("{at}/3"), Some(kind));
    }
}

/// Checks the turns of a segment, which has this mask.
fn check_turns(at: &str, turns: &[TurnSpan], loss_mask: &[u8], found: &mut Violations) {
    let (mut next, end) = (0, loss_mask.len() as i64);
    for (index, TurnSpan { start, length, reward, state_key }) in turns.iter().enumerate() {
        let at = format!("{at}/{index}");
        found.text(&format!("{at}/state_key"), state_key.as_deref());
        found.require(reward.is_none_or(f64::is_finite), &format!("{at}/reward"), "must be finite");
        if *start < next {
            let detail = format!("must be {next} or above: turns are in order and do not overlap");
            found.push(format!("{at}/start"), detail);
        }
        next = start.saturating_add(*length).max(0);
        if *length < 1 {
            found.push(format!("{at}/length"), "must be 1 or above");
        } else if next > end {
            found.push(
                format!("{at}/length"),
                format!("must end at {end} or before, the end of the response, not at {next}"),
            );
        } else if *start >= 0 && !loss_mask[*start as usize..next as usize].contains(&1) {
            found.push(at, "must have a token with mask 1: a turn is what the agent sampled");
        }
    }
}

/// Refuses log-probabilities of trained tokens that are further above 0 than rounding explains, or that stand for none.
/// Values that are not finite are refused elsewhere.
pub(super) fn check_logprobs(at: &str, column: &[f32], mask: &[u8], found: &mut Violations) {
    let is_impossible = |(&logprob, &bit): (&f32, &u8)| {
        bit == 1 && (logprob > LOGPROB_MAX || logprob <= LOGPROB_NONE) && logprob.is_finite()
    };
    if !column.iter().zip(mask).fold(false, |any, entry| any | is_impossible(entry)) {
        return;
    }
    let impossible = column.iter().zip(mask).enumerate().filter(|(_, entry)| is_impossible(*entry));
    for (index, (logprob, _)) in impossible.take(VIOLATIONS_MAX) {
        let detail = if *logprob > LOGPROB_MAX {
            format!("is {logprob}: no log-probability is above 0")
        } else {
            format!(
                "is {logprob}, which vLLM writes if it has no log-probability of a token: start it with \
                 --logprobs-mode processed_logprobs, or set the mask of this token to 0"
            )
        };
        found.push(format!("{at}/{index}"), detail);
    }
}

pub(super) fn each<T>(at: &str, items: &[T], valid: impl Fn(&T) -> bool, detail: &str, found: &mut Violations) {
    // Nearly all columns are valid, and checking only that is several times faster than searching for the first fault.
    if items.iter().fold(true, |all, item| all & valid(item)) {
        return;
    }
    for (index, _) in items.iter().enumerate().filter(|(_, item)| !valid(item)).take(VIOLATIONS_MAX) {
        found.push(format!("{at}/{index}"), detail);
    }
}

pub(super) fn check_spans(at: &str, spans: &[VersionSpan], response: usize, found: &mut Violations) {
    let mut next = 0_i64;
    let before = found.0.len();
    for (index, VersionSpan(version, start, length)) in spans.iter().copied().enumerate() {
        if version < 0 {
            found.push(format!("{at}/{index}/0"), "must be 0 or above");
        }
        if start != next {
            found.push(format!("{at}/{index}/1"), format!("must be {next}: spans tile the response"));
        }
        if length < 1 {
            found.push(format!("{at}/{index}/2"), "must be 1 or above");
        }
        next = start.saturating_add(length);
    }
    if next != response as i64 && found.0.len() == before {
        found.push(at, format!("must end at {response}, the end of the response, not at {next}"));
    }
}
