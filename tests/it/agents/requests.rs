//! Requests that are no calls, and calls that are wrong.

use reqwest::Method;
use serde_json::json;

use super::{Agent, DIALECTS, Dialect, PATIENCE, error, message, success};
use crate::support::{Backend, TestApp, text};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_address_of_a_session_answers_probes() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    let anthropic = agent.session["base_urls"]["anthropic"].as_str().expect("an address");
    assert_eq!(format!("{anthropic}/v1"), agent.url(""));
    for url in [anthropic.to_owned(), format!("http://{}/", app.agents)] {
        assert_eq!(app.http.head(&url).send().await.expect("the listener answers").status(), 200);
        assert_eq!(app.http.get(&url).send().await.expect("the listener answers").status(), 200);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_and_token_counts_are_answered_without_the_engine() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({"models": {"m": {"policy": "default"}}})).await;
    let before = app.engine.log().received.len();
    let request = app.http.get(agent.url("/models")).bearer_auth(agent.key());
    let list = success(request.send().await.expect("the listener answers")).await;
    assert_eq!(list["data"][0]["id"], "m");
    let request = app.http.get(agent.url("/models")).header("x-api-key", agent.key());
    let request = request.header("anthropic-version", "2023-06-01");
    let list = success(request.send().await.expect("the listener answers")).await;
    assert_eq!((&list["data"][0]["type"], &list["has_more"]), (&json!("model"), &json!(false)));
    let body = Dialect::Messages.body(&["Count these tokens.".to_owned()], false);
    let request = app.http.post(agent.url("/messages/count_tokens")).header("x-api-key", agent.key()).json(&body);
    let count = success(request.send().await.expect("the listener answers")).await;
    assert!(count["input_tokens"].as_u64().expect("a count") > 0);
    assert_eq!(app.engine.log().received.len(), before);
    let refused = app.http.get(agent.url("/models")).send().await.expect("the listener answers");
    assert_eq!(refused.status(), 401);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_calls_are_refused_in_the_words_of_their_dialect() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    for dialect in DIALECTS {
        let mut wrong = dialect.body(&["Hello.".to_owned()], false);
        wrong["presence_penalty"] = 1.into();
        let (status, retry, body) = error(agent.call(dialect, &wrong).await).await;
        assert_eq!((status.as_u16(), retry), (400, Some(false)), "{body}");
        assert!(message(&body).contains("presence_penalty"), "{body}");
        if dialect == Dialect::Messages {
            assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
        } else {
            assert_eq!(body["error"]["param"], "presence_penalty");
        }
    }
    for model in [String::new(), "m".repeat(300), "a\nb".to_owned()] {
        let mut body = Dialect::Chat.body(&["Nobody.".to_owned()], false);
        body["model"] = model.into();
        let (status, retry, body) = error(agent.call(Dialect::Chat, &body).await).await;
        assert_eq!((status.as_u16(), retry, &body["error"]["param"]), (400, Some(false), &json!("model")));
    }
    assert!(app.engine.log().calls().all(|call| !call.text.contains("Nobody.")), "nothing is sampled in vain");
    let text = "{\"model\": \"m\", \"messages\": [";
    let request = app.http.post(agent.url("/chat/completions")).bearer_auth(agent.key()).body(text);
    let (status, _, _) = error(request.send().await.expect("the listener answers")).await;
    assert_eq!(status, 400);
    let request = app.http.post(agent.url("/embeddings")).bearer_auth(agent.key()).body(text);
    let (status, retry, _) = error(request.send().await.expect("the listener answers")).await;
    assert_eq!((status.as_u16(), retry), (404, Some(false)));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compressed_body_is_refused_with_the_reason() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    for dialect in DIALECTS {
        let body = dialect.body(&["Hello.".to_owned()], false);
        let send = async |coding: &str| {
            let request = agent.request(dialect, &body).header("content-encoding", coding);
            request.send().await.expect("the listener answers")
        };
        let (status, retry, refused) = error(send("gzip").await).await;
        assert_eq!((status.as_u16(), retry), (422, Some(false)), "{refused}");
        assert!(message(&refused).contains("Content-Encoding"), "{refused}");
        success(send("identity").await).await;
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_are_bounded_one_by_one_and_together() {
    let config = "[limits]\nbody_bytes = 60_000\nbody_timeout_s = 1\n\n\
                  [sessions]\nlisten = \"127.0.0.1:0\"\ninflight_bytes = 65_536\n";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let agent = Agent::open(&app, json!({})).await;
    let body = |bytes: usize| Dialect::Chat.body(&["x".repeat(bytes)], false);
    let (status, retry, _) = error(agent.call(Dialect::Chat, &body(70_000)).await).await;
    assert_eq!((status.as_u16(), retry), (413, Some(false)));
    app.engine.switch(|switches| switches.stall = true);
    let held = tokio::spawn(agent.request(Dialect::Chat, &body(40_000)).send());
    app.engine.wait(|log| log.stalled == 1).await;
    // The other call holds most of the budget, so these wait, as long as a body may take to arrive. A small one does not.
    for dialect in DIALECTS {
        let request = agent.request(dialect, &dialect.body(&["x".repeat(40_000)], false)).timeout(super::PATIENCE);
        let (status, retry, body) = error(request.send().await.expect("the listener answers")).await;
        assert_eq!((status.as_u16(), retry), (503, Some(true)), "{body}");
    }
    let small = tokio::spawn(agent.request(Dialect::Chat, &body(1_000)).send());
    app.engine.wait(|log| log.stalled == 2).await;
    app.engine.switch(|switches| switches.stall = false);
    let again = tokio::spawn(agent.request(Dialect::Chat, &body(40_000)).send());
    for call in [held, small, again] {
        let response = call.await.expect("the task goes on").expect("the listener answers");
        assert_eq!(response.status(), 200);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_values_of_a_body_take_bytes_from_the_budget() {
    let config = "[limits]\nbody_bytes = 60_000\nbody_timeout_s = 1\n\n\
                  [sessions]\nlisten = \"127.0.0.1:0\"\ninflight_bytes = 65_536\n";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let agent = Agent::open(&app, json!({})).await;
    let mut dense = Dialect::Chat.body(&["Hello.".to_owned()], false);
    let schema = json!({"enum": (0..1_200).collect::<Vec<_>>()});
    dense["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": schema}}]);
    app.engine.switch(|switches| switches.stall = true);
    let held = tokio::spawn(agent.request(Dialect::Chat, &dense).send());
    app.engine.wait(|log| log.stalled == 1).await;
    // The bytes of both bodies have room in the budget.
    let body = Dialect::Chat.body(&["x".repeat(20_000)], false);
    let call = tokio::time::timeout(PATIENCE, agent.call(Dialect::Chat, &body)).await;
    let (status, retry, refused) = error(call.expect("it is refused and not sent to the engine")).await;
    assert_eq!((status.as_u16(), retry), (503, Some(true)), "{refused}");
    app.engine.switch(|switches| switches.stall = false);
    let response = held.await.expect("the task goes on").expect("the listener answers");
    assert_eq!(response.status(), 200);
    success(agent.call(Dialect::Chat, &body).await).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_with_too_many_values_is_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    for (dialect, list) in DIALECTS.into_iter().zip(["messages", "messages", "input"]) {
        let mut body = dialect.body(&["Hello.".to_owned()], false);
        body[list] = vec![json!({"role": "user", "content": ""}); 100_000].into();
        let (status, retry, refused) = error(agent.call(dialect, &body).await).await;
        assert_eq!((status.as_u16(), retry), (400, Some(false)), "{refused}");
        assert!(message(&refused).contains("fewer messages"), "{refused}");
    }
    agent.ask("Hello.").await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_of_a_session_opens_nothing_on_the_main_listener() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    agent.ask("Hello.").await;
    let path = format!("/sessions/{}/finish", agent.id());
    let problem = app.post_as(agent.key(), &path, json!({"reward": 9.0})).await.refused(401, "unauthorized");
    assert!(text(&problem["detail"]).contains("sessions.listen"), "{problem}");
    app.get_as(agent.key(), &format!("/sessions/{}", agent.id())).await.refused(401, "unauthorized");
    assert_eq!(app.get(&format!("/sessions/{}", agent.id())).await.expect(200)["state"], "open");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_needs_an_engine_that_serves_its_policy() {
    let mut app = TestApp::start(Backend::Sqlite).await;
    let url = app.engine.url().to_owned();
    let config = format!(
        "[sessions]\nlisten = \"127.0.0.1:0\"\n[[upstream]]\nname = \"one\"\nkind = \"vllm\"\nurls = [\"{url}\"]\n\
         policies = [\"math.*\"]\n"
    );
    app.reconfigure(&config).await;
    assert_eq!(app.post("/sessions", json!({})).await.pointers(422), ["/policy"]);
    let models = json!({"a/b": {"policy": "default"}});
    assert_eq!(app.post("/sessions", json!({"models": models})).await.pointers(422), ["/models/a~1b"]);
    let models = json!({"s": {"policy": "math.solver"}, "judge": {"policy": null}});
    app.rules("math.solver", json!({})).await;
    assert_eq!(app.post("/sessions", json!({"models": models})).await.pointers(422), ["/models/judge"]);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_answered_with_the_context_of_its_engine() {
    let app = TestApp::start(Backend::Sqlite).await;
    let models = json!({"org/m": {"policy": "default"}, "judge": {"policy": null}});
    let agent = Agent::open(&app, json!({"models": models})).await;
    let get = async |path: &str, key: &str| {
        let request = app.http.get(agent.url(path)).bearer_auth(key);
        request.send().await.expect("the listener answers")
    };
    let model = success(get("/models/org/m", agent.key()).await).await;
    assert_eq!((&model["id"], &model["object"]), (&json!("org/m"), &json!("model")));
    let list = success(get("/models", agent.key()).await).await;
    assert!(list["data"].as_array().expect("a list").contains(&model), "{list}");
    let (status, retry, body) = error(get("/models/other", agent.key()).await).await;
    assert_eq!((status.as_u16(), retry), (404, Some(false)));
    assert!(message(&body).contains("other"), "{body}");
    assert_eq!(get("/models/org/m", "x").await.status(), 401);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_may_end_with_a_slash() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    for dialect in DIALECTS {
        let body = dialect.body(&["Hello.".to_owned()], false);
        let request = app.http.post(agent.url(&format!("{}/", dialect.path()))).json(&body);
        let answer = success(request.bearer_auth(agent.key()).send().await.expect("the listener answers")).await;
        assert!(!dialect.text(&answer).is_empty());
    }
    for path in ["/models/", "/models"] {
        let request = app.http.get(agent.url(path)).bearer_auth(agent.key());
        success(request.send().await.expect("the listener answers")).await;
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_pages_of_allowed_origins_may_call() {
    let config = "[sessions]\nlisten = \"127.0.0.1:0\"\nallowed_origins = [\"http://localhost:3000\"]\n";
    for (config, origin, allowed) in [
        (config, "http://localhost:3000", Some("http://localhost:3000")),
        (config, "http://localhost:3001", None),
        ("", "http://localhost:3000", None),
    ] {
        let app = TestApp::start_with(Backend::Sqlite, config).await;
        let agent = Agent::open(&app, json!({})).await;
        let preflight = app.http.request(Method::OPTIONS, agent.url("/chat/completions")).header("origin", origin);
        let preflight = preflight
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type");
        let call = agent.request(Dialect::Chat, &Dialect::Chat.body(&["Hello.".to_owned()], false));
        for (request, is_preflight) in [(preflight, true), (call.header("origin", origin), false)] {
            let response = request.send().await.expect("the listener answers");
            let header = |name: &str| response.headers().get(name).map(|value| value.to_str().expect("a text"));
            assert_eq!(header("access-control-allow-origin"), allowed);
            if is_preflight && allowed.is_some() {
                assert_eq!(response.status(), 200);
                assert_eq!(header("access-control-allow-headers"), Some("authorization,content-type"));
            }
        }
        app.finish().await;
    }
}
