//! From a request to the ids of its prompt.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use super::{
    encode::{Bounds, Encoder},
    error::ExactError,
    family::{Family, FamilyIds},
    fields,
    messages::Manner,
    self_test::{self, Difference, SelfTest},
    special::{Marked, SpecialTokens},
};
use crate::{
    cancel::Cancellation,
    canonical::Continued,
    completion::ToolCall,
    request::{Message, Request, Role},
    template::{Author, ChatTemplate, Conversation, FileError, TemplateError, Texts as _, Value},
    upstream::{EngineKind, SpecialTokensInText},
};

/// How many ids are shown before and behind the place where two prompts differ.
const SHOWN_IDS_BEFORE: usize = 8;
const SHOWN_IDS: usize = 32;

/// What a renderer is made of.
#[derive(Clone, Debug)]
pub struct RendererOptions {
    /// The file `tokenizer.json` of the model. Its special tokens are named in `tokenizer_config.json` beside it.
    pub tokenizer: PathBuf,
    /// The file of the chat template. If absent, the template is that of the model, beside the tokenizer.
    pub template: Option<PathBuf>,
    /// How answers end.
    pub family: Family,
    /// What becomes of special tokens in the texts of agents.
    pub special_tokens_in_text: SpecialTokensInText,
    /// The engine. Prompts are those that it would render.
    pub kind: EngineKind,
}

/// A tokenizer, a chat template, and the end of answers.
#[derive(Debug)]
pub struct Renderer {
    encoder: Encoder,
    template: ChatTemplate,
    manner: Manner,
    family: FamilyIds,
    special: SpecialTokens,
    self_test: SelfTest,
}

/// The ids of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The ids.
    pub ids: Vec<i32>,
    /// The call that they continue: they begin with its path, without its last id if that is one that the family
    /// trims. `None` if the whole conversation was rendered.
    pub continues: Option<u32>,
    /// How many special tokens the texts of the agent have that were rendered.
    pub special_tokens: u64,
}

impl Renderer {
    /// Reads the files, and tests whether prompts can be continued with them.
    pub fn load(options: &RendererOptions) -> Result<Self, ExactError> {
        let path = &options.tokenizer;
        let bytes = std::fs::read(path).map_err(|source| FileError::Read { path: path.clone(), source })?;
        let refused = |error: tokenizers::Error| ExactError::Tokenizer { path: path.clone(), why: error.to_string() };
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(refused)?;
        // A file may ask for texts of one length.
        tokenizer.with_truncation(None).map_err(refused)?.with_padding(None);
        let folder = path.parent().unwrap_or(Path::new("."));
        let template = match &options.template {
            Some(path) => {
                let text = std::fs::read_to_string(path);
                let text = text.map_err(|source| FileError::Read { path: path.clone(), source })?;
                ChatTemplate::of_text(text, folder)?
            }
            None => ChatTemplate::load(folder)?,
        };
        let family = FamilyIds::new(&options.family, &tokenizer)?;
        let special = SpecialTokens::new(options.special_tokens_in_text, &tokenizer, &options.family)?;
        let encoder = Encoder::new(tokenizer)?;
        let template = template?;
        let manner = Manner { kind: options.kind, keeps_parts: template.reads_parts(options.kind) };
        let mut renderer = Self { encoder, template, manner, family, special, self_test: SelfTest::default() };
        renderer.self_test = self_test::run(&renderer)?;
        if options.special_tokens_in_text != SpecialTokensInText::Allow {
            renderer.check_escapes()?;
        }
        Ok(renderer)
    }

    /// Whether special tokens can be written as text. A tokenizer that begins each text with a space would add one.
    fn check_escapes(&self) -> Result<(), ExactError> {
        for token in &self.family.family.stops {
            let (marked, text) = (self.special.marked(), format!("See {token} there."));
            let cut = marked.changed(Author::Assistant, &text).unwrap_or_default();
            let ids = self.special.encode(&marked, &cut, |piece, _| self.encode(piece, &Cancellation::default()))?;
            if self.decode_whole(&ids) != text {
                let why =
                    format!("special_tokens_in_text: the tokenizer cannot write {token:?} as text; use \"allow\"");
                return Err(ExactError::Options(why));
            }
        }
        Ok(())
    }

