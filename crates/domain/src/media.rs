//! Media in messages: the addresses of uploads, and the data URLs that become such addresses.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    ops::Range,
};

use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::Bytes;
use memchr::memmem;

use crate::{
    ids::BlobDigest,
    memory::{Memory, NoMemory},
};

/// The longest media type.
pub const MEDIA_TYPE_BYTES_MAX: usize = 100;

/// The most blobs that a rollout names.
pub const NAMED_MAX: usize = 1_024;

/// The most bytes of an image, or of another medium.
pub const MEDIA_BYTES_MAX: u64 = 64 << 20;

/// What the address of a blob in a message begins with.
pub const SCHEME: &str = "forebay:";

/// The keys under which media stand in messages: `{"image_url": {"url": ...}}` as `OpenAI` has it, and
/// `{"type": "image", "image": ...}` or a list of frames as processors of Hugging Face do.
const MEDIA_KEYS: [&str; 10] =
    ["url", "image_url", "video_url", "audio_url", "image", "images", "video", "videos", "audio", "audios"];

/// What is below these keys was written by a model, so that it names nothing.
const WRITTEN_KEYS: [&str; 4] = ["tool_calls", "function_call", "arguments", "input"];

/// What comes next in an array or an object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Key,
    Medium,
    /// A value that a model wrote.
    Written,
    Other,
}

/// An array or an object on the way to a value.
struct Level {
    is_object: bool,
    is_written: bool,
    next: Next,
}

impl Level {
    /// An object where a value was next.
    fn object(at: Next) -> Self {
        Self { is_object: true, is_written: at == Next::Written, next: Next::Key }
    }

    /// An array where a value was next: its entries are what it is.
    fn array(at: Next) -> Self {
        Self { is_object: false, is_written: at == Next::Written, next: at }
    }

    /// What the value of a key is.
    fn value_of(&self, key: &str) -> Next {
        match key {
            key if self.is_written || WRITTEN_KEYS.contains(&key) => Next::Written,
            key if MEDIA_KEYS.contains(&key) => Next::Medium,
            _ => Next::Other,
        }
    }
}

/// The deepest array or object that is looked into. Deeper messages are refused.
const LEVELS_MAX: usize = 128;

/// Calls `found` with each string in a place of media, without its quotes.
fn media_strings(json: &str, mut found: impl FnMut(Range<usize>)) {
    let mut levels: Vec<Level> = Vec::new();
    let mut at = 0;
    while let Some(ahead) = json.as_bytes()[at..].iter().position(|byte| b"\"{}[],".contains(byte)) {
        at += ahead;
        let next = levels.last().map_or(Next::Other, |level| level.next);
        match json.as_bytes()[at] {
            b'{' | b'[' if levels.len() == LEVELS_MAX => return,
            b'{' => levels.push(Level::object(next)),
            b'[' => levels.push(Level::array(next)),
            b'}' | b']' => drop(levels.pop()),
            b',' => {
                if let Some(level) = levels.last_mut().filter(|level| level.is_object) {
                    level.next = Next::Key;
                }
            }
            _ => {
                let string = at + 1..string_end(json, at + 1);
                at = string.end;
                match (next, levels.last_mut()) {
                    (Next::Key, Some(level)) => level.next = level.value_of(&json[string]),
                    (Next::Medium, _) => found(string),
                    _ => {}
                }
            }
        }
        at += 1;
    }
}

/// Where a string that begins here ends: its closing quote.
fn string_end(json: &str, start: usize) -> usize {
    let bytes = json.as_bytes();
    let mut at = start;
    while let Some(next) = memchr::memchr2(b'"', b'\\', &bytes[at..]) {
        at += next;
        if bytes[at] == b'"' {
            return at;
        }
        at += 2;
    }
    bytes.len()
}

