//! Connections: retries, cancellation, timeouts, bounds and refusals.

use std::time::Duration;

use forebay_fake_engine::{Answer, EngineKind, FakeEngine, model::logprob};
use forebay_gateway::{
    DialectError, Upstream, UpstreamError,
    upstream::{EngineCall, Secret, UpstreamOptions, order},
};

use crate::support::{KINDS, ask, call, options, plain_client, question, start};

#[tokio::test]
async fn a_connection_that_breaks_before_the_answer_is_replaced_once() {
    let (engine, upstream) = start(EngineKind::Sglang).await;
    engine.switch(|switches| switches.cuts_before_head = 1);
    let answered = ask(&upstream, "Hi").await.expect("the second connection works");
    assert_eq!(answered.reconnects, 1);
    let log = engine.log();
    let rids: Vec<_> = log.calls().map(|call| call.json()["rid"].clone()).collect();
    assert_eq!(rids.len(), 2);
    let text = |index: usize| rids[index].as_str().expect("an id").to_owned();
    assert_ne!(rids[0], rids[1], "the engine may still work on the first");

    assert!(!text(1).starts_with(&text(0)), "SGLang aborts all calls whose id begins with that of the first");

    engine.switch(|switches| switches.cuts_before_head = 2);
    let error = ask(&upstream, "Hi").await.expect_err("both connections break");
    assert!(matches!(error, UpstreamError::Unreachable { .. }), "{error}");
    assert_eq!(engine.log().calls().count(), 4);
}

#[tokio::test]
async fn a_pooled_connection_that_died_costs_no_call() {
    let (engine, upstream) = start(EngineKind::Vllm).await;
    ask(&upstream, "Hi").await.expect("the engine answers");
    assert_eq!(engine.log().connections, 1);
    ask(&upstream, "Hi").await.expect("the engine answers");
    assert_eq!(engine.log().connections, 1, "the connection is used again");
    engine.switch(|switches| switches.cuts_before_head = 1);
    ask(&upstream, "Hi").await.expect("a fresh connection works");
    assert_eq!(engine.log().connections, 2);
}

#[tokio::test]
async fn an_answer_that_breaks_in_the_middle_is_an_error_and_not_repeated() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.switch(|switches| switches.cuts_in_body = 1);
        let error = ask(&upstream, "Hi").await.expect_err("the answer is cut");
        assert!(matches!(error, UpstreamError::Unreachable { .. }), "{error}");
        assert_eq!(engine.log().calls().count(), 1);
        assert!(DialectError::from(&error).should_retry());
    }
}

#[tokio::test]
async fn a_call_that_is_dropped_is_cancelled_at_the_engine() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.switch(|switches| switches.stall = true);
        let task = tokio::spawn(async move { ask(&upstream, "Hi").await });
        engine.wait(|log| log.stalled == 1).await;
        task.abort();
        engine.wait(|log| log.abandoned == 1 && log.stalled == 0).await;
        if kind == EngineKind::Sglang {
            engine.wait(|log| log.aborted.contains("rid-0")).await;
        }
        assert_eq!(engine.log().sampled_tokens, 0, "{kind:?}");
    }
}

#[tokio::test]
async fn a_call_that_was_answered_is_not_cancelled() {
    let (engine, upstream) = start(EngineKind::Sglang).await;
    ask(&upstream, "Hi").await.expect("the engine answers");
    engine.switch(|switches| switches.failures = Some((1, 400, "no".to_owned())));
    ask(&upstream, "Hi").await.expect_err("the engine refuses");
    // Two more calls, behind which a cancellation of the first two would have arrived.
    ask(&upstream, "Hi").await.expect("the engine answers");
    ask(&upstream, "Hi").await.expect("the engine answers");
    let log = engine.log();
    assert_eq!(log.received.len(), log.calls().count(), "there are only the calls: {:?}", log.received);
}

#[tokio::test]
async fn an_aborted_call_is_repeated_and_its_partial_answer_discarded() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.script("Talk", [Answer::text("a long answer of many words")]);
        engine.switch(|switches| switches.aborts = 2);
        let answered = ask(&upstream, "Talk.").await.expect("the third attempt ends");
        assert_eq!(answered.aborts, 2);
        assert_eq!(answered.completion.message.content.as_deref(), Some("a long answer of many words"));
        let first = answered.completion.tokens[0];
        let expected = logprob(&answered.completion.prompt_tokens, first, 0.8);
        assert!((answered.completion.logprobs[0] - expected).abs() < 1e-6);
    }
}

