//! The OpenAPI document: generators can read it, and the service accepts its examples.

use std::{collections::BTreeSet, path::Path, process::Command};

use reqwest::Method;
use serde_json::Value;

use crate::support::{Backend, TestApp, text};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn document() -> Value {
    serde_json::from_str(&forebay_api::openapi()).expect("the document is JSON")
}

/// The operations of the document, with their methods and paths.
fn operations(document: &Value) -> Vec<(String, String, &Value)> {
    let paths = document["paths"].as_object().expect("it has paths");
    let of_path = |(path, verbs): (&String, &'_ Value)| {
        let verbs = verbs.as_object().expect("a path has verbs").keys();
        verbs.map(|verb| (verb.clone(), path.clone())).collect::<Vec<_>>()
    };
    let all: Vec<(String, String)> = paths.iter().flat_map(of_path).collect();
    all.into_iter()
        .map(|(verb, path)| {
            let operation = &document["paths"][&path][&verb];
            (verb, path, operation)
        })
        .collect()
}

#[test]
fn every_operation_has_an_id_of_its_own() {
    let document = document();
    let operations = operations(&document);
    let ids: BTreeSet<&str> = operations.iter().map(|(_, _, operation)| text(&operation["operationId"])).collect();
    assert_eq!(ids.len(), operations.len(), "{ids:?}");
}

/// The calls of a table whose first column has one or several of them, such as `` `GET /stats` ``.
fn calls_of_table(section: &str) -> Vec<(String, String)> {
    let columns = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('|').next());
    let calls = columns.flat_map(|cell| cell.split('`').filter_map(|text| text.split_once(" /")));
    calls.map(|(verb, path)| (verb.to_lowercase(), format!("/{path}"))).collect()
}

#[test]
fn the_table_of_routes_has_the_operations_of_the_document() {
    let text = include_str!("../../docs/api.md");
    let section = text.split("\n## Routes\n").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("it is there");
    let listed = calls_of_table(section);
    let listed_once: BTreeSet<&(String, String)> = listed.iter().collect();
    assert_eq!(listed.len(), listed_once.len(), "{listed:?}");
    let document = document();
    let operations: Vec<(String, String)> =
        operations(&document).into_iter().map(|(verb, path, _)| (verb, path)).collect();
    // The first two describe the API, the third has the format of Prometheus, and the last is a page.
    let not_in_document = ["/openapi.json", "/docs", "/metrics", "/"].map(|path| ("get".to_owned(), path.to_owned()));
    let expected: BTreeSet<&(String, String)> = operations.iter().chain(&not_in_document).collect();
    let missing: Vec<_> = expected.difference(&listed_once).collect();
    let unknown: Vec<_> = listed_once.difference(&expected).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "missing: {missing:?}; unknown: {unknown:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_accepts_the_examples() {
    let document = document();
    let mut sent = 0;
    for (verb, path, operation) in operations(&document) {
        let Some(contents) = operation["requestBody"]["content"].as_object() else { continue };
        for (media, content) in
            contents.iter().filter(|(media, _)| media.ends_with("/json") || media.ends_with("+json"))
        {
            let example = &content["example"];
            assert!(!example.is_null(), "{verb} {path} has no example");
            // This test has its own service, because some of these calls change the results of others.
            let app = TestApp::start(Backend::Sqlite).await;
            let path = path.replace("{policy}", "default").replace("{format}", "chat").replace("{suite}", "aime24");
            let path = path.replace("{id}", "0190a5a0-0000-7000-8000-000000000000");
            let method: Method = verb.to_uppercase().parse().expect("it is a method");
            let request = app.http.request(method, format!("{}{path}", app.url)).header("content-type", media);
            let answer = request.body(example.to_string()).send().await.expect("the server answers");
            let status = answer.status().as_u16();
            let body = answer.text().await.expect("text");
            assert!(!matches!(status, 400 | 405 | 415 | 422 | 500..), "{verb} {path}: {status} {body}");
            if let Some(shown) =
                operation["responses"][status.to_string()]["content"]["application/json"].get("example")
            {
                let body: Value = serde_json::from_str(&body).expect("an answer is JSON");
                assert_eq!(body, *shown, "{verb} {path}");
                sent += 1;
            }
            app.finish().await;
        }
    }
    assert!(sent > 0, "an answer of the document was compared");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_generated_client_calls_the_service() {
    let made = Command::new(repository().join("scripts/python-env")).arg("openapi").output();
    let made = made.expect("scripts/python-env can be run");
    assert!(
        made.status.success(),
        "the Python environment of the generator is missing; `./scripts/python-env openapi` makes it, and said: {}",
        String::from_utf8_lossy(&made.stderr)
    );
    let python = String::from_utf8(made.stdout).expect("a path");
    let app = TestApp::start(Backend::Sqlite).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let scripts = repository().join("tests/python");
    let mut call = Command::new(python.trim());
    call.arg(scripts.join("openapi_client.py"))
        .arg(repository().join("openapi/forebay.json"))
        .arg(scripts.join("openapi.yml"))
        .arg(folder.path())
        .arg(&app.url);
    let called = tokio::task::spawn_blocking(move || call.output()).await.expect("the task ends");
    let called = called.expect("Python can be run");
    assert!(called.status.success(), "{}", String::from_utf8_lossy(&called.stderr));
    app.finish().await;
}
