//! A request in work: its tokens so far, its cache, and its random numbers.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedSender;

use super::admission::Permit;
use super::request::{Ending, Event, Request, Token};
use crate::model::{InferenceModel, SequenceCache};
use crate::random::Random;

/// An accepted request on its way to the model's thread.
#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) id: u64,
    pub(super) request: Request,
    pub(super) events: UnboundedSender<Event>,
    pub(super) permit: Permit,
}

/// A sequence that waits or runs.
#[derive(Debug)]
pub(super) struct Sequence {
    accepted: Accepted,
    /// The prompt and the tokens that were drawn.
    pub(super) tokens: Vec<i64>,
    pub(super) cache: SequenceCache,
    /// Scores of the prompt under the weights that the cache belongs to.
    scores: Vec<f32>,
    /// Whether [`Event::Read`] was sent.
    is_read: bool,
    /// The token that ended the sequence.
    last: Option<Token>,
    /// The draws of a sequence depend on its seed alone, and not on which sequences run beside it.
    random: Random,
}

impl Sequence {
    pub(super) fn new(accepted: Accepted, model: &InferenceModel) -> Self {
        Self {
            tokens: accepted.request.prompt.clone(),
            cache: model.cache(),
            scores: Vec::new(),
            is_read: false,
            last: None,
            random: Random::new(accepted.request.seed, 0),
            accepted,
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.accepted.id
    }

    pub(super) fn request(&self) -> &Request {
        &self.accepted.request
    }

    /// Number of tokens that are not in the cache.
    pub(super) fn lacking(&self) -> usize {
        self.tokens.len() - self.cache.length()
    }

    /// Number of tokens that the sequence may reach.
    pub(super) fn tokens_max(&self) -> usize {
        self.request().prompt.len() + self.request().sampling.new_tokens_max
    }

    /// Capacity of the cache after `count` more tokens.
    pub(super) fn capacity_after(&self, count: usize) -> usize {
        self.cache.capacity_for(self.cache.length() + count, self.tokens_max())
    }

    /// Frees the cache. Its content is computed again before the next token, with the weights of that time. The prompt's
    /// scores are computed again with it if they are not complete.
    pub(super) fn forget(&mut self, model: &InferenceModel) {
        self.cache = model.cache();
        self.scores.clear();
    }

    /// The tokens whose scores the states at positions `start..start + count` give, with the place of the first of
    /// these states. Empty if the prompt is not scored or has its scores already.
    pub(super) fn targets(&self, start: usize, count: usize) -> (usize, &[i64]) {
        let Some(from) = self.request().score_from.filter(|_| !self.is_read) else { return (0, &[]) };
        // The state at a position gives the score of the next token.
        let first = start.max(from);
        let end = (start + count).min(self.request().prompt.len() - 1).max(first);
        (first - start, &self.tokens[first + 1..=end])
    }

    pub(super) fn add_scores(&mut self, scores: Vec<f32>) {
        self.scores.extend(scores);
    }

    /// Reports that the whole prompt is in the cache, once. Returns false if nobody waits for the request any more.
    pub(super) fn report_read(&mut self, version: &Arc<str>) -> bool {
        if std::mem::replace(&mut self.is_read, true) {
            return true;
        }
        let scores = std::mem::take(&mut self.scores);
        self.accepted.events.send(Event::Read { version: Arc::clone(version), scores }).is_ok()
    }

    pub(super) fn uniform(&mut self) -> f64 {
        self.random.uniform()
    }

    /// Adds a drawn token. Returns the ending if it was the last one.
    pub(super) fn push(&mut self, token: Token) -> Option<Ending> {
        let id = token.id;
        self.tokens.push(id);
        let ending = if self.request().sampling.stop_tokens.contains(&id) {
            Ending::Stop(id)
        } else if self.tokens.len() >= self.tokens_max() {
            Ending::Length
        } else {
            let is_gone = self.accepted.events.send(Event::Token(token)).is_err();
            return is_gone.then_some(Ending::Abort("the client has disconnected"));
        };
        self.last = Some(token);
        Some(ending)
    }

    /// Ends the request.
    pub(super) fn end(self, ending: Ending) {
        let Accepted { events, permit, .. } = self.accepted;
        // The place is free before the client learns of the end, so that a client that sends its next request at once
        // is not refused.
        drop((self.cache, permit));
        let _ = events.send(Event::End { ending, last: self.last });
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;
    use tokio::sync::mpsc;

    use super::super::admission::Admission;
    use super::*;
    use crate::{
        generate::Sampling,
        model::{ComputeKind, Decoder, ModelConfig},
    };

    #[test]
    fn a_prompt_is_scored_from_its_beginning_again_after_its_cache_is_gone() {
        let config = r#"{
            "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4,
            "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64
        }"#;
        let config = ModelConfig::parse(config).expect("valid");
        let model = Decoder::random(config, Device::Cpu, ComputeKind::Float32, 1).into_inference();
        let (events, mut receiver) = mpsc::unbounded_channel();
        let request = Request {
            rid: String::new(),
            prompt: vec![1, 2, 3, 4, 5],
            sampling: Sampling::default(),
            seed: 0,
            score_from: Some(1),
            alternatives: 0,
        };
        let permit = Admission::new(1, 100).admit(5).expect("there is room");
        let mut sequence = Sequence::new(Accepted { id: 0, request, events, permit }, &model);
        assert_eq!(sequence.targets(0, 3), (1, [3, 4].as_slice()));
        sequence.add_scores(vec![-1.0, -2.0]);
        assert_eq!(sequence.targets(3, 2), (0, [5].as_slice()));
        sequence.forget(&model);
        assert_eq!(sequence.targets(0, 5), (1, [3, 4, 5].as_slice()));
        sequence.add_scores(vec![-3.0, -4.0, -5.0]);
        assert!(sequence.report_read(&"1".into()));
        let Ok(Event::Read { scores, .. }) = receiver.try_recv() else { panic!("the prompt was read") };
        assert_eq!(scores, [-3.0, -4.0, -5.0]);
        sequence.forget(&model);
        assert_eq!(sequence.targets(0, 5), (0, [].as_slice()), "a prompt is scored once");
    }
}
