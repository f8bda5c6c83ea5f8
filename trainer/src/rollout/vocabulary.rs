//! The vocabulary of the model that `init` makes: characters, or a tokenizer that exists.
//!
//! A model with the tokenizer of another one can be trained on what that other model sampled, which tries a set-up
//! without the weights of a large model.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{
    Tokenizer, TokenizerError,
    tokenizer::{TOKENIZER_CONFIG_FILE, TOKENIZER_FILE},
};

/// The files of a tokenizer and of a chat template, as `transformers` writes them. All but the first two may be absent.
const FILES: [&str; 8] = [
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "vocab.json",
];

/// How many ids there are, and those of the special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vocabulary {
    size: usize,
    end: i64,
    begin: Option<i64>,
    pad: Option<i64>,
}

/// Why a folder has no tokenizer for a new model.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// A file cannot be read or copied.
    #[error("cannot copy {}", path.display())]
    Copy {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A file is not what its name says.
    #[error("{} cannot be used: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Vocabulary {
    /// Writes a tokenizer of characters into `target`.
    pub(super) fn of_tokenizer(tokenizer: &Tokenizer, target: &Path) -> Result<Self, TokenizerError> {
        tokenizer.save(target)?;
        let (end, begin, pad) = (tokenizer.eos(), Some(tokenizer.bos()), Some(tokenizer.pad()));
        Ok(Self { size: tokenizer.vocab_size(), end, begin, pad })
    }

    /// Copies the tokenizer in `folder` into `target`.
    pub(super) fn of_folder(folder: &Path, target: &Path) -> Result<Self, VocabularyError> {
        for (place, name) in FILES.into_iter().enumerate() {
            let path = folder.join(name);
            match fs::copy(&path, target.join(name)) {
                Ok(_) => {}
                Err(error) if place > 1 && error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(VocabularyError::Copy { path, source }),
            }
        }
        let path = folder.join(TOKENIZER_FILE);
        let tokenizer = tokenizers::Tokenizer::from_file(&path)
            .map_err(|error| VocabularyError::Unusable { path: path.clone(), reason: error.to_string() })?;
        let path = folder.join(TOKENIZER_CONFIG_FILE);
        let unusable = |reason: String| VocabularyError::Unusable { path: path.clone(), reason };
        let text = fs::read(&path).map_err(|source| VocabularyError::Copy { path: path.clone(), source })?;
        let config: Value = serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
        let id = |name: &str| {
            // A special token is a text, or an object with its content.
            let token = config[name].as_str().or(config[name]["content"].as_str())?;
            tokenizer.token_to_id(token).map(i64::from)
        };
        let end = id("eos_token").ok_or_else(|| unusable("`eos_token` names no token of tokenizer.json".to_owned()))?;
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or_default();
        Ok(Self { size: largest as usize + 1, end, begin: id("bos_token"), pad: id("pad_token") })
    }

    /// The number of ids.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// The keys of `config.json` and `generation_config.json` that name special tokens.
    pub(super) fn special(&self) -> [(&'static str, Value); 3] {
        [("pad_token_id", json!(self.pad)), ("bos_token_id", json!(self.begin)), ("eos_token_id", json!(self.end))]
    }
}
