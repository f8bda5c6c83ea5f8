//! Writes rewards. Reading them is exact, because the JSON parser is configured to return the nearest 64-bit float.

use serde::{Serialize as _, Serializer};

/// Writes a number and refuses NaN and infinities. JSON has none of them, and `null` would silently mean that there is
/// no reward.
#[expect(clippy::ref_option, reason = "the signature is serde's")]
pub(super) fn serialize<S: Serializer>(reward: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    if reward.is_some_and(|reward| !reward.is_finite()) {
        return Err(serde::ser::Error::custom("the reward must be finite"));
    }
    reward.serialize(serializer)
}

#[cfg(test)]
mod tests {
    use crate::Trajectory;

    #[test]
    fn rewards_are_the_nearest_64_bit_floats() {
        // Decimals for which a parser that rounds twice is wrong by one unit in the last place.
        for text in ["0.6455555555555557", "9007199254740993", "1.7976931348623157e308", "-5e-324", "0.1"] {
            let json = format!(r#"{{"status":"completed","reward":{text}}}"#);
            let sent: Trajectory = serde_json::from_str(&json).expect("the reward is a number");
            let expected: f64 = text.parse().expect("the text is a number");
            assert_eq!(sent.reward.map(f64::to_bits), Some(expected.to_bits()), "{text}");
        }
        for text in ["1e400", "\"1\"", "[1]"] {
            let json = format!(r#"{{"status":"completed","reward":{text}}}"#);
            assert!(serde_json::from_str::<Trajectory>(&json).is_err(), "{text}");
        }
    }
}
