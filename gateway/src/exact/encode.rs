//! The ids of a text, in pieces.
//!
//! The library holds hundreds of bytes for each word of a text until all of it is encoded, and a tokenizer may take each
//! digit for a word. So a long text is encoded a few words at a time, and encoding stops when there are too many ids. The
//! words of a piece that lie well before its end are the words of the whole text, because tokenizers look only a little
//! ahead. A tokenizer for which that is not true is found out when it is loaded.

use tokenizers::{Model as _, OffsetReferential, OffsetType, PreTokenizer as _, Tokenizer};

use super::ExactError;
use crate::cancel::Cancellation;

/// The bytes of a piece. Its words take a few MiB.
const PIECE_BYTES: usize = 16 << 10;

/// The most bytes of a text that has to be encoded at once: a word, or any text if the tokenizer has no words. It takes
/// about 90 times as many bytes of memory.
const WHOLE_BYTES_MAX: usize = 512 << 10;

/// How far tokenizers look ahead, besides the longest token that is found before the words are. They look one character
/// ahead.
const LOOK_AHEAD_BYTES: usize = 64;

/// A tokenizer that encodes in pieces.
#[derive(Debug)]
pub(super) struct Encoder {
    tokenizer: Tokenizer,
    /// The words that begin in the last bytes of a piece may be others in the whole text. `None` if the tokenizer encodes
    /// pieces in another way than the whole.
    margin: Option<usize>,
}

impl Encoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Result<Self, ExactError> {
        let added = tokenizer.get_added_tokens_decoder();
        let longest = added.values().map(|token| token.content.len()).max().unwrap_or(0);
        let mut encoder = Self { tokenizer, margin: Some(longest + LOOK_AHEAD_BYTES) };
        let special = added.values().map(|token| token.content.as_str()).take(4).collect::<Vec<_>>().concat();
        let words = "It's 12345.678  e\u{301}\u{e9} \u{6771}\u{4eac} fn main() {\n\n\tlet x_1 = \"a\";\r\n}\u{1f642} ";
        let sample = format!("{words}{special}").repeat(1 + 16 * encoder.piece_min() / words.len());
        if encoder.in_pieces(&sample, encoder.piece_min(), usize::MAX, &Cancellation::default())?
            != encoder.at_once(&sample)?
        {
            encoder.margin = None;
        }
        Ok(encoder)
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The ids of a text. Fails if there are more than `ids_max`.
    pub(super) fn encode(
        &self,
        text: &str,
        ids_max: usize,
        cancellation: &Cancellation,
    ) -> Result<Vec<i32>, ExactError> {
        self.in_pieces(text, PIECE_BYTES.max(self.piece_min()), ids_max, cancellation)
    }

    fn piece_min(&self) -> usize {
        4 * self.margin.unwrap_or_default()
    }

    fn in_pieces(
        &self,
        text: &str,
        piece_bytes: usize,
        ids_max: usize,
        cancellation: &Cancellation,
    ) -> Result<Vec<i32>, ExactError> {
        let (mut ids, mut rest, mut bytes) = (Vec::new(), text, piece_bytes);
        while !rest.is_empty() {
            if cancellation.is_cancelled() {
                return Err(ExactError::Cancelled);
            }
            let piece = &rest[..rest.floor_char_boundary(bytes)];
            let encoded = if piece.len() == rest.len() {
                ids.extend(self.at_once(piece)?);
                piece.len()
            } else {
                self.words(piece, &mut ids)?
            };
            if ids.len() > ids_max {
                return Err(ExactError::TooManyTokens { tokens_max: ids_max });
            }
            rest = &rest[encoded..];
            bytes = if encoded > 0 { piece_bytes } else { 2 * bytes };
            if bytes > WHOLE_BYTES_MAX.max(piece_bytes) {
                return Err(ExactError::Indivisible { bytes_max: WHOLE_BYTES_MAX });
            }
        }
        Ok(ids)
    }

