//! The trainable tensors of a model, in the order and with the names of the checkpoint.
//!
//! They are separate from the layers that compute with them, because optimizers and checkpoints need only one flat
//! list.

use std::collections::HashMap;

use tch::{Device, Tensor};

use super::{Architecture, ModelConfig};

/// Named float32 tensors that require gradients.
///
/// The layers of a model share these tensors, so an optimizer must change them in
/// place, under [`tch::no_grad`].
#[derive(Debug, Default)]
pub struct Parameters {
    entries: Vec<(String, Tensor)>,
    index: HashMap<String, usize>,
}

impl Parameters {
    /// Every name and tensor, in the order of the model: embedding, layers, final norm,
    /// head.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The tensor with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.index.get(name).map(|&index| &self.entries[index].1)
    }

    /// Number of tensors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no tensors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of elements in all tensors.
    #[must_use]
    pub fn count(&self) -> usize {
        self.entries.iter().map(|(_, tensor)| tensor.numel()).sum()
    }

    /// Returns copies on the CPU, which can be read while the originals change. They require no gradients.
    #[must_use]
    pub fn copy_to_cpu(&self) -> Self {
        self.map(|tensor| tensor.detach().to_device(Device::Cpu).copy())
    }

    /// Returns the same names with other tensors.
    #[must_use]
    pub(crate) fn map(&self, change: impl Fn(&Tensor) -> Tensor) -> Self {
        let entries = self.entries.iter().map(|(name, tensor)| (name.clone(), change(tensor))).collect();
        Self { entries, index: self.index.clone() }
    }

    /// Returns the same names with the tensors of `named`, or `None` if `named` lacks one.
    #[must_use]
    pub(crate) fn replaced(&self, named: impl Fn(&str) -> Option<Tensor>) -> Option<Self> {
        let entries: Option<Vec<_>> = self.entries.iter().map(|(name, _)| Some((name.clone(), named(name)?))).collect();
        Some(Self { entries: entries?, index: self.index.clone() })
    }

    /// Appends a float32 tensor and makes it require gradients.
    pub(super) fn push(&mut self, name: String, tensor: &Tensor) {
        self.index.insert(name.clone(), self.entries.len());
        self.entries.push((name, tensor.set_requires_grad(true)));
    }
}

/// What follows the final norm of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    /// Logits over the vocabulary.
    Vocabulary,
    /// One value per token.
    Value,
}

/// How a new parameter is initialised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Initial {
    Normal,
    Zeros,
    Ones,
}

/// A parameter that a model must have.
#[derive(Debug)]
pub(crate) struct ParameterSpec {
    pub(crate) name: String,
    pub(crate) shape: Vec<i64>,
    pub(super) initial: Initial,
}

/// The name of the critic's head; transformers uses the same name for a scalar head.
pub(super) const VALUE_HEAD: &str = "score.weight";
pub(super) const LANGUAGE_HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(super) const FINAL_NORM: &str = "model.norm.weight";

/// Every parameter of a model, in order.
pub(crate) fn layout(config: &ModelConfig, head: Head) -> Vec<ParameterSpec> {
    let mut specs = Vec::new();
    let mut add = |name: &str, shape: &[i64], initial| {
        specs.push(ParameterSpec { name: name.into(), shape: shape.into(), initial });
    };
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let queries = config.num_attention_heads * config.head_dim;
    let keys = config.num_key_value_heads * config.head_dim;

    add(EMBEDDING, &[config.vocab_size, hidden], Initial::Normal);
    for layer in 0..config.num_hidden_layers {
        let prefix = format!("model.layers.{layer}.");
        let mut linear = |name: &str, inputs: i64, outputs: i64, bias: bool| {
            add(&format!("{prefix}{name}.weight"), &[outputs, inputs], Initial::Normal);
            if bias {
                add(&format!("{prefix}{name}.bias"), &[outputs], Initial::Zeros);
            }
        };
        linear("self_attn.q_proj", hidden, queries, config.query_key_value_bias);
        linear("self_attn.k_proj", hidden, keys, config.query_key_value_bias);
        linear("self_attn.v_proj", hidden, keys, config.query_key_value_bias);
        linear("self_attn.o_proj", queries, hidden, config.attention_output_bias);
        linear("mlp.gate_proj", hidden, inner, config.mlp_bias);
        linear("mlp.up_proj", hidden, inner, config.mlp_bias);
        linear("mlp.down_proj", inner, hidden, config.mlp_bias);
        if config.architecture == Architecture::Qwen3 {
            add(&format!("{prefix}self_attn.q_norm.weight"), &[config.head_dim], Initial::Ones);
            add(&format!("{prefix}self_attn.k_norm.weight"), &[config.head_dim], Initial::Ones);
        }
        add(&format!("{prefix}input_layernorm.weight"), &[hidden], Initial::Ones);
        add(&format!("{prefix}post_attention_layernorm.weight"), &[hidden], Initial::Ones);
    }
    add(FINAL_NORM, &[hidden], Initial::Ones);
    match head {
        Head::Vocabulary if config.tie_word_embeddings => {}
        Head::Vocabulary => add(LANGUAGE_HEAD, &[config.vocab_size, hidden], Initial::Normal),
        Head::Value => add(VALUE_HEAD, &[1, hidden], Initial::Zeros),
    }
    specs
}
