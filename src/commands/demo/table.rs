//! The weights of the demo: for each context that was met, a logit for each answer. It learns as a language model does,
//! by the gradient of the log-probability of a token times its advantage, and is small enough to be read.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The pieces of text that are tokens. A piece's place is its id.
const PIECES: [&str; 19] = [
    "<user>", "<agent>", "<end>", "0", "1", "2", "3", "4", "5", "6", "7", "8", "yes", "no", "What is ", "Is ", " + ",
    " = ", "?",
];

/// What stands for a character that no piece has.
const UNKNOWN: i32 = PIECES.len() as i32;

/// The token that ends a message.
pub(super) const END: i32 = 2;

/// The tokens of the digits, of which an answer of the solver is one.
pub(super) const DIGITS: std::ops::Range<i32> = 3..12;

/// The tokens `yes` and `no`, of which an answer of the checker is one.
pub(super) const VERDICTS: std::ops::Range<i32> = 12..14;

/// Steps of this size reach a right answer after a few groups. The loss weights of a batch sum to one, so a token's share
/// of the gradient is small.
const LEARNING_RATE: f32 = 60.0;

/// The share of answers that do not depend on the weights.
const EXPLORED: f32 = 0.03;

/// The ids of `text`: the longest piece first.
pub(super) fn encode(mut text: &str) -> Vec<i32> {
    let mut ids = Vec::new();
    while let Some(first) = text.chars().next() {
        let fits = PIECES.iter().enumerate().filter(|(_, piece)| text.starts_with(**piece));
        let (id, bytes) = fits
            .max_by_key(|(_, piece)| piece.len())
            .map_or((UNKNOWN, first.len_utf8()), |(id, piece)| (id as i32, piece.len()));
        ids.push(id);
        text = &text[bytes..];
    }
    ids
}

/// The text of `ids`.
pub(super) fn decode(ids: &[i32]) -> String {
    ids.iter().map(|id| PIECES.get(*id as usize).copied().unwrap_or("?")).collect()
}

/// A `tokenizer.json` of Hugging Face with the same ids, so that the page can show tokens as text.
pub(super) fn tokenizer() -> Value {
    let vocabulary: serde_json::Map<String, Value> =
        PIECES.iter().chain(&["<unknown>"]).enumerate().map(|(id, piece)| ((*piece).to_owned(), json!(id))).collect();
    let special = [0, 1, 2].map(|id| json!({"id": id, "content": PIECES[id], "special": true}));
    json!({
        "version": "1.0",
        "added_tokens": special,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"},
    })
}

/// A policy: the logits of its answers in each context. A context that was never learned from has equal ones.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Table {
    /// The tokens of which an answer is one.
    answers: std::ops::Range<i32>,
    /// Ids before the answer, as text because JSON has no other keys, to logits.
    logits: HashMap<String, Vec<f32>>,
}

impl Table {
    /// Weights that have learned nothing: all answers are equally likely.
    pub(super) fn new(answers: std::ops::Range<i32>) -> Self {
        Self { answers, logits: HashMap::new() }
    }

    /// The probabilities of the answers behind `context`: softmax of the logits, and a small part that is equal for all.
    /// Without that part, every group would be right in the end, and there would be nothing to see any more.
    fn probabilities(&self, context: &[i32]) -> Vec<f32> {
        let equal = EXPLORED / self.answers.len() as f32;
        self.chosen(context).into_iter().map(|chosen| (1.0 - EXPLORED) * chosen + equal).collect()
    }

    /// Softmax of the logits.
    fn chosen(&self, context: &[i32]) -> Vec<f32> {
        let Some(logits) = self.logits.get(&decode(context)) else {
            return vec![1.0 / self.answers.len() as f32; self.answers.len()];
        };
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
        let sum: f32 = powers.iter().sum();
        powers.iter().map(|power| power / sum).collect()
    }

    /// An answer behind `context`, and its log-probability. `draw` is a random number in [0, 1).
    pub(super) fn sample(&self, context: &[i32], draw: f32) -> (i32, f32) {
        let probabilities = self.probabilities(context);
        let mut below = 0.0;
        let place = probabilities.iter().position(|probability| {
            below += probability;
            draw < below
        });
        // Rounding may leave the sum a little below the draw. No probability is zero.
        let place = place.unwrap_or(probabilities.len() - 1);
        (self.answers.start + place as i32, probabilities[place].ln())
    }

    /// Moves the logits behind `context` by the gradient of `weight * ln(probability of answer)`.
    pub(super) fn learn(&mut self, context: &[i32], answer: i32, weight: f32) {
        if !self.answers.contains(&answer) {
            return;
        }
        let (chosen, probabilities) = (self.chosen(context), self.probabilities(context));
        let place = (answer - self.answers.start) as usize;
        // The part of the probability that depends on the logits.
        let share = (1.0 - EXPLORED) * chosen[place] / probabilities[place];
        let logits = self.logits.entry(decode(context)).or_insert_with(|| vec![0.0; chosen.len()]);
        for (index, (logit, chosen)) in logits.iter_mut().zip(chosen).enumerate() {
            let is_answer = if index == place { 1.0 } else { 0.0 };
            *logit += LEARNING_RATE * weight * share * (is_answer - chosen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_its_tokens() {
        let text = "<user>What is 3 + 4?<end><agent>";
        assert_eq!(decode(&encode(text)), text);
        assert_eq!(encode("7"), [DIGITS.start + 7]);
        assert_eq!(encode("yes"), [VERDICTS.start]);
        assert_eq!(encode("x"), [UNKNOWN]);
    }

    #[test]
    fn a_rewarded_answer_becomes_likely_in_its_context_only() {
        let mut table = Table::new(DIGITS);
        let (context, other) = (encode("What is 3 + 4?"), encode("What is 1 + 1?"));
        for _ in 0..20 {
            table.learn(&context, DIGITS.start + 7, 0.05);
        }
        assert!(table.probabilities(&context)[7] > 0.9, "{:?}", table.probabilities(&context));
        assert!((table.probabilities(&other)[7] - 1.0 / 9.0).abs() < 1e-6);
        let (answer, logprob) = table.sample(&context, 0.5);
        assert_eq!(answer, DIGITS.start + 7);
        assert!((logprob - table.probabilities(&context)[7].ln()).abs() < 1e-6);
    }
}
