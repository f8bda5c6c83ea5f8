//! Agents call their sessions over HTTP, in every dialect, while a fake engine answers.
//!
//! The engine's log-probability of a token is a function of the ids before it. So each trained token is checked against
//! the context that it was really sampled in, which finds every mistake of recording and assembling.

mod arguments;
mod attempts;
pub(crate) mod audits;
mod breaks;
mod calls;
mod clients;
mod conversations;
mod crashes;
mod distribution;
mod ends;
mod engines;
#[cfg(feature = "exact")]
mod exact;
mod group;
mod parts;
mod references;
mod repeats;
mod requests;
#[cfg(feature = "exact")]
mod streaming;
mod systems;
mod teachers;
#[cfg(feature = "exact")]
mod tools;
mod work;

use std::time::Duration;

use forebay_fake_engine::{Answer, model::logprob};
use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

use crate::support::{TestApp, text};

/// How long a test waits for something that happens at once on an idle machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// What an agent speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialect {
    Chat,
    Messages,
    Responses,
}

const DIALECTS: [Dialect; 3] = [Dialect::Chat, Dialect::Messages, Dialect::Responses];

impl Dialect {
    fn path(self) -> &'static str {
        match self {
            Self::Chat => "/chat/completions",
            Self::Messages => "/messages",
            Self::Responses => "/responses",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Messages => "messages",
            Self::Responses => "responses",
        }
    }

    /// A call with a conversation, in which the user speaks first and every other message is the assistant's.
    fn body(self, conversation: &[String], stream: bool) -> Value {
        let role = |index: usize| if index.is_multiple_of(2) { "user" } else { "assistant" };
        let messages = conversation.iter().enumerate();
        let messages: Vec<Value> =
            messages.map(|(index, text)| json!({"role": role(index), "content": text})).collect();
        match self {
            Self::Chat => json!({"model": "m", "messages": messages, "stream": stream}),
            Self::Messages => json!({"model": "m", "messages": messages, "stream": stream, "max_tokens": 4000}),
            Self::Responses => json!({"model": "m", "input": messages, "stream": stream}),
        }
    }

    /// The text of an answer.
    fn text(self, answer: &Value) -> String {
        let found = match self {
            Self::Chat => &answer["choices"][0]["message"]["content"],
            Self::Messages => &answer["content"][0]["text"],
            Self::Responses => &answer["output"][0]["content"][0]["text"],
        };
        text(found).to_owned()
    }

    /// The text of an answer that was sent as events, which must be complete.
    fn text_of_events(self, body: &str) -> String {
        let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<Value> = data.filter_map(|data| serde_json::from_str(data).ok()).collect();
        let deltas = |at: &str| -> String {
            events.iter().filter_map(|event| event.pointer(at)).filter_map(Value::as_str).collect()
        };
        match self {
            Self::Chat => {
                assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
                deltas("/choices/0/delta/content")
            }
            Self::Messages => {
                assert_eq!(events.last().expect("there are events")["type"], "message_stop", "{body}");
                deltas("/delta/text")
            }
            Self::Responses => {
                let last = events.last().expect("there are events");
                assert_eq!(last["type"], "response.completed", "{body}");
                self.text(&last["response"])
            }
        }
    }
}

/// The message of an error, which is at the same place in all dialects.
fn message(error: &Value) -> &str {
    text(&error["error"]["message"])
}

/// An agent with a session.
struct Agent {
    http: reqwest::Client,
    session: Value,
}

impl Agent {
    async fn open(app: &TestApp, request: Value) -> Self {
        let session = app.post("/sessions", request).await.expect(201);
        Self { http: app.http.clone(), session }
    }

    /// The address for a path below `/v1`.
    fn url(&self, path: &str) -> String {
        format!("{}{path}", text(&self.session["base_urls"]["openai"]))
    }

    fn key(&self) -> &str {
        text(&self.session["key"])
    }

    fn id(&self) -> &str {
        text(&self.session["session_id"])
    }

    fn request(&self, dialect: Dialect, body: &Value) -> reqwest::RequestBuilder {
        let request = self.http.post(self.url(dialect.path()));
        let request = match dialect {
            Dialect::Messages => request.header("x-api-key", self.key()).header("anthropic-version", "2023-06-01"),
            Dialect::Chat | Dialect::Responses => request.bearer_auth(self.key()),
        };
        request.json(body)
    }

    async fn call(&self, dialect: Dialect, body: &Value) -> Response {
        self.request(dialect, body).send().await.expect("the listener answers")
    }

    /// Asks one question, and returns the answer, which must be a success.
    async fn ask(&self, question: &str) -> Value {
        let body = Dialect::Chat.body(&[question.to_owned()], false);
        success(self.call(Dialect::Chat, &body).await).await
    }

