//! Prompts that do not continue the call before them, and what the service says about the cause.

use forebay_fake_engine::{Answer, FakeEngine};
use serde_json::{Value, json};

use super::{Agent, DIALECTS, Dialect, metric, success};
use crate::support::{TestApp, on_both_stores, text};

/// Longer than what prompts may share without a break.
const SYSTEM: &str = "You are an agent with one tool. Use the tool to look at files, and then say what is in them.";

/// What an agent changes in the history that it sends back, by the cause that should be reported.
const CAUSES: [&str; 5] = ["reasoning", "arguments", "tokens", "system", "rewrite"];

/// A conversation in the form of a dialect. Answers are sent back as they came, unless a test changes them.
#[derive(Clone)]
pub(super) struct Conversation {
    dialect: Dialect,
    system: String,
    tools: Vec<&'static str>,
    pub(super) messages: Vec<Value>,
}

impl Conversation {
    pub(super) fn new(dialect: Dialect, question: &str) -> Self {
        let messages = vec![json!({"role": "user", "content": question})];
        Self { dialect, system: SYSTEM.to_owned(), tools: vec!["bash"], messages }
    }

    fn body(&self) -> Value {
        let schema = json!({"type": "object"});
        let tool = |name: &&str| match self.dialect {
            Dialect::Chat => json!({"type": "function", "function": {"name": name, "parameters": schema}}),
            Dialect::Messages => json!({"name": name, "input_schema": schema}),
            Dialect::Responses => json!({"type": "function", "name": name, "parameters": schema}),
        };
        let tools: Vec<Value> = self.tools.iter().map(tool).collect();
        let system = json!({"role": "system", "content": self.system});
        match self.dialect {
            Dialect::Chat => {
                let messages: Vec<Value> = [system].into_iter().chain(self.messages.iter().cloned()).collect();
                json!({"model": "m", "messages": messages, "tools": tools})
            }
            Dialect::Messages => json!({
                "model": "m", "system": self.system, "messages": self.messages, "tools": tools, "max_tokens": 4000,
            }),
            Dialect::Responses => {
                json!({"model": "m", "instructions": self.system, "input": self.messages, "tools": tools})
            }
        }
    }

    /// Calls, and appends the answer and the result of its tool call.
    pub(super) async fn turn(&mut self, agent: &Agent) {
        let answer = success(agent.call(self.dialect, &self.body()).await).await;
        match self.dialect {
            Dialect::Chat => {
                let message = answer["choices"][0]["message"].clone();
                let id = message["tool_calls"][0]["id"].clone();
                self.messages.extend([message, json!({"role": "tool", "tool_call_id": id, "content": "a file"})]);
            }
            Dialect::Messages => {
                let blocks = answer["content"].as_array().expect("blocks").clone();
                let id = blocks.last().expect("a tool call")["id"].clone();
                let result = json!([{"type": "tool_result", "tool_use_id": id, "content": "a file"}]);
                let messages =
                    [json!({"role": "assistant", "content": blocks}), json!({"role": "user", "content": result})];
                self.messages.extend(messages);
            }
            Dialect::Responses => {
                let items = answer["output"].as_array().expect("items").clone();
                let id = items.last().expect("a tool call")["call_id"].clone();
                self.messages.extend(items);
                self.messages.push(json!({"type": "function_call_output", "call_id": id, "output": "a file"}));
            }
        }
    }

    /// Changes the history so that the next prompt breaks for this cause.
    fn change(&mut self, cause: &str) {
        match cause {
            "reasoning" => self.drop_reasoning(),
            "arguments" => self.respell_arguments(),
            "system" => self.system += " Be brief.",
            "rewrite" => self.rewrite_question(),
            // The answer comes back as other ids than those that were sampled.
            _ => {}
        }
    }

    pub(super) fn rewrite_question(&mut self) {
        self.messages[0]["content"] = format!("{} Please.", text(&self.messages[0]["content"])).into();
    }

    /// Changes the last result of a tool.
    #[cfg(feature = "exact")]
    pub(super) fn rewrite_last(&mut self) {
        let last = self.messages.last_mut().expect("there are messages");
        let content = match self.dialect {
            Dialect::Chat => &mut last["content"],
            Dialect::Messages => &mut last["content"][0]["content"],
            Dialect::Responses => &mut last["output"],
        };
        *content = "another file".into();
    }

    pub(super) fn drop_reasoning(&mut self) {
        match self.dialect {
            Dialect::Chat => {
                for name in ["reasoning", "reasoning_content"] {
                    let found = self.messages[1].as_object_mut().expect("an object").remove(name);
                    assert!(found.is_some(), "the answer has reasoning");
                }
            }
            Dialect::Messages => {
                let blocks = self.messages[1]["content"].as_array_mut().expect("blocks");
                assert_eq!(blocks.remove(0)["type"], "thinking");
            }
            Dialect::Responses => assert_eq!(self.messages.remove(1)["type"], "reasoning"),
        }
    }

