//! The ids of a text, in pieces.
//!
//! The library holds hundreds of bytes for each word of a text until all of it is encoded, and a tokenizer may take each
//! digit for a word. So a long text is encoded a few words at a time, and encoding stops when there are too many ids. The
//! words of a piece that lie well before its end are the words of the whole text, because tokenizers look only a little
//! ahead. A tokenizer for which that is not true is found out when it is loaded. The memory for a piece is asked for before
//! the piece is encoded.

use tokenizers::{Model as _, OffsetReferential, OffsetType, PreTokenizer as _, Tokenizer};

use super::error::ExactError;
use crate::cancel::Cancellation;

/// The bytes of a piece. Its words take a few MiB.
const PIECE_BYTES: usize = 16 << 10;

/// The most bytes of a text that has to be encoded at once: a word, or any text if the tokenizer has no words.
const WHOLE_BYTES_MAX: usize = 512 << 10;

/// What a byte that is encoded costs in a budget. It takes at most eight times as much memory, if each byte is a word, as
/// the values of a body do.
const ENCODED_BYTE_PRICE: usize = 48;

/// How far tokenizers look ahead, besides the longest token that is found before the words are. They look one character
/// ahead.
const LOOK_AHEAD_BYTES: usize = 64;

/// What the ids of a prompt may take.
#[derive(Clone, Copy)]
pub struct Bounds<'a> {
    /// How many ids there may be. What is behind them is not encoded.
    pub tokens_max: usize,
    /// Whether anybody waits for them.
    pub cancellation: &'a Cancellation,
    /// Takes memory until so many bytes are taken. Returns false if there are not as many.
    pub memory: &'a dyn Fn(usize) -> bool,
}

impl<'a> Bounds<'a> {
    /// No bounds.
    #[must_use]
    pub fn none(cancellation: &'a Cancellation) -> Self {
        Self { tokens_max: usize::MAX, cancellation, memory: &|_| true }
    }
}

/// A tokenizer that encodes in pieces.
#[derive(Debug)]
pub(super) struct Encoder {
    tokenizer: Tokenizer,
    /// The words that begin in the last bytes of a piece may be others in the whole text. `None` if the tokenizer encodes
    /// pieces in another way than the whole.
    margin: Option<usize>,
    /// Whether it divides texts at spaces.
    has_words: bool,
}

impl Encoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Result<Self, ExactError> {
        let added = tokenizer.get_added_tokens_decoder();
        let longest = added.values().map(|token| token.content.len()).max().unwrap_or(0);
        let mut encoder = Self { tokenizer, margin: Some(longest + LOOK_AHEAD_BYTES), has_words: false };
        let special = added.values().map(|token| token.content.as_str()).take(4).collect::<Vec<_>>().concat();
        let words = "It's 12345.678  e\u{301}\u{e9} \u{6771}\u{4eac} fn main() {\n\n\tlet x_1 = \"a\";\r\n}\u{1f642} ";
        let sample = format!("{words}{special}").repeat(1 + 16 * encoder.piece_min() / words.len());
        let never = Cancellation::default();
        if encoder.in_pieces(&sample, encoder.piece_min(), &Bounds::none(&never))? != encoder.at_once(&sample)? {
            encoder.margin = None;
        }
        encoder.has_words = encoder.words(&"a word ".repeat(encoder.piece_min()), &mut Vec::new())? > 0;
        Ok(encoder)
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The ids of a text.
    pub(super) fn encode(&self, text: &str, bounds: &Bounds<'_>) -> Result<Vec<i32>, ExactError> {
        self.in_pieces(text, PIECE_BYTES.max(self.piece_min()), bounds)
    }

    fn piece_min(&self) -> usize {
        4 * self.margin.unwrap_or_default()
    }

