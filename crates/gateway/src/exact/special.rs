//! Special tokens in the texts of agents.
//!
//! A tokenizer takes `<|im_end|>` for the token that ends a message, whoever wrote it: a web page that a tool has read can
//! end the message that it stands in and begin one of the system. To escape such a text, it is cut behind the first
//! character of the token, and both sides are encoded for themselves. So the model reads the same characters, and no
//! control token.
//!
//! The cuts are random marks, which are put into the texts as the template sees them, and are taken out of what it wrote.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
};

use tokenizers::Tokenizer;

use super::{error::ExactError, family::Family};
use crate::{
    template::{Author, Texts},
    upstream::SpecialTokensInText,
};

/// The special tokens of a tokenizer and of a family.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    policy: SpecialTokensInText,
    nodes: Vec<Node>,
    ids: BTreeSet<i32>,
}

/// A place in the tree of the bytes of all tokens.
#[derive(Debug, Default)]
struct Node {
    next: BTreeMap<u8, usize>,
    is_end: bool,
}

/// The texts of one prompt.
pub(super) struct Marked<'a> {
    tokens: &'a SpecialTokens,
    mark: String,
    in_messages: Cell<u64>,
    in_others: Cell<u64>,
    refused: RefCell<Option<(Author, String)>>,
}

impl SpecialTokens {
    pub(super) fn new(policy: SpecialTokensInText, tokenizer: &Tokenizer, family: &Family) -> Result<Self, ExactError> {
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.values().filter(|token| token.special).map(|token| token.content.as_str());
        let family = family.stops.iter().chain(&family.close).chain(&family.trims).map(String::as_str);
        let mut tokens = Self { policy, nodes: vec![Node::default()], ids: BTreeSet::new() };
        for token in special.chain(family).filter(|token| !token.is_empty()) {
            if policy != SpecialTokensInText::Allow && token.chars().nth(1).is_none() {
                let why =
                    format!("special_tokens_in_text: {token:?} has one character and cannot be cut; use \"allow\"");
                return Err(ExactError::Options(why));
            }
            tokens.add(token);
            tokens.ids.extend(tokenizer.token_to_id(token).map(|id| id as i32));
        }
        Ok(tokens)
    }

    fn add(&mut self, token: &str) {
        let mut at = 0;
        for byte in token.bytes() {
            let new = self.nodes.len();
            let next = *self.nodes[at].next.entry(byte).or_insert(new);
            if next == new {
                self.nodes.push(Node::default());
            }
            at = next;
        }
        self.nodes[at].is_end = true;
    }

    /// The length of the longest token with which a text begins. It takes as many steps as the longest token is long.
    fn at(&self, text: &str) -> Option<usize> {
        let (mut at, mut found) = (0, None);
        for (place, byte) in text.bytes().enumerate() {
            let Some(&next) = self.nodes[at].next.get(&byte) else { break };
            at = next;
            if self.nodes[at].is_end {
                found = Some(place + 1);
            }
        }
        found
    }

    /// How many tokens a text has, as the tokenizer finds them.
    fn count(&self, text: &str) -> usize {
        let (mut count, mut behind) = (0, 0);
        for (place, _) in text.char_indices() {
            if place >= behind
                && let Some(length) = self.at(&text[place..])
            {
                count += 1;
                behind = place + length;
            }
        }
        count
    }

    /// Prepares the texts of a prompt.
    pub(super) fn marked(&self) -> Marked<'_> {
        let mark = format!("cut{:032x}", rand::random::<u128>());
        Marked { tokens: self, mark, in_messages: Cell::new(0), in_others: Cell::new(0), refused: RefCell::default() }
    }

    /// Encodes what a template wrote. `encode` gets a text and how many ids stand before it.
    pub(super) fn encode(
        &self,
        marked: &Marked<'_>,
        text: &str,
        encode: impl Fn(&str, usize) -> Result<Vec<i32>, ExactError>,
    ) -> Result<Vec<i32>, ExactError> {
        if self.policy == SpecialTokensInText::Allow {
            return encode(text, 0);
        }
        let (mut ids, mut of_template) = (Vec::new(), 0);
        for piece in text.split(&marked.mark) {
            of_template += self.count(piece);
            let encoded = encode(piece, ids.len())?;
            ids.extend(encoded);
        }
        // What a normalizer makes of a text is seen only in the ids.
        if ids.iter().filter(|id| self.ids.contains(id)).count() > of_template {
            let why = "a text becomes a special token when it is normalized, and cannot be escaped";
            return Err(ExactError::SpecialToken(why.to_owned()));
        }
        Ok(ids)
    }
}

impl Marked<'_> {
    /// How many special tokens the messages have.
    pub(super) fn in_messages(&self) -> u64 {
        self.in_messages.get()
    }

    /// How many all texts have.
    pub(super) fn in_all(&self) -> u64 {
        self.in_messages.get() + self.in_others.get()
    }

    /// Fails if a text may not have the tokens that it has.
    pub(super) fn check(&self) -> Result<(), ExactError> {
        let Some((author, token)) = self.refused.take() else { return Ok(()) };
        let place = match author {
            Author::Other => "a tool's definition or an argument of the template",
            Author::Assistant | Author::Message => "a message",
        };
        Err(ExactError::SpecialToken(format!(
            "{place} has the special token {token:?}, which this service refuses (`special_tokens_in_text`); write it in \
             another way"
        )))
    }
}

impl Texts for Marked<'_> {
    fn changed(&self, author: Author, text: &str) -> Option<String> {
        let mut cuts = Vec::new();
        for (place, first) in text.char_indices() {
            let Some(length) = self.tokens.at(&text[place..]) else { continue };
            let found = if author == Author::Other { &self.in_others } else { &self.in_messages };
            found.set(found.get() + 1);
            match self.tokens.policy {
                SpecialTokensInText::Allow => {}
                SpecialTokensInText::Refuse if author != Author::Assistant => {
                    self.refused.replace(Some((author, text[place..place + length].to_owned())));
                }
                // Another token may begin inside of this one, so the search goes on behind its first character.
                SpecialTokensInText::Escape | SpecialTokensInText::Refuse => cuts.push(place + first.len_utf8()),
            }
        }
        if cuts.is_empty() {
            return None;
        }
        let mut changed = String::with_capacity(text.len() + cuts.len() * self.mark.len());
        let mut from = 0;
        for cut in cuts {
            changed.extend([&text[from..cut], &self.mark]);
            from = cut;
        }
        Some(changed + &text[from..])
    }
}
