//! Answers that agents receive while the engine samples them, in the mode exact with vLLM.

use forebay_fake_engine::{Answer, EngineKind, FakeEngine};
use reqwest::Response;
use serde_json::{Value, json};

use super::{Agent, DIALECTS, Dialect, PATIENCE, trained};
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
    read_until(response, |seen| said(seen).contains(words)).await
}

async fn read_until(response: &mut Response, holds: impl Fn(&str) -> bool) -> String {
    let mut seen = String::new();
    while !holds(&seen) {
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

/// The ids and the arguments of the calls in events.
fn calls(dialect: Dialect, seen: &str) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for data in seen.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let event: Value = serde_json::from_str(data).unwrap_or_default();
        let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match dialect {
            Dialect::Chat => {
                for call in event["choices"][0]["delta"]["tool_calls"].as_array().into_iter().flatten() {
                    let index = call["index"].as_u64().expect("a number") as usize;
                    calls.resize(calls.len().max(index + 1), Default::default());
                    calls[index].0 += &string(&call["id"]);
                    calls[index].1 += &string(&call["function"]["arguments"]);
                }
            }
            Dialect::Messages if event["content_block"]["type"] == "tool_use" => {
                calls.push((string(&event["content_block"]["id"]), String::new()));
            }
            Dialect::Messages => {
                let more = string(&event["delta"]["partial_json"]);
                calls.iter_mut().last().into_iter().for_each(|(_, arguments)| *arguments += &more);
            }
            Dialect::Responses if event["type"] == "response.output_item.done" => {
                let item = &event["item"];
                calls.extend(
                    (item["type"] == "function_call").then(|| (string(&item["call_id"]), string(&item["arguments"]))),
                );
            }
            Dialect::Responses => {}
        }
    }
    calls
}

/// A call with tools behind a question, and behind the answer to it if there was one.
fn with_tools(dialect: Dialect, question: &str, answered: Option<(&str, &[(String, String)])>) -> Value {
    let mut body = dialect.body(&[question.to_owned()], true);
    let function = json!({"name": "bash", "parameters": {"type": "object", "properties": {}}});
    body["tools"] = match dialect {
        Dialect::Chat => json!([{"type": "function", "function": function}]),
        Dialect::Messages => json!([{"name": "bash", "input_schema": function["parameters"]}]),
        Dialect::Responses => json!([{"type": "function", "name": "bash", "parameters": function["parameters"]}]),
    };
    let Some((said, calls)) = answered else { return body };
    let field = if dialect == Dialect::Responses { "input" } else { "messages" };
    let list = body[field].as_array_mut().expect("a list");
    let (made, results): (Vec<Value>, Vec<Value>) = calls
        .iter()
        .map(|(id, arguments)| match dialect {
            Dialect::Chat => (
                json!({"id": id, "type": "function", "function": {"name": "bash", "arguments": arguments}}),
                json!({"role": "tool", "tool_call_id": id, "content": "done"}),
            ),
            Dialect::Messages => {
                let input: Value = serde_json::from_str(arguments).expect("the input is JSON");
                (
                    json!({"type": "tool_use", "id": id, "name": "bash", "input": input}),
                    json!({"type": "tool_result", "tool_use_id": id, "content": "done"}),
                )
            }
            Dialect::Responses => (
                json!({"type": "function_call", "call_id": id, "name": "bash", "arguments": arguments}),
                json!({"type": "function_call_output", "call_id": id, "output": "done"}),
            ),
        })
        .unzip();
    match dialect {
        Dialect::Chat => {
            list.push(json!({"role": "assistant", "content": said, "tool_calls": made}));
            list.extend(results);
        }
        Dialect::Messages => {
            let text = json!({"type": "text", "text": said});
            let content: Vec<Value> = [text].into_iter().chain(made).collect();
            list.push(json!({"role": "assistant", "content": content}));
            list.push(json!({"role": "user", "content": results}));
        }
        Dialect::Responses => {
            list.push(json!({"role": "assistant", "content": said}));
            list.extend(made.into_iter().chain(results));
        }
    }
    body
}

