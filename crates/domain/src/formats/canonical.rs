//! Canonical content: what makes two posts of one rollout the same.
//!
//! Separate from the stored form, because a retry may spell its JSON differently (whitespace, key order, aliases,
//! omitted defaults) and must still be recognised, while messages and metadata are stored as sent.

use std::{cell::Cell, collections::BTreeMap, fmt};

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Nesting that free-form JSON may have, well under the parser's own limit of 128.
pub const JSON_DEPTH_MAX: usize = 64;

/// Bytes of a text that an error shows.
const SHOWN_BYTES: usize = 32;

/// Keys of nested objects that are held until they are sorted. Each takes ten times its bytes in memory.
const KEYS_HELD_MAX: usize = 131_072;

/// A JSON pointer's reference token (RFC 6901).
#[must_use]
pub fn escape(token: &str) -> String {
    token.replace('~', "~0").replace('/', "~1")
}

/// BLAKE3 hash of canonical content.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ContentDigest([u8; 32]);

impl ContentDigest {
    /// From the 32 bytes of [`Self::as_bytes`].
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The digest's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for ContentDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

/// Bytes that are hashed at a time. BLAKE3 hashes the KiB chunks of such a block in parallel, and shorter inputs chunk
/// by chunk.
const BLOCK: usize = 32 << 10;

/// Hashes values unambiguously: every value has a tag, and every value of variable length is preceded by its length or
/// followed by an end mark.
#[derive(Default)]
pub struct Hasher {
    blocks: blake3::Hasher,
    /// Bytes after the last whole block.
    rest: Vec<u8>,
}

impl Hasher {
    pub fn finish(mut self) -> ContentDigest {
        ContentDigest(*self.blocks.update(&self.rest).finalize().as_bytes())
    }

    fn put(&mut self, bytes: &[u8]) {
        let wanted = BLOCK - self.rest.len();
        let Some((head, tail)) = bytes.split_at_checked(wanted) else {
            return self.rest.extend_from_slice(bytes);
        };
        self.rest.extend_from_slice(head);
        self.blocks.update(&self.rest);
        self.rest.clear();
        let (blocks, rest) = tail.split_at(tail.len() / BLOCK * BLOCK);
        self.blocks.update(blocks);
        self.rest.extend_from_slice(rest);
    }

    pub fn tag(&mut self, tag: u8) {
        self.put(&[tag]);
    }

    pub fn int(&mut self, value: i64) {
        self.put(&value.to_le_bytes());
    }

    pub fn float(&mut self, value: f64) {
        self.put(&value.to_bits().to_le_bytes());
    }

    pub fn text(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }

    pub fn bytes(&mut self, value: &[u8]) {
        self.int(value.len() as i64);
        self.put(value);
    }

    pub fn digest(&mut self, value: ContentDigest) {
        self.put(&value.0);
    }

    pub fn option<T>(&mut self, value: Option<T>, hash: impl FnOnce(&mut Self, T)) {
        self.tag(u8::from(value.is_some()));
        if let Some(value) = value {
            hash(self, value);
        }
    }
}

/// Free-form JSON that was checked: bounded depth, no duplicate keys, every number in range.
#[derive(Clone, Copy, Debug)]
pub struct CheckedJson {
    /// The kind of its top-level value.
    pub kind: JsonKind,
    /// Hash of its value, independent of its spelling.
    pub digest: ContentDigest,
}

/// The kind of a top-level JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonKind {
    /// `[...]`
    Array,
    /// `{...}`
    Object,
    /// Anything else.
    Scalar,
}

/// Checks and hashes raw JSON without keeping it; the error says what is wrong with it.
pub fn check_json(raw: &RawValue) -> Result<CheckedJson, String> {
    let (json, has_rounded) = walk(raw, &[])?;
    // The parser rounds an integer longer than 64 bits to a float. Such integers are rare, so only text that contains
    // one is read again.
    if has_rounded { walk(raw, &long_integers(raw.get())).map(|(json, _)| json) } else { Ok(json) }
}

