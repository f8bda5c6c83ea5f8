//! The chat endpoint: templates, parts of an answer, streams, and the fields of both dialects.

use std::path::{Path, PathBuf};

use forebay_trainer::{
    rollout::{Family, InitArgs, Tokenizer, init, task::TaskName},
    serve::{Dialect, ServeConfig},
};
use reqwest::StatusCode;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use super::{Engine, check_logprobs, checkpoint, config, decoder, ids};

/// Tokens after the 256 bytes, in the order of their ids. The model below draws some of them one after the other.
const ADDED: [&str; 14] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "\nIt is easy.\n",
    "\n\nI look.\n",
    "\n{\"name\": \"weather\", \"arguments\": {\"city\":  \"Zürich\"}}\n",
    "One. ",
    "Two. ",
    "Three. ",
    "Four.",
];

/// The last of them that are special: they are not part of the text of an answer.
const SPECIAL: usize = 3;

const VOCABULARY: usize = 256 + ADDED.len();

/// What follows a token: after a line break an answer with every part, after `:` an answer of text alone.
const SCRIPT: [(&str, &str); 13] = [
    ("\n", "<think>"),
    ("<think>", "\nIt is easy.\n"),
    ("\nIt is easy.\n", "</think>"),
    ("</think>", "\n\nI look.\n"),
    ("\n\nI look.\n", "<tool_call>"),
    ("<tool_call>", "\n{\"name\": \"weather\", \"arguments\": {\"city\":  \"Zürich\"}}\n"),
    ("\n{\"name\": \"weather\", \"arguments\": {\"city\":  \"Zürich\"}}\n", "</tool_call>"),
    ("</tool_call>", "<|im_end|>"),
    (":", "One. "),
    ("One. ", "Two. "),
    ("Two. ", "Three. "),
    ("Three. ", "Four."),
    ("Four.", "<|im_end|>"),
];

const TEMPLATE: &str = r"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\n' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- if message.reasoning_content %}
        {{- ' (' + message.reasoning_content + ')' }}
    {%- endif %}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{{- mood }}
{%- if messages[-1].role == 'assistant' %}
    {{- raise_exception('it is not the turn of the assistant') }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}";

/// The characters of bytes in byte-level tokenizers: printable ones stand for themselves, the others are shifted.
fn byte_characters() -> Vec<char> {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut shifted = (256_u32..).filter_map(char::from_u32);
    (0..=255_u8)
        .map(|byte| if is_printable(byte) { char::from(byte) } else { shifted.next().expect("there are enough") })
        .collect()
}

fn tokenizer() -> Value {
    let vocabulary: Map<String, Value> =
        byte_characters().into_iter().enumerate().map(|(id, byte)| (byte.to_string(), id.into())).collect();
    let added = ADDED.iter().enumerate().map(|(index, content)| {
        json!({
            "id": 256 + index, "content": content, "special": index < SPECIAL, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        })
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": [],
        },
    })
}

fn id(token: &str) -> usize {
    let added = ADDED.iter().position(|added| *added == token).map(|index| 256 + index);
    added.unwrap_or_else(|| usize::from(token.as_bytes()[0]))
}

/// The ids of a text.
fn encode(text: &str) -> Vec<i64> {
    let mut ids = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let added = ADDED.iter().find(|added| rest.starts_with(**added));
        let length = added.map_or(first.len_utf8(), |added| added.len());
        match added {
            Some(added) => ids.push(id(added) as i64),
            None => ids.extend(rest[..length].bytes().map(i64::from)),
        }
        rest = &rest[length..];
    }
    ids
}

/// The text of ids, in which special tokens are left out.
fn decode(ids: &[i64]) -> String {
    let bytes = ids.iter().flat_map(|&id| match usize::try_from(id).expect("ids are not negative") {
        byte @ ..256 => vec![byte as u8],
        id if id < 256 + SPECIAL => Vec::new(),
        id => ADDED[id - 256].as_bytes().to_vec(),
    });
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}

/// Writes a tokenizer and a template into a checkpoint.
fn add_text(folder: &Path) {
    let write = |name: &str, content: String| std::fs::write(folder.join(name), content).expect("it can be written");
    write("tokenizer.json", tokenizer().to_string());
    write("tokenizer_config.json", json!({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}).to_string());
    write("generation_config.json", json!({"eos_token_id": [id("<|im_end|>"), id("<|endoftext|>")]}).to_string());
}

