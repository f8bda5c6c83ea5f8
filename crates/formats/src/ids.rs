//! Ids of records that have none: digests of their content, so that a second import finds the same ids.

/// The id of a document that names none: the name of the format and 128 bits of a digest of the JSON text. Blanks
/// between the tokens of the text do not count, so a document that was indented has the same id.
#[must_use]
pub fn digest_id(format: &str, text: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut kept = Vec::with_capacity(CHUNK_BYTES);
    for byte in without_blanks(text) {
        kept.push(byte);
        if kept.len() == CHUNK_BYTES {
            hasher.update(&kept);
            kept.clear();
        }
    }
    hasher.update(&kept);
    format!("{format}-{}", &hasher.finalize().to_hex()[..ID_HEX_CHARS])
}

/// JSON without the blanks between its tokens.
pub(crate) fn compact(json: &str) -> String {
    String::from_utf8(without_blanks(json.as_bytes()).collect()).expect("blanks are whole characters")
}

/// The bytes of JSON without the blanks between its tokens.
fn without_blanks(text: &[u8]) -> impl Iterator<Item = u8> {
    let (mut in_text, mut escaped) = (false, false);
    text.iter().copied().filter(move |&byte| {
        if in_text {
            in_text = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            return true;
        }
        in_text = byte == b'"';
        !byte.is_ascii_whitespace()
    })
}

/// How many bytes are hashed at a time.
const CHUNK_BYTES: usize = 16 << 10;

/// Hexadecimal digits of an id: 128 bits, so that two documents never have the same id by chance.
const ID_HEX_CHARS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_between_tokens_do_not_count() {
        let id = digest_id("atif", br#"{"a":"b \" c","d":[1,2]}"#);
        assert_eq!(id, digest_id("atif", b"{ \"a\" : \"b \\\" c\",\n  \"d\": [1, 2] }\r\n"));
        assert_ne!(id, digest_id("atif", br#"{"a":"b\" c","d":[1,2]}"#), "blanks in a text count");
        assert_ne!(id, digest_id("chat", br#"{"a":"b \" c","d":[1,2]}"#));
    }

    /// Ids are stored, so they must never change.
    #[test]
    fn ids_are_the_same_in_every_version() {
        assert_eq!(digest_id("atif", b"{\"steps\": []}"), GOLDEN);
    }

    const GOLDEN: &str = "atif-ad84c8f5330da101bd66c98002814441";
}
