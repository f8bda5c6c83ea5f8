//! Pauses, aborts, and weights that change in the middle of answers.

use std::path::Path;

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::{CONTEXT, Engine, check_logprobs, checkpoint, checkpoint_of, config, decoder, ids, prompts};

/// A request whose answer takes seconds.
fn long(rid: &str) -> Value {
    json!({
        "input_ids": [3, 1, 4], "rid": rid, "return_logprob": true,
        "sampling_params": {"max_new_tokens": CONTEXT, "temperature": 0.9},
    })
}

fn has(field: &str, count: usize) -> impl Fn(&Value) -> bool {
    let field = field.to_owned();
    move |info| info[field.as_str()] == count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_change_between_two_tokens_and_every_token_is_of_the_weights_that_its_span_names() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let paths: Vec<_> = (1..=3).map(|seed| checkpoint(folder.path(), &format!("v{seed}"), seed)).collect();
    let engine = Engine::start(&paths[0]).await;
    // Two long answers, and short ones that begin and end beside them.
    let mut streams = [engine.stream("/generate", long("a")).await, engine.stream("/generate", long("b")).await];
    let short = || json!({"input_ids": [7, 7], "sampling_params": {"max_new_tokens": 8}, "return_logprob": true});
    for (version, path) in [("2", &paths[1]), ("3", &paths[2])] {
        for stream in &mut streams {
            assert!(stream.next().await.is_some_and(|event| event["meta_info"]["finish_reason"].is_null()));
        }
        let beside = engine.begin("/generate", short());
        engine.post("/update_weights_from_disk", json!({"model_path": path, "weight_version": version})).await;
        assert_eq!(engine.get("/get_model_info").await["weight_version"], version);
        for stream in &mut streams {
            while stream.next().await.expect("the answer is long")["meta_info"]["weight_version"] != version {}
        }
        beside.await.expect("the call ends");
        let after = engine.post("/generate", short()).await;
        assert_eq!(after["meta_info"]["weight_versions"], json!([{"version": version, "start": 0, "end": 8}]));
    }
    engine.post("/abort_request", json!({"abort_all": true})).await;
    let decoders: Vec<_> = paths.iter().map(|path| decoder(path)).collect();
    let weights = [("1", &decoders[0]), ("2", &decoders[1]), ("3", &decoders[2])];
    for stream in streams {
        let answer = stream.last().await;
        assert_eq!(answer["meta_info"]["weight_versions"].as_array().expect("a list").len(), 3);
        check_logprobs(&answer, &[3, 1, 4], 0.9, &weights);
    }
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_holds_everything_and_changes_no_token() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let engine = Engine::start(&checkpoint(folder.path(), "v1", 1)).await;
    let body = || {
        let sampling = json!({"max_new_tokens": 800, "sampling_seed": 5});
        json!({"input_ids": [3, 1, 4], "sampling_params": sampling})
    };
    let undisturbed = ids(&engine.post("/generate", body()).await);
    for (mode, running, waiting) in [("in_place", 1, 0), ("retract", 0, 1)] {
        let mut stream = engine.stream("/generate", body()).await;
        stream.next().await;
        engine.post("/pause_generation", json!({"mode": mode})).await;
        let info = engine.get("/server_info").await;
        engine.until("it is held", has("running_requests", running)).await;
        engine.until("it is held", has("waiting_requests", waiting)).await;
        // A request that arrives now waits, too.
        let later = engine.begin("/generate", body());
        engine.until("the later request waits", has("waiting_requests", waiting + 1)).await;
        engine.post("/flush_cache", json!({})).await;
        let now = engine.get("/server_info").await;
        assert_eq!(now["generated_tokens"], info["generated_tokens"], "nothing is drawn");
        engine.post("/continue_generation", json!({})).await;
        assert_eq!(ids(&stream.last().await), undisturbed, "{mode}");
        assert_eq!(ids(&later.await.expect("the call ends")), undisturbed, "{mode}");
    }
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_aborts_what_runs_unless_told_otherwise_and_holds_what_comes() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint(folder.path(), "v1", 1);
    let engine = Engine::start(&path).await;
    let mut stream = engine.stream("/generate", long("a")).await;
    stream.next().await;
    engine.post("/pause_generation", json!({})).await;
    let answer = stream.last().await;
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "abort");
    check_logprobs(&answer, &[3, 1, 4], 0.9, &[("1", &decoder(&path))]);
    let held = engine.begin("/generate", json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}));
    engine.until("it waits", has("waiting_requests", 1)).await;
    engine.post("/continue_generation", json!({})).await;
    assert_eq!(ids(&held.await.expect("the call ends")).len(), 2);
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_named_request_is_aborted() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let engine = Engine::start(&checkpoint(folder.path(), "v1", 1)).await;
    let mut streams = [engine.stream("/generate", long("a")).await, engine.stream("/generate", long("b")).await];
    for stream in &mut streams {
        stream.next().await;
    }
    engine.post("/abort_request", json!({"rid": "nobody"})).await;
    engine.post("/abort_request", json!({"rid": "a"})).await;
    let [aborted, mut other] = streams;
    assert_eq!(aborted.last().await["meta_info"]["finish_reason"]["type"], "abort");
    assert!(other.next().await.expect("it goes on")["meta_info"]["finish_reason"].is_null());
    // A request that waits can be aborted, too.
    engine.post("/pause_generation", json!({"mode": "in_place"})).await;
    let waiting = engine.begin("/generate", long("c"));
    engine.until("it waits", has("waiting_requests", 1)).await;
    engine.post("/abort_request", json!({"rid": "c"})).await;
    let answer = waiting.await.expect("the call ends");
    assert_eq!((ids(&answer).len(), &answer["meta_info"]["finish_reason"]["type"]), (0, &json!("abort")));
    engine.post("/abort_request", json!({"abort_all": true})).await;
    assert_eq!(other.last().await["meta_info"]["finish_reason"]["type"], "abort");
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_that_do_not_fit_change_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint(folder.path(), "v1", 1);
    let other = checkpoint_of(folder.path(), "other", 2, &json!({"rope_theta": 5_000.0}));
    let damaged = checkpoint(folder.path(), "damaged", 2);
    std::fs::write(damaged.join("model.safetensors"), b"short").expect("it can be written");
    let engine = Engine::start(&path).await;
    for refused in [other.as_path(), damaged.as_path(), Path::new("/nowhere")] {
        let body = json!({"model_path": refused, "weight_version": "2"});
        let (status, answer) = engine.call("/update_weights_from_disk", &body).await;
        assert_eq!((status, &answer["success"]), (StatusCode::BAD_REQUEST, &json!(false)), "{answer}");
        assert!(!answer["message"].as_str().expect("it says why").is_empty());
    }
    let info = engine.get("/get_model_info").await;
    assert_eq!((&info["weight_version"], &info["model_path"]), (&json!("1"), &json!(path)));
    let body = json!({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 9}, "return_logprob": true});
    check_logprobs(&engine.post("/generate", body).await, &[1, 2], 1.0, &[("1", &decoder(&path))]);
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_of_one_model_leave_the_others_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint(folder.path(), "v1", 1);
    let engine = Engine::with(config(&[("solver", &path), ("judge", &path)])).await;
    let newer = checkpoint(folder.path(), "v2", 2);
    let body = json!({"model_path": newer, "weight_version": "2"});
    engine.post("/models/judge/update_weights_from_disk", body).await;
    engine.post("/models/judge/pause_generation", json!({})).await;
    assert_eq!(engine.get("/models/judge/model_info").await["weight_version"], "2");
    assert_eq!(engine.get("/model_info").await["weight_version"], "1");
    let body = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 3}});
    assert_eq!(engine.post("/generate", body).await["meta_info"]["weight_version"], "1");
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_ends_what_runs_and_what_waits() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let mut one = config(&[("tiny", &checkpoint(folder.path(), "v1", 1))]);
    one.limits.running = 1;
    let engine = Engine::with(one).await;
    let mut stream = engine.stream("/generate", long("a")).await;
    stream.next().await;
    let waiting: Vec<_> = prompts(3)
        .into_iter()
        .map(|prompt| engine.begin("/generate", json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 9}})))
        .collect();
    engine.until("they wait", has("waiting_requests", 3)).await;
    engine.stop().await;
    assert_eq!(stream.last().await["meta_info"]["finish_reason"]["type"], "abort");
    for waiting in waiting {
        assert_eq!(waiting.await.expect("the call ends")["meta_info"]["finish_reason"]["type"], "abort");
    }
}
