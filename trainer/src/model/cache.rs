//! Decoding step by step, with a cache of the keys and values of earlier tokens.
//!
//! Rows advance independently: each has its own length, which determines the position and the mask of its next token.
//! Entries beyond a row's length are never read, and are overwritten when the row grows.

use tch::{Device, Kind, Tensor};

use super::Decoder;
use super::layers::{Stack, attend_causally, repeat_heads};

/// Capacity grows in steps of this many tokens, so that most steps copy nothing.
pub(super) const CAPACITY_STEP: i64 = 32;

/// Keys and values of some sequences, with the weights that computed them.
///
/// In bfloat16 the cache holds a copy of the weights in that kind, so that the parameters are not rounded again in each
/// step. In every kind the cache belongs to the parameters as they were when it was created: create a new one after an
/// optimizer step.
#[derive(Debug)]
pub struct KvCache {
    stack: Stack,
    /// Per layer: `[rows, capacity, kv_heads, head_dim]`.
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    lengths: Vec<usize>,
    capacity: i64,
}

impl KvCache {
    /// Number of sequences.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.lengths.len()
    }

    /// Number of tokens of a row.
    #[must_use]
    pub fn length(&self, row: usize) -> usize {
        self.lengths[row]
    }

    /// Computes logits with the weights of the cache: `[.., H]` to `[.., V]` float32.
    pub fn logits(&self, hidden: &Tensor) -> Tensor {
        tch::no_grad(|| self.stack.apply_head(hidden))
    }

    /// Exchanges two rows. [`Decoder::extend`] runs only the first rows, so this moves a finished row out of the way,
    /// at the cost of copying two rows.
    pub fn swap(&mut self, first: usize, second: usize) {
        if first == second {
            return;
        }
        let _guard = tch::no_grad_guard();
        self.lengths.swap(first, second);
        for tensor in self.keys.iter().chain(&self.values) {
            let (mut first, mut second) = (tensor.get(first as i64), tensor.get(second as i64));
            let saved = first.copy();
            first.copy_(&second);
            second.copy_(&saved);
        }
    }

    /// Makes room for `length` tokens in every row.
    fn reserve(&mut self, length: i64) {
        if length <= self.capacity {
            return;
        }
        // The capacity grows by at least half, so that the total cost of copying stays linear in the length.
        let wanted = length.max(self.capacity * 3 / 2);
        let capacity = (wanted + CAPACITY_STEP - 1) / CAPACITY_STEP * CAPACITY_STEP;
        for tensor in self.keys.iter_mut().chain(&mut self.values) {
            let mut size = tensor.size();
            size[1] = capacity - self.capacity;
            // The new space is filled with zeros, because uninitialised memory may contain NaN, which spreads even when
            // masked.
            let more = Tensor::zeros(size, (tensor.kind(), tensor.device()));
            *tensor = Tensor::cat(&[&*tensor, &more], 1);
        }
        self.capacity = capacity;
    }
}

/// The positions of the new tokens of one call, and the tokens that they attend to.
struct Step {
    /// `[rows, 1]` i64.
    rows: Tensor,
    /// `[rows, S]` i64.
    positions: Tensor,
    /// Number of keys that are read.
    reach: i64,
    sight: Sight,
}

enum Sight {
    /// All rows are empty: the new tokens attend to each other causally.
    New,
    /// All rows have the same length and get one token, which attends to everything.
    All,
    /// `[rows, 1, S, reach]` bool, true where a token attends to a key.
    Masked(Tensor),
}

impl Step {
    fn new(lengths: &[usize], tokens: i64, device: Device) -> Self {
        let starts: Vec<i64> = lengths.iter().map(|&length| length as i64).collect();
        let longest = starts.iter().copied().max().unwrap_or(0);
        let shortest = starts.iter().copied().min().unwrap_or(0);
        let reach = longest + tokens;
        let indices = |length| Tensor::arange(length, (Kind::Int64, device));
        let positions = Tensor::from_slice(&starts).to_device(device).unsqueeze(1) + indices(tokens);
        let sight = if longest == 0 {
            Sight::New
        } else if longest == shortest && tokens == 1 {
            Sight::All
        } else {
            Sight::Masked(indices(reach).le_tensor(&positions.unsqueeze(-1)).unsqueeze(1))
        };
        Self { rows: indices(starts.len() as i64).unsqueeze(1), positions, reach, sight }
    }

