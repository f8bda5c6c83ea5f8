//! Log-probabilities that libtorch computes are stored in fewer bytes than floats have.

use forebay_domain::formats::logprobs;
use tch::{Kind, Tensor};

/// Bytes that a column takes, after checking that it comes back as it was.
fn stored(column: &[f32]) -> usize {
    let (mut narrow, mut bytes) = (Vec::new(), Vec::new());
    logprobs::put(&mut narrow, &mut bytes, column);
    let mut found = Vec::new();
    logprobs::take_column(&mut &narrow[..], &mut &bytes[..], &mut found, column.len()).expect("it is not damaged");
    assert!(found.iter().zip(column).all(|(found, sent)| found.to_bits() == sent.to_bits()));
    narrow.len() + bytes.len()
}

#[test]
fn log_probabilities_of_pytorch_are_stored_in_fewer_bytes_than_floats_have() {
    const TOKENS: i64 = 2_000;
    tch::manual_seed(7);
    // Of most tokens a model is certain, more or less.
    let cpu = (Kind::Float, tch::Device::Cpu);
    let logits = Tensor::randn([TOKENS, 1_000], cpu) * 2.0;
    let certain = Tensor::zeros([TOKENS, 999], cpu);
    let logits = logits + Tensor::cat(&[Tensor::rand([TOKENS, 1], cpu) * 32.0, certain], 1);
    let sampled = logits.softmax(-1, Kind::Float).multinomial(1, false);
    for kind in [Kind::Float, Kind::BFloat16] {
        let logits = logits.to_kind(kind).to_kind(Kind::Float);
        for logprobs in [logits.log_softmax(-1, Kind::Float), logits.softmax(-1, Kind::Float).log()] {
            let logprobs = Vec::<f32>::try_from(logprobs.gather(-1, &sampled, false).squeeze_dim(-1));
            let logprobs = logprobs.expect("a column of floats");
            let of_floats = 4 * logprobs.len();
            let bytes = stored(&logprobs);
            assert!(bytes < of_floats / 4 * 3, "{bytes} of {of_floats} bytes, {kind:?}");
        }
    }
}
