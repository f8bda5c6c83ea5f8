//! Engines that are slow, busy, aborting, gone or wrong. An agent sees as little of it as possible, and nothing is
//! recorded that could not be trained.

use std::time::Duration;

use forebay_fake_engine::{IdFault, Log, LogprobFault, Switches, VersionReport};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, net::TcpListener};

use super::{Agent, DIALECTS, Dialect, PATIENCE, error, message, metric, success, trained};
use crate::support::{Backend, TestApp, eventually, process::Service, text};

/// A service whose events show signs of life often, and whose calls are held for a short or a long time.
pub(super) async fn start(hold_s: u32) -> TestApp {
    let config = format!("[sessions]\nlisten = \"127.0.0.1:0\"\nkeep_alive_s = 1\nhold_s = {hold_s}\n");
    TestApp::start_with(Backend::Sqlite, &config).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_show_signs_of_life_while_the_engine_works() {
    let app = start(60).await;
    for dialect in DIALECTS {
        let agent = Agent::open(&app, json!({})).await;
        app.engine.switch(|switches| switches.stall = true);
        let mut response = agent.call(dialect, &dialect.body(&["Think long.".to_owned()], true)).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        let mut seen = String::new();
        for _ in 0..2 {
            let chunk = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("a sign of life comes");
            let chunk = chunk.expect("the connection holds").expect("the stream goes on");
            let sign = std::str::from_utf8(&chunk).expect("events are text");
            // Clients that end silent streams count events, and neither comments nor pings.
            assert!(sign.contains("data: {") && !sign.contains("ping"), "{sign}");
            seen.push_str(sign);
        }
        assert!(agent.turns(&app).await.is_empty(), "nothing is recorded yet");
        app.engine.switch(|switches| switches.stall = false);
        seen.push_str(&response.text().await.expect("the answer ends well"));
        assert!(!dialect.text_of_events(&seen).is_empty(), "{seen}");
        assert_eq!(agent.turns(&app).await.len(), 1);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aborted_calls_are_repeated_and_agents_do_not_see_it() {
    let app = start(60).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| switches.aborts = 2);
    let answer = agent.ask("An update comes.").await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(metric(&app, "forebay_upstream_aborts_total{upstream=\"fake\"}").await, Some(2.0));
    agent.finish(&app, 1.0).await;
    let (rows, _) = trained(&app).await;
    assert_eq!(rows.len(), 1);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_that_change_in_the_middle_of_an_answer_are_two_spans() {
    let app = start(60).await;
    app.publish(1).await.expect(200);
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| {
        "0".clone_into(&mut switches.weight_version);
        switches.version_change = Some((2, "1".to_owned()));
    });
    agent.ask("Versions.").await;
    agent.finish(&app, 1.0).await;
    let (rows, count) = trained(&app).await;
    assert_eq!(rows[0]["versions"], json!([[0, 0, 2], [1, 2, count - 2]]));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_the_engine_does_not_say_is_marked_as_assumed() {
    let app = start(60).await;
    for (report, is_assumed) in
        [(VersionReport::Spans, false), (VersionReport::Last, true), (VersionReport::Nothing, true)]
    {
        app.engine.switch(|switches| switches.version_report = report);
        let id = format!("{report:?}");
        let agent = Agent::open(&app, json!({"rollout_id": id})).await;
        agent.ask("Which version?").await;
        assert_eq!(agent.turns(&app).await[0]["version_assumed"], is_assumed);
        agent.finish(&app, 1.0).await;
        let story = app.get(&format!("/trajectories?rollout_id={id}")).await.expect(200);
        assert_eq!(story["policy_version_assumed"], is_assumed, "{id}: {story}");
    }
    assert_eq!(metric(&app, "forebay_ledger_assumed_versions{policy=\"default\"}").await, Some(2.0));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_an_update_aborts_has_the_version_behind_it() {
    let app = start(60).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| {
        switches.version_report = VersionReport::Nothing;
        (switches.stall, switches.aborts) = (true, 1);
    });
    let publish = async {
        app.engine.wait(|log| log.stalled == 1).await;
        app.publish(1).await.expect(200);
        app.engine.switch(|switches| switches.stall = false);
    };
    tokio::join!(agent.ask("An update comes."), publish);
    agent.finish(&app, 1.0).await;
    let (rows, count) = trained(&app).await;
    assert_eq!(rows[0]["versions"], json!([[1, 0, count]]));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waits_for_an_update_has_the_version_behind_it() {
    let app = start(600).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| {
        switches.version_report = VersionReport::Nothing;
        switches.failures = Some((1000, 503, r#"{"message": "paused"}"#.to_owned()));
    });
    let publish = async {
        let asked = |log: &Log| log.calls().filter(|call| call.text.contains("An update comes.")).count();
        app.engine.wait(|log| asked(log) == 1).await;
        app.publish(1).await.expect(200);
        // The version of the attempt that follows is read behind the update.
        let before = asked(&app.engine.log());
        app.engine.wait(|log| asked(log) > before).await;
        app.engine.switch(|switches| switches.failures = None);
    };
    tokio::join!(agent.ask("An update comes."), publish);
    agent.finish(&app, 1.0).await;
    let (rows, count) = trained(&app).await;
    assert_eq!(rows[0]["versions"], json!([[1, 0, count]]));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_waits_for_an_engine_that_is_busy_or_gone() {
    let app = start(600).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| {
        switches.failures = Some((2, 503, r#"{"message": "paused"}"#.to_owned()));
    });
    success(agent.call(Dialect::Chat, &Dialect::Chat.body(&["Patience.".to_owned()], false)).await).await;
    assert_eq!(metric(&app, "forebay_upstream_failures_total{failure=\"busy\",upstream=\"fake\"}").await, Some(2.0));
    app.engine.switch(|switches| switches.cuts_in_body = 1);
    agent.ask("The connection breaks.").await;
    app.engine.switch(|switches| switches.failures = Some((1, 502, "Bad Gateway".to_owned())));
    agent.ask("The engine behind a proxy is gone.").await;
    assert_eq!(agent.turns(&app).await.len(), 3);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waited_for_too_long_may_be_repeated() {
    let app = start(1).await;
    let agent = Agent::open(&app, json!({})).await;
    // The status of each answer; without one, each connection is closed before it.
    let ways = [
        (Some(503), "the engine is busy"),
        (Some(429), "the engine is busy"),
        (Some(502), "the engine cannot be reached"),
        (Some(504), "the engine cannot be reached"),
        (None, "the engine cannot be reached"),
    ];
    for (status, words) in ways {
        app.engine.switch(|switches| {
            switches.failures = status.map(|status| (1000, status, String::new()));
            switches.cuts_before_head = if status.is_none() { 1000 } else { 0 };
        });
        for dialect in DIALECTS {
            let response = agent.call(dialect, &dialect.body(&["Hello.".to_owned()], false)).await;
            assert!(response.headers().contains_key("retry-after"), "{words}");
            let (status, retry, body) = error(response).await;
            assert_eq!((status.as_u16(), retry), (503, Some(true)), "{body}");
            assert!(message(&body).contains(words), "{body}");
        }
    }
    assert!(agent.turns(&app).await.is_empty());
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_says_how_long_it_waits_is_answered_before_unless_the_engine_works() {
    let app = start(600).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| switches.failures = Some((1000, 503, String::new())));
    let body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    for (header, value) in [("x-stainless-read-timeout", "2.0"), ("x-stainless-timeout", "2")] {
        let request = agent.request(Dialect::Chat, &body).header(header, value).timeout(PATIENCE);
        let (status, retry, _) = error(request.send().await.expect("the listener answers")).await;
        assert_eq!((status.as_u16(), retry), (503, Some(true)));
    }
    app.engine.switch(|switches| (switches.failures, switches.stall) = (None, true));
    let request = agent.request(Dialect::Chat, &body).header("x-stainless-read-timeout", "2");
    let error = request.timeout(Duration::from_secs(2)).send().await.expect_err("the engine works on it");
    assert!(error.is_timeout(), "{error}");
    app.engine.wait(|log| log.abandoned == 1).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_cannot_be_recorded_is_not() {
    let app = start(60).await;
    let agent = Agent::open(&app, json!({})).await;
    let faults: [fn(&mut Switches); 5] = [
        |switches| switches.id_fault = IdFault::Router,
        |switches| switches.id_fault = IdFault::NoSampled,
        |switches| switches.logprob_fault = LogprobFault::Sentinel,
        |switches| switches.logprob_fault = LogprobFault::Short,
        |switches| switches.logprob_fault = LogprobFault::Positive,
    ];
    for fault in faults {
        app.engine.switch(fault);
        for dialect in DIALECTS {
            for stream in [false, true] {
                let response = agent.call(dialect, &dialect.body(&["Hello.".to_owned()], stream)).await;
                let (status, retry, body) = error(response).await;
                assert_eq!((status.as_u16(), retry), (502, Some(true)), "{body}");
            }
        }
        app.engine.switch(|switches| {
            (switches.id_fault, switches.logprob_fault) = (IdFault::None, LogprobFault::None);
        });
    }
    assert!(agent.turns(&app).await.is_empty());
    let untrusted = "forebay_agent_calls_total{dialect=\"chat\",outcome=\"upstream-untrusted\"}";
    assert_eq!(metric(&app, untrusted).await, Some(10.0));
    app.finish().await;
}

/// An engine that sends the beginning of an answer of 900,000 bytes, and no more.
async fn unfinished() -> (String, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
    let serving = tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (mut connection, _) = listener.accept().await.expect("the listener accepts");
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n\r\n{";
            connection.write_all(head.as_bytes()).await.expect("the client reads");
            open.push(connection);
        }
    });
    (url, serving)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_engines_are_bounded_together() {
    let mut app = start(600).await;
    let (url, serving) = unfinished().await;
    let config = format!(
        "[sessions]\nlisten = \"127.0.0.1:0\"\ninflight_answer_bytes = 1_048_576\n\
         [[upstream]]\nname = \"slow\"\nkind = \"openai\"\nurls = [\"{url}\"]\nmodels = [\"slow\"]\n\
         [[upstream]]\nname = \"trained\"\nkind = \"sglang\"\nurls = [\"{}\"]\n",
        app.engine.url()
    );
    app.reconfigure(&config).await;
    let models = json!({"slow": {"policy": null}, "m": {"policy": "default"}});
    let agent = Agent::open(&app, json!({"models": models})).await;
    let mut slow = Dialect::Chat.body(&["Slow.".to_owned()], false);
    slow["model"] = "slow".into();
    let slow = tokio::spawn(agent.request(Dialect::Chat, &slow).send());
    app.engine.switch(|switches| switches.padding = 200_000);
    for dialect in DIALECTS {
        let body = dialect.body(&["Hello.".to_owned()], false);
        let request = || agent.request(dialect, &body).header("x-stainless-read-timeout", "4");
        // The other answer has most of the budget, as soon as its engine has begun to send it.
        let refused = eventually_some("a refusal", || async {
            let response = request().send().await.expect("the listener answers");
            (response.status() != 200).then_some(response)
        });
        let (status, retry, body) = error(refused.await).await;
        assert_eq!((status.as_u16(), retry), (503, Some(true)), "{body}");
    }
    let recorded = agent.turns(&app).await.len();
    slow.abort();
    agent.ask("There is room again.").await;
    assert_eq!(agent.turns(&app).await.len(), recorded + 1);
    // An answer that is larger than the budget is refused.
    app.engine.switch(|switches| switches.padding = 1_100_000);
    let body = Dialect::Chat.body(&["Too large.".to_owned()], false);
    let (status, _, body) = error(agent.call(Dialect::Chat, &body).await).await;
    assert_eq!(status.as_u16(), 502, "{body}");
    serving.abort();
    app.finish().await;
}

/// Tries something until it returns a value.
async fn eventually_some<T, F: Future<Output = Option<T>>>(what: &str, mut attempt: impl FnMut() -> F) -> T {
    let trying = async {
        loop {
            if let Some(found) = attempt().await {
                return found;
            }
        }
    };
    tokio::time::timeout(PATIENCE, trying).await.unwrap_or_else(|_| panic!("{what} never came"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_cancels_its_call() {
    let app = start(60).await;
    for stream in [false, true] {
        let agent = Agent::open(&app, json!({})).await;
        app.engine.switch(|switches| switches.stall = true);
        let aborted = app.engine.log().aborted.len();
        let body = Dialect::Chat.body(&[format!("I will not wait, {stream}.")], stream);
        let call = tokio::spawn(agent.request(Dialect::Chat, &body).send());
        let is_asked = |text: &str| text.contains(&format!("I will not wait, {stream}."));
        app.engine.wait(|log| log.calls().any(|call| is_asked(&call.text))).await;
        if stream {
            // It leaves after the first sign of life.
            let mut response = call.await.expect("the task goes on").expect("the listener answers");
            response.chunk().await.expect("the connection holds");
        } else {
            call.abort();
        }
        app.engine.wait(|log| log.aborted.len() > aborted).await;
        app.engine.switch(|switches| switches.stall = false);
        eventually("the end of the call", || async {
            metric(&app, "forebay_agent_calls_in_flight").await == Some(0.0)
        })
        .await;
        assert!(agent.turns(&app).await.is_empty());
        let abandoned = metric(&app, "forebay_agent_calls_total{dialect=\"chat\",outcome=\"abandoned\"}").await;
        assert_eq!(abandoned, Some(if stream { 2.0 } else { 1.0 }));
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_was_restarted_with_other_flags_is_not_recorded() {
    let mut app = start(60).await;
    let request = json!({"sampling": {"temperature": 0.5}});
    let mut agent = Agent::open(&app, request.clone()).await;
    agent.ask("Scaled.").await;
    app.engine.switch(|switches| switches.raw_logprobs = true);
    // The service probes its engines again.
    app.restart().await;
    app.post("/sessions", json!({})).await.expect(201);
    agent.session["base_urls"]["openai"] = format!("http://{}/sessions/{}/v1", app.agents, agent.id()).into();
    let (status, _, body) =
        error(agent.call(Dialect::Chat, &Dialect::Chat.body(&["Raw.".to_owned()], false)).await).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (502, &json!("upstream-untrusted")));
    assert_eq!(agent.turns(&app).await.len(), 1);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_with_little_room_still_leaves_the_bound_to_the_engine() {
    let config = "[limits]\ntrajectory_tokens = 20_000\n[sessions]\nlisten = \"127.0.0.1:0\"\n";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    app.engine.switch(|switches| switches.context_tokens = 2_000);
    let agent = Agent::open(&app, json!({})).await;
    agent.ask("Hello.").await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bound_of_tokens_that_the_context_has_no_room_for_is_left_to_the_engine() {
    let app = start(60).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| switches.context_tokens = 2_000);
    let mut body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    body["max_tokens"] = 32_000.into();
    success(agent.call(Dialect::Chat, &body).await).await;
    // A prompt that does not fit at all is the dialect's own error.
    app.engine.switch(|switches| switches.context_tokens = 10);
    for dialect in DIALECTS {
        let response =
            agent.call(dialect, &dialect.body(&["A prompt that is too long for this.".to_owned()], false)).await;
        let (status, retry, body) = error(response).await;
        assert_eq!((status.as_u16(), retry), (400, Some(false)), "{body}");
        let expected = if dialect == Dialect::Messages { "prompt is too long" } else { "maximum context length" };
        assert!(message(&body).contains(expected), "{body}");
    }
    app.finish().await;
}

/// Answers of engines to a bound of tokens that is larger than their whole context.
const BOUND_TOO_LARGE: [&str; 4] = [
    r#"{"object": "error", "code": 400,
        "message": "max_completion_tokens is too large: 9.This model supports at most 8 completion tokens."}"#,
    r#"{"error": {"message": "max_tokens=9cannot be greater than max_model_len=max_total_tokens=8."}}"#,
    r#"{"error": {"message": "max_tokens=9 cannot be greater than max_model_len=8. Please request fewer output tokens."}}"#,
    r#"{"error": {"message": "too much was asked for", "param": "max_tokens"}}"#,
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bound_of_tokens_above_the_whole_context_is_left_to_the_engine() {
    let app = start(60).await;
    let agent = Agent::open(&app, json!({})).await;
    let mut body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    body["max_tokens"] = 1_000_000.into();
    for words in BOUND_TOO_LARGE {
        app.engine.switch(|switches| switches.failures = Some((1, 400, words.to_owned())));
        app.engine.switch(|switches| switches.context_tokens = 2_000_000);
        success(agent.call(Dialect::Chat, &body).await).await;
        let sent = app.engine.log().calls().last().expect("the engine was called").json();
        assert_eq!(sent.get("max_tokens"), None, "{words}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_above_what_sglang_allows_is_the_dialects_own_error() {
    let app = start(60).await;
    let agent = Agent::open(&app, json!({})).await;
    let words = r#"{"message": "Input length (9 tokens) exceeds the maximum allowed length (8 tokens)."}"#;
    app.engine.switch(|switches| switches.failures = Some((2, 400, words.to_owned())));
    let response = agent.call(Dialect::Chat, &Dialect::Chat.body(&["Hello.".to_owned()], false)).await;
    let (status, retry, body) = error(response).await;
    assert_eq!((status.as_u16(), retry, &body["error"]["code"]), (400, Some(false), &json!("context_length_exceeded")));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_fails_is_asked_twice_more_and_one_that_refuses_is_not() {
    let app = start(60).await;
    let agent = Agent::open(&app, json!({})).await;
    let calls = || app.engine.log().calls().filter(|call| call.text.contains("Hello.")).count();
    let body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    for (failures, status, expected, asked) in
        [(2, 500, (200, None), 3), (9, 500, (502, Some(true)), 3), (9, 404, (400, Some(false)), 1)]
    {
        let before = calls();
        app.engine.switch(|switches| switches.failures = Some((failures, status, "no".to_owned())));
        let response = agent.call(Dialect::Chat, &body).await;
        let retry = response.headers().get("x-should-retry").map(|value| value == "true");
        assert_eq!((response.status().as_u16(), retry), expected);
        assert_eq!(calls() - before, asked, "after {failures} times {status}");
    }
    app.engine.switch(|switches| switches.failures = None);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_is_opened_for_an_engine_whose_answers_cannot_be_recorded() {
    let mut app = start(60).await;
    app.engine.switch(|switches| switches.id_fault = IdFault::Router);
    app.restart().await;
    let problem = app.post("/sessions", json!({})).await.refused(503, "upstream-not-ready");
    let detail = text(&problem["detail"]);
    assert!(detail.contains("prompt_token_ids") && detail.contains("urls"), "{detail}");
    app.engine.switch(|switches| {
        switches.id_fault = IdFault::None;
        switches.raw_logprobs = true;
    });
    app.restart().await;
    app.post("/sessions", json!({})).await.expect(201);
    let problem = app.post("/sessions", json!({"sampling": {"temperature": 0.5}})).await;
    let problem = problem.refused(503, "upstream-not-ready");
    assert!(text(&problem["detail"]).contains("before the temperature"), "{problem}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_is_probed_only_when_it_is_used() {
    let mut app = start(60).await;
    app.engine.switch(|switches| switches.adapters = vec!["math-lora".to_owned()]);
    let config = format!(
        "[sessions]\nlisten = \"127.0.0.1:0\"\n\
         [[upstream]]\nname = \"math-lora\"\nkind = \"sglang\"\nurls = [\"{0}\"]\npolicies = [\"math\"]\n\
         [[upstream]]\nname = \"fake\"\nkind = \"sglang\"\nurls = [\"{0}\"]\n",
        app.engine.url()
    );
    app.reconfigure(&config).await;
    let of_adapter = || app.engine.log().calls().filter(|call| call.json()["model"] == "math-lora").count();
    Agent::open(&app, json!({})).await.ask("Hello.").await;
    assert_eq!(of_adapter(), 0);
    let ready = "forebay_upstream_ready{upstream=\"math-lora\"}";
    assert_eq!(metric(&app, ready).await, None);
    app.rules("math", json!({})).await;
    let agent = Agent::open(&app, json!({"policy": "math"})).await;
    assert!(of_adapter() > 1, "the session waited for the probe");
    agent.ask("Hello.").await;
    eventually("the metric", || async { metric(&app, ready).await == Some(1.0) }).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_not_ready_is_logged_once_and_not_as_an_error_of_each_session() {
    let config = "[sessions]\nlisten = \"127.0.0.1:0\"\n\
                  [[upstream]]\nname = \"gone\"\nkind = \"vllm\"\nurls = [\"http://127.0.0.1:9\"]\n";
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("forebay.toml");
    std::fs::write(&path, config).expect("the folder can be written");
    let arguments = ["--log", "json", "--config", path.to_str().expect("the path is text")];
    let service = Service::start_with("sqlite::memory:", &arguments, &[]).await;
    for _ in 0..3 {
        let request = crate::support::http().post(format!("{}/sessions", service.url)).json(&json!({}));
        let response = request.send().await.expect("the service answers");
        assert_eq!(response.status(), 503);
        assert!(response.headers().contains_key("retry-after"));
    }
    let log = service.terminate().await;
    let events: Vec<Value> = log.iter().map(|line| serde_json::from_str(line).expect("an event")).collect();
    let of_level = |level: &str| events.iter().filter(|event| event["level"] == level).collect::<Vec<_>>();
    assert_eq!(of_level("ERROR"), Vec::<&Value>::new());
    let told = |event: &&&Value| text(&event["message"]).contains("no session can use it");
    assert_eq!(of_level("WARN").iter().filter(told).count(), 1, "{log:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_answers_calls_that_wait_for_an_engine() {
    let mut app = start(600).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| switches.failures = Some((1000, 503, r#"{"message": "paused"}"#.to_owned())));
    let body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    let call = tokio::spawn(agent.request(Dialect::Chat, &body).send());
    app.engine.wait(|log| log.calls().any(|call| call.text.contains("Hello."))).await;
    tokio::time::timeout(Duration::from_secs(20), app.stop()).await.expect("the stop does not wait for the engine");
    let response = call.await.expect("the task goes on").expect("the listener answers");
    assert_eq!(response.status(), 503);
}
