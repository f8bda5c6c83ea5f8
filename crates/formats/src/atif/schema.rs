//! The fields of ATIF 1.8, which has those of all earlier versions. Other fields are refused.

use std::fmt;

use forebay_wire::Object;
use serde::{Deserialize, Deserializer, Serialize, de};
use serde_json::value::RawValue;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_field_names, reason = "these are the names of the format")]
pub(super) struct Trajectory {
    pub(super) schema_version: String,
    pub(super) session_id: Option<String>,
    pub(super) trajectory_id: Option<String>,
    pub(super) agent: Object<Agent>,
    pub(super) steps: Vec<Object<Step>>,
    #[serde(rename = "notes")]
    _notes: Option<String>,
    #[serde(rename = "final_metrics")]
    _final_metrics: Option<Object<FinalMetrics>>,
    #[serde(rename = "continued_trajectory_ref")]
    _continued_trajectory_ref: Option<String>,
    pub(super) extra: Option<Free>,
    pub(super) subagent_trajectories: Option<Vec<Object<Self>>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Agent {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) model_name: Option<String>,
    pub(super) tool_definitions: Option<Vec<Free>>,
    #[serde(rename = "extra")]
    _extra: Option<Free>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FinalMetrics {
    #[serde(rename = "total_prompt_tokens")]
    _total_prompt_tokens: Option<i64>,
    #[serde(rename = "total_completion_tokens")]
    _total_completion_tokens: Option<i64>,
    #[serde(rename = "total_cached_tokens")]
    _total_cached_tokens: Option<i64>,
    #[serde(rename = "total_cost_usd")]
    _total_cost_usd: Option<f64>,
    #[serde(rename = "total_steps")]
    _total_steps: Option<i64>,
    #[serde(rename = "extra")]
    _extra: Option<Free>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_field_names, reason = "these are the names of the format")]
pub(super) struct Step {
    pub(super) step_id: i64,
    #[serde(rename = "timestamp")]
    _timestamp: Option<String>,
    pub(super) source: Source,
    pub(super) model_name: Option<String>,
    pub(super) reasoning_effort: Option<Effort>,
    pub(super) message: Content,
    pub(super) reasoning_content: Option<String>,
    pub(super) tool_calls: Option<Vec<Object<ToolCall>>>,
    pub(super) observation: Option<Object<Observation>>,
    pub(super) metrics: Option<Object<Metrics>>,
    #[serde(rename = "extra")]
    _extra: Option<Free>,
    pub(super) llm_call_count: Option<i64>,
    pub(super) is_copied_context: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Source {
    System,
    User,
    Agent,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Metrics {
    #[serde(rename = "prompt_tokens")]
    _prompt_tokens: Option<i64>,
    #[serde(rename = "completion_tokens")]
    _completion_tokens: Option<i64>,
    #[serde(rename = "cached_tokens")]
    _cached_tokens: Option<i64>,
    #[serde(rename = "cost_usd")]
    _cost_usd: Option<f64>,
    pub(super) prompt_token_ids: Option<Vec<i32>>,
    pub(super) completion_token_ids: Option<Vec<i32>>,
    pub(super) logprobs: Option<Vec<f32>>,
    #[serde(rename = "extra")]
    _extra: Option<Free>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_field_names, reason = "these are the names of the format")]
pub(super) struct ToolCall {
    pub(super) tool_call_id: String,
    pub(super) function_name: String,
    pub(super) arguments: Free,
    #[serde(rename = "extra")]
    _extra: Option<Free>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Observation {
    pub(super) results: Vec<Object<ObservationResult>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ObservationResult {
    pub(super) source_call_id: Option<String>,
    pub(super) content: Option<Content>,
    pub(super) subagent_trajectory_ref: Option<Vec<Object<SubagentRef>>>,
    #[serde(rename = "extra")]
    _extra: Option<Free>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SubagentRef {
    pub(super) trajectory_id: Option<String>,
    pub(super) trajectory_path: Option<String>,
    pub(super) session_id: Option<String>,
    #[serde(rename = "extra")]
    _extra: Option<Free>,
}

/// One part of a message.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    pub(super) r#type: PartType,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) source: Option<PartSource>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum PartType {
    Text,
    Image,
    Audio,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartSource {
    pub(super) media_type: String,
    pub(super) path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) duration_sec: Option<f64>,
}

/// A text, or its parts.
#[derive(Debug)]
pub(super) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;

        impl<'de> de::Visitor<'de> for ContentVisitor {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or an array of parts")
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_string<E>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text))
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
                let mut parts = Vec::new();
                while let Some(Object(part)) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(Content::Parts(parts))
            }
        }

        deserializer.deserialize_any(ContentVisitor)
    }
}

/// A free-form object.
#[derive(Debug, Serialize)]
pub(super) struct Free(Box<RawValue>);

impl Free {
    pub(super) fn get(&self) -> &str {
        self.0.get()
    }
}

impl<'de> Deserialize<'de> for Free {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        if text.get().starts_with('{') { Ok(Self(text)) } else { Err(de::Error::custom("must be an object")) }
    }
}

/// The effort of reasoning: a text or a number.
#[derive(Debug)]
pub(super) struct Effort;

impl<'de> Deserialize<'de> for Effort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let is_known = text.get().starts_with(|first: char| first == '"' || first == '-' || first.is_ascii_digit());
        if is_known { Ok(Self) } else { Err(de::Error::custom("must be a text or a number")) }
    }
}