    /// Goes on with a conversation for some turns. Returns all messages.
    async fn talk(&self, dialect: Dialect, stream: bool, turns: usize, first: &str) -> Vec<String> {
        let mut conversation = vec![first.to_owned()];
        for turn in 0..turns {
            let response = self.call(dialect, &dialect.body(&conversation, stream)).await;
            assert_eq!(response.status(), 200);
            let body = response.text().await.expect("the answer ends well");
            let answer = if stream {
                dialect.text_of_events(&body)
            } else {
                dialect.text(&serde_json::from_str(&body).expect("the answer is JSON"))
            };
            conversation.push(answer);
            conversation.push(format!("Go on {turn}."));
        }
        conversation
    }

    async fn finish(&self, app: &TestApp, reward: f64) -> Value {
        app.post(&format!("/sessions/{}/finish", self.id()), json!({"reward": reward})).await.expect(200)
    }

    async fn turns(&self, app: &TestApp) -> Vec<Value> {
        let turns = app.get(&format!("/sessions/{}/turns", self.id())).await.expect(200);
        turns["turns"].as_array().expect("a list").clone()
    }

    /// Has the service believe that the answer of the first call was lost on its way.
    async fn lose_the_first_answer(&self, app: &TestApp) {
        let is_marked = || async { self.turns(app).await.iter().all(|turn| turn["delivered"] == true) };
        crate::support::eventually("the marks of all answers", is_marked).await;
        app.tamper("UPDATE session_call SET delivered = 2 WHERE seq = 1").await;
    }
}

/// A call that is answered after an abort and a failure of the engine, and a session that a teacher scores, so that all
/// metrics of calls are exported.
pub(crate) async fn traffic(app: &TestApp) {
    app.engine.switch(|switches| {
        switches.aborts = 1;
        switches.failures = Some((1, 503, r#"{"message": "paused"}"#.to_owned()));
    });
    Agent::open(app, json!({})).await.ask("Hello.").await;
    app.rules("taught", json!({"sessions": {"teacher": "fake"}})).await;
    let agent = Agent::open(app, json!({"policy": "taught"})).await;
    agent.ask("Hello.").await;
    agent.finish(app, 1.0).await;
}

/// The JSON of an answer that must be a success.
async fn success(response: Response) -> Value {
    let status = response.status();
    let body = response.text().await.expect("the answer ends well");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("the answer is JSON")
}

/// An error: its status, whether the client should repeat the call, and the body.
async fn error(response: Response) -> (StatusCode, Option<bool>, Value) {
    let retry = response.headers().get("x-should-retry").map(|value| value == "true");
    let status = response.status();
    (status, retry, response.json().await.expect("an error is JSON"))
}

/// Leases the next batch and checks every trained token against the context that it was sampled in. Returns the rows,
/// with the number of trained tokens.
async fn trained(app: &TestApp) -> (Vec<Value>, usize) {
    let batch = app.lease().await;
    let rows = app.samples(&batch).await;
    let mut count = 0;
    for row in &rows {
        count += check_row(row, 1.0);
    }
    (rows, count)
}

/// Checks a row, and returns the number of its trained tokens.
fn check_row(row: &Value, temperature: f64) -> usize {
    let list = |name: &str| row[name].as_array().unwrap_or_else(|| panic!("{name} is missing in {row}"));
    let tokens: Vec<i32> = list("tokens").iter().map(|id| id.as_i64().expect("an id") as i32).collect();
    let mask: Vec<i64> = list("loss_mask").iter().map(|bit| bit.as_i64().expect("a bit")).collect();
    let logprobs: Vec<f64> = list("logprobs").iter().map(|value| value.as_f64().expect("a number")).collect();
    let prompt = tokens.len() - mask.len();
    for (place, (bit, recorded)) in mask.iter().zip(&logprobs).enumerate() {
        if *bit == 0 {
            continue;
        }
        let at = prompt + place;
        let expected = f64::from(logprob(&tokens[..at], tokens[at], temperature));
        assert!((recorded - expected).abs() < 1e-5, "token {at} has {recorded} instead of {expected}");
    }
    mask.iter().filter(|bit| **bit == 1).count()
}

fn answers(texts: &[&str]) -> Vec<Answer> {
    texts.iter().map(|text| Answer::text(text)).collect()
}

/// The value of a metric.
async fn metric(app: &TestApp, line: &str) -> Option<f64> {
    let body = app.http.get(format!("{}/metrics", app.url)).send().await.expect("the server answers");
    let body = body.text().await.expect("the answer ends well");
    body.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
}
