//! The rows of a session, and the loop in which they generate.
//!
//! The running rows occupy the first rows of the cache. A row that ends is exchanged with the last running row, and
//! from then on costs only memory.

use std::collections::BTreeMap;

use tch::Tensor;

use super::sample::sample;
use super::{GenerateError, Sampling};
use crate::model::{Decoder, KvCache};
use crate::random::Random;

/// Number of tokens that go through the model at once, over all rows: enough to use a GPU fully, and a bound on the
/// memory for long prompts.
const FEED_TOKENS_MAX: usize = 16_384;

/// Why a row stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The row drew a stop token.
    Stop,
    /// The row drew the maximum number of tokens.
    Length,
}

/// The tokens that a row drew in one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The row.
    pub row: usize,
    /// The tokens drawn, including a stop token.
    pub tokens: Vec<i64>,
    /// Log-probability of each token, at the temperature and over the whole vocabulary.
    pub logprobs: Vec<f32>,
    /// Why the row stopped.
    pub finish: Finish,
}

/// Sequences that a decoder continues.
#[derive(Debug)]
pub struct Session<'decoder> {
    decoder: &'decoder Decoder,
    rows: Vec<Row>,
    cache: KvCache,
    /// The session's row that each row of the cache belongs to.
    slots: Vec<usize>,
}

#[derive(Debug)]
struct Row {
    tokens: Vec<i64>,
    /// Each row has its own random stream, so that its tokens do not depend on which other rows run.
    random: Random,
}

impl<'decoder> Session<'decoder> {
    /// Creates a session with one row for each prompt. Equal seeds, prompts and calls give equal tokens, provided that
    /// the decoder computes the same numbers.
    pub fn new(decoder: &'decoder Decoder, prompts: &[Vec<i64>], seed: u64) -> Result<Self, GenerateError> {
        for prompt in prompts {
            check_tokens(decoder, prompt)?;
        }
        let row = |(index, prompt): (usize, &Vec<i64>)| Row {
            tokens: prompt.clone(),
            random: Random::new(seed, index as u64),
        };
        Ok(Self {
            decoder,
            rows: prompts.iter().enumerate().map(row).collect(),
            cache: decoder.cache(prompts.len()),
            slots: (0..prompts.len()).collect(),
        })
    }

    /// All tokens of a row: its prompt, the tokens it drew and the tokens that were appended.
    #[must_use]
    pub fn tokens(&self, row: usize) -> &[i64] {
        &self.rows[row].tokens
    }

