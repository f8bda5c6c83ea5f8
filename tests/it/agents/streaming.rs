//! Answers that agents receive while the engine samples them, in the mode exact with vLLM.

use forebay_gateway::engine::{Answer, EngineKind, FakeEngine};
use reqwest::Response;
use serde_json::{Value, json};

use super::{Agent, DIALECTS, PATIENCE, trained};
use crate::support::Backend;

const ENDS: [&str; 3] = ["[DONE]", "message_stop", "response.completed"];

/// All that was said in the events so far.
fn said(seen: &str) -> String {
    let events = seen.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    let places = ["/choices/0/delta/reasoning", "/choices/0/delta/content", "/delta/thinking", "/delta/text", "/delta"];
    let texts = |event: Value| -> String {
        places.iter().filter_map(|place| Some(event.pointer(place)?.as_str()?.to_owned())).collect()
    };
    events.map(texts).collect()
}

/// Reads events until this was said.
async fn hear(response: &mut Response, words: &str) -> String {
    let mut seen = String::new();
    while !said(&seen).contains(words) {
        let chunk = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("a piece comes");
        let chunk = chunk.expect("the connection holds").expect("the stream goes on");
        seen.push_str(std::str::from_utf8(&chunk).expect("events are text"));
    }
    seen
}

/// The engine is held in the middle of its answer, and then an update of the weights aborts it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_receives_an_answer_while_the_engine_samples_it() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let (app, _folder) = super::exact::start(Backend::Sqlite, &engine, "vllm").await;
    let answer = "I look for the größte thing 🙂, and then for another one, which is in there.";
    for dialect in DIALECTS {
        let question = format!("Look, {}!", dialect.name());
        engine.script(&question, [Answer::text(answer).thinking("First the other.").in_bytes(), Answer::text("Done.")]);
        let agent = Agent::open(&app, json!({})).await;
        engine.switch(|switches| switches.hold_behind = Some(70));
        let mut response = agent.call(dialect, &dialect.body(std::slice::from_ref(&question), true)).await;
        assert_eq!(response.status(), 200);
        let mut seen = hear(&mut response, "I look").await;
        assert!(said(&seen).contains("the other"), "the thought comes first: {seen}");
        assert!(agent.turns(&app).await.is_empty(), "nothing is recorded yet");
        assert!(!said(&seen).contains("in there") && !ENDS.iter().any(|end| seen.contains(end)), "{seen}");
        let update = reqwest::Client::builder().no_proxy().build().expect("a client");
        let body = json!({"new_version": "1"}).to_string();
        let updated = update.post(format!("{}/update_weight_version", engine.url())).body(body).send().await;
        assert_eq!(updated.expect("the engine answers").status(), 200);
        engine.switch(|switches| switches.hold_behind = None);
        seen.push_str(&response.text().await.expect("the answer ends well"));
        assert!(said(&seen).ends_with(answer), "{seen}");
        assert!(ENDS.iter().any(|end| seen.trim_end().lines().any(|line| line.contains(end))), "{seen}");
        assert_eq!(agent.turns(&app).await.len(), 1);

        // What the agent sends back is what was recorded.
        let turns = [question, answer.to_owned(), "And now?".to_owned()];
        let again = agent.call(dialect, &dialect.body(&turns, true)).await.text().await.expect("an answer");
        assert_eq!(dialect.text_of_events(&again), "Done.");
        let ended = agent.finish(&app, 1.0).await;
        assert_eq!((&ended["assembly"]["calls"], &ended["assembly"]["segments"]), (&json!(2), &json!(1)), "{ended}");
        trained(&app).await;
    }
    app.finish().await;
}

/// An agent that has a part of an answer is told that there is no more of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_fails_in_the_middle_ends_with_an_error() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let (app, _folder) = super::exact::start(Backend::Sqlite, &engine, "vllm").await;
    for dialect in DIALECTS {
        let question = format!("Look, {}!", dialect.name());
        engine.script(&question, [Answer::text("I look for the thing, and then for another one.").in_bytes()]);
        let agent = Agent::open(&app, json!({})).await;
        engine.switch(|switches| switches.hold_behind = Some(30));
        let mut response = agent.call(dialect, &dialect.body(std::slice::from_ref(&question), true)).await;
        let mut seen = hear(&mut response, "I look").await;
        let end = json!({"reason": "enough"});
        app.post(&format!("/sessions/{}/abort", agent.id()), end).await.expect(200);
        engine.switch(|switches| switches.hold_behind = None);
        seen.push_str(&response.text().await.expect("the events end well"));
        assert!(!ENDS.iter().any(|end| seen.contains(end)), "{seen}");
        assert!(seen.contains("error"), "{seen}");
    }
    app.finish().await;
}