    /// What was found out when the files were read.
    #[must_use]
    pub fn self_test(&self) -> &SelfTest {
        &self.self_test
    }

    /// Conversations whose prompts should be compared with those of the engine.
    #[must_use]
    pub fn odd_conversations(&self) -> Vec<Request> {
        self_test::odd(self)
    }

    /// Where the prompt of an engine differs from one of this renderer.
    #[must_use]
    pub fn difference(&self, own: &[i32], of_engine: &[i32]) -> Option<Difference> {
        let place = own.iter().zip(of_engine).take_while(|(own, other)| own == other).count();
        if place == own.len() && place == of_engine.len() {
            return None;
        }
        // A few ids before the place tell where it is.
        let from = place.saturating_sub(SHOWN_IDS_BEFORE);
        let shown = |ids: &[i32]| self.decode_whole(&ids[from..ids.len().min(place + SHOWN_IDS)]);
        Some(Difference { before: shown(own), after: shown(of_engine) })
    }

    /// The tokens that end an answer.
    #[must_use]
    pub fn stop_ids(&self) -> &[i32] {
        &self.family.stops
    }

    /// The text of ids, without special tokens.
    #[must_use]
    pub fn decode(&self, ids: &[i32]) -> String {
        self.text(ids, true)
    }

    /// The text of ids, with special tokens.
    #[must_use]
    pub fn decode_whole(&self, ids: &[i32]) -> String {
        self.text(ids, false)
    }

    fn text(&self, ids: &[i32], skips_special: bool) -> String {
        let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        // The library fails only for a decoder that does not fit its own tokens.
        self.encoder.tokenizer().decode(&ids, skips_special).unwrap_or_default()
    }

    /// The prompt of a request. `clock_s` is the time that templates print, in seconds since 1970. It must be the same
    /// in all calls of a session.
    pub fn prompt(
        &self,
        request: &Request,
        clock_s: i64,
        continued: Option<&Continued>,
        cancellation: &Cancellation,
    ) -> Result<Prompt, ExactError> {
        self.prompt_within(request, clock_s, continued, Bounds::none(cancellation))
    }

    /// The same for a prompt with bounds.
    pub fn prompt_within(
        &self,
        request: &Request,
        clock_s: i64,
        continued: Option<&Continued>,
        bounds: Bounds<'_>,
    ) -> Result<Prompt, ExactError> {
        fields::check(request)?;
        let setting = Setting { request, clock_s, texts: &self.special.marked(), bounds };
        if let Some(continued) = continued {
            let appended = request.messages.get(continued.messages..).unwrap_or_default();
            match self.suffix(&setting, appended, &continued.tool_calls) {
                Ok(suffix) => {
                    let ids = self.join(&continued.path, &suffix, &setting)?;
                    // The tools were rendered only in order to find what follows the answer.
                    let special_tokens = setting.texts.in_messages();
                    return Ok(Prompt { ids, continues: Some(continued.seq), special_tokens });
                }
                Err(error @ (ExactError::Cancelled | ExactError::SpecialToken(_))) => return Err(error),
                // The template needs more of the conversation than the last answer.
                Err(error) => tracing::warn!(%error, "a prompt is rendered as a whole"),
            }
        }
        // What was rendered above is not counted twice.
        let setting = Setting { texts: &self.special.marked(), ..setting };
        let text = self.render(&setting, &request.messages)?;
        let ids = self.encode_prompt(&[], &text, &setting)?;
        Ok(Prompt { ids, continues: None, special_tokens: setting.texts.in_all() })
    }

    /// The ids of a path and of what follows its answer. `suffix` begins with the end of the answer's message.
    fn join(&self, path: &[i32], suffix: &str, setting: &Setting<'_>) -> Result<Vec<i32>, ExactError> {
        let last = path.last().copied();
        let (kept, rest) = match &self.family.family.close {
            Some(close) if last == self.family.close => (path, suffix.strip_prefix(close.as_str()).unwrap_or(suffix)),
            _ if last.is_some_and(|last| self.family.trims.contains(&last)) => (&path[..path.len() - 1], suffix),
            // The answer was cut, or ended at a stop text.
            _ => (path, suffix),
        };
        self.encode_prompt(kept, rest, setting)
    }

