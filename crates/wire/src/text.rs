//! Texts of JSON that no text of Rust, Arrow or a database can hold.

use std::borrow::Cow;

/// JSON in which every half of a surrogate pair that stands alone is U+FFFD.
///
/// Python writes such an escape, e.g. `"caf\udce9"`, for a byte that is not UTF-8. It is no character, so a parser refuses
/// the whole document because of it. Other bytes are not changed, and JSON without such an escape is not copied.
#[must_use]
pub fn replace_lone_surrogates(json: &str) -> Cow<'_, str> {
    if !has_lone_surrogates(json.as_bytes()) {
        return Cow::Borrowed(json);
    }
    let mut bytes = json.as_bytes().to_vec();
    replace_lone_surrogates_in(&mut bytes);
    Cow::Owned(String::from_utf8(bytes).expect("escapes of JSON are replaced by others"))
}

/// Whether JSON has such an escape.
#[must_use]
pub fn has_lone_surrogates(json: &[u8]) -> bool {
    next_lone_surrogate(json, 0).is_some()
}

/// Replaces such escapes in place.
pub fn replace_lone_surrogates_in(json: &mut [u8]) {
    let mut at = 0;
    while let Some(found) = next_lone_surrogate(json, at) {
        at = found + REPLACEMENT.len();
        json[found..at].copy_from_slice(REPLACEMENT);
    }
}

/// U+FFFD as an escape, which is as long as the escape that it replaces.
const REPLACEMENT: &[u8; 6] = b"\\ufffd";

/// The place of the next half of a pair behind a place at which no escape has begun.
fn next_lone_surrogate(json: &[u8], mut at: usize) -> Option<usize> {
    let unit = |at: usize| {
        let digits = json.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    loop {
        let found = at + json.get(at..)?.iter().position(|&byte| byte == b'\\')?;
        at = match (unit(found), unit(found + 6)) {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => found + 12,
            (Some(0xD800..=0xDFFF), _) => return Some(found),
            // An escape of one character: the second backslash of `\\` begins none.
            _ => found + 2,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_pairs_are_replaced_and_nothing_else() {
        for (json, expected) in [
            (r#""caf\udce9""#, r#""caf\ufffd""#),
            (r#""\uD83D\uDE00 \ud83d""#, r#""\uD83D\uDE00 \ufffd""#),
            (r#""\ud83d\ud83d\ude00é\udc00""#, r#""\ufffd\ud83d\ude00é\ufffd""#),
            (r#""\ude00\ud83d\n""#, r#""\ufffd\ufffd\n""#),
        ] {
            assert_eq!(replace_lone_surrogates(json), expected);
            let mut bytes = json.as_bytes().to_vec();
            replace_lone_surrogates_in(&mut bytes);
            assert_eq!(bytes, expected.as_bytes());
            assert!(serde_json::from_str::<String>(expected).is_ok(), "{expected}");
        }
        for json in [r#""\\udce9 \\\\ud83d \n""#, r#"{"a":"\u00e9\ud83d\ude00"}"#, r#""\ud"#, "\"\\", "\"\\é\""] {
            assert!(matches!(replace_lone_surrogates(json), Cow::Borrowed(same) if same == json), "{json}");
        }
    }
}
