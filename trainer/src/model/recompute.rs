//! Computes gradients without keeping the activations of every layer.
//!
//! The forward pass keeps only the input of each layer. The backward pass runs the layers again, one at a time, from
//! the last to the first. This costs a second forward pass and saves the activations of all layers but one.

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
    /// The input of each layer, and last the input of the final norm.
    inputs: Vec<Tensor>,
    hidden: Tensor,
}

impl Decoder {
    /// Computes the same numbers as [`Decoder::hidden`]. Gradients are computed by [`Recomputed::backward`] and not by
    /// libtorch's own backward pass.
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
    /// The states, `[B, S, H]`, outside any graph. Compute the loss from a detached copy that requires gradients, and
    /// pass the gradients of that copy to [`Recomputed::backward`].
    pub fn hidden(&self) -> &Tensor {
        &self.hidden
    }

    /// Adds to the gradients of the parameters, given `gradient`: the gradient `[B, S, H]` of the loss with respect to
    /// the states. The head gets no gradient, unless it is the embedding.
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

/// Runs `function` on `input` again and returns the gradient with respect to `input`. The gradients of parameters are
/// accumulated in them.
fn differentiate(input: &Tensor, gradient: &Tensor, function: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
    let leaf = input.detach().set_requires_grad(true);
    let output = tch::with_grad(|| function(&leaf));
    pull_back(&output, gradient);
    leaf.grad()
}

/// The gradient of this scalar with respect to `output` is exactly `gradient`, in its kind.
fn pull_back(output: &Tensor, gradient: &Tensor) {
    tch::with_grad(|| (output * gradient.detach()).sum(output.kind()).backward());
}
