//! Calls that succeed: what the engine is sent, and what is recorded.

use forebay_fake_engine::{
    Answer, EngineKind, IdFault,
    model::logprob,
    tokenizer::{IM_END, decode},
};
use forebay_gateway::{
    Dialect,
    completion::{Finish, StopMatch},
    upstream::{EngineCall, Sampling},
};
use serde_json::{Value, json};

use crate::support::{KINDS, answer, ask, call, completion, full_message, parsed, parsed_text, question, start};

#[tokio::test]
async fn every_sampled_token_has_the_log_probability_of_its_context() {
    for kind in KINDS {
        let (_engine, upstream) = start(kind).await;
        let completion = ask(&upstream, "Say something.").await.expect("the engine answers").completion;
        assert!(decode(&completion.prompt_tokens).contains("Say something."), "{kind:?}");
        assert_eq!(completion.tokens.len(), completion.logprobs.len());
        let mut context = completion.prompt_tokens.clone();
        for (&token, &value) in completion.tokens.iter().zip(&completion.logprobs) {
            let expected = logprob(&context, token, 0.8);
            assert!((value - expected).abs() < 1e-6, "{kind:?}: {value} instead of {expected}");
            context.push(token);
        }
    }
}

#[tokio::test]
async fn a_call_repeated_with_the_same_seed_samples_the_same_answer() {
    let (engine, upstream) = start(EngineKind::Sglang).await;
    let first = ask(&upstream, "Again.").await.expect("the engine answers").completion;
    let second = ask(&upstream, "Again.").await.expect("the engine answers").completion;
    assert_eq!(first, second);
    engine.switch(|switches| switches.seed = 2);
    let third = ask(&upstream, "Again.").await.expect("the engine answers").completion;
    assert_ne!(first.tokens, third.tokens);
}

#[tokio::test]
async fn a_scripted_turn_is_recorded_with_its_parts() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        let script = Answer::text("I look.").thinking("The user wants files.").call("bash", r#"{"b":1, "a": 2}"#);
        engine.script("Look", [script]);
        let completion = ask(&upstream, "Look!").await.expect("the engine answers").completion;
        assert_eq!(completion.message.content.as_deref(), Some("I look."), "{kind:?}");
        assert_eq!(completion.message.reasoning.as_deref(), Some("The user wants files."), "{kind:?}");
        assert_eq!(completion.message.tool_calls[0].arguments, r#"{"b":1, "a": 2}"#);
        assert_eq!(completion.finish, Finish::ToolCalls);
        assert_eq!(completion.tokens.last(), Some(&IM_END));
        assert!(completion.stopped_on_token());
        let usage = completion.usage;
        assert_eq!(usage.prompt_tokens as usize, completion.prompt_tokens.len());
        assert_eq!(usage.completion_tokens as usize, completion.tokens.len());
    }
}

/// The second prompt of a conversation of two calls, and whether it begins with all ids of the first call.
async fn second_prompt(script: Answer, rewrite: impl Fn(&mut Value)) -> bool {
    let (engine, upstream) = start(EngineKind::Sglang).await;
    engine.script("Start", [script, Answer::text("Done.")]);
    let first = ask(&upstream, "Start.").await.expect("the engine answers").completion;
    let mut message = answer(Dialect::Chat, &first)["choices"][0]["message"].take();
    rewrite(&mut message);
    let messages = json!([
        {"role": "user", "content": "Start."},
        message,
        {"role": "tool", "tool_call_id": "call", "content": "ok"},
    ]);
    let request = parsed(Dialect::Chat, &json!({"model": "m", "messages": messages}));
    let second = upstream.complete(&call(&request)).await.expect("the engine answers").completion;
    assert_eq!(second.message.content.as_deref(), Some("Done."));
    let whole: Vec<i32> = first.prompt_tokens.iter().chain(&first.tokens).copied().collect();
    second.prompt_tokens.starts_with(&whole)
}

