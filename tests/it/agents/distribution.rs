//! What an agent sends cannot change the distribution that a recorded call is sampled from.

use serde_json::{Value, json};

use super::{Agent, DIALECTS, Dialect, error, message, metric, success};
use crate::support::{Backend, TestApp};

/// The body of the engine's last call.
fn sent(app: &TestApp) -> Value {
    app.engine.log().calls().last().expect("the engine was called").json()
}

/// A function with `strict` in the shape of each dialect.
fn strict_tool(dialect: Dialect) -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    match dialect {
        Dialect::Chat => json!({"type": "function", "function": {"name": "f", "parameters": schema, "strict": true}}),
        Dialect::Messages => json!({"name": "f", "input_schema": schema, "strict": true}),
        Dialect::Responses => json!({"type": "function", "name": "f", "parameters": schema, "strict": true}),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_are_not_asked_to_enforce_the_schema_of_a_tool() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    for dialect in DIALECTS {
        let mut body = dialect.body(&["Call a tool.".to_owned()], false);
        body["tools"] = json!([strict_tool(dialect)]);
        success(agent.call(dialect, &body).await).await;
        let function = json!({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}});
        assert_eq!(sent(&app)["tools"], json!([{"type": "function", "function": function}]), "{dialect:?}");
    }
    assert_eq!(metric(&app, "forebay_agent_calls_constrained_total{policy=\"default\"}").await, None);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_that_change_the_distribution_are_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    let fields = [
        ("watermarking", json!(true)),
        ("thinking_token_budget", json!(5)),
        ("vllm_xargs", json!({"a": 1})),
        ("custom_params", json!({"a": 1})),
        ("top_n_sigma", json!(1)),
        ("dry_multiplier", json!(1)),
        ("xtc_probability", json!(0.5)),
        ("mirostat", json!(2)),
        ("min_new_tokens", json!(3)),
    ];
    for dialect in DIALECTS {
        for (field, value) in &fields {
            let mut body = dialect.body(&["Nobody.".to_owned()], false);
            body[field] = value.clone();
            let (status, retry, found) = error(agent.call(dialect, &body).await).await;
            assert_eq!((status.as_u16(), retry), (400, Some(false)), "{field}: {found}");
            assert!(message(&found).contains(field), "{found}");
        }
    }
    assert!(app.engine.log().calls().all(|call| !call.text.contains("Nobody.")), "nothing is sampled in vain");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_that_would_lose_ids_or_choose_a_worker_are_left_out() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    for dialect in DIALECTS {
        let mut body = dialect.body(&["Hello.".to_owned()], false);
        for (field, value) in
            [("include_reasoning", json!(false)), ("data_parallel_rank", json!(1)), ("seed", json!(7))]
        {
            body[field] = value;
        }
        success(agent.call(dialect, &body).await).await;
        let sent = sent(&app);
        assert_eq!([&sent["include_reasoning"], &sent["data_parallel_rank"], &sent["seed"]], [&Value::Null; 3]);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_model_is_asked_as_the_agent_asks() {
    let mut app = TestApp::start(Backend::Sqlite).await;
    let config = format!(
        "[sessions]\nlisten = \"127.0.0.1:0\"\n[[upstream]]\nname = \"frozen\"\nkind = \"openai\"\n\
         urls = [\"{url}\"]\nmodels = [\"judge\"]\n[[upstream]]\nname = \"trained\"\nkind = \"sglang\"\n\
         urls = [\"{url}\"]\n",
        url = app.engine.url()
    );
    app.reconfigure(&config).await;
    let models = json!({"judge": {"policy": null}, "*": {"policy": "default"}});
    let agent = Agent::open(&app, json!({"models": models})).await;
    let mut body = Dialect::Chat.body(&["Judge this.".to_owned()], false);
    body["model"] = "judge".into();
    body["presence_penalty"] = 0.5.into();
    body["seed"] = 7.into();
    body["tools"] = json!([strict_tool(Dialect::Chat)]);
    success(agent.call(Dialect::Chat, &body).await).await;
    let sent = sent(&app);
    for field in ["presence_penalty", "seed", "tools"] {
        assert_eq!(sent[field], body[field]);
    }
    let request = app.http.get(agent.url("/models")).bearer_auth(agent.key());
    let list = success(request.send().await.expect("the listener answers")).await;
    let names: Vec<&Value> = list["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["default", "judge"], "each name can be called");
    app.finish().await;
}
