//! Gradients without keeping the activations of every layer.
//!
//! The forward pass keeps only what enters each layer; the backward pass runs the
//! layers once more, one at a time from the last. It costs a second forward pass and
//! saves all but one layer's activations.

use tch::Tensor;

use super::Decoder;
use super::layers::attend_causally;
use super::rope::Rotation;

/// A forward pass that can still be differentiated; see [`Decoder::hidden_recomputed`].
#[derive(Debug)]
#[must_use]
pub struct Recomputed<'decoder> {
    decoder: &'decoder Decoder,
    tokens: Tensor,
    rotation: Rotation,
    /// What entered each layer, and last the final norm.
    inputs: Vec<Tensor>,
    hidden: Tensor,
}

impl Decoder {
    /// The same numbers as [`Decoder::hidden`], to differentiate with
    /// [`Recomputed::backward`] in place of libtorch's own pass.
    pub fn hidden_recomputed(&self, tokens: &Tensor) -> Recomputed<'_> {
        let _guard = tch::no_grad_guard();
        let rotation = self.rotation_from_start(tokens);
        let mut inputs = vec![self.stack.embed(tokens, self.compute())];
        for layer in &self.stack.layers {
            let output = layer.forward(&inputs[inputs.len() - 1], &rotation, attend_causally);
            inputs.push(output);
        }
        let hidden = self.stack.norm.forward(&inputs[inputs.len() - 1]);
        Recomputed { decoder: self, tokens: tokens.shallow_clone(), rotation, inputs, hidden }
    }
}

impl Recomputed<'_> {
    /// The states, `[B, S, H]`, outside any graph: a loss starts from a detached copy
    /// that requires gradients, and passes those it gets to [`Recomputed::backward`].
    pub fn hidden(&self) -> &Tensor {
        &self.hidden
    }

    /// Adds to the gradients of the parameters what `gradient` (`[B, S, H]`, of the loss
    /// by the states) makes of them. The head is not touched, unless it is the embedding.
    pub fn backward(mut self, gradient: &Tensor) {
        let stack = &self.decoder.stack;
        let last = self.inputs.pop().expect("there is an input of the final norm");
        let mut gradient = differentiate(&last, gradient, |input| stack.norm.forward(input));
        for layer in stack.layers.iter().rev() {
            let input = self.inputs.pop().expect("every layer has an input");
            gradient = differentiate(&input, &gradient, |input| layer.forward(input, &self.rotation, attend_causally));
        }
        let embedded = tch::with_grad(|| stack.embed(&self.tokens, self.decoder.compute()));
        pull_back(&embedded, &gradient);
    }
}

/// Runs `function` at `input` once more and returns the gradient by `input`; those by
/// parameters are added to them.
fn differentiate(input: &Tensor, gradient: &Tensor, function: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
    let leaf = input.detach().set_requires_grad(true);
    let output = tch::with_grad(|| function(&leaf));
    pull_back(&output, gradient);
    leaf.grad()
}

/// The scalar's gradient by `output` is `gradient`, exactly and in its kind.
fn pull_back(output: &Tensor, gradient: &Tensor) {
    tch::with_grad(|| (output * gradient.detach()).sum(output.kind()).backward());
}
