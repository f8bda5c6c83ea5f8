//! What an engine is sent, and what of its answer is recorded.

use std::{sync::Arc, time::Duration};

use forebay_fake_engine::{
    Answer, EngineKind, IdFault, LogprobFault,
    tokenizer::{IM_END, decode},
};
use forebay_gateway::{
    Dialect, DialectError, Request, UpstreamError,
    cancel::Cancellation,
    completion::{Finish, StopMatch, VersionSpan},
    upstream::{EngineCall, ExactPrompt, Fault},
};
use serde_json::{Value, json};

use super::{ENDPOINTS, Endpoint, Session, path, received, renderer, tools, user, with_tools};
use crate::support::{call, parsed, question};

#[tokio::test]
async fn what_an_engine_is_sent() {
    let (engine, mut session) = Session::start(EngineKind::Sglang).await;
    let (answered, _) = session.call(&question("Go.")).await.expect("the engine answers");
    let sent = engine.log().calls().next().expect("the engine was called").json();
    assert_eq!(sent["input_ids"], json!(answered.completion.prompt_tokens));
    assert_eq!(sent["stop_token_ids"], json!([IM_END]));
    assert_eq!((sent["max_tokens"].clone(), sent["messages"][0]["content"].clone()), (json!(1000), json!("Go.")));
    assert_eq!(sent["return_prompt_token_ids"], true);

    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    let body = json!({"model": "m", "messages": [user("Go.")], "stop": ["END"], "max_tokens": 9, "tools": tools()});
    let (answered, _) = session.call(&parsed(Dialect::Chat, &body)).await.expect("the engine answers");
    let log = engine.log();
    let sent = log.at("/inference/v1/generate").next().expect("the engine was called").json();
    assert_eq!(sent["token_ids"], json!(answered.completion.prompt_tokens));
    let sampling = json!({
        "max_tokens": 9, "temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "logprobs": 1, "stop": ["END"], "stop_token_ids": [IM_END],
        "skip_special_tokens": false,
    });
    assert_eq!(sent["sampling_params"], sampling);
    let parse = log.at("/v1/chat/completions/derender").next().expect("the answer was parsed").json();
    let spoken = answered.completion.tokens.strip_suffix(&[IM_END]).expect("the model ends its answer");
    assert_eq!(parse["generate_response"]["choices"][0]["token_ids"], json!(spoken));
    assert_eq!(
        (parse["chat_request"]["messages"].clone(), parse["chat_request"]["stop"].clone()),
        (json!([]), json!(null))
    );
    assert_eq!((parse["chat_request"]["tools"].clone(), parse["model"].clone()), (tools(), json!("fake")));
    assert_eq!(log.calls().count(), 0);
}

#[tokio::test]
async fn an_answer_is_recorded_with_its_parts() {
    for endpoint in ENDPOINTS {
        let (engine, mut session) = Session::start_at(endpoint).await;
        let script = Answer::text("I look.").thinking("The user wants files.").call("bash", r#"{"b":1, "a": 2}"#);
        engine.script("Look", [script]);
        let request = with_tools(&json!([user("Look!")]));
        let answered = session.call(&request).await.expect("the engine answers").0;
        let parses = endpoint != Endpoint::Chat;
        assert_eq!(answered.parsing > Duration::ZERO, parses, "{endpoint:?}: parsing takes requests of its own");
        let completion = answered.completion;
        assert_eq!(completion.message.content.as_deref(), Some("I look."), "{endpoint:?}");
        assert_eq!(completion.message.reasoning.as_deref(), Some("The user wants files."), "{endpoint:?}");
        assert_eq!(completion.message.tool_calls[0].arguments, r#"{"b":1, "a": 2}"#);
        assert_eq!(completion.finish, Finish::ToolCalls);
        assert_eq!(completion.stop_matched, Some(StopMatch::Token(IM_END)));
        assert!(completion.stopped_on_token());
        assert_eq!(completion.usage.completion_tokens as usize, completion.tokens.len());
        assert_eq!(completion.spans, [VersionSpan { version: 0, start: 0, len: completion.tokens.len() as u32 }]);
        assert!(!completion.version_assumed);
    }
}

#[tokio::test]
async fn a_stop_text_ends_an_answer() {
    for (endpoint, names_stops) in ENDPOINTS.into_iter().flat_map(|endpoint| [(endpoint, true), (endpoint, false)]) {
        let (engine, mut session) = Session::start_at(endpoint).await;
        engine.switch(|switches| switches.names_stops = names_stops);
        engine.script("Act", [Answer::text("I act. Observation: none"), Answer::text("Done.")]);
        let body = |messages: Value| {
            parsed(Dialect::Chat, &json!({"model": "m", "messages": messages, "stop": ["Observation:"]}))
        };
        let first = session.call(&body(json!([user("Act!")]))).await.expect("the engine answers").0.completion;
        assert_eq!(first.message.content.as_deref(), Some("I act. "), "{endpoint:?}");
        assert_eq!(first.stop_matched, Some(StopMatch::Text("Observation:".to_owned())), "{endpoint:?}");
        let messages = json!([user("Act!"), received(&first), user("Observation: a file")]);
        let (second, continues) = session.call(&body(messages)).await.expect("the engine answers");
        assert_eq!(continues, Some(1));
        let path = path(&first);
        assert!(decode(&path).ends_with("Observation:"));
        assert_eq!(second.completion.prompt_tokens[path.len()], IM_END, "the message is closed");
    }
}

#[tokio::test]
async fn an_answer_that_ends_at_once_is_empty() {
    for endpoint in ENDPOINTS {
        let (engine, mut session) = Session::start_at(endpoint).await;
        engine.script("Silence", [Answer::text("")]);
        let completion = session.call(&question("Silence!")).await.expect("the engine answers").0.completion;
        assert_eq!((completion.tokens, completion.message.content), (vec![IM_END], None), "{endpoint:?}");
    }
}

#[tokio::test]
async fn an_engine_that_renders_the_messages_is_not_trusted() {
    let (engine, mut session) = Session::start(EngineKind::Sglang).await;
    engine.switch(|switches| switches.id_fault = IdFault::Rendered);
    // The template of the engine and that of the gateway write tools differently.
    let request = with_tools(&json!([user("Go.")]));
    let error = session.call(&request).await.expect_err("the engine is not trusted");
    let UpstreamError::Untrusted { fault: Fault::Prompt { index }, remedy } = &error else { panic!("{error}") };
    assert!(*index > 0 && remedy.contains("mode = \"observe\""), "{error}");
    let told = DialectError::from(&error);
    assert_eq!((told.status(), told.should_retry()), (502, true));
    assert!(session.rows.is_empty());
    // The prompt of SGLang is known only from its answer.
    engine.switch(|switches| switches.id_fault = IdFault::NoPrompt);
    let error = session.call(&question("Go.")).await.expect_err("the engine is not trusted");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::PromptIds, .. }), "{error}");
}

