//! Calls that succeed, and what becomes of them.

use forebay_fake_engine::Answer;
use serde_json::json;

use super::{Agent, DIALECTS, Dialect, answers, metric, success, trained};
use crate::support::{Backend, TestApp, on_both_stores, text};

on_both_stores! {
    async fn a_conversation_in_any_dialect_is_trained_exactly(app: TestApp) {
        for dialect in DIALECTS {
            for stream in [false, true] {
                let key = format!("{} {stream}", dialect.name());
                // A text that comes back as other ids than those that were sampled.
                let first = Answer::text("The tokens of this answer drift.").in_bytes();
                app.engine.script(&key, [first, Answer::text("Second."), Answer::text("Third.")]);
                let agent = Agent::open(app, json!({})).await;
                let conversation = agent.talk(dialect, stream, 3, &key).await;
                assert_eq!(conversation[1], "The tokens of this answer drift.");
                assert_eq!(conversation[5], "Third.");
                let before = app.engine.log().sampled_tokens;
                let ended = agent.finish(app, 1.0).await;
                assert_eq!(app.engine.log().sampled_tokens, before);
                let assembly = &ended["assembly"];
                let turns = agent.turns(app).await;
                assert!(turns.iter().all(|turn| turn["dialect"] == dialect.name() && turn["delivered"] == true));
                let sampled: u64 = turns.iter().map(|turn| turn["sampled_tokens"].as_u64().expect("a count")).sum();
                let (rows, count) = trained(app).await;
                // The first answer does not come back as it was sampled, so it is a segment of its own.
                assert_eq!(rows.len(), 2, "{assembly}");
                assert_eq!(count as u64, sampled, "every sampled token is trained");
            }
        }
    }

    async fn answers_say_when_their_rollout_will_be_too_old(app: TestApp) {
        app.rules("default", json!({"staleness": {"max": 1}})).await;
        let agent = Agent::open(app, json!({})).await;
        for (published, stream, left) in [(0, false, "2"), (1, true, "1"), (5, false, "0")] {
            if published > 0 {
                app.publish(published).await.expect(200);
            }
            let body = Dialect::Chat.body(&["Say anything.".to_owned()], stream);
            let response = agent.call(Dialect::Chat, &body).await;
            assert_eq!(response.headers()["forebay-stale-after-versions"], left, "at version {published}");
            response.text().await.expect("the answer ends well");
        }
        app.rules("default", json!({})).await;
        let body = Dialect::Chat.body(&["Say anything.".to_owned()], false);
        let response = agent.call(Dialect::Chat, &body).await;
        assert!(!response.headers().contains_key("forebay-stale-after-versions"), "without a bound");
    }

    async fn a_repeated_call_gets_its_recorded_answer_again(app: TestApp) {
        for dialect in DIALECTS {
            for stream in [false, true] {
                let agent = Agent::open(app, json!({})).await;
                let body = dialect.body(&["Say anything.".to_owned()], stream);
                let send = async |count: u32| {
                    let request = agent.request(dialect, &body).header("x-stainless-retry-count", count);
                    let response = request.send().await.expect("the listener answers");
                    assert_eq!(response.status(), 200);
                    response.text().await.expect("the answer ends well")
                };
                let first = send(0).await;
                agent.lose_the_first_answer(app).await;
                let calls = app.engine.log().calls().count();
                assert_eq!(send(1).await, first, "{dialect:?}");
                assert_eq!(app.engine.log().calls().count(), calls, "nothing is sampled again");
                if dialect == Dialect::Chat {
                    // The same bytes in another dialect are another call, here one that is refused.
                    let request = agent.http.post(agent.url("/responses")).bearer_auth(agent.key()).json(&body);
                    let request = request.header("x-stainless-retry-count", "1");
                    assert_eq!(request.send().await.expect("the listener answers").status(), 400);
                }
                // The same body without the count is a new call.
                app.engine.switch(|switches| switches.seed += 1);
                assert_ne!(send(0).await, first);
                assert_eq!(agent.turns(app).await.len(), 2);
            }
        }
    }

    async fn calls_go_on_after_a_restart(app: TestApp) {
        let mut agent = Agent::open(app, json!({})).await;
        let mut conversation = agent.talk(Dialect::Chat, false, 2, "Before the restart.").await;
        app.restart().await;
        // The listener has another address now, which the repeated request tells. The first key still works.
        let again = app.post("/sessions", json!({"rollout_id": agent.session["rollout_id"]})).await.expect(200);
        assert_eq!(again["session_id"], agent.session["session_id"]);
        agent.session["base_urls"] = again["base_urls"].clone();
        let body = Dialect::Chat.body(&conversation, false);
        conversation.push(Dialect::Chat.text(&success(agent.call(Dialect::Chat, &body).await).await));
        agent.finish(app, 1.0).await;
        let (rows, count) = trained(app).await;
        let sampled: u64 = agent.turns(app).await.iter().map(|turn| turn["sampled_tokens"].as_u64().expect("a count")).sum();
        assert_eq!((rows.len(), count as u64), (1, sampled), "one conversation without drift is one segment");
    }

    async fn calls_beyond_those_that_may_be_in_flight_wait_for_a_place(app: TestApp) {
        let agent = Agent::open(app, json!({})).await;
        let body = |index: usize| Dialect::Chat.body(&[format!("Question {index}.")], index.is_multiple_of(2));
        let bodies: Vec<_> = (0..40).map(body).collect();
        app.engine.switch(|switches| switches.stall = true);
        let calls = async { futures::future::join_all(bodies.iter().map(|body| agent.call(Dialect::Chat, body))).await };
        let refused = async {
            app.engine.wait(|log| log.stalled == 32).await;
            // A client that waits only shortly is told to come again.
            let request = agent.request(Dialect::Chat, &bodies[0]).header("x-stainless-read-timeout", "1");
            let response = request.send().await.expect("the listener answers");
            assert!(response.headers().contains_key("retry-after"));
            let refused = super::error(response).await;
            app.engine.switch(|switches| switches.stall = false);
            refused
        };
        let (answered, (status, retry, error)) = tokio::join!(calls, refused);
        assert_eq!((status.as_u16(), retry, &error["error"]["code"]), (503, Some(true), &json!("busy")));
        assert!(text(&error["error"]["message"]).contains("max_in_flight"), "{error}");
        for response in answered {
            assert_eq!(response.status(), 200);
            response.bytes().await.expect("the answer ends well");
        }
        agent.finish(app, 1.0).await;
        let (rows, _) = trained(app).await;
        assert_eq!(rows.len(), 40, "each question is a segment of its own");
        assert_eq!(rows[0]["status"], "completed", "no bound of the session was reached");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_replica_answers_the_calls_of_a_session() {
    let app = TestApp::start(Backend::Postgres).await;
    let mut other = app.replica().await;
    let agent = Agent::open(&app, json!({})).await;
    let mut conversation = vec!["Talk to both.".to_owned()];
    for turn in 0..6 {
        let replica = if turn % 2 == 0 { &app } else { &other };
        let body = Dialect::Chat.body(&conversation, false);
        let url = format!("http://{}/sessions/{}/v1/chat/completions", replica.agents, agent.id());
        let request = app.http.post(url).bearer_auth(agent.key()).json(&body);
        let answer = success(request.send().await.expect("the listener answers")).await;
        conversation.extend([Dialect::Chat.text(&answer), format!("Go on {turn}.")]);
    }
    // A repeated call is answered by the replica that did not record it.
    agent.lose_the_first_answer(&app).await;
    let body = Dialect::Chat.body(&conversation[..1], false);
    let url = format!("http://{}/sessions/{}/v1/chat/completions", other.agents, agent.id());
    let request = app.http.post(url).bearer_auth(agent.key()).header("x-stainless-retry-count", "1").json(&body);
    let again = success(request.send().await.expect("the listener answers")).await;
    assert_eq!(Dialect::Chat.text(&again), conversation[1]);
    let path = format!("/sessions/{}/finish", agent.id());
    let ended = other.post(&path, json!({"reward": 1.0})).await.expect(200);
    assert_eq!((&ended["assembly"]["calls"], &ended["assembly"]["segments"]), (&json!(6), &json!(1)));
    let (_, count) = trained(&app).await;
    assert_eq!(json!(count), ended["assembly"]["sampled_tokens"]);
    other.stop().await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_policys_sampling_replaces_the_agents() {
    let app = TestApp::start(Backend::Sqlite).await;
    let sampling = json!({"temperature": 0.7, "top_p": 1.0, "top_k": -1});
    let agent = Agent::open(&app, json!({"sampling": sampling})).await;
    let mut body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    body["temperature"] = 0.2.into();
    body["seed"] = 7.into();
    success(agent.call(Dialect::Chat, &body).await).await;
    let log = app.engine.log();
    let sent = log.received.last().expect("the engine was called").json();
    assert_eq!((&sent["temperature"], sent.get("seed")), (&json!(0.7), None));
    assert_eq!(sent.get("max_tokens"), None, "the engine's context is the bound");
    assert_eq!(
        log.received.last().expect("a call").headers.get("authorization"),
        None,
        "the agent's key is not sent on"
    );
    agent.finish(&app, 1.0).await;
    let batch = app.lease().await;
    for row in app.samples(&batch).await {
        super::check_row(&row, 0.7);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_policies_and_a_frozen_model_share_a_session() {
    let config = |url: &str| {
        format!(
            "auto_create = true\n[sessions]\nlisten = \"127.0.0.1:0\"\n[[upstream]]\nname = \"frozen\"\n\
             kind = \"openai\"\nurls = [\"{url}\"]\nmodels = [\"judge\"]\n[[upstream]]\nname = \"trained\"\n\
             kind = \"sglang\"\nurls = [\"{url}\"]\nmodel = \"policy-model\"\n"
        )
    };
    let mut app = TestApp::start(Backend::Sqlite).await;
    let config = config(app.engine.url());
    app.reconfigure(&config).await;
    let models = json!({"solver": {"policy": "solver"}, "critic": {"policy": "critic"}, "judge": {"policy": null}});
    let agent = Agent::open(&app, json!({"models": models})).await;
    for model in ["solver", "judge", "critic"] {
        let mut body = Dialect::Chat.body(&[format!("For {model}.")], false);
        body["model"] = model.into();
        body["temperature"] = 0.25.into();
        success(agent.call(Dialect::Chat, &body).await).await;
        let sent = app.engine.log().received.last().expect("the engine was called").json();
        let expected = if model == "judge" { ("frozen", 0.25) } else { ("policy-model", 1.0) };
        assert_eq!((text(&sent["model"]), sent["temperature"].as_f64()), (expected.0, Some(expected.1)));
    }
    let mut unknown = Dialect::Chat.body(&["For nobody.".to_owned()], false);
    unknown["model"] = "other".into();
    let (status, retry, error) = super::error(agent.call(Dialect::Chat, &unknown).await).await;
    assert_eq!((status.as_u16(), retry), (404, Some(false)), "{error}");
    let turns = agent.turns(&app).await;
    assert_eq!(turns.iter().map(|turn| text(&turn["policy"])).collect::<Vec<_>>(), ["solver", "critic"]);
    let ended = agent.finish(&app, 1.0).await;
    assert_eq!(ended["receipts"].as_array().map(Vec::len), Some(2), "{ended}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_cannot_carry_a_path_is_known_by_its_key() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    let base = format!("http://{}", app.agents);
    let body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    let request = app.http.post(format!("{base}/v1/chat/completions")).bearer_auth(agent.key()).json(&body);
    success(request.send().await.expect("the listener answers")).await;
    let mut message = Dialect::Messages.body(&["Hello.".to_owned()], false);
    message["max_tokens"] = 50.into();
    // A client that also sends a usual credential.
    let request = app.http.post(format!("{base}/v1/messages")).bearer_auth("sk-other").header("x-api-key", agent.key());
    success(request.json(&message).send().await.expect("the listener answers")).await;
    assert_eq!(agent.turns(&app).await.len(), 2);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sub_agents_are_labelled_by_their_headers() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    for label in ["", "explorer"] {
        let body = Dialect::Messages.body(&[format!("By {label}.")], true);
        let request = agent.request(Dialect::Messages, &body).header("x-claude-code-session-id", "s");
        let request = if label.is_empty() { request } else { request.header("x-claude-code-agent-id", label) };
        let response = request.send().await.expect("the listener answers");
        response.text().await.expect("the answer ends well");
    }
    let turns = agent.turns(&app).await;
    assert_eq!(turns.iter().map(|turn| text(&turn["agent"])).collect::<Vec<_>>(), ["main", "agent:explorer"]);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_calls_cost_is_counted() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.engine.script("Count", answers(&["One."]));
    let agent = Agent::open(&app, json!({})).await;
    agent.ask("Count this.").await;
    assert_eq!(metric(&app, "forebay_agent_calls_total{dialect=\"chat\",outcome=\"recorded\"}").await, Some(1.0));
    assert_eq!(metric(&app, "forebay_agent_call_added_seconds_count{dialect=\"chat\"}").await, Some(1.0));
    assert_eq!(metric(&app, "forebay_agent_calls_in_flight").await, Some(0.0));
    assert_eq!(metric(&app, "forebay_upstream_ready{upstream=\"fake\"}").await, Some(1.0));
    app.finish().await;
}
