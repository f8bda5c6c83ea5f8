//! Draws one token per row, by inverting the cumulative distribution.
//!
//! One uniform number determines one token. The same number gives the same token on every device, up to rounding, which
//! libtorch's own sampling does not guarantee.

use tch::{Kind, Tensor};

use super::Sampling;

/// Draws a token for each row of `logits` (`[B, V]` float32) by `uniforms`, one in
/// [0, 1) per row. Returns the tokens and their log-probabilities at the temperature
/// over the whole vocabulary, whatever `top_k` and `top_p` exclude.
pub(crate) fn sample(logits: &Tensor, sampling: &Sampling, uniforms: &[f64]) -> (Vec<i64>, Vec<f32>) {
    let _guard = tch::no_grad_guard();
    let logprobs = (logits / sampling.temperature).log_softmax(-1, Kind::Float);
    let uniforms = Tensor::from_slice(uniforms).to_device(logits.device()).unsqueeze(-1);
    let tokens = if sampling.top_k.is_none() && sampling.top_p.is_none() {
        invert(&logprobs.to_kind(Kind::Double).exp(), &uniforms)
    } else {
        let vocabulary = logprobs.size()[1];
        let candidates = sampling.top_k.map_or(vocabulary, |top_k| vocabulary.min(top_k as i64));
        let (likeliest, ids) = logprobs.topk(candidates, -1, true, true);
        let mut probabilities = likeliest.to_kind(Kind::Double).exp();
        if let Some(top_p) = sampling.top_p {
            probabilities = nucleus(&probabilities, top_p);
        }
        ids.gather(-1, &invert(&probabilities, &uniforms), false)
    };
    let chosen = logprobs.gather(-1, &tokens, false);
    (to_vec(&tokens), to_vec(&chosen))
}

/// Returns the first position where the cumulative sum of `weights` (`[B, n]` float64) exceeds the share `uniforms`
/// (`[B, 1]`) of their total. `[B, 1]` i64.
fn invert(weights: &Tensor, uniforms: &Tensor) -> Tensor {
    let cumulative = weights.cumsum(-1, Kind::Double);
    let total = cumulative.narrow(-1, -1, 1);
    // At a position of weight 0 the cumulative sum is the same as at the position before, so it is never chosen.
    (total * uniforms).searchsorted(&cumulative, false, true, "right", None::<&Tensor>)
}

/// Sets the weights (`[B, n]`, descending) to 0 after those whose sum reaches `top_p` of the total.
fn nucleus(weights: &Tensor, top_p: f64) -> Tensor {
    let cumulative = weights.cumsum(-1, Kind::Double);
    let before = &cumulative - weights;
    let bound = cumulative.narrow(-1, -1, 1) * top_p;
    weights.masked_fill(&before.ge_tensor(&bound), 0.0)
}

fn to_vec<T>(column: &Tensor) -> Vec<T>
where
    Vec<T>: TryFrom<Tensor, Error = tch::TchError>,
{
    Vec::try_from(column.flatten(0, -1)).expect("the kind is what its maker gives")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples one row of these probabilities with each of `uniforms`.
    fn draws(sampling: &Sampling, uniforms: &[f64]) -> Vec<i64> {
        let probabilities: [f32; 4] = [0.1, 0.5, 0.0, 0.4];
        let logits = Tensor::from_slice(&probabilities).log().repeat([uniforms.len() as i64, 1]);
        sample(&logits, sampling, uniforms).0
    }

    #[test]
    fn a_draw_inverts_the_cumulative_distribution() {
        let drawn = draws(&Sampling::default(), &[0.0, 0.099, 0.101, 0.599, 0.601, 1.0 - 2f64.powi(-32)]);
        assert_eq!(drawn, [0, 0, 1, 1, 3, 3]);
    }

    #[test]
    fn top_k_leaves_the_likeliest() {
        let sampling = Sampling { top_k: Some(2), ..Sampling::default() };
        // The remaining two have probabilities 5/9 and 4/9.
        assert_eq!(draws(&sampling, &[0.0, 0.55, 0.56, 0.99]), [1, 1, 3, 3]);
        let greedy = Sampling { top_k: Some(1), ..Sampling::default() };
        assert_eq!(draws(&greedy, &[0.0, 0.5, 0.99]), [1, 1, 1]);
    }

    #[test]
    fn top_p_leaves_the_fewest_that_reach_it() {
        let half = Sampling { top_p: Some(0.45), ..Sampling::default() };
        assert_eq!(draws(&half, &[0.0, 0.99]), [1, 1]);
        let most = Sampling { top_p: Some(0.85), ..Sampling::default() };
        assert_eq!(draws(&most, &[0.0, 0.55, 0.56, 0.99]), [1, 1, 3, 3]);
        let all = Sampling { top_p: Some(1.0), ..Sampling::default() };
        assert_eq!(draws(&all, &[0.99]), [0]);
    }

    #[test]
    fn log_probabilities_are_at_the_temperature_and_over_the_vocabulary() {
        let logits = Tensor::from_slice(&[1.0_f32, 3.0]).unsqueeze(0);
        let sampling = Sampling { temperature: 2.0, top_k: Some(1), ..Sampling::default() };
        let (tokens, logprobs) = sample(&logits, &sampling, &[0.5]);
        assert_eq!(tokens, [1]);
        assert!((f64::from(logprobs[0]) + (1.0 + (-1.0f64).exp()).ln()).abs() < 1e-6);
    }
}
