//! What an agent may send to an engine, and what is withheld.

use std::{collections::BTreeSet, path::Path};

use forebay_fake_engine::{EngineKind, FakeEngine, Received, recording::Recording};
use forebay_gateway::{
    Dialect, Request, Upstream,
    upstream::{UpstreamOptions, check_pass},
};
use serde_json::{Map, Value, json};

use crate::support::{KINDS, call, field_of, options, parsed, refused};

/// Fields that engines have and no agent needs, and some that nobody has.
const WITHHELD: [&str; 30] = [
    "stop_regex",
    "lora_request",
    "lora_name",
    "extra_args",
    "extra_body",
    "extra_key",
    "cache_salt",
    "custom_labels",
    "ngram_corpus_id",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "images_config",
    "max_dynamic_patch",
    "use_audio_in_video",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "logprob_token_ids",
    "repetition_detection",
    "ec_transfer_params",
    "routed_experts_prompt_start",
    "return_prompt_text",
    "return_cached_tokens_details",
    "stream_interval",
    "task",
    "structural_tag",
    "invented",
    "",
    "Stop_Regex",
    "stop_regex ",
    "messages.0",
];

/// Fields that agents send for good reasons, and the engines that know them.
const PASSED: [(&str, &[EngineKind]); 10] = [
    ("chat_template_kwargs", &KINDS),
    ("parallel_tool_calls", &KINDS),
    ("reasoning_effort", &KINDS),
    ("response_format", &KINDS),
    ("user", &KINDS),
    ("structured_outputs", &[EngineKind::Vllm, EngineKind::Openai]),
    ("guided_json", &[EngineKind::Vllm]),
    ("continue_final_message", &[EngineKind::Vllm, EngineKind::Sglang]),
    ("regex", &[EngineKind::Sglang]),
    ("ebnf", &[EngineKind::Sglang]),
];

fn body(fields: impl IntoIterator<Item = (String, Value)>) -> Value {
    let mut body = Map::from_iter([
        ("model".to_owned(), json!("m")),
        ("messages".to_owned(), json!([{"role": "user", "content": "Hi"}])),
    ]);
    body.extend(fields);
    body.into()
}

/// What the engine receives of a request, whether it is recorded or not.
async fn received(kind: EngineKind, pass: &[&str], request: &Request) -> [Value; 2] {
    let engine = FakeEngine::start(kind).await;
    engine.switch(|switches| switches.context_tokens = 1 << 20);
    let pass = pass.iter().map(|name| (*name).to_owned()).collect();
    let upstream =
        Upstream::new(UpstreamOptions { pass, ..options(kind, &[&engine]) }).expect("the options are usable");
    upstream.complete(&call(request)).await.expect("the call is answered");
    upstream.forward(&call(request)).await.expect("the call is answered");
    let log = engine.log();
    let mut sent = log.calls().map(Received::json);
    std::array::from_fn(|_| sent.next().expect("the engine was called twice"))
}

fn names(sent: &Value) -> BTreeSet<&str> {
    sent.as_object().expect("it is an object").keys().map(String::as_str).collect()
}

#[tokio::test]
async fn an_engine_is_sent_only_fields_that_are_known() {
    let plain = parsed(Dialect::Chat, &body([]));
    let known =
        |name: &str| (name.to_owned(), if name == "chat_template_kwargs" { json!({"a": 1}) } else { json!("x") });
    let fields = WITHHELD.into_iter().chain(PASSED.map(|(name, _)| name)).map(known);
    let request = parsed(Dialect::Chat, &body(fields));
    for kind in KINDS {
        let without = received(kind, &[], &plain).await;
        for (sent, without) in received(kind, &[], &request).await.iter().zip(&without) {
            let added: Vec<&str> = names(sent).difference(&names(without)).copied().collect();
            let mut expected: Vec<&str> =
                PASSED.iter().filter(|(_, kinds)| kinds.contains(&kind)).map(|(name, _)| *name).collect();
            expected.sort_unstable();
            assert_eq!(added, expected, "{kind:?}");
        }
    }
}

#[tokio::test]
async fn an_operator_lets_further_fields_pass() {
    let message = json!({"role": "user", "content": "Hi", "name": "n", "partial": true, "tools": [{}]});
    let mut body = body([("stop_regex".to_owned(), json!("a+")), ("cache_salt".to_owned(), json!("s"))]);
    body["messages"] = json!([message]);
    let request = parsed(Dialect::Chat, &body);
    for sent in received(EngineKind::Sglang, &["cache_salt", "partial"], &request).await {
        assert_eq!((sent.get("stop_regex"), sent.get("cache_salt")), (None, Some(&json!("s"))));
        assert_eq!(sent["messages"], json!([{"role": "user", "content": "Hi", "name": "n", "partial": true}]));
    }
    for name in ["model", "stop", "rid", "temperature", "logit_bias", "presence_penalty", "lora_path", "input_ids"] {
        check_pass(name).expect_err(name);
    }
    check_pass("stop_regex").expect("it is the operator's choice");
}

