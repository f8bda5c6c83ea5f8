//! A tokenizer of bytes, a few merges and a few special tokens.
//!
//! A text has one spelling that [`encode`] writes, and others that a model may sample: `t`, `h` as two ids, or as the
//! one of `th`. So a turn that is decoded and encoded again may come back as other ids, as with real tokenizers.

use serde_json::{Value, json};

/// Opens a message.
pub const IM_START: i32 = 256;
/// Closes a message. It ends an answer.
pub const IM_END: i32 = 257;

/// The texts of the special tokens, from id 256 on.
const SPECIAL: [&str; 6] = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"];

/// The id of the first merge. Special tokens end before it.
const FIRST_MERGE: i32 = 270;

/// Pairs that become one token, the first ones first. The last ones make the ids of JSON depend on its spaces.
const MERGES: [(&str, &str); 14] = [
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("e", "r"),
    ("l", "l"),
    ("o", "n"),
    ("a", "n"),
    (" ", "the"),
    ("in", "g"),
    ("{", "\""),
    ("\"", ":"),
    ("\":", " "),
    ("\": ", "\""),
    ("\"", "}"),
];

/// The number of ids. Those between the special tokens and the merges have no text.
pub const VOCABULARY: i32 = FIRST_MERGE + MERGES.len() as i32;

/// The ids of a text in its usual spelling. Special tokens are recognised.
#[must_use]
pub fn encode(text: &str) -> Vec<i32> {
    pieces(text).flat_map(|piece| piece.map_or_else(|id| vec![id], merged)).collect()
}

/// The ids of a text in single bytes. Special tokens are recognised.
#[must_use]
pub fn encode_bytes(text: &str) -> Vec<i32> {
    pieces(text).flat_map(|piece| piece.map_or_else(|id| vec![id], bytes)).collect()
}

/// The text of ids. What is no UTF-8 becomes replacement characters.
#[must_use]
pub fn decode(ids: &[i32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| text(id)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The bytes of one id.
#[must_use]
pub fn text(id: i32) -> Vec<u8> {
    let special = usize::try_from(id - IM_START).ok().and_then(|place| SPECIAL.get(place));
    let merge = usize::try_from(id - FIRST_MERGE).ok().and_then(|place| MERGES.get(place));
    match (u8::try_from(id), special, merge) {
        (Ok(byte), _, _) => vec![byte],
        (_, Some(special), _) => special.as_bytes().to_vec(),
        (_, _, Some((left, right))) => format!("{left}{right}").into_bytes(),
        _ => Vec::new(),
    }
}

/// The same tokenizer as a file `tokenizer.json`, which writes the same ids.
#[must_use]
pub fn file() -> Value {
    let mut vocabulary: serde_json::Map<String, Value> =
        (0..=255_u8).map(|byte| (visible(&[byte]), json!(byte))).collect();
    // The library gives other ids to added tokens that the model does not have.
    vocabulary.extend((IM_START..).zip(SPECIAL).map(|(id, token)| (token.to_owned(), json!(id))));
    let merges = (FIRST_MERGE..).zip(MERGES);
    vocabulary.extend(merges.map(|(id, (left, right))| (visible(format!("{left}{right}").as_bytes()), json!(id))));
    let merges = MERGES.map(|(left, right)| [visible(left.as_bytes()), visible(right.as_bytes())]);
    // The tokens of messages have no text for agents, those of reasoning and tool calls have.
    let added = (IM_START..).zip(SPECIAL).map(|(id, token)| {
        json!({
            "id": id, "content": token, "special": id <= IM_END,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        })
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Value>(),
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges,
        },
    })
}

/// The file `tokenizer_config.json` beside it.
#[must_use]
pub fn config() -> Value {
    json!({"eos_token": SPECIAL[(IM_END - IM_START) as usize]})
}

/// Bytes as such files write them: each byte is a visible character.
fn visible(bytes: &[u8]) -> String {
    let is_visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let hidden: Vec<u8> = (0..=255).filter(|byte| !is_visible(byte)).collect();
    let character = |byte: &u8| match hidden.iter().position(|hidden| hidden == byte) {
        Some(place) => char::from_u32(256 + place as u32).unwrap_or_default(),
        None => char::from(*byte),
    };
    bytes.iter().map(character).collect()
}

/// The text cut at special tokens: their ids, and what lies between.
fn pieces(text: &str) -> impl Iterator<Item = Result<&str, i32>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let found = SPECIAL.iter().enumerate().filter_map(|(place, special)| Some((rest.find(special)?, place)));
        match found.min() {
            Some((0, place)) => {
                rest = &rest[SPECIAL[place].len()..];
                Some(Err(IM_START + place as i32))
            }
            Some((start, _)) => {
                let (before, behind) = rest.split_at(start);
                rest = behind;
                Some(Ok(before))
            }
            None => Some(Ok(std::mem::take(&mut rest))),
        }
    })
}

fn bytes(text: &str) -> Vec<i32> {
    text.bytes().map(i32::from).collect()
}

fn merged(piece: &str) -> Vec<i32> {
    let mut ids = bytes(piece);
    for (place, (left, right)) in MERGES.iter().enumerate() {
        let merge = FIRST_MERGE + place as i32;
        let mut next = Vec::with_capacity(ids.len());
        let mut index = 0;
        while index < ids.len() {
            let pair = index + 1 < ids.len() && is(ids[index], left) && is(ids[index + 1], right);
            next.push(if pair { merge } else { ids[index] });
            index += if pair { 2 } else { 1 };
        }
        ids = next;
    }
    ids
}

fn is(id: i32, expected: &str) -> bool {
    text(id) == expected.as_bytes()
}