/// Whether an event is there on which a client runs the tool.
fn completes_a_call(seen: &str) -> bool {
    let lines = || seen.lines();
    lines().any(|line| line.contains("content_block_stop") && line.contains("\"index\":1"))
        || lines().any(|line| line.contains("output_item.done") && line.contains("function_call"))
        || ["function_call_arguments.done", "\"finish_reason\":\""].iter().any(|word| seen.contains(word))
}

fn long_arguments() -> String {
    json!({"command": "echo ".repeat(100)}).to_string()
}

/// The engine is held in the middle of the first of two calls, and then an update of the weights aborts it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_receives_a_tool_call_while_the_engine_samples_it() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let (app, _folder) = super::exact::start(Backend::Sqlite, &engine, "vllm").await;
    let expected = [long_arguments(), r#"{"command":"pwd"}"#.to_owned()];
    for dialect in DIALECTS {
        let question = format!("Look, {}!", dialect.name());
        let script = Answer::text("I look.").call("bash", &expected[0]).call("bash", &expected[1]).in_bytes();
        engine.script(&question, [script, Answer::text("Done.")]);
        let agent = Agent::open(&app, json!({})).await;
        engine.switch(|switches| switches.hold_behind = Some(200));
        let mut response = agent.call(dialect, &with_tools(dialect, &question, None)).await;
        assert_eq!(response.status(), 200);
        // In Messages the arguments come with the end.
        let begun = if dialect == Dialect::Messages { "\"name\":\"bash\"" } else { "echo echo" };
        let mut seen = read_until(&mut response, |seen| seen.contains(begun)).await;
        assert!(!completes_a_call(&seen), "{seen}");
        assert_eq!(said(&seen).matches("I look.").count(), 1, "{seen}");
        assert!(agent.turns(&app).await.is_empty(), "nothing is recorded yet");
        let update = reqwest::Client::builder().no_proxy().build().expect("a client");
        let body = json!({"new_version": "1"}).to_string();
        let updated = update.post(format!("{}/update_weight_version", engine.url())).body(body).send().await;
        assert_eq!(updated.expect("the engine answers").status(), 200);
        engine.switch(|switches| switches.hold_behind = None);
        seen.push_str(&response.text().await.expect("the answer ends well"));
        assert!(completes_a_call(&seen) && ENDS.iter().any(|end| seen.contains(end)), "{seen}");
        let calls = calls(dialect, &seen);
        assert_eq!(calls.iter().map(|(_, arguments)| arguments.as_str()).collect::<Vec<_>>(), expected, "{seen}");

        // What the agent sends back is what was recorded.
        let again = with_tools(dialect, &question, Some(("I look.", &calls)));
        let again = agent.call(dialect, &again).await.text().await.expect("an answer");
        assert_eq!(dialect.text_of_events(&again), "Done.");
        let ended = agent.finish(&app, 1.0).await;
        assert_eq!((&ended["assembly"]["calls"], &ended["assembly"]["segments"]), (&json!(2), &json!(1)), "{ended}");
        trained(&app).await;
    }
    app.finish().await;
}

/// Nobody may run a tool whose call was not recorded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tool_call_that_fails_in_the_middle_is_never_completed() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let (app, _folder) = super::exact::start(Backend::Sqlite, &engine, "vllm").await;
    for dialect in DIALECTS {
        let question = format!("Look, {}!", dialect.name());
        engine.script(&question, [Answer::text("I look.").call("bash", &long_arguments()).in_bytes()]);
        let agent = Agent::open(&app, json!({})).await;
        engine.switch(|switches| switches.hold_behind = Some(200));
        let mut response = agent.call(dialect, &with_tools(dialect, &question, None)).await;
        let mut seen = read_until(&mut response, |seen| seen.contains("\"name\":\"bash\"")).await;
        let end = json!({"reason": "enough"});
        app.post(&format!("/sessions/{}/abort", agent.id()), end).await.expect(200);
        engine.switch(|switches| switches.hold_behind = None);
        seen.push_str(&response.text().await.expect("the events end well"));
        assert!(!completes_a_call(&seen) && !ENDS.iter().any(|end| seen.contains(end)), "{seen}");
        assert!(seen.contains("error"), "{seen}");
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