    /// Appends tokens that the model did not draw, such as a tool's answer.
    pub fn append(&mut self, row: usize, tokens: &[i64]) -> Result<(), GenerateError> {
        check_tokens(self.decoder, tokens)?;
        let row = self.rows.get_mut(row).ok_or(GenerateError::Row(row))?;
        row.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Lets `rows` generate until each of them stops. Returns the completions in the order of `rows`.
    pub fn generate(&mut self, rows: &[usize], sampling: &Sampling) -> Result<Vec<Completion>, GenerateError> {
        sampling.check()?;
        let mut completions = self.open(rows)?;
        let mut running = self.move_to_front(rows);
        while running > 0 {
            let hidden = self.feed(running, FEED_TOKENS_MAX);
            let uniforms: Vec<f64> = self.slots[..running].iter().map(|&row| self.rows[row].random.uniform()).collect();
            let (tokens, logprobs) = sample(&self.cache.logits(&hidden), sampling, &uniforms);
            // Iterates from the last row, so that an exchange moves no row that has not been visited yet.
            for slot in (0..running).rev() {
                let row = self.slots[slot];
                self.rows[row].tokens.push(tokens[slot]);
                let completion = completions.get_mut(&row).expect("every running row has a completion");
                if completion.push(tokens[slot], logprobs[slot], sampling) {
                    running -= 1;
                    self.swap(slot, running);
                }
            }
        }
        Ok(rows.iter().filter_map(|row| completions.remove(row)).collect())
    }

    /// Returns an empty completion for each row, if the rows can generate.
    fn open(&self, rows: &[usize]) -> Result<BTreeMap<usize, Completion>, GenerateError> {
        let mut completions = BTreeMap::new();
        for &row in rows {
            let tokens = &self.rows.get(row).ok_or(GenerateError::Row(row))?.tokens;
            if tokens.is_empty() {
                return Err(GenerateError::Empty(row));
            }
            let completion = Completion { row, tokens: Vec::new(), logprobs: Vec::new(), finish: Finish::Length };
            if completions.insert(row, completion).is_some() {
                return Err(GenerateError::Row(row));
            }
        }
        Ok(completions)
    }

    /// Moves `rows` to the first rows of the cache and returns their number.
    fn move_to_front(&mut self, rows: &[usize]) -> usize {
        for (slot, row) in rows.iter().enumerate() {
            let current = self.slots.iter().position(|at| at == row).expect("every row has a slot");
            self.swap(slot, current);
        }
        rows.len()
    }

    fn swap(&mut self, first: usize, second: usize) {
        self.slots.swap(first, second);
        self.cache.swap(first, second);
    }

    /// Runs the tokens of the first `running` rows that are not in the cache, at least the last token of each, in
    /// pieces of about `tokens_max` tokens over all rows. Returns the state of each row's last token, `[running, H]`.
    fn feed(&mut self, running: usize, tokens_max: usize) -> Tensor {
        let step = (tokens_max / running).max(1);
        let mut last: Vec<Option<Tensor>> = (0..running).map(|_| None).collect();
        loop {
            let pieces: Vec<&[i64]> = (0..running).map(|slot| self.lacking(slot, step)).collect();
            let counts: Vec<usize> = pieces.iter().map(|piece| piece.len()).collect();
            let length = counts.iter().copied().max().unwrap_or(0);
            if length == 0 {
                break;
            }
            let padded: Vec<i64> = pieces
                .iter()
                .flat_map(|piece| piece.iter().copied().chain(std::iter::repeat(0)).take(length))
                .collect();
            let tokens =
                Tensor::from_slice(&padded).reshape([running as i64, length as i64]).to_device(self.decoder.device());
            let hidden = self.decoder.extend(&tokens, &counts, &mut self.cache);
            for (slot, &count) in counts.iter().enumerate().filter(|&(_, &count)| count > 0) {
                last[slot] = Some(hidden.get(slot as i64).get(count as i64 - 1));
            }
        }
        let last: Vec<Tensor> = last.into_iter().flatten().collect();
        assert_eq!(last.len(), running, "every row lacks at least its last token");
        Tensor::stack(&last, 0)
    }

    /// The next tokens, at most `most`, of the row at `slot` that are not in the cache.
    fn lacking(&self, slot: usize, most: usize) -> &[i64] {
        let tokens = &self.rows[self.slots[slot]].tokens[self.cache.length(slot)..];
        &tokens[..tokens.len().min(most)]
    }
}

impl Completion {
    /// Adds a token. Returns whether it was the last one.
    fn push(&mut self, token: i64, logprob: f32, sampling: &Sampling) -> bool {
        self.tokens.push(token);
        self.logprobs.push(logprob);
        if sampling.stop_tokens.contains(&token) {
            self.finish = Finish::Stop;
            return true;
        }
        self.tokens.len() >= sampling.new_tokens_max
    }
}

fn check_tokens(decoder: &Decoder, tokens: &[i64]) -> Result<(), GenerateError> {
    let vocab_size = decoder.config().vocab_size;
    match tokens.iter().find(|token| !(0..vocab_size).contains(*token)) {
        None => Ok(()),
        Some(&token) => Err(GenerateError::Token { token, vocab_size }),
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::model::{ComputeKind, ModelConfig};

    #[test]
    fn prompts_fed_in_pieces_end_in_the_states_of_prompts_fed_at_once() {
        let config = r#"{
            "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 64, "initializer_range": 0.5
        }"#;
        let config = ModelConfig::parse(config).expect("valid");
        let decoder = Decoder::random(config, Device::Cpu, ComputeKind::Float32, 1);
        let prompts = [(0..23).collect(), vec![5], (7..19).collect()];
        let states = |tokens_max| {
            let mut session = Session::new(&decoder, &prompts, 0).expect("valid");
            session.feed(3, tokens_max)
        };
        let whole = states(FEED_TOKENS_MAX);
        for tokens_max in [1, 12, 36] {
            let difference = (states(tokens_max) - &whole).abs().max().double_value(&[]);
            assert!(difference < 1e-5, "{difference:e} in pieces of {tokens_max}");
        }
    }
}
