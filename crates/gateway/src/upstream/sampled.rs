//! What an engine sampled, in one part or in several.
//!
//! `check` makes the parts, `exact` puts them together, and `progress` keeps them between two requests.

use crate::completion::VersionSpan;

/// What an engine sampled in one go.
#[derive(Debug, Default)]
pub(super) struct Part {
    pub(super) tokens: Vec<i32>,
    pub(super) logprobs: Vec<f32>,
    pub(super) spans: Vec<VersionSpan>,
    pub(super) version_assumed: bool,
}

/// What was sampled so far.
#[derive(Default)]
pub(super) struct Sampled {
    pub(super) tokens: Vec<i32>,
    pub(super) logprobs: Vec<f32>,
    pub(super) spans: Vec<VersionSpan>,
    pub(super) version_assumed: bool,
    /// Of the first part. The prompts of the others are in the cache anyway.
    pub(super) cached_tokens: Option<u64>,
    /// How many parts have ids.
    pub(super) parts: u32,
}

impl Sampled {
    /// Adds the next part.
    pub(super) fn append(&mut self, part: Part, cached_tokens: Option<u64>) {
        if self.parts == 0 {
            self.cached_tokens = cached_tokens;
        }
        self.parts += u32::from(!part.tokens.is_empty());
        let behind = self.tokens.len() as u32;
        for span in part.spans {
            match self.spans.last_mut() {
                Some(last) if last.version == span.version => last.len += span.len,
                _ => self.spans.push(VersionSpan { start: span.start + behind, ..span }),
            }
        }
        self.tokens.extend(part.tokens);
        self.logprobs.extend(part.logprobs);
        self.version_assumed |= part.version_assumed;
    }
}
