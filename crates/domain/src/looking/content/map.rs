//! The map of a segment: what its parts are like, so that a segment of a million tokens can be seen at once.

use forebay_wire::{Segment, TokenMap};

/// The most parts of a map.
const BUCKETS_MAX: usize = 512;

/// Digits behind the point. More would make the answer longer, and nobody sees them.
const PRECISION: f64 = 1e4;

/// Describes a segment in parts of equal size. `sent` is the mask as sent.
pub fn of(segment: &Segment, sent: &[u8], index: u32) -> TokenMap {
    let tokens = segment.tokens.len();
    let size = tokens.div_ceil(BUCKETS_MAX).max(1);
    let parts = Parts { tokens, size, prompt: tokens - sent.len() };
    let trained_logprobs = |column: &[f32], token: usize| (sent.get(token) == Some(&1)).then(|| column[token]);
    let logprobs = |fold: fn(&mut dyn Iterator<Item = f64>) -> Option<f64>| {
        parts.each(|response| {
            let column = segment.logprobs.as_deref()?;
            fold(&mut response.filter_map(|token| trained_logprobs(column, token)).map(f64::from)).map(rounded)
        })
    };
    TokenMap {
        segment: index,
        tokens_per_bucket: size as u64,
        buckets: parts.count() as u64,
        response: parts.shares(|_| 1),
        masked_in: parts.shares(|token| sent[token]),
        trained: parts.shares(|token| segment.loss_mask[token]),
        logprob_mean: logprobs(mean),
        logprob_min: logprobs(|found| found.reduce(f64::min)),
        value_mean: segment.values.as_deref().map(|column| {
            parts.each(|response| mean(&mut response.map(|token| f64::from(column[token]))).map(rounded))
        }),
        version_min: segment.versions.as_deref().map(|spans| {
            let mut oldest: Vec<Option<i64>> = vec![None; parts.count()];
            for span in spans.iter().filter(|span| span.2 > 0) {
                let first = (parts.prompt + span.1 as usize) / size;
                let last = (parts.prompt + (span.1 + span.2 - 1) as usize) / size;
                for part in &mut oldest[first..=last] {
                    *part = Some(part.map_or(span.0, |version| version.min(span.0)));
                }
            }
            oldest
        }),
    }
}

/// The parts of a segment.
struct Parts {
    tokens: usize,
    size: usize,
    prompt: usize,
}

impl Parts {
    fn count(&self) -> usize {
        self.tokens.div_ceil(self.size)
    }

    /// Describes each part by the places of its tokens in the response.
    fn each<T>(&self, describe: impl Fn(std::ops::Range<usize>) -> T) -> Vec<T> {
        let response = |token: usize| token.saturating_sub(self.prompt);
        let part = |from: usize| describe(response(from)..response((from + self.size).min(self.tokens)));
        (0..self.tokens).step_by(self.size).map(part).collect()
    }

    /// The share of each part's tokens that a mask of the response counts.
    fn shares(&self, mask: impl Fn(usize) -> u8) -> Vec<f64> {
        let counts = self.each(|response| response.map(|token| u64::from(mask(token))).sum::<u64>());
        let sizes = (0..self.tokens).step_by(self.size).map(|from| self.size.min(self.tokens - from));
        counts.into_iter().zip(sizes).map(|(count, size)| rounded(count as f64 / size as f64)).collect()
    }
}

fn mean(found: &mut dyn Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = found.fold((0.0, 0_u64), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

fn rounded(value: f64) -> f64 {
    (value * PRECISION).round() / PRECISION
}

#[cfg(test)]
mod tests {
    use forebay_wire::VersionSpan;

    use super::*;

    /// A prompt of `prompt` tokens and a response in which every second token has mask 1.
    fn segment(prompt: usize, response: usize) -> Segment {
        Segment {
            tokens: vec![1; prompt + response],
            loss_mask: (0..response).map(|token| (token % 2) as u8).collect(),
            logprobs: Some((0..response).map(|token| -(token as f32)).collect()),
            values: Some(vec![0.5; response]),
            versions: Some(vec![VersionSpan(9, 0, 2), VersionSpan(8, 2, response as i64 - 2)]),
            ..Segment::default()
        }
    }

    #[test]
    fn a_short_segment_has_a_part_for_each_token() {
        let segment = segment(2, 4);
        let map = of(&segment, &[1, 1, 0, 1], 3);
        assert_eq!((map.segment, map.tokens_per_bucket, map.buckets), (3, 1, 6));
        assert_eq!(map.response, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(map.masked_in, [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]);
        assert_eq!(map.trained, [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]);
        assert_eq!(map.logprob_mean, [None, None, Some(0.0), Some(-1.0), None, Some(-3.0)]);
        assert_eq!(map.value_mean, Some(vec![None, None, Some(0.5), Some(0.5), Some(0.5), Some(0.5)]));
        assert_eq!(map.version_min, Some(vec![None, None, Some(9), Some(9), Some(8), Some(8)]));
    }

    #[test]
    fn a_part_has_means_and_the_last_part_may_be_smaller() {
        // 1,025 tokens in parts of three: the first has the two prompt tokens and the first response token.
        let segment = segment(2, 1_023);
        let map = of(&segment, &segment.loss_mask, 0);
        assert_eq!((map.tokens_per_bucket, map.buckets), (3, 342));
        assert_eq!((map.response[0], map.masked_in[0], map.logprob_mean[0]), (0.3333, 0.0, None));
        // Response tokens 1 to 3: mask 1, 0, 1.
        assert_eq!((map.masked_in[1], map.logprob_mean[1], map.logprob_min[1]), (0.6667, Some(-2.0), Some(-3.0)));
        assert_eq!(map.version_min.as_ref().map(|versions| versions[0..2].to_vec()), Some(vec![Some(9), Some(8)]));
        // The last part has the response tokens 1,021 and 1,022.
        assert_eq!((map.response[341], map.masked_in[341]), (1.0, 0.5));
        for column in [&map.response, &map.masked_in, &map.trained] {
            assert_eq!(column.len(), 342);
        }
    }

    #[test]
    fn the_longest_segments_have_the_same_number_of_parts() {
        for response in [512, 1_000_000] {
            let segment = segment(0, response);
            let map = of(&segment, &segment.loss_mask, 0);
            assert_eq!(map.buckets as usize, response.div_ceil(map.tokens_per_bucket as usize));
            assert!(map.buckets <= 512 && map.buckets > 500, "{}", map.buckets);
            let trained: f64 = map.trained.iter().sum::<f64>() / map.buckets as f64;
            assert!((trained - 0.5).abs() < 1e-3, "{trained}");
        }
    }
}
