//! The calls that find out whether an engine can be recorded.

use forebay_fake_engine::{EngineKind, FakeEngine, IdFault, LogprobFault};
use forebay_gateway::{
    Upstream,
    system::LaterSystem,
    upstream::{
        Sampling, Secret, UpstreamOptions,
        probe::{LogprobScale, Verdict},
    },
};

use crate::support::{KINDS, options, start};

fn remedy(verdict: Verdict) -> String {
    match verdict {
        Verdict::Refused { problem, remedy } => format!("{problem}; {remedy}"),
        other => panic!("the upstream is refused, but: {other:?}"),
    }
}

#[tokio::test]
async fn an_engine_that_reports_everything_is_ready() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        assert_eq!(upstream.probe("fake").await, Verdict::Ready, "{kind:?}");
        let sent = engine.log().calls().next().expect("the engine was called").json();
        assert_eq!(sent["max_tokens"], 1);
        assert_eq!(sent["model"], "fake");
    }
}

#[tokio::test]
async fn a_router_that_removes_ids_is_named() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.switch(|switches| switches.id_fault = IdFault::Router);
        let text = remedy(upstream.probe("fake").await);
        assert!(text.contains("prompt_token_ids") && text.contains("router"), "{text}");
    }
}

#[tokio::test]
async fn missing_log_probabilities_are_named() {
    let (engine, upstream) = start(EngineKind::Vllm).await;
    engine.switch(|switches| switches.logprob_fault = LogprobFault::Sentinel);
    let text = remedy(upstream.probe("fake").await);
    assert!(text.contains("--logprobs-mode processed_logprobs"), "{text}");
}

#[tokio::test]
async fn a_wrong_model_is_named() {
    let (engine, upstream) = start(EngineKind::Vllm).await;
    let text = r#"{"error": {"message": "The model `fake` does not exist."}}"#.to_owned();
    engine.switch(|switches| switches.failures = Some((1, 404, text)));
    let text = remedy(upstream.probe("fake").await);
    assert!(text.contains("does not exist") && text.contains("model's name"), "{text}");
}

