//! Decoding of many sequences at once, each with a cache of its own.
//!
//! [`Decoder::extend`] runs rows of one tensor, which suits rows that begin together. A server has sequences that begin
//! and end at any time and differ in length. Here the tokens of all sequences are laid end to end: projections, norms
//! and the head run on all of them in one product, and attention runs for one sequence after the other. So nothing is
//! padded, a long sequence costs no memory in the caches of others, and a prompt is read in the same pass in which other
//! sequences get their next token.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::cache::{CAPACITY_STEP, attend_cached};
use super::layers::{Stack, attend_causally};
use super::rope::Rope;
use super::{ComputeKind, Decoder, LoadError, ModelConfig};
use crate::head::{HeadInput, log_probabilities};

/// Maximum number of logits that exist at once while a prompt is scored (128 MiB).
const SCORED_LOGITS_MAX: i64 = 1 << 25;

/// The weights of a policy for sampling only. They have the kind that layers compute in, and no gradients.
#[derive(Debug)]
pub struct InferenceModel {
    config: ModelConfig,
    stack: Stack,
    rope: Rope,
    compute: Kind,
    device: Device,
}

/// Keys and values of one sequence. They belong to the weights that computed them.
#[derive(Debug)]
pub struct SequenceCache {
    /// Per layer: `[1, kv_heads, capacity, head_dim]`.
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    length: usize,
    capacity: usize,
}

/// The next tokens of a sequence, and the cache that receives their keys and values.
#[derive(Debug)]
pub struct Piece<'a> {
    /// The tokens; at least one.
    pub tokens: &'a [i64],
    /// The cache, which has room for the tokens.
    pub cache: &'a mut SequenceCache,
}

impl Decoder {
    /// Keeps only what sampling needs. In bfloat16 the float32 parameters are freed.
    #[must_use]
    pub fn into_inference(self) -> InferenceModel {
        InferenceModel {
            stack: self.stack.cast(self.compute()),
            config: self.config().clone(),
            compute: self.compute(),
            device: self.device(),
            rope: self.into_rope(),
        }
    }
}

impl InferenceModel {
    /// Loads the checkpoint in `folder`.
    pub fn load(folder: &Path, device: Device, compute: ComputeKind) -> Result<Self, LoadError> {
        Ok(Decoder::load(folder, device, compute)?.into_inference())
    }

    /// The hyperparameters.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of the keys and values of one token.
    #[must_use]
    pub fn cache_bytes_per_token(&self) -> usize {
        let numbers = 2 * self.config.num_hidden_layers as i64 * self.config.num_key_value_heads * self.config.head_dim;
        numbers as usize * self.compute.elt_size_in_bytes()
    }

    /// Creates an empty cache.
    #[must_use]
    pub fn cache(&self) -> SequenceCache {
        let size = [1, self.config.num_key_value_heads, 0, self.config.head_dim];
        let empty = || -> Vec<Tensor> {
            (0..self.config.num_hidden_layers).map(|_| Tensor::zeros(size, (self.compute, self.device))).collect()
        };
        SequenceCache { keys: empty(), values: empty(), length: 0, capacity: 0 }
    }

