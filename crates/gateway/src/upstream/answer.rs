//! An engine's answer as it was sent. Everything may be missing: `check` says what must be there.

use std::fmt;

use serde::{Deserialize, Deserializer, de::Visitor};
use serde_json::value::RawValue;

use super::{
    columns::{self, Choices, Ids, Matched, MetaLogprobs, TokenLogprobs},
    fault::Fault,
};
use crate::completion::{AssistantMessage, ToolCall};

/// The longest fingerprint that is kept of an answer. It is stored with each call.
const FINGERPRINT_BYTES_MAX: usize = 256;

/// One answer of a chat endpoint: SGLang's, vLLM's, or another with their fields.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineAnswer {
    choices: Option<Choices<Choice>>,
    /// vLLM puts them here, SGLang into the choice.
    prompt_token_ids: Option<Ids>,
    usage: Option<WireUsage>,
    metadata: Option<Versions>,
    system_fingerprint: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Choice {
    pub(super) message: Option<WireMessage>,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<String>,
    /// SGLang's name.
    matched_stop: Option<Matched>,
    /// vLLM's name.
    stop_reason: Option<Matched>,
    prompt_token_ids: Option<Ids>,
    token_ids: Option<Ids>,
    /// Newer versions of SGLang have this name.
    response_token_ids: Option<Ids>,
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
    #[serde(deserialize_with = "columns::tool_calls")]
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
    pub(super) content: Option<TokenLogprobs>,
}

/// What SGLang says about a choice beside OpenAI's fields. The fields of [`Versions`] are repeated here, because serde
/// keeps all unknown fields in memory where a structure is flattened into another one.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct MetaInfo {
    /// It is complete where `logprobs.content` is too short.
    pub(super) output_token_logprobs: Option<MetaLogprobs>,
    finish_reason: Option<MetaFinish>,
    weight_version: Option<Label>,
    weight_versions: Option<Vec<LabelSpan>>,
}

#[derive(Debug, Deserialize)]
struct MetaFinish {
    r#type: Option<String>,
    matched: Option<Matched>,
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Label {
    Number(i64),
    Text(String),
}

impl<'de> Deserialize<'de> for Label {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrText;
        impl Visitor<'_> for NumberOrText {
            type Value = Label;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a label of weights, which is an integer or a text")
            }

            fn visit_i64<E>(self, number: i64) -> Result<Label, E> {
                Ok(Label::Number(number))
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Label, E> {
                i64::try_from(number).map(Label::Number).map_err(E::custom)
            }

            fn visit_str<E>(self, text: &str) -> Result<Label, E> {
                Ok(Label::Text(text.to_owned()))
            }
        }
        deserializer.deserialize_any(NumberOrText)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WireUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
    completion_tokens_details: Option<CompletionDetails>,
    /// SGLang has it here.
    reasoning_tokens: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct CompletionDetails {
    reasoning_tokens: Option<u64>,
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
    reasoning_tokens: Option<u64>,
    output_token_logprobs: Option<MetaLogprobs>,
    finish_reason: Option<MetaFinish>,
    weight_version: Option<Label>,
    weight_versions: Option<Vec<LabelSpan>>,
}

impl From<Generated> for EngineAnswer {
    fn from(Generated { meta_info }: Generated) -> Self {
        let GeneratedInfo { prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, .. } = meta_info;
        let usage = WireUsage {
            prompt_tokens,
            completion_tokens,
            prompt_tokens_details: Some(PromptDetails { cached_tokens }),
            reasoning_tokens,
            ..WireUsage::default()
        };
        let GeneratedInfo { output_token_logprobs, finish_reason, weight_version, weight_versions, .. } = meta_info;
        let info = MetaInfo { output_token_logprobs, finish_reason, weight_version, weight_versions };
        let choice = Choice { meta_info: Some(info), ..Choice::default() };
        Self { usage: Some(usage), choices: Some(Choices { first: Some(choice), count: 1 }), ..Self::default() }
    }
}

impl EngineAnswer {
    pub(super) fn read(body: &[u8]) -> Result<Self, Fault> {
        serde_json::from_slice(body).map_err(|error| Fault::Shape { why: error.to_string() })
    }