#[tokio::test]
async fn a_call_that_was_aborted_in_the_engines_queue_is_repeated() {
    let (engine, upstream) = start(EngineKind::Sglang).await;
    for (status, text) in
        [(503, r#"{"detail": "Abort in waiting queue"}"#), (400, r#"{"message": "The request is aborted."}"#)]
    {
        engine.switch(|switches| switches.failures = Some((2, status, text.to_owned())));
        assert_eq!(ask(&upstream, "Hi").await.expect("the third attempt ends").aborts, 2);
    }
}

#[tokio::test]
async fn an_abort_that_only_the_meta_information_names_is_an_abort() {
    let (engine, upstream) = start(EngineKind::Sglang).await;
    let text = r#"{"choices": [{"finish_reason": "stop", "prompt_token_ids": [1], "token_ids": [4], "meta_info": {
        "finish_reason": {"type": "abort"}, "output_token_logprobs": [[-1, 4, null]]}}]}"#;
    engine.switch(|switches| switches.failures = Some((1, 200, text.to_owned())));
    assert_eq!(ask(&upstream, "Hi").await.expect("the second attempt ends").aborts, 1);
}

#[tokio::test]
async fn a_weight_update_that_aborts_all_calls_is_not_seen_by_the_agent() {
    let (engine, upstream) = start(EngineKind::Sglang).await;
    engine.switch(|switches| switches.stall = true);
    let (http, url) = (plain_client(), engine.url().to_owned());
    let task = tokio::spawn(async move { ask(&upstream, "Hi").await });
    engine.wait(|log| log.stalled == 1).await;
    let post = |path: &str, body: &str| http.post(format!("{url}{path}")).body(body.to_owned()).send();
    post("/update_weight_version", r#"{"new_version": "12"}"#).await.expect("the engine accepts it");
    // The first attempt was aborted, and its repeat waits for the end of the pause.
    engine.wait(|log| log.calls().count() == 2 && log.stalled == 1).await;
    post("/continue_generation", "{}").await.expect("the engine accepts it");
    let answered = task.await.expect("the task ends").expect("the engine answers");
    assert_eq!((answered.aborts, answered.completion.spans[0].version), (1, 12));
}

#[tokio::test]
async fn repeats_of_aborted_calls_are_bounded() {
    let engine = FakeEngine::start(EngineKind::Sglang).await;
    engine.switch(|switches| switches.aborts = u32::MAX);
    let options = UpstreamOptions { aborts_max: 3, ..options(EngineKind::Sglang, &[&engine]) };
    let upstream = Upstream::new(options).expect("the options are usable");
    let error = ask(&upstream, "Hi").await.expect_err("it never ends");
    assert_eq!(error, UpstreamError::Aborted { times: 4 });
    assert_eq!(DialectError::from(&error).status(), 503);
    assert_eq!(engine.log().calls().count(), 4);
}

#[tokio::test]
async fn a_silent_engine_is_given_up_and_not_called_again() {
    let engine = FakeEngine::start(EngineKind::Sglang).await;
    engine.switch(|switches| switches.stall = true);
    let options =
        UpstreamOptions { idle_timeout: Duration::from_millis(500), ..options(EngineKind::Sglang, &[&engine]) };
    let upstream = Upstream::new(options).expect("the options are usable");
    let error = ask(&upstream, "Hi").await.expect_err("the engine is silent");
    assert!(matches!(error, UpstreamError::Silent { .. }), "{error}");
    engine.wait(|log| log.aborted.contains("rid-0")).await;
    assert_eq!(engine.log().calls().count(), 1);
}

#[tokio::test]
async fn an_answer_larger_than_the_bound_is_not_read() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    engine.switch(|switches| switches.padding = 1 << 20);
    let options = UpstreamOptions { answer_bytes_max: 1 << 20, ..options(EngineKind::Vllm, &[&engine]) };
    let upstream = Upstream::new(options).expect("the options are usable");
    let error = ask(&upstream, "Hi").await.expect_err("the answer is too large");
    assert_eq!(error, UpstreamError::TooLarge { bytes_max: 1 << 20 });
}

