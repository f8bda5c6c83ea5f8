//! The bodies of Atropos' calls, read as leniently as the original reads them.
//!
//! Separate from `convert`, which makes trajectories of what is read here. Numbers may be written as strings, whole
//! numbers as floats, and unknown fields are ignored.

#[cfg(test)]
mod tests;

use std::{
    fmt::{self, Write as _},
    marker::PhantomData,
};

use forebay_wire::Violation;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, DeserializeOwned, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use serde_path_to_error::{Path, Segment, Track};

/// The mask value of a token that is not trained.
pub(super) const MASKED: i32 = -100;

/// The value of a token without a log-probability.
pub(super) const NO_LOGPROB: f32 = 1.0;

/// The most sequences of one body, which are stored in one commit, and the most groups of a list.
pub(super) const SEQUENCES_MAX: usize = 4_096;

/// The most bytes of a text of a registration: the length of the longest path on Linux.
const TEXT_BYTES_MAX: usize = 4_096;

/// The most bytes of an environment's name. With its number it is a label, which has at most 256 bytes.
const NAME_BYTES_MAX: usize = 200;

/// The most sequences of a batch.
const BATCH_SIZE_MAX: i64 = 65_536;

/// A value that is refused, with the pointer to it.
fn refused(pointer: &str, detail: impl Into<String>) -> Violation {
    Violation { pointer: pointer.to_owned(), detail: detail.into() }
}

/// An error of the parser in a field of the body, or in the body itself.
fn unreadable(field: &str, path: &Path, error: &serde_json::Error) -> Violation {
    let mut pointer = field.to_owned();
    for segment in path {
        let _ = match segment {
            Segment::Seq { index } => write!(pointer, "/{index}"),
            Segment::Map { key } => write!(pointer, "/{}", key.replace('~', "~0").replace('/', "~1")),
            Segment::Enum { .. } | Segment::Unknown => Ok(()),
        };
    }
    let text = error.to_string();
    let detail = text.rsplit_once(" at line ").map_or(text.as_str(), |(detail, _)| detail);
    match detail.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        Some(missing) => refused(&format!("{pointer}/{missing}"), "is required"),
        None => refused(&pointer, detail),
    }
}

/// Reads a body.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Violation> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let read =
        serde_path_to_error::deserialize(&mut json).map_err(|error| unreadable("", error.path(), error.inner()))?;
    json.end().map_err(|error| unreadable("", &Track::new().path(), &error))?;
    Ok(read)
}

/// `POST /register`: a trainer begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Registration {
    pub(super) wandb_group: String,
    pub(super) wandb_project: String,
    #[serde(deserialize_with = "int")]
    pub(super) batch_size: i64,
    #[serde(deserialize_with = "int")]
    pub(super) max_token_len: i64,
    pub(super) checkpoint_dir: String,
    #[serde(deserialize_with = "int")]
    pub(super) save_checkpoint_interval: i64,
    #[serde(deserialize_with = "int")]
    pub(super) starting_step: i64,
    #[serde(deserialize_with = "int")]
    pub(super) num_steps: i64,
}

impl Registration {
    /// Reads and checks a registration.
    pub(super) fn parse(body: &[u8]) -> Result<Self, Violation> {
        let read: Self = parse(body)?;
        let texts = [
            ("wandb_group", &read.wandb_group),
            ("wandb_project", &read.wandb_project),
            ("checkpoint_dir", &read.checkpoint_dir),
        ];
        if let Some((name, _)) = texts.into_iter().find(|(_, text)| text.len() > TEXT_BYTES_MAX) {
            return Err(refused(&format!("/{name}"), format!("must be at most {TEXT_BYTES_MAX} bytes")));
        }
        if !(1..=BATCH_SIZE_MAX).contains(&read.batch_size) {
            return Err(refused("/batch_size", format!("must be 1 to {BATCH_SIZE_MAX}")));
        }
        Ok(read)
    }
}

/// `POST /register-env`: an environment begins.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RegisterEnv {
    #[serde(deserialize_with = "int")]
    pub(super) max_token_length: i64,
    pub(super) desired_name: String,
    #[serde(deserialize_with = "float")]
    pub(super) weight: f64,
    #[serde(deserialize_with = "int")]
    pub(super) group_size: i64,
    #[serde(default, deserialize_with = "optional_float")]
    pub(super) min_batch_allocation: Option<f64>,
}

impl RegisterEnv {
    /// Reads and checks the registration of an environment.
    pub(super) fn parse(body: &[u8]) -> Result<Self, Violation> {
        let read: Self = parse(body)?;
        let name = &read.desired_name;
        if name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            let msg = format!("must be at most {NAME_BYTES_MAX} bytes without control characters");
            return Err(refused("/desired_name", msg));
        }
        if !(1..=SEQUENCES_MAX as i64).contains(&read.group_size) {
            return Err(refused("/group_size", format!("must be 1 to {SEQUENCES_MAX}")));
        }
        if read.min_batch_allocation.is_some_and(|share| !(0.0..=1.0).contains(&share)) {
            return Err(refused("/min_batch_allocation", "must be 0 to 1"));
        }
        Ok(read)
    }
}