/// A checkpoint whose model draws the script: its layers add nothing, and its head knows the successor of each token.
fn scripted(folder: &Path) -> PathBuf {
    use forebay_trainer::checkpoint::{Storage, WriteOptions, write};
    use forebay_trainer::model::{ComputeKind, Decoder, ModelConfig};
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
        "hidden_size": VOCABULARY, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1,
        "head_dim": 2, "max_position_embeddings": 1_024, "torch_dtype": "float32",
    })
    .to_string();
    let parsed = ModelConfig::parse(&config).expect("the configuration is valid");
    let decoder = Decoder::random(parsed, Device::Cpu, ComputeKind::Float32, 1);
    let size = VOCABULARY as i64;
    let head = Tensor::zeros([size, size], (Kind::Float, Device::Cpu));
    for (before, after) in SCRIPT {
        let _ = head.get(id(after) as i64).get(id(before) as i64).fill_(2.0);
    }
    tch::no_grad(|| {
        let set = |name: &str, value: &Tensor| {
            decoder.parameters().get(name).expect("the model has it").shallow_clone().copy_(value);
        };
        set("model.embed_tokens.weight", &Tensor::eye(size, (Kind::Float, Device::Cpu)));
        set("lm_head.weight", &head);
        for name in ["self_attn.o_proj", "mlp.down_proj"] {
            set(&format!("model.layers.0.{name}.weight"), &Tensor::zeros([1], (Kind::Float, Device::Cpu)));
        }
    });
    let source = tempfile::tempdir().expect("a temporary folder can be made");
    std::fs::write(source.path().join("config.json"), config).expect("the folder can be written to");
    std::fs::write(source.path().join("model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").expect("as before");
    let path = folder.join("scripted");
    let options = WriteOptions { storage: Storage::Float32, ..WriteOptions::default() };
    write(decoder.parameters(), source.path(), &path, &options).expect("the folder can be written to");
    add_text(&path);
    path
}

async fn engine(dialect: Dialect) -> (Engine, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = scripted(folder.path());
    (Engine::with(ServeConfig { dialect, ..config(&[("scripted", &path)]) }).await, folder)
}

const CHAT: &str = "/v1/chat/completions";

fn question() -> Value {
    json!({
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Is it"}, {"type": "text", "text": "hot?"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"<Bern>\"}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "cold & wet"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"z": 1.0, "a": ["é"]}}}],
        "chat_template_kwargs": {"mood": "!"},
        "temperature": 0.5,
    })
}

/// The prompt of the question, as `transformers` renders it.
const PROMPT: &str = "<|im_start|>system\n{\"function\": {\"name\": \"weather\", \"parameters\": {\"a\": [\"é\"], \
    \"z\": 1.0}}, \"type\": \"function\"}\n<|im_end|>\n<|im_start|>user\nIs it hot?<|im_end|>\n<|im_start|>assistant\n\
    <tool_call>weather{\"city\": \"<Bern>\"}</tool_call><|im_end|>\n<|im_start|>tool\ncold & wet<|im_end|>\n\
    !<|im_start|>assistant\n";

/// The ids of the answer.
fn answer_ids() -> Vec<i64> {
    SCRIPT[..8].iter().map(|(_, token)| id(token) as i64).collect()
}

