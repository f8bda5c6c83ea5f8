//! The character tokenizers of the models that `init` makes: those of the built-in tasks, and those of chats.
//!
//! The project has its own tokenizer because it is only a table: a library that reads and writes everything a
//! `tokenizer.json` can contain would be many times the size of this file. This one writes a word-level model over
//! single characters, which the fast tokenizers of `transformers` can load, and it reads only what it writes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

/// Pads batches; it is never part of a text.
const PAD: &str = "<pad>";
/// Begins every text.
const BOS: &str = "<bos>";
/// Ends a turn of the model.
const EOS: &str = "<eos>";
/// Replaces characters outside the alphabet in other implementations. This tokenizer refuses such characters.
const UNKNOWN: &str = "<unk>";

/// Special tokens, by id. Their ids are below those of the characters.
const SPECIAL: [&str; 4] = [PAD, BOS, EOS, UNKNOWN];
/// Special tokens of chats, by id. The first four are the same; each of the others begins the messages of a role.
const SPECIAL_OF_CHATS: [&str; 8] = [PAD, BOS, EOS, UNKNOWN, "<system>", "<user>", "<assistant>", "<tool>"];
const PAD_ID: i64 = 0;
const BOS_ID: i64 = 1;
const EOS_ID: i64 = 2;

/// Name of the file in a checkpoint.
pub(super) const TOKENIZER_FILE: &str = "tokenizer.json";
/// Name of the file that tells `transformers` how to load the tokenizer.
pub(super) const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// The chat template: the contents of all messages, one after the other. Each turn of the model ends with its token, as
/// in the sequences of `rollout`.
const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}{{ message.content }}\
                             {% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}";

/// The chat template of chats: each message is the token of its role, its text and the end. Nothing follows the end, so
/// a conversation that goes on extends the ids that were sampled exactly.
const CHAT_TEMPLATE_OF_CHATS: &str = "{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content }}\
                                      {{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}";

/// What the texts of a model are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// One text, which `<bos>` begins.
    Task,
    /// Messages with roles.
    Chat,
}