/// The blobs that messages name, each once, in the order in which they first do.
#[must_use]
pub fn named_in(messages: &str) -> Vec<BlobDigest> {
    if memmem::find(messages.as_bytes(), b"\"forebay:").is_none() {
        return Vec::new();
    }
    let (mut seen, mut named) = (HashSet::new(), Vec::new());
    media_strings(messages, |string| {
        let digest: Option<BlobDigest> = messages[string].strip_prefix(SCHEME).and_then(|text| text.parse().ok());
        named.extend(digest.filter(|digest| seen.insert(*digest)));
    });
    named
}

/// Bytes that a message had as a data URL, which are stored as an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inline {
    pub digest: BlobDigest,
    pub media_type: String,
    pub body: Bytes,
}

/// The data URLs (RFC 2397) in the places of media in messages, each once, and the messages with the addresses of what
/// will be uploads. None if there are none. What is no data URL in base64 stays as it is, and so does one that is shorter
/// than an address, so that messages never grow.
///
/// A group whose rollouts have the same image stores it once, and no trainer reads it as text.
pub fn take_inline(messages: &str, memory: &mut Memory<'_>) -> Result<Option<(String, Vec<Inline>)>, NoMemory> {
    if memmem::find(messages.as_bytes(), b"\"data:").is_none() {
        return Ok(None);
    }
    // All of it is asked for at once: their bytes, and the text of the messages anew.
    let (mut count, mut bytes) = (0, 0);
    media_strings(messages, |string| {
        if let Some((_, text)) = data_url(&messages[string]) {
            (count, bytes) = (count + 1, bytes + text.len() / 4 * 3);
        }
    });
    if count == 0 {
        return Ok(None);
    }
    if !memory(bytes + messages.len()) {
        return Err(NoMemory);
    }
    let (mut rest, mut rewritten) = (0, String::with_capacity(messages.len()));
    let mut found: BTreeMap<BlobDigest, Inline> = BTreeMap::new();
    media_strings(messages, |string| {
        let Some(inline) = data_url(&messages[string.clone()]).and_then(decoded) else { return };
        rewritten.push_str(&messages[rest..string.start]);
        rewritten.push_str(SCHEME);
        rewritten.push_str(&inline.digest.to_string());
        rest = string.end;
        found.entry(inline.digest).or_insert(inline);
    });
    if found.is_empty() {
        return Ok(None);
    }
    rewritten.push_str(&messages[rest..]);
    Ok(Some((rewritten, found.into_values().collect())))
}

/// The media type with its parameters and the base64 of a data URL, as they are in JSON.
fn data_url(string: &str) -> Option<(&str, &str)> {
    let is_long = string.len() >= SCHEME.len() + 2 * size_of::<BlobDigest>();
    let (media_type, text) = string.strip_prefix("data:").filter(|_| is_long)?.split_once(',')?;
    Some((media_type.strip_suffix(";base64")?, text))
}

fn decoded((media_type, text): (&str, &str)) -> Option<Inline> {
    let [media_type, text] = [media_type, text].map(unescaped);
    let media_type = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let body = BASE64.decode(text.as_bytes()).ok()?;
    let is_allowed =
        !body.is_empty() && body.len() as u64 <= MEDIA_BYTES_MAX && media_type.len() <= MEDIA_TYPE_BYTES_MAX;
    let digest = BlobDigest(*blake3::hash(&body).as_bytes());
    is_allowed.then(|| Inline { digest, media_type, body: body.into() })
}

/// What a string in JSON stands for. Some encoders escape slashes, others the plus sign.
fn unescaped(text: &str) -> Cow<'_, str> {
    if !text.contains('\\') {
        return Cow::Borrowed(text);
    }
    serde_json::from_str(&format!("\"{text}\"")).map_or(Cow::Borrowed(text), Cow::Owned)
}

