//! The shape of a decoder, parsed from a checkpoint's `config.json`.
//!
//! A key that changes the computation and is unknown to this crate must not be ignored, because the model would load
//! and silently compute wrong results. So every key is read, known to have no effect, or refused by name.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::rope::RopeScaling;

/// The decoder families, by their name in `architectures`, with their differences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `LlamaForCausalLM`: optional biases, in attention and in the feed-forward part.
    Llama,
    /// `Qwen2ForCausalLM`, of Qwen 2 and 2.5: biases on queries, keys and values only.
    Qwen2,
    /// `Qwen3ForCausalLM`, dense: queries and keys are normalized per head.
    Qwen3,
}

/// A decoder's hyperparameters, in the terms of `config.json`.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each stands for a tensor that is there or not")]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Rows of the embedding and of the head.
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the feed-forward part.
    pub intermediate_size: i64,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of the queries.
    pub num_attention_heads: i64,
    /// Heads of keys and values; divides the heads of the queries.
    pub num_key_value_heads: i64,
    /// Width of one head; even.
    pub head_dim: i64,
    /// Added to the mean square in every normalization.
    pub rms_norm_eps: f64,
    /// The longest sequence that the model was trained on, in tokens. It is not enforced.
    pub max_position_embeddings: i64,
    /// Base of the rotation's frequencies.
    pub rope_theta: f64,
    /// How the rotation is extended to more positions.
    pub rope_scaling: RopeScaling,
    /// Biases on the projections to queries, keys and values.
    pub query_key_value_bias: bool,
    /// A bias on the projection out of attention.
    pub attention_output_bias: bool,
    /// Biases on the three projections of the feed-forward part.
    pub mlp_bias: bool,
    /// True if the head is the embedding and has no tensor of its own.
    pub tie_word_embeddings: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Ids of the tokens that end a sequence; empty if the file names none.
    pub end_tokens: Vec<i64>,
}

