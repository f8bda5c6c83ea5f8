//! The computing parts of a decoder: projections, norms, one layer, and the stack of layers.
//!
//! They only hold tensors. A stack that shares the parameters is for training; [`Stack::cast`] makes a stack of copies
//! for sampling.

use tch::{Device, Kind, Tensor};

use super::parameters::{EMBEDDING, FINAL_NORM, LANGUAGE_HEAD, VALUE_HEAD};
use super::rope::Rotation;
use super::{Head, ModelConfig, Parameters};

/// Everything between token ids and the head.
#[derive(Debug)]
pub(super) struct Stack {
    embedding: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Norm,
    pub(super) head: Tensor,
}

impl Stack {
    /// Creates a stack that shares the tensors of `parameters`.
    pub(super) fn new(config: &ModelConfig, parameters: &Parameters, head: Head) -> Self {
        let get = |name: &str| parameters.get(name).expect("the layout names every parameter").shallow_clone();
        let head = match head {
            Head::Vocabulary if config.tie_word_embeddings => EMBEDDING,
            Head::Vocabulary => LANGUAGE_HEAD,
            Head::Value => VALUE_HEAD,
        };
        Self {
            embedding: get(EMBEDDING),
            layers: (0..config.num_hidden_layers).map(|index| Layer::new(config, parameters, index)).collect(),
            norm: Norm { weight: get(FINAL_NORM), epsilon: config.rms_norm_eps },
            head: get(head),
        }
    }

    /// Creates a stack of copies of kind `kind` outside any graph. Tensors that have this kind already are shared.
    /// Norms stay float32, the kind in which they compute.
    pub(super) fn cast(&self, kind: Kind) -> Self {
        let _guard = tch::no_grad_guard();
        let embedding = self.embedding.detach().to_kind(kind);
        let tied = self.head.data_ptr() == self.embedding.data_ptr();
        Self {
            head: if tied { embedding.shallow_clone() } else { self.head.detach().to_kind(kind) },
            embedding,
            layers: self.layers.iter().map(|layer| layer.cast(kind)).collect(),
            norm: self.norm.shallow_clone(),
        }
    }

    /// `[B, S]` i64 to `[B, S, H]` of kind `kind`.
    pub(super) fn embed(&self, tokens: &Tensor, kind: Kind) -> Tensor {
        Tensor::embedding(&self.embedding, tokens, -1, false, false).to_kind(kind)
    }

    /// Applies the head: `[.., H]` to `[.., V]` or `[.., 1]` float32.
    pub(super) fn apply_head(&self, hidden: &Tensor) -> Tensor {
        hidden.linear(&self.head.to_kind(hidden.kind()), None::<&Tensor>).to_kind(Kind::Float)
    }
}

/// Divides by the root mean square, in float32 for every kind of input.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Tensor,
    epsilon: f64,
}

impl Norm {
    pub(super) fn forward(&self, input: &Tensor) -> Tensor {
        let normal = input.to_kind(Kind::Float).rms_norm(self.weight.size(), Some(&self.weight), self.epsilon);
        normal.to_kind(input.kind())
    }

    fn shallow_clone(&self) -> Self {
        Self { weight: self.weight.shallow_clone(), epsilon: self.epsilon }
    }
}

/// A projection, computed in the kind of its input.
#[derive(Debug)]
struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    fn forward(&self, input: &Tensor) -> Tensor {
        // The conversion is part of the graph, so that gradients reach the float32 parameters.
        let kind = input.kind();
        input.linear(&self.weight.to_kind(kind), self.bias.as_ref().map(|bias| bias.to_kind(kind)))
    }

    fn cast(&self, kind: Kind) -> Self {
        Self {
            weight: self.weight.detach().to_kind(kind),
            bias: self.bias.as_ref().map(|bias| bias.detach().to_kind(kind)),
        }
    }
}

/// Attention and feed-forward, each after a norm and with a residual connection.
#[derive(Debug)]
pub(super) struct Layer {
    input_norm: Norm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: Option<Norm>,
    key_norm: Option<Norm>,
    post_attention_norm: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
    head_dim: i64,
}

