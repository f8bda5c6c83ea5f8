//! How the models of a family end an answer.

use tokenizers::Tokenizer;

use super::error::ExactError;

/// The tokens that end an answer, and what belongs between an answer and the next message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// Tokens that end an answer.
    pub stops: Vec<String>,
    /// The token with which the template closes a message. If an answer ends without it, it is appended. `None` if
    /// messages only have an opening token.
    pub close: Option<String>,
    /// Tokens that end an answer but have no place in the conversation, or open the next message. What the template
    /// writes replaces them.
    pub trims: Vec<String>,
}

impl Family {
    /// The family with this name: `qwen`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        (name == "qwen").then(Self::qwen)
    }

    /// Qwen 2.5 and 3, and others with the same form of messages.
    #[must_use]
    pub fn qwen() -> Self {
        Self {
            stops: vec!["<|im_end|>".to_owned(), "<|endoftext|>".to_owned()],
            close: Some("<|im_end|>".to_owned()),
            trims: vec!["<|endoftext|>".to_owned()],
        }
    }
}

/// The ids of a family's tokens in one tokenizer.
#[derive(Clone, Debug)]
pub(super) struct FamilyIds {
    pub(super) family: Family,
    pub(super) stops: Vec<i32>,
    pub(super) close: Option<i32>,
    pub(super) trims: Vec<i32>,
}

impl FamilyIds {
    pub(super) fn new(family: &Family, tokenizer: &Tokenizer) -> Result<Self, ExactError> {
        if family.close.is_none() && family.trims.is_empty() {
            return Err(ExactError::Options("the family needs `close` or `trims`".to_owned()));
        }
        let id = |token: &String| match tokenizer.token_to_id(token) {
            Some(id) => Ok(id as i32),
            None => Err(ExactError::Options(format!("the tokenizer has no token {token:?}, which the family names"))),
        };
        Ok(Self {
            family: family.clone(),
            stops: family.stops.iter().map(id).collect::<Result<_, _>>()?,
            close: family.close.as_ref().map(id).transpose()?,
            trims: family.trims.iter().map(id).collect::<Result<_, _>>()?,
        })
    }

    /// Whether a text has a token that ends a message.
    pub(super) fn ends_message(&self, text: &str) -> bool {
        self.end_of_message(text).is_some()
    }

    /// Where the end of a message begins in a text that begins inside of it.
    pub(super) fn end_of_message(&self, text: &str) -> Option<usize> {
        match &self.family.close {
            Some(close) => text.find(close.as_str()),
            None => self.family.trims.iter().filter_map(|token| text.find(token.as_str())).min(),
        }
    }
}