/// Padding may be missing.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_urls_become_addresses() {
        let (image, sound): (Vec<u8>, Vec<u8>) = ((0..100).collect(), (155..=255).collect());
        let of = |bytes: &[u8]| BlobDigest(*blake3::hash(bytes).as_bytes());
        let url = |kind: &str, bytes: &[u8]| format!("data:{kind};base64,{}", BASE64.encode(bytes));
        let (image_url, sound_url) = (url("image/PNG", &image), url("audio/wav;rate=1", &sound));
        let messages = |image: &str, sound: &str| {
            serde_json::json!([
                {"role": "user", "content": [
                    {"type": "image_url", "image_url": {"url": image}},
                    {"type": "text", "text": image_url},
                    {"audio": sound},
                    {"image": image.trim_end_matches('=')},
                    {"url": "data:text/plain,plain"},
                    {"url": "data:image/png;base64,?"},
                    {"url": "data:image/png;base64,"},
                ]},
            ])
            .to_string()
        };
        let sent = messages(&image_url, &sound_url);
        let expected = messages(&format!("{SCHEME}{}", of(&image)), &format!("{SCHEME}{}", of(&sound)));
        let mut taken = 0;
        let mut memory = |bytes| {
            taken += bytes;
            true
        };
        let (rewritten, found) = take_inline(&sent, &mut memory).expect("there is memory").expect("there are two");
        assert_eq!(rewritten, expected);
        let inline = |media_type: &str, bytes: &[u8]| Inline {
            digest: of(bytes),
            media_type: media_type.to_owned(),
            body: Bytes::copy_from_slice(bytes),
        };
        let mut both = vec![inline("image/png", &image), inline("audio/wav", &sound)];
        both.sort_by_key(|inline| inline.digest);
        assert_eq!(found, both);
        assert!((sent.len()..sent.len() + 400).contains(&taken), "{taken}");
        for (plain, escaped) in [("/", "\\/"), ("+", "\\u002B")] {
            let (rewritten, again) = take_inline(&sent.replace(plain, escaped), &mut |_| true)
                .expect("there is memory")
                .expect("there are two");
            assert_eq!(rewritten.replace(escaped, plain), expected);
            assert_eq!(again, both, "{escaped}");
        }
        let short = serde_json::json!([{"image": "data:image/png;base64,QUJD"}]).to_string();
        assert_eq!(take_inline(&short, &mut |_| true), Ok(None));
        assert_eq!(take_inline(&sent, &mut |_| false), Err(NoMemory));
        assert_eq!(take_inline(&expected, &mut |_| false), Ok(None));
    }

    #[test]
    fn only_the_address_of_a_medium_names_a_blob() {
        let of = |byte: u8| BlobDigest([byte; 32]);
        let url = |byte: u8| format!("{SCHEME}{}", of(byte));
        let messages = serde_json::json!([
            {"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": url(1)}},
                {"type": "image", "image": url(2)},
                {"type": "image_url", "image_url": {"detail": "low", "url": url(1)}},
                {"type": "video", "video": [url(3), url(4)], "fps": [1, {"a": url(9)}]},
                {"type": "image_url", "image_url": url(5)},
                {"type": "text", "text": url(9)},
                {"type": "text", "text": format!("{{\"url\": \"{}\"}}", url(9))},
                {"type": "image_url", "image_url": {"url": "forebay:0123"}},
                {"type": "tool_use", "input": {"url": url(9), "list": [{"image": url(9)}]}, "image": url(6)},
                {"type": "tool_result", "content": [{"image": url(7)}]},
                {"a\"b\\": [], "image": url(8)},
            ]},
            {"role": "assistant", "content": url(9), "tool_calls": [{"function": {"arguments": {"url": url(9)}}}]},
            {"role": "url", "content": "image", "text": [url(9)]},
        ]);
        let expected: Vec<_> = (1..=8).map(of).collect();
        assert_eq!(named_in(&messages.to_string()), expected);
        let pretty = serde_json::to_string_pretty(&messages).expect("it is JSON");
        assert_eq!(named_in(&pretty), expected);
        for nothing in ["[]", "[\"forebay:\"]", "\"forebay:\""] {
            assert_eq!(named_in(nothing), []);
        }
    }
}
