//! The conversation that the rollout of a session is kept with.

use forebay_fake_engine::Answer;
use serde_json::{Value, json};

use super::{Agent, DIALECTS, Dialect, success};
use crate::support::{TestApp, on_both_stores, text};

/// The messages that the rollout of a session was kept with.
async fn kept(app: &TestApp, ended: &Value) -> Value {
    let receipt = &ended["receipts"][0];
    let (policy, rollout) = (text(&receipt["policy"]), text(&receipt["rollout_id"]));
    let path = format!("/trajectories/content?policy={policy}&rollout_id={rollout}");
    let content = app.get(&path).await.expect(200);
    let items = content["messages"]["items"].as_array().cloned().unwrap_or_default();
    items.into_iter().map(|mut item| item["message"].take()).collect()
}

on_both_stores! {
    async fn a_rollout_is_kept_with_the_conversation_of_its_last_call(app: TestApp) {
        for dialect in DIALECTS {
            let agent = Agent::open(app, json!({})).await;
            let said = agent.talk(dialect, false, 3, "Hello.").await;
            // The agent does not send its last words.
            let sent = &said[..said.len() - 1];
            let role = |index: usize| if index.is_multiple_of(2) { "user" } else { "assistant" };
            let expected: Value =
                sent.iter().enumerate().map(|(index, text)| json!({"role": role(index), "content": text})).collect();
            assert_eq!(kept(app, &agent.finish(app, 1.0).await).await, expected, "{dialect:?}");
        }
    }

    async fn messages_have_reasoning_and_tool_calls_with_the_ids_that_link_them(app: TestApp) {
        let look = Answer::text("I look.").thinking("First this.");
        let look = look.call("run", r#"{"command":"ls"}"#).call("run", r#"{"command":"pwd"}"#);
        app.engine.script("Start.", [look, Answer::text("Done.")]);
        let agent = Agent::open(app, json!({})).await;
        let tool = json!({"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}});
        let mut messages =
            vec![json!({"role": "system", "content": "You work."}), json!({"role": "user", "content": "Start."})];
        let body = json!({"model": "m", "messages": messages, "tools": [tool]});
        let answer = success(agent.call(Dialect::Chat, &body).await).await["choices"][0]["message"].take();
        let ids: Vec<String> =
            answer["tool_calls"].as_array().expect("a list").iter().map(|call| text(&call["id"]).to_owned()).collect();
        messages.push(answer.clone());
        // The second result comes first, and in parts.
        messages.push(json!({"role": "tool", "tool_call_id": ids[1], "content": [{"type": "text", "text": "/work"}]}));
        messages.push(json!({"role": "tool", "tool_call_id": ids[0], "content": "a file"}));
        let body = json!({"model": "m", "messages": messages, "tools": [tool]});
        success(agent.call(Dialect::Chat, &body).await).await;
        let call = |id: &str, arguments: &str| {
            json!({"id": id, "type": "function", "function": {"name": "run", "arguments": arguments}})
        };
        let calls = [call(&ids[0], r#"{"command":"ls"}"#), call(&ids[1], r#"{"command":"pwd"}"#)];
        let expected = json!([
            {"role": "system", "content": "You work."},
            {"role": "user", "content": "Start."},
            {"role": "assistant", "reasoning_content": "First this.", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "content": "/work", "tool_call_id": ids[1]},
            {"role": "tool", "content": "a file", "tool_call_id": ids[0]},
            {"role": "assistant", "content": "Done."},
        ]);
        assert_eq!(kept(app, &agent.finish(app, 1.0).await).await, expected);
    }

    async fn a_rule_turns_the_messages_off_and_the_call_that_is_trained_last_counts(app: TestApp) {
        app.rules("quiet", json!({"record": {"messages": false}})).await;
        for (policy, expected) in [("quiet", json!([])), ("default", json!(["Two.", "Two."]))] {
            let agent = Agent::open(app, json!({"policy": policy})).await;
            for question in ["One.", "Two."] {
                app.engine.script(question, [Answer::text(question)]);
            }
            // Two conversations, of which the second one ends last.
            agent.ask("One.").await;
            agent.ask("Two.").await;
            let messages = kept(app, &agent.finish(app, 1.0).await).await;
            let contents: Value =
                messages.as_array().expect("a list").iter().map(|message| message["content"].clone()).collect();
            assert_eq!(contents, expected, "{policy}");
        }
    }
}
