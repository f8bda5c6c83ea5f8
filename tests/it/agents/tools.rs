//! Tools that run at the client and are no functions, in conversations that are recorded.

use forebay_fake_engine::{Answer, EngineKind, FakeEngine};
use serde_json::{Value, json};

use super::{Agent, Dialect, exact, metric, success};
use crate::support::{Backend, on_both_stores, text};

/// The tools of Codex: a free-form one, functions in namespaces, a shell, and one that runs at the provider.
fn tools() -> Value {
    let function = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}});
    json!([
        {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}, function("wait")]},
        {"type": "namespace", "name": "collaboration", "tools": [function("spawn_agent")]},
        {"type": "local_shell"},
        {"type": "web_search"},
    ])
}

/// The answer that the events of a stream make.
fn streamed(body: &str) -> Value {
    let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
    let mut events: Vec<Value> = data.filter_map(|data| serde_json::from_str(data).ok()).collect();
    let mut last = events.pop().expect("there are events");
    assert_eq!(last["type"], "response.completed", "{body}");
    let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
    let items: Vec<Value> = done.map(|event| event["item"].clone()).collect();
    assert_eq!(last["response"]["output"], json!(items));
    last["response"].take()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_tools_that_are_no_functions_come_back_in_their_shape_and_are_one_segment() {
    for stream in [false, true] {
        let engine = FakeEngine::start(EngineKind::Vllm).await;
        let script = [
            Answer::text("").call("exec", r#"{"input": "text(\"1\")"}"#),
            Answer::text("").call("collaboration__spawn_agent", r#"{"task": 1.0}"#),
            Answer::text("").call("local_shell", r#"{"command": ["ls", "-l"]}"#),
            Answer::text("Done."),
        ];
        engine.script("Start.", script);
        let (app, _folder) = exact::start(Backend::Sqlite, &engine, "vllm").await;
        let agent = Agent::open(&app, json!({})).await;
        let mut input = vec![
            json!({"type": "additional_tools", "id": "at_1", "role": "developer", "tools": tools()}),
            json!({"role": "user", "content": "Start."}),
            json!({"type": "compaction", "encrypted_content": "x"}),
        ];
        let mut shapes = Vec::new();
        for _ in 0..4 {
            let body = json!({"model": "m", "input": input, "stream": stream, "tool_choice": "auto"});
            let response = agent.call(Dialect::Responses, &body).await;
            let answer = if stream {
                streamed(&response.text().await.expect("the answer ends well"))
            } else {
                success(response).await
            };
            let item = answer["output"].as_array().expect("a list").last().expect("an item").clone();
            shapes.push(format!("{} {}", text(&item["type"]), item["namespace"].as_str().unwrap_or_default()));
            let outputs =
                [("custom_tool_call", "custom_tool_call_output"), ("local_shell_call", "local_shell_call_output")];
            let kind = outputs.iter().find(|(call, _)| item["type"] == *call).map(|(_, output)| *output);
            let kind = kind.unwrap_or("function_call_output");
            input.push(item.clone());
            if item["call_id"].is_string() {
                input.push(json!({"type": kind, "call_id": item["call_id"], "output": "a file"}));
            }
        }
        let expected = ["custom_tool_call functions", "function_call collaboration", "local_shell_call ", "message "];
        assert_eq!(shapes, expected);
        assert_eq!(input[3]["input"], "text(\"1\")");
        let ended = agent.finish(&app, 1.0).await;
        let counts = [&ended["assembly"]["segments"], &ended["assembly"]["breaks"]];
        assert_eq!(counts, [&json!(1), &json!(0)], "{ended}");
        app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_call_gets_its_answer_in_the_same_shape() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    engine.script("Start.", [Answer::text("").call("exec", r#"{"input": "1"}"#)]);
    let (app, _folder) = exact::start(Backend::Sqlite, &engine, "vllm").await;
    let agent = Agent::open(&app, json!({})).await;
    let body = json!({"model": "m", "input": "Start.", "tools": [{"type": "custom", "name": "exec"}]});
    let first = success(agent.call(Dialect::Responses, &body).await).await;
    agent.lose_the_first_answer(&app).await;
    let again = agent.request(Dialect::Responses, &body).header("x-stainless-retry-count", "1").send().await;
    let again = success(again.expect("the listener answers")).await;
    assert_eq!(again["output"], first["output"]);
    let read = agent.http.get(agent.url(&format!("/responses/{}", text(&first["id"])))).bearer_auth(agent.key());
    let read = success(read.send().await.expect("the listener answers")).await;
    assert_eq!(read["output"], first["output"]);
    assert_eq!(again["output"][0]["type"], "custom_tool_call");
    app.finish().await;
}

on_both_stores! {
    async fn parts_that_were_left_out_are_named_once(app: TestApp) {
        let agent = Agent::open(app, json!({})).await;
        let input = json!([{"role": "user", "content": "Hello."}, {"type": "compaction", "encrypted_content": "x"}]);
        let tools = json!([{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}}]);
        let body = json!({"model": "m", "input": input, "tools": tools});
        for _ in 0..2 {
            success(agent.call(Dialect::Responses, &body).await).await;
        }
        let search = json!({"type": "web_search_20250305", "name": "web_search"});
        let mut messages = Dialect::Messages.body(&["Hello again.".to_owned()], false);
        messages["tools"] = json!([search, {"name": "f", "input_schema": {"type": "object"}}]);
        success(agent.call(Dialect::Messages, &messages).await).await;
        // An agent may name any types, of which few are kept.
        let odd: Vec<Value> = (0..100).map(|number| json!({"type": format!("odd_{number:02}")})).collect();
        messages["tools"] = json!(odd);
        success(agent.call(Dialect::Messages, &messages).await).await;
        let session = app.get(&format!("/sessions/{}", agent.id())).await.expect(200);
        let warnings = session["policies"][0]["warnings"].as_array().expect("a list").clone();
        let of = |kind: &str| warnings.iter().filter(|warning| text(warning).contains(&format!("{kind:?}"))).count();
        assert_eq!(["compaction", "web_search", "web_search_20250305"].map(of), [1, 1, 1], "{warnings:?}");
        assert!(warnings.iter().all(|warning| text(warning).starts_with("part-left-out: ")), "{warnings:?}");
        assert_eq!(warnings.len(), 32);
        let count = async |kind: &str| {
            metric(app, &format!("forebay_agent_parts_left_out_total{{kind=\"{kind}\"}}")).await
        };
        assert_eq!((count("web_search").await, count("compaction").await), (Some(3.0), Some(2.0)));
        assert!(count("_other").await.is_some_and(|count| count > 30.0));
        let ended = agent.finish(app, 1.0).await;
        assert_eq!(ended["receipts"][0]["warnings"], json!(warnings), "{ended}");
    }
}