/// `POST /disconnect-env` and `GET /status-env`: which environment is meant.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct EnvIdentifier {
    #[serde(deserialize_with = "int")]
    pub(super) env_id: i64,
}

/// A scored group: columns over its sequences.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ScoredData {
    pub(super) tokens: Bounded<Vec<Int>>,
    pub(super) masks: Bounded<Vec<Int>>,
    pub(super) scores: Bounded<Float>,
    #[serde(default)]
    pub(super) inference_logprobs: Option<Bounded<Vec<Single>>>,
    #[serde(default)]
    pub(super) advantages: Option<Box<RawValue>>,
    #[serde(default)]
    pub(super) ref_logprobs: Option<Box<RawValue>>,
    #[serde(default)]
    pub(super) messages: Option<Box<RawValue>>,
    #[serde(default)]
    pub(super) generation_params: Option<Box<RawValue>>,
    #[serde(default)]
    pub(super) overrides: Option<Box<RawValue>>,
    #[serde(default)]
    pub(super) group_overrides: Option<Box<RawValue>>,
    #[serde(default)]
    pub(super) images: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "optional_int")]
    pub(super) env_id: Option<i64>,
    #[serde(default)]
    pub(super) distill_token_ids: Option<Box<RawValue>>,
    #[serde(default)]
    pub(super) distill_logprobs: Option<Box<RawValue>>,
}

impl ScoredData {
    /// Reads the body of `/scored_data`.
    pub(super) fn parse(body: &[u8]) -> Result<Self, Violation> {
        let read: Self = parse(body)?;
        read.check()?;
        Ok(read)
    }

    /// Reads the body of `/scored_data_list`.
    pub(super) fn parse_list(body: &[u8]) -> Result<Vec<Self>, Violation> {
        let Bounded(list): Bounded<Self> = parse(body)?;
        for (index, read) in list.iter().enumerate() {
            let within = |found: Violation| Violation { pointer: format!("/{index}{}", found.pointer), ..found };
            read.check().map_err(within)?;
        }
        let sequences: usize = list.iter().map(|read| read.tokens.0.len()).sum();
        if sequences > SEQUENCES_MAX {
            return Err(refused("", format!("must have at most {SEQUENCES_MAX} sequences, has {sequences}")));
        }
        Ok(list)
    }

    /// The bytes of the fields that belong to the whole group and are stored with each of its sequences.
    pub(super) fn repeated_bytes(&self) -> usize {
        let common = [&self.generation_params, &self.group_overrides].into_iter().flatten();
        self.tokens.0.len() * common.map(|raw| raw.get().len()).sum::<usize>()
    }

    /// Checks what the types do not say.
    fn check(&self) -> Result<(), Violation> {
        let sequences = self.tokens.0.len();
        if sequences == 0 {
            return Err(refused("/tokens", "must have at least one sequence"));
        }
        for (name, entries) in [("masks", self.masks.0.len()), ("scores", self.scores.0.len())] {
            if entries != sequences {
                let msg = format!("has {entries} entries for the {sequences} sequences of `tokens`");
                return Err(refused(&format!("/{name}"), msg));
            }
        }
        for (index, (tokens, masks)) in self.tokens.0.iter().zip(&self.masks.0).enumerate() {
            if tokens.len() != masks.len() {
                let msg = format!("has {} entries for {} tokens", masks.len(), tokens.len());
                return Err(refused(&format!("/masks/{index}"), msg));
            }
            if let Some(at) = tokens.iter().position(|token| token.0 < 0) {
                return Err(refused(&format!("/tokens/{index}/{at}"), "must be 0 or above"));
            }
        }
        let shapes: [(&str, &Option<Box<RawValue>>, &'static Shape); 8] = [
            ("advantages", &self.advantages, &FLOATS_2),
            ("ref_logprobs", &self.ref_logprobs, &FLOATS_2),
            ("messages", &self.messages, &Shape::List(&Shape::List(&Shape::Message))),
            ("generation_params", &self.generation_params, &Shape::Object),
            ("overrides", &self.overrides, &Shape::List(&Shape::Object)),
            ("group_overrides", &self.group_overrides, &Shape::Object),
            ("distill_token_ids", &self.distill_token_ids, &Shape::List(&Shape::List(&Shape::List(&Shape::Int)))),
            ("distill_logprobs", &self.distill_logprobs, &Shape::List(&FLOATS_2)),
        ];
        shapes.iter().try_for_each(|(name, raw, shape)| match raw {
            Some(raw) => shape.check(name, raw),
            None => Ok(()),
        })
    }
}

const FLOATS_2: Shape = Shape::List(&Shape::List(&Shape::Float));

/// The type of a field that is stored as it was sent.
#[derive(Clone, Copy, Debug)]
enum Shape {
    Int,
    Float,
    Object,
    /// An object with `role` and `content`.
    Message,
    List(&'static Shape),
}

impl Shape {
    fn check(&'static self, field: &str, raw: &RawValue) -> Result<(), Violation> {
        let mut json = serde_json::Deserializer::from_str(raw.get());
        let mut track = Track::new();
        let tracked = serde_path_to_error::Deserializer::new(&mut json, &mut track);
        self.deserialize(tracked).map_err(|error| unreadable(&format!("/{field}"), &track.path(), &error))
    }
}

impl<'de> DeserializeSeed<'de> for &'static Shape {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self {
            Shape::Int => Int::deserialize(deserializer).map(|_| ()),
            Shape::Float => Float::deserialize(deserializer).map(|_| ()),
            Shape::Object | Shape::Message => deserializer.deserialize_map(self),
            Shape::List(_) => deserializer.deserialize_seq(self),
        }
    }
}