    /// Continues every sequence by its tokens. Returns the states after the final norm of all tokens, `[T, H]`, in the
    /// order of the pieces.
    pub fn advance(&self, pieces: &mut [Piece<'_>]) -> Tensor {
        let _guard = tch::no_grad_guard();
        let tokens: Vec<i64> = pieces.iter().flat_map(|piece| piece.tokens.iter().copied()).collect();
        let positions: Vec<i64> = pieces
            .iter()
            .flat_map(|piece| piece.cache.length as i64..(piece.cache.length + piece.tokens.len()) as i64)
            .collect();
        let row = |numbers: &[i64]| Tensor::from_slice(numbers).to_device(self.device).unsqueeze(0);
        let rotation = self.rope.rotation(&row(&positions), self.compute);
        let masks: Vec<Option<Tensor>> = pieces.iter().map(|piece| self.mask(piece)).collect();
        let mut state = self.stack.embed(&row(&tokens), self.compute);
        for (index, layer) in self.stack.layers.iter().enumerate() {
            state = layer.forward(&state, &rotation, |query, key, value| {
                let mut start = 0;
                let attended: Vec<Tensor> = pieces
                    .iter_mut()
                    .zip(&masks)
                    .map(|(piece, mask)| {
                        let length = piece.tokens.len() as i64;
                        let part = |tensor: &Tensor| tensor.narrow(2, start, length);
                        let attended = piece.cache.attend(index, &part(query), &part(key), &part(value), mask.as_ref());
                        start += length;
                        attended
                    })
                    .collect();
                Tensor::cat(&attended, 2)
            });
        }
        for piece in pieces {
            piece.cache.length += piece.tokens.len();
        }
        self.stack.norm.forward(&state).squeeze_dim(0)
    }

    /// Computes logits: `[.., H]` to `[.., V]` float32.
    pub fn logits(&self, hidden: &Tensor) -> Tensor {
        tch::no_grad(|| self.stack.apply_head(hidden))
    }

    /// Log-probabilities at `temperature` of `targets`, one for each of the states `hidden` (`[N, H]`).
    #[must_use]
    pub fn score(&self, hidden: &Tensor, targets: &[i64], temperature: f64) -> Vec<f32> {
        let targets = Tensor::from_slice(targets).to_device(self.device);
        let temperature = Tensor::full(targets.size(), temperature, (Kind::Float, self.device));
        let weight = self.stack.head.to_kind(hidden.kind());
        let input = HeadInput { hidden, weight: &weight, targets: &targets, temperature: Some(&temperature) };
        let scores = log_probabilities(&input, SCORED_LOGITS_MAX);
        Vec::try_from(scores).expect("log-probabilities are one vector of 32-bit floats")
    }

    /// `[1, 1, S, L + S]` bool, true where a token attends to a key. `None` if a piece needs no mask: it is the beginning
    /// of a sequence, or a single token, which attends to everything.
    fn mask(&self, piece: &Piece<'_>) -> Option<Tensor> {
        let (start, length) = (piece.cache.length as i64, piece.tokens.len() as i64);
        if start == 0 || length == 1 {
            return None;
        }
        let indices = |from, to| Tensor::arange_start(from, to, (Kind::Int64, self.device));
        let mask = indices(0, start + length).unsqueeze(0).le_tensor(&indices(start, start + length).unsqueeze(1));
        Some(mask.unsqueeze(0).unsqueeze(0))
    }
}

impl SequenceCache {
    /// Number of tokens in the cache.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Number of tokens that memory is allocated for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The capacity that the cache would have after [`SequenceCache::reserve`].
    #[must_use]
    pub fn capacity_for(&self, length: usize, most: usize) -> usize {
        if length <= self.capacity {
            return self.capacity;
        }
        // The capacity grows by at least half, so that the total cost of copying stays linear in the length.
        let wanted = length.max(self.capacity * 3 / 2);
        wanted.next_multiple_of(CAPACITY_STEP as usize).min(most.max(length))
    }

    /// Makes room for `length` tokens. `most` is the length that the sequence may reach; no memory is taken beyond it.
    pub fn reserve(&mut self, length: usize, most: usize) {
        let capacity = self.capacity_for(length, most);
        if capacity == self.capacity {
            return;
        }
        let _guard = tch::no_grad_guard();
        for tensor in self.keys.iter_mut().chain(&mut self.values) {
            let mut size = tensor.size();
            size[2] = capacity as i64;
            // Attention reads only what was written, so the new space needs no value.
            let grown = Tensor::empty(size, (tensor.kind(), tensor.device()));
            let kept = self.length as i64;
            grown.narrow(2, 0, kept).copy_(&tensor.narrow(2, 0, kept));
            *tensor = grown;
        }
        self.capacity = capacity;
    }

