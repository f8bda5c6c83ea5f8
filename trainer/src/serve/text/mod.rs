//! Text for models whose checkpoint has a tokenizer: chat templates, tokens to text and back, and the parts of an answer.
//!
//! This is separate from the models, which only know token ids. A checkpoint without a tokenizer is served for requests
//! of token ids alone.

mod parts;
mod stream;

use std::path::{Path, PathBuf};

use forebay_gateway::template::{ChatTemplate, FileError};
use tokenizers::Tokenizer;

pub(super) use forebay_gateway::template::{Conversation, TemplateError};
pub(super) use parts::{Part, Parts};
pub(super) use stream::TextStream;

/// The tokenizer of a checkpoint, and its chat template.
#[derive(Debug)]
pub(super) struct Text {
    tokenizer: Tokenizer,
    template: Result<ChatTemplate, TemplateError>,
}

/// Why the text of a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The tokenizer is not one that can be used.
    #[error("{} is not a tokenizer that can be used: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the library says.
        reason: String,
    },
}

impl Text {
    /// Loads the text of the checkpoint in `folder`, if it has any.
    pub(super) fn load(folder: &Path) -> Result<Option<Self>, TextError> {
        let path = folder.join("tokenizer.json");
        let Some(bytes) = read(&path)? else { return Ok(None) };
        let tokenizer = Tokenizer::from_bytes(bytes)
            .map_err(|error| TextError::Tokenizer { path: path.clone(), reason: error.to_string() })?;
        let template = ChatTemplate::load(folder)?;
        if let Err(error @ TemplateError::Unusable(_)) = &template {
            tracing::warn!(folder = %folder.display(), %error, "messages will be refused");
        }
        Ok(Some(Self { tokenizer, template }))
    }

    /// The prompt of a conversation.
    pub(super) fn render(&self, conversation: &Conversation) -> Result<String, TemplateError> {
        self.template.as_ref().map_err(Clone::clone)?.render(conversation)
    }

    /// Whether the template has a place for reasoning. If it has, reasoning is separated from the rest of an answer.
    pub(super) fn separates_reasoning(&self) -> bool {
        self.template.as_ref().is_ok_and(ChatTemplate::separates_reasoning)
    }

    /// The ids of a text. `special` adds the tokens that begin a text; a chat template writes them itself.
    pub(super) fn encode(&self, text: &str, special: bool) -> Result<Vec<i64>, String> {
        let encoding = self.tokenizer.encode_fast(text, special).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// The text of tokens.
    pub(super) fn decode(&self, ids: &[i64], skip_special_tokens: bool) -> String {
        let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        // The library fails only for a decoder that does not fit its own tokens.
        self.tokenizer.decode(&ids, skip_special_tokens).unwrap_or_default()
    }
}

/// The content of a file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(FileError::Read { path: path.to_owned(), source }),
    }
}