#[tokio::test]
async fn refusals_of_the_engine_become_errors_that_agents_understand() {
    let (engine, upstream) = start(EngineKind::Vllm).await;
    let cases = [
        (
            400,
            r#"{"error": {"message": "bad SECRET"}}"#,
            400,
            "invalid-request",
            "refused by the engine with status 400",
        ),
        (
            400,
            r#"{"message": "The input (9000 tokens) is longer than the model's context length of 8192: SECRET"}"#,
            400,
            "context_length_exceeded",
            "9000, 8192 tokens",
        ),
        (400, r#"{"error": {"message": "SECRET", "param": "max_tokens"}}"#, 400, "context_length_exceeded", "prompt"),
        (404, r#"{"error": {"message": "no SECRET"}}"#, 400, "upstream-refused", "status 404"),
        (401, r#"{"error": "Incorrect API key provided: SECRET"}"#, 400, "upstream-refused", "key of its upstream"),
        (403, "SECRET", 400, "upstream-refused", "status 403"),
        (308, "SECRET", 400, "upstream-refused", "status 308"),
        (408, "SECRET", 502, "upstream-failed", "status 408"),
        (409, "SECRET", 502, "upstream-failed", "status 409"),
        (413, "SECRET for nginx", 400, "invalid-request", "status 413"),
        (429, "SECRET", 503, "busy", "busy"),
        (503, "SECRET", 503, "busy", "busy"),
        (502, "SECRET", 503, "busy", "cannot be reached"),
        (504, "SECRET", 503, "busy", "cannot be reached"),
        (500, r#"{"detail": "no connection to SECRET"}"#, 502, "upstream-failed", "status 500"),
    ];
    for (status, text, expected, code, words) in cases {
        let text = text.replace("SECRET", "postgres://user:password@cache");
        engine.switch(|switches| switches.failures = Some((1, status, text.clone())));
        let error = ask(&upstream, "Hi").await.expect_err("the engine refuses");
        assert_eq!(error.to_string().contains("password"), status != 401, "the log has it: {error}");
        let error = DialectError::from(&error);
        assert_eq!((error.status(), error.code()), (expected, code), "{status} {text}");
        assert!(error.to_string().contains(words) && !error.to_string().contains("password"), "{error}");
    }
}

#[tokio::test]
async fn a_prompt_that_does_not_fit_is_the_dialects_own_error() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.switch(|switches| switches.context_tokens = 100);
        let error = DialectError::from(&ask(&upstream, "Hi").await.expect_err("it does not fit"));
        assert_eq!(error.code(), "context_length_exceeded", "{kind:?}: {error}");
    }
}

#[tokio::test]
async fn the_key_of_the_upstream_is_sent_and_appears_in_no_error() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let options =
        UpstreamOptions { api_key: Some(Secret::new("sk-upstream")), ..options(EngineKind::Vllm, &[&engine]) };
    let upstream = Upstream::new(options).expect("the options are usable");
    ask(&upstream, "Hi").await.expect("the engine answers");
    let log = engine.log();
    let sent = log.calls().next().expect("the engine was called");
    assert_eq!(sent.headers.get("authorization").map(String::as_str), Some("Bearer sk-upstream"));
    engine.switch(|switches| switches.cuts_before_head = 2);
    let error = ask(&upstream, "Hi").await.expect_err("the connection breaks");
    for text in [format!("{error} {error:?}"), format!("{upstream:?}")] {
        assert!(!text.contains("sk-upstream"), "{text}");
    }
    assert!(!error.to_string().contains("127.0.0.1"), "{error}");
}

#[tokio::test]
async fn the_calls_of_a_session_go_to_one_worker() {
    let engines = [FakeEngine::start(EngineKind::Vllm).await, FakeEngine::start(EngineKind::Vllm).await];
    let upstream = Upstream::new(options(EngineKind::Vllm, &[&engines[0], &engines[1]])).expect("usable options");
    let request = question("Hi");
    for session in 0..20 {
        let name = format!("session-{session}");
        let before: Vec<usize> = engines.iter().map(|engine| engine.log().calls().count()).collect();
        for _ in 0..3 {
            upstream.complete(&EngineCall { session: &name, ..call(&request) }).await.expect("an answer");
        }
        let after: Vec<usize> = engines.iter().map(|engine| engine.log().calls().count()).collect();
        let grown: Vec<usize> = after.iter().zip(before).map(|(after, before)| after - before).collect();
        assert!(grown == [0, 3] || grown == [3, 0], "{grown:?}");
    }
    assert!(engines.iter().all(|engine| engine.log().calls().count() > 0), "both workers have sessions");
}

#[tokio::test]
async fn a_worker_that_is_gone_is_replaced_by_the_next() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let gone = FakeEngine::start(EngineKind::Vllm).await;
    let upstream = Upstream::new(options(EngineKind::Vllm, &[&gone, &engine])).expect("usable options");
    drop(gone);
    let request = question("Hi");
    let mut reconnects = 0;
    for session in 0..20 {
        let name = format!("session-{session}");
        let call = EngineCall { session: &name, ..call(&request) };
        reconnects += upstream.complete(&call).await.expect("the other worker answers").reconnects;
    }
    assert!(reconnects > 0, "some sessions belonged to the worker that is gone");
}