/// The tests above show little if the fake engine answers any ids.
#[tokio::test]
async fn the_fake_engine_compares_ids_with_the_messages_beside_them() {
    let renderer = Arc::new(renderer());
    let (engine, session) = Session::start(EngineKind::Sglang).await;
    let called = json!({"role": "assistant", "content": "I look.", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{\"command\":\"ls\",\"all\":true}"}}]});
    let messages = |place: usize, pointer: &str, value: Value| {
        let result = json!({"role": "tool", "tool_call_id": "c", "content": "ok"});
        let mut messages = json!([{"role": "system", "content": "S"}, user("Go."), called, result]);
        *messages[place].pointer_mut(pointer).expect("the field exists") = value;
        with_tools(&messages)
    };
    let whole = messages(1, "/content", json!("Go."));
    let ids = renderer.prompt(&whole, 0, None, &Cancellation::default()).expect("it can be rendered").ids;
    let ask = async |request: &Request, ids: &[i32]| {
        let exact = ExactPrompt { ids, stop_ids: renderer.stop_ids(), text: &|_| String::new() };
        session.upstream.complete(&EngineCall { exact: Some(exact), ..call(request) }).await.map(drop)
    };
    let arguments = "/tool_calls/0/function/arguments";
    // Spelling is the agent's matter.
    let same = messages(2, arguments, json!("{\"all\": true, \"command\": \"ls\", \"more\": null}"));
    assert_eq!(ask(&same, &ids).await, Ok(()));
    for other in [
        messages(0, "/content", json!("T")),
        messages(1, "/content", json!("Go")),
        messages(2, "/content", json!("I looked.")),
        messages(2, arguments, json!("{\"command\": \"ls\"}")),
        messages(2, "/tool_calls/0/function/name", json!("sh")),
        messages(3, "/content", json!("")),
        messages(3, "/role", json!("user")),
        Request { tools: Vec::new(), ..whole.clone() },
        Request { messages: whole.messages[..3].to_vec(), ..whole.clone() },
    ] {
        let error = ask(&other, &ids).await.expect_err("these are other messages");
        assert!(error.to_string().contains("are not the prompt of the messages"), "{error}");
    }
    let (doubled, foreign) = ([&ids[..], &ids].concat(), [&ids[..], &[100_000]].concat());
    for ids in [&ids[..ids.len() - 1], &ids[1..], &doubled[1..], &foreign] {
        assert!(ask(&whole, ids).await.is_err());
    }
    assert_eq!(engine.log().calls().count(), 14);
}

#[tokio::test]
async fn answers_of_ids_are_checked() {
    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    let request = question("Go.");
    engine.switch(|switches| switches.id_fault = IdFault::NoSampled);
    let error = session.call(&request).await.expect_err("the engine is not trusted");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::TokenIds, .. }), "{error}");
    // Older versions do not repeat the prompt.
    engine.switch(|switches| switches.id_fault = IdFault::NoPrompt);
    session.call(&request).await.expect("the engine is trusted");
    for (fault, expected) in [
        (LogprobFault::Missing, Fault::Logprobs),
        (LogprobFault::Sentinel, Fault::Sentinel { index: 0 }),
        (LogprobFault::Null, Fault::NotFinite { index: 0 }),
    ] {
        engine.switch(|switches| switches.logprob_fault = fault);
        let error = session.call(&request).await.expect_err("the engine is not trusted");
        assert!(matches!(&error, UpstreamError::Untrusted { fault, .. } if *fault == expected), "{error}");
    }
}