/// Checks and hashes raw JSON, and says whether it has a float that may stand for a longer integer.
fn walk(raw: &RawValue, long_integers: &[(usize, &str)]) -> Result<(CheckedJson, bool), String> {
    let mut hasher = Hasher::default();
    let mut deserializer = serde_json::Deserializer::from_str(raw.get());
    let met = Met {
        keys_held: Cell::new(0),
        numbers: Cell::new(0),
        long_integers,
        next_long: Cell::new(0),
        has_rounded: Cell::new(false),
    };
    let walk = Walk { hasher: &mut hasher, depth: 0, met: &met };
    let kind = walk.deserialize(&mut deserializer).map_err(|error| describe(&error, raw.get()))?;
    Ok((CheckedJson { kind, digest: hasher.finish() }, met.has_rounded.get()))
}

/// The integers of well-formed JSON that do not fit 64 bits, each with its index among all numbers.
fn long_integers(text: &str) -> Vec<(usize, &str)> {
    let bytes = text.as_bytes();
    let (mut at, mut numbers, mut found) = (0, 0, Vec::new());
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => {
                at += 1;
                while bytes.get(at).is_some_and(|&byte| byte != b'"') {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &&u8| matches!(**byte, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9');
                let length = bytes[at..].iter().take_while(is_part).count();
                let number = &text[at..at + length];
                let is_integer = number.bytes().skip(1).all(|byte| byte.is_ascii_digit());
                if is_integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
                    found.push((numbers, number));
                }
                numbers += 1;
                at += length;
            }
            _ => at += 1,
        }
    }
    found
}

/// The error without its position, which is relative to the fragment and would mislead.
fn describe(error: &serde_json::Error, json: &str) -> String {
    let text = error.to_string();
    let message = text.split(" at line ").next().unwrap_or(&text);
    if !message.ends_with(" hex escape") {
        return message.to_owned();
    }
    // The other escapes were read when the body was, so this one stands for no character.
    let line = json.split('\n').nth(error.line().saturating_sub(1)).unwrap_or_default();
    let end = line.floor_char_boundary(error.column());
    let start = line.floor_char_boundary(end.saturating_sub(SHOWN_BYTES));
    format!(
        "contains half of a surrogate pair, which is no character, near `{}`: replace it, in Python with \
         text.encode(errors=\"replace\").decode()",
        &line[start..end]
    )
}

const NULL: u8 = 0;
const BOOL: u8 = 1;
const INT: u8 = 2;
const FLOAT: u8 = 3;
const TEXT: u8 = 4;
const ARRAY: u8 = 5;
const OBJECT: u8 = 6;
const END: u8 = 7;
const LONG_INT: u8 = 8;

/// The least magnitude of a float that may stand for an integer of more than 64 bits.
const ROUNDED_MIN: f64 = 9_223_372_036_854_775_808.0;

/// The state of the walk over the whole value.
struct Met<'t> {
    /// Keys of this object and of those around it.
    keys_held: Cell<usize>,
    /// Number of numbers so far, without the keys of objects.
    numbers: Cell<usize>,
    /// The integers of more than 64 bits, each with its index among the numbers.
    long_integers: &'t [(usize, &'t str)],
    /// Index of the first of them that the walk has not reached.
    next_long: Cell<usize>,
    /// Whether the walk has met a float that may stand for an integer of more than 64 bits.
    has_rounded: Cell<bool>,
}

impl<'t> Met<'t> {
    /// Counts a number. Returns its text if it is an integer of more than 64 bits.
    fn number(&self) -> Option<&'t str> {
        let place = self.numbers.replace(self.numbers.get() + 1);
        let next = self.long_integers.get(self.next_long.get()).filter(|(next, _)| *next == place);
        self.next_long.set(self.next_long.get() + usize::from(next.is_some()));
        next.map(|(_, text)| *text)
    }
}

