//! Fields that all dialects treat alike: what concerns sampling, and what only the gateway may ask an engine for.
//!
//! The trainer and the engine must agree on the distribution that was sampled from. So the policy's sampling replaces
//! the agent's, and what would change the distribution in another way is refused unless it is neutral.

use crate::{
    dialect::DialectError,
    json::{Fields, Item, Object},
};

/// Fields that the policy's sampling replaces.
const REPLACED: [&str; 6] = ["temperature", "top_p", "top_k", "min_p", "typical_p", "top_a"];

/// Numbers that change the distribution unless they have this value.
const NEUTRAL_NUMBERS: [(&str, f64); 5] = [
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("length_penalty", 1.0),
    ("min_tokens", 0.0),
];

/// Objects and arrays that change the distribution, or the weights, unless they are empty.
const NEUTRAL_IF_EMPTY: [&str; 6] =
    ["logit_bias", "bad_words", "allowed_token_ids", "logits_processors", "custom_logit_processor", "lora_path"];

/// Switches that change the distribution unless they are off.
const NEUTRAL_IF_OFF: [&str; 2] = ["ignore_eos", "use_beam_search"];

/// Fields that the engine must not see from an agent. A seed would make the rollouts of a group equal. The others are
/// set by the gateway, name a request of the engine, or replace the prompt.
const DISCARDED: [&str; 25] = [
    "seed",
    "input_ids",
    "input_embeds",
    "prompt_embeds",
    "rid",
    "request_id",
    "session_id",
    "session_params",
    "echo",
    "detokenize",
    "top_logprobs",
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
    "priority",
];

/// Takes all these fields, and returns those that the policy's sampling replaces.
pub(super) fn take_sampling(object: &mut Object<'_>, warnings: &mut Vec<String>) -> Result<Fields, DialectError> {
    for name in ["n", "best_of"] {
        require_neutral(object.take(name), 1.0, "must be 1, because a call of a session records one answer")?;
    }
    for (name, neutral) in NEUTRAL_NUMBERS {
        let why = format!("must be {neutral}, because any other value changes the distribution that the policy trains");
        require_neutral(object.take(name), neutral, &why)?;
    }
    for name in NEUTRAL_IF_EMPTY {
        if let Some(item) = object.take(name)
            && !is_empty(&item)
        {
            return Err(item.invalid("must be empty, because it changes the distribution that the policy trains"));
        }
    }
    for name in NEUTRAL_IF_OFF {
        if let Some(item) = object.take(name)
            && item.boolean()?
        {
            return Err(item.invalid("must be false, because it changes the distribution that the policy trains"));
        }
    }
    if let Some(item) = object.take("logprobs")
        && item.verbatim() != "false"
    {
        warnings.push("logprobs: the answer does not contain log-probabilities".to_owned());
    }
    object.discard(&DISCARDED);
    let replaced = REPLACED.iter().filter_map(|&name| Some((name.to_owned(), object.take(name)?.to_raw())));
    Ok(replaced.collect())
}

/// Reads texts that end the answer: one, or an array of them. Empty texts are skipped.
pub(super) fn stop(item: Option<Item<'_>>) -> Result<Vec<String>, DialectError> {
    let Some(item) = item else { return Ok(Vec::new()) };
    let texts = if item.is_string() {
        vec![item.string()?]
    } else if item.is_array() {
        item.array()?.iter().map(Item::string).collect::<Result<_, _>>()?
    } else {
        return Err(item.invalid("must be a string or an array of strings"));
    };
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}

fn require_neutral(item: Option<Item<'_>>, neutral: f64, why: &str) -> Result<(), DialectError> {
    match item {
        Some(item) if (item.number()? - neutral).abs() > 0.0 => Err(item.invalid(why)),
        _ => Ok(()),
    }
}

fn is_empty(item: &Item<'_>) -> bool {
    let inner = item.verbatim();
    let inside = inner.get(1..inner.len() - 1).unwrap_or(inner);
    matches!(inner.as_bytes().first(), Some(b'{' | b'[' | b'"')) && inside.trim().is_empty()
}
