//! Engines as they are configured.

use std::path::PathBuf;

use forebay_domain::access::globs::PolicyGlobs;
use forebay_gateway::{
    system::LaterSystem,
    upstream::{SpecialTokensInText, UpstreamOptions},
};

/// An engine as it is configured.
#[derive(Clone, Debug)]
pub struct UpstreamConfig {
    /// Its options, without what is read from files.
    pub options: UpstreamOptions,
    /// The model's name at the engine.
    pub model: String,
    /// The policies whose calls it answers; none if it answers no recorded calls.
    pub policies: Option<PolicyGlobs>,
    /// The names of models without a policy that it answers.
    pub models: Vec<String>,
    /// What renders prompts in the mode exact; none in the mode observe.
    pub exact: Option<ExactConfig>,
    /// What becomes of system messages behind the first message; if absent, a test of the template or a probe of the
    /// engine finds out what it takes.
    pub later_system: Option<LaterSystem>,
    /// Whether a text stands for each image. Otherwise calls with images are refused.
    pub images_as_text: bool,
    /// A file with the engine's key.
    pub key_file: Option<PathBuf>,
    /// A file with the certificates to trust.
    pub ca_file: Option<PathBuf>,
}

/// What renders prompts in the mode exact.
#[derive(Clone, Debug)]
pub struct ExactConfig {
    /// The file `tokenizer.json` of the model.
    pub tokenizer: PathBuf,
    /// The file of the chat template; the one beside the tokenizer if absent.
    pub template: Option<PathBuf>,
    /// How answers end.
    pub family: FamilyConfig,
    /// What becomes of special tokens in the texts of agents.
    pub special_tokens_in_text: SpecialTokensInText,
}

/// How the answers of a model end.
#[derive(Clone, Debug)]
pub enum FamilyConfig {
    /// As in this family.
    Named(String),
    /// With these tokens.
    Given {
        /// Tokens that end an answer.
        stops: Vec<String>,
        /// The token with which the template closes a message.
        close: Option<String>,
        /// Tokens that end an answer and have no place in the conversation.
        trims: Vec<String>,
    },
}
