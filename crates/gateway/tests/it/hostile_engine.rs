//! Answers that no engine means to send: they are refused, or what is recorded of them is sound.

use forebay_fake_engine::{EngineKind, FakeEngine};
use forebay_gateway::{Completion, Upstream};
use proptest::{prelude::*, sample::Index};
use serde_json::{Value, json};

use crate::{
    hostile::pointers,
    support::{ask, options},
};

/// What a mutation puts in the place of a value.
const VALUES: [&str; 14] = [
    "null",
    "{}",
    "[]",
    "\"\"",
    "0",
    "-1",
    "1e39",
    "0.5",
    "-9999.0",
    "true",
    "4294967296",
    "[[]]",
    "\"abort\"",
    "\"7\"",
];

/// An answer of SGLang with everything.
fn whole() -> Value {
    json!({
        "metadata": {"weight_version": "6", "weight_versions": [
            {"version": "5", "start": 0, "end": 2}, {"version": "6", "start": 2, "end": 3},
        ]},
        "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
        "choices": [{
            "finish_reason": "tool_calls", "matched_stop": 6, "prompt_token_ids": [1, 2], "token_ids": [4, 5, 6],
            "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -1.5}, {"logprob": -0.5}]},
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-1.0, 4, null], [-1.5, 5, null], [-0.5, 6, null]],
            },
            "message": {"content": "a", "reasoning_content": "r", "tool_calls": [
                {"id": "c", "function": {"name": "f", "arguments": "{}"}},
            ]},
        }],
    })
}

fn check(completion: &Completion) {
    let count = completion.tokens.len();
    assert!(!completion.prompt_tokens.is_empty());
    assert_eq!(completion.logprobs.len(), count);
    assert!(completion.logprobs.iter().all(|value| value.is_finite() && *value <= 0.0 && *value > -9999.0));
    assert!(completion.prompt_tokens.iter().chain(&completion.tokens).all(|id| *id >= 0));
    let mut place = 0;
    for span in &completion.spans {
        assert!(span.start == place && span.len > 0 && span.version >= 0, "spans tile: {:?}", completion.spans);
        place += span.len;
    }
    assert_eq!(place as usize, count, "spans tile: {:?}", completion.spans);
}

#[test]
fn whatever_an_engine_answers_is_refused_or_sound() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let engine = runtime.block_on(FakeEngine::start(EngineKind::Sglang));
    let mut options = options(EngineKind::Sglang, &[&engine]);
    options.aborts_max = 0;
    let upstream = Upstream::new(options).expect("the options are usable");
    let attempt = |answer: &Value| {
        engine.switch(|switches| switches.failures = Some((1, 200, answer.to_string())));
        runtime.block_on(ask(&upstream, "Hi"))
    };
    check(&attempt(&whole()).expect("the whole answer is recorded").completion);
    let config = ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() };
    let edits = proptest::collection::vec((any::<Index>(), any::<Index>()), 1..3);
    proptest!(config, |(edits in edits)| {
        let mut answer = whole();
        for (place, value) in edits {
            let pointers = pointers(&answer, "");
            let target = answer.pointer_mut(place.get::<String>(&pointers)).expect("the pointer is of this answer");
            *target = serde_json::from_str(value.get::<&str>(&VALUES)).expect("the value is JSON");
        }
        if let Ok(answered) = attempt(&answer) {
            check(&answered.completion);
        }
    });
}
