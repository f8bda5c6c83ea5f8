//! What stands in messages of agents besides whole texts: halves of emojis, images, references to tools.

use forebay_fake_engine::{EngineKind, FakeEngine};
use serde_json::{Value, json};

use super::{Agent, DIALECTS, Dialect, error, message, success, trained};
use crate::support::{Backend, TestApp, text};

/// The names of the warnings in the only receipt.
fn warnings(ended: &Value) -> Vec<&str> {
    let found = ended["receipts"][0]["warnings"].as_array().expect("a receipt has warnings");
    found.iter().map(|warning| text(warning).split(':').next().expect("a name stands first")).collect()
}

/// A call whose only message has an emoji that is cut in the middle.
fn cut(agent: &Agent, dialect: Dialect) -> reqwest::RequestBuilder {
    let body = dialect.body(&["cut emoji HALF".to_owned()], false).to_string().replace("HALF", "\\ud83d");
    agent.request(dialect, &json!({})).body(body)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_an_emoji_is_replaced_and_the_receipt_says_so() {
    for backend in [Backend::Sqlite, Backend::Postgres] {
        let app = TestApp::start(backend).await;
        for dialect in DIALECTS {
            let agent = Agent::open(&app, json!({})).await;
            for _ in 0..2 {
                success(cut(&agent, dialect).send().await.expect("the listener answers")).await;
                let sent = app.engine.log().calls().last().expect("the engine was called").json();
                assert_eq!(sent["messages"][0]["content"], "cut emoji \u{fffd}", "{dialect:?}");
            }
            let ended = agent.finish(&app, 1.0).await;
            assert_eq!(warnings(&ended), ["lone-surrogates"], "{dialect:?}: {ended}");
            trained(&app).await;
        }
        let agent = Agent::open(&app, json!({})).await;
        agent.ask("A whole emoji \u{1f642}.").await;
        assert_eq!(warnings(&agent.finish(&app, 1.0).await), [""; 0]);
        app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_an_emoji_is_refused_by_name_if_the_configuration_says_so() {
    let app = TestApp::start_with(Backend::Sqlite, "[text]\nlone_surrogates = \"refuse\"\n").await;
    let agent = Agent::open(&app, json!({})).await;
    for dialect in DIALECTS {
        let (status, retry, refused) = error(cut(&agent, dialect).send().await.expect("the listener answers")).await;
        assert_eq!((status.as_u16(), retry), (400, Some(false)), "{refused}");
        assert!(message(&refused).contains("[0].content: contains half of a surrogate pair"), "{refused}");
    }
    app.finish().await;
}

/// A call with an image behind a text.
fn seeing(dialect: Dialect) -> Value {
    let url = "data:image/png;base64,AAAA";
    let mut body = dialect.body(&["Look.".to_owned()], false);
    let (list, kind, image) = match dialect {
        Dialect::Chat => ("messages", "text", json!({"type": "image_url", "image_url": {"url": url}})),
        Dialect::Messages => {
            let source = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
            ("messages", "text", json!({"type": "image", "source": source}))
        }
        Dialect::Responses => ("input", "input_text", json!({"type": "input_image", "image_url": url})),
    };
    body[list][0]["content"] = json!([{"type": kind, "text": "Look."}, image]);
    body
}

/// A policy that masks rollouts that were aborted.
async fn mask_aborted(app: &TestApp) {
    let filter = json!([{"name": "cut", "scope": "rollout", "when": "status == \"aborted\"", "action": "mask"}]);
    app.rules("default", json!({"filter": filter})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_that_met_an_image_is_aborted_unless_the_program_says_otherwise() {
    for backend in [Backend::Sqlite, Backend::Postgres] {
        let app = TestApp::start(backend).await;
        mask_aborted(&app).await;
        for dialect in DIALECTS {
            for (status, verdict) in [(None, "masked"), (Some("completed"), "kept")] {
                let agent = Agent::open(&app, json!({})).await;
                agent.ask("Hello.").await;
                let (code, retry, refused) = error(agent.call(dialect, &seeing(dialect)).await).await;
                assert_eq!((code.as_u16(), retry), (422, Some(false)), "{refused}");
                assert!(message(&refused).contains("content[1]") && message(&refused).contains("images = \"text\""));
                let request = json!({"reward": 0.0, "status": status});
                let ended = app.post(&format!("/sessions/{}/finish", agent.id()), request).await.expect(200);
                assert_eq!(warnings(&ended), ["unsupported-part"], "{dialect:?}: {ended}");
                assert_eq!(ended["receipts"][0]["verdict"], verdict, "{dialect:?}: {ended}");
            }
        }
        // Without a recorded call there is a rollout, too.
        let agent = Agent::open(&app, json!({})).await;
        error(agent.call(Dialect::Chat, &seeing(Dialect::Chat)).await).await;
        assert_eq!(warnings(&agent.finish(&app, 0.0).await), ["unsupported-part"]);
        app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_stands_for_an_image_if_the_upstream_says_so() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let config =
        format!("[[upstream]]\nname = \"fake\"\nkind = \"vllm\"\nurls = [\"{}\"]\nimages = \"text\"\n", engine.url());
    let app = TestApp::start_with(Backend::Sqlite, &config).await;
    mask_aborted(&app).await;
    for dialect in DIALECTS {
        let agent = Agent::open(&app, json!({})).await;
        success(agent.call(dialect, &seeing(dialect)).await).await;
        let sent = engine.log().calls().last().expect("the engine was called").text.clone();
        assert!(sent.contains("[There is an image here, which you cannot see.]") && !sent.contains("AAAA"), "{sent}");
        let ended = agent.finish(&app, 1.0).await;
        assert_eq!(warnings(&ended), ["images-replaced"], "{dialect:?}: {ended}");
        assert_eq!(ended["receipts"][0]["verdict"], "kept", "{dialect:?}: {ended}");
        trained(&app).await;
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reference_to_a_tool_is_a_text_for_the_model() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    let search = json!({"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {}});
    let found = json!({"type": "tool_reference", "tool_name": "mcp__calc__secret"});
    let result = json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]});
    let messages = json!([
        {"role": "user", "content": "Start."}, {"role": "assistant", "content": [search]}, {"role": "user", "content": [result]},
    ]);
    success(agent.call(Dialect::Messages, &json!({"model": "m", "max_tokens": 10, "messages": messages})).await).await;
    let sent = app.engine.log().calls().last().expect("the engine was called").json();
    assert_eq!(sent["messages"][2]["content"], "The tool mcp__calc__secret is available.");
    assert_eq!(warnings(&agent.finish(&app, 1.0).await), [""; 0]);
    app.finish().await;
}