impl Form {
    fn special(self) -> &'static [&'static str] {
        match self {
            Self::Task => &SPECIAL,
            Self::Chat => &SPECIAL_OF_CHATS,
        }
    }

    fn chat_template(self) -> &'static str {
        match self {
            Self::Task => CHAT_TEMPLATE,
            Self::Chat => CHAT_TEMPLATE_OF_CHATS,
        }
    }

    /// The part of `tokenizer.json` that puts special tokens around an encoded text.
    fn post_processor(self) -> Value {
        match self {
            Self::Chat => Value::Null,
            Self::Task => json!({
                "type": "TemplateProcessing",
                "single": [
                    { "SpecialToken": { "id": BOS, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                ],
                "pair": [
                    { "SpecialToken": { "id": BOS, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                    { "Sequence": { "id": "B", "type_id": 0 } },
                ],
                "special_tokens": { BOS: { "id": BOS, "ids": [BOS_ID], "tokens": [BOS] } },
            }),
        }
    }
}

/// One token per character, after the special ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokenizer {
    form: Form,
    /// Characters by id, from the first id after the special tokens.
    characters: Vec<char>,
    ids: BTreeMap<char, i64>,
}

/// Why a tokenizer could not be made, or a text could not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file could not be read or written.
    #[error("cannot {action} {path}")]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is not JSON.
    #[error("{path} is not JSON")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// The file describes another kind of tokenizer.
    #[error("{path} is not a character tokenizer as `init` writes it: {reason}")]
    Kind {
        /// The file.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
    /// The alphabet contains a character twice.
    #[error("the alphabet contains {0:?} twice")]
    Twice(char),
    /// The alphabet does not contain the character.
    #[error("the tokenizer has no token for {0:?}: the model was made for another task")]
    Unknown(char),
}

impl Tokenizer {
    /// A tokenizer of the characters of `alphabet`, in their order, for texts that `<bos>` begins.
    pub fn new(alphabet: &str) -> Result<Self, TokenizerError> {
        Self::of(Form::Task, alphabet)
    }

    /// A tokenizer of the characters of `alphabet`, in their order, for messages that tokens of their roles begin.
    pub fn for_chats(alphabet: &str) -> Result<Self, TokenizerError> {
        Self::of(Form::Chat, alphabet)
    }

    fn of(form: Form, alphabet: &str) -> Result<Self, TokenizerError> {
        let characters: Vec<char> = alphabet.chars().collect();
        let mut ids = BTreeMap::new();
        for (index, &character) in characters.iter().enumerate() {
            if ids.insert(character, (form.special().len() + index) as i64).is_some() {
                return Err(TokenizerError::Twice(character));
            }
        }
        Ok(Self { form, characters, ids })
    }

    /// Reads the tokenizer of the checkpoint in `folder`, which must be one of a task.
    pub fn load(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join(TOKENIZER_FILE);
        let json = match fs::read(&path) {
            Ok(json) => json,
            Err(source) => return Err(TokenizerError::Io { action: "read", path, source }),
        };
        let file: Value = match serde_json::from_slice(&json) {
            Ok(file) => file,
            Err(source) => return Err(TokenizerError::Syntax { path, source }),
        };
        let alphabet = alphabet_of(&file).map_err(|reason| TokenizerError::Kind { path: path.clone(), reason })?;
        let tokenizer = Self::new(&alphabet)?;
        if file == tokenizer.to_json() {
            Ok(tokenizer)
        } else {
            Err(TokenizerError::Kind { path, reason: "it differs in more than the alphabet".to_owned() })
        }
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into `folder`.
    pub fn save(&self, folder: &Path) -> Result<(), TokenizerError> {
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "unk_token": UNKNOWN,
            // A space is an ordinary character here, wherever it occurs.
            "clean_up_tokenization_spaces": false,
            "chat_template": self.form.chat_template(),
        });
        for (file, json) in [(TOKENIZER_FILE, self.to_json()), (TOKENIZER_CONFIG_FILE, config)] {
            let path = folder.join(file);
            let written = fs::write(&path, format!("{json:#}\n"));
            written.map_err(|source| TokenizerError::Io { action: "write", path, source })?;
        }
        Ok(())
    }

    /// Number of tokens.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.form.special().len() + self.characters.len()
    }

    /// Id of the token that pads batches.
    #[must_use]
    pub fn pad(&self) -> i64 {
        PAD_ID
    }

    /// Id of the token that begins every text.
    #[must_use]
    pub fn bos(&self) -> i64 {
        BOS_ID
    }

    /// Id of the token that ends a turn of the model.
    #[must_use]
    pub fn eos(&self) -> i64 {
        EOS_ID
    }

    /// The ids of a text, without special tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        let id = |character: char| self.ids.get(&character).copied().ok_or(TokenizerError::Unknown(character));
        text.chars().map(id).collect()
    }

    /// The ids of a prompt: the beginning of a text.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        let mut ids = vec![BOS_ID];
        ids.extend(self.encode(text)?);
        Ok(ids)
    }

    /// Returns the text of tokens. Special tokens are shown by name, and ids outside the vocabulary as `<unk>`.
    #[must_use]
    pub fn decode(&self, tokens: &[i64]) -> String {
        let special = self.form.special();
        let mut text = String::new();
        for &token in tokens {
            let index = usize::try_from(token).unwrap_or(usize::MAX);
            match (special.get(index), self.characters.get(index.wrapping_sub(special.len()))) {
                (Some(name), _) => text.push_str(name),
                (None, Some(&character)) => text.push(character),
                (None, None) => text.push_str(UNKNOWN),
            }
        }
        text
    }

    fn to_json(&self) -> Value {
        let special = self.form.special();
        let mut vocabulary = serde_json::Map::new();
        for (id, name) in special.iter().enumerate() {
            vocabulary.insert((*name).to_owned(), id.into());
        }
        for (character, id) in &self.ids {
            vocabulary.insert(character.to_string(), (*id).into());
        }
        let added = special.iter().enumerate().map(|(id, name)| {
            json!({
                "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        });
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": null,
            // Every character is a word of its own, including line breaks.
            "pre_tokenizer": {
                "type": "Split", "pattern": { "Regex": "[\\s\\S]" }, "behavior": "Isolated", "invert": false,
            },
            "post_processor": self.form.post_processor(),
            "decoder": { "type": "Fuse" },
            "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN },
        })
    }
}

/// Returns the characters of a `tokenizer.json` in the order of their ids, or why they are not an alphabet.
fn alphabet_of(file: &Value) -> Result<String, String> {
    let model = &file["model"];
    if model["type"] != "WordLevel" {
        return Err(format!("its model is {}", model["type"]));
    }
    let vocabulary = model["vocab"].as_object().ok_or("its vocabulary is not an object")?;
    let mut characters = BTreeSet::new();
    for (token, id) in vocabulary {
        let mut content = token.chars();
        match (content.next(), content.next()) {
            (Some(character), None) => characters.insert((id.as_u64(), character)),
            _ if SPECIAL.contains(&token.as_str()) => continue,
            _ => return Err(format!("{token:?} is not a single character")),
        };
    }
    Ok(characters.into_iter().map(|(_, character)| character).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::new("0123456789+=").expect("no character is there twice")
    }

    #[test]
    fn text_comes_back_from_its_tokens() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("12+30=42").expect("the alphabet has all of it");
        assert_eq!(tokens, [5, 6, 14, 7, 4, 15, 8, 6]);
        assert_eq!(tokenizer.decode(&tokens), "12+30=42");
        assert_eq!(tokenizer.vocab_size(), 16);
        assert_eq!(tokenizer.encode_prompt("1").expect("it is a digit"), [tokenizer.bos(), 5]);
    }

    #[test]
    fn special_tokens_never_read_as_characters() {
        let tokenizer = tokenizer();
        assert_eq!(tokenizer.decode(&[1, 5, 2, 0, 99, -1]), "<bos>1<eos><pad><unk><unk>");
        assert!(matches!(tokenizer.encode("1<"), Err(TokenizerError::Unknown('<'))));
        assert!(matches!(Tokenizer::new("121"), Err(TokenizerError::Twice('1'))));
    }

    #[test]
    fn saved_tokenizer_is_loaded_alike() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        // The characters are not in the order of their code points, and some need escapes in JSON and patterns.
        let tokenizer = Tokenizer::new("=+9 \"\\\n0é").expect("no character is there twice");
        tokenizer.save(folder.path()).expect("the folder can be written to");
        assert_eq!(Tokenizer::load(folder.path()).expect("it was just written"), tokenizer);
    }

    #[test]
    fn chats_have_a_token_for_each_role() {
        let tokenizer = Tokenizer::for_chats("01").expect("no character is there twice");
        assert_eq!(tokenizer.vocab_size(), 10);
        assert_eq!(tokenizer.decode(&[5, 9, 8, 2, 6]), "<user>10<eos><assistant>");
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        tokenizer.save(folder.path()).expect("the folder can be written to");
        let refusal = Tokenizer::load(folder.path()).expect_err("it is not one of a task").to_string();
        assert!(refusal.contains("is not a single character"), "{refusal}");
    }

    #[test]
    fn other_tokenizers_are_refused() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let refusal = |change: &dyn Fn(&mut Value)| {
            let mut json = tokenizer().to_json();
            change(&mut json);
            fs::write(folder.path().join(TOKENIZER_FILE), json.to_string()).expect("the folder can be written to");
            Tokenizer::load(folder.path()).expect_err("it is not ours").to_string()
        };
        assert!(refusal(&|json| json["model"]["type"] = "BPE".into()).contains("its model is \"BPE\""));
        assert!(refusal(&|json| json["model"]["vocab"]["the"] = 16.into()).contains("\"the\""));
        assert!(refusal(&|json| json["model"]["vocab"]["7"] = 90.into()).contains("differs"));
        assert!(refusal(&|json| json["post_processor"] = Value::Null).contains("differs"));
    }
}
