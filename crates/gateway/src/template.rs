//! Chat templates: from messages to the text of a prompt, byte for byte as `transformers` renders it.
//!
//! Templates are Jinja2 written for Python. So they get Python's methods on texts and objects, Python's JSON, and
//! numbers as Python prints them.

mod json;
mod parts;
mod sent;

use std::path::{Path, PathBuf};

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior,
    syntax::SyntaxConfig,
    value::{Kwargs, ValueKind},
};
use minijinja_contrib::pycompat;

use self::json::{Dumps, python_str};
use crate::{cancel::Cancellation, upstream::EngineKind};

pub use minijinja::Value;

/// Names of the special tokens that templates use.
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// Fuel of one rendering, which bounds its time. A long conversation takes some ten thousand.
const FUEL: u64 = 50_000_000;

/// The file of a template in a checkpoint.
const TEMPLATE_FILE: &str = "chat_template.jinja";

/// The file with the special tokens in a checkpoint, and often with the template.
const CONFIG_FILE: &str = "tokenizer_config.json";

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// It is not JSON.
    #[error("{} is not JSON", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
}

/// Why messages cannot be rendered.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TemplateError {
    /// The checkpoint has no template.
    #[error("the checkpoint has no chat template; send `input_ids`")]
    Absent,
    /// The template cannot be parsed.
    #[error("the chat template of the checkpoint cannot be used: {0}")]
    Unusable(String),
    /// The template ends with an error for these messages.
    #[error("the chat template refuses the messages: {0}")]
    Refused(String),
    /// Nobody waits for the prompt any more.
    #[error("nobody waits for the prompt any more")]
    Cancelled,
}

/// What a chat template is rendered with.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// The messages.
    pub messages: Vec<Value>,
    /// The tools, if there are any.
    pub tools: Option<Value>,
    /// More variables of the template.
    pub variables: Vec<(String, Value)>,
    /// The time that `strftime_now` formats, in seconds since 1970, in UTC. A prompt that contains a date must not
    /// change at midnight, because it would no longer extend the one before.
    pub clock_s: i64,
    /// Whether the prompt ends where the assistant begins to write.
    pub opens_answer: bool,
    /// Whether somebody waits for the prompt. A template may copy the text of an agent many times.
    pub cancellation: Cancellation,
}

/// Whose text a template is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Author {
    /// A message of the assistant.
    Assistant,
    /// Another message.
    Message,
    /// A tool's definition, or a variable.
    Other,
}

/// Changes the texts of agents, as the template sees them: arguments of tools are already parsed.
pub trait Texts {
    /// What stands for a text; `None` for itself.
    fn changed(&self, author: Author, text: &str) -> Option<String>;
}

/// Leaves all texts as they are.
struct Unchanged;

impl Texts for Unchanged {
    fn changed(&self, _: Author, _: &str) -> Option<String> {
        None
    }
}

/// Templates by name, and what they are rendered with besides the conversation.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Vec<(String, Value)>,
    /// Whether there is a template of its own for conversations with tools.
    has_tool_use: bool,
    separates_reasoning: bool,
    /// The kinds of engines that show it lists of parts.
    reads_parts: Vec<EngineKind>,
}

impl ChatTemplate {
    /// Reads the template of the checkpoint in `folder`: the file `chat_template.jinja`, or the entry in
    /// `tokenizer_config.json`.
    pub fn load(folder: &Path) -> Result<Result<Self, TemplateError>, FileError> {
        let config = config(folder)?;
        let file = read(&folder.join(TEMPLATE_FILE))?.map(|text| String::from_utf8_lossy(&text).into_owned());
        let sources = file.map_or_else(|| sources(&config), |text| vec![("default".to_owned(), text)]);
        Ok(if sources.is_empty() { Err(TemplateError::Absent) } else { Self::of_sources(sources, &config) })
    }

    /// A template with the special tokens of the checkpoint in `folder`.
    pub fn of_text(source: String, folder: &Path) -> Result<Result<Self, TemplateError>, FileError> {
        Ok(Self::of_sources(vec![("default".to_owned(), source)], &config(folder)?))
    }

    fn of_sources(sources: Vec<(String, String)>, config: &Value) -> Result<Self, TemplateError> {
        let special_tokens = SPECIAL_TOKENS.iter().filter_map(|name| Some(((*name).to_owned(), token(config, name)?)));
        Self::new(sources, special_tokens.collect()).map_err(|error| TemplateError::Unusable(shown(&error)))
    }