#[tokio::test]
async fn calls_pass_over_all_workers_that_are_gone() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let gone = [FakeEngine::start(EngineKind::Vllm).await, FakeEngine::start(EngineKind::Vllm).await];
    let options = options(EngineKind::Vllm, &[&gone[0], &gone[1], &engine]);
    let upstream = Upstream::new(options).expect("usable options");
    drop(gone);
    let request = question("Hi");
    for session in 0..20 {
        let name = format!("session-{session}");
        upstream.complete(&EngineCall { session: &name, ..call(&request) }).await.expect("the last worker answers");
    }
}

/// Accepts connections of a port, and does this with each.
async fn accept<F: Future<Output = ()> + Send + 'static>(
    each: impl Fn(tokio::net::TcpStream) -> F + Send + 'static,
) -> (String, tokio::task::JoinHandle<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("a listener has an address").to_string();
    let accepting = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            each(stream).await;
        }
    });
    (address, accepting)
}

#[tokio::test]
async fn an_engine_that_is_not_there_is_a_503_with_the_time_to_repeat() {
    // Nobody listens, connections are closed before an answer, no such name, and no TLS where the URL says so.
    let (closed, accepting) = accept(|stream| async { drop(stream) }).await;
    accepting.abort();
    accepting.await.expect_err("it was aborted");
    let (resets, _resetting) = accept(|stream| async { drop(stream) }).await;
    let (plain, _answering) = accept(|mut stream| async move {
        use tokio::io::AsyncWriteExt as _;
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
    })
    .await;
    let urls = [
        format!("http://{closed}"),
        format!("http://{resets}"),
        "http://engine.invalid:1".to_owned(),
        format!("https://{plain}"),
    ];
    for url in urls {
        let options = UpstreamOptions::new("test", EngineKind::Vllm, [&url]).expect("the URL is usable");
        let upstream = Upstream::new(options).expect("the options are usable");
        let error = ask(&upstream, "Hi").await.expect_err("there is no engine");
        assert!(matches!(error, UpstreamError::Unreachable { .. }), "{url}: {error}");
        let error = DialectError::from(&error);
        assert_eq!((error.status(), error.code(), error.retry_after_s()), (503, "busy", Some(5)), "{url}: {error}");
    }
}

#[tokio::test]
async fn an_engine_that_accepts_no_connection_in_time_is_unreachable_and_not_silent() {
    // The backlog of this listener is full, so that the system leaves further connections unanswered.
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port is free");
    let listener = socket.listen(1).expect("it listens");
    let address = listener.local_addr().expect("a listener has an address");
    let mut open = Vec::new();
    let open_one = || tokio::time::timeout(Duration::from_millis(500), tokio::net::TcpStream::connect(address));
    while let Ok(stream) = open_one().await {
        open.push(stream.expect("a connection"));
    }
    let options = UpstreamOptions::new("test", EngineKind::Vllm, [format!("http://{address}")]).expect("a usable URL");
    let options = UpstreamOptions { connect_timeout: Duration::from_millis(100), ..options };
    let error = ask(&Upstream::new(options).expect("usable options"), "Hi").await.expect_err("nobody accepts");
    assert!(matches!(error, UpstreamError::Unreachable { .. }), "{error}");
    assert_eq!(DialectError::from(&error).status(), 503);
}

#[test]
fn only_the_sessions_of_a_removed_worker_move() {
    let urls = ["http://a", "http://b", "http://c", "http://d"];
    let mut counts = [0; 4];
    for session in 0..1000 {
        let name = format!("session-{session}");
        let before = order(&name, &urls)[0];
        let after = order(&name, &urls[..3])[0];
        counts[before] += 1;
        assert!(before == 3 || before == after);
    }
    assert!(counts.iter().all(|&count| count > 150), "the sessions are spread: {counts:?}");
}

#[test]
fn urls_that_cannot_be_used_are_refused() {
    for url in ["", "ftp://x", "http://user:secret@host", "http://x?y=1", "10.0.0.5:30000"] {
        let error = UpstreamOptions::new("qwen", EngineKind::Sglang, [url]).expect_err("the URL is not usable");
        assert!(error.to_string().contains("qwen") && !error.to_string().contains("secret"), "{error}");
    }
    UpstreamOptions::new("qwen", EngineKind::Sglang, [""; 0]).expect_err("one URL is needed");
}

#[tokio::test]
async fn an_address_may_end_with_the_version_of_the_api() {
    let engine = FakeEngine::start(EngineKind::Openai).await;
    let url = format!("{}/v1/", engine.url());
    let options = UpstreamOptions::new("test", EngineKind::Openai, [url]).expect("the URL is usable");
    let upstream = Upstream::new(options).expect("the options are usable");
    ask(&upstream, "Hi").await.expect("the engine answers");
}
