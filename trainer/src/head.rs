//! Log-probabilities and entropies of trained tokens, and their gradients, computed one chunk of logits at a
//! time.
//!
//! This is separate because the logits are the largest tensor of a step: autograd's log-softmax would hold `[N, V]`
//! three times. Here autograd records nothing. [`forward`] computes what an objective reads, the objective is
//! differentiated with respect to those `[N]` vectors, and [`HeadForward::backward`] continues from there with closed
//! formulas. With z = h W^T / T, p = softmax(z) and H the entropy of p:
//!
//! - `d logp / d z_j = onehot(target)_j - p_j`
//! - `d H / d z_j = -p_j (log p_j + H)`
//!
//! Logits are 32-bit floats for every compute kind of the model except 64-bit, for which they are 64-bit. The previous
//! stage is [`crate::microbatch`], the next [`crate::loss`].

use tch::{Device, Kind, Tensor, no_grad};

/// Elements of a block for each thread of a CPU. A block of 1 MiB stays in the cache between element-wise passes.
const BLOCK_ELEMENTS: i64 = 1 << 18;

/// The inputs of a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadInput<'a> {
    /// Hidden states at the predicting positions `[N, H]`.
    pub hidden: &'a Tensor,
    /// Output embedding `[V, H]`, of the same kind.
    pub weight: &'a Tensor,
    /// Ids to predict `[N]`, i64.
    pub targets: &'a Tensor,
    /// Divisor of the logits `[N]`, f32; `None` if all are 1.
    pub temperature: Option<&'a Tensor>,
}

/// Settings of the computation.
#[derive(Clone, Copy, Debug)]
pub struct HeadOptions {
    /// Maximum number of logits that exist at once; a single token may exceed it.
    pub logits_max: i64,
    /// What entropies are for.
    pub entropy: Entropy,
}

/// How the entropy over the vocabulary is used. Each variant costs one more pass over the logits than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entropy {
    /// The entropy is not computed.
    Unused,
    /// The entropy is a statistic: it is computed and has no gradient.
    Reported,
    /// The entropy is a term of the loss: [`HeadForward::backward`] takes its gradient.
    Trained,
}

/// Log-probabilities and entropies `[N]`, detached, with what their gradients need.
#[derive(Debug)]
pub struct HeadForward {
    /// Log-probability of each target, f32.
    pub logp: Tensor,
    /// Entropy of each distribution in nats, f32; `None` if it is unused.
    pub entropy: Option<Tensor>,
    head: Head,
    kept: Option<Tensor>,
}

impl Default for HeadOptions {
    /// At most 2^26 logits (256 MiB), without entropies.
    fn default() -> Self {
        Self { logits_max: 1 << 26, entropy: Entropy::Unused }
    }
}

/// Computes log-probabilities that are not differentiated: those of a frozen model, or those before the step.
pub fn log_probabilities(input: &HeadInput, logits_max: i64) -> Tensor {
    no_grad(|| Head::new(input, HeadOptions { logits_max, entropy: Entropy::Unused }).run(false).logp)
}

/// Computes log-probabilities, and entropies if requested, that [`HeadForward::backward`] can differentiate.
///
/// If all logits fit at once, their softmax is kept and the gradient costs two matrix products. Otherwise every chunk
/// is computed a second time.
#[must_use]
pub fn forward(input: &HeadInput, options: HeadOptions) -> HeadForward {
    no_grad(|| Head::new(input, options).run(true))
}

impl HeadForward {
    /// Computes gradients by the chain rule from `logp_gradient` = dL/dlogp and `entropy_gradient` = dL/dH, both `[N]`.
    ///
    /// Adds dL/dW to `weight_gradient` `[V, H]`, f32, and returns dL/dh `[N, H]`, f32. An entropy gradient is read only
    /// if the entropy was [`Entropy::Trained`].
    pub fn backward(
        self,
        logp_gradient: &Tensor,
        entropy_gradient: Option<&Tensor>,
        weight_gradient: &mut Tensor,
    ) -> Tensor {
        let Self { entropy, head, mut kept, .. } = self;
        no_grad(|| {
            let hidden_gradient = Tensor::zeros(head.hidden.size(), (head.kind, head.hidden.device()));
            for (start, length) in head.chunks() {
                let slice = |tensor: &Tensor| tensor.narrow(0, start, length).to_kind(head.kind);
                let upstream = Upstream {
                    logp: slice(logp_gradient),
                    entropy: entropy_gradient.map(slice).zip(entropy.as_ref().map(slice)),
                };
                let mut chunk = kept.take().unwrap_or_else(|| head.recompute(start, length));
                let coefficient = head.differentiate(&mut chunk, &upstream, start, length);
                let part = head.multiply(&chunk, &coefficient, start, length, weight_gradient);
                hidden_gradient.narrow(0, start, length).copy_(&part);
            }
            hidden_gradient
        })
    }
}

