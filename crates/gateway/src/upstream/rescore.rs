//! What the log-probabilities of a recorded call may be, from the engine's scores of the same ids.
//!
//! Scores may be of another temperature than the call: vLLM's are always those of temperature 1, whatever its
//! `--logprobs-mode` is. Then the scores of the best tokens bound the value at the temperature of the call.

use super::{
    check,
    client::Upstream,
    error::UpstreamError,
    kind::EngineKind,
    probe::LogprobScale,
    score::{Scoring, each_of_vllm},
};

/// How many of the best tokens bound a value. vLLM may be started with `--max-logprobs` of this much, which the probe of
/// the temperature needs as well.
const BEST: usize = 5;

/// What a log-probability may be, both ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The least. It is `-inf` if the scores give no bound.
    pub low: f64,
    /// The greatest.
    pub high: f64,
}

impl Range {
    fn exactly(value: f32) -> Self {
        Self { low: value.into(), high: value.into() }
    }

    /// How far a value is from the range, in nats.
    #[must_use]
    pub fn distance(self, value: f32) -> f64 {
        let value = f64::from(value);
        (self.low - value).max(value - self.high).max(0.0)
    }
}

impl Upstream {
    /// Has the engine score ids that it sampled at a temperature, and says what it may have reported then. `scale` is what
    /// its scores are. `None` if nothing follows from them.
    pub async fn rescore(
        &self,
        scoring: &Scoring<'_>,
        scale: &LogprobScale,
    ) -> Result<Option<Vec<Range>>, UpstreamError> {
        let is_one = (scoring.temperature - 1.0).abs() < f64::EPSILON;
        match (scale, self.options.kind) {
            (LogprobScale::Scaled, _) => {}
            (LogprobScale::Raw | LogprobScale::Unknown { .. }, _) if is_one => {}
            (LogprobScale::Raw, EngineKind::Vllm) => return self.bounds(scoring).await.map(Some),
            (LogprobScale::Raw | LogprobScale::Unknown { .. }, _) => return Ok(None),
        }
        let scores = self.score(scoring).await?;
        Ok(Some(scores.into_iter().map(Range::exactly).collect()))
    }

    async fn bounds(&self, scoring: &Scoring<'_>) -> Result<Vec<Range>, UpstreamError> {
        let read = |body: &[u8]| {
            let (mut values, mut ranges) = (Vec::new(), Vec::new());
            each_of_vllm(body, scoring, |value, best| {
                values.push(value);
                ranges.push(range(value, best, scoring.temperature));
            })?;
            check::logprobs(&values)?;
            Ok(ranges)
        };
        self.scored(scoring, BEST, &self.workers_of(scoring), read).await
    }
}

/// What a log-probability at a temperature may be. `best` are those of the best tokens at temperature 1, and that of the
/// token itself, which is `value`.
///
/// The logits differ from these values by a constant. So the value at the temperature is `value / temperature` less the
/// logarithm of the sum of `exp(other / temperature)` over the vocabulary. Of this sum, the part of the tokens that are not
/// named is bounded: they have what is left of the probability, and none is likelier than the last of the best.
fn range(value: f64, best: &[f64], temperature: f64) -> Range {
    let power = 1.0 / temperature;
    let mut best = best.to_vec();
    best.sort_by(|a, b| b.total_cmp(a));
    let left = (1.0 - best.iter().map(|value| value.exp()).sum::<f64>()).max(0.0);
    let named: f64 = best.iter().map(|value| (value * power).exp()).sum();
    let last = best.get(BEST - 1).or(best.last()).copied().unwrap_or(0.0);
    let others = left * ((power - 1.0) * last).exp();
    let with = |others: f64| value * power - (named + others).ln();
    if power > 1.0 {
        Range { low: with(others), high: with(0.0) }
    } else {
        Range { low: f64::NEG_INFINITY, high: with(others) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_contains_the_value_at_the_temperature_and_not_that_of_temperature_1() {
        let logits = [3.0, 2.5, 1.0, 0.5, 0.2, -0.3, -1.0, -2.0];
        let softmax = |temperature: f64| {
            let sum: f64 = logits.iter().map(|logit| (logit / temperature).exp()).sum();
            logits.map(|logit| logit / temperature - sum.ln())
        };
        let at_one = softmax(1.0);
        for temperature in [0.2, 0.5, 0.7, 0.95, 1.1, 1.5, 3.0] {
            for (place, expected) in softmax(temperature).into_iter().enumerate() {
                let mut best = at_one[..BEST].to_vec();
                if place >= BEST {
                    best.push(at_one[place]);
                }
                let range = range(at_one[place], &best, temperature);
                let contains = |value: f64| range.low - 1e-9 <= value && value <= range.high + 1e-9;
                assert!(contains(expected), "{temperature}, token {place}: {expected} is not in {range:?}");
            }
            let best = range(at_one[0], &at_one[..BEST], temperature);
            assert!(temperature > 0.95 && temperature < 1.1 || best.distance(at_one[0] as f32) > 0.02, "{temperature}");
        }
        let exact = Range::exactly(-0.5);
        assert_eq!((exact.distance(-0.5), exact.distance(-0.25), exact.distance(-1.5)), (0.0, 0.25, 1.0));
    }
}