/// Why a `config.json` was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The text is not JSON, or not an object.
    #[error("not a JSON object")]
    Syntax(#[from] serde_json::Error),
    /// A required key is missing.
    #[error("`{0}` is missing")]
    Missing(&'static str),
    /// A value has the wrong type.
    #[error("`{key}` has the wrong type")]
    Type {
        /// The key.
        key: String,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// The value requires something that is not implemented or not possible.
    #[error("`{key}` is {value}: {reason}")]
    Unsupported {
        /// The key, with its parent for a nested one (`rope_scaling.type`).
        key: String,
        /// The value, as JSON.
        value: String,
        /// The supported values.
        reason: &'static str,
    },
    /// A key that may change what the model computes.
    #[error("`{0}` is unknown, and the model may not be computed correctly without it")]
    Unknown(String),
}

/// Keys that have no effect here: names and versions, settings of generation and of returned values, and settings of
/// training that the trainer's own configuration replaces.
const WITHOUT_EFFECT: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "attn_implementation",
    "bos_token_id",
    "do_sample",
    "dtype",
    "id2label",
    "is_llama_config",
    "label2id",
    "max_length",
    "max_sequence_length",
    // From this layer on Qwen would use a sliding window, which is refused.
    "max_window_layers",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    // These keys are read only if `use_sliding_window` is set.
    "sliding_window",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

impl ModelConfig {
    /// Parses the text of a `config.json`.
    pub fn parse(json: &str) -> Result<Self, ConfigError> {
        let mut keys = Keys::new(serde_json::from_str(json)?, "");
        let architecture = architecture(&mut keys)?;
        let hidden_size = keys.positive("hidden_size")?;
        let num_attention_heads = keys.positive("num_attention_heads")?;
        let max_position_embeddings = keys.positive("max_position_embeddings")?;
        let attention_bias = keys.optional("attention_bias")?.unwrap_or(false);
        let (rope_theta, rope_scaling) = rope(&mut keys, max_position_embeddings)?;

        let config = Self {
            architecture,
            vocab_size: keys.positive("vocab_size")?,
            hidden_size,
            intermediate_size: keys.positive("intermediate_size")?,
            num_hidden_layers: keys.positive("num_hidden_layers")? as usize,
            num_attention_heads,
            num_key_value_heads: keys.optional("num_key_value_heads")?.unwrap_or(num_attention_heads),
            head_dim: keys.optional("head_dim")?.unwrap_or(match architecture {
                Architecture::Llama | Architecture::Qwen2 => hidden_size / num_attention_heads,
                Architecture::Qwen3 => 128,
            }),
            rms_norm_eps: keys.optional("rms_norm_eps")?.unwrap_or(1e-6),
            max_position_embeddings,
            rope_theta,
            rope_scaling,
            query_key_value_bias: attention_bias || architecture == Architecture::Qwen2,
            attention_output_bias: attention_bias && architecture != Architecture::Qwen2,
            mlp_bias: keys.optional("mlp_bias")?.unwrap_or(false),
            tie_word_embeddings: keys.optional("tie_word_embeddings")?.unwrap_or(false),
            initializer_range: keys.optional("initializer_range")?.unwrap_or(0.02),
            end_tokens: end_tokens(&mut keys)?,
        };
        keys.require("hidden_act", &Value::from("silu"), "only silu is supported")?;
        keys.require("attention_dropout", &Value::from(0.0), "dropout is not supported")?;
        keys.require("pretraining_tp", &Value::from(1), "only 1 is supported")?;
        keys.require("use_sliding_window", &Value::from(false), "windowed attention is not supported")?;
        keys.require("use_mrope", &Value::from(false), "positions of several dimensions are not supported")?;
        keys.require(
            "rope_interleaved",
            &Value::from(false),
            "only rotation of halves is supported, not of neighbouring pairs",
        )?;
        full_attention(&mut keys)?;
        keys.finish(WITHOUT_EFFECT)?;
        config.check()?;
        Ok(config)
    }

    /// Checks that the sizes fit each other as the parts of a model assume.
    fn check(&self) -> Result<(), ConfigError> {
        let heads = self.num_key_value_heads;
        if heads < 1 || self.num_attention_heads % heads != 0 {
            return Err(unsupported("num_key_value_heads", &heads.into(), "it must divide num_attention_heads"));
        }
        if self.head_dim < 2 || self.head_dim % 2 != 0 {
            return Err(unsupported("head_dim", &self.head_dim.into(), "it must be even"));
        }
        if self.mlp_bias && self.architecture != Architecture::Llama {
            return Err(unsupported("mlp_bias", &true.into(), "only Llama supports it"));
        }
        Ok(())
    }
}

fn architecture(keys: &mut Keys) -> Result<Architecture, ConfigError> {
    let names: Vec<String> = keys.optional("architectures")?.ok_or(ConfigError::Missing("architectures"))?;
    let [name] = names.as_slice() else {
        return Err(unsupported("architectures", &names.into(), "it must name one"));
    };
    match name.as_str() {
        "LlamaForCausalLM" | "LlamaForSequenceClassification" => Ok(Architecture::Llama),
        "Qwen2ForCausalLM" | "Qwen2ForSequenceClassification" => Ok(Architecture::Qwen2),
        "Qwen3ForCausalLM" | "Qwen3ForSequenceClassification" => Ok(Architecture::Qwen3),
        other => Err(unsupported(
            "architectures",
            &other.into(),
            "supported are LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM",
        )),
    }
}

/// Reads the rotation's base and scaling from the keys of transformers 4 or 5.
fn rope(keys: &mut Keys, max_position_embeddings: i64) -> Result<(f64, RopeScaling), ConfigError> {
    let top_theta: Option<f64> = keys.optional("rope_theta")?;
    let old: Option<Map<String, Value>> = keys.optional("rope_scaling")?;
    let new: Option<Map<String, Value>> = keys.optional("rope_parameters")?;
    let (parent, entries) = match (old, new) {
        (Some(old), Some(_)) => {
            return Err(unsupported("rope_scaling", &old.into(), "rope_parameters is given as well"));
        }
        (Some(old), None) => ("rope_scaling.", old),
        (None, Some(new)) => ("rope_parameters.", new),
        (None, None) => ("", Map::new()),
    };
    let mut keys = Keys::new(entries, parent);
    let theta = keys.optional("rope_theta")?.or(top_theta).unwrap_or(10_000.0);
    let scaling = RopeScaling::parse(&mut keys, max_position_embeddings)?;
    keys.require("partial_rotary_factor", &Value::from(1.0), "only rotation of whole heads is supported")?;
    keys.finish(&[])?;
    Ok((theta, scaling))
}

fn end_tokens(keys: &mut Keys) -> Result<Vec<i64>, ConfigError> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum OneOrMore {
        One(i64),
        More(Vec<i64>),
    }
    Ok(match keys.optional("eos_token_id")? {
        None => Vec::new(),
        Some(OneOrMore::One(token)) => vec![token],
        Some(OneOrMore::More(tokens)) => tokens,
    })
}

fn full_attention(keys: &mut Keys) -> Result<(), ConfigError> {
    let types: Vec<String> = keys.optional("layer_types")?.unwrap_or_default();
    match types.iter().find(|kind| *kind != "full_attention") {
        None => Ok(()),
        Some(other) => Err(unsupported("layer_types", &other.as_str().into(), "only full_attention is supported")),
    }
}

pub(super) fn unsupported(key: &str, value: &Value, reason: &'static str) -> ConfigError {
    ConfigError::Unsupported { key: key.into(), value: value.to_string(), reason }
}

/// The keys of an object that have not been read yet.
pub(super) struct Keys {
    unread: Map<String, Value>,
    parent: &'static str,
}

impl Keys {
    /// Wraps an object whose keys are shown in errors with the prefix `parent`. Null counts as absent, as it does in
    /// transformers.
    fn new(mut entries: Map<String, Value>, parent: &'static str) -> Self {
        entries.retain(|_, value| !value.is_null());
        Self { unread: entries, parent }
    }

    pub(super) fn name(&self, key: &str) -> String {
        format!("{}{key}", self.parent)
    }

    pub(super) fn optional<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.unread.remove(key) else { return Ok(None) };
        match serde_json::from_value(value) {
            Ok(value) => Ok(Some(value)),
            Err(source) => Err(ConfigError::Type { key: self.name(key), source }),
        }
    }

    fn positive(&mut self, key: &'static str) -> Result<i64, ConfigError> {
        match self.optional::<i64>(key)? {
            None => Err(ConfigError::Missing(key)),
            Some(number) if number < 1 => Err(unsupported(key, &number.into(), "it must be positive")),
            Some(number) => Ok(number),
        }
    }

    /// Refuses every value of `key` except the implemented one. Numbers are compared as numbers, so that 1 equals 1.0.
    fn require(&mut self, key: &str, expected: &Value, reason: &'static str) -> Result<(), ConfigError> {
        match self.unread.remove(key) {
            None => Ok(()),
            Some(value) if value == *expected => Ok(()),
            Some(value) if value.is_number() && value.as_f64() == expected.as_f64() => Ok(()),
            Some(value) => Err(unsupported(&self.name(key), &value, reason)),
        }
    }

    fn finish(self, without_effect: &[&str]) -> Result<(), ConfigError> {
        match self.unread.keys().find(|key| !without_effect.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => Err(ConfigError::Unknown(self.name(key))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn llama(changes: Value) -> Result<ModelConfig, ConfigError> {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
        });
        let (Value::Object(config), Value::Object(changes)) = (&mut config, changes) else {
            panic!("both are objects")
        };
        config.extend(changes);
        ModelConfig::parse(&serde_json::to_string(config).expect("a map is JSON"))
    }

    fn refusal(changes: Value) -> String {
        llama(changes).expect_err("the change is refused").to_string()
    }

    #[test]
    fn absent_keys_take_the_defaults_of_the_architecture() {
        let config = llama(json!({ "eos_token_id": [1, 2] })).expect("valid");
        assert_eq!(config.head_dim, 8);
        assert_eq!(config.num_key_value_heads, 4);
        assert_eq!(config.rope_scaling, RopeScaling::None);
        assert!((config.rope_theta - 10_000.0).abs() < f64::EPSILON);
        assert!(!config.query_key_value_bias && !config.tie_word_embeddings);
        assert_eq!(config.end_tokens, [1, 2]);
        let qwen = llama(json!({ "architectures": ["Qwen3ForCausalLM"] })).expect("valid");
        assert_eq!(qwen.head_dim, 128);
    }

    #[test]
    fn both_spellings_of_the_rotation_mean_the_same() {
        let old = llama(json!({ "rope_theta": 5e5, "rope_scaling": { "type": "linear", "factor": 2 } }));
        let new = llama(json!({ "rope_parameters": { "rope_theta": 5e5, "rope_type": "linear", "factor": 2.0 } }));
        assert_eq!(old.expect("valid"), new.expect("valid"));
    }

    #[test]
    fn every_refusal_names_the_key() {
        let cases = [
            (json!({ "architectures": ["MixtralForCausalLM"] }), "architectures"),
            (json!({ "hidden_act": "gelu" }), "hidden_act"),
            (json!({ "use_sliding_window": true }), "use_sliding_window"),
            (json!({ "layer_types": ["full_attention", "sliding_attention"] }), "layer_types"),
            (json!({ "num_key_value_heads": 3 }), "num_key_value_heads"),
            (json!({ "quantization_config": {} }), "quantization_config"),
            (json!({ "rope_scaling": { "rope_type": "dynamic", "factor": 2 } }), "rope_scaling.rope_type"),
            (json!({ "rope_parameters": { "rope_type": "linear" } }), "rope_parameters.factor"),
            (json!({ "rope_parameters": { "rope_type": "default", "novel": 1 } }), "rope_parameters.novel"),
            (json!({ "rope_parameters": { "partial_rotary_factor": 0.5 } }), "rope_parameters.partial_rotary_factor"),
            (json!({ "hidden_size": "wide" }), "hidden_size"),
            (json!({ "hidden_size": null }), "hidden_size"),
        ];
        for (changes, key) in cases {
            let message = refusal(changes);
            assert!(message.contains(&format!("`{key}`")), "{message} names {key}");
        }
    }

    #[test]
    fn a_window_that_is_not_used_is_accepted() {
        llama(json!({ "use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 2 })).expect("valid");
    }
}