#[tokio::test]
async fn only_text_reaches_an_engine() {
    let keys =
        ["image_url", "input_audio", "video_url", "audio_url", "image_pil", "image_embeds", "prompt_embeds", "file"];
    for key in keys.into_iter().chain(["custom", "input_image", "tool_reference"]) {
        let part = json!({"type": key, key: {"url": "http://169.254.169.254/"}});
        let refused = refused(Dialect::Chat, &body([messages(&part)]));
        assert_eq!(field_of(&refused), ("messages[0].content[0]", 422), "{key}");
    }
    // With `uuid`, vLLM looks at the other keys.
    for kind in ["text", "input_text", "output_text"] {
        let mut part = json!({"type": kind, "text": "Hi", "uuid": "u", "cache_control": {"type": "ephemeral"}});
        for key in keys {
            part[key] = json!({"url": "http://169.254.169.254/"});
        }
        let request = parsed(Dialect::Chat, &body([messages(&part)]));
        for engine in KINDS {
            for sent in received(engine, &keys, &request).await {
                assert_eq!(sent["messages"][0]["content"], json!([{"type": kind, "text": "Hi"}]));
            }
        }
    }
    for (part, field) in [
        (json!({"type": "text", "text": {"image_url": "x"}}), "messages[0].content[0].text"),
        (json!({"type": "thinking", "thinking": ["x"]}), "messages[0].content[0].thinking"),
        (json!({"type": "refusal", "text": "x"}), "messages[0].content[0].refusal"),
    ] {
        assert_eq!(field_of(&refused(Dialect::Chat, &body([messages(&part)]))), (field, 400));
    }
}

fn messages(part: &Value) -> (String, Value) {
    ("messages".to_owned(), json!([{"role": "user", "content": [part]}]))
}

#[test]
fn no_agent_replaces_the_chat_template_or_floods_the_engine_with_stops() {
    let template = "{% for a in range(999999) %}{% endfor %}";
    let with = |name: &str, value: Value| body([(name.to_owned(), value)]);
    for (name, value) in [
        ("chat_template", json!(template)),
        ("chat_template_kwargs", json!({"chat_template": template})),
        ("chat_template_kwargs", json!({"tokenize": true})),
        ("stop", json!(vec!["x"; 1_000])),
        ("stop", json!(["x".repeat(1 << 20)])),
    ] {
        assert_eq!(field_of(&refused(Dialect::Chat, &with(name, value))), (name, 400));
    }
    // So many values are refused before they are read.
    assert_eq!(field_of(&refused(Dialect::Chat, &with("stop", json!(vec!["x"; 1 << 20])))), ("body", 400));
    parsed(Dialect::Chat, &with("chat_template", Value::Null));
    parsed(Dialect::Chat, &with("stop", json!(["Observation:", "END"])));
}

/// What real agents send reaches the engine, besides fields that only OpenAI's service and `LiteLLM` read.
#[tokio::test]
async fn nothing_that_real_agents_need_is_withheld() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/recordings");
    let entries = std::fs::read_dir(folder).expect("there are recordings");
    let mut withheld = BTreeSet::new();
    for entry in entries {
        let recording = Recording::read(&entry.expect("the folder can be read").path()).expect("it is a recording");
        // All requests of a run have the same fields, or more with time.
        for run in &recording.runs {
            for (sent, body) in run.requests.iter().zip(run.bodies()) {
                let dialect = match sent.path.split('?').next().unwrap_or_default() {
                    "/v1/chat/completions" => Dialect::Chat,
                    "/v1/messages" => Dialect::Messages,
                    "/v1/responses" => Dialect::Responses,
                    _ => continue,
                };
                let request = dialect.parse(body.as_bytes()).and_then(Request::recorded).expect("it was accepted");
                let fields = request.other.iter().chain(request.messages.iter().flat_map(|message| &message.other));
                let fields: BTreeSet<&str> = fields.map(|(name, _)| name.as_str()).collect();
                if fields.is_empty() {
                    continue;
                }
                let [sent, _] = received(EngineKind::Vllm, &[], &request).await;
                let text = sent.to_string();
                let missing = fields.into_iter().filter(|name| !text.contains(&format!("\"{name}\":")));
                withheld.extend(missing.map(ToOwned::to_owned));
            }
        }
    }
    let withheld: Vec<&str> = withheld.iter().map(String::as_str).collect();
    assert_eq!(withheld, ["prompt_cache_key", "provider_specific_fields"]);
}