    /// Adds the ids of the words of a piece that are words of the whole text, and returns how many bytes these have.
    fn words(&self, piece: &str, ids: &mut Vec<i32>) -> Result<usize, ExactError> {
        let Some(end) = self.margin.and_then(|margin| piece.len().checked_sub(margin)) else { return Ok(0) };
        let tokenizer = &self.tokenizer;
        let mut words = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), piece);
        if let Some(divider) = tokenizer.get_pre_tokenizer() {
            divider.pre_tokenize(&mut words).map_err(refused)?;
        }
        let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let is_known = |(_, (start, _), _): &(&str, (usize, usize), _)| *start <= end && piece.is_char_boundary(*start);
        let Some(last) = words.iter().rposition(is_known) else { return Ok(0) };
        for (word, _, token) in &words[..last] {
            if let Some(tokens) = token {
                ids.extend(tokens.iter().map(|token| token.id as i32));
            } else {
                let tokens = tokenizer.get_model().tokenize(word).map_err(refused)?;
                ids.extend(tokens.iter().map(|token| token.id as i32));
            }
        }
        let (_, (start, _), _) = words[last];
        Ok(start)
    }

    fn at_once(&self, text: &str) -> Result<Vec<i32>, ExactError> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(refused)?;
        Ok(encoding.get_ids().iter().map(|&id| id as i32).collect())
    }
}

#[expect(clippy::needless_pass_by_value, reason = "errors are mapped by value")]
fn refused(error: tokenizers::Error) -> ExactError {
    ExactError::Encode(error.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// How Qwen divides texts into words. Each digit is one.
    const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    /// A tokenizer of bytes and a few merges.
    fn encoder(pre_tokenizer: &Value, normalizer: &Value) -> Encoder {
        let mut file = crate::engine::tokenizer::file();
        file["pre_tokenizer"] = pre_tokenizer.clone();
        file["normalizer"] = normalizer.clone();
        Encoder::new(file.to_string().parse().expect("the file is a tokenizer")).expect("the sample can be encoded")
    }

    fn qwen() -> Encoder {
        let split = json!({"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        encoder(&json!({"type": "Sequence", "pretokenizers": [split, bytes]}), &json!({"type": "NFC"}))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pieces_have_the_ids_of_the_whole(parts in proptest::collection::vec(part(), 1..400)) {
            let encoder = qwen();
            prop_assert!(encoder.margin.is_some());
            let text = parts.concat();
            let pieces = encoder.in_pieces(&text, encoder.piece_min(), usize::MAX, &Cancellation::default()).expect("it can be encoded");
            prop_assert_eq!(pieces, encoder.at_once(&text).expect("it can be encoded"));
        }
    }

    fn part() -> impl Strategy<Value = String> {
        let words = [
            "the",
            " the",
            "thing",
            "12345",
            "  \n",
            "\r\n\r\n",
            "\t",
            "                ",
            "<|im_start|>",
            "<|im_",
            "start|>",
            "'ll",
            "\u{e9}",
            "e\u{301}",
            "\u{301}",
            "\u{6771}\u{4eac}",
            "{\"a\": 1.0}",
            "\u{1f642}",
            "----",
            "<think>",
        ];
        (proptest::sample::select(words.to_vec()), 1_usize..20).prop_map(|(word, times)| word.repeat(times))
    }

    #[test]
    fn encoding_stops_when_there_are_too_many_tokens() {
        let encoder = qwen();
        let never = Cancellation::default();
        let digits = "7".repeat(1 << 17);
        assert_eq!(encoder.encode(&digits, 1 << 17, &never).expect("it fits").len(), 1 << 17);
        let refused = encoder.encode(&digits, 1_000, &never).expect_err("there are more tokens");
        assert!(matches!(refused, ExactError::TooManyTokens { tokens_max: 1_000 }), "{refused}");
        // The rest was not looked at.
        let refused =
            encoder.encode(&(digits + &"a".repeat(2 * WHOLE_BYTES_MAX)), 1_000, &never).expect_err("too many");
        assert!(matches!(refused, ExactError::TooManyTokens { .. }), "{refused}");
    }

    #[test]
    fn a_word_that_would_take_much_memory_is_refused() {
        let refused = qwen()
            .encode(&"a".repeat(WHOLE_BYTES_MAX + 1), usize::MAX, &Cancellation::default())
            .expect_err("it is one word");
        assert!(matches!(refused, ExactError::Indivisible { .. }), "{refused}");
    }

    #[test]
    fn a_tokenizer_whose_pieces_differ_encodes_the_whole() {
        // It begins each text with a space.
        let encoder = encoder(
            &json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            &Value::Null,
        );
        assert_eq!(encoder.margin, None);
        let text = "the thing, ".repeat(PIECE_BYTES);
        assert_eq!(
            encoder.encode(&text, usize::MAX, &Cancellation::default()).expect("it fits"),
            encoder.at_once(&text).expect("it fits")
        );
    }
}
