//! Whole conversations: an agent's dialect, the gateway and the fake engine.

use forebay_fake_engine::{Answer, EngineKind, model::logprob};
use forebay_gateway::{Completion, Dialect, Request};
use serde_json::{Value, json};

use crate::support::{DIALECTS, answer, call, parsed, start};

/// The first request of an agent with one tool.
fn first(dialect: Dialect) -> Value {
    match dialect {
        Dialect::Chat => json!({
            "model": "m",
            "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Start."}],
            "tools": [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}],
        }),
        Dialect::Messages => json!({
            "model": "m",
            "system": "S",
            "messages": [{"role": "user", "content": "Start."}],
            "tools": [{"name": "bash", "input_schema": {"type": "object"}}],
        }),
        Dialect::Responses => json!({
            "model": "m",
            "instructions": "S",
            "input": [{"role": "user", "content": "Start."}],
            "tools": [{"type": "function", "name": "bash", "parameters": {"type": "object"}}],
        }),
    }
}

/// Appends an answer to the conversation, and the result of each of its tool calls, as a faithful agent does.
fn extend(dialect: Dialect, body: &mut Value, mut answer: Value, completion: &Completion) {
    let ids: Vec<&str> = completion.message.tool_calls.iter().map(|call| call.id.as_str()).collect();
    let list = match dialect {
        Dialect::Responses => &mut body["input"],
        Dialect::Chat | Dialect::Messages => &mut body["messages"],
    };
    let list = list.as_array_mut().expect("a conversation is a list");
    match dialect {
        Dialect::Chat => {
            list.push(answer["choices"][0]["message"].take());
            list.extend(ids.iter().map(|id| json!({"role": "tool", "tool_call_id": id, "content": "ok"})));
        }
        Dialect::Messages => {
            let result = |id: &&str| json!({"type": "tool_result", "tool_use_id": id, "content": "ok"});
            list.push(json!({"role": "assistant", "content": answer["content"].take()}));
            list.push(json!({"role": "user", "content": ids.iter().map(result).collect::<Value>()}));
        }
        Dialect::Responses => {
            list.extend(answer["output"].as_array().expect("a list").iter().cloned());
            let result = |id: &&str| json!({"type": "function_call_output", "call_id": id, "output": "ok"});
            list.extend(ids.iter().map(result));
        }
    }
}

#[tokio::test]
async fn a_faithful_agent_extends_its_conversation_in_every_dialect() {
    for dialect in DIALECTS {
        let (engine, upstream) = start(EngineKind::Sglang).await;
        engine.script(
            "Start",
            [
                Answer::text("I look.").thinking("First.").call("bash", r#"{"command":"ls"}"#).call("bash", "{}"),
                Answer::text("").thinking("Second.").call("bash", r#"{"command":"cat a"}"#),
                Answer::text("Done."),
            ],
        );
        let mut body = first(dialect);
        let mut path: Vec<i32> = Vec::new();
        for turn in 0..3 {
            let request: Request = parsed(dialect, &body);
            let completion = upstream.complete(&call(&request)).await.expect("the engine answers").completion;
            assert!(completion.prompt_tokens.starts_with(&path), "{dialect:?}: turn {turn} extends the one before");
            path.clone_from(&completion.prompt_tokens);
            for (&token, &value) in completion.tokens.iter().zip(&completion.logprobs) {
                assert!((value - logprob(&path, token, 0.8)).abs() < 1e-6);
                path.push(token);
            }
            extend(dialect, &mut body, answer(dialect, &completion), &completion);
        }
        assert_eq!(engine.log().calls().count(), 3);
    }
}

#[tokio::test]
async fn all_dialects_send_the_engine_the_same_request() {
    let mut sent = Vec::new();
    for dialect in DIALECTS {
        let (engine, upstream) = start(EngineKind::Vllm).await;
        let request = parsed(dialect, &first(dialect));
        upstream.complete(&call(&request)).await.expect("the engine answers");
        sent.push(engine.log().calls().next().expect("the engine was called").json());
    }
    assert_eq!(sent[0], sent[1]);
    assert_eq!(sent[0], sent[2]);
}

#[tokio::test]
async fn a_field_of_the_agent_never_stands_beside_one_of_the_gateway() {
    for dialect in [Dialect::Messages, Dialect::Responses] {
        let (engine, upstream) = start(EngineKind::Vllm).await;
        let mut body = first(dialect);
        // Names that this dialect does not have, but that engines read.
        for name in ["max_completion_tokens", "stream_options", "return_meta_info", "logprobs"] {
            body[name] = json!(false);
        }
        if dialect == Dialect::Responses {
            (body["messages"], body["max_tokens"]) = (json!([]), json!(99_999));
        }
        let request = parsed(dialect, &body);
        upstream.complete(&call(&request)).await.expect("the engine answers");
        let log = engine.log();
        let sent = &log.calls().next().expect("the engine was called").text;
        for (name, count) in [("max_tokens", 1), ("messages", 1), ("logprobs", 1), ("max_completion_tokens", 0)] {
            assert_eq!(sent.matches(&format!("\"{name}\":")).count(), count, "{dialect:?}: {name} in {sent}");
        }
    }
}
