//! Readers of samples share a budget of bytes: they wait for each other, and all of them finish.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Backend, TestApp, rollout, text, with};

/// A budget that the page of one reader uses completely.
const TIGHT: &str = "[limits]\nbody_bytes = 1048576\ninflight_bytes = 67108864\nsamples_bytes = 4194304";

/// The same for pages of small rollouts.
const TIGHTER: &str = "[limits]\nbody_bytes = 131072\ninflight_bytes = 67108864\nsamples_bytes = 524288";

/// The path of samples of many small rollouts, which fill three pages.
async fn three_pages(app: &TestApp) -> String {
    app.rules("default", json!({"batch": {"groups": 600}})).await;
    for slice in 0..6 {
        let bundle: Vec<Value> = (0..100).map(|index| rollout(&format!("r{slice}{index:02}"), 1.0)).collect();
        app.accept(bundle.into()).await;
    }
    text(&app.lease().await["samples_url"]).to_owned()
}

/// The path of samples of eight rollouts of nearly a megabyte each.
async fn much_to_read(app: &TestApp) -> String {
    app.rules("default", json!({"batch": {"groups": 8}})).await;
    let messages = json!([{"role": "user", "content": "x".repeat(900_000)}]);
    for index in 0..8 {
        app.accept(with(rollout(&format!("r{index}"), 1.0), json!({"messages": messages}))).await;
    }
    text(&app.lease().await["samples_url"]).to_owned()
}

async fn read(app: &TestApp, path: &str, accept: &str) -> Vec<u8> {
    let request = app.http.get(format!("{}{path}", app.url)).header("accept", accept);
    let answer = request.send().await.expect("the server answers");
    assert_eq!(answer.status(), 200);
    answer.bytes().await.expect("the stream ends well").into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_pages_that_take_the_whole_budget_take_turns() {
    let app = TestApp::start_with(Backend::Sqlite, TIGHTER).await;
    let path = three_pages(&app).await;
    let forms = ["application/x-ndjson", "application/json", forebay_wire::ARROW_STREAM];
    let expected: Vec<usize> = futures::future::join_all(forms.iter().map(|form| read(&app, &path, form)))
        .await
        .iter()
        .map(Vec::len)
        .collect();
    let readers = (0..12).map(|index| read(&app, &path, forms[index % 3]));
    for (index, body) in futures::future::join_all(readers).await.into_iter().enumerate() {
        assert_eq!(body.len(), expected[index % 3]);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_leaves_gives_its_turn_to_the_next() {
    let app = TestApp::start_with(Backend::Sqlite, TIGHT).await;
    let path = much_to_read(&app).await;
    for _ in 0..3 {
        let answer = app.http.get(format!("{}{path}", app.url)).send().await.expect("the server answers");
        assert_eq!(answer.status(), 200);
        // One reader disconnects in the middle of a page, and another one perhaps while it waits for its first.
        let waits = app.http.get(format!("{}{path}", app.url)).timeout(Duration::from_millis(20)).send().await;
        drop((answer, waits));
    }
    let rows = read(&app, &path, "application/x-ndjson").await;
    let rows: Vec<Value> =
        rows.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    assert_eq!(rows.len(), 8);
    app.finish().await;
}