/// Returns a scalar whose `backward` sets `gradient` as the gradient of `value`, which has the same shape. This passes
/// closed-form gradients back to autograd; the value of the scalar has no meaning.
pub fn inject(value: &Tensor, gradient: &Tensor) -> Tensor {
    (value * gradient.detach().to_kind(value.kind())).sum(value.kind())
}

/// The operands, in the kinds in which they are multiplied.
#[derive(Debug)]
struct Head {
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Option<Tensor>,
    /// Kind of logits and gradients.
    kind: Kind,
    entropy: Entropy,
    /// Memory of one chunk of logits `[n, V]`, which is reused for every chunk.
    buffer: Tensor,
}

/// The results of one chunk of logits.
struct Reduced {
    logp: Tensor,
    entropy: Option<Tensor>,
    /// Softmax, or log-softmax if the entropy is trained, stored in the memory of the logits.
    kept: Tensor,
}

/// Gradients with respect to the results of one chunk.
struct Upstream {
    logp: Tensor,
    /// Gradient with respect to the entropy, and the entropy.
    entropy: Option<(Tensor, Tensor)>,
}

impl Head {
    fn new(input: &HeadInput, options: HeadOptions) -> Self {
        let kind = if input.hidden.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        // A GPU multiplies 16-bit operands into 32-bit results. On a CPU the operands are converted to 32 bits for
        // this.
        let operand = if input.hidden.device().is_cuda() { input.hidden.kind() } else { kind };
        let (tokens, vocabulary) = (input.hidden.size()[0], input.weight.size()[0]);
        let chunk_tokens = (options.logits_max / vocabulary).clamp(1, tokens.max(1));
        Self {
            hidden: input.hidden.detach().to_kind(operand),
            weight: input.weight.detach().to_kind(operand),
            targets: input.targets.unsqueeze(1),
            temperature: input.temperature.map(|temperature| temperature.to_kind(kind).unsqueeze(1)),
            kind,
            entropy: options.entropy,
            buffer: Tensor::empty([chunk_tokens, vocabulary], (kind, input.hidden.device())),
        }
    }

    fn run(self, differentiable: bool) -> HeadForward {
        let mut logp = Vec::new();
        let mut entropy = Vec::new();
        let mut kept = None;
        let tokens = self.hidden.size()[0];
        for (start, length) in self.chunks() {
            let keep = differentiable && length == tokens;
            let reduced = self.reduce(self.logits(start, length), start, keep);
            logp.push(reduced.logp);
            entropy.extend(reduced.entropy);
            kept = keep.then_some(reduced.kept);
        }
        let join = |parts: &[Tensor]| match parts {
            [] => Tensor::zeros([0], (self.kind, self.hidden.device())),
            parts => Tensor::cat(parts, 0),
        };
        let entropy = (self.entropy != Entropy::Unused).then(|| join(&entropy));
        HeadForward { logp: join(&logp), entropy, head: self, kept }
    }

    fn chunks(&self) -> Vec<(i64, i64)> {
        windows(self.hidden.size()[0], self.buffer.size()[0])
    }

    /// Logits divided by the temperature, `[n, V]`, of the tokens from `start` on.
    fn logits(&self, start: i64, length: i64) -> Tensor {
        let hidden = self.hidden.narrow(0, start, length);
        let temperature = self.temperature.as_ref().map(|temperature| temperature.narrow(0, start, length));
        if self.hidden.kind() == self.kind {
            // Dividing [n, H] is cheaper than dividing [n, V].
            let hidden = temperature.map_or(hidden.shallow_clone(), |temperature| hidden / temperature);
            return hidden.mm_out(&self.buffer.narrow(0, 0, length), &self.weight.tr());
        }
        let mut logits = hidden.mm_dtype_out(&self.buffer.narrow(0, 0, length), &self.weight.tr(), self.kind);
        if let Some(temperature) = temperature {
            let _ = logits.g_div_(&temperature);
        }
        logits
    }

