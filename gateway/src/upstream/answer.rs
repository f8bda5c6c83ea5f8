//! An engine's answer as it was sent. Everything may be missing: `check` says what must be there.

use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, value::RawValue};

use super::check::Fault;
use crate::completion::{AssistantMessage, ToolCall};

/// One answer of a chat endpoint: SGLang's, vLLM's, or another with their fields.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineAnswer {
    choices: Option<Vec<Choice>>,
    /// vLLM puts them here, SGLang into the choice.
    prompt_token_ids: Option<Vec<i64>>,
    usage: Option<WireUsage>,
    metadata: Option<Versions>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Choice {
    pub(super) message: Option<WireMessage>,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<String>,
    /// SGLang's name.
    matched_stop: Option<Value>,
    /// vLLM's name.
    stop_reason: Option<Value>,
    prompt_token_ids: Option<Vec<i64>>,
    token_ids: Option<Vec<i64>>,
    /// Newer versions of SGLang have this name.
    response_token_ids: Option<Vec<i64>>,
    pub(super) meta_info: Option<MetaInfo>,
    /// vLLM's endpoint of ids has them here.
    weight_versions: Option<Vec<LabelSpan>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WireMessage {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<WireToolCall>>,
}

#[derive(Debug, Deserialize)]
struct WireToolCall {
    id: Option<String>,
    function: WireFunction,
}

#[derive(Debug, Deserialize)]
struct WireFunction {
    name: String,
    /// A text, or an object in the answers of engines that have parsed it.
    arguments: Option<Box<RawValue>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Logprobs {
    pub(super) content: Option<Vec<TokenLogprob>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct TokenLogprob {
    pub(super) logprob: Option<f64>,
    /// Only in answers of vLLM's endpoint of ids.
    #[serde(default)]
    pub(super) token_id: Option<i64>,
    #[serde(default)]
    pub(super) top_logprobs: Option<Vec<TopLogprob>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct TopLogprob {
    pub(super) logprob: Option<f64>,
}

/// What SGLang says about a choice beside OpenAI's fields.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct MetaInfo {
    /// Log-probability, id and text of each sampled token. It is complete where `logprobs.content` is too short.
    pub(super) output_token_logprobs: Option<Vec<MetaLogprob>>,
    finish_reason: Option<MetaFinish>,
    #[serde(flatten)]
    versions: Versions,
}

#[derive(Debug, Deserialize)]
pub(super) struct MetaLogprob(pub(super) Option<f64>, pub(super) i64, #[serde(default)] IgnoredAny);

#[derive(Debug, Deserialize)]
struct MetaFinish {
    r#type: Option<String>,
    matched: Option<Value>,
}

/// What SGLang says about the weights.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Versions {
    pub(super) weight_version: Option<Label>,
    pub(super) weight_versions: Option<Vec<LabelSpan>>,
}

/// A part of the sampled ids, half-open, with the label of the weights that sampled it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct LabelSpan {
    pub(super) version: Label,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// A label of weights.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(super) enum Label {
    Number(i64),
    Text(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WireUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

/// The answer of SGLang's endpoint of ids.
#[derive(Debug, Deserialize)]
pub(super) struct Generated {
    meta_info: GeneratedInfo,
}

#[derive(Debug, Deserialize)]
struct GeneratedInfo {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    #[serde(flatten)]
    info: MetaInfo,
}

impl From<Generated> for EngineAnswer {
    fn from(Generated { meta_info }: Generated) -> Self {
        let GeneratedInfo { prompt_tokens, completion_tokens, cached_tokens, info } = meta_info;
        let prompt_tokens_details = Some(PromptDetails { cached_tokens });
        Self {
            usage: Some(WireUsage { prompt_tokens, completion_tokens, prompt_tokens_details }),
            choices: Some(vec![Choice { meta_info: Some(info), ..Choice::default() }]),
            ..Self::default()
        }
    }
}

impl EngineAnswer {
    pub(super) fn read(body: &[u8]) -> Result<Self, Fault> {
        serde_json::from_slice(body).map_err(|error| Fault::Shape { why: error.to_string() })
    }

    /// Whether the engine ended the call for its own reasons.
    pub(super) fn is_aborted(&self) -> bool {
        self.choices.iter().flatten().any(|choice| choice.finish() == Some("abort"))
    }

    pub(super) fn only_choice(&self) -> Result<&Choice, Fault> {
        match self.choices.as_deref() {
            Some([choice]) => Ok(choice),
            other => Err(Fault::Choices { count: other.map_or(0, <[Choice]>::len) }),
        }
    }

    pub(super) fn prompt_ids(&self) -> Option<&[i64]> {
        let of_choice = self.choices.iter().flatten().find_map(|choice| choice.prompt_token_ids.as_deref());
        of_choice.or(self.prompt_token_ids.as_deref())
    }

    pub(super) fn prompt_tokens(&self) -> Option<u64> {
        self.usage.as_ref()?.prompt_tokens
    }

    pub(super) fn completion_tokens(&self) -> Option<u64> {
        self.usage.as_ref()?.completion_tokens
    }

    pub(super) fn cached_tokens(&self) -> Option<u64> {
        self.usage.as_ref()?.prompt_tokens_details.as_ref()?.cached_tokens
    }

    /// What the engine says about the weights, from the place that says more.
    pub(super) fn versions(&self) -> Versions {
        let mut choices = self.choices.iter().flatten();
        if let Some(spans) = choices.find_map(|choice| choice.weight_versions.clone()) {
            return Versions { weight_version: None, weight_versions: Some(spans) };
        }
        let of_choice = self.choices.iter().flatten().find_map(|choice| choice.meta_info.as_ref());
        let places = [self.metadata.as_ref(), of_choice.map(|info| &info.versions)];
        let mut found = places.into_iter().flatten();
        let with_spans = found.clone().find(|versions| versions.weight_versions.is_some());
        with_spans.or_else(|| found.find(|versions| versions.weight_version.is_some())).cloned().unwrap_or_default()
    }
}

impl Choice {
    pub(super) fn finish(&self) -> Option<&str> {
        let meta = self.meta_finish().and_then(|finish| finish.r#type.as_deref());
        // SGLang's chat endpoint may write "stop" for a call that its scheduler aborted.
        if meta == Some("abort") { meta } else { self.finish_reason.as_deref().or(meta) }
    }

    pub(super) fn sampled_ids(&self) -> Option<&[i64]> {
        self.token_ids.as_deref().or(self.response_token_ids.as_deref())
    }

    pub(super) fn stop(&self) -> Option<&Value> {
        let meta = self.meta_finish().and_then(|finish| finish.matched.as_ref());
        self.matched_stop.as_ref().or(self.stop_reason.as_ref()).or(meta)
    }

    fn meta_finish(&self) -> Option<&MetaFinish> {
        self.meta_info.as_ref()?.finish_reason.as_ref()
    }
}

impl WireMessage {
    /// The message, in which empty texts are absent. A tool call without an id gets one that begins with `rid`.
    pub(super) fn read(&self, rid: &str) -> AssistantMessage {
        let text = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let calls = self.tool_calls.iter().flatten().enumerate().map(|(index, call)| ToolCall {
            id: text(&call.id).unwrap_or_else(|| format!("call_{rid}_{index}")),
            name: call.function.name.clone(),
            arguments: call.function.arguments.as_deref().map(arguments).unwrap_or_default(),
        });
        AssistantMessage {
            content: text(&self.content),
            reasoning: text(&self.reasoning_content).or_else(|| text(&self.reasoning)),
            tool_calls: calls.collect(),
        }
    }
}

/// The arguments of a tool call as text.
fn arguments(value: &RawValue) -> String {
    match serde_json::from_str::<Option<String>>(value.get()) {
        Ok(text) => text.unwrap_or_default(),
        Err(_) => value.get().to_owned(),
    }
}
