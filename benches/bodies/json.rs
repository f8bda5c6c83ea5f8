//! The JSON body. It is a file of its own because `benches/readers` includes it.

use std::fmt::Write as _;

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

/// Number of rollouts in a body.
pub(crate) const ROLLOUTS: usize = 8;

/// Number of tokens in a rollout.
pub(crate) const TOKENS: usize = 2_000;

/// Ids are below this number: the size of a common vocabulary.
const VOCABULARY: u32 = 128_000;

/// Numbers as Python prints them: a float32 with the digits of a float64, and a space after each comma.
pub(crate) fn json() -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(1);
    let mut body = String::new();
    for rollout in 0..ROLLOUTS {
        let (mut tokens, mut mask, mut logprobs) = (String::from("1"), String::new(), String::new());
        for index in 1..TOKENS {
            let comma = if index == 1 { "" } else { ", " };
            let _ = write!(tokens, ", {}", random.random_range(0..VOCABULARY));
            let _ = write!(mask, "{comma}{}", u8::from(!random.random_bool(1.0 / 7.0)));
            let _ = write!(logprobs, "{comma}{}", f64::from(random.random_range(-2.5_f32..0.0)));
        }
        let separator = if rollout == 0 { '[' } else { ',' };
        let _ = write!(
            body,
            r#"{separator}{{"rollout_id": "g-{rollout}", "group_id": "g", "group_size": {ROLLOUTS}, "status": "completed", "reward": {}, "segments": [{{"tokens": [{tokens}], "loss_mask": [{mask}], "logprobs": [{logprobs}]}}]}}"#,
            rollout % 2
        );
    }
    body.push(']');
    body.into_bytes()
}