    pub(super) fn respell_arguments(&mut self) {
        let spelled = r#"{"command": "ls", "n": 1}"#;
        match self.dialect {
            Dialect::Chat => self.messages[1]["tool_calls"][0]["function"]["arguments"] = spelled.into(),
            // This dialect has values in place of texts.
            Dialect::Messages => {
                let blocks = self.messages[1]["content"].as_array_mut().expect("blocks");
                blocks.last_mut().expect("a tool call")["input"]["n"] = 1.into();
            }
            Dialect::Responses => {
                let is_call = |item: &&mut Value| item["type"] == "function_call";
                self.messages.iter_mut().find(is_call).expect("a tool call")["arguments"] = spelled.into();
            }
        }
    }
}

/// The first answers of all conversations. In one of them, the text of the answer comes back as other ids.
pub(super) fn script(engine: &FakeEngine, key: &str, drifts: bool) {
    let first = Answer::text("I look there.").thinking("Look first.").call("bash", r#"{"command":"ls","n":1.0}"#);
    let first = if drifts { first.in_bytes() } else { first };
    let second = Answer::text("Then.").thinking("Again.").call("bash", r#"{"command":"cat","n":1.0}"#);
    engine.script(key, [first, second.clone(), second]);
}

/// The breaks of a session, by the number of the call.
pub(super) async fn breaks(app: &TestApp, agent: &Agent) -> Vec<(u64, Value)> {
    let turns = agent.turns(app).await;
    let with_break = turns.iter().filter(|turn| turn.get("break").is_some());
    with_break.map(|turn| (turn["seq"].as_u64().expect("a number"), turn["break"].clone())).collect()
}

async fn counted(app: &TestApp, policy: &str) -> Vec<Option<f64>> {
    let mut counted = Vec::new();
    for cause in CAUSES {
        let line = format!("forebay_session_breaks_total{{cause=\"{cause}\",policy=\"{policy}\"}}");
        counted.push(metric(app, &line).await);
    }
    counted
}

on_both_stores! {
    async fn each_break_is_reported_with_its_cause_also_after_a_restart(app: TestApp) {
        let mut agents = Vec::new();
        for dialect in DIALECTS {
            app.rules(dialect.name(), json!({})).await;
            for cause in CAUSES {
                let key = format!("{cause} in {}", dialect.name());
                script(&app.engine, &key, cause == "tokens");
                let agent = Agent::open(app, json!({"policy": dialect.name()})).await;
                let mut conversation = Conversation::new(dialect, &key);
                conversation.turn(&agent).await;
                conversation.change(cause);
                conversation.turn(&agent).await;
                let found = breaks(app, &agent).await;
                let [(2, found)] = &found[..] else { panic!("{key}: {found:?}") };
                assert_eq!((&found["cause"], &found["nearest"]), (&json!(cause), &json!(1)), "{key}");
                let shown = ["expected", "found"].map(|side| found[side].as_array().expect("ids").len());
                assert!(shown.iter().all(|&ids| (1..=16).contains(&ids)), "{key}: {found}");
                assert_eq!(found.get("found_text"), None, "the engine's tokenizer is not known");
                agents.push((agent, found.clone()));
            }
        }
        let chat = agents.split_off(CAUSES.len());
        for (agent, _) in &agents {
            agent.finish(app, 1.0).await;
        }
        assert_eq!(counted(app, "chat").await, [Some(1.0); 5]);
        app.restart().await;
        for (agent, expected) in agents.iter().chain(&chat) {
            assert_eq!(breaks(app, agent).await, [(2, expected.clone())]);
        }
        for (agent, _) in &chat {
            agent.finish(app, 1.0).await;
        }
        for policy in ["messages", "responses"] {
            assert_eq!(counted(app, policy).await, [Some(1.0); 5], "{policy}");
        }
        assert_eq!(counted(app, "chat").await, [None; 5], "these sessions ended in another process");
    }

    async fn each_break_of_a_conversation_has_its_own_cause(app: TestApp) {
        let key = "Several breaks";
        script(&app.engine, key, false);
        let agent = Agent::open(app, json!({})).await;
        let mut conversation = Conversation::new(Dialect::Chat, key);
        conversation.turn(&agent).await;
        // The reasoning is dropped, and later another message is changed. Each break has its own cause.
        conversation.drop_reasoning();
        conversation.turn(&agent).await;
        let mut fork = conversation.clone();
        conversation.turn(&agent).await;
        fork.messages[4]["content"] = "another file".into();
        fork.turn(&agent).await;
        let mut other = conversation.clone();
        other.tools.push("read");
        other.turn(&agent).await;
        let found = breaks(app, &agent).await;
        let causes: Vec<_> = found.iter().map(|(seq, found)| (*seq, text(&found["cause"]))).collect();
        assert_eq!(causes, [(2, "reasoning"), (4, "rewrite"), (5, "system")], "{found:?}");
        agent.finish(app, 1.0).await;
    }
}