    /// Turns logits `[n, V]` into log-softmax in place and computes the requested results. What the backward pass needs
    /// stays in place.
    fn reduce(&self, logits: Tensor, start: i64, keep: bool) -> Reduced {
        let targets = self.targets.narrow(0, start, logits.size()[0]);
        let mut logp = Vec::new();
        let mut entropy = Vec::new();
        for (first, tokens) in blocks(&logits) {
            let mut block = logits.narrow(0, first, tokens);
            let _ = block.log_softmax_int_out(&block, 1, None);
            logp.push(block.gather(1, &targets.narrow(0, first, tokens), false).squeeze_dim(1));
            if self.entropy != Entropy::Unused {
                let softmax = block.exp();
                entropy.push(-(&softmax * &block).sum_dim_intlist(1, false, None));
                if keep && self.entropy == Entropy::Reported {
                    block.copy_(&softmax);
                }
            } else if keep {
                let _ = block.exp_();
            }
        }
        let entropy = (self.entropy != Entropy::Unused).then(|| Tensor::cat(&entropy, 0));
        Reduced { logp: Tensor::cat(&logp, 0), entropy, kept: logits }
    }

    /// Recomputes what [`Head::reduce`] would have kept.
    fn recompute(&self, start: i64, length: i64) -> Tensor {
        let logits = self.logits(start, length);
        for (first, tokens) in blocks(&logits) {
            let block = logits.narrow(0, first, tokens);
            let _ = match self.entropy {
                Entropy::Trained => block.log_softmax_int_out(&block, 1, None),
                Entropy::Unused | Entropy::Reported => block.softmax_int_out(&block, 1, None),
            };
        }
        logits
    }

    /// Turns the kept softmax or log-softmax of a chunk into dL/dz in place, except for a factor per token `[n, 1]`,
    /// which is returned.
    fn differentiate(&self, kept: &mut Tensor, upstream: &Upstream, start: i64, length: i64) -> Tensor {
        let targets = self.targets.narrow(0, start, length);
        let over_temperature = |gradient: Tensor| match &self.temperature {
            Some(temperature) => gradient / temperature.narrow(0, start, length),
            None => gradient,
        };
        let logp = upstream.logp.unsqueeze(1);
        if self.entropy == Entropy::Trained {
            differentiate_entropy(kept, upstream, &targets);
            return over_temperature(-logp.ones_like());
        }
        // p - onehot. Its factor -dL/dlogp is applied to the [n, H] operands, which saves a pass over [n, V].
        let _ = kept.scatter_add_(1, &targets, &(-logp.ones_like()));
        over_temperature(-logp)
    }

    /// Returns dL/dh of one chunk and adds dL/dW to the accumulator; dL/dz is `coefficient * chunk`.
    fn multiply(
        &self,
        chunk: &Tensor,
        coefficient: &Tensor,
        start: i64,
        length: i64,
        weight_gradient: &mut Tensor,
    ) -> Tensor {
        let hidden = self.hidden.narrow(0, start, length) * coefficient;
        if self.hidden.kind() == self.kind {
            let _ = weight_gradient.addmm_(&chunk.tr(), &hidden);
            return chunk.mm(&self.weight) * coefficient;
        }
        let operand = self.hidden.kind();
        let chunk = chunk.to_kind(operand);
        let _ = weight_gradient.g_add_(&chunk.tr().mm_dtype(&hidden.to_kind(operand), self.kind));
        chunk.mm_dtype(&self.weight, self.kind) * coefficient
    }
}

/// From log p to p (g + e (log p + H)) - g onehot, with g = dL/dlogp and e = dL/dH.
fn differentiate_entropy(kept: &mut Tensor, upstream: &Upstream, targets: &Tensor) {
    let logp = upstream.logp.unsqueeze(1);
    for (first, tokens) in blocks(kept) {
        let mut block = kept.narrow(0, first, tokens);
        let softmax = block.exp();
        let direct = logp.narrow(0, first, tokens);
        match &upstream.entropy {
            Some((gradient, entropy)) => {
                let gradient = gradient.narrow(0, first, tokens).unsqueeze(1);
                let entropy = entropy.narrow(0, first, tokens).unsqueeze(1);
                let _ = block.g_mul_(&gradient).g_add_(&(direct + &gradient * entropy)).g_mul_(&softmax);
            }
            None => block.copy_(&(softmax * direct)),
        }
    }
    let _ = kept.scatter_add_(1, targets, &(-logp));
}

