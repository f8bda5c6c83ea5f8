//! The array `[[upstream]]`: the inference engines that answer the calls of sessions.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use forebay_agents::configured::{ExactConfig, FamilyConfig, UpstreamConfig};
use forebay_domain::{access::globs::PolicyGlobs, ids::check_name};
use forebay_gateway::{
    system::LaterSystem,
    upstream::{EngineKind, Parsers, SpecialTokensInText, UpstreamOptions, check_pass},
};
use forebay_wire::Violation;
use serde::Deserialize;

use super::collect;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Entry {
    name: Option<String>,
    kind: Option<Kind>,
    urls: Vec<String>,
    model: Option<String>,
    policies: Option<Vec<String>>,
    models: Vec<String>,
    key_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    version_labels: BTreeMap<String, i64>,
    vocabulary: Option<u32>,
    mode: Mode,
    tokenizer: Option<PathBuf>,
    template: Option<PathBuf>,
    family: Option<toml::Value>,
    context_tokens: Option<u32>,
    tool_call_parser: Option<String>,
    reasoning_parser: Option<String>,
    pass: Vec<String>,
    special_tokens_in_text: Option<SpecialTokens>,
    later_system: Option<Later>,
    images: Images,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Sglang,
    Vllm,
    Openai,
}

impl Kind {
    fn engine(self) -> EngineKind {
        match self {
            Self::Sglang => EngineKind::Sglang,
            Self::Vllm => EngineKind::Vllm,
            Self::Openai => EngineKind::Openai,
        }
    }
}

/// What becomes of special tokens in the texts of agents.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SpecialTokens {
    Allow,
    Escape,
    Refuse,
}

impl SpecialTokens {
    fn in_text(self) -> SpecialTokensInText {
        match self {
            Self::Allow => SpecialTokensInText::Allow,
            Self::Escape => SpecialTokensInText::Escape,
            Self::Refuse => SpecialTokensInText::Refuse,
        }
    }
}

/// What becomes of system messages behind the first message.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Later {
    Keep,
    User,
}

impl Later {
    fn system(self) -> LaterSystem {
        match self {
            Self::Keep => LaterSystem::Keep,
            Self::User => LaterSystem::User,
        }
    }
}

/// What becomes of images in messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Images {
    #[default]
    Refuse,
    Text,
}

/// Who renders prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// The engine, which tells their ids.
    #[default]
    Observe,
    /// The service, which sends ids.
    Exact,
}

/// The tokens that end answers, in place of the name of a family.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct FamilyTokens {
    stops: Vec<String>,
    close: Option<String>,
    trims: Vec<String>,
}

impl Entry {
    /// What renders prompts in the mode exact. The other keys belong only to this mode.
    fn exact(&mut self, at: &str, kind: EngineKind, violations: &mut Vec<Violation>) -> Option<ExactConfig> {
        let mut refuse = |key: &str, detail: &str| {
            violations.push(Violation { pointer: format!("{at}/{key}"), detail: detail.to_owned() });
        };
        if self.mode == Mode::Observe {
            let given = [
                ("tokenizer", self.tokenizer.is_some()),
                ("template", self.template.is_some()),
                ("family", self.family.is_some()),
                ("context_tokens", self.context_tokens.is_some()),
                ("tool_call_parser", self.tool_call_parser.is_some()),
                ("reasoning_parser", self.reasoning_parser.is_some()),
                ("special_tokens_in_text", self.special_tokens_in_text.is_some()),
            ];
            for (key, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
                refuse(key, "belongs to mode = \"exact\"");
            }
            return None;
        }
        match (kind, self.context_tokens) {
            (EngineKind::Openai, _) => refuse("mode", "exact needs an upstream of kind `sglang` or `vllm`"),
            (EngineKind::Vllm, None) => {
                refuse("context_tokens", "is required: the value of vLLM's --max-model-len, because it must be told");
            }
            (_, Some(0)) => refuse("context_tokens", "must be at least 1"),
            _ => {}
        }
        if self.tokenizer.is_none() {
            refuse("tokenizer", "is required for mode = \"exact\": the path of the model's tokenizer.json");
        }
        let family = match self.family.take() {
            None => FamilyConfig::Named("qwen".to_owned()),
            Some(toml::Value::String(name)) => FamilyConfig::Named(name),
            Some(toml::Value::Table(table)) => {
                let tokens: FamilyTokens = collect::read(&format!("{at}/family"), table, violations);
                FamilyConfig::Given { stops: tokens.stops, close: tokens.close, trims: tokens.trims }
            }
            Some(_) => {
                refuse("family", "must be the name of a family, or a table with `stops`, `close` and `trims`");
                return None;
            }
        };
        let special_tokens_in_text = self.special_tokens_in_text.map(SpecialTokens::in_text).unwrap_or_default();
        Some(ExactConfig {
            tokenizer: self.tokenizer.take()?,
            template: self.template.take(),
            family,
            special_tokens_in_text,
        })
    }
}