    /// What the template writes behind the content of an answer, if these messages follow it: the end of the answer's
    /// message, the messages, and the beginning of the next answer.
    ///
    /// A short conversation is rendered in which the answer's texts are a mark. What is behind the last mark and the
    /// formatting of the answer is the suffix.
    pub(super) fn suffix(
        &self,
        setting: &Setting<'_>,
        appended: &[Message],
        tool_calls: &[ToolCall],
    ) -> Result<String, ExactError> {
        let ends_message = |call: &&ToolCall| [&call.name, &call.id].iter().any(|text| self.family.ends_message(text));
        if let Some(call) = tool_calls.iter().find(ends_message) {
            // A template may write the name behind the arguments, where it would be taken for the end of the answer.
            let why = format!("the call of {:?} has a token in its name or id that ends messages", call.name);
            return Err(ExactError::SelfTest(why));
        }
        // Two messages were once missing from prompts because an agent could write the mark in a spelling that a search
        // for it did not find. What is random needs no search, and no agent ever sees it.
        let mark = format!("forebay{:032x}", rand::random::<u128>());
        let arguments = serde_json::json!({&mark: &mark}).to_string();
        let calls = tool_calls.iter().map(|call| ToolCall { arguments: arguments.clone(), ..call.clone() });
        let answer = Message { tool_calls: calls.collect(), ..Message::text(Role::Assistant, mark.as_str()) };
        let stub = [Message::text(Role::User, "A question."), answer];
        let text = self.render(setting, stub.iter().chain(appended))?;
        let missing = |what: &str| ExactError::SelfTest(format!("{what} of an answer was not found in the prompt"));
        let content = text.rfind(&mark).ok_or_else(|| missing("the text"))? + mark.len();
        let end = self.family.end_of_message(&text[content..]).ok_or_else(|| missing("the end"))?;
        Ok(text[content + end..].to_owned())
    }

    pub(super) fn render<'a>(
        &self,
        setting: &Setting<'_>,
        messages: impl IntoIterator<Item = &'a Message>,
    ) -> Result<String, ExactError> {
        let Setting { request, clock_s, texts, bounds } = *setting;
        let messages: Result<Vec<Value>, ExactError> =
            messages.into_iter().map(|message| self.manner.message(message)).collect();
        let conversation = Conversation {
            messages: messages?,
            tools: self.manner.tools(request),
            variables: fields::variables(request, self.manner.kind),
            clock_s,
            opens_answer: true,
            cancellation: bounds.cancellation.clone(),
        };
        let rendered = self.template.render_with(&conversation, texts);
        texts.check()?;
        rendered.map_err(|error| match error {
            TemplateError::Cancelled => ExactError::Cancelled,
            error => ExactError::Template(error),
        })
    }

    /// The ids that are kept, and those of what was rendered with these texts.
    fn encode_prompt(&self, kept: &[i32], text: &str, setting: &Setting<'_>) -> Result<Vec<i32>, ExactError> {
        let tokens_max = setting.bounds.tokens_max;
        let encoded = self.special.encode(setting.texts, text, |piece, before| {
            let left = tokens_max.saturating_sub(kept.len() + before);
            self.encoder.encode(piece, &Bounds { tokens_max: left, ..setting.bounds })
        });
        match encoded {
            Ok(encoded) => Ok([kept, &encoded].concat()),
            // The bound is that of the whole prompt.
            Err(ExactError::TooManyTokens { .. }) => Err(ExactError::TooManyTokens { tokens_max }),
            Err(error) => Err(error),
        }
    }

    pub(super) fn encode(&self, text: &str, cancellation: &Cancellation) -> Result<Vec<i32>, ExactError> {
        self.encoder.encode(text, &Bounds::none(cancellation))
    }

    pub(super) fn special(&self) -> &SpecialTokens {
        &self.special
    }

    pub(super) fn family(&self) -> &FamilyIds {
        &self.family
    }

    pub(super) fn separates_reasoning(&self) -> bool {
        self.template.separates_reasoning()
    }
}

/// What a conversation is rendered with besides its messages.
pub(super) struct Setting<'a> {
    pub(super) request: &'a Request,
    pub(super) clock_s: i64,
    pub(super) texts: &'a Marked<'a>,
    pub(super) bounds: Bounds<'a>,
}
