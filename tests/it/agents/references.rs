//! Calls of Responses that name recorded answers instead of sending them, and responses that are read again.

use forebay_fake_engine::{Answer, FakeEngine};
use reqwest::Response;
use serde_json::{Value, json};
use sqlx::Connection as _;

use super::{Agent, Dialect, PATIENCE, error, message, success};
use crate::support::{Backend, TestApp, eventually, on_both_stores, text};

/// How an agent tells of the conversation before a call.
#[derive(Clone, Copy, PartialEq)]
enum Names {
    /// It sends it.
    Nothing,
    /// It names the items of answers.
    Items,
    /// It names the response before.
    Response,
}

fn script(engine: &FakeEngine, question: &str) {
    let look = |text: &str| Answer::text(text).thinking("First this.").call("run", r#"{"command":"ls","n":1.0}"#);
    engine.script(question, [look("I look."), look(""), Answer::text("Done.")]);
}

async fn turn(agent: &Agent, input: &[Value], previous: &Value) -> Value {
    let tool = json!({"type": "function", "name": "run", "parameters": {"type": "object"}});
    let body = json!({
        "model": "m", "instructions": "You are an agent.", "input": input, "tools": [tool],
        "previous_response_id": previous,
    });
    success(agent.call(Dialect::Responses, &body).await).await
}

/// Has a conversation of three turns, and returns the last prompt or messages that the engine was sent. Between the
/// turns, the service may be started again.
async fn converse(app: &mut TestApp, engine: &FakeEngine, names: Names, restarts: bool) -> (Agent, Value) {
    let question = format!("Start {} {restarts}.", names as u8);
    script(engine, &question);
    let open = json!({"rollout_id": question});
    let mut agent = Agent::open(app, open.clone()).await;
    // The question is the same for all, so that the prompts can be compared.
    let mut input = vec![json!({"role": "user", "content": question})];
    let mut previous = Value::Null;
    for turn_number in 0..3 {
        let answer = turn(&agent, &input, &previous).await;
        let items = answer["output"].as_array().expect("a list").clone();
        if names == Names::Response {
            previous = answer["id"].clone();
            input.clear();
        }
        match names {
            Names::Nothing => input.extend(items.iter().cloned()),
            Names::Items => input.extend(items.iter().map(|item| json!({"type": "item_reference", "id": item["id"]}))),
            Names::Response => {}
        }
        for call in items.iter().filter(|item| item["type"] == "function_call") {
            input.push(json!({"type": "function_call_output", "call_id": call["call_id"], "output": "a file"}));
        }
        if restarts && turn_number == 0 {
            app.restart().await;
            let session = app.post("/sessions", open.clone()).await.expect(200);
            agent = Agent { http: app.http.clone(), session };
        }
    }
    let sent = engine.log().calls().last().expect("the engine was called").json();
    (agent, sent)
}

/// What the engine was sent, without what differs between conversations.
fn comparable(sent: &Value) -> Value {
    let mut messages = sent["messages"].clone();
    let list = messages.as_array_mut().expect("messages are sent");
    let mut ids: Vec<String> = Vec::new();
    for message in list.iter_mut() {
        if message["role"] == "user" {
            message["content"] = json!("question");
        }
        for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
            ids.push(text(&call["id"]).to_owned());
            call["id"] = json!(ids.len());
        }
        if let Some(id) = message["tool_call_id"].as_str() {
            let place = ids.iter().position(|known| known == id).expect("the call is there");
            message["tool_call_id"] = json!(place + 1);
        }
    }
    messages
}

