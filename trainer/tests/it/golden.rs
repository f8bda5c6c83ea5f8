//! The tiny checkpoints of `tests/golden`, and the results of transformers for them.

use std::path::PathBuf;

use forebay_trainer::model::{ComputeKind, Decoder};
use tch::{Device, Kind, Tensor};

/// A folder of `tests/golden`; `make.py` there describes the tensors.
pub(crate) struct Golden {
    name: &'static str,
    expected: Vec<(String, Tensor)>,
}

/// Every checkpoint.
pub(crate) const NAMES: [&str; 4] = ["llama3-rope", "llama-yarn", "qwen2-tied", "qwen3-sharded"];

impl Golden {
    pub(crate) fn open(name: &'static str) -> Self {
        let path = folder(name).join("expected.safetensors");
        Self { name, expected: Tensor::read_safetensors(path).expect("make.py has written it") }
    }

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(Self::open)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn checkpoint(&self) -> PathBuf {
        folder(self.name).join("checkpoint")
    }

    pub(crate) fn decoder(&self) -> Decoder {
        Decoder::load(&self.checkpoint(), Device::Cpu, ComputeKind::Float32).expect("the checkpoint is valid")
    }

    pub(crate) fn get(&self, name: &str) -> &Tensor {
        let found = self.expected.iter().find(|(other, _)| other == name);
        &found.unwrap_or_else(|| panic!("{name} is expected of {}", self.name)).1
    }

    /// `[rows, length]`, true where there is a token.
    pub(crate) fn mask(&self) -> Tensor {
        let length = self.get("tokens").size()[1];
        Tensor::arange(length, (Kind::Int64, Device::Cpu)).lt_tensor(&self.get("lengths").unsqueeze(-1))
    }

    /// The mean cross-entropy over all next tokens, as in `make.py`.
    pub(crate) fn loss(&self, decoder: &Decoder, hidden: &Tensor) -> Tensor {
        let tokens = self.get("tokens");
        let length = tokens.size()[1] - 1;
        let logprobs = decoder.logits(&hidden.narrow(1, 0, length)).log_softmax(-1, Kind::Float);
        let next = logprobs.gather(-1, &tokens.narrow(1, 1, length).unsqueeze(-1), false).squeeze_dim(-1);
        -next.masked_select(&self.mask().narrow(1, 1, length)).mean(Kind::Float)
    }
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The largest absolute difference.
pub(crate) fn difference(left: &Tensor, right: &Tensor) -> f64 {
    assert_eq!(left.size(), right.size());
    (left - right).abs().max().double_value(&[])
}

/// Asserts that two tensors differ by at most `bound`, and prints the difference.
pub(crate) fn assert_close(what: &str, left: &Tensor, right: &Tensor, bound: f64) {
    let found = difference(left, right);
    eprintln!("{what}: {found:.2e}");
    assert!(found <= bound, "{what} differ by {found:e}");
}

/// Tokens `[rows, length]` that look random.
pub(crate) fn some_tokens(rows: i64, length: i64) -> Tensor {
    let counting = Tensor::arange(rows * length, (Kind::Int64, Device::Cpu));
    (&counting * &counting * 7 + counting * 13 + 5).remainder(61).reshape([rows, length])
}
