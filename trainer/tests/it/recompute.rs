//! Gradients by recomputation equal those of libtorch's own backward pass.

use forebay_trainer::model::{ComputeKind, Decoder};
use tch::{Device, Tensor};

use crate::golden::{Golden, assert_close};

/// The gradients of the golden loss, by recomputation or not.
fn gradients(golden: &Golden, decoder: &Decoder, recompute: bool) -> Vec<(String, Tensor)> {
    let tokens = golden.get("tokens");
    if recompute {
        let forward = decoder.hidden_recomputed(tokens);
        let leaf = forward.hidden().detach().set_requires_grad(true);
        golden.loss(decoder, &leaf).backward();
        forward.backward(&leaf.grad());
    } else {
        golden.loss(decoder, &decoder.hidden(tokens)).backward();
    }
    decoder.parameters().iter().map(|(name, parameter)| (name.to_owned(), parameter.grad())).collect()
}

#[test]
fn recomputed_gradients_equal_ordinary_ones() {
    for golden in Golden::all() {
        let ordinary = gradients(&golden, &golden.decoder(), false);
        let recomputed = gradients(&golden, &golden.decoder(), true);
        assert_eq!(ordinary.len(), recomputed.len());
        for ((name, ordinary), (_, recomputed)) in ordinary.iter().zip(&recomputed) {
            assert_close(&format!("gradients of {name}"), recomputed, ordinary, 1e-6);
        }
    }
}

#[test]
fn recomputed_states_are_the_ordinary_ones_in_bfloat16_too() {
    let golden = Golden::open("qwen3-sharded");
    let decoder = Decoder::load(&golden.checkpoint(), Device::Cpu, ComputeKind::Bfloat16).expect("valid");
    let ordinary = decoder.hidden(golden.get("tokens"));
    let recomputed = decoder.hidden_recomputed(golden.get("tokens"));
    assert_close("states", recomputed.hidden(), &ordinary, 0.0);
}

#[test]
fn gradients_add_up_over_batches_until_they_are_zeroed() {
    let golden = Golden::open("llama3-rope");
    let decoder = golden.decoder();
    let norm = || {
        let (_, gradient) = gradients(&golden, &decoder, true).swap_remove(0);
        gradient.norm().double_value(&[])
    };
    let once = norm();
    assert!((norm() / once - 2.0).abs() < 1e-5);
    for (_, tensor) in decoder.parameters().iter() {
        tensor.shallow_clone().zero_grad();
    }
    assert!((norm() / once - 1.0).abs() < 1e-5);
}
