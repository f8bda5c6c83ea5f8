//! Texts of JSON that no text of Rust, Arrow or a database can hold.

use std::borrow::Cow;

/// JSON in which every half of a surrogate pair that stands alone is U+FFFD.
///
/// Python writes such an escape, e.g. `"caf\udce9"`, for a byte that is not UTF-8. It is no character, so a parser refuses
/// the whole document because of it. Other bytes are not changed, and JSON without such an escape is not copied.
#[must_use]
pub fn replace_lone_surrogates(json: &str) -> Cow<'_, str> {
    let unit = |at: usize| u16::from_str_radix(json.get(at..at + 6)?.strip_prefix("\\u")?, 16).ok();
    let next = |at: usize| Some(at + json.as_bytes().get(at..)?.iter().position(|&byte| byte == b'\\')?);
    let (mut replaced, mut copied, mut at) = (String::new(), 0, 0);
    while let Some(found) = next(at) {
        at = match (unit(found), unit(found + 6)) {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => found + 12,
            (Some(0xD800..=0xDFFF), _) => {
                replaced.extend([&json[copied..found], "\\ufffd"]);
                copied = found + 6;
                copied
            }
            // An escape of one character: the second backslash of `\\` begins none.
            _ => found + 2,
        };
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    replaced.push_str(&json[copied..]);
    Cow::Owned(replaced)
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
            assert!(serde_json::from_str::<String>(expected).is_ok(), "{expected}");
        }
        for json in [r#""\\udce9 \\\\ud83d \n""#, r#"{"a":"\u00e9\ud83d\ude00"}"#, r#""\ud"#, "\"\\", "\"\\é\""] {
            assert!(matches!(replace_lone_surrogates(json), Cow::Borrowed(same) if same == json), "{json}");
        }
    }
}