#[tokio::test]
async fn a_turn_that_comes_back_unchanged_extends_the_first_call() {
    let script = Answer::text("I look.").thinking("Think.").call("bash", r#"{"command": "ls"}"#);
    assert!(second_prompt(script, |_| {}).await);
}

#[tokio::test]
async fn the_fake_engine_drifts_where_real_ones_do() {
    let script = || Answer::text("the thing").call("bash", r#"{"command": "ls"}"#);
    assert!(!second_prompt(script().in_bytes(), |_| {}).await, "the tokenizer merges what was sampled as bytes");
    let compact =
        |message: &mut Value| message["tool_calls"][0]["function"]["arguments"] = json!(r#"{"command":"ls"}"#);
    assert!(!second_prompt(script(), compact).await, "other arguments are other ids");
    let drop_reasoning = |message: &mut Value| {
        let message = message.as_object_mut().expect("a message is an object");
        message.remove("reasoning");
        message.remove("reasoning_content");
    };
    assert!(!second_prompt(script().thinking("Think."), drop_reasoning).await, "reasoning is part of the ids");
}

#[tokio::test]
async fn the_engine_is_sent_the_policys_sampling_and_asked_for_ids() {
    let body = json!({
        "model": "m", "temperature": 0.1, "top_p": 0.5, "seed": 3, "max_tokens": 5000, "stop": ["END"], "user": "u",
        "chat_template_kwargs": {"z": 1, "a": 2}, "presence_penalty": 0,
        "messages": [{"role": "developer", "content": "D"}, {"role": "user", "content": "U"}],
    });
    let request = parsed(Dialect::Chat, &body);
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        let sampling = Sampling { temperature: 0.7, top_p: 0.95, top_k: 40 };
        let call = EngineCall { sampling, session: "s-1", ..call(&request) };
        upstream.complete(&call).await.expect("the engine answers");
        let log = engine.log();
        let sent = log.calls().next().expect("the engine was called");
        let body = sent.json();
        assert_eq!((&body["temperature"], &body["top_p"], &body["top_k"]), (&json!(0.7), &json!(0.95), &json!(40)));
        assert_eq!(body["max_tokens"], 1000, "the room bounds what the agent wants");
        assert_eq!(body["stop"], json!(["END"]));
        assert_eq!(body["user"], "u");
        assert_eq!(body["seed"], Value::Null);
        assert_eq!(body["stream"], false);
        assert_eq!(body["logprobs"], true);
        assert_eq!(body["return_token_ids"], true);
        assert_eq!(body["return_meta_info"] == json!(true), kind == EngineKind::Sglang);
        assert_eq!(body["return_prompt_token_ids"] == json!(true), kind == EngineKind::Sglang);
        // The values that an engine would otherwise take from the model's folder.
        assert_eq!(body["repetition_penalty"] == json!(1), kind != EngineKind::Openai);
        assert_eq!(body["messages"][0]["role"], "system", "templates do not know developers");
        assert_eq!(body["messages"].as_array().map(Vec::len), Some(2), "messages stay where they are");
        assert_eq!(sent.headers.get("x-smg-routing-key").map(String::as_str), Some("s-1"));
        assert_eq!(sent.headers.get("x-session-id").map(String::as_str), Some("s-1"));
    }
}

#[tokio::test]
async fn a_call_without_a_bound_leaves_it_to_the_engine() {
    let (engine, upstream) = start(EngineKind::Vllm).await;
    let request = question("Talk.");
    upstream.complete(&EngineCall { max_tokens: None, ..call(&request) }).await.expect("the engine answers");
    let sent = engine.log().calls().next().expect("the engine was called").json();
    assert_eq!(sent.get("max_tokens"), None);
}

#[tokio::test]
async fn a_forwarded_call_keeps_the_agents_sampling_and_needs_no_ids() {
    let body = json!({"model": "m", "temperature": 0.1, "top_k": 3, "max_tokens": 20,
        "messages": [{"role": "user", "content": "Talk."}]});
    let request = parsed(Dialect::Chat, &body);
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.script("Talk", [Answer::text("Hello.")]);
        engine.switch(|switches| switches.id_fault = IdFault::Router);
        let completion = upstream.forward(&call(&request)).await.expect("the engine answers");
        assert_eq!(completion.message.content.as_deref(), Some("Hello."));
        assert!(completion.usage.prompt_tokens > 0 && completion.usage.completion_tokens > 0, "{:?}", completion.usage);
        let sent = engine.log().calls().next().expect("the engine was called").json();
        assert_eq!((&sent["temperature"], &sent["top_k"]), (&json!(0.1), &json!(3)));
        assert_eq!((sent.get("logprobs"), sent.get("return_token_ids")), (None, None));
    }
}

#[tokio::test]
async fn opaque_parts_reach_the_engine_as_they_were_sent() {
    let part = r#"{"type":"text","text":"\u0055"}"#;
    let tool = r#"{"type":"function","function":{"parameters":{"z":1e2,"a":[ 2 ]},"name":"f"}}"#;
    let kwargs = r#"{"z": true, "a": false}"#;
    let text = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":[{part}],"thinking":{kwargs}}}],
            "tools":[{tool}],"documents":{kwargs}}}"#
    );
    let request = parsed_text(Dialect::Chat, &text);
    let (engine, upstream) = start(EngineKind::Vllm).await;
    upstream.complete(&call(&request)).await.expect("the engine answers");
    let log = engine.log();
    let sent = &log.calls().next().expect("the engine was called").text;
    for expected in [part, tool, &format!(r#""documents":{kwargs}"#), &format!(r#""thinking":{kwargs}"#)] {
        assert!(sent.contains(expected), "{expected} is in {sent}");
    }
}