fn all_fields(mut body: Value) -> Value {
    for field in ["return_prompt_token_ids", "return_token_ids", "return_meta_info", "logprobs"] {
        body[field] = true.into();
    }
    body["top_logprobs"] = 2.into();
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_rendered_and_the_parts_of_an_answer_are_separated() {
    let (engine, _folder) = engine(Dialect::Sglang).await;
    let answer = engine.post(CHAT, all_fields(question())).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["prompt_token_ids"], json!(encode(PROMPT)));
    assert_eq!(choice["token_ids"], json!(answer_ids()));
    assert_eq!((&choice["finish_reason"], &choice["matched_stop"]), (&json!("tool_calls"), &json!(id("<|im_end|>"))));
    let message = &choice["message"];
    assert_eq!((&message["role"], &message["content"]), (&json!("assistant"), &json!("I look.")));
    assert_eq!(message["reasoning_content"], "It is easy.");
    let call = &message["tool_calls"][0];
    // The arguments are those that the model wrote.
    let function = json!({"name": "weather", "arguments": "{\"city\":  \"Zürich\"}"});
    assert_eq!((&call["function"], &call["type"]), (&function, &json!("function")));
    assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call_") && id.len() == 29), "{call}");
    assert_eq!(message["tool_calls"].as_array().map(Vec::len), Some(1));
    let (prompt, completion) = (encode(PROMPT).len(), answer_ids().len());
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion});
    assert_eq!(answer["usage"], usage);
    let versions = json!({"weight_version": "1", "weight_versions": [{"version": "1", "start": 0, "end": completion}]});
    assert_eq!(answer["metadata"], versions);
    assert_eq!((&answer["object"], &answer["model"]), (&json!("chat.completion"), &json!("scripted")));
    let meta = &choice["meta_info"];
    assert_eq!(meta["weight_versions"], versions["weight_versions"]);
    let logprobs = choice["logprobs"]["content"].as_array().expect("a list");
    for (place, (logprob, pair)) in logprobs.iter().zip(super::pairs(&meta["output_token_logprobs"])).enumerate() {
        assert_eq!((logprob["logprob"].as_f64(), answer_ids()[place]), pair);
        assert_eq!(logprob["token"].as_str(), Some(SCRIPT[place].1));
        assert_eq!(logprob["top_logprobs"].as_array().map(Vec::len), Some(2));
    }
    assert_eq!(logprobs.len(), completion);
    // The same prompt as ids gives the same answer.
    let mut given = all_fields(question());
    given["input_ids"] = json!(encode(PROMPT));
    given["messages"] = json!([]);
    let again = engine.post(CHAT, given).await;
    assert_eq!(again["choices"][0]["message"]["content"], "I look.");
    assert_eq!(again["choices"][0]["prompt_token_ids"], choice["prompt_token_ids"]);
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_keep_the_order_in_which_the_client_wrote_them() {
    let (engine, _folder) = engine(Dialect::Sglang).await;
    let tool = r#"{"type": "function", "function": {"name": "f", "a": 1}}"#;
    let body = format!(
        r#"{{"tools": [{tool}], "messages": [{{"role": "user", "content": "?"}}], "return_prompt_token_ids": true}}"#
    );
    let answer = engine.http.post(format!("{}{CHAT}", engine.url)).body(body).send().await.expect("it answers");
    let answer: Value = serde_json::from_str(&answer.text().await.expect("it is whole")).expect("it is JSON");
    let prompt =
        format!("<|im_start|>system\n{tool}\n<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(answer["choices"][0]["prompt_token_ids"], json!(encode(&prompt)));
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tools_that_are_hidden_are_neither_rendered_nor_parsed() {
    let (engine, _folder) = engine(Dialect::Sglang).await;
    let mut body = all_fields(question());
    body["tool_choice"] = "none".into();
    let answer = engine.post(CHAT, body).await;
    let choice = &answer["choices"][0];
    let prompt = PROMPT.split_once("<|im_end|>\n").expect("the tools come first").1;
    assert_eq!(choice["prompt_token_ids"], json!(encode(prompt)));
    assert_eq!((&choice["finish_reason"], &choice["message"]["tool_calls"]), (&json!("stop"), &Value::Null));
    assert!(choice["message"]["content"].as_str().is_some_and(|text| text.contains("<tool_call>\n{\"name\"")));
    engine.stop().await;
}

/// A streamed message: the joined deltas, the joined ids, and the last choice.
async fn streamed(engine: &Engine, body: Value) -> (Map<String, Value>, Vec<Value>, Vec<Value>) {
    let mut events = engine.stream(CHAT, body).await;
    let (mut message, mut ids, mut all) = (Map::new(), Vec::new(), Vec::new());
    while let Some(event) = events.next().await {
        assert_eq!(event["object"], "chat.completion.chunk");
        if let Some(delta) = event["choices"][0]["delta"].as_object() {
            for (field, value) in delta {
                match (message.get_mut(field), value) {
                    (Some(Value::String(text)), Value::String(more)) => text.push_str(more),
                    (Some(Value::Array(calls)), Value::Array(more)) => calls.extend(more.clone()),
                    _ => drop(message.insert(field.clone(), value.clone())),
                }
            }
        }
        ids.extend(event["choices"][0]["token_ids"].as_array().into_iter().flatten().cloned());
        all.push(event);
    }
    (message, ids, all)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_streamed_message_is_the_same_in_pieces() {
    let (engine, _folder) = engine(Dialect::Sglang).await;
    let mut body = question();
    body["stream_options"] = json!({"include_usage": true});
    body["logprobs"] = true.into();
    let (message, _, events) = streamed(&engine, body).await;
    assert_eq!((&message["role"], &message["content"]), (&json!("assistant"), &json!("I look.")));
    assert_eq!(message["reasoning_content"], "It is easy.");
    let calls = message["tool_calls"].as_array().expect("a list");
    assert_eq!((calls.len(), &calls[0]["index"]), (1, &json!(0)));
    assert_eq!(calls[0]["function"]["arguments"], "{\"city\":  \"Zürich\"}");
    let (usage, chunks) = events.split_last().expect("there are events");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(answer_ids().len())));
    let (last, before) = chunks.split_last().expect("there are chunks");
    assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(last["metadata"]["weight_version"], "1");
    assert!(before.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
    let logprobs = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned());
    assert_eq!(logprobs.flatten().count(), answer_ids().len(), "every token has its log-probability once");
    // As in SGLang, ids cannot be had in a stream.
    let mut refused = question();
    refused["stream"] = true.into();
    refused["return_token_ids"] = true.into();
    let (status, answer) = engine.call(CHAT, &refused).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("return_token_ids")));
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_dialect_has_its_own_fields() {
    let (engine, _folder) = engine(Dialect::Vllm).await;
    let mut body = question();
    body["return_token_ids"] = true.into();
    let answer = engine.post(CHAT, body.clone()).await;
    let choice = &answer["choices"][0];
    assert_eq!(answer["prompt_token_ids"], json!(encode(PROMPT)));
    assert_eq!((&choice["token_ids"], &choice["stop_reason"]), (&json!(answer_ids()), &json!(id("<|im_end|>"))));
    assert_eq!(choice["message"]["reasoning"], "It is easy.");
    let (message, ids, events) = streamed(&engine, body).await;
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("It is easy."), &json!("I look.")));
    assert_eq!(json!(ids), json!(answer_ids()));
    assert_eq!(events[0]["prompt_token_ids"], answer["prompt_token_ids"]);
    assert!(events[1..].iter().all(|event| event.get("prompt_token_ids").is_none()));
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_ends_before_a_stop_text_and_with_the_token_that_completes_it() {
    let (engine, _folder) = engine(Dialect::Sglang).await;
    // The stop text begins in one token and ends in the next.
    for (stop, text, tokens, matched) in [
        (json!("o. Th"), "One. Tw", 3, json!("o. Th")),
        (json!(["Five", "Four", "Thr"]), "One. Two. ", 3, json!("Thr")),
        (json!("Five"), "One. Two. Three. Four.", 5, json!(id("<|im_end|>"))),
        (json!(null), "One. Two. Three. Four.", 5, json!(id("<|im_end|>"))),
    ] {
        let body = json!({"input_ids": encode("say:"), "stop": stop, "return_token_ids": true});
        let answer = engine.post(CHAT, body.clone()).await;
        let choice = &answer["choices"][0];
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(text), &json!("stop")));
        assert_eq!((choice["token_ids"].as_array().map(Vec::len), &choice["matched_stop"]), (Some(tokens), &matched));
        let (message, ..) = streamed(&engine, json!({"input_ids": encode("say:"), "stop": stop})).await;
        assert_eq!(message["content"], text, "no piece of the stop text is sent");
        let body = json!({"text": "say:", "sampling_params": {"stop": stop}});
        let generated = engine.post("/generate", body.clone()).await;
        assert_eq!((&generated["text"], ids(&generated).len()), (&json!(text), tokens));
        assert_eq!(generated["meta_info"]["finish_reason"], json!({"type": "stop", "matched": matched}));
        assert_eq!(engine.stream("/generate", body).await.last().await["text"], text);
    }
    // A stop token is no part of the text, also if it is not special.
    let body = json!({"input_ids": encode("say:"), "stop_token_ids": [id("Two. ")], "return_token_ids": true});
    let answer = engine.post(CHAT, body).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["matched_stop"]), (&json!("One. "), &json!(id("Two. "))));
    assert_eq!(choice["token_ids"], json!([id("One. "), id("Two. ")]));
    // The length ends an answer, too.
    let body = json!({"messages": [{"role": "user", "content": "?"}], "max_tokens": 2});
    let answer = engine.post(CHAT, body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["message"]["reasoning_content"], "It is easy.");
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_of_any_bytes_is_the_same_whole_and_in_pieces() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = super::checkpoint_of(folder.path(), "v1", 1, &json!({"vocab_size": VOCABULARY}));
    add_text(&path);
    let engine = Engine::start(&path).await;
    let weights = decoder(&path);
    for seed in 0..4 {
        let body = json!({
            "messages": [{"role": "user", "content": "é€"}], "max_tokens": 60, "seed": seed, "temperature": 1.4,
        });
        let whole = engine.post(CHAT, all_fields(body.clone())).await;
        let choice = &whole["choices"][0];
        let (message, ..) = streamed(&engine, body).await;
        assert_eq!(message["content"], choice["message"]["content"]);
        // The same ids, log-probabilities and spans as those of `/generate`, and all of them the trainer's.
        let as_generated = json!({"output_ids": choice["token_ids"], "meta_info": choice["meta_info"]});
        let prompt = encode("<|im_start|>user\né€<|im_end|>\n<|im_start|>assistant\n");
        check_logprobs(&as_generated, &prompt, 1.4, &[("1", &weights)]);
        let sampling = json!({"max_new_tokens": 60, "sampling_seed": seed, "temperature": 1.4});
        let generated = engine.post("/generate", json!({"input_ids": prompt, "sampling_params": sampling})).await;
        assert_eq!(generated["output_ids"], choice["token_ids"]);
        assert_eq!(generated["text"], decode(&ids(&generated)));
    }
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_without_a_tokenizer_answers_ids_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let engine = Engine::start(&checkpoint(folder.path(), "v1", 1)).await;
    let body = json!({"input_ids": [1, 2], "max_tokens": 5, "return_token_ids": true, "logprobs": true});
    let answer = engine.post(CHAT, body).await;
    assert_eq!(answer["choices"][0]["token_ids"].as_array().map(Vec::len), Some(5));
    assert_eq!(answer["choices"][0]["logprobs"]["content"].as_array().map(Vec::len), Some(5));
    for (path, body, field) in [
        (CHAT, json!({"messages": [{"role": "user", "content": "?"}]}), "messages"),
        (CHAT, json!({"input_ids": [1], "stop": "x"}), "stop"),
        ("/generate", json!({"text": "?"}), "text"),
    ] {
        let (status, answer) = engine.call(path, &body).await;
        assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(field)));
        assert!(answer["error"]["message"].as_str().is_some_and(|message| message.contains("tokenizer")));
    }
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_conversations_are_refused_by_the_name_of_the_field() {
    let (engine, _folder) = engine(Dialect::Sglang).await;
    let user = json!({"role": "user", "content": "?"});
    let with = |field: &str, value: Value| json!({"messages": [user], field: value});
    for (body, field) in [
        (json!({}), "messages"),
        (json!({"messages": ["?"]}), "messages"),
        (json!({"messages": "?"}), "messages"),
        (json!({"messages": [{"role": "assistant", "content": "?"}]}), "not the turn of the assistant"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "image_url"),
        (with("n", json!(2)), "n"),
        (with("logit_bias", json!({"1": 5})), "logit_bias"),
        (with("presence_penalty", json!(1.0)), "presence_penalty"),
        (with("response_format", json!({"type": "json_object"})), "response_format"),
        (with("max_tokens", json!(0)), "max_tokens"),
        (with("top_logprobs", json!(21)), "top_logprobs"),
        (with("stop", json!("")), "stop"),
        (with("stop", json!(1)), "stop"),
        (with("temperature", json!("hot")), "temperature"),
    ] {
        let (status, answer) = engine.call(CHAT, &body).await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == StatusCode::BAD_REQUEST && message.contains(field), "{body}: {status} {answer}");
    }
    let long = json!({"messages": [{"role": "user", "content": "a".repeat(2_000)}]});
    let (status, answer) = engine.call(CHAT, &long).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")));
    let neutral = json!({
        "messages": [user], "n": 1, "logit_bias": {}, "presence_penalty": 0, "response_format": {"type": "text"},
        "store": false, "user": "me", "parallel_tool_calls": true,
    });
    engine.post(CHAT, neutral).await;
    engine.stop().await;
}

