//! The models compute the same results as transformers.

use forebay_trainer::model::{ComputeKind, Decoder};
use tch::{Device, Kind};

use crate::golden::{Golden, assert_close};

#[test]
fn logits_of_a_padded_batch_equal_those_of_rows_run_alone() {
    for golden in Golden::all() {
        let decoder = golden.decoder();
        let logits = tch::no_grad(|| decoder.logits(&decoder.hidden(golden.get("tokens"))));
        let logits = logits * golden.mask().unsqueeze(-1).to_kind(Kind::Float);
        assert_close(&format!("logits of {}", golden.name()), &logits, golden.get("logits"), 1e-5);
    }
}

#[test]
fn gradients_equal_those_of_transformers() {
    for golden in Golden::all() {
        let decoder = golden.decoder();
        golden.loss(&decoder, &decoder.hidden(golden.get("tokens"))).backward();
        let mut largest: f64 = 0.0;
        for (name, parameter) in decoder.parameters().iter() {
            assert_eq!(parameter.grad().kind(), Kind::Float);
            let norm = parameter.grad().norm().double_value(&[]);
            let expected = golden.get(&format!("gradient_norm.{name}")).double_value(&[]);
            // A bias of the keys shifts all scores of a query by the same amount, so its gradient is 0 up to rounding.
            let relative = (norm - expected).abs() / expected.max(1e-3);
            largest = largest.max(relative);
            assert!(relative < 1e-4, "{}: {name} has {norm:e}, not {expected:e}", golden.name());
        }
        eprintln!("gradient norms of {}: {largest:.2e} relative", golden.name());
    }
}

#[test]
fn bfloat16_is_near_float32_and_its_gradients_are_float32() {
    for golden in Golden::all() {
        let decoder = Decoder::load(&golden.checkpoint(), Device::Cpu, ComputeKind::Bfloat16).expect("valid");
        let hidden = decoder.hidden(golden.get("tokens"));
        assert_eq!(hidden.kind(), Kind::BFloat16);
        let logits = decoder.logits(&hidden);
        assert_eq!(logits.kind(), Kind::Float);
        let logits = logits * golden.mask().unsqueeze(-1).to_kind(Kind::Float);
        let scale = golden.get("logits").abs().max().double_value(&[]);
        assert_close(&format!("bfloat16 logits of {}", golden.name()), &logits, golden.get("logits"), 0.05 * scale);
        golden.loss(&decoder, &hidden).backward();
        for (name, parameter) in decoder.parameters().iter() {
            assert_eq!(parameter.grad().kind(), Kind::Float, "{name}");
        }
    }
}

#[test]
fn a_tied_head_is_the_embedding_and_no_parameter_of_its_own() {
    let decoder = Golden::open("qwen2-tied").decoder();
    assert!(decoder.parameters().get("lm_head.weight").is_none());
    let embedding = decoder.parameters().get("model.embed_tokens.weight").expect("every model has it");
    assert_eq!(decoder.head().data_ptr(), embedding.data_ptr());
}