#[tokio::test]
async fn reasoning_is_sent_under_the_names_that_the_engine_reads() {
    let message = answer(Dialect::Chat, &completion(full_message()))["choices"][0]["message"].take();
    let messages = json!([{"role": "user", "content": "q"}, message, {"role": "user", "content": "r"}]);
    let request = parsed(Dialect::Chat, &json!({"model": "m", "messages": messages}));
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        upstream.complete(&call(&request)).await.expect("the engine answers");
        let sent = engine.log().calls().next().expect("the engine was called").json();
        assert_eq!(sent["messages"][1]["reasoning_content"], json!(full_message().reasoning));
        assert_eq!(sent["messages"][1]["reasoning"].is_string(), kind != EngineKind::Sglang, "{kind:?}");
    }
}

#[tokio::test]
async fn an_empty_tool_argument_is_sent_as_an_empty_object() {
    let message = json!({"role": "assistant", "content": null,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]});
    let messages = json!([{"role": "user", "content": "q"}, message]);
    let request = parsed(Dialect::Chat, &json!({"model": "m", "messages": messages}));
    let (engine, upstream) = start(EngineKind::Vllm).await;
    upstream.complete(&call(&request)).await.expect("the engine answers");
    let sent = engine.log().calls().next().expect("the engine was called").json();
    assert_eq!(sent["messages"][1]["tool_calls"][0]["function"]["arguments"], "{}");
    assert_eq!(sent["messages"][1]["content"], Value::Null);
}

#[tokio::test]
async fn the_bound_of_tokens_cuts_the_answer() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.script("Talk", [Answer::text("one two three four five")]);
        let request = question("Talk.");
        let call = EngineCall { max_tokens: Some(4), ..call(&request) };
        let completion = upstream.complete(&call).await.expect("the engine answers").completion;
        assert_eq!((completion.tokens.len(), completion.finish), (4, Finish::Length));
        assert_eq!(completion.stop_matched, None);
        assert!(!completion.stopped_on_token());
    }
}

#[tokio::test]
async fn a_stop_text_is_named() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.script("Talk", [Answer::text("one STOP two")]);
        let body = json!({"model": "m", "stop": ["STOP"], "messages": [{"role": "user", "content": "Talk."}]});
        let request = parsed(Dialect::Chat, &body);
        let completion = upstream.complete(&call(&request)).await.expect("the engine answers").completion;
        assert_eq!(completion.stop_matched, Some(StopMatch::Text("STOP".to_owned())), "{kind:?}");
        assert_eq!(completion.message.content.as_deref(), Some("one "));
        assert!(!completion.stopped_on_token());
    }
}
