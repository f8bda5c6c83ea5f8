//! Calls whose client left before the answer, and their repeats.

use forebay_fake_engine::Log;
use reqwest::header::{HeaderName, HeaderValue};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{Agent, DIALECTS, Dialect, answers, engines::start, metric, success};
use crate::support::TestApp;

/// Sends a request, closes the connection as soon as the engine was asked, and waits until the service has noticed that.
async fn give_up(app: &TestApp, request: reqwest::RequestBuilder, asked: impl Future<Output = ()>) {
    let request = request.build().expect("a request");
    let body = request.body().and_then(reqwest::Body::as_bytes).expect("a body");
    let header = |(name, value): (&HeaderName, &HeaderValue)| {
        format!("{name}: {}\r\n", value.to_str().expect("a header is text"))
    };
    let headers: String = request.headers().iter().map(header).collect();
    let (path, length) = (request.url().path(), body.len());
    let head = format!("POST {path} HTTP/1.1\r\nhost: forebay\r\n{headers}content-length: {length}\r\n\r\n");
    let mut connection = TcpStream::connect(&app.agents).await.expect("the listener accepts");
    connection.write_all(&[head.as_bytes(), body].concat()).await.expect("the service reads");
    asked.await;
    connection.shutdown().await.expect("the connection was open");
    let rest = connection.read_to_end(&mut Vec::new()).await;
    assert_eq!(rest.expect("the service closes the connection"), 0, "nothing was answered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeat_gets_the_answer_to_the_call_whose_client_gave_up() {
    let app = start(600).await;
    let models = json!({"m": {"policy": "default"}, "frozen": {"policy": null}});
    let agent = Agent::open(&app, json!({"models": models})).await;
    for (dialect, model) in DIALECTS.map(|dialect| (dialect, "m")).into_iter().chain([(Dialect::Chat, "frozen")]) {
        let turns = agent.turns(&app).await.len();
        app.engine.switch(|switches| switches.stall = true);
        let question = format!("Think for minutes, {model} {dialect:?}.");
        let mut body = dialect.body(std::slice::from_ref(&question), false);
        body["model"] = model.into();
        let request = |count: &str| agent.request(dialect, &body).header("x-stainless-retry-count", count);
        let is_asked = |log: &Log| log.calls().filter(|call| call.text.contains(&question)).count() == 1;
        give_up(&app, request("0"), app.engine.wait(is_asked)).await;
        let repeat = tokio::spawn(request("1").send());
        app.engine.switch(|switches| switches.stall = false);
        let answer = success(repeat.await.expect("the task goes on").expect("the listener answers")).await;
        assert!(!dialect.text(&answer).is_empty());
        assert!(is_asked(&app.engine.log()), "the engine was asked once");
        assert_eq!(agent.turns(&app).await.len(), turns + usize::from(model == "m"));
    }
    assert_eq!(app.engine.log().abandoned, 0);
    // A recorded answer comes from the store, which gives it out once.
    let replayed = metric(&app, "forebay_agent_calls_total{dialect=\"chat\",outcome=\"replayed\"}").await;
    assert_eq!(replayed, Some(2.0));
    let ended = agent.finish(&app, 1.0).await;
    let dropped = ended["assembly"]["dropped"].as_object().expect("counts");
    assert!(dropped.values().all(|count| *count == 0), "{dropped:?}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeat_does_not_get_the_answer_to_another_call() {
    let app = start(600).await;
    // Where nothing is recorded, the store cannot tell which answer it is.
    let agent = Agent::open(&app, json!({"models": {"m": {"policy": null}, "other": {"policy": "default"}}})).await;
    app.engine.switch(|switches| switches.stall = true);
    let request = |question: &str, count: &str| {
        let body = Dialect::Chat.body(&[question.to_owned()], false);
        agent.request(Dialect::Chat, &body).header("x-stainless-retry-count", count)
    };
    for (question, answer) in [("First?", "One."), ("Second?", "Two.")] {
        app.engine.script(question, answers(&[answer]));
        let is_asked = |log: &Log| log.calls().any(|call| call.text.contains(question));
        give_up(&app, request(question, "0"), app.engine.wait(is_asked)).await;
    }
    let repeat = tokio::spawn(request("Second?", "1").send());
    app.engine.switch(|switches| switches.stall = false);
    let answer = success(repeat.await.expect("the task goes on").expect("the listener answers")).await;
    assert_eq!(Dialect::Chat.text(&answer), "Two.");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_call_of_a_client_that_does_not_count_its_repeats_ends_with_the_connection() {
    let app = start(600).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.switch(|switches| switches.stall = true);
    let body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    let request = agent.request(Dialect::Chat, &body);
    let asked = |log: &Log| log.calls().filter(|call| call.text.contains("Hello.")).count();
    give_up(&app, request, app.engine.wait(|log| asked(log) == 1)).await;
    let again = tokio::spawn(agent.request(Dialect::Chat, &body).header("x-stainless-retry-count", "1").send());
    // The engine is asked again.
    app.engine.wait(|log| asked(log) == 2).await;
    app.engine.switch(|switches| switches.stall = false);
    success(again.await.expect("the task goes on").expect("the listener answers")).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_nobody_repeats_ends() {
    let app = start(600).await;
    let (left, ended) = (Agent::open(&app, json!({})).await, Agent::open(&app, json!({})).await);
    app.engine.switch(|switches| switches.stall = true);
    let body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    for agent in [&left, &ended] {
        let stalled = app.engine.log().stalled;
        let request = agent.request(Dialect::Chat, &body).header("x-stainless-retry-count", "0");
        let call = tokio::spawn(request.send());
        app.engine.wait(|log| log.stalled > stalled).await;
        call.abort();
    }
    // The end of a session does not wait for repeats.
    app.post(&format!("/sessions/{}/abort", ended.id()), json!({"reason": "enough"})).await.expect(200);
    app.engine.wait(|log| log.abandoned == 1).await;
    app.engine.wait(|log| log.abandoned == 2).await;
    assert!(left.turns(&app).await.is_empty());
    app.finish().await;
}
