//! Bounds: what a model has no room for is refused at once, and clients that leave free their room.

use forebay_trainer::serve::Limits;
use reqwest::StatusCode;
use serde_json::{Value, json};

use super::{CONTEXT, Engine, checkpoint, config, ids, prompts};

fn request(prompt: &[i64], new_tokens: usize) -> Value {
    json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": new_tokens, "sampling_seed": 1}})
}

async fn engine(limits: Limits) -> (Engine, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint(folder.path(), "v1", 1);
    (Engine::with(config_with(&path, limits)).await, folder)
}

fn config_with(path: &std::path::Path, limits: Limits) -> forebay_trainer::serve::ServeConfig {
    forebay_trainer::serve::ServeConfig { limits, ..config(&[("tiny", path)]) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_beyond_the_queue_are_refused_at_once_and_the_others_are_answered() {
    let (engine, _folder) = engine(Limits { running: 1, queue: 2, ..Limits::default() }).await;
    engine.post("/pause_generation", json!({"mode": "in_place"})).await;
    let held: Vec<_> = (0..3).map(|_| engine.begin("/generate", request(&[1, 2], 4))).collect();
    engine.until("three are accepted", |info| info["waiting_requests"] == 3).await;
    let refused = engine.send("/generate", &request(&[1, 2], 4)).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.headers()["retry-after"], "1");
    let answer: Value = serde_json::from_str(&refused.text().await.expect("the answer is whole")).expect("JSON");
    assert_eq!((&answer["error"]["code"], &answer["error"]["type"]), (&json!("overloaded"), &json!("server_error")));
    engine.post("/continue_generation", json!({})).await;
    for held in held {
        assert_eq!(ids(&held.await.expect("the call ends")).len(), 4);
    }
    engine.post("/generate", request(&[1, 2], 4)).await;
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_in_flight_are_bounded() {
    let (engine, _folder) = engine(Limits { tokens: 100, ..Limits::default() }).await;
    engine.post("/pause_generation", json!({"mode": "in_place"})).await;
    let held = engine.begin("/generate", request(&[1; 20], 40));
    engine.until("it is accepted", |info| info["accepted_tokens"] == 60).await;
    let (status, _) = engine.call("/generate", &request(&[1; 20], 21)).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    let fits = engine.begin("/generate", request(&[1; 20], 20));
    engine.until("it is accepted", |info| info["accepted_tokens"] == 100).await;
    engine.post("/continue_generation", json!({})).await;
    assert_eq!(ids(&held.await.expect("the call ends")).len(), 40);
    assert_eq!(ids(&fits.await.expect("the call ends")).len(), 20);
    engine.until("their room is free", |info| info["accepted_tokens"] == 0).await;
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_leaves_no_room_is_refused_and_a_long_answer_ends_with_the_context() {
    let (engine, _folder) = engine(Limits { context: Some(50), ..Limits::default() }).await;
    for length in [50, 51, 2_000] {
        let (status, answer) = engine.call("/generate", &request(&vec![1; length], 1)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert_eq!(answer["error"]["code"], "context_length_exceeded");
        let message = answer["error"]["message"].as_str().expect("a text");
        assert!(message.contains("maximum context length is 50 tokens") && message.contains(&length.to_string()));
    }
    let answer = engine.post("/generate", request(&[1; 45], CONTEXT)).await;
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "length", "length": 5}));
    // A sequence that is only scored needs no room for an answer.
    engine.post("/generate", request(&[1; 50], 0)).await;
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_that_do_not_fit_into_the_caches_wait_and_lose_no_token() {
    // A token takes 256 bytes: two layers, keys and values, two heads of eight numbers of four bytes.
    let (small, _first) = engine(Limits { cache_bytes: 256 * 220, ..Limits::default() }).await;
    let (large, _second) = engine(Limits::default()).await;
    let bodies: Vec<Value> = prompts(10).iter().map(|prompt| request(prompt, 150)).collect();
    let answers: Vec<_> = bodies.iter().map(|body| small.begin("/generate", body.clone())).collect();
    for (answer, body) in answers.into_iter().zip(bodies) {
        let expected = large.post("/generate", body).await;
        assert_eq!(ids(&answer.await.expect("the call ends")), ids(&expected));
    }
    let info = small.get("/server_info").await;
    let peak = info["peak_cache_tokens"].as_u64().expect("a number");
    assert!(info["max_cache_tokens"] == 220 && (150..=220).contains(&peak), "{info}");
    // A sequence that can never fit is too long.
    let (status, answer) = small.call("/generate", &request(&[1; 220], 1)).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")));
    small.stop().await;
    large.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_ends_its_request() {
    let (engine, _folder) = engine(Limits { running: 2, ..Limits::default() }).await;
    let free = |info: &Value| info["accepted_tokens"] == 0 && info["running_requests"] == 0;
    // While tokens arrive.
    let mut stream = engine.stream("/generate", request(&[1], CONTEXT)).await;
    stream.next().await;
    drop(stream);
    engine.until("its room is free", free).await;
    // While the whole answer is awaited, by a request that runs and by requests that wait.
    let calls: Vec<_> = (0..4).map(|_| engine.begin("/generate", request(&[1], CONTEXT))).collect();
    engine.until("two run", |info| info["running_requests"] == 2 && info["waiting_requests"] == 2).await;
    calls.iter().for_each(tokio::task::JoinHandle::abort);
    engine.until("their room is free", free).await;
    // While nothing is drawn.
    engine.post("/pause_generation", json!({})).await;
    let call = engine.begin("/generate", request(&[1], 5));
    engine.until("it is accepted", |info| info["waiting_requests"] == 1).await;
    call.abort();
    engine.until("its room is free", free).await;
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_too_large_is_refused() {
    let (engine, _folder) = engine(Limits::default()).await;
    let body = format!("{{\"rid\": \"{}\"}}", "x".repeat(17 << 20));
    // The connection may be closed while the client still writes, so no other request uses it.
    let answer = crate::support::http().post(format!("{}/generate", engine.url)).body(body).send().await;
    if let Ok(answer) = answer {
        assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
    engine.post("/generate", request(&[1], 1)).await;
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_without_the_key_and_pages_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint(folder.path(), "v1", 1);
    let mut locked = config(&[("tiny", &path)]);
    locked.api_key = Some("secret".to_owned());
    let engine = Engine::with(locked).await;
    let get = |path: &str, header: (&'static str, &'static str)| {
        engine.http.get(format!("{}{path}", engine.url)).header(header.0, header.1).send()
    };
    for (path, header, expected) in [
        ("/v1/models", ("x-other", "1"), StatusCode::UNAUTHORIZED),
        ("/v1/models", ("authorization", "Bearer wrong"), StatusCode::UNAUTHORIZED),
        ("/models/tiny/server_info", ("x-other", "1"), StatusCode::UNAUTHORIZED),
        ("/nowhere", ("x-other", "1"), StatusCode::UNAUTHORIZED),
        ("/v1/models", ("authorization", "Bearer secret"), StatusCode::OK),
        ("/health", ("x-other", "1"), StatusCode::OK),
        ("/health", ("origin", "http://evil.example"), StatusCode::FORBIDDEN),
    ] {
        let answer = get(path, header).await.expect("the server answers");
        assert_eq!(answer.status(), expected, "{path} {header:?}");
    }
    engine.stop().await;
}