    /// Stores the new keys and values of a layer and computes attention.
    fn attend(&self, keys: &mut Tensor, values: &mut Tensor, query: &Tensor, key: &Tensor, value: &Tensor) -> Tensor {
        let places = [Some(&self.rows), Some(&self.positions)];
        let _ = keys.index_put_(&places, &key.transpose(1, 2), false);
        let _ = values.index_put_(&places, &value.transpose(1, 2), false);
        let mask = match &self.sight {
            Sight::New => return attend_causally(query, key, value),
            Sight::All => None,
            Sight::Masked(mask) => Some(mask),
        };
        let seen = |cached: &Tensor| cached.narrow(0, 0, query.size()[0]).narrow(1, 0, self.reach).transpose(1, 2);
        attend_cached(query, &seen(keys), &seen(values), mask)
    }
}

/// Queries `[B, heads, S, D]` over keys and values `[B, kv_heads, L, D]`.
pub(super) fn attend_cached(query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Tensor {
    let attention = |query: &Tensor, key: &Tensor, value: &Tensor| {
        Tensor::scaled_dot_product_attention(query, key, value, mask, 0.0, false, None, false)
    };
    if query.size()[2] > 1 {
        return attention(query, &repeat_heads(key, query), &repeat_heads(value, query));
    }
    // There is one token per row, so the queries that share a key head are laid out as a sequence. This avoids
    // repeating the whole cache.
    let grouped = query.reshape([query.size()[0], key.size()[1], -1, query.size()[3]]);
    attention(&grouped, key, value).reshape(query.size())
}

impl Decoder {
    /// Creates an empty cache for `rows` sequences.
    #[must_use]
    pub fn cache(&self, rows: usize) -> KvCache {
        let _guard = tch::no_grad_guard();
        let config = self.config();
        let size = [rows as i64, 0, config.num_key_value_heads, config.head_dim];
        let empty = || -> Vec<Tensor> {
            let options = (self.compute(), self.device());
            (0..config.num_hidden_layers).map(|_| Tensor::zeros(size, options)).collect()
        };
        KvCache {
            stack: self.stack.cast(self.compute()),
            keys: empty(),
            values: empty(),
            lengths: vec![0; rows],
            capacity: 0,
        }
    }

    /// Continues the first B rows of `cache` by `tokens` (`[B, S]` i64 on the model's
    /// device), of which row b has `counts[b]` and is padded on the right with any valid
    /// token. Returns the states after the final norm, `[B, S, H]`, outside any graph;
    /// those of padding mean nothing.
    ///
    /// The first call passes the prompts, later calls one token per row or another piece. The mask of a piece of S
    /// tokens on rows of length L takes B S (L + S) bytes.
    pub fn extend(&self, tokens: &Tensor, counts: &[usize], cache: &mut KvCache) -> Tensor {
        let _guard = tch::no_grad_guard();
        let (rows, length) = tokens.size2().expect("tokens are [rows, length]");
        let rows = rows as usize;
        assert!(rows == counts.len() && rows <= cache.rows(), "a count for each row, and a row for each count");
        assert!(counts.iter().all(|&count| count as i64 <= length), "a row has at most the tokens given");

        let step = Step::new(&cache.lengths[..rows], length, self.device());
        cache.reserve(step.reach);
        let rotation = self.rotation(&step.positions);
        let mut state = cache.stack.embed(tokens, self.compute());
        let layers = cache.stack.layers.iter().zip(cache.keys.iter_mut().zip(&mut cache.values));
        for (layer, (keys, values)) in layers {
            state = layer.forward(&state, &rotation, |query, key, value| step.attend(keys, values, query, key, value));
        }
        for (length, count) in cache.lengths.iter_mut().zip(counts) {
            *length += count;
        }
        cache.stack.norm.forward(&state)
    }
}
