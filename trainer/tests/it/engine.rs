//! Inference engines: told in order, asked again, never left paused.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Bytes, extract::State, http::StatusCode, http::Uri};
use forebay_trainer::engine::{EngineConfig, EngineKind, Engines};
use serde_json::Value;

#[derive(Default)]
struct Calls {
    made: Vec<(String, Value)>,
    /// Answers that fail, by path, before the first that succeeds.
    failures: Vec<(&'static str, usize, &'static str)>,
}

type Shared = Arc<Mutex<Calls>>;

async fn answer(State(calls): State<Shared>, uri: Uri, body: Bytes) -> (StatusCode, String) {
    let mut calls = calls.lock().expect("no call panics");
    calls.made.push((uri.path().to_owned(), serde_json::from_slice(&body).unwrap_or_default()));
    for (path, left, text) in &mut calls.failures {
        if *path == uri.path() && *left > 0 {
            *left -= 1;
            let status = if text.is_empty() { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::OK };
            return (status, (*text).to_owned());
        }
    }
    (StatusCode::OK, r#"{"success": true, "message": "ok"}"#.to_owned())
}

async fn engine(failures: Vec<(&'static str, usize, &'static str)>) -> (Engines, Shared) {
    let calls = Arc::new(Mutex::new(Calls { failures, ..Calls::default() }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("http://{}/", listener.local_addr().expect("a listener has an address"));
    let router = Router::new().fallback(answer).with_state(Arc::clone(&calls));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let engines = Engines::new(vec![EngineConfig { kind: EngineKind::Sglang, url }]);
    (engines.with_pause(Duration::from_millis(1)), calls)
}

fn paths(calls: &Shared) -> Vec<String> {
    calls.lock().expect("no call panics").made.iter().map(|(path, _)| path.clone()).collect()
}

#[tokio::test]
async fn an_engine_is_paused_flushed_loaded_and_continued() {
    let (engines, calls) = engine(Vec::new()).await;
    assert!(engines.load(Path::new("/runs/v000007"), 7).await.is_empty());
    assert_eq!(
        paths(&calls),
        ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"]
    );
    let weights = calls.lock().expect("no call panics").made[2].1.clone();
    assert_eq!(weights, serde_json::json!({"model_path": "/runs/v000007", "weight_version": "7"}));
}

#[tokio::test]
async fn a_call_that_fails_is_made_again() {
    let (engines, calls) = engine(vec![("/flush_cache", 2, "")]).await;
    assert!(engines.load(Path::new("/runs/v000001"), 1).await.is_empty());
    assert_eq!(paths(&calls).iter().filter(|path| *path == "/flush_cache").count(), 3);
}

#[tokio::test]
async fn an_engine_that_cannot_load_is_continued_with_its_old_weights() {
    let no = r#"{"success": false, "message": "shapes differ"}"#;
    let (engines, calls) = engine(vec![("/update_weights_from_disk", 99, no)]).await;
    let failed = engines.load(Path::new("/runs/v000001"), 1).await;
    assert_eq!(failed.len(), 1);
    assert!(failed[0].to_string().contains("shapes differ"), "{}", failed[0]);
    assert_eq!(paths(&calls).last().map(String::as_str), Some("/continue_generation"));
}
