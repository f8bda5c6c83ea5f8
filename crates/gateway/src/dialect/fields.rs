//! Fields that all dialects treat alike: what concerns sampling, and what only the gateway may ask an engine for.
//!
//! The trainer and the engine must agree on the distribution that was sampled from. So the session's sampling replaces
//! the agent's in calls that are recorded, and what would change the distribution in another way is refused unless it is
//! neutral. Calls that are not recorded are sampled as the agent asks.

use serde_json::value::RawValue;

use super::error::DialectError;
use crate::{
    json::{self, Fields, Item, Object},
    request::{Request, Warnings},
};

/// Fields that the session's sampling replaces.
const REPLACED: [&str; 7] = ["temperature", "top_p", "top_k", "min_p", "typical_p", "top_a", "seed"];

/// Numbers that must be 1, because a call of a session has one answer.
const ONE: [&str; 2] = ["n", "best_of"];

/// Numbers that change the distribution unless they have one of these values. The names are those of SGLang, vLLM, and
/// llama.cpp, whose -1 switches a sampler off.
const NEUTRAL_NUMBERS: [(&str, &[f64]); 23] = [
    ("presence_penalty", &[0.0]),
    ("frequency_penalty", &[0.0]),
    ("repetition_penalty", &[1.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("repeat_penalty", &[1.0]),
    ("length_penalty", &[1.0]),
    ("min_tokens", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("penalty_alpha", &[0.0]),
    ("guidance_scale", &[1.0]),
    ("top_n_sigma", &[0.0, -1.0]),
    ("nsigma", &[0.0, -1.0]),
    ("dry_multiplier", &[0.0]),
    ("xtc_probability", &[0.0]),
    ("mirostat", &[0.0]),
    ("mirostat_mode", &[0.0]),
    ("dynatemp_range", &[0.0]),
    ("smoothing_factor", &[0.0]),
    ("tfs", &[1.0]),
    ("tfs_z", &[1.0]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
];

/// Fields that change the distribution unless they are absent: objects, arrays and texts unless they are empty, and
/// switches unless they are off.
const NEUTRAL_IF_EMPTY: [&str; 10] = [
    "logit_bias",
    "bad_words",
    "banned_tokens",
    "allowed_token_ids",
    "negative_prompt",
    "ignore_eos",
    "use_beam_search",
    "dynamic_temperature",
    "watermarking",
    "thinking_token_budget",
];

/// Fields that name code, weights, or arguments of such code, which no agent may choose.
const REFUSED: [&str; 6] =
    ["logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs", "lora_path", "chat_template"];

/// Arguments of the function that renders a chat template. The engine calls it with `chat_template_kwargs`, so that an
/// agent could replace the template, which is code.
const OF_RENDERING: [&str; 9] = [
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// The bytes of all texts that end an answer. Engines search the answer for each of them after every token.
const STOP_BYTES_MAX: usize = 4 << 10;

/// Fields that a recorded call has no use for: the answer has no log-probabilities, and without reasoning vLLM leaves out
/// the ids.
const OF_UNRECORDED: [&str; 3] = ["logprobs", "top_logprobs", "include_reasoning"];

/// Fields that the engine must not see from an agent. They are set by the gateway, name a request or a part of the
/// engine, or replace the prompt.
const DISCARDED: [&str; 27] = [
    "input_ids",
    "input_embeds",
    "prompt_embeds",
    "rid",
    "request_id",
    "session_id",
    "session_params",
    "echo",
    "detokenize",
    "prompt_logprobs",
    "return_token_ids",
    "return_prompt_token_ids",
    "return_tokens_as_token_ids",
    "return_meta_info",
    "return_hidden_states",
    "return_routed_experts",
    "return_input_ids_in_sglext",
    "return_output_ids_in_sglext",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "priority",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
];

/// The most texts that end an answer. An engine looks for each of them after each token; OpenAI takes four.
const STOPS_MAX: usize = 64;

impl Request {
    /// The request of a call that is recorded. What would change the distribution that is sampled from is refused, or
    /// left out where an answer without it is as good: `strict` of tools, for which engines mask logits.
    pub fn recorded(mut self) -> Result<Self, DialectError> {
        self.sampling = recorded(self.sampling, &mut self.warnings)?;
        for tool in &mut self.tools {
            tool.leave_out_strict();
        }
        Ok(self)
    }
}

/// Takes all these fields, and returns those that concern sampling.
pub(super) fn take_sampling(object: &mut Object<'_>) -> Result<Fields, DialectError> {
    for name in REFUSED {
        if let Some(item) = object.take(name)
            && !is_neutral(&item)
        {
            return Err(item.invalid("must be empty, because an agent may not change the model or how it is sampled"));
        }
    }
    for name in ONE {
        if let Some(item) = object.take(name) {
            require_number(&item, &[1.0], "must be 1, because a call of a session has one answer")?;
        }
    }
    if let Some(arguments) = object.find("chat_template_kwargs") {
        for (name, _) in arguments.object()?.rest() {
            if OF_RENDERING.contains(&name.as_str()) {
                let why = format!("must not have {name:?}, because an agent may not replace the chat template");
                return Err(arguments.invalid(why));
            }
        }
    }
    object.discard(&DISCARDED);
    let numbers = NEUTRAL_NUMBERS.iter().map(|(name, _)| *name);
    let names = REPLACED.into_iter().chain(numbers).chain(NEUTRAL_IF_EMPTY).chain(OF_UNRECORDED);
    Ok(object.take_fields(names))
}

/// How much the model should reason, in one of the three words that all engines know. They refuse calls with others.
pub(super) fn effort(sent: &RawValue) -> Option<Box<RawValue>> {
    let word = match sent.get() {
        "\"minimal\"" | "\"low\"" => "low",
        "\"medium\"" => "medium",
        "\"high\"" | "\"xhigh\"" | "\"max\"" => "high",
        _ => return None,
    };
    Some(json::raw(&word))
}

/// Reads texts that end the answer: one, or an array of them. Empty texts are skipped.
pub(super) fn stop(item: Option<Item<'_>>) -> Result<Vec<String>, DialectError> {
    let Some(item) = item else { return Ok(Vec::new()) };
    let texts = if item.is_string() {
        vec![item.string()?]
    } else if item.is_array() {
        let mut texts = Vec::new();
        item.each(|text| {
            if texts.len() == STOPS_MAX {
                return Err(item.invalid(format!("must have at most {STOPS_MAX} texts")));
            }
            texts.push(text.string()?);
            Ok(())
        })?;
        texts
    } else {
        return Err(item.invalid("must be a string or an array of strings"));
    };
    if texts.iter().map(String::len).sum::<usize>() > STOP_BYTES_MAX {
        return Err(item.invalid(format!("must have at most {STOP_BYTES_MAX} bytes together")));
    }
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}

/// Whether a field never reaches an engine as it is.
pub(crate) fn is_taken(name: &str) -> bool {
    let numbers = NEUTRAL_NUMBERS.iter().map(|(name, _)| *name);
    let lists = [&REPLACED[..], &ONE, &NEUTRAL_IF_EMPTY, &REFUSED, &OF_UNRECORDED, &DISCARDED];
    lists.concat().into_iter().chain(numbers).any(|taken| taken == name)
}

/// Checks the fields of a call that is recorded, and returns those that the session's sampling replaces.
fn recorded(sampling: Fields, warnings: &mut Warnings) -> Result<Fields, DialectError> {
    let mut replaced = Fields::new();
    for (name, value) in sampling {
        let item = Item::field(&name, &value);
        if REPLACED.contains(&name.as_str()) {
            replaced.push((name, value));
        } else if let Some((_, neutral)) = NEUTRAL_NUMBERS.iter().find(|(found, _)| *found == name) {
            let first = neutral[0];
            let why = format!("must be {first}, because any other value changes the distribution that is trained");
            require_number(&item, neutral, &why)?;
        } else if NEUTRAL_IF_EMPTY.contains(&name.as_str()) {
            if !is_neutral(&item) {
                return Err(item.invalid("must be absent, because it changes the distribution that is trained"));
            }
        } else if name == "logprobs" && item.verbatim() != "false" {
            warnings.push("logprobs: the answer does not contain log-probabilities".to_owned());
        }
    }
    Ok(replaced)
}

fn require_number(item: &Item<'_>, neutral: &[f64], why: &str) -> Result<(), DialectError> {
    let number = item.number()?;
    let is_neutral = neutral.iter().any(|neutral| (number - neutral).abs() <= 0.0);
    if is_neutral { Ok(()) } else { Err(item.invalid(why)) }
}

/// Whether a value is `false`, or an empty object, array or text.
fn is_neutral(item: &Item<'_>) -> bool {
    let inner = item.verbatim();
    let inside = inner.get(1..inner.len() - 1).unwrap_or(inner);
    let is_empty = matches!(inner.as_bytes().first(), Some(b'{' | b'[' | b'"')) && inside.trim().is_empty();
    is_empty || inner == "false"
}
