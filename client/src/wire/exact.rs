//! Rewards exactly as sent.
//!
//! Apart from rewards every float on the wire is used as a 32-bit one, for which the JSON parser's fast way is exact
//! enough; asking it for exact 64-bit floats everywhere would make the parsing of log-probabilities twice as slow.

use serde::{Deserialize, Deserializer, Serialize as _, Serializer, de::Error as _};
use serde_json::value::RawValue;

/// Reads a number as the nearest 64-bit float.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let Some(raw) = Option::<Box<RawValue>>::deserialize(deserializer)? else { return Ok(None) };
    let text = raw.get();
    if !text.starts_with(|first: char| first == '-' || first.is_ascii_digit()) {
        return Err(D::Error::custom(format_args!("invalid type: expected a number, found {text:.32}")));
    }
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(Some(number)),
        _ => Err(D::Error::custom("number out of range")),
    }
}

/// Writes a number; JSON has no NaN, and `null` would silently mean that there is no reward.
#[expect(clippy::ref_option, reason = "the signature is serde's")]
pub(super) fn serialize<S: Serializer>(reward: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    if reward.is_some_and(|reward| !reward.is_finite()) {
        return Err(serde::ser::Error::custom("the reward must be finite"));
    }
    reward.serialize(serializer)
}

#[cfg(test)]
mod tests {
    use crate::wire::Trajectory;

    #[test]
    fn rewards_are_the_nearest_64_bit_floats() {
        // Decimals that a parser with one rounding too many gets wrong by a unit in the last place.
        for text in ["0.6455555555555557", "9007199254740993", "1.7976931348623157e308", "-5e-324", "0.1"] {
            let json = format!(r#"{{"status":"completed","reward":{text}}}"#);
            let sent: Trajectory = serde_json::from_str(&json).expect("the reward is a number");
            let expected: f64 = text.parse().expect("the text is a number");
            assert_eq!(sent.reward.map(f64::to_bits), Some(expected.to_bits()), "{text}");
        }
        for text in ["1e400", "\"1\"", "true", "[1]"] {
            let json = format!(r#"{{"status":"completed","reward":{text}}}"#);
            assert!(serde_json::from_str::<Trajectory>(&json).is_err(), "{text}");
        }
    }
}