    fn in_pieces(&self, text: &str, piece_bytes: usize, bounds: &Bounds<'_>) -> Result<Vec<i32>, ExactError> {
        let (mut ids, mut rest, mut bytes) = (Vec::new(), text, piece_bytes);
        while !rest.is_empty() {
            if bounds.cancellation.is_cancelled() {
                return Err(ExactError::Cancelled);
            }
            let piece = &rest[..rest.floor_char_boundary(bytes)];
            if !(bounds.memory)(ENCODED_BYTE_PRICE * piece.len()) {
                return Err(ExactError::NoMemory);
            }
            let encoded = if piece.len() == rest.len() {
                ids.extend(self.at_once(piece)?);
                piece.len()
            } else {
                self.words(piece, &mut ids)?
            };
            if ids.len() > bounds.tokens_max {
                return Err(ExactError::TooManyTokens { tokens_max: bounds.tokens_max });
            }
            rest = &rest[encoded..];
            bytes = if encoded > 0 { piece_bytes } else { 2 * bytes };
            if bytes > WHOLE_BYTES_MAX.max(piece_bytes) {
                return Err(if self.has_words {
                    ExactError::LongWord { bytes_max: WHOLE_BYTES_MAX }
                } else {
                    ExactError::LongText { bytes_max: WHOLE_BYTES_MAX }
                });
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
        let mut file = forebay_fake_engine::tokenizer::file();
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
            let never = Cancellation::default();
            let bounds = Bounds::none(&never);
            let pieces = encoder.in_pieces(&text, encoder.piece_min(), &bounds).expect("it can be encoded");
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

    fn encode(encoder: &Encoder, text: &str, tokens_max: usize) -> Result<Vec<i32>, ExactError> {
        encoder.encode(text, &Bounds { tokens_max, ..Bounds::none(&Cancellation::default()) })
    }

    #[test]
    fn encoding_stops_when_there_are_too_many_tokens() {
        let encoder = qwen();
        let digits = "7".repeat(1 << 17);
        assert_eq!(encode(&encoder, &digits, 1 << 17).expect("it fits").len(), 1 << 17);
        let refused = encode(&encoder, &digits, 1_000).expect_err("there are more tokens");
        assert!(matches!(refused, ExactError::TooManyTokens { tokens_max: 1_000 }), "{refused}");
        // The rest was not looked at.
        let text = digits + &"a".repeat(2 * WHOLE_BYTES_MAX);
        let refused = encode(&encoder, &text, 1_000).expect_err("too many");
        assert!(matches!(refused, ExactError::TooManyTokens { .. }), "{refused}");
    }

    #[test]
    fn memory_is_taken_for_the_longest_piece_before_it_is_encoded() {
        let encoder = qwen();
        let never = Cancellation::default();
        let encode = |text: &str, room: usize| {
            let most = std::cell::Cell::new(0);
            let memory = |bytes: usize| {
                most.set(bytes.max(most.get()));
                bytes <= room
            };
            encoder.encode(text, &Bounds { memory: &memory, ..Bounds::none(&never) }).map(|_| most.get())
        };
        let piece = ENCODED_BYTE_PRICE * PIECE_BYTES;
        assert_eq!(encode("a word", usize::MAX).expect("there is room"), 6 * ENCODED_BYTE_PRICE);
        assert_eq!(encode(&"a word ".repeat(PIECE_BYTES), piece).expect("there is room"), piece);
        let word = "a".repeat(PIECE_BYTES + 1);
        assert_eq!(encode(&word, usize::MAX).expect("there is room"), ENCODED_BYTE_PRICE * word.len());
        let refused = encode(&word, piece).expect_err("the word needs more than a piece");
        assert!(matches!(refused, ExactError::NoMemory), "{refused}");
    }

    #[test]
    fn a_word_that_would_take_much_memory_is_refused() {
        let word = "a".repeat(WHOLE_BYTES_MAX + 1);
        let refused = encode(&qwen(), &word, usize::MAX).expect_err("it is one word");
        assert!(refused.to_string().contains("divide it with spaces"), "{refused}");
    }

    #[test]
    fn a_text_that_a_tokenizer_without_words_cannot_encode_is_refused_with_another_way_out() {
        let encoder = encoder(&Value::Null, &Value::Null);
        // It divides texts at its special tokens, as they stand between messages.
        let message = "a word ".repeat(WHOLE_BYTES_MAX / 8);
        let messages = format!("{message}<|im_end|>{message}<|im_end|>{message}");
        assert!(!encode(&encoder, &messages, usize::MAX).expect("each text is short").is_empty());
        let refused = encode(&encoder, &message.repeat(2), usize::MAX).expect_err("the text is long");
        assert!(refused.to_string().contains("several messages"), "{refused}");
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
        assert_eq!(encode(&encoder, &text, usize::MAX).expect("it fits"), encoder.at_once(&text).expect("it fits"));
    }
}
