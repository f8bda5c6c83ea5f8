//! Samples sequences from a [`Decoder`](crate::model::Decoder), and continues them after a tool has answered.
//!
//! A [`Session`] contains sequences, called rows, with their keys and values. The caller appends tokens to a row and
//! lets some rows generate, any number of times:
//!
//! ```no_run
//! # use forebay_trainer::generate::{GenerateError, Sampling, Session};
//! # fn example(policy: &forebay_trainer::model::Decoder) -> Result<(), GenerateError> {
//! let sampling = Sampling { stop_tokens: vec![2], new_tokens_max: 512, ..Sampling::default() };
//! let mut session = Session::new(policy, &[vec![5, 6, 7], vec![8, 9]], 42)?;
//! let first = session.generate(&[0, 1], &sampling)?;
//! session.append(1, &[10, 11])?;
//! let second = session.generate(&[1], &sampling)?;
//! # Ok(())
//! # }
//! ```

pub(crate) mod sample;
mod session;

pub use session::{Completion, Finish, Session};

/// How tokens are sampled.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; positive. With a `top_k` of 1 the most probable token is always taken.
    pub temperature: f64,
    /// Sample only among this many most probable tokens.
    pub top_k: Option<usize>,
    /// Sample only among the most probable tokens whose total probability reaches this value, in (0, 1]. Applied to the
    /// tokens that `top_k` leaves.
    pub top_p: Option<f64>,
    /// Ids that end a sequence. The ending id is part of the sequence.
    pub stop_tokens: Vec<i64>,
    /// Maximum number of tokens that a row generates in one call; at least 1.
    pub new_tokens_max: usize,
}

impl Default for Sampling {
    /// Temperature 1 over the whole vocabulary, at most 256 tokens, no stop tokens.
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, stop_tokens: Vec::new(), new_tokens_max: 256 }
    }
}

/// Why a session refused a call.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// A setting is outside its range.
    #[error("{setting} is {value}; it must be {range}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// Its range.
        range: &'static str,
    },
    /// The row does not exist, or it is named twice.
    #[error("row {0} does not exist or is named twice")]
    Row(usize),
    /// A row needs at least one token before it can generate.
    #[error("row {0} is empty")]
    Empty(usize),
    /// An id outside the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocab_size}")]
    Token {
        /// The id.
        token: i64,
        /// One more than the largest id.
        vocab_size: i64,
    },
}

impl Sampling {
    pub(crate) fn check(&self) -> Result<(), GenerateError> {
        let refuse = |setting, value, range| Err(GenerateError::Setting { setting, value, range });
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature, "positive and finite");
        }
        if self.top_k == Some(0) {
            return refuse("top_k", 0.0, "at least 1");
        }
        if let Some(top_p) = self.top_p.filter(|top_p| !(*top_p > 0.0 && *top_p <= 1.0)) {
            return refuse("top_p", top_p, "in (0, 1]");
        }
        if self.new_tokens_max == 0 {
            return refuse("new_tokens_max", 0.0, "at least 1");
        }
        Ok(())
    }
}
