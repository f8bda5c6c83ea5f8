//! System messages behind the first message, for a model whose chat template takes only one.

use forebay_fake_engine::{Answer, EngineKind, FakeEngine, tokenizer::decode};
use serde_json::{Value, json};

use super::{Agent, DIALECTS, Dialect, error, message, success, trained};
use crate::support::{Backend, TestApp};

/// What templates of Qwen 3.5 and later do.
#[cfg(feature = "exact")]
const STRICT: &str = "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}\
                      {{- raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}";

/// A service with an engine of the mode observe whose template takes one system message.
async fn observe(engine: &FakeEngine, keys: &str) -> TestApp {
    engine.switch(|switches| switches.one_system = true);
    let config = format!("[[upstream]]\nname = \"fake\"\nkind = \"vllm\"\nurls = [\"{}\"]\n{keys}", engine.url());
    TestApp::start_with(Backend::Sqlite, &config).await
}

/// The same for the mode exact, with the folder of its model.
#[cfg(feature = "exact")]
async fn exact(engine: &FakeEngine, kind: &str) -> (TestApp, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    FakeEngine::write_model(folder.path()).expect("the folder can be written to");
    let template = folder.path().join("chat_template.jinja");
    let text = std::fs::read_to_string(&template).expect("the model has a template");
    std::fs::write(&template, format!("{STRICT}{text}")).expect("the folder can be written to");
    engine.switch(|switches| switches.one_system = true);
    let keys = format!("template = \"{}\"", template.display());
    super::exact::start_with(Backend::Sqlite, engine, kind, &keys).await
}

/// A call with system messages at the beginning and behind the question, which these messages follow.
fn body(dialect: Dialect, question: &str, rest: &[Value]) -> Value {
    let said = |role: &str, content: &str| json!({"role": role, "content": content});
    let question = said("user", question);
    let mut messages = match dialect {
        Dialect::Chat => vec![said("system", "One."), said("developer", "Two."), question, said("system", "Later.")],
        Dialect::Messages => vec![question, said("system", "Later.")],
        Dialect::Responses => vec![said("developer", "Two."), question, said("developer", "Later.")],
    };
    messages.extend_from_slice(rest);
    match dialect {
        Dialect::Chat => json!({"model": "m", "messages": messages}),
        Dialect::Messages => json!({"model": "m", "max_tokens": 100, "system": "One.", "messages": messages}),
        Dialect::Responses => json!({"model": "m", "instructions": "One.", "input": messages}),
    }
}

/// Two calls of each dialect are one segment, whose prompt has each message once.
async fn converse(app: &TestApp, engine: &FakeEngine) {
    for dialect in DIALECTS {
        let question = format!("Start {}.", dialect.name());
        engine.script(&question, ["Yes.", "No."].map(Answer::text));
        let agent = Agent::open(app, json!({})).await;
        let first = success(agent.call(dialect, &body(dialect, &question, &[])).await).await;
        let rest = [
            json!({"role": "assistant", "content": dialect.text(&first)}),
            json!({"role": "user", "content": "Go on."}),
        ];
        success(agent.call(dialect, &body(dialect, &question, &rest)).await).await;
        let ended = agent.finish(app, 1.0).await;
        assert_eq!((&ended["assembly"]["calls"], &ended["assembly"]["segments"]), (&json!(2), &json!(1)), "{ended}");
        let (rows, _) = trained(app).await;
        let ids: Vec<i32> = serde_json::from_value(rows[0]["tokens"].clone()).expect("a row has ids");
        let head = if dialect == Dialect::Messages { "One." } else { "One.\n\nTwo." };
        let beginning = format!(
            "<|im_start|>system\n{head}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>user\nLater.<|im_end|>\n"
        );
        let text = decode(&ids);
        assert!(text.starts_with(&beginning), "{dialect:?}: {text}");
        assert_eq!(text.matches("<|im_start|>system").count(), 1, "{dialect:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_takes_one_system_message_gets_later_ones_as_the_users() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let app = observe(&engine, "").await;
    converse(&app, &engine).await;
    app.finish().await;
}

#[cfg(feature = "exact")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_template_that_takes_one_system_message_gets_later_ones_as_the_users() {
    for (kind, name) in [(EngineKind::Sglang, "sglang"), (EngineKind::Vllm, "vllm")] {
        let engine = FakeEngine::start(kind).await;
        let (app, _folder) = exact(&engine, name).await;
        converse(&app, &engine).await;
        app.finish().await;
    }
}

/// Instructions belong to one request, and the message that they were merged with belongs to the conversation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_named_conversation_keeps_the_system_messages_behind_other_instructions() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let app = observe(&engine, "later_system = \"user\"").await;
    let agent = Agent::open(&app, json!({})).await;
    let said = |role: &str, content: &str| json!({"role": role, "content": content});
    let mut previous = Value::Null;
    let mut input = vec![said("developer", "Two."), said("user", "Start.")];
    for (instructions, expected) in
        [(Some("One."), "One.\n\nTwo."), (Some("Other."), "Other.\n\nTwo."), (None, "Two."), (None, "Two.")]
    {
        let body =
            json!({"model": "m", "instructions": instructions, "input": input, "previous_response_id": previous});
        let answer = success(agent.call(Dialect::Responses, &body).await).await;
        let sent = engine.log().calls().last().expect("the engine was called").json();
        let messages = sent["messages"].as_array().expect("messages are sent");
        assert_eq!(messages[0], said("system", expected));
        assert_eq!(messages[1], said("user", "Start."));
        previous = answer["id"].clone();
        input = vec![said("user", "Go on.")];
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_configuration_says_what_becomes_of_later_system_messages() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let app = observe(&engine, "later_system = \"keep\"").await;
    let agent = Agent::open(&app, json!({})).await;
    let (status, retry, refused) = error(agent.call(Dialect::Chat, &body(Dialect::Chat, "Start.", &[])).await).await;
    assert_eq!((status.as_u16(), retry), (400, Some(false)), "{refused}");
    assert!(message(&refused).contains("was refused by the engine"), "{refused}");
    app.finish().await;
    let app = TestApp::start_with(
        Backend::Sqlite,
        &format!(
            "[[upstream]]\nname = \"fake\"\nkind = \"vllm\"\nurls = [\"{}\"]\nlater_system = \"user\"",
            engine.url()
        ),
    )
    .await;
    engine.switch(|switches| switches.one_system = false);
    converse(&app, &engine).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_takes_all_system_messages_gets_them_as_they_are() {
    let app = TestApp::start(Backend::Sqlite).await;
    let agent = Agent::open(&app, json!({})).await;
    success(agent.call(Dialect::Chat, &body(Dialect::Chat, "Start.", &[])).await).await;
    let sent = app.engine.log().calls().last().expect("the engine was called").json();
    let roles: Vec<&Value> = sent["messages"].as_array().expect("a list").iter().map(|sent| &sent["role"]).collect();
    assert_eq!(roles, ["system", "system", "user", "system"]);
    app.finish().await;
}