on_both_stores! {
    /// What the engine is sent does not depend on how the agent tells of the conversation.
    async fn answers_that_a_call_names_are_those_that_were_recorded(app: TestApp) {
        let engine = app.engine.clone();
        let (_, whole) = converse(app, &engine, Names::Nothing, false).await;
        let expected = comparable(&whole);
        assert_eq!(expected.as_array().expect("a list").len(), 6, "{expected}");
        for names in [Names::Items, Names::Response] {
            for restarts in [false, true] {
                let (agent, sent) = converse(app, &engine, names, restarts).await;
                assert_eq!(comparable(&sent), expected);
                let ended = agent.finish(app, 1.0).await;
                assert_eq!(ended["assembly"]["calls"], 3, "{ended}");
            }
        }
    }

    async fn what_a_session_did_not_answer_is_not_found(app: TestApp) {
        let agent = Agent::open(app, json!({})).await;
        let other = Agent::open(app, json!({})).await;
        let body = json!({"model": "m", "input": "Hello."});
        let answer = success(other.call(Dialect::Responses, &body).await).await;
        let (response, item) = (text(&answer["id"]), text(&answer["output"][0]["id"]));
        let get = async |agent: &Agent, id: &str| -> Response {
            let request = agent.http.get(agent.url(&format!("/responses/{id}"))).bearer_auth(agent.key());
            request.send().await.expect("the listener answers")
        };
        let again = success(get(&other, response).await).await;
        assert_eq!(again, answer);
        for id in [response, "resp_1", "x"] {
            let (status, retry, body) = error(get(&agent, id).await).await;
            assert_eq!((status.as_u16(), retry), (404, Some(false)), "{body}");
            assert!(message(&body).contains(id), "{body}");
            let body = json!({"model": "m", "input": "Hello.", "previous_response_id": id});
            let (status, retry, body) = error(agent.call(Dialect::Responses, &body).await).await;
            assert_eq!((status.as_u16(), retry), (404, Some(false)), "{body}");
            assert!(message(&body).contains(id), "{body}");
        }
        for id in [item, "fc_1_0", "x"] {
            let input = json!([{"role": "user", "content": "Hello."}, {"type": "item_reference", "id": id}]);
            let body = json!({"model": "m", "input": input});
            let (status, _, body) = error(agent.call(Dialect::Responses, &body).await).await;
            assert_eq!(status.as_u16(), 404, "{body}");
            assert!(message(&body).contains(id), "{body}");
        }
        let refused = agent.http.get(agent.url(&format!("/responses/{response}"))).send().await;
        assert_eq!(refused.expect("the listener answers").status(), 401);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_call_names_takes_bytes_from_the_budget() {
    let config = "[limits]\nbody_bytes = 60_000\nbody_timeout_s = 1\n\n\
                  [sessions]\nlisten = \"127.0.0.1:0\"\ninflight_bytes = 65_536\n";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let agent = Agent::open(&app, json!({})).await;
    let long = json!({"model": "m", "input": "x".repeat(40_000)});
    let answer = success(agent.call(Dialect::Responses, &long).await).await;
    app.engine.switch(|switches| switches.stall = true);
    let held = tokio::spawn(agent.request(Dialect::Responses, &long).send());
    app.engine.wait(|log| log.stalled == 1).await;
    // The bytes of both bodies have room in the budget.
    let names = json!({"model": "m", "input": "Go on.", "previous_response_id": answer["id"]});
    let call = tokio::time::timeout(PATIENCE, agent.call(Dialect::Responses, &names)).await;
    let (status, retry, refused) = error(call.expect("it is refused and not sent to the engine")).await;
    assert_eq!((status.as_u16(), retry), (503, Some(true)), "{refused}");
    app.engine.switch(|switches| switches.stall = false);
    success(held.await.expect("the task goes on").expect("the listener answers")).await;
    success(agent.call(Dialect::Responses, &names).await).await;
    app.finish().await;
}

/// A store may take longer to find the answer than a client waits for a sign of life.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_answer_keeps_its_id_however_long_the_store_looks_for_it() {
    let app = TestApp::start_with(Backend::Postgres, "[sessions]\nlisten = \"127.0.0.1:0\"\nkeep_alive_s = 1\n").await;
    let agent = Agent::open(&app, json!({})).await;
    let other = Agent::open(&app, json!({})).await;
    let body = Dialect::Responses.body(&["Say anything.".to_owned()], true);
    let send = |count: u32| agent.request(Dialect::Responses, &body).header("x-stainless-retry-count", count).send();
    let first = send(0).await.expect("the listener answers").text().await.expect("the answer ends well");
    agent.lose_the_first_answer(&app).await;
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let mut holder = connection.begin().await.expect("a transaction begins");
    let lock = "LOCK TABLE session_call IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(lock).execute(&mut *holder).await.expect("nobody else has a lock");
    let repeat = tokio::spawn(send(1));
    let waiting = "SELECT COUNT(*) FROM pg_locks WHERE NOT granted AND relation = 'session_call'::regclass
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    eventually("the repeat waits", || async { app.read_value(waiting.to_owned()).await > 0 }).await;
    // A call that began later shows a sign of life.
    app.engine.switch(|switches| switches.stall = true);
    let mut response = other.call(Dialect::Responses, &body).await;
    response.chunk().await.expect("the connection holds").expect("a sign of life comes");
    app.engine.switch(|switches| switches.stall = false);
    holder.rollback().await.expect("the transaction ends");
    response.chunk().await.expect("the connection holds").expect("the answer comes");
    let again = repeat.await.expect("the call does not panic").expect("the listener answers");
    assert_eq!(again.text().await.expect("the answer ends well"), first);
    app.finish().await;
}

#[cfg(feature = "exact")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_whose_answers_are_named_is_one_segment() {
    use forebay_fake_engine::EngineKind;

    use super::exact;

    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let (mut app, _folder) = exact::start(Backend::Sqlite, &engine, "vllm").await;
    for names in [Names::Items, Names::Response] {
        for restarts in [false, true] {
            let (agent, _) = converse(&mut app, &engine, names, restarts).await;
            let ended = agent.finish(&app, 1.0).await;
            let counts = [&ended["assembly"]["segments"], &ended["assembly"]["breaks"]];
            assert_eq!(counts, [&json!(1), &json!(0)], "{ended}");
        }
    }
    app.finish().await;
}
