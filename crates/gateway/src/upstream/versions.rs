//! Which weight version sampled which ids, from what an engine says.

use std::collections::BTreeMap;

use super::answer::{Label, LabelSpan, Versions};
use crate::completion::VersionSpan;

/// Spans that tile `len` ids, and whether any of them is assumed. `at_start` is the policy's published version when
/// the call began, which stands for whatever the engine does not say or says in an unknown label.
pub(super) fn spans(
    versions: &Versions,
    len: usize,
    at_start: i64,
    labels: &BTreeMap<String, i64>,
) -> (Vec<VersionSpan>, bool) {
    let len = len as u64;
    if len == 0 {
        return (Vec::new(), false);
    }
    if let Some(found) = versions.weight_versions.as_deref().and_then(|spans| tile(spans, len, at_start, labels)) {
        return found;
    }
    // A lone label names the weights at the end of the call. The ids before may be older, and the published version
    // says how old: an engine may be behind it, but never ahead of what it loads later.
    let last = versions.weight_version.as_ref().and_then(|label| number(label, labels));
    let version = last.map_or(at_start, |last| last.min(at_start));
    (vec![VersionSpan { version, start: 0, len: len as u32 }], true)
}

/// The engine's spans, or `None` if they are not one behind the other from the first id on.
fn tile(
    spans: &[LabelSpan],
    len: u64,
    at_start: i64,
    labels: &BTreeMap<String, i64>,
) -> Option<(Vec<VersionSpan>, bool)> {
    let mut tiled: Vec<VersionSpan> = Vec::new();
    let (mut place, mut assumed) = (0, false);
    for span in spans {
        if span.start != place || span.end < span.start {
            return None;
        }
        let end = span.end.min(len);
        let known = number(&span.version, labels);
        assumed |= known.is_none() && end > place;
        extend(&mut tiled, known.unwrap_or(at_start), place, end);
        place = span.end;
    }
    if place < len {
        // The engine counted fewer ids. The last span is the best guess for the rest.
        let version = tiled.last()?.version;
        extend(&mut tiled, version, place, len);
        assumed = true;
    }
    Some((tiled, assumed))
}

/// Appends a span, or makes the last one longer if the version is the same.
fn extend(tiled: &mut Vec<VersionSpan>, version: i64, start: u64, end: u64) {
    if end <= start {
        return;
    }
    let len = (end - start) as u32;
    match tiled.last_mut() {
        Some(last) if last.version == version => last.len += len,
        _ => tiled.push(VersionSpan { version, start: start as u32, len }),
    }
}

fn number(label: &Label, labels: &BTreeMap<String, i64>) -> Option<i64> {
    let number = match label {
        Label::Number(number) => *number,
        Label::Text(text) => match labels.get(text) {
            Some(number) => *number,
            None => text.trim().parse().ok()?,
        },
    };
    (number >= 0).then_some(number)
}
