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

/// An array or an object on the way to a value.
struct Level {
    is_object: bool,
    /// Whether a key of an object is next, and not a value.
    wants_key: bool,
    /// The last key of the object, or the key that the array is the value of.
    holds_media: bool,
    is_written: bool,
}

/// The strings in the places of media, without their quotes.
fn media_strings(json: &str) -> Vec<Range<usize>> {
    let mut levels: Vec<Level> = Vec::new();
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(next) = json.as_bytes()[at..].iter().position(|byte| b"\"{}[],".contains(byte)) {
        at += next;
        let above = levels.last().map_or((false, false), |level| (level.holds_media, level.is_written));
        match json.as_bytes()[at] {
            b'{' => levels.push(Level { is_object: true, wants_key: true, holds_media: false, is_written: above.1 }),
            b'[' => {
                levels.push(Level { is_object: false, wants_key: false, holds_media: above.0, is_written: above.1 })
            }
            b'}' | b']' => drop(levels.pop()),
            b',' => {
                if let Some(level) = levels.last_mut() {
                    level.wants_key = level.is_object;
                }
            }
            _ => {
                let string = at + 1..string_end(json, at + 1);
                at = string.end;
                if let Some(level) = levels.last_mut() {
                    if level.wants_key {
                        let key = &json[string];
                        level.wants_key = false;
                        level.holds_media = MEDIA_KEYS.contains(&key);
                        // What is below a key is written if the object is, or the key says so.
                        let is_below = levels.len() > 1 && levels[levels.len() - 2].is_written;
                        let level = levels.last_mut().expect("it was just there");
                        level.is_written = is_below || WRITTEN_KEYS.contains(&key);
                    } else if level.holds_media && !level.is_written {
                        found.push(string);
                    }
                }
            }
        }
        at += 1;
    }
    found
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
    let mut seen = HashSet::new();
    let named =
        media_strings(messages).into_iter().filter_map(|string| messages[string].strip_prefix(SCHEME)?.parse().ok());
    named.filter(|digest| seen.insert(*digest)).collect()
}

/// Bytes that a message had as a data URL, which are stored as an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inline {
    pub digest: BlobDigest,
    pub media_type: String,
    pub body: Bytes,
}

/// The data URLs (RFC 2397) in the places of media in messages, each once, and the messages with the addresses of what
/// will be uploads. None if there are none. What is no data URL in base64 stays as it is.
///
/// A group whose rollouts have the same image stores it once, and no trainer reads it as text.
pub fn take_inline(messages: &str, memory: &mut Memory<'_>) -> Result<Option<(String, Vec<Inline>)>, NoMemory> {
    if memmem::find(messages.as_bytes(), b"\"data:").is_none() {
        return Ok(None);
    }
    let (mut rest, mut rewritten) = (0, String::new());
    let mut found: BTreeMap<BlobDigest, Inline> = BTreeMap::new();
    for string in media_strings(messages) {
        let url = &messages[string.clone()];
        let Some((media_type, text)) = url.strip_prefix("data:").and_then(|url| url.split_once(',')) else { continue };
        let Some(media_type) = media_type.strip_suffix(";base64") else { continue };
        // Its bytes, and the text of all messages anew.
        let so_far = if rewritten.is_empty() { messages.len() } else { 0 };
        if !memory(text.len() / 4 * 3 + so_far) {
            return Err(NoMemory);
        }
        let media_type = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        // Some encoders of JSON escape slashes.
        let text = if text.contains('\\') { Cow::Owned(text.replace("\\/", "/")) } else { Cow::Borrowed(text) };
        let Ok(body) = BASE64.decode(text.as_bytes()) else { continue };
        if body.is_empty() || body.len() as u64 > MEDIA_BYTES_MAX || media_type.len() > MEDIA_TYPE_BYTES_MAX {
            continue;
        }
        let digest = BlobDigest(*blake3::hash(&body).as_bytes());
        rewritten.push_str(&messages[rest..string.start]);
        rewritten.push_str(SCHEME);
        rewritten.push_str(&digest.to_string());
        rest = string.end;
        found.entry(digest).or_insert_with(|| Inline { digest, media_type, body: body.into() });
    }
    if found.is_empty() {
        return Ok(None);
    }
    rewritten.push_str(&messages[rest..]);
    Ok(Some((rewritten, found.into_values().collect())))
}

/// Padding may be missing.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(length: usize) -> Vec<u8> {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..length).map(|_| next()).collect()
    }

    #[test]
    fn data_urls_become_addresses() {
        let (image, sound) = (bytes(100), bytes(101));
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
        let mut found: Vec<_> =
            found.iter().map(|inline| (inline.digest, inline.media_type.as_str(), inline.body.to_vec())).collect();
        found.sort();
        let mut both = vec![(of(&image), "image/png", image), (of(&sound), "audio/wav", sound)];
        both.sort();
        assert_eq!(found, both);
        assert!((sent.len()..sent.len() + 400).contains(&taken), "{taken}");
        let escaped = sent.replace('/', "\\/");
        let (escaped, _) = take_inline(&escaped, &mut |_| true).expect("there is memory").expect("there are two");
        assert_eq!(escaped.replace("\\/", "/"), expected);
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
