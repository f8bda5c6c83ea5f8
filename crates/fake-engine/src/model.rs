//! The model of the fake engine: a distribution that depends on every id before.

use forebay_gateway::hash::{fnv1a, mix};

use crate::tokenizer::{IM_END, VOCABULARY, decode};

/// The mean of the logits, which are distributed exponentially. So the two best of a context usually differ by about as
/// much, as those of real models do.
const LOGIT_MEAN: f64 = 2.0;

/// The log-probability of `token` behind exactly these ids: log-softmax of the logits divided by the temperature.
#[must_use]
pub fn logprob(context: &[i32], token: i32, temperature: f64) -> f32 {
    Context::new(context).logprob(token, temperature)
}

/// A context that grows, so that the ids before need not be hashed again for each token.
#[derive(Clone, Copy, Debug)]
pub struct Context(u64);

impl Context {
    /// The context of these ids.
    #[must_use]
    pub fn new(ids: &[i32]) -> Self {
        ids.iter().fold(Self(fnv1a([])), |context, &id| context.with(id))
    }

    /// The context with one more id.
    #[must_use]
    pub fn with(self, id: i32) -> Self {
        Self(mix(self.0 ^ (id as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// The log-probability of the next id.
    #[must_use]
    pub fn logprob(self, token: i32, temperature: f64) -> f32 {
        let sum: f64 = (0..VOCABULARY).map(|other| (self.logit(other) / temperature).exp()).sum();
        (self.logit(token) / temperature - sum.ln()) as f32
    }

    /// The most likely ids, the best first.
    pub(super) fn best(self, count: usize) -> Vec<i32> {
        let mut ids: Vec<i32> = (0..VOCABULARY).collect();
        ids.sort_by(|&a, &b| self.logit(b).total_cmp(&self.logit(a)));
        ids.truncate(count);
        ids
    }

    fn logit(self, token: i32) -> f64 {
        -LOGIT_MEAN * fraction(mix(self.0.wrapping_add(u64::from(token.unsigned_abs()) << 32))).ln()
    }
}

/// Samples an answer by a seed: some printable ids and then the end of the message.
pub(super) fn sample(prompt: &[i32], seed: u64, temperature: f64) -> Vec<i32> {
    let mut context = Context::new(prompt);
    let length = 3 + mix(context.0 ^ seed) % 12;
    let printable: Vec<i32> = (0..VOCABULARY).filter(|&id| is_printable(id)).collect();
    let mut ids = Vec::new();
    for _ in 0..length {
        // The largest sum of a logit and a Gumbel number is a sample of the softmax.
        let score = |id: i32| {
            let uniform = fraction(mix(context.0 ^ mix(seed ^ (id as u64))));
            context.logit(id) / temperature - (-uniform.ln()).ln()
        };
        let best = printable.iter().copied().max_by(|&a, &b| score(a).total_cmp(&score(b)));
        let id = best.expect("the vocabulary has printable ids");
        ids.push(id);
        context = context.with(id);
    }
    ids.push(IM_END);
    ids
}

fn is_printable(id: i32) -> bool {
    let text = decode(&[id]);
    !text.is_empty() && !text.starts_with('<') && text.chars().all(|c| matches!(c, ' '..='~'))
}

/// A number above zero and below one.
fn fraction(bits: u64) -> f64 {
    ((bits >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
}
