//! The engines that are known.
//!
//! Separate from the options, because what can be wrong with them is an error, whose remedy depends on the engine.

/// What speaks at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// SGLang from 0.5.13, whose chat endpoint returns token ids, or an older one for the mode `exact`.
    Sglang,
    /// vLLM from 0.10.2, whose chat endpoint returns token ids.
    Vllm,
    /// Another engine with OpenAI's chat completions that returns token ids as vLLM does.
    Openai,
}
