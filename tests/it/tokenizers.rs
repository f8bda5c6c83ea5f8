//! The tokenizer of a policy: a file that only the operator can name.

use std::{io::Read as _, path::Path};

use reqwest::header::{ETAG, IF_NONE_MATCH};

use crate::support::{Backend, TestApp};

const BASE: &str = r#"{"model": {"type": "BPE", "vocab": {"a": 0}}}"#;

fn config(folder: &Path) -> String {
    let path = |name: &str| folder.join(name).display().to_string();
    format!(
        "[console]\ntokenizers = {{ \"*\" = '{}', \"math.*\" = '{}', \"none\" = '{}' }}",
        path("base.json"),
        path("math.json"),
        path("missing.json")
    )
}

async fn get(app: &TestApp, policy: &str, headers: &[(&str, &str)]) -> reqwest::Response {
    let mut request = app.http.get(format!("{}/policies/{policy}/tokenizer", app.url));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.expect("the server answers")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_file_of_the_longest_pattern_is_sent_and_read_again_when_it_is_replaced() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("the file is written");
    write("base.json", BASE);
    write("math.json", &BASE.replace("\"a\"", "\"math\""));
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path())).await;
    let base = get(&app, "default", &[]).await;
    assert_eq!(base.headers()["content-type"], "application/json");
    assert!(!base.headers().contains_key("content-encoding"));
    let etag = base.headers()[ETAG].to_str().expect("text").to_owned();
    assert_eq!(base.text().await.expect("text"), BASE);
    assert!(get(&app, "math.solver", &[]).await.text().await.expect("text").contains("math"));

    let compressed = get(&app, "default", &[("accept-encoding", "br, gzip")]).await;
    assert_eq!(compressed.headers()["content-encoding"], "gzip");
    assert_eq!(compressed.headers()[ETAG], etag.as_str());
    let body = compressed.bytes().await.expect("the answer is whole");
    let mut text = String::new();
    flate2::read::GzDecoder::new(&body[..]).read_to_string(&mut text).expect("it is gzip");
    assert_eq!(text, BASE);

    let known = [(IF_NONE_MATCH.as_str(), etag.as_str())];
    let same = get(&app, "default", &known).await;
    assert_eq!((same.status().as_u16(), same.headers()[ETAG].to_str().ok()), (304, Some(etag.as_str())));
    assert_eq!(get(&app, "math.solver", &known).await.status(), 200);
    let replaced = BASE.replace("\"a\"", "\"another\"");
    write("base.json", &replaced);
    let new = get(&app, "default", &known).await;
    assert_eq!(new.status(), 200);
    assert_eq!(new.text().await.expect("text"), replaced);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_cannot_be_used_is_not_sent_and_its_path_is_not_told() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    std::fs::write(folder.path().join("base.json"), "not JSON").expect("the file is written");
    std::fs::create_dir(folder.path().join("math.json")).expect("the folder is made");
    let app = TestApp::start_with(Backend::Sqlite, &config(folder.path())).await;
    for policy in ["default", "math.solver", "none"] {
        let problem = app.get(&format!("/policies/{policy}/tokenizer")).await.refused(404, "not-found");
        let text = problem.to_string();
        assert!(text.contains("cannot be read") && !text.contains("json"), "{text}");
    }
    app.finish().await;
    let app = TestApp::start(Backend::Sqlite).await;
    let problem = app.get("/policies/default/tokenizer").await.refused(404, "not-found");
    assert!(problem.to_string().contains("no tokenizer is configured"), "{problem}");
    app.finish().await;
}