    fn new(sources: Vec<(String, String)>, special_tokens: Vec<(String, Value)>) -> Result<Self, Error> {
        let mut environment = environment();
        let has_tool_use = sources.iter().any(|(name, _)| name == "tool_use");
        let any = |holds: fn(&str) -> bool| sources.iter().any(|(_, source)| holds(source));
        let separates_reasoning = any(|source| source.contains("reasoning_content"));
        let of_sglang = any(parts::read_in_sglang).then_some(EngineKind::Sglang);
        let reads_parts = of_sglang.into_iter().chain(any(parts::read_in_vllm).then_some(EngineKind::Vllm)).collect();
        for (name, source) in sources {
            // Jinja2 reads every line break as one character.
            let source = source.replace("\r\n", "\n");
            environment.add_template_owned(name, without_generation_marks(&source))?;
        }
        environment.get_template("default")?;
        Ok(Self { environment, special_tokens, has_tool_use, separates_reasoning, reads_parts })
    }

    /// Whether the template has a place for reasoning.
    #[must_use]
    pub fn separates_reasoning(&self) -> bool {
        self.separates_reasoning
    }

    /// Whether an engine of this kind shows it lists of parts.
    #[must_use]
    pub fn reads_parts(&self, kind: EngineKind) -> bool {
        self.reads_parts.contains(&kind)
    }

    /// The prompt of a conversation, whose messages are as clients send them.
    pub fn render(&self, conversation: &Conversation) -> Result<String, TemplateError> {
        let messages: Result<Vec<Value>, Error> = conversation.messages.iter().map(sent::message).collect();
        let messages = messages.map_err(|error| TemplateError::Refused(shown(&error)))?;
        self.render_with(&Conversation { messages, ..conversation.clone() }, &Unchanged)
    }

    /// The prompt of a conversation with other texts. Its messages are shown to the template as they are.
    pub fn render_with(&self, conversation: &Conversation, texts: &impl Texts) -> Result<String, TemplateError> {
        let is_cancelled = || conversation.cancellation.is_cancelled();
        let refused = |error: Error| {
            if is_cancelled() { TemplateError::Cancelled } else { TemplateError::Refused(shown(&error)) }
        };
        let changed = |author: Author, value: Value| changed(texts, author, &value).unwrap_or(value);
        let messages = conversation.messages.iter().map(|message| {
            let is_assistant = message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"));
            changed(if is_assistant { Author::Assistant } else { Author::Message }, message.clone())
        });
        let messages: Value = messages.collect();
        let tools = conversation.tools.clone().map(|tools| changed(Author::Other, tools));
        let variables = conversation.variables.iter();
        let variables: Vec<(String, Value)> =
            variables.map(|(name, value)| (name.clone(), changed(Author::Other, value.clone()))).collect();
        let own = [
            ("messages".to_owned(), messages),
            ("tools".to_owned(), tools.unwrap_or(Value::from(()))),
            ("add_generation_prompt".to_owned(), Value::from(conversation.opens_answer)),
        ];
        let absent = [("documents".to_owned(), Value::from(()))];
        // Of two values with one name the later counts.
        let variables = self.special_tokens.iter().chain(&absent).chain(&variables).chain(&own);
        let context = Value::from_pairs(variables.map(|(name, value)| (name.clone(), value.clone())));
        let name = if conversation.tools.is_some() && self.has_tool_use { "tool_use" } else { "default" };
        let environment = self.environment_of(conversation);
        environment.get_template(name).and_then(|template| template.render(context)).map_err(refused)
    }

