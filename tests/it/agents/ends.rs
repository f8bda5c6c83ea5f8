//! Sessions that end, and what an agent may not do.

use std::time::Duration;

use serde_json::json;

use super::{Agent, DIALECTS, Dialect, error, message, trained};
use crate::support::{Backend, TestApp, on_both_stores, text};

/// Less than the time after which a call looks by itself whether its session has ended.
const CANCEL_PATIENCE: Duration = Duration::from_secs(20);

on_both_stores! {
    async fn the_calls_of_an_ended_session_are_refused_for_good(app: TestApp) {
        for end in ["finish", "abort", "expire"] {
            let agent = Agent::open(app, json!({})).await;
            agent.ask("Hello.").await;
            match end {
                "finish" => drop(agent.finish(app, 1.0).await),
                "abort" => {
                    let path = format!("/sessions/{}/abort", agent.id());
                    app.post(&path, json!({"reason": "given up"})).await.expect(200);
                }
                _ => app.pass_s(90_000.0).await,
            }
            for dialect in DIALECTS {
                for stream in [false, true] {
                    // A large body must be read, or the client would not see the answer.
                    let body = dialect.body(&["more ".repeat(200_000)], stream);
                    let (status, retry, body) = error(agent.call(dialect, &body).await).await;
                    assert_eq!((status.as_u16(), retry), (400, Some(false)), "{end} {dialect:?}: {body}");
                    assert!(message(&body).contains("closed"), "{body}");
                }
            }
        }
    }

    async fn a_finish_waits_for_calls_in_flight(app: TestApp) {
        let agent = Agent::open(app, json!({})).await;
        app.engine.switch(|switches| switches.stall = true);
        let body = Dialect::Chat.body(&["Slow.".to_owned()], false);
        let call = tokio::spawn(agent.request(Dialect::Chat, &body).send());
        app.engine.wait(|log| log.stalled == 1).await;
        let release = async {
            // The session is finishing once it refuses calls.
            let other = Dialect::Chat.body(&["Late.".to_owned()], false);
            crate::support::eventually("the refusal of a call", || async {
                let status = agent.request(Dialect::Chat, &other).timeout(super::PATIENCE).send();
                let waiting = tokio::time::timeout(std::time::Duration::from_millis(200), status).await;
                matches!(waiting, Ok(Ok(response)) if response.status() == 400)
            })
            .await;
            app.engine.switch(|switches| switches.stall = false);
        };
        let path = format!("/sessions/{}/finish", agent.id());
        let finish = app.post(&path, json!({"reward": 1.0, "wait_ms": 60_000}));
        let (ended, ()) = tokio::join!(finish, release);
        ended.expect(200);
        let response = call.await.expect("the task goes on").expect("the listener answers");
        assert_eq!(response.status(), 200);
        let (rows, _) = trained(app).await;
        assert!(!rows.is_empty());
    }

    async fn a_finish_that_does_not_wait_cancels_calls(app: TestApp) {
        let agent = Agent::open(app, json!({})).await;
        agent.ask("First.").await;
        app.engine.switch(|switches| switches.stall = true);
        let body = Dialect::Chat.body(&["Slow.".to_owned()], false);
        let call = tokio::spawn(agent.request(Dialect::Chat, &body).send());
        app.engine.wait(|log| log.stalled == 1).await;
        let path = format!("/sessions/{}/finish", agent.id());
        app.post(&path, json!({"reward": 1.0, "wait_ms": 0})).await.expect(200);
        // A call also looks from time to time whether its session has ended, but not so often.
        let answered = tokio::time::timeout(CANCEL_PATIENCE, call).await.expect("the finish cancels the call");
        let response = answered.expect("the task goes on").expect("the listener answers");
        let (status, retry, _) = error(response).await;
        assert_eq!((status.as_u16(), retry), (400, Some(false)));
        app.engine.wait(|log| log.abandoned == 1).await;
        app.engine.switch(|switches| switches.stall = false);
        assert_eq!(agent.turns(app).await.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_can_do_nothing_but_call_its_own_session() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.key(forebay_wire::Role::Admin, &["*"]).await;
    let admin = app.key(forebay_wire::Role::Admin, &["*"]).await;
    let open = async || {
        let session = app.post_as(&admin, "/sessions", json!({})).await.expect(201);
        Agent { http: app.http.clone(), session }
    };
    let (agent, other) = (open().await, open().await);
    for path in ["", "/turns"] {
        app.get_as(agent.key(), &format!("/sessions/{}{path}", agent.id())).await.refused(401, "unauthorized");
    }
    for (path, body) in [("finish", json!({"reward": 1.0})), ("abort", json!({"reason": "x"}))] {
        let path = format!("/sessions/{}/{path}", agent.id());
        app.post_as(agent.key(), &path, body.clone()).await.refused(401, "unauthorized");
        // The routes do not exist on the listener of agents.
        let request = app.http.post(format!("http://{}{path}", app.agents)).bearer_auth(agent.key()).json(&body);
        assert_eq!(request.send().await.expect("the listener answers").status(), 404);
    }
    for dialect in DIALECTS {
        let body = dialect.body(&["Hello.".to_owned()], false);
        for key in [other.key(), "fbs_0", "", admin.as_str()] {
            let request = app.http.post(agent.url(dialect.path())).bearer_auth(key).json(&body);
            let (status, retry, _) = error(request.send().await.expect("the listener answers")).await;
            assert_eq!((status.as_u16(), retry), (401, Some(false)), "{key}");
        }
    }
    assert_eq!(app.engine.log().calls().filter(|call| call.text.contains("Hello.")).count(), 0);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_call_that_a_session_may_have_can_be_repeated() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({"max_calls": 1})).await;
    let body = Dialect::Chat.body(&["Only.".to_owned()], false);
    let send = async |count: u32| {
        let request = agent.request(Dialect::Chat, &body).header("x-stainless-retry-count", count);
        super::success(request.send().await.expect("the listener answers")).await
    };
    let first = send(0).await;
    agent.lose_the_first_answer(&app).await;
    assert_eq!(send(1).await, first);
    agent.finish(&app, 1.0).await;
    let (rows, _) = trained(&app).await;
    assert_eq!(rows[0]["status"], "completed", "no call was refused");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_whose_calls_fail_is_not_idle() {
    let config = "[sessions]\nlisten = \"127.0.0.1:0\"\nhold_s = 1\n";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let agent = Agent::open(&app, json!({"idle_s": 10})).await;
    for _ in 0..3 {
        app.clock.advance_s(9.0);
        app.engine.switch(|switches| switches.failures = Some((1, 500, "out of memory".to_owned())));
        let (status, _, _) =
            error(agent.call(Dialect::Chat, &Dialect::Chat.body(&["Fail.".to_owned()], false)).await).await;
        assert_eq!(status, 502);
        let is_kept = || async {
            let session = app.get(&format!("/sessions/{}", agent.id())).await.expect(200);
            text(&session["due_at"]) > app.buffer.now().plus_seconds(9).to_string().as_str()
        };
        crate::support::eventually("more time for the session", is_kept).await;
        app.buffer.sweep().await.expect("the store can be swept");
    }
    agent.ask("It is still open.").await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_full_tells_its_agent_to_end() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({"max_calls": 1})).await;
    agent.ask("First.").await;
    for dialect in DIALECTS {
        let (status, retry, body) =
            error(agent.call(dialect, &dialect.body(&["Second.".to_owned()], true)).await).await;
        assert_eq!((status.as_u16(), retry), (400, Some(false)), "{body}");
        if dialect == Dialect::Messages {
            assert!(text(&body["error"]["message"]).starts_with("prompt is too long"), "{body}");
        } else {
            assert_eq!(body["error"]["code"], "context_length_exceeded");
        }
    }
    let ended = agent.finish(&app, 1.0).await;
    assert_eq!(ended["state"], "finished");
    let (rows, _) = trained(&app).await;
    assert_eq!(rows[0]["status"], "truncated");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_without_room_for_tokens_names_the_setting() {
    let config = "[limits]\ntrajectory_tokens = 60\n[sessions]\nlisten = \"127.0.0.1:0\"\n";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let agent = Agent::open(&app, json!({})).await;
    app.engine.script("First", super::answers(&["Yes."]));
    agent.ask("First.").await;
    let long = "A question that needs many tokens. ".repeat(20);
    let response = agent.call(Dialect::Chat, &Dialect::Chat.body(&[long], false)).await;
    let (status, retry, body) = error(response).await;
    assert_eq!((status.as_u16(), retry, &body["error"]["code"]), (400, Some(false), &json!("context_length_exceeded")));
    assert!(text(&body["error"]["message"]).contains("limits.trajectory_tokens"), "{body}");
    agent.finish(&app, 1.0).await;
    let (rows, _) = trained(&app).await;
    assert_eq!(rows[0]["status"], "truncated");
    app.finish().await;
}