impl Layer {
    fn new(config: &ModelConfig, parameters: &Parameters, index: usize) -> Self {
        let find = |name: &str| parameters.get(&format!("model.layers.{index}.{name}")).map(Tensor::shallow_clone);
        let weight =
            |name: &str| find(&format!("{name}.weight")).expect("the layout names the parameters of every layer");
        let linear = |name: &str| Linear { weight: weight(name), bias: find(&format!("{name}.bias")) };
        let norm = |weight| Norm { weight, epsilon: config.rms_norm_eps };
        Self {
            input_norm: norm(weight("input_layernorm")),
            query: linear("self_attn.q_proj"),
            key: linear("self_attn.k_proj"),
            value: linear("self_attn.v_proj"),
            output: linear("self_attn.o_proj"),
            query_norm: find("self_attn.q_norm.weight").map(norm),
            key_norm: find("self_attn.k_norm.weight").map(norm),
            post_attention_norm: norm(weight("post_attention_layernorm")),
            gate: linear("mlp.gate_proj"),
            up: linear("mlp.up_proj"),
            down: linear("mlp.down_proj"),
            head_dim: config.head_dim,
        }
    }

    fn cast(&self, kind: Kind) -> Self {
        Self {
            input_norm: self.input_norm.shallow_clone(),
            query: self.query.cast(kind),
            key: self.key.cast(kind),
            value: self.value.cast(kind),
            output: self.output.cast(kind),
            query_norm: self.query_norm.as_ref().map(Norm::shallow_clone),
            key_norm: self.key_norm.as_ref().map(Norm::shallow_clone),
            post_attention_norm: self.post_attention_norm.shallow_clone(),
            gate: self.gate.cast(kind),
            up: self.up.cast(kind),
            down: self.down.cast(kind),
            head_dim: self.head_dim,
        }
    }

    /// `[B, S, H]` to `[B, S, H]`.
    ///
    /// `attend` receives rotated queries `[B, heads, S, head_dim]` and rotated keys and values `[B, kv_heads, S,
    /// head_dim]`. It returns the result of attention in the shape of the queries.
    pub(super) fn forward(
        &self,
        input: &Tensor,
        rotation: &Rotation,
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Tensor,
    ) -> Tensor {
        let normal = self.input_norm.forward(input);
        let query = rotation.apply(&self.heads(&self.query, self.query_norm.as_ref(), &normal));
        let key = rotation.apply(&self.heads(&self.key, self.key_norm.as_ref(), &normal));
        let value = self.heads(&self.value, None, &normal);
        let seen = attend(&query, &key, &value).transpose(1, 2).flatten(2, 3);
        let middle = input + self.output.forward(&seen);

        let normal = self.post_attention_norm.forward(&middle);
        let gated = self.gate.forward(&normal).silu() * self.up.forward(&normal);
        middle + self.down.forward(&gated)
    }

    fn heads(&self, projection: &Linear, norm: Option<&Norm>, input: &Tensor) -> Tensor {
        let heads = projection.forward(input).unflatten(-1, [-1, self.head_dim]);
        norm.map_or_else(|| heads.shallow_clone(), |norm| norm.forward(&heads)).transpose(1, 2)
    }
}

/// Attention over whole sequences: each token attends to itself and to earlier tokens.
///
/// Right padding needs no mask, because no token attends to later tokens.
pub(super) fn attend_causally(query: &Tensor, key: &Tensor, value: &Tensor) -> Tensor {
    let attention = |key: &Tensor, value: &Tensor, grouped: bool| {
        Tensor::scaled_dot_product_attention(query, key, value, None::<&Tensor>, 0.0, true, None, grouped)
    };
    // Only these fused kernels support grouped heads. Elsewhere grouped heads would take memory quadratic in the
    // length.
    let knows_groups = match query.device() {
        Device::Cpu => true,
        Device::Cuda(_) => query.kind() == Kind::BFloat16,
        _ => false,
    };
    if knows_groups {
        attention(key, value, true)
    } else {
        attention(&repeat_heads(key, query), &repeat_heads(value, query), false)
    }
}

/// Repeats each head of keys or values for its group of queries.
pub(super) fn repeat_heads(shared: &Tensor, query: &Tensor) -> Tensor {
    let group = query.size()[1] / shared.size()[1];
    if group == 1 { shared.shallow_clone() } else { shared.repeat_interleave_self_int(group, 1, None) }
}
