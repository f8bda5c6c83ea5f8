//! Why prompts cannot be rendered.

use std::path::PathBuf;

use crate::{
    dialect::DialectError,
    template::{FileError, TemplateError},
};

/// When an agent repeats a call for whose prompt there was no memory.
const RETRY_AFTER_S: u32 = 1;

/// Why prompts cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ExactError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The options do not fit the tokenizer.
    #[error("{0}")]
    Options(String),
    /// The tokenizer cannot be used.
    #[error("{} is not a tokenizer that can be used: {why}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the library says.
        why: String,
    },
    /// The template cannot be used, or refuses the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// What is rendered alone is not the end of what is rendered as a whole.
    #[error("the template and the family do not fit each other: {0}")]
    SelfTest(String),
    /// A field asks for another prompt than this mode makes.
    #[error("{field}: {why}")]
    Unsupported {
        /// The field.
        field: String,
        /// What it must be, and why.
        why: String,
    },
    /// A text has a special token that it may not have.
    #[error("{0}")]
    SpecialToken(String),
    /// Nobody waits for the prompt any more.
    #[error("nobody waits for the prompt any more")]
    Cancelled,
    /// The text of a prompt cannot be made ids.
    #[error("the tokenizer refuses the prompt: {0}")]
    Encode(String),
    /// The prompt is too long.
    #[error("the prompt has more than {tokens_max} tokens")]
    TooManyTokens {
        /// How many it may have.
        tokens_max: usize,
    },
    /// There is no memory in which the prompt can be encoded.
    #[error("too many bytes of calls are in flight")]
    NoMemory,
    /// A word is too long to be encoded.
    #[error(
        "a text has more than {bytes_max} bytes without a place where the tokenizer divides it; divide it with spaces"
    )]
    LongWord {
        /// How long it may be.
        bytes_max: usize,
    },
    /// A text is too long for a tokenizer that does not divide texts.
    #[error(
        "a text has more than {bytes_max} bytes, and the model's tokenizer encodes each text as one word; send a shorter \
         text, or divide it among several messages"
    )]
    LongText {
        /// How long it may be.
        bytes_max: usize,
    },
}

impl From<&ExactError> for DialectError {
    /// What the agent is told. All but a refusal of the template was found out before any agent called.
    fn from(error: &ExactError) -> Self {
        match error {
            ExactError::Template(TemplateError::Refused(_))
            | ExactError::SpecialToken(_)
            | ExactError::LongWord { .. }
            | ExactError::LongText { .. } => Self::Invalid { field: "messages".to_owned(), why: error.to_string() },
            ExactError::Unsupported { field, why } => Self::invalid(field, why),
            ExactError::TooManyTokens { .. } => Self::ContextLength { detail: error.to_string() },
            ExactError::NoMemory => Self::Busy { why: error.to_string(), retry_after_s: RETRY_AFTER_S },
            _ => Self::Internal,
        }
    }
}
