//! The endpoints of engines that take ids, and how the right one is found.

use std::{sync::Arc, time::Duration};

use forebay_fake_engine::{Answer, EngineKind, FakeEngine, IdFault, LogprobFault, tokenizer::IM_END};
use forebay_gateway::{
    Dialect, UpstreamError,
    cancel::Cancellation,
    completion::{Finish, StopMatch},
    upstream::{
        EngineCall, ExactPrompt, Fault, Parsers, UpstreamOptions,
        probe::{Verdict, probe_request},
    },
};
use serde_json::{Value, json};

use super::{Endpoint, KINDS, Session, check_logprobs, parsers, path, received, renderer, tools, user};
use crate::support::{call, options, parsed, question};

#[tokio::test]
async fn an_older_sglang_is_sent_ids_at_its_other_endpoint() {
    let (engine, mut session) = Session::start_at(Endpoint::Generate).await;
    let calls = engine.log().calls().count();
    let script = Answer::text("I look.").thinking("First.").call("bash", r#"{"command": "ls"}"#).in_bytes();
    engine.script("Look", [script.clone(), script]);
    let mut messages = vec![user("Look!")];
    let request = |messages: &[Value], extra: &Value| {
        let mut body = json!({"model": "m", "messages": messages, "tools": tools()});
        body["max_tokens"] = extra["max_tokens"].clone();
        body["stop"] = extra["stop"].clone();
        parsed(Dialect::Chat, &body)
    };
    let asked = request(&messages, &json!({"max_tokens": 99, "stop": ["END"]}));
    let first = session.call(&asked).await.expect("the engine answers").0.completion;
    check_logprobs(&first);
    let sent = engine.log().at("/generate").last().expect("the engine was called").json();
    let sampling = json!({
        "max_new_tokens": 99, "temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "stop": ["END"], "stop_token_ids": [IM_END],
        "skip_special_tokens": false,
    });
    assert_eq!(sent["sampling_params"], sampling);
    assert_eq!((&sent["input_ids"], &sent["return_logprob"]), (&json!(first.prompt_tokens), &json!(true)));
    // An answer that an update of the weights cuts is continued.
    messages.extend([received(&first), user("Look!")]);
    engine.switch(|switches| switches.aborts = 1);
    let (answered, continues) = session.call(&request(&messages, &json!({}))).await.expect("the engine answers");
    assert_eq!((answered.aborts, continues), (1, Some(1)));
    let second = answered.completion;
    check_logprobs(&second);
    assert!(second.prompt_tokens.starts_with(&path(&first)));
    assert_eq!(second.tokens, first.tokens);
    for completion in [first, second] {
        let message = &completion.message;
        assert_eq!(message.content.as_deref(), Some("I look."));
        assert_eq!((message.reasoning.as_deref(), message.tool_calls.len()), (Some("First."), 1));
        assert_eq!((completion.finish, completion.stop_matched), (Finish::ToolCalls, Some(StopMatch::Token(IM_END))));
        assert_eq!(completion.usage.cached_tokens, Some(0));
    }
    assert_eq!(engine.log().calls().count(), calls, "the chat endpoint was not asked again");
    // Without a bound it would sample 128 tokens.
    let unbounded = question("Go.");
    let ids = session.prompt(&unbounded).ids;
    let exact = ExactPrompt { ids: &ids, stop_ids: &[], text: &|_| String::new() };
    let unbounded = EngineCall { exact: Some(exact), max_tokens: None, ..call(&unbounded) };
    session.upstream.complete(&unbounded).await.expect("the engine answers");
    let log = engine.log();
    let sent = log.at("/generate").last().expect("the engine was called").json();
    assert_eq!(sent["sampling_params"].get("max_new_tokens"), Some(&Value::Null));
}

#[tokio::test]
async fn the_probe_decides_where_ids_are_sent() {
    let (engine, mut session) = Session::start_at(Endpoint::Generate).await;
    // The engine was updated.
    engine.switch(|switches| switches.id_fault = IdFault::None);
    assert_eq!(session.probe().await, Verdict::Ready);
    let generated = engine.log().at("/generate").count();
    session.call(&question("Go.")).await.expect("the engine answers");
    assert_eq!(engine.log().at("/generate").count(), generated);
    // Neither endpoint is good: the verdict names what the chat endpoint lacks.
    engine.switch(|switches| {
        (switches.id_fault, switches.logprob_fault) = (IdFault::NoneInChat, LogprobFault::Missing);
    });
    let Verdict::Refused { problem, .. } = session.probe().await else { panic!("the engine is refused") };
    assert!(problem.contains("prompt_token_ids"), "{problem}");
    // Nothing would find the tool calls in its answers.
    engine.switch(|switches| switches.logprob_fault = LogprobFault::None);
    for parsers in [None, Some(Parsers { tool_call: None, ..parsers() })] {
        let options = UpstreamOptions { parsers, ..options(EngineKind::Sglang, &[&engine]) };
        let session = Session::of(options, Arc::new(renderer()));
        let Verdict::Refused { problem, remedy } = session.probe().await else { panic!("the engine is refused") };
        assert!(problem.contains("/generate") && remedy.contains("tool_call_parser"), "{problem}; {remedy}");
    }
    // A probe that finds the engine busy changes nothing.
    engine.switch(|switches| switches.failures = Some((9, 503, "{}".to_owned())));
    assert!(matches!(session.probe().await, Verdict::Busy { .. }));
    engine.switch(|switches| (switches.failures, switches.id_fault) = (None, IdFault::None));
    session.call(&question("Go.")).await.expect("the engine answers");
}

#[tokio::test]
async fn answers_of_the_other_endpoint_are_checked() {
    let (engine, mut session) = Session::start_at(Endpoint::Generate).await;
    let request = question("Go.");
    for (fault, expected) in [
        (LogprobFault::Missing, Fault::TokenIds),
        (LogprobFault::Sentinel, Fault::Sentinel { index: 0 }),
        (LogprobFault::Positive, Fault::Positive { index: 0, value: 0.5 }),
        (LogprobFault::Null, Fault::NotFinite { index: 0 }),
    ] {
        engine.switch(|switches| switches.logprob_fault = fault);
        let error = session.call(&request).await.expect_err("the engine is not trusted");
        assert!(matches!(&error, UpstreamError::Untrusted { fault, .. } if *fault == expected), "{error}");
    }
    engine.switch(|switches| (switches.logprob_fault, switches.id_fault) = (LogprobFault::None, IdFault::Rendered));
    let error = session.call(&request).await.expect_err("the prompt has another length");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::Prompt { .. }, .. }), "{error}");
}

