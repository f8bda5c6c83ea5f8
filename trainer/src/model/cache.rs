//! Decoding step by step: keys and values of the tokens so far.
//!
//! Rows advance on their own: each has its length, and a token is placed and masked by
//! the length of its row. What lies beyond a row's length is never seen, and is
//! overwritten when the row grows.

use tch::{Device, Kind, Tensor};

use super::Decoder;
use super::layers::{Stack, attend_causally, repeat_heads};

/// Capacity grows in steps of this many tokens, so that most steps copy nothing.
const CAPACITY_STEP: i64 = 32;

/// Keys and values of some sequences, with the weights they were computed by.
///
/// In bfloat16 it holds a copy of the weights in that kind, so that a step does not
/// round every parameter again. Either way it belongs to the parameters as they were
/// when it was made: after a step of an optimizer, make a new one.
#[derive(Debug)]
pub struct KvCache {
    stack: Stack,
    /// Of each layer, `[rows, capacity, kv_heads, head_dim]`.
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    lengths: Vec<usize>,
    capacity: i64,
}

impl KvCache {
    /// How many sequences it holds.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.lengths.len()
    }

    /// How many tokens of a row it holds.
    #[must_use]
    pub fn length(&self, row: usize) -> usize {
        self.lengths[row]
    }

    /// Logits by the weights of the cache: `[.., H]` to `[.., V]` float32.
    pub fn logits(&self, hidden: &Tensor) -> Tensor {
        tch::no_grad(|| self.stack.apply_head(hidden))
    }

    /// Exchanges two rows. [`Decoder::extend`] runs the first rows only, so this takes a
    /// finished row out of the way at the price of copying two.
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
        // At least half more than before: all copies together stay linear in the length.
        let wanted = length.max(self.capacity * 3 / 2);
        let capacity = (wanted + CAPACITY_STEP - 1) / CAPACITY_STEP * CAPACITY_STEP;
        for tensor in self.keys.iter_mut().chain(&mut self.values) {
            let mut size = tensor.size();
            size[1] = capacity - self.capacity;
            // Zeros and not whatever is there: a masked NaN would still spread.
            let more = Tensor::zeros(size, (tensor.kind(), tensor.device()));
            *tensor = Tensor::cat(&[&*tensor, &more], 1);
        }
        self.capacity = capacity;
    }
}

/// Where the new tokens of one call go and what they see.
struct Step {
    /// `[rows, 1]` i64.
    rows: Tensor,
    /// `[rows, S]` i64.
    positions: Tensor,
    /// Keys up to here are looked at.
    reach: i64,
    sight: Sight,
}

enum Sight {
    /// All rows are empty: the new tokens see each other, causally.
    New,
    /// All rows have the same length and get one token: it sees everything.
    All,
    /// `[rows, 1, S, reach]` bool, true where a token sees a key.
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

    /// Stores the new keys and values of a layer and attends.
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
fn attend_cached(query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Tensor {
    let attention = |query: &Tensor, key: &Tensor, value: &Tensor| {
        Tensor::scaled_dot_product_attention(query, key, value, mask, 0.0, false, None, false)
    };
    if query.size()[2] > 1 {
        return attention(query, &repeat_heads(key, query), &repeat_heads(value, query));
    }
    // One token per row: the queries that share a head of keys stand in for a sequence,
    // which spares repeating the whole cache.
    let grouped = query.reshape([query.size()[0], key.size()[1], -1, query.size()[3]]);
    attention(&grouped, key, value).reshape(query.size())
}

impl Decoder {
    /// An empty cache for `rows` sequences.
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
    /// The first call takes the prompts, later ones a token per row or a further piece.
    /// A piece of S tokens on rows of L takes B S (L + S) bytes for its mask.
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
