//! What can be wrong with an answer, and what to do about it.
//!
//! Separate from `check`, because reading and scoring find some of it.

use super::kind::EngineKind;

/// Why an answer cannot be recorded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// It is no chat completion.
    #[error("the engine's answer is no chat completion: {why}")]
    Shape {
        /// What the parser says.
        why: String,
    },
    /// It does not contain exactly one choice.
    #[error("the engine's answer has {count} choices instead of one")]
    Choices {
        /// How many.
        count: usize,
    },
    /// The ids of the prompt are missing or empty.
    #[error("the engine's answer has no prompt_token_ids")]
    PromptIds,
    /// The engine sampled behind other ids than it was sent.
    #[error("the engine's prompt differs from the one that was sent, from id {index} on")]
    Prompt {
        /// The first difference.
        index: usize,
    },
    /// The sampled ids are missing.
    #[error("the engine's answer has no token_ids")]
    TokenIds,
    /// Two places name different sampled ids.
    #[error("token_ids and the log-probabilities name different ids from place {index} on")]
    Conflict {
        /// The first difference.
        index: usize,
    },
    /// An id is negative, too large, or outside the vocabulary.
    #[error("the engine's answer contains the id {id}, which is outside the vocabulary")]
    Vocabulary {
        /// The id.
        id: i64,
    },
    /// The log-probabilities are missing.
    #[error("the engine's answer has no log-probabilities")]
    Logprobs,
    /// There are more or fewer log-probabilities than sampled ids.
    #[error("the engine's answer has {logprobs} log-probabilities for {ids} ids")]
    Lengths {
        /// Log-probabilities.
        logprobs: usize,
        /// Sampled ids.
        ids: usize,
    },
    /// A log-probability is null or no finite number.
    #[error("log-probability {index} is no finite number")]
    NotFinite {
        /// Its place.
        index: usize,
    },
    /// A log-probability is the number that stands for "none".
    #[error("log-probability {index} is -9999.0, which stands for none")]
    Sentinel {
        /// Its place.
        index: usize,
    },
    /// A log-probability is above zero.
    #[error("log-probability {index} is {value}, which is above zero")]
    Positive {
        /// Its place.
        index: usize,
        /// Its value.
        value: f64,
    },
    /// It has no log-probabilities of the ids that the engine was asked to score.
    #[error("the engine's answer has no log-probabilities of the ids that it was sent: {why}")]
    Unscored {
        /// What the parser says.
        why: String,
    },
    /// The finish reason is missing or unknown.
    #[error("the engine's finish_reason is {reason:?}, which is not known")]
    FinishReason {
        /// What it says.
        reason: String,
    },
}

impl Fault {
    /// What to do about it, in words for whoever runs the engine.
    #[must_use]
    pub fn remedy(&self, kind: EngineKind) -> &'static str {
        match (self, kind) {
            (Self::PromptIds | Self::TokenIds, EngineKind::Sglang) => {
                "SGLang answers the fields return_prompt_token_ids, return_token_ids and return_meta_info from 0.5.13 \
                 on; sglang-router removes them, so name the workers themselves in `urls`"
            }
            (Self::PromptIds | Self::TokenIds, EngineKind::Vllm | EngineKind::Openai) => {
                "vLLM answers the field return_token_ids from 0.10.2 on; a router or proxy in between may remove the \
                 ids, so name the workers themselves in `urls`"
            }
            (Self::Prompt { .. }, _) => {
                "this version of the engine, or a router in between, does not pass the ids of the prompt on; name the \
                 workers of a version that does, or set mode = \"observe\""
            }
            (Self::Logprobs | Self::Lengths { .. }, EngineKind::Sglang) => {
                "SGLang reports them in meta_info.output_token_logprobs, which routers remove; name the workers \
                 themselves in `urls`"
            }
            (Self::Logprobs | Self::Lengths { .. }, EngineKind::Vllm | EngineKind::Openai) => {
                "the engine must answer the field logprobs; a router or proxy in between may remove it, so name the \
                 workers themselves in `urls`"
            }
            (Self::NotFinite { .. } | Self::Sentinel { .. }, _) => {
                "the engine has no log-probability of a token that it sampled; start vLLM with \
                 --logprobs-mode processed_logprobs and without speculative decoding"
            }
            (Self::Positive { .. }, _) => {
                "the values are logits; start vLLM with --logprobs-mode processed_logprobs, not with a mode of logits"
            }
            (Self::Vocabulary { .. }, _) => "check that the configured size of the vocabulary is that of this model",
            (
                Self::Conflict { .. }
                | Self::Choices { .. }
                | Self::Shape { .. }
                | Self::Unscored { .. }
                | Self::FinishReason { .. },
                _,
            ) => "check that `kind` names this engine and that `urls` names its workers",
        }
    }
}