/// The upstreams of the file.
pub(super) fn read(sent: Option<toml::Value>, violations: &mut Vec<Violation>) -> Vec<UpstreamConfig> {
    let mut names = BTreeSet::new();
    let tables = collect::tables("upstream", sent, violations);
    tables.into_iter().filter_map(|(at, table)| upstream(&at, table, &mut names, violations)).collect()
}

fn upstream(
    at: &str,
    table: toml::Table,
    names: &mut BTreeSet<String>,
    violations: &mut Vec<Violation>,
) -> Option<UpstreamConfig> {
    let before = violations.len();
    let mut entry: Entry = collect::read(at, table, violations);
    let exact = entry.kind.and_then(|kind| entry.exact(at, kind.engine(), violations));
    let mut refuse = |key: &str, detail: String| violations.push(Violation { pointer: format!("{at}/{key}"), detail });
    let name = match entry.name.take().map(|name| check_name(&name).map(|()| name)) {
        Some(Ok(name)) if names.insert(name.clone()) => Ok(name),
        Some(Ok(name)) => Err(format!("the upstream `{name}` appears twice")),
        Some(Err(detail)) => Err(detail),
        None => Err("is required and must be text".to_owned()),
    };
    let name = name.map_err(|detail| refuse("name", detail)).ok();
    let Some(kind) = entry.kind.map(Kind::engine) else {
        refuse("kind", "is required: `sglang`, `vllm` or `openai`".to_owned());
        return None;
    };
    // An upstream that names models and no policies answers only calls that are not recorded.
    let globs = entry.policies.or_else(|| entry.models.is_empty().then(|| vec!["*".to_owned()]));
    let globs = globs.filter(|globs| !globs.is_empty());
    let policies = globs.map(|globs| PolicyGlobs::parse(&globs)).transpose();
    let policies = policies.map_err(|(index, error)| refuse(&format!("policies/{index}"), error.to_string()));
    let mut wrong = entry.models.iter().enumerate().filter_map(|(index, name)| Some((index, check_name(name).err()?)));
    if let Some((index, detail)) = wrong.next() {
        refuse(&format!("models/{index}"), detail);
    }
    if let Some((label, _)) = entry.version_labels.iter().find(|(_, version)| **version < 0) {
        refuse(&format!("version_labels/{label}"), "must be 0 or above".to_owned());
    }
    for (index, name) in entry.pass.iter().enumerate() {
        if let Err(detail) = check_pass(name) {
            refuse(&format!("pass/{index}"), detail);
        }
    }
    if let Some(Err(detail)) = entry.model.as_deref().map(check_name) {
        refuse("model", detail);
    }
    let name = name?;
    let mut options = match UpstreamOptions::new(name.clone(), kind, &entry.urls) {
        Ok(options) => options,
        Err(error) => {
            refuse("urls", error.to_string());
            return None;
        }
    };
    options.version_labels = entry.version_labels;
    options.vocabulary = entry.vocabulary;
    options.context_tokens = entry.context_tokens;
    options.pass = entry.pass;
    let (tool_call, reasoning) = (entry.tool_call_parser, entry.reasoning_parser);
    options.parsers = (tool_call.is_some() || reasoning.is_some()).then_some(Parsers { tool_call, reasoning });
    if violations.len() > before {
        return None;
    }
    Some(UpstreamConfig {
        options,
        model: entry.model.unwrap_or(name),
        policies: policies.ok()?,
        models: entry.models,
        exact,
        images_as_text: entry.images == Images::Text,
        later_system: entry.later_system.map(Later::system),
        key_file: entry.key_file,
        ca_file: entry.ca_file,
    })
}
