//! What a request has led to so far, collected from its events.

use std::sync::Arc;

use serde_json::{Value, json};

use super::request::{Ending, Event, Token};

/// Tokens, log-probabilities and versions of a request.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) tokens: Vec<Token>,
    /// Scores of the prompt, after the first token that is scored.
    pub(super) scores: Vec<f32>,
    /// Label of the weights that were used last.
    pub(super) version: Arc<str>,
    pub(super) ending: Option<Ending>,
}

impl Output {
    /// An empty output, of a request that began under the weights `version`.
    pub(super) fn new(version: Arc<str>) -> Self {
        Self { tokens: Vec::new(), scores: Vec::new(), version, ending: None }
    }

    pub(super) fn push(&mut self, event: Event) {
        match event {
            Event::Read { version, scores } => (self.version, self.scores) = (version, scores),
            Event::Token(token) => {
                self.version = Arc::clone(&token.version);
                self.tokens.push(token);
            }
            Event::End(ending) => self.ending = Some(ending),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_the_tokens_in_order() {
        let mut output = Output::new("1".into());
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
