//! `/generate`: what is drawn, its log-probabilities, and scores of given sequences.

use std::path::Path;

use forebay_trainer::serve::Limits;
use reqwest::StatusCode;
use serde_json::{Value, json};

use super::{
    CONTEXT, Engine, TOLERANCE, check_logprobs, checkpoint, checkpoint_of, config, decoder, ids, pairs, prompts,
    trainer_logprobs,
};
use crate::golden::Golden;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_probabilities_are_the_trainers_whatever_else_runs() {
    for golden in Golden::all() {
        let engine = Engine::start(&golden.checkpoint()).await;
        let weights = golden.decoder();
        // Requests with different settings share a pass. Some are longer than others and end earlier.
        let requests: Vec<(Vec<i64>, f64, Value)> = prompts(8)
            .into_iter()
            .zip([
                json!({}),
                json!({"temperature": 0.7}),
                json!({"top_k": 3}),
                json!({"top_p": 0.8, "temperature": 1.5}),
                json!({"temperature": 0.0}),
                json!({"top_k": -1, "top_p": 1.0}),
                json!({"temperature": 0.7, "max_new_tokens": 3}),
                json!({"max_new_tokens": 1}),
            ])
            .map(|(prompt, mut sampling)| {
                let temperature = sampling["temperature"].as_f64().filter(|it| *it > 0.0).unwrap_or(1.0);
                sampling["ignore_eos"] = true.into();
                if sampling.get("max_new_tokens").is_none() {
                    sampling["max_new_tokens"] = 20.into();
                }
                (prompt, temperature, sampling)
            })
            .collect();
        let answers: Vec<_> = requests
            .iter()
            .map(|(prompt, _, sampling)| {
                let body = json!({"input_ids": prompt, "sampling_params": sampling, "return_logprob": true});
                engine.begin("/generate", body)
            })
            .collect();
        for (answer, (prompt, temperature, sampling)) in answers.into_iter().zip(&requests) {
            let answer = answer.await.expect("the call ends");
            check_logprobs(&answer, prompt, *temperature, &[("1", &weights)]);
            let meta = &answer["meta_info"];
            assert_eq!(meta["finish_reason"]["type"], "length");
            assert_eq!(meta["completion_tokens"], sampling["max_new_tokens"], "{}", golden.name());
            assert_eq!((&meta["prompt_tokens"], &meta["weight_version"]), (&json!(prompt.len()), &json!("1")));
        }
        engine.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_draws_the_same_alone_and_beside_others() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let engine = Engine::start(&checkpoint(folder.path(), "v1", 1)).await;
    let body =
        |seed: u64| json!({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 60, "sampling_seed": seed}});
    let alone = ids(&engine.post("/generate", body(7)).await);
    let others: Vec<_> = prompts(6)
        .into_iter()
        .map(|prompt| {
            engine.begin("/generate", json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 90}}))
        })
        .collect();
    let (again, another) = (engine.begin("/generate", body(7)), engine.begin("/generate", body(8)));
    assert_eq!(ids(&again.await.expect("the call ends")), alone);
    assert_ne!(ids(&another.await.expect("the call ends")), alone);
    for other in others {
        other.await.expect("the call ends");
    }
    let unseeded = json!({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 60}});
    let (first, second) = (engine.post("/generate", unseeded.clone()).await, engine.post("/generate", unseeded).await);
    assert_ne!(ids(&first), ids(&second), "requests without a seed are independent");
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_given_sequence_is_scored_in_pieces_beside_answers() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint(folder.path(), "v1", 1);
    let mut pieces = config(&[("tiny", &path)]);
    pieces.limits.piece_tokens = 16;
    let engine = Engine::with(pieces).await;
    let other = json!({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": CONTEXT}, "rid": "other"});
    let running = engine.stream("/generate", other).await;
    let sequence: Vec<i64> = (0..150).map(|at| at * at * 3 % 64).collect();
    for (start, temperature, new_tokens) in [(0, 1.0, 0), (3, 0.6, 0), (149, 1.0, 0), (40, 1.3, 4)] {
        let body = json!({
            "input_ids": sequence, "return_logprob": true, "logprob_start_len": start,
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": temperature},
        });
        let answer = engine.post("/generate", body).await;
        let scored = pairs(&answer["meta_info"]["input_token_logprobs"]);
        assert_eq!(scored.iter().map(|&(_, id)| id).collect::<Vec<_>>(), sequence[start..]);
        let weights = decoder(&path);
        let expected = trainer_logprobs(&weights, &sequence, temperature);
        assert_eq!(scored[0].0, None, "the token before the first one is not scored");
        for (at, (found, _)) in scored.iter().enumerate().skip(1) {
            let (found, expected) = (found.expect("it is scored"), expected[start + at - 1]);
            assert!((found - expected).abs() < TOLERANCE, "{found} in place of {expected} at {at}");
        }
        assert_eq!(ids(&answer).len(), new_tokens);
        check_logprobs(&answer, &sequence, temperature, &[("1", &weights)]);
    }
    // Without a place the prompt is not scored.
    let body = json!({"input_ids": sequence, "return_logprob": true, "sampling_params": {"max_new_tokens": 1}});
    let answer = engine.post("/generate", body).await;
    assert_eq!(pairs(&answer["meta_info"]["input_token_logprobs"]), [(None, sequence[149])]);
    engine.post("/abort_request", json!({"rid": "other"})).await;
    assert_eq!(running.last().await["meta_info"]["finish_reason"]["type"], "abort");
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_grows_to_the_answer() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let engine = Engine::start(&checkpoint(folder.path(), "v1", 1)).await;
    let body = json!({
        "input_ids": [9, 8], "sampling_params": {"max_new_tokens": 40, "sampling_seed": 3}, "return_logprob": true,
        "rid": "mine",
    });
    let whole = engine.post("/generate", body.clone()).await;
    let mut events = engine.stream("/generate", body).await;
    let mut previous: Vec<i64> = Vec::new();
    let mut last = json!({"meta_info": {}});
    while let Some(event) = events.next().await {
        let ids = ids(&event);
        assert!(ids.starts_with(&previous), "tokens are only added");
        assert!(last["meta_info"]["finish_reason"].is_null(), "nothing comes after the end");
        assert_eq!(event["meta_info"]["id"], "mine");
        (previous, last) = (ids, event);
    }
    assert_eq!(last["output_ids"], whole["output_ids"]);
    for field in ["output_token_logprobs", "weight_versions", "finish_reason"] {
        assert_eq!(last["meta_info"][field], whole["meta_info"][field]);
    }
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_ends_at_a_stop_token_of_the_request_or_of_the_checkpoint() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint_of(folder.path(), "v1", 1, &json!({"eos_token_id": 11}));
    std::fs::write(path.join("generation_config.json"), r#"{"eos_token_id": [11, 12]}"#).expect("it can be written");
    let engine = Engine::start(&path).await;
    let ends = async |sampling: Value, seed: u64| {
        let mut sampling = sampling;
        sampling["max_new_tokens"] = 2_000.into();
        sampling["sampling_seed"] = seed.into();
        let answer = engine.post("/generate", json!({"input_ids": [1], "sampling_params": sampling})).await;
        let ids = ids(&answer);
        (ids.clone(), ids.last().copied(), answer["meta_info"]["finish_reason"].clone())
    };
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..12 {
        let (ids, last, reason) = ends(json!({"stop_token_ids": [13]}), seed).await;
        assert_eq!(reason, json!({"type": "stop", "matched": last}));
        assert!(!ids[..ids.len() - 1].iter().any(|id| [11, 12, 13].contains(id)));
        seen.extend(last);
    }
    assert!(seen.is_subset(&[11, 12, 13].into()) && seen.len() > 1, "{seen:?}");
    let (ids, _, reason) = ends(json!({"ignore_eos": true}), 0).await;
    assert_eq!((ids.len(), reason), (2_000, json!({"type": "length", "length": 2_000})));
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alternatives_show_that_log_probabilities_are_at_the_temperature() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let engine = Engine::start(&checkpoint(folder.path(), "v1", 1)).await;
    let gap = async |temperature: f64| {
        let body = json!({
            "input_ids": [4, 5, 6], "return_logprob": true, "top_logprobs_num": 2,
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "top_k": 1},
        });
        let answer = engine.post("/generate", body).await;
        let best = pairs(&answer["meta_info"]["output_top_logprobs"][0]);
        assert_eq!(best.len(), 2);
        assert_eq!(best[0], pairs(&answer["meta_info"]["output_token_logprobs"])[0], "the best was taken");
        best[0].0.expect("a number") - best[1].0.expect("a number")
    };
    let (cold, hot) = (gap(1.0).await, gap(2.0).await);
    assert!(cold > 0.0 && (cold - 2.0 * hot).abs() < TOLERANCE, "{cold} and {hot}");
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_are_refused_by_the_name_of_the_field() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let engine = Engine::start(&checkpoint(folder.path(), "v1", 1)).await;
    let with = |sampling: Value| json!({"input_ids": [1], "sampling_params": sampling});
    for (body, field) in [
        (json!({}), "input_ids"),
        (json!({"input_ids": []}), "input_ids"),
        (json!({"input_ids": [64]}), "input_ids"),
        (json!({"input_ids": [-1]}), "input_ids"),
        (json!({"input_ids": "text"}), "input_ids"),
        (with(json!({"temperature": -1})), "temperature"),
        (with(json!({"temperature": "hot"})), "temperature"),
        (with(json!({"top_p": 0})), "top_p"),
        (with(json!({"top_k": 0})), "top_k"),
        (with(json!({"stop_token_ids": [99]})), "stop_token_ids"),
        (with(json!({"max_new_tokens": -1})), "max_new_tokens"),
        (with(json!({"n": 2})), "n"),
        (with(json!({"frequency_penalty": 0.5})), "frequency_penalty"),
        (with(json!({"regex": "a+"})), "regex"),
        (json!({"input_ids": [1], "return_logprob": true, "logprob_start_len": 1}), "logprob_start_len"),
        (json!({"input_ids": [1], "return_logprob": true, "top_logprobs_num": 21}), "top_logprobs_num"),
        (json!({"input_ids": [1], "rid": ""}), "rid"),
    ] {
        let (status, answer) = engine.call("/generate", &body).await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == StatusCode::BAD_REQUEST && message.contains(field), "{body}: {status} {answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error");
    }
    let neutral = json!({"n": 1, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0, "regex": null});
    engine.post("/generate", with(neutral)).await;
    for (path, body, status) in [
        ("/generate", "{", StatusCode::BAD_REQUEST),
        ("/pause_generation", r#"{"mode": "sleep"}"#, StatusCode::BAD_REQUEST),
        ("/abort_request", "{}", StatusCode::BAD_REQUEST),
        ("/update_weights_from_disk", "{}", StatusCode::BAD_REQUEST),
        ("/health", "", StatusCode::METHOD_NOT_ALLOWED),
        ("/other", "", StatusCode::NOT_FOUND),
    ] {
        let request = engine.http.post(format!("{}{path}", engine.url)).body(body);
        let answer = request.send().await.expect("the server answers");
        assert_eq!(answer.status(), status, "{path}");
        assert!(answer.text().await.expect("the answer is whole").contains("\"message\""), "{path}");
    }
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_chosen_by_name_or_by_url() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (first, second) = (checkpoint(folder.path(), "a", 1), checkpoint(folder.path(), "b", 2));
    let engine = Engine::with(config(&[("solver", &first), ("judge", &second)])).await;
    let weights = [decoder(&first), decoder(&second)];
    let body = |model: Option<&str>| {
        let sampling = json!({"max_new_tokens": 5});
        json!({"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": true, "model": model})
    };
    for (path, model, expected) in [
        ("/generate", None, 0),
        ("/generate", Some("solver"), 0),
        ("/generate", Some("judge"), 1),
        ("/models/judge/generate", None, 1),
        ("/models/solver/generate", Some("solver"), 0),
    ] {
        let answer = engine.post(path, body(model)).await;
        check_logprobs(&answer, &[1, 2], 1.0, &[("1", &weights[expected])]);
    }
    for path in ["/generate", "/models/solver/generate"] {
        let name = if path == "/generate" { "nobody" } else { "judge" };
        let (status, answer) = engine.call(path, &body(Some(name))).await;
        assert_eq!((status, &answer["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
    }
    let models = engine.get("/v1/models").await;
    let names: Vec<&Value> = models["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["solver", "judge"]);
    assert_eq!(models["data"][1]["max_model_len"], CONTEXT);
    assert_eq!(engine.get("/models/judge/get_model_info").await["model_path"], json!(second));
    let health = engine.http.get(format!("{}/health", engine.url)).send().await.expect("the server answers");
    assert_eq!(health.status(), StatusCode::OK);
    engine.stop().await;
}

#[tokio::test]
async fn models_that_cannot_be_served_are_refused_at_the_start() {
    use forebay_trainer::serve::{ServeError, Server};
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = checkpoint(folder.path(), "v1", 1);
    let open = async |config, address: &str| {
        let listener = tokio::net::TcpListener::bind(address).await.expect("a port is free");
        Server::open(config, listener).await.expect_err("it is refused")
    };
    let absent = open(config(&[("tiny", Path::new("/nowhere"))]), "127.0.0.1:0").await;
    assert!(matches!(absent, ServeError::Open(_)), "{absent}");
    let twice = open(config(&[("tiny", &path), ("tiny", &path)]), "127.0.0.1:0").await;
    assert!(matches!(twice, ServeError::SameName(_)), "{twice}");
    let mut small = config(&[("tiny", &path)]);
    small.limits = Limits { cache_bytes: 100, ..small.limits };
    let small = open(small, "127.0.0.1:0").await;
    assert!(matches!(small, ServeError::Open(_)), "{small}");
    let reachable = open(config(&[("tiny", &path)]), "0.0.0.0:0").await;
    assert!(matches!(reachable, ServeError::Reachable(_)), "{reachable}");
}