    /// Adds the next part of an answer that comes as events. False if it is no part of an answer.
    pub(super) fn append(&mut self, part: Self) -> bool {
        let Self { choices, prompt_token_ids, usage, metadata: _, system_fingerprint } = part;
        if choices.is_none() && usage.is_none() {
            return false;
        }
        self.prompt_token_ids = self.prompt_token_ids.take().or(prompt_token_ids);
        self.usage = usage.or(self.usage.take());
        self.system_fingerprint = self.system_fingerprint.take().or(system_fingerprint);
        match (self.choices.as_mut(), choices) {
            (Some(Choices { first: Some(before), .. }), Some(Choices { first: Some(next), .. })) => before.append(next),
            (None, Some(choices @ Choices { first: Some(_), .. })) => self.choices = Some(choices),
            // The counts come in an event of their own.
            _ => {}
        }
        true
    }

    /// Whether the engine said why the answer ended.
    pub(super) fn has_ended(&self) -> bool {
        self.choice().is_some_and(|choice| choice.finish().is_some())
    }

    /// The sampled ids.
    pub(super) fn sampled_ids(&self) -> &[i32] {
        self.choice().and_then(Choice::sampled_ids).map_or(&[], |ids| &ids.ids)
    }

    /// Whether the engine ended the call for its own reasons.
    pub(super) fn is_aborted(&self) -> bool {
        self.choice().is_some_and(|choice| choice.finish() == Some("abort"))
    }

    pub(super) fn only_choice(&self) -> Result<&Choice, Fault> {
        match &self.choices {
            Some(Choices { first: Some(choice), count: 1 }) => Ok(choice),
            other => Err(Fault::Choices { count: other.as_ref().map_or(0, |choices| choices.count) }),
        }
    }

    fn choice(&self) -> Option<&Choice> {
        self.choices.as_ref()?.first.as_ref()
    }

    pub(super) fn prompt_ids(&self) -> Option<&Ids> {
        let of_choice = self.choice().and_then(|choice| choice.prompt_token_ids.as_ref());
        of_choice.or(self.prompt_token_ids.as_ref()).filter(|ids| !ids.ids.is_empty())
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

    /// How many of the sampled ids were reasoning.
    pub(super) fn reasoning_tokens(&self) -> Option<u64> {
        let usage = self.usage.as_ref()?;
        let details = usage.completion_tokens_details.as_ref().and_then(|details| details.reasoning_tokens);
        details.or(usage.reasoning_tokens)
    }

    pub(super) fn system_fingerprint(&self) -> Option<String> {
        self.system_fingerprint.clone().filter(|text| text.len() <= FINGERPRINT_BYTES_MAX)
    }

    /// What the engine says about the weights, from the place that says more.
    pub(super) fn versions(&self) -> Versions {
        if let Some(spans) = self.choice().and_then(|choice| choice.weight_versions.clone()) {
            return Versions { weight_version: None, weight_versions: Some(spans) };
        }
        let of_choice = self.choice().and_then(|choice| choice.meta_info.as_ref()).map(|info| Versions {
            weight_version: info.weight_version.clone(),
            weight_versions: info.weight_versions.clone(),
        });
        let mut found = self.metadata.iter().chain(&of_choice);
        let with_spans = found.clone().find(|versions| versions.weight_versions.is_some());
        with_spans.or_else(|| found.find(|versions| versions.weight_version.is_some())).cloned().unwrap_or_default()
    }
}

impl Choice {
    /// Adds the next part, of which vLLM's endpoint of ids says these things.
    fn append(&mut self, next: Self) {
        self.finish_reason = next.finish_reason.or(self.finish_reason.take());
        self.stop_reason = next.stop_reason.or(self.stop_reason.take());
        self.weight_versions = next.weight_versions.or(self.weight_versions.take());
        if let Some(more) = &next.token_ids {
            self.token_ids.get_or_insert_default().append(more);
        }
        if let Some(more) = next.logprobs.and_then(|logprobs| logprobs.content) {
            self.logprobs.get_or_insert_default().content.get_or_insert_default().append(&more);
        }
    }

    pub(super) fn finish(&self) -> Option<&str> {
        let meta = self.meta_finish().and_then(|finish| finish.r#type.as_deref());
        // SGLang's chat endpoint may write "stop" for a call that its scheduler aborted.
        if meta == Some("abort") { meta } else { self.finish_reason.as_deref().or(meta) }
    }

    pub(super) fn sampled_ids(&self) -> Option<&Ids> {
        self.token_ids.as_ref().or(self.response_token_ids.as_ref())
    }

    pub(super) fn stop(&self) -> Option<&Matched> {
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
