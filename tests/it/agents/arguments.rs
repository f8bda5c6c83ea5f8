//! Tool calls in a conversation whose arguments are no JSON object. The agent sends them again with every call.

use forebay_fake_engine::{EngineKind, FakeEngine};
use serde_json::{Value, json};

use super::{Agent, DIALECTS, Dialect, success, trained};
use crate::support::{Backend, TestApp, text};

fn body(dialect: Dialect, arguments: &Value) -> Value {
    let question = json!({"role": "user", "content": "Start."});
    match dialect {
        Dialect::Chat => {
            let call = json!({"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}});
            let said = json!({"role": "assistant", "content": null, "tool_calls": [call]});
            let result = json!({"role": "tool", "tool_call_id": "c1", "content": "no such file"});
            json!({"model": "m", "messages": [question, said, result]})
        }
        Dialect::Messages => {
            let call = json!({"type": "tool_use", "id": "c1", "name": "bash", "input": arguments});
            let result = json!({"type": "tool_result", "tool_use_id": "c1", "content": "no such file"});
            let messages =
                json!([question, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]);
            json!({"model": "m", "max_tokens": 100, "messages": messages})
        }
        Dialect::Responses => {
            let call = json!({"type": "function_call", "call_id": "c1", "name": "bash", "arguments": arguments});
            let result = json!({"type": "function_call_output", "call_id": "c1", "output": "no such file"});
            json!({"model": "m", "input": [question, call, result]})
        }
    }
}

async fn check(app: &TestApp) {
    let wrong = [
        json!("{\"command\": \"ls"),
        json!("ls -la"),
        json!("[1]"),
        json!(""),
        json!(["ls"]),
        json!(7),
        json!(null),
        json!({"invalid_arguments": "{\"command\": "}),
        json!("{\"command\": \"\\ud83d\"}"),
    ];
    for dialect in DIALECTS {
        let agent = Agent::open(app, json!({})).await;
        for arguments in &wrong {
            success(agent.call(dialect, &body(dialect, arguments)).await).await;
        }
        let ended = agent.finish(app, 1.0).await;
        assert_eq!(ended["assembly"]["calls"], wrong.len(), "{dialect:?}: {ended}");
        trained(app).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arguments_that_are_no_object_do_not_end_a_session() {
    for (kind, name) in [(EngineKind::Sglang, "sglang"), (EngineKind::Vllm, "vllm")] {
        let engine = FakeEngine::start(kind).await;
        let config = format!("[[upstream]]\nname = \"fake\"\nkind = \"{name}\"\nurls = [\"{}\"]\n", engine.url());
        let app = TestApp::start_with(Backend::Sqlite, &config).await;
        check(&app).await;
        let sent = engine.log().calls().last().expect("the engine was called").json();
        let arguments = text(&sent["messages"][1]["tool_calls"][0]["function"]["arguments"]);
        assert_eq!(arguments, "{\"command\": \"\\ufffd\"}", "the rest of the arguments stays");
        app.finish().await;
    }
}

#[cfg(feature = "exact")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arguments_that_are_no_object_do_not_end_a_session_in_the_mode_exact() {
    for (kind, name) in [(EngineKind::Sglang, "sglang"), (EngineKind::Vllm, "vllm")] {
        let engine = FakeEngine::start(kind).await;
        let (app, _folder) = super::exact::start(Backend::Sqlite, &engine, name).await;
        check(&app).await;
        app.finish().await;
    }
}