    /// Stores the keys and values of a piece in a layer, and computes attention: queries `[1, heads, S, D]`, keys and
    /// values `[1, kv_heads, S, D]`.
    fn attend(&mut self, layer: usize, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let (start, length) = (self.length as i64, query.size()[2]);
        let (keys, values) = (&self.keys[layer], &self.values[layer]);
        keys.narrow(2, start, length).copy_(key);
        values.narrow(2, start, length).copy_(value);
        if start == 0 {
            return attend_causally(query, key, value);
        }
        let reach = start + length;
        attend_cached(query, &keys.narrow(2, 0, reach), &values.narrow(2, 0, reach), mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder(kind: ComputeKind) -> Decoder {
        let config = r#"{
            "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 256, "initializer_range": 0.5
        }"#;
        Decoder::random(ModelConfig::parse(config).expect("valid"), Device::Cpu, kind, 1)
    }

    /// Log-probabilities of the whole vocabulary after every token, from one forward pass.
    fn whole(decoder: &Decoder, tokens: &[i64]) -> Tensor {
        let hidden = tch::no_grad(|| decoder.hidden(&Tensor::from_slice(tokens).unsqueeze(0)));
        tch::no_grad(|| decoder.logits(&hidden)).squeeze_dim(0).log_softmax(-1, Kind::Float)
    }

    #[test]
    fn sequences_of_any_length_run_together_as_each_runs_alone() {
        let decoder = decoder(ComputeKind::Float32);
        let sequences: Vec<Vec<i64>> = vec![(0..40).collect(), vec![5, 9, 3, 7], (7..60).collect()];
        let expected: Vec<Tensor> = sequences.iter().map(|tokens| whole(&decoder, tokens)).collect();
        let model = decoder.into_inference();
        let mut caches: Vec<SequenceCache> = sequences.iter().map(|_| model.cache()).collect();
        // Pieces of different sizes, some of one token, and sequences that end earlier than others.
        for round in 0.. {
            let mut pieces = Vec::new();
            let mut rows = Vec::new();
            for (index, (tokens, cache)) in sequences.iter().zip(&mut caches).enumerate() {
                let start = cache.length();
                let count = ([1, 7, 16][(round + index) % 3]).min(tokens.len() - start);
                if count > 0 {
                    cache.reserve(start + count, tokens.len());
                    rows.extend((start..start + count).map(|at| (index, at)));
                    pieces.push(Piece { tokens: &tokens[start..start + count], cache });
                }
            }
            if pieces.is_empty() {
                break;
            }
            let logits = model.logits(&model.advance(&mut pieces)).log_softmax(-1, Kind::Float);
            for (row, (index, at)) in rows.into_iter().enumerate() {
                let difference = (logits.get(row as i64) - expected[index].get(at as i64)).abs().max();
                assert!(difference.double_value(&[]) < 1e-5, "sequence {index} differs at {at}: {difference:?}");
            }
        }
        for (tokens, cache) in sequences.iter().zip(&caches) {
            assert_eq!((cache.length(), cache.capacity()), (tokens.len(), tokens.len()));
        }
    }

    #[test]
    fn scores_are_log_probabilities_at_the_temperature() {
        let decoder = decoder(ComputeKind::Float32);
        let tokens: Vec<i64> = (3..20).collect();
        let hidden = tch::no_grad(|| decoder.hidden(&Tensor::from_slice(&tokens).unsqueeze(0))).squeeze_dim(0);
        let expected = (tch::no_grad(|| decoder.logits(&hidden)) / 0.7).log_softmax(-1, Kind::Float);
        let found = decoder.into_inference().score(&hidden.narrow(0, 0, 16), &tokens[1..], 0.7);
        for (at, score) in found.iter().enumerate() {
            let expected = expected.double_value(&[at as i64, tokens[at + 1]]);
            assert!((expected - f64::from(*score)).abs() < 1e-5, "{expected} and {score} at {at}");
        }
    }

    #[test]
    fn capacity_grows_in_proportion_and_never_beyond_what_the_sequence_may_need() {
        let model = decoder(ComputeKind::Bfloat16).into_inference();
        // Two layers, keys and values, two heads of eight numbers of two bytes.
        assert_eq!(model.cache_bytes_per_token(), 128);
        let mut cache = model.cache();
        cache.reserve(3, 1_000);
        assert_eq!(cache.capacity(), CAPACITY_STEP as usize);
        cache.reserve(900, 1_000);
        assert_eq!(cache.capacity(), 928);
        cache.reserve(950, 1_000);
        assert_eq!(cache.capacity(), 1_000);
        assert_eq!(model.cache().capacity_for(20, 25), 25);
    }
}
