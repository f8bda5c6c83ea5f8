//! What a request has led to so far, collected from its events.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    request::{Ending, Event, Token},
    text::{Text, TextStream},
};

/// Tokens, log-probabilities, versions and text of a request.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) tokens: Vec<Token>,
    decoding: Option<Decoding>,
    /// Scores of the prompt, after the first token that is scored.
    pub(super) scores: Vec<f32>,
    /// Label of the weights that were used last.
    pub(super) version: Arc<str>,
    pub(super) ending: Option<Ending>,
}

impl Output {
    /// An empty output, of a request that began under the weights `version`. If the model has text, the output ends
    /// where its text contains one of `stops`.
    pub(super) fn new(version: Arc<str>, text: Option<Arc<Text>>, stops: Vec<String>) -> Self {
        let decoding = |text| Decoding { text, stream: TextStream::default(), stops, whole: String::new() };
        Self { tokens: Vec::new(), decoding: text.map(decoding), scores: Vec::new(), version, ending: None }
    }

    pub(super) fn push(&mut self, event: Event) {
        match event {
            Event::Read { version, scores } => (self.version, self.scores) = (version, scores),
            Event::Token(token) => {
                let stop = self.decoding.as_mut().and_then(|decoding| decoding.push(token.id));
                self.ending = stop.map(Ending::StopText);
                self.add(token);
            }
            Event::End { ending, last } => {
                // A stop token is not part of the text.
                let id = last.as_ref().map(|token| token.id).filter(|_| !matches!(ending, Ending::Stop(_)));
                let stop = self.decoding.as_mut().and_then(|decoding| decoding.finish(id));
                if let Some(token) = last {
                    self.add(token);
                }
                self.ending = Some(stop.map_or(ending, Ending::StopText));
            }
        }
    }

    fn add(&mut self, token: Token) {
        self.version = Arc::clone(&token.version);
        self.tokens.push(token);
    }

    /// The text so far, if the model has any. Until the end, text is missing that may be part of a stop text.
    pub(super) fn text(&self) -> Option<&str> {
        self.decoding.as_ref().map(|decoding| decoding.told(self.ending.is_some()))
    }

    pub(super) fn ids(&self) -> Vec<i64> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    /// Which weights drew which tokens: consecutive ranges `start..end` of the tokens.
    pub(super) fn versions(&self) -> Value {
        let spans = self.tokens.chunk_by(|left, right| left.version == right.version);
        let mut start = 0;
        let span = |tokens: &[Token]| {
            let end = start + tokens.len();
            let span = json!({"version": *tokens[0].version, "start": start, "end": end});
            start = end;
            span
        };
        spans.map(span).collect()
    }
}

/// The text of an output.
#[derive(Debug)]
struct Decoding {
    text: Arc<Text>,
    stream: TextStream,
    stops: Vec<String>,
    /// The text so far, up to a stop text.
    whole: String,
}

impl Decoding {
    /// Adds a token. Returns the stop text that is complete with it.
    fn push(&mut self, id: i64) -> Option<String> {
        let new = self.stream.push(&self.text, id);
        self.extend(&new)
    }

    /// Adds the last token, if it is part of the text, and text that was incomplete.
    fn finish(&mut self, id: Option<i64>) -> Option<String> {
        let mut new = id.map(|id| self.stream.push(&self.text, id)).unwrap_or_default();
        new.push_str(&self.stream.finish(&self.text));
        self.extend(&new)
    }

    fn extend(&mut self, new: &str) -> Option<String> {
        let before = self.whole.len();
        self.whole.push_str(new);
        // A stop text that is complete now may have begun in the text before.
        let found = self.stops.iter().filter_map(|stop| {
            let from = self.whole.floor_char_boundary(before.saturating_sub(stop.len()));
            Some((from + self.whole[from..].find(stop.as_str())?, stop))
        });
        let (at, stop) = found.min()?;
        let stop = stop.clone();
        self.whole.truncate(at);
        Some(stop)
    }

    fn told(&self, has_ended: bool) -> &str {
        if has_ended {
            return &self.whole;
        }
        let begun = |stop: &String| {
            let lengths = (1..stop.len()).rev().filter(|&length| stop.is_char_boundary(length));
            lengths.into_iter().find(|&length| self.whole.ends_with(&stop[..length])).unwrap_or(0)
        };
        let held = self.stops.iter().map(begun).max().unwrap_or(0);
        &self.whole[..self.whole.len() - held]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_the_tokens_in_order() {
        let mut output = Output::new("1".into(), None, Vec::new());
        assert_eq!(output.versions(), json!([]));
        for version in ["1", "1", "2", "3", "3"] {
            let token = Token { id: 0, logprob: 0.0, alternatives: Vec::new(), version: version.into() };
            output.push(Event::Token(token));
        }
        let expected = json!([
            {"version": "1", "start": 0, "end": 2},
            {"version": "2", "start": 2, "end": 3},
            {"version": "3", "start": 3, "end": 5},
        ]);
        assert_eq!((output.versions(), &*output.version), (expected, "3"));
    }
}
