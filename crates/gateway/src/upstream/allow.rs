//! What an agent may send to an engine besides what the gateway interprets.
//!
//! Engines have fields that name code, files and adapters, or cost everybody who shares the engine: SGLang searches an
//! answer for `stop_regex` after every token. New versions bring new ones, so these are lists of what is passed on, and
//! everything else is withheld.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use super::{kind::EngineKind, options::UpstreamOptions};
use crate::{dialect, request::Request};

/// Names that the gateway writes. A field of the agent with such a name is not passed on.
const OWN: [&str; 26] = [
    "model",
    "messages",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "stream_options",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "return_prompt_token_ids",
    "return_meta_info",
    "rid",
    "seed",
    "input_ids",
    "stop_token_ids",
];

/// Fields of requests that all engines are sent: what chat templates read, and the format of the answer.
const OF_ALL: [&str; 5] =
    ["chat_template_kwargs", "parallel_tool_calls", "reasoning_effort", "response_format", "user"];

const OF_SGLANG: [&str; 7] = [
    "continue_final_message",
    "ebnf",
    "no_stop_trim",
    "reasoning",
    "regex",
    "separate_reasoning",
    "skip_special_tokens",
];

/// The names with `guided` are those of versions before 0.12.
const OF_VLLM: [&str; 14] = [
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
    "documents",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "structured_outputs",
    "truncate_prompt_tokens",
    "truncation_side",
];

const OF_OTHERS: [&str; 6] = ["documents", "grammar", "json_schema", "reasoning", "structured_outputs", "verbosity"];

/// Fields of messages that chat templates read, besides those that the gateway interprets.
const OF_MESSAGES: [&str; 3] = ["name", "refusal", "thinking"];

/// How many names a log tells of each upstream. An agent can make up as many as it likes.
const TOLD_MAX: usize = 64;

/// The longest name that is told.
const TOLD_CHARS_MAX: usize = 64;

/// Whether a field of a request is passed on.
pub(super) fn in_request(options: &UpstreamOptions, name: &str) -> bool {
    let of_kind: &[&str] = match options.kind {
        EngineKind::Sglang => &OF_SGLANG,
        EngineKind::Vllm => &OF_VLLM,
        EngineKind::Openai => &OF_OTHERS,
    };
    !OWN.contains(&name) && (OF_ALL.contains(&name) || of_kind.contains(&name) || is_named(options, name))
}

/// Whether a field of a message is passed on.
pub(super) fn in_message(options: &UpstreamOptions, name: &str) -> bool {
    OF_MESSAGES.contains(&name) || is_named(options, name)
}

fn is_named(options: &UpstreamOptions, name: &str) -> bool {
    options.pass.iter().any(|passed| passed == name)
}

/// Checks a name that an operator lets pass. An error says why it cannot.
pub fn check_pass(name: &str) -> Result<(), String> {
    if OWN.contains(&name) {
        return Err(format!("{name:?} is set by the service itself"));
    }
    if dialect::is_taken(name) {
        return Err(format!(
            "{name:?} is never passed on, because it concerns sampling, or code and parts of the engine"
        ));
    }
    Ok(())
}

/// The names that were withheld. Each is logged once.
#[derive(Debug, Default)]
pub(super) struct Withheld(Mutex<BTreeSet<String>>);

impl Withheld {
    /// Tells what is withheld of a request.
    pub(super) fn tell(&self, options: &UpstreamOptions, request: &Request) {
        let of_request = request.other.iter().map(|(name, _)| name).filter(|name| !in_request(options, name));
        let of_messages = request.messages.iter().flat_map(|message| &message.other).map(|(name, _)| name);
        let of_messages = of_messages.filter(|name| !in_message(options, name));
        for name in of_request.chain(of_messages) {
            let shown: String = name.chars().take(TOLD_CHARS_MAX).collect();
            let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if told.len() < TOLD_MAX && told.insert(shown.clone()) {
                tracing::info!(
                    upstream.name = options.name,
                    field = shown,
                    "an agent's field is not passed on to the engine; if the engine needs it, name it in `pass` of the \
                     upstream"
                );
            }
        }
    }

    #[cfg(test)]
    fn told(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dialect::Dialect, json};

    #[test]
    fn an_agent_cannot_fill_the_log_with_names() {
        let options = UpstreamOptions::new("x", EngineKind::Vllm, ["http://a"]).expect("the options are usable");
        let body =
            r#"{"model": "m", "user": "u", "messages": [{"role": "user", "content": "Hi", "name": "n", "odd": 1}]}"#;
        let mut request = Dialect::Chat.parse(body.as_bytes()).expect("the body is accepted");
        let withheld = Withheld::default();
        for _ in 0..2 {
            withheld.tell(&options, &request);
            assert_eq!(withheld.told(), 1, "`odd`, once");
        }
        request.other = (0..1_000).map(|number| (format!("field-{number}"), json::raw(&1))).collect();
        withheld.tell(&options, &request);
        assert_eq!(withheld.told(), TOLD_MAX);
    }
}