#[tokio::test]
async fn a_disabled_endpoint_is_not_told_as_a_wrong_key() {
    let (engine, upstream) = start(EngineKind::Vllm).await;
    let words = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.";
    let text = format!(r#"{{"error": {{"message": "{words}", "type": "PermissionDeniedError", "code": 403}}}}"#);
    engine.switch(|switches| switches.failures = Some((1, 403, text)));
    let told = remedy(upstream.probe("fake").await);
    assert!(told.contains(words) && told.contains("start vLLM with --enable-scale-out"), "{told}");
    // An engine may quote the key in its refusal.
    let options = UpstreamOptions { api_key: Some(Secret::new("sk-secret")), ..options(EngineKind::Vllm, &[&engine]) };
    let text = r#"{"message": "sk-secret may not do this"}"#.to_owned();
    engine.switch(|switches| switches.failures = Some((1, 403, text)));
    let told = remedy(Upstream::new(options).expect("usable options").probe("fake").await);
    assert!(told.contains("may not do this") && told.contains("key_file") && !told.contains("sk-secret"), "{told}");
}

#[tokio::test]
async fn the_flag_that_forbids_log_probabilities_is_named() {
    // What vLLM 0.32.0 answers with --max-logprobs 0.
    let words = "Requested sample logprobs of 1, which is greater than max allowed: 0 (parameter=logprobs, value=1)";
    let text = format!(r#"{{"error": {{"message": "{words}", "type": "BadRequestError", "code": 400}}}}"#);
    let (engine, upstream) = start(EngineKind::Vllm).await;
    engine.switch(|switches| switches.failures = Some((1, 400, text)));
    let told = remedy(upstream.probe("fake").await);
    assert!(told.contains(words) && told.contains("without --max-logprobs") && !told.contains("key"), "{told}");
}

#[tokio::test]
async fn a_kind_that_is_not_the_engines_is_named() {
    for (kind, other, remedies) in [
        (EngineKind::Vllm, EngineKind::Sglang, "set kind = \"vllm\""),
        (EngineKind::Sglang, EngineKind::Vllm, "set kind = \"sglang\""),
    ] {
        let engine = FakeEngine::start(kind).await;
        let upstream = Upstream::new(options(other, &[&engine])).expect("usable options");
        let told = remedy(upstream.probe("fake").await);
        assert!(told.contains("the engine says that it is") && told.contains(remedies), "{told}");
        assert_eq!(engine.log().calls().count(), 0, "nothing is sampled");
    }
    // This kind is for all engines that answer as vLLM does.
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let upstream = Upstream::new(options(EngineKind::Openai, &[&engine])).expect("usable options");
    assert_eq!(upstream.probe("fake").await, Verdict::Ready);
}

#[tokio::test]
async fn a_context_above_the_engines_is_named() {
    for kind in [EngineKind::Sglang, EngineKind::Vllm] {
        let engine = FakeEngine::start(kind).await;
        engine.switch(|switches| (switches.context_tokens, switches.adapters) = (4096, vec!["math-lora".to_owned()]));
        for (configured, model, is_ready) in
            [(4096, "fake", true), (4097, "fake", false), (4096, "math-lora", true), (4097, "math-lora", false)]
        {
            let options = UpstreamOptions { context_tokens: Some(configured), ..options(kind, &[&engine]) };
            let verdict = Upstream::new(options).expect("usable options").probe(model).await;
            if is_ready {
                assert_eq!(verdict, Verdict::Ready, "{model}");
                continue;
            }
            let told = remedy(verdict);
            assert!(told.contains("`context_tokens` is 4097") && told.contains("--max-model-len"), "{told}");
        }
    }
}

#[tokio::test]
async fn an_adapter_is_known_by_the_list_of_models() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        engine.switch(|switches| switches.adapters = vec!["math-lora".to_owned()]);
        assert!(upstream.serves_adapter("math-lora").await);
        assert!(!upstream.serves_adapter("fake").await && !upstream.serves_adapter("unknown").await);
        drop(engine);
        assert!(!upstream.serves_adapter("math-lora").await, "nobody says so");
    }
}

#[tokio::test]
async fn an_engine_that_is_gone_is_unreachable() {
    let (engine, upstream) = start(EngineKind::Vllm).await;
    drop(engine);
    assert!(matches!(upstream.probe("fake").await, Verdict::Unreachable { .. }));
}

#[tokio::test]
async fn every_worker_is_probed_and_the_bad_one_named() {
    let engines = [FakeEngine::start(EngineKind::Vllm).await, FakeEngine::start(EngineKind::Vllm).await];
    let upstream = Upstream::new(options(EngineKind::Vllm, &[&engines[0], &engines[1]])).expect("usable options");
    assert_eq!(upstream.probe("fake").await, Verdict::Ready);
    engines[1].switch(|switches| switches.id_fault = IdFault::Router);
    let text = remedy(upstream.probe("fake").await);
    assert!(text.starts_with("url 2 of 2"), "{text}");
}

#[tokio::test]
async fn log_probabilities_before_the_temperature_are_noticed() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        assert_eq!(upstream.probe_temperature("fake").await, Ok(LogprobScale::Scaled), "{kind:?}");
        engine.switch(|switches| switches.raw_logprobs = true);
        assert_eq!(upstream.probe_temperature("fake").await, Ok(LogprobScale::Raw), "{kind:?}");
    }
}

#[tokio::test]
async fn an_engine_without_top_logprobs_cannot_be_judged() {
    let (engine, upstream) = start(EngineKind::Vllm).await;
    engine.switch(|switches| switches.logprob_fault = LogprobFault::Missing);
    let scale = upstream.probe_temperature("fake").await.expect("the engine answers");
    assert!(matches!(scale, LogprobScale::Unknown { .. }), "{scale:?}");
}

