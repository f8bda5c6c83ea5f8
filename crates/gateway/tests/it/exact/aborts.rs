//! Calls that an engine aborts because its weights change, and calls that reach the end of the context.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use forebay_fake_engine::{Answer, EngineKind, FakeEngine, IdFault, VersionReport};
use forebay_gateway::{
    Dialect, DialectError, Upstream, UpstreamError,
    cancel::Cancellation,
    completion::{Finish, VersionSpan},
    upstream::{Answered, EngineCall, ExactPrompt, Fault, Parsers, UpstreamOptions},
};
use serde_json::json;

use super::{KINDS, Session, check_logprobs, parsers, renderer, tools, user, with_tools};
use crate::support::{call, options, parsed, question};

/// An answer that an update of the weights cuts in two.
async fn cut_in_two(kind: EngineKind, parsers: Option<Parsers>) -> (FakeEngine, Answered) {
    let engine = FakeEngine::start(kind).await;
    engine.switch(|switches| {
        "5".clone_into(&mut switches.weight_version);
        switches.stall = true;
    });
    let script =
        Answer::text("I look for the thing.").thinking("First the other.").call("bash", r#"{"command": "ls"}"#);
    engine.script("Start", [script]);
    let mut session = Session::of(UpstreamOptions { parsers, ..options(kind, &[&engine]) }, Arc::new(renderer()));
    let request = with_tools(&json!([user("Start.")]));
    let calling = tokio::spawn(async move { session.call(&request).await.map(|(answered, _)| answered) });
    engine.wait(|log| log.stalled == 1).await;
    let url = format!("{}/update_weight_version", engine.url());
    post(&url, &json!({"new_version": "6"}).to_string()).await;
    let generate = if kind == EngineKind::Vllm { "/inference/v1/generate" } else { "/v1/chat/completions" };
    engine.wait(|log| log.at(generate).count() == 2 && log.stalled == 1).await;
    engine.switch(|switches| switches.stall = false);
    let answered = calling.await.expect("the call does not panic").expect("the engine answers");
    (engine, answered)
}

/// Posts a body over a connection of its own.
async fn post(url: &str, body: &str) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let (address, path) = url.trim_start_matches("http://").split_once('/').expect("the URL has a path");
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("the engine listens");
    let head = format!(
        "POST /{path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.expect("the engine reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("the engine answers");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn an_aborted_call_is_continued_and_has_two_spans() {
    for (kind, parsers) in [(EngineKind::Vllm, None), (EngineKind::Sglang, Some(parsers()))] {
        let (engine, answered) = cut_in_two(kind, parsers).await;
        assert_eq!(answered.aborts, 1);
        let completion = &answered.completion;
        check_logprobs(completion);
        let [first, second] = completion.spans[..] else { panic!("{:?}", completion.spans) };
        assert_eq!((first.version, first.start, second.version, second.start), (5, 0, 6, first.len));
        assert_eq!((second.start + second.len) as usize, completion.tokens.len());
        // The second request has the ids that were sampled before.
        let log = engine.log();
        let generate = if kind == EngineKind::Vllm { "/inference/v1/generate" } else { "/v1/chat/completions" };
        let sent = log.at(generate).last().expect("the engine was called").json();
        let ids = if kind == EngineKind::Vllm { &sent["token_ids"] } else { &sent["input_ids"] };
        let behind = [&completion.prompt_tokens[..], &completion.tokens[..first.len as usize]].concat();
        assert_eq!(*ids, json!(behind));
        let left = if kind == EngineKind::Vllm { &sent["sampling_params"]["max_tokens"] } else { &sent["max_tokens"] };
        assert_eq!(*left, json!(1000 - first.len));
        // The answer is parsed as a whole.
        let message = &completion.message;
        assert_eq!(message.content.as_deref(), Some("I look for the thing."), "{kind:?}");
        assert_eq!(message.reasoning.as_deref(), Some("First the other."), "{kind:?}");
        assert_eq!(message.tool_calls[0].arguments, r#"{"command": "ls"}"#);
        assert_eq!(completion.finish, Finish::ToolCalls);
        if kind == EngineKind::Sglang {
            let parse = log.at("/parse_function_call").next().expect("the answer was parsed").json();
            assert_eq!((parse["tool_call_parser"].clone(), parse["tools"].clone()), (json!("qwen25"), tools()));
        }
    }
}

#[tokio::test]
async fn an_aborted_call_is_repeated_if_its_parts_cannot_be_parsed_together() {
    let (_engine, answered) = cut_in_two(EngineKind::Sglang, None).await;
    assert_eq!(answered.aborts, 1);
    check_logprobs(&answered.completion);
    let whole = VersionSpan { version: 6, start: 0, len: answered.completion.tokens.len() as u32 };
    assert_eq!(answered.completion.spans, [whole]);
    assert_eq!(answered.completion.message.reasoning.as_deref(), Some("First the other."));
}

#[tokio::test]
async fn an_aborted_call_that_cannot_be_checked_is_repeated() {
    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    engine.script("Start", [Answer::text("the thing in there")]);
    engine.switch(|switches| {
        switches.aborts = 2;
        switches.version_report = VersionReport::Nothing;
    });
    // The published version when each part begins stands for what the engine does not say.
    let published = AtomicI64::new(5);
    let request = question("Start.");
    let version = || published.fetch_add(1, Ordering::Relaxed);
    let (answered, _) = session.call_with(&request, &version).await.expect("the engine answers");
    let versions: Vec<i64> = answered.completion.spans.iter().map(|span| span.version).collect();
    assert_eq!((versions, answered.completion.version_assumed, answered.aborts), (vec![5, 6, 7], true, 2));
    check_logprobs(&answered.completion);
    assert_eq!(answered.completion.message.content.as_deref(), Some("the thing in there"));

    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    engine.switch(|switches| (switches.aborts, switches.id_fault) = (1, IdFault::NoSampled));
    let error = session.call(&request).await.expect_err("the second answer lacks ids as well");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::TokenIds, .. }), "{error}");
    assert_eq!(engine.log().at("/inference/v1/generate").count(), 2);
}