#[tokio::test]
async fn another_engine_cannot_be_sent_ids() {
    let engine = FakeEngine::start(EngineKind::Openai).await;
    let mut session = Session::of(options(EngineKind::Openai, &[&engine]), Arc::new(renderer()));
    let error = session.call(&question("Go.")).await.expect_err("the mode needs another engine");
    assert!(error.to_string().contains("SGLang or vLLM"), "{error}");
}

#[tokio::test]
async fn an_upstream_is_probed_with_ids() {
    let renderer = Arc::new(renderer());
    let request = probe_request();
    let prompt = renderer.prompt(&request, 0, None, &Cancellation::default()).expect("it can be rendered");
    let text = |ids: &[i32]| renderer.decode(ids);
    let exact = ExactPrompt { ids: &prompt.ids, stop_ids: renderer.stop_ids(), text: &text };
    for kind in KINDS {
        let (engine, session) = Session::start(kind).await;
        assert_eq!(session.upstream.probe_exact("fake", &request, exact).await, Verdict::Ready, "{kind:?}");
        engine.switch(|switches| switches.id_fault = IdFault::NoSampled);
        let verdict = session.upstream.probe_exact("fake", &request, exact).await;
        assert!(matches!(verdict, Verdict::Refused { .. }) || kind == EngineKind::Sglang, "{verdict:?}");
        engine.switch(|switches| switches.failures = Some((1, 404, "{}".to_owned())));
        let verdict = session.upstream.probe_exact("fake", &request, exact).await;
        assert!(matches!(verdict, Verdict::Refused { .. }), "{verdict:?}");
    }
}

#[tokio::test]
async fn an_engine_that_parses_nothing_is_asked_once_for_an_answer() {
    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    engine.switch(|switches| switches.parses = false);
    engine.script("Speak", [Answer::text("I think.").thinking("Nothing").call("bash", "{}")]);
    let derendered = || engine.log().at("/v1/chat/completions/derender").count();
    let ask = |stop: &[&str]| {
        let body = json!({"model": "m", "messages": [user("Speak!")], "tools": tools(), "stop": stop});
        parsed(Dialect::Chat, &body)
    };
    let derender = session.call(&ask(&[])).await.expect("the engine answers").0;
    assert_eq!(derendered(), 1, "before a probe it may have a parser");
    assert_eq!(session.probe().await, Verdict::Ready);

    let probed = derendered();
    let decoded = session.call(&ask(&[])).await.expect("the engine answers").0;
    assert_eq!(derendered(), probed);
    assert_eq!(decoded.completion, derender.completion);
    assert_eq!((decoded.parsing, decoded.completion.finish), (Duration::ZERO, Finish::Stop));
    let text = decoded.completion.message.content.expect("it has text");
    assert!(text.starts_with("<think>\nNothing\n</think>\n\nI think.") && text.ends_with("</tool_call>"), "{text}");
    let stopped = session.call(&ask(&["</think>"])).await.expect("the engine answers").0.completion;
    assert_eq!(stopped.message.content.as_deref(), Some("<think>\nNothing\n"));

    // It was restarted with a parser.
    engine.switch(|switches| switches.parses = true);
    assert_eq!(session.probe().await, Verdict::Ready);
    let probed = derendered();
    let parsed = session.call(&ask(&[])).await.expect("the engine answers").0;
    assert_eq!((derendered(), parsed.completion.message.tool_calls.len()), (probed + 1, 1));
}