impl<'de> Visitor<'de> for &'static Shape {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Shape::Int => "an integer",
            Shape::Float => "a number",
            Shape::Object => "an object",
            Shape::Message => "a message",
            Shape::List(_) => "an array",
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Shape::List(entry) = self else {
            return Err(de::Error::invalid_type(de::Unexpected::Seq, &self));
        };
        while seq.next_element_seed(*entry)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let (mut role, mut content) = (false, false);
        while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            role |= key == "role";
            content |= key == "content";
            map.next_value::<IgnoredAny>()?;
        }
        if matches!(self, Shape::Message) && !(role && content) {
            return Err(de::Error::custom("Message must have 'role' and 'content' fields"));
        }
        Ok(())
    }
}

/// A list of at most [`SEQUENCES_MAX`] entries.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bounded<T>(pub(super) Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Bounded<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(BoundedVisitor(PhantomData))
    }
}

struct BoundedVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for BoundedVisitor<T> {
    type Value = Bounded<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Bounded<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(entry) = seq.next_element()? {
            if list.len() >= SEQUENCES_MAX {
                return Err(de::Error::custom(format_args!("must have at most {SEQUENCES_MAX} entries")));
            }
            list.push(entry);
        }
        Ok(Bounded(list))
    }
}

/// A whole number of 32 bits, also written as a float, a string or a truth value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Int(pub(super) i32);

impl<'de> Deserialize<'de> for Int {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wide = deserializer.deserialize_any(Lenient { whole: true })?;
        let Number::Int(wide) = wide else { return Err(de::Error::custom("must be an integer")) };
        i32::try_from(wide).map(Self).map_err(|_| de::Error::custom("must be an integer of 32 bits"))
    }
}

/// A finite number, also written as a string or a truth value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Float(pub(super) f64);

impl<'de> Deserialize<'de> for Float {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(match deserializer.deserialize_any(Lenient { whole: false })? {
            Number::Int(value) => value as f64,
            Number::Float(value) => value,
        }))
    }
}

/// A number that is finite as a 32-bit float.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Single(pub(super) f32);

impl<'de> Deserialize<'de> for Single {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let single = Float::deserialize(deserializer)?.0 as f32;
        if single.is_finite() { Ok(Self(single)) } else { Err(de::Error::custom("must be finite as a 32-bit float")) }
    }
}

enum Number {
    Int(i64),
    Float(f64),
}

/// Reads a number as Python would convert it.
struct Lenient {
    whole: bool,
}

impl Visitor<'_> for Lenient {
    type Value = Number;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.whole { "an integer" } else { "a number" })
    }

    fn visit_i64<E>(self, value: i64) -> Result<Number, E> {
        Ok(Number::Int(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Number, E> {
        match i64::try_from(value) {
            Ok(value) => Ok(Number::Int(value)),
            Err(_) if self.whole => Err(E::custom("must be an integer of 64 bits")),
            Err(_) => Ok(Number::Float(value as f64)),
        }
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Number, E> {
        const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
        if !self.whole {
            return Ok(Number::Float(value));
        }
        if value.fract() == 0.0 && value.abs() <= WHOLE_MAX {
            return Ok(Number::Int(value as i64));
        }
        Err(E::custom("must be an integer"))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Number, E> {
        Ok(Number::Int(value.into()))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Number, E> {
        let text = value.trim();
        if let Ok(value) = text.parse() {
            return Ok(Number::Int(value));
        }
        match text.parse() {
            Ok(value) if f64::is_finite(value) => self.visit_f64(value),
            _ => Err(E::invalid_type(de::Unexpected::Str(value), &self)),
        }
    }
}

fn int<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    match deserializer.deserialize_any(Lenient { whole: true })? {
        Number::Int(value) => Ok(value),
        Number::Float(_) => Err(de::Error::custom("must be an integer")),
    }
}

fn float<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Float::deserialize(deserializer).map(|Float(value)| value)
}

fn optional_float<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<Float>::deserialize(deserializer)?.map(|Float(value)| value))
}

fn optional_int<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    struct Wide(i64);
    impl<'de> Deserialize<'de> for Wide {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            int(deserializer).map(Self)
        }
    }
    Ok(Option::<Wide>::deserialize(deserializer)?.map(|Wide(value)| value))
}