#[tokio::test]
async fn an_engine_that_aborts_every_call_is_given_up() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    engine.switch(|switches| switches.aborts = 100);
    let options = UpstreamOptions { aborts_max: 3, ..options(EngineKind::Vllm, &[&engine]) };
    let mut session = Session::of(options, Arc::new(renderer()));
    // Without a script, each repeat has something to sample.
    let error = session.call(&question("Go.")).await.expect_err("the engine does not answer");
    assert!(matches!(error, UpstreamError::Aborted { times: 4 }), "{error}");
}

#[tokio::test]
async fn an_answer_that_is_aborted_at_its_bound_is_complete() {
    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    engine.script("Start", [Answer::text("the thing in there and so on")]);
    // Each abort keeps half of what is left.
    engine.switch(|switches| switches.aborts = 100);
    let body = json!({"model": "m", "messages": [user("Start.")], "max_tokens": 1});
    let error = session.call(&parsed(Dialect::Chat, &body)).await.expect_err("half of one is nothing");
    assert!(matches!(error, UpstreamError::Aborted { .. }), "{error}");
    engine.switch(|switches| switches.aborts = 1);
    let (answered, _) = session.call(&parsed(Dialect::Chat, &body)).await.expect("the engine answers");
    assert_eq!((answered.completion.tokens.len(), answered.completion.finish), (1, Finish::Length));
}

#[tokio::test]
async fn answers_end_with_the_context() {
    for kind in KINDS {
        let engine = FakeEngine::start(kind).await;
        engine.script("Talk", [Answer::text("one two three four five")]);
        let request = question("Talk.");
        let renderer = Arc::new(renderer());
        let ids = renderer.prompt(&request, 0, None, &Cancellation::default()).expect("it can be rendered").ids;
        let complete = async |context_tokens: Option<u32>| {
            let options = UpstreamOptions { context_tokens, ..options(kind, &[&engine]) };
            let upstream = Upstream::new(options).expect("the options are usable");
            let exact = ExactPrompt { ids: &ids, stop_ids: renderer.stop_ids(), text: &|_| String::new() };
            upstream.complete(&EngineCall { exact: Some(exact), max_tokens: None, ..call(&request) }).await
        };
        let answered = complete(Some(ids.len() as u32 + 3)).await.expect("the engine answers");
        assert_eq!((answered.completion.tokens.len(), answered.completion.finish), (3, Finish::Length));
        let full = complete(Some(ids.len() as u32)).await.expect_err("there is no room");
        assert_eq!(DialectError::from(&full).code(), "context_length_exceeded");
        let unbounded = complete(None).await;
        match kind {
            EngineKind::Vllm => assert!(unbounded.expect_err("vLLM needs a bound").to_string().contains("context")),
            _ => assert_eq!(unbounded.expect("the engine answers").completion.finish, Finish::Stop),
        }
    }
}