/// Walks JSON and hashes it. Arrays stream into the hash. The keys of an object and the digests of their values are
/// held until they are sorted.
struct Walk<'h> {
    hasher: &'h mut Hasher,
    depth: usize,
    met: &'h Met<'h>,
}

impl Walk<'_> {
    fn deeper<'d, E: de::Error>(depth: usize, met: &'d Met<'d>, hasher: &'d mut Hasher) -> Result<Walk<'d>, E> {
        if depth >= JSON_DEPTH_MAX {
            return Err(E::custom(format_args!("nested deeper than {JSON_DEPTH_MAX} levels")));
        }
        Ok(Walk { hasher, depth: depth + 1, met })
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = JsonKind;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonKind, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = JsonKind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<JsonKind, E> {
        self.hasher.tag(NULL);
        Ok(JsonKind::Scalar)
    }

    fn visit_bool<E>(self, value: bool) -> Result<JsonKind, E> {
        self.hasher.tag(BOOL);
        self.hasher.tag(u8::from(value));
        Ok(JsonKind::Scalar)
    }

    fn visit_i64<E>(self, value: i64) -> Result<JsonKind, E> {
        self.met.number();
        self.hasher.tag(INT);
        self.hasher.put(&i128::from(value).to_le_bytes());
        Ok(JsonKind::Scalar)
    }

    fn visit_u64<E>(self, value: u64) -> Result<JsonKind, E> {
        self.met.number();
        self.hasher.tag(INT);
        self.hasher.put(&i128::from(value).to_le_bytes());
        Ok(JsonKind::Scalar)
    }

    fn visit_f64<E>(self, value: f64) -> Result<JsonKind, E> {
        if let Some(text) = self.met.number() {
            self.hasher.tag(LONG_INT);
            self.hasher.text(text);
            return Ok(JsonKind::Scalar);
        }
        if value.abs() >= ROUNDED_MIN {
            self.met.has_rounded.set(true);
        }
        self.hasher.tag(FLOAT);
        self.hasher.float(value);
        Ok(JsonKind::Scalar)
    }

    fn visit_str<E>(self, value: &str) -> Result<JsonKind, E> {
        self.hasher.tag(TEXT);
        self.hasher.text(value);
        Ok(JsonKind::Scalar)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<JsonKind, A::Error> {
        self.hasher.tag(ARRAY);
        while seq.next_element_seed(Walk::deeper(self.depth, self.met, self.hasher)?)?.is_some() {}
        self.hasher.tag(END);
        Ok(JsonKind::Array)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonKind, A::Error> {
        let mut entries: BTreeMap<String, ContentDigest> = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let mut hasher = Hasher::default();
            map.next_value_seed(Walk::deeper(self.depth, self.met, &mut hasher)?)?;
            if entries.contains_key(&key) {
                return Err(de::Error::custom(format_args!("duplicate key `{key}`")));
            }
            entries.insert(key, hasher.finish());
            self.met.keys_held.set(self.met.keys_held.get() + 1);
            if self.met.keys_held.get() > KEYS_HELD_MAX {
                return Err(de::Error::custom(format_args!("more than {KEYS_HELD_MAX} keys in one object")));
            }
        }
        self.met.keys_held.set(self.met.keys_held.get() - entries.len());
        self.hasher.tag(OBJECT);
        for (key, value) in entries {
            self.hasher.tag(TEXT);
            self.hasher.text(&key);
            self.hasher.digest(value);
        }
        self.hasher.tag(END);
        Ok(JsonKind::Object)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn pieces_hash_like_the_whole(lengths in vec(prop_oneof![0_usize..20, BLOCK - 20..BLOCK + 20, 0..4 * BLOCK], 0..6)) {
            let mut hasher = Hasher::default();
            let whole: Vec<u8> = (0..lengths.iter().sum::<usize>()).map(|byte| (byte / 7) as u8).collect();
            let mut rest = &whole[..];
            for length in lengths {
                let (piece, after) = rest.split_at(length);
                hasher.put(piece);
                rest = after;
            }
            let expected = blake3::hash(&whole);
            let found = hasher.finish();
            prop_assert_eq!(found.as_bytes(), expected.as_bytes());
        }
    }

    fn check(text: &str) -> Result<CheckedJson, String> {
        check_json(&RawValue::from_string(text.to_owned()).expect("the test's JSON is well-formed"))
    }

    fn digest(text: &str) -> ContentDigest {
        check(text).expect("the test's JSON is acceptable").digest
    }

    fn refusal(text: &str) -> String {
        check(text).expect_err("the test's JSON is refused")
    }

    #[test]
    fn spelling_does_not_change_the_content() {
        assert_eq!(digest(r#"{"b": [1, 2.50], "a": "\u0061"}"#), digest(r#"{"a":"a","b":[1,25e-1]}"#));
    }

    #[test]
    fn different_values_have_different_content() {
        let others = [
            r#"{"a":[1,[2]]}"#,
            r#"{"a":[1],"b":2}"#,
            r#"{"a":["1",2]}"#,
            r#"{"a":[1.5,2]}"#,
            r#"{"a":[1,2,{}]}"#,
            r#"[{"a":[1,2]}]"#,
        ];
        for other in others {
            assert_ne!(digest(r#"{"a":[1,2]}"#), digest(other), "{other}");
        }
        assert_ne!(digest("[[1],2]"), digest("[[1,2]]"));
        assert_ne!(digest(r#"{"a":{"b":1}}"#), digest(r#"{"a":{},"b":1}"#));
    }

    #[test]
    fn integers_of_more_than_64_bits_are_compared_exactly() {
        let with =
            |number: &str| format!(r#"[{{"x":"1e30 \" 99999999999999999999","n":[1.5,{number},-2,1e30]}},{number}]"#);
        let numbers = [
            "18446744073709551615",
            "18446744073709551616",
            "18446744073709551617",
            "-18446744073709551617",
            "-9223372036854775808",
            "-9223372036854775809",
            "100000000000000000000",
            "1e20",
        ];
        for (index, number) in numbers.iter().enumerate() {
            for other in &numbers[index + 1..] {
                assert_ne!(digest(&with(number)), digest(&with(other)), "{number} and {other}");
            }
        }
        // Everything else may be spelled differently, and keys may come in another order.
        let a = r#"{"a":100000000000000000000,"b":[100000000000000000001,2.50]}"#;
        let b = r#"{ "b" : [100000000000000000001, 25e-1], "\u0061" : 100000000000000000000 }"#;
        assert_eq!(digest(a), digest(b));
    }

    #[test]
    fn duplicate_keys_are_named() {
        assert_eq!(refusal(r#"{"a":{"x":1,"x":2}}"#), "duplicate key `x`");
    }

    #[test]
    fn keys_that_are_held_at_once_are_bounded() {
        let object = |keys: usize| {
            let entries: Vec<String> = (0..keys).map(|key| format!("\"{key}\":0")).collect();
            format!("{{{}}}", entries.join(","))
        };
        let many = object(KEYS_HELD_MAX);
        // Objects that follow each other are never held together.
        digest(&format!("[{many},{many}]"));
        assert_eq!(refusal(&object(KEYS_HELD_MAX + 1)), "more than 131072 keys in one object");
        let half = object(KEYS_HELD_MAX / 2 + 1);
        let nested = format!("{},\"x\":{half}}}", half.trim_end_matches('}'));
        assert_eq!(refusal(&nested), "more than 131072 keys in one object");
    }

    #[test]
    fn nesting_is_bounded() {
        let nest = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        digest(&nest(JSON_DEPTH_MAX));
        assert_eq!(refusal(&nest(JSON_DEPTH_MAX + 2)), "nested deeper than 64 levels");
    }
}