#[tokio::test]
async fn a_tokenizer_that_cannot_be_read_is_refused_at_the_start() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint(folder.path(), "v1", 1);
    std::fs::write(path.join("tokenizer.json"), "{}").expect("it can be written");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let opened = forebay_trainer::serve::Server::open(config(&[("tiny", &path)]), listener).await;
    let error = anyhow::Error::from(opened.expect_err("it is refused"));
    assert!(format!("{error:#}").contains("tokenizer.json"), "{error:#}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_init_makes_answers_messages() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let args = InitArgs {
        folder: folder.path().join("model"),
        task: TaskName::Arithmetic,
        tokenizer: None,
        alphabet: None,
        chat: false,
        family: Family::Qwen3,
        hidden: 16,
        intermediate: None,
        layers: 1,
        heads: 2,
        positions: 512,
        initializer_range: 0.5,
        seed: 1,
    };
    init(&args).expect("the model can be made");
    let tokenizer = Tokenizer::load(&args.folder).expect("it was just written");
    let engine = Engine::start(&args.folder).await;
    let ask = async |messages: Value| {
        let body = json!({"messages": messages, "max_tokens": 3, "return_prompt_token_ids": true});
        engine.post("/v1/chat/completions", body).await["choices"][0]["prompt_token_ids"].clone()
    };
    let encode = |text: &str| tokenizer.encode(text).expect("the alphabet has all of it");
    // The prompt is that of `rollout`, and a turn ends as the model ends it.
    let first = ask(json!([{"role": "user", "content": "7+5="}])).await;
    let expected = [vec![tokenizer.bos()], encode("7+5=")].concat();
    assert_eq!(first, json!(expected));
    let turns = json!([
        {"role": "user", "content": "7+5="}, {"role": "assistant", "content": "12"}, {"role": "user", "content": "1+1="},
    ]);
    let expected = [expected, encode("12"), vec![tokenizer.eos()], encode("1+1=")].concat();
    assert_eq!(ask(turns).await, json!(expected));
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_with_a_model_for_chats_extends_what_was_sampled() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let args = InitArgs {
        folder: folder.path().join("model"),
        task: TaskName::Arithmetic,
        tokenizer: None,
        alphabet: Some("01?".to_owned()),
        chat: true,
        family: Family::Llama,
        hidden: 16,
        intermediate: None,
        layers: 1,
        heads: 2,
        positions: 512,
        initializer_range: 0.5,
        seed: 1,
    };
    init(&args).expect("the model can be made");
    let engine = Engine::start(&args.folder).await;
    let ask = async |messages: Value| {
        let body = json!({"messages": messages, "max_tokens": 1, "return_prompt_token_ids": true});
        engine.post("/v1/chat/completions", body).await["choices"][0]["prompt_token_ids"].clone()
    };
    // The ids: <eos> 2, <system> 4, <user> 5, <assistant> 6, <tool> 7, then the characters.
    let mut messages = vec![json!({"role": "system", "content": "1"}), json!({"role": "user", "content": "0"})];
    let mut expected = vec![4, 9, 2, 5, 8, 2, 6];
    assert_eq!(ask(json!(messages)).await, json!(expected));
    messages.push(json!({"role": "assistant", "content": "?1"}));
    messages.push(json!({"role": "tool", "content": "00", "tool_call_id": "search"}));
    expected.extend([10, 9, 2, 7, 8, 8, 2, 6]);
    assert_eq!(ask(json!(messages)).await, json!(expected), "the first prompt, the reply and what follows it");
    engine.stop().await;
}