#[test]
fn only_policies_whose_sampling_the_log_probabilities_fit_are_accepted() {
    let at = |temperature, top_p, top_k| Sampling { temperature, top_p, top_k };
    let unknown = LogprobScale::Unknown { why: "it rained".to_owned() };
    let cases = [
        (&LogprobScale::Scaled, EngineKind::Sglang, at(0.6, 1.0, -1), None),
        (&LogprobScale::Scaled, EngineKind::Sglang, at(0.6, 0.9, 20), None),
        (&LogprobScale::Scaled, EngineKind::Vllm, at(0.6, 1.0, -1), None),
        (&LogprobScale::Scaled, EngineKind::Vllm, at(0.6, 0.9, -1), Some("top_p = 1")),
        (&LogprobScale::Scaled, EngineKind::Vllm, at(1.0, 1.0, 20), Some("top_k = -1")),
        (&LogprobScale::Raw, EngineKind::Vllm, at(1.0, 0.9, 20), None),
        (&LogprobScale::Raw, EngineKind::Vllm, at(0.6, 1.0, -1), Some("--logprobs-mode processed_logprobs")),
        (&LogprobScale::Raw, EngineKind::Sglang, at(0.6, 1.0, -1), Some("SGLANG_RETURN_ORIGINAL_LOGPROB")),
        (&LogprobScale::Raw, EngineKind::Openai, at(0.6, 1.0, -1), Some("temperature = 1")),
        (&unknown, EngineKind::Vllm, at(1.0, 1.0, -1), None),
        (&unknown, EngineKind::Vllm, at(0.9, 1.0, -1), Some("it rained")),
    ];
    for (scale, kind, sampling, expected) in cases {
        let verdict = scale.verdict(kind, &sampling);
        match expected {
            None => assert_eq!(verdict, Verdict::Ready, "{scale:?} {kind:?} {sampling:?}"),
            Some(words) => assert!(remedy(verdict.clone()).contains(words), "{verdict:?}"),
        }
    }
}

#[tokio::test]
async fn one_worker_that_is_gone_does_not_close_the_upstream() {
    let engines = [FakeEngine::start(EngineKind::Vllm).await, FakeEngine::start(EngineKind::Vllm).await];
    let upstream = Upstream::new(options(EngineKind::Vllm, &[&engines[0], &engines[1]])).expect("usable options");
    let [first, second] = engines;
    drop(first);
    assert_eq!(upstream.probe("fake").await, Verdict::Ready);
    second.switch(|switches| switches.failures = Some((9, 503, "paused".to_owned())));
    assert!(matches!(upstream.probe("fake").await, Verdict::Busy { .. }), "a paused engine says nothing");
    drop(second);
    assert!(matches!(upstream.probe("fake").await, Verdict::Unreachable { .. }));
}

#[tokio::test]
async fn probes_have_ids_of_their_own() {
    let (engine, upstream) = start(EngineKind::Sglang).await;
    upstream.probe("fake").await;
    upstream.probe_temperature("fake").await.expect("the engine answers");
    upstream.probe("fake").await;
    let log = engine.log();
    let ids: std::collections::BTreeSet<String> =
        log.calls().map(|call| call.json()["rid"].as_str().expect("an id").to_owned()).collect();
    assert_eq!(ids.len(), log.calls().count());
}

#[tokio::test]
async fn a_probe_finds_out_which_system_messages_the_engine_takes() {
    for kind in KINDS {
        let (engine, upstream) = start(kind).await;
        assert_eq!(upstream.probe_later_system("fake").await, Ok(LaterSystem::Keep), "{kind:?}");
        engine.switch(|switches| switches.one_system = true);
        assert_eq!(upstream.probe_later_system("fake").await, Ok(LaterSystem::User), "{kind:?}");
        // An engine that refuses all system messages says so to the agent.
        engine.switch(|switches| switches.failures = Some((2, 400, r#"{"message": "no system"}"#.to_owned())));
        assert_eq!(upstream.probe_later_system("fake").await, Ok(LaterSystem::Keep), "{kind:?}");
        engine.switch(|switches| switches.failures = Some((1, 503, r#"{"message": "paused"}"#.to_owned())));
        upstream.probe_later_system("fake").await.expect_err("a paused engine says nothing about its template");
    }
}
