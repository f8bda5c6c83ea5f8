//! Tokens to text, one token at a time.

use super::Text;

/// The text of a growing sequence.
///
/// A token's text may depend on the tokens before it, and a character may consist of several tokens. So each piece of
/// text is the difference between two decodings that begin a few tokens earlier.
#[derive(Debug, Default)]
pub(in super::super) struct TextStream {
    ids: Vec<i64>,
    /// Where the two decodings begin.
    start: usize,
    /// Number of tokens whose text was returned.
    told: usize,
}

impl TextStream {
    /// Adds a token, and returns the text that is complete with it.
    pub(in super::super) fn push(&mut self, text: &Text, id: i64) -> String {
        self.ids.push(id);
        let new = self.difference(text);
        // An incomplete character is decoded to the replacement character.
        if new.is_empty() || new.ends_with('\u{FFFD}') {
            return String::new();
        }
        (self.start, self.told) = (self.told, self.ids.len());
        new
    }

    /// Returns the text of tokens that did not complete a character.
    pub(in super::super) fn finish(&mut self, text: &Text) -> String {
        let rest = self.difference(text);
        self.told = self.ids.len();
        rest
    }

    fn difference(&self, text: &Text) -> String {
        let before = text.decode(&self.ids[self.start..self.told], true);
        let all = text.decode(&self.ids[self.start..], true);
        all.strip_prefix(&before).unwrap_or_default().to_owned()
    }
}