/// Number of rows of `logits` `[n, V]` that element-wise passes process together: all rows on a device without a cache
/// to fill.
fn blocks(logits: &Tensor) -> Vec<(i64, i64)> {
    let (tokens, vocabulary) = (logits.size()[0], logits.size()[1]);
    let on_cpu = logits.device() == Device::Cpu;
    let block = BLOCK_ELEMENTS * i64::from(tch::get_num_threads().max(1));
    windows(tokens, if on_cpu { block / vocabulary } else { tokens }.max(1))
}

/// `(start, length)` of consecutive windows over `0..total`.
fn windows(total: i64, length: i64) -> Vec<(i64, i64)> {
    (0..total).step_by(length as usize).map(|start| (start, length.min(total - start))).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const TOKENS: i64 = 7;
    const HIDDEN: i64 = 5;
    const VOCABULARY: i64 = 11;

    struct Case {
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Option<Tensor>,
        logp_gradient: Tensor,
        entropy_gradient: Tensor,
    }

    /// The gradients of autograd over all logits, for comparison.
    struct Expected {
        logp: Tensor,
        entropy: Tensor,
        hidden_gradient: Tensor,
        weight_gradient: Tensor,
    }

    impl Case {
        fn new(kind: Kind, tempered: bool) -> Self {
            Self {
                hidden: scattered(&[TOKENS, HIDDEN], 1.0).to_kind(kind),
                weight: scattered(&[VOCABULARY, HIDDEN], 2.0).to_kind(kind),
                targets: Tensor::from_slice(&[3_i64, 0, 10, 3, 7, 1, 9]),
                temperature: tempered.then(|| (scattered(&[TOKENS], 3.0) * 0.3 + 1.0).to_kind(Kind::Float)),
                logp_gradient: scattered(&[TOKENS], 4.0).to_kind(Kind::Float),
                entropy_gradient: scattered(&[TOKENS], 5.0).to_kind(Kind::Float),
            }
        }

        fn input(&self) -> HeadInput<'_> {
            let Self { hidden, weight, targets, temperature, .. } = self;
            HeadInput { hidden, weight, targets, temperature: temperature.as_ref() }
        }

        fn expected(&self, kind: Kind, with_entropy: bool) -> Expected {
            let hidden = self.hidden.to_kind(kind).detach().set_requires_grad(true);
            let weight = self.weight.to_kind(kind).detach().set_requires_grad(true);
            let logits = hidden.matmul(&weight.tr());
            let logits = match &self.temperature {
                Some(temperature) => logits / temperature.unsqueeze(1),
                None => logits,
            };
            let all = logits.log_softmax(1, kind);
            let logp = all.gather(1, &self.targets.unsqueeze(1), false).squeeze_dim(1);
            let entropy = -(all.exp() * &all).sum_dim_intlist(1, false, kind);
            let mut loss = (&logp * &self.logp_gradient).sum(kind);
            if with_entropy {
                loss += (&entropy * &self.entropy_gradient).sum(kind);
            }
            loss.backward();
            Expected {
                logp: logp.detach(),
                entropy: entropy.detach(),
                hidden_gradient: hidden.grad(),
                weight_gradient: weight.grad(),
            }
        }

        fn check(&self, kind: Kind, tolerance: f64) {
            for entropy in [Entropy::Unused, Entropy::Reported, Entropy::Trained] {
                let expected = self.expected(kind, entropy == Entropy::Trained);
                for chunk_tokens in 1..=TOKENS {
                    let options = HeadOptions { logits_max: chunk_tokens * VOCABULARY, entropy };
                    let found = forward(&self.input(), options);
                    assert_eq!(found.kept.is_some(), chunk_tokens == TOKENS);
                    close(&found.logp, &expected.logp, tolerance);
                    if let Some(entropy) = &found.entropy {
                        close(entropy, &expected.entropy, tolerance);
                    }
                    let mut weight_gradient = Tensor::zeros([VOCABULARY, HIDDEN], (kind, Device::Cpu));
                    let hidden_gradient =
                        found.backward(&self.logp_gradient, Some(&self.entropy_gradient), &mut weight_gradient);
                    close(&hidden_gradient, &expected.hidden_gradient, tolerance);
                    close(&weight_gradient, &expected.weight_gradient, tolerance);
                }
            }
        }
    }

    /// Numbers between -1.5 and 1.5 without a pattern, f64. They do not depend on what other tests draw at the same
    /// time.
    pub(crate) fn scattered(size: &[i64], phase: f64) -> Tensor {
        let count = size.iter().product::<i64>();
        let angles = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + phase;
        ((angles.sin() * 43_758.545_3).frac() * 1.5).view(size)
    }

    /// Checks that the largest difference is at most `tolerance` times the largest number.
    fn close(found: &Tensor, expected: &Tensor, tolerance: f64) {
        assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()));
        let difference = (found - expected).abs().max().double_value(&[]);
        let scale = expected.abs().max().double_value(&[]);
        assert!(difference <= tolerance * scale, "{difference} of {scale} apart");
    }

    #[test]
    fn every_chunk_size_agrees_with_autograd() {
        for tempered in [false, true] {
            Case::new(Kind::Double, tempered).check(Kind::Double, 1e-12);
            Case::new(Kind::Float, tempered).check(Kind::Float, 1e-6);
            Case::new(Kind::BFloat16, tempered).check(Kind::Float, 1e-6);
        }
    }

    #[test]
    fn blocks_within_a_chunk_agree_with_autograd() {
        // A block has room for two tokens, so five tokens take three blocks.
        let vocabulary = BLOCK_ELEMENTS * i64::from(tch::get_num_threads().max(1)) / 2;
        let mut case = Case {
            hidden: scattered(&[5, 2], 1.0),
            weight: scattered(&[vocabulary, 2], 2.0),
            targets: Tensor::from_slice(&[0, vocabulary - 1, 5, 5, vocabulary / 2]),
            temperature: None,
            logp_gradient: scattered(&[5], 3.0),
            entropy_gradient: scattered(&[5], 4.0),
        };
        let expected = case.expected(Kind::Double, true);
        let options = HeadOptions { entropy: Entropy::Trained, ..HeadOptions::default() };
        for (kind, tolerance) in [(Kind::Double, 1e-12_f64), (Kind::Float, 1e-4)] {
            case.hidden = case.hidden.to_kind(kind);
            case.weight = case.weight.to_kind(kind);
            // The error of 32-bit sums over a vocabulary depends on the order in which the machine's matrix product
            // adds. The error of autograd itself is therefore the measure.
            let plain = case.expected(kind, true);
            let double = |tensor: &Tensor| tensor.to_kind(Kind::Double);
            let near = |found: &Tensor, plain: &Tensor, expected: &Tensor| {
                let own = (double(plain) - expected).abs().max().double_value(&[]);
                let scale = expected.abs().max().double_value(&[]);
                close(&double(found), expected, tolerance.max(2.0 * own / scale));
            };
            let found = forward(&case.input(), options);
            near(&found.logp, &plain.logp, &expected.logp);
            near(found.entropy.as_ref().expect("it was asked for"), &plain.entropy, &expected.entropy);
            let mut weight_gradient = case.weight.zeros_like();
            let hidden_gradient =
                found.backward(&case.logp_gradient, Some(&case.entropy_gradient), &mut weight_gradient);
            near(&hidden_gradient, &plain.hidden_gradient, &expected.hidden_gradient);
            near(&weight_gradient, &plain.weight_gradient, &expected.weight_gradient);
        }
    }

    #[test]
    fn weight_gradients_add_up_over_calls() {
        let case = Case::new(Kind::Double, false);
        let mut once = Tensor::zeros([VOCABULARY, HIDDEN], (Kind::Double, Device::Cpu));
        let _ = forward(&case.input(), HeadOptions::default()).backward(&case.logp_gradient, None, &mut once);
        let mut twice = once.zeros_like();
        for _ in 0..2 {
            let _ = forward(&case.input(), HeadOptions::default()).backward(&case.logp_gradient, None, &mut twice);
        }
        close(&twice, &(once * 2.0), 1e-12);
    }

    #[test]
    fn log_probabilities_are_those_of_the_forward_pass() {
        let case = Case::new(Kind::Float, true);
        let expected = forward(&case.input(), HeadOptions::default()).logp;
        close(&log_probabilities(&case.input(), 3 * VOCABULARY), &expected, 1e-6);
    }

    #[test]
    fn an_injected_gradient_is_the_gradient() {
        let value = Tensor::from_slice(&[1.0_f32, 2.0]).set_requires_grad(true);
        let gradient = Tensor::from_slice(&[0.5_f32, -3.0]);
        inject(&value, &gradient).backward();
        assert!(value.grad().equal(&gradient));
    }
}
