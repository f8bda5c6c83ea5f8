//! Numbers as producers write them: rewards that are truth values, masks of floats, and missing log-probabilities.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{self, Unexpected, Visitor},
};

/// A number, or true and false for 1 and 0: in Python, a bool is a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Number(pub f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match deserializer.deserialize_any(ScalarVisitor)? {
            Scalar::Null => Err(de::Error::invalid_type(Unexpected::Unit, &ScalarVisitor)),
            Scalar::Bool(value) => Ok(Self(f64::from(u8::from(value)))),
            Scalar::Number(value) => Ok(Self(value)),
        }
    }
}

/// Reads a reward, which may be absent or null.
pub(super) fn reward<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<Number>::deserialize(deserializer)?.map(|Number(reward)| reward))
}

/// A mask: 0 and 1, also as floats. Other whole numbers are left to validation, which names their places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask(pub Vec<u8>);

impl<'de> Deserialize<'de> for Mask {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bit(u8);

        impl<'de> Deserialize<'de> for Bit {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let refuse = |found| Err(de::Error::invalid_value(found, &"0 or 1"));
                match deserializer.deserialize_any(ScalarVisitor)? {
                    Scalar::Null => refuse(Unexpected::Unit),
                    Scalar::Bool(value) => refuse(Unexpected::Bool(value)),
                    Scalar::Number(value) if value - f64::from(value as u8) == 0.0 => Ok(Self(value as u8)),
                    Scalar::Number(value) => refuse(Unexpected::Float(value)),
                }
            }
        }

        // The layout is the same, so the compiler reuses the allocation.
        Ok(Self(Vec::<Bit>::deserialize(deserializer)?.into_iter().map(|Bit(bit)| bit).collect()))
    }
}

/// Reads a mask.
pub(super) fn mask<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    Mask::deserialize(deserializer).map(|Mask(mask)| mask)
}

/// Log-probabilities. A null among them is NaN, which is ignored where the mask is 0 and refused elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs(pub Vec<f32>);

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Logprob(f32);

        impl<'de> Deserialize<'de> for Logprob {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Ok(Self(Option::deserialize(deserializer)?.unwrap_or(f32::NAN)))
            }
        }

        let sent = Vec::<Logprob>::deserialize(deserializer)?;
        Ok(Self(sent.into_iter().map(|Logprob(logprob)| logprob).collect()))
    }
}

/// Reads log-probabilities, which may be absent or null as a whole.
pub(super) fn logprobs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<f32>>, D::Error> {
    Ok(Option::<Logprobs>::deserialize(deserializer)?.map(|Logprobs(logprobs)| logprobs))
}

enum Scalar {
    Null,
    Bool(bool),
    Number(f64),
}

struct ScalarVisitor;

impl Visitor<'_> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number")
    }

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
        Ok(Scalar::Bool(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value as f64))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value as f64))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Segment, Trajectory};

    #[test]
    fn a_truth_value_is_a_number() {
        let sent = r#"{"reward":true,"reward_components":{"a":false,"b":true,"c":-2}}"#;
        let read: Trajectory = serde_json::from_str(sent).expect("bools are numbers");
        assert_eq!(read.reward, Some(1.0));
        assert_eq!(read.reward_components.into_values().collect::<Vec<_>>(), [0.0, 1.0, -2.0]);
        for reward in ["\"1\"", "[1]", "{}"] {
            let error = serde_json::from_str::<Trajectory>(&format!("{{\"reward\":{reward}}}")).expect_err("no number");
            assert!(error.to_string().contains("expected a number"), "{error}");
        }
    }

    #[test]
    fn a_mask_may_be_floats_and_a_log_probability_null() {
        let sent = r#"{"tokens":[1,2,3,4,5],"loss_mask":[1.0,0.0,1,0],"logprobs":[-1,null,-0.5,null],"values":null}"#;
        let read: Segment = serde_json::from_str(sent).expect("it is a segment");
        assert_eq!(read.loss_mask, [1, 0, 1, 0]);
        let logprobs = read.logprobs.expect("they are there");
        assert_eq!(logprobs.iter().map(|logprob| logprob.is_nan()).collect::<Vec<_>>(), [false, true, false, true]);
        for mask in ["[0.5]", "[-1]", "[300]", "[null]", "[true]", "[\"1\"]"] {
            let sent = format!(r#"{{"tokens":[1,2],"loss_mask":{mask}}}"#);
            assert!(serde_json::from_str::<Segment>(&sent).is_err(), "{mask}");
        }
    }
}