    /// The environment with what belongs to one rendering: the time, and the end of it when nobody waits any more. This is
    /// checked wherever a template writes or calls what is made for it, which every loop over messages does.
    fn environment_of(&self, conversation: &Conversation) -> Environment<'static> {
        let mut environment = self.environment.clone();
        let clock_s = conversation.clock_s;
        environment.add_function("strftime_now", move |format: String| strftime(&format, clock_s));
        let check = |cancellation: &Cancellation| {
            let why = "nobody waits for the prompt any more";
            if cancellation.is_cancelled() { Err(Error::new(ErrorKind::InvalidOperation, why)) } else { Ok(()) }
        };
        let cancellation = conversation.cancellation.clone();
        environment.set_formatter(move |out, _, value| {
            check(&cancellation)?;
            Ok(out.write_str(&python_str(value))?)
        });
        let cancellation = conversation.cancellation.clone();
        environment.set_unknown_method_callback(move |state, value, method, args| {
            check(&cancellation)?;
            pycompat::unknown_method_callback(state, value, method, args)
        });
        let cancellation = conversation.cancellation.clone();
        environment.add_filter("tojson", move |value: &Value, options: Kwargs| {
            check(&cancellation)?;
            tojson(value, &options)
        });
        environment
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

fn config(folder: &Path) -> Result<Value, FileError> {
    let path = folder.join(CONFIG_FILE);
    let Some(json) = read(&path)? else { return Ok(Value::from(())) };
    serde_json::from_slice(&json).map_err(|source| FileError::Json { path, source })
}

/// The templates in `tokenizer_config.json`: one, or a list with names.
fn sources(config: &Value) -> Vec<(String, String)> {
    let template = config.get_attr("chat_template").unwrap_or_default();
    if let Some(source) = template.as_str() {
        return vec![("default".to_owned(), source.to_owned())];
    }
    let text = |entry: &Value, key: &str| entry.get_attr(key).ok()?.as_str().map(ToOwned::to_owned);
    let entries = template.try_iter().into_iter().flatten();
    entries.filter_map(|entry| Some((text(&entry, "name")?, text(&entry, "template")?))).collect()
}

/// A special token in `tokenizer_config.json`: a text, or an object with its content.
fn token(config: &Value, name: &str) -> Option<Value> {
    let token = config.get_attr(name).ok()?;
    let token = if token.kind() == ValueKind::Map { token.get_attr("content").ok()? } else { token };
    (token.kind() == ValueKind::String).then_some(token)
}

/// The surroundings of `transformers`: no blank lines after blocks, Python's methods, JSON and numbers.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are the usual ones"));
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.add_filter("string", |value: &Value| python_str(value));
    // In Python, nothing is not iterable.
    environment.add_test("iterable", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment
}

fn strftime(format: &str, clock_s: i64) -> Result<String, Error> {
    let refused = |error: jiff::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
    let now = jiff::Timestamp::from_second(clock_s).map_err(refused)?.to_zoned(jiff::tz::TimeZone::UTC);
    jiff::fmt::strtime::format(format, &now).map_err(refused)
}

fn tojson(value: &Value, options: &Kwargs) -> Result<String, Error> {
    let separators: Option<Value> = options.get("separators")?;
    let separators = match separators {
        Some(pair) if pair.kind() == ValueKind::Seq => {
            Some((pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()))
        }
        _ => None,
    };
    let dumps = Dumps {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: options.get("indent")?,
        separators,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    dumps.write(value)
}

/// Some templates mark what the model generates, for training on text. The marks print nothing.
fn without_generation_marks(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let inner = &rest[start + 2..start + length];
        let (before, after) = (inner.strip_prefix(['-', '+']), inner.strip_suffix(['-', '+']));
        let name = inner.trim_matches(['-', '+']).trim();
        text.push_str(&rest[..start]);
        // A block that is always entered prints the same, and removes the same space around it.
        match name {
            "generation" | "endgeneration" => {
                let mark = |stripped: Option<&str>, at: usize| stripped.map_or("", |_| &inner[at..=at]);
                let word = if name == "generation" { "if true" } else { "endif" };
                let last = inner.len().saturating_sub(1);
                text.extend(["{%", mark(before, 0), " ", word, " ", mark(after, last), "%}"]);
            }
            _ => text.push_str(&rest[start..start + length + 2]),
        }
        rest = &rest[start + length + 2..];
    }
    text + rest
}

/// A value with other texts; `None` if none of its texts changes.
fn changed(texts: &impl Texts, author: Author, value: &Value) -> Option<Value> {
    match value.kind() {
        ValueKind::String => Some(Value::from(texts.changed(author, value.as_str()?)?)),
        ValueKind::Seq => {
            let items: Vec<Value> = value.try_iter().ok()?.collect();
            let new: Vec<Option<Value>> = items.iter().map(|item| changed(texts, author, item)).collect();
            let is_changed = new.iter().any(Option::is_some);
            let pairs = new.into_iter().zip(items);
            is_changed.then(|| pairs.map(|(new, item)| new.unwrap_or(item)).collect())
        }
        ValueKind::Map => {
            let mut is_changed = false;
            let mut new_or = |value: Value| match changed(texts, author, &value) {
                Some(new) => {
                    is_changed = true;
                    new
                }
                None => value,
            };
            let entries = value.try_iter().ok()?.map(|key| {
                let item = value.get_item(&key).unwrap_or_default();
                (new_or(key), new_or(item))
            });
            let entries = Value::from_pairs(entries);
            is_changed.then_some(entries)
        }
        _ => None,
    }
}

/// An error in one line, with the place in the template.
fn shown(error: &Error) -> String {
    let place = error.line().map(|line| format!(" (line {line} of the template)")).unwrap_or_default();
    format!("{}{place}", error.detail().map_or_else(|| error.to_string(), ToOwned::to_owned))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::cancel::Waiting;

    const ENDLESS: &str = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";

    fn render(source: &str, conversation: &str) -> Result<String, TemplateError> {
        let parsed: Value = serde_json::from_str(conversation).expect("it is JSON");
        let tools = parsed.get_attr("tools").expect("an object");
        let template = ChatTemplate::new(
            vec![("default".to_owned(), source.to_owned())],
            vec![("eos_token".to_owned(), Value::from("<end>"))],
        );
        template.expect("the template is valid").render(&Conversation {
            messages: parsed.get_attr("messages").expect("an object").try_iter().expect("a list").collect(),
            tools: (!tools.is_undefined()).then_some(tools),
            opens_answer: true,
            ..Conversation::default()
        })
    }

    #[test]
    fn templates_see_what_transformers_shows_them() {
        let source = "{%- for message in messages %}\n    {{- message.role.upper() + ': ' + message.content.strip() }}\n    \
                      {% if message.tool_calls %}\n{{ message.tool_calls[0].function.arguments | tojson }}\n    {% endif %}\n\
                      {%- if loop.last %}{% break %}{% endif %}\n{%- endfor %}\n{{ eos_token }} {{ tools is none }} \
                      {{ add_generation_prompt }} {{ missing }}\r\n{{ tools is iterable and tools | length > 0 }}\r\n{{ 1e-5 | string }}";
        let conversation = r#"{"messages": [
            {"role": "user", "content": [{"type": "text", "text": " a"}, {"type": "text", "text": "b <x> "}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"function": {"name": "f", "arguments": "{\"z\": \"<&>\", \"a\":1.0}"}}]}]}"#;
        let rendered = render(source, conversation).expect("it can be rendered");
        // As jinja2 3.1 renders it.
        let expected = "USER: a b <x>\nASSISTANT: \n{\"z\": \"<&>\", \"a\": 1.0}\n<end> True True \nFalse\n1e-05";
        assert_eq!(rendered, expected);
    }

    #[test]
    fn marks_of_generation_print_nothing() {
        let source = "a {%- generation -%} b {%- endgeneration %}c{% generation %}d{% endgeneration %}";
        assert_eq!(render(source, r#"{"messages": []}"#).expect("it can be rendered"), "abcd");
    }

    #[test]
    fn what_a_template_refuses_is_told() {
        let source = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}";
        let refused =
            render(source, r#"{"messages": [{"role": "system", "content": ""}]}"#).expect_err("it is refused");
        assert!(refused.to_string().contains("user first"), "{refused}");
        let image = r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#;
        assert!(render("", image).expect_err("it is refused").to_string().contains("image_url"));
        // A template that never ends is stopped.
        assert!(render(ENDLESS, r#"{"messages": []}"#).is_err());
    }

    #[test]
    fn a_prompt_for_which_nobody_waits_is_not_finished() {
        let source = format!("{{{{ leave() }}}}{ENDLESS}");
        let mut template = ChatTemplate::new(vec![("default".to_owned(), source)], Vec::new()).expect("it is valid");
        let waiting = Waiting::default();
        let conversation = Conversation { cancellation: waiting.cancellation(), ..Conversation::default() };
        let waiting = Mutex::new(Some(waiting));
        // The caller leaves while the template is rendered.
        template.environment.add_function("leave", move || drop(waiting.lock().map(|mut waiting| waiting.take())));
        let stopped = template.render(&conversation).expect_err("the template never ends");
        assert!(matches!(stopped, TemplateError::Cancelled), "{stopped}");
    }

    #[test]
    fn macros_know_the_time_of_the_session() {
        let source = "{% macro date() %}{{ strftime_now('%Y') }}{% endmacro %}{{ date() }}";
        let template = ChatTemplate::new(vec![("default".to_owned(), source.to_owned())], Vec::new());
        let conversation = Conversation { clock_s: 1_700_000_000, ..Conversation::default() };
        assert_eq!(template.expect("it is valid").render(&conversation).expect("it can be rendered"), "2023");
    }

    #[test]
    fn one_of_several_templates_is_for_tools() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let config = r#"{"bos_token": {"content": "<s>"}, "chat_template": [
            {"name": "default", "template": "{{ bos_token }}plain"}, {"name": "tool_use", "template": "tools"}]}"#;
        std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("the folder can be written to");
        let render = |tools: Option<Value>| {
            let template = ChatTemplate::load(folder.path()).expect("it can be read").expect("there is a template");
            template.render(&Conversation { tools, ..Conversation::default() }).expect("it can be rendered")
        };
        assert_eq!(render(None), "<s>plain");
        assert_eq!(render(Some(Value::from(Vec::<Value>::new()))), "tools");
        std::fs::write(folder.path().join("chat_template.jinja"), "file").expect("the folder can be written to");
        assert_eq!(render(None), "file");
    }
}
