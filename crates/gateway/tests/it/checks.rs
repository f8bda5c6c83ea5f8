//! The check of answers: each fault of an engine is noticed and named.

use forebay_fake_engine::{EngineKind, FakeEngine, IdFault, LogprobFault, Switches, tokenizer::VOCABULARY};
use forebay_gateway::{
    DialectError, Upstream, UpstreamError,
    completion::Finish,
    upstream::{Fault, UpstreamOptions, read_answer},
};

use crate::support::{KINDS, ask, options, start};

/// What the check says of an engine with a fault, and the remedy.
async fn fault(kind: EngineKind, change: impl FnOnce(&mut Switches)) -> (Fault, &'static str) {
    let engine = FakeEngine::start(kind).await;
    engine.switch(change);
    let options = UpstreamOptions { vocabulary: Some(VOCABULARY as u32), ..options(kind, &[&engine]) };
    let upstream = Upstream::new(options).expect("the options are usable");
    match ask(&upstream, "Hi").await {
        Err(error @ UpstreamError::Untrusted { .. }) => {
            let told = DialectError::from(&error);
            assert_eq!((told.status(), told.code(), told.should_retry()), (502, "upstream-untrusted", true));
            let UpstreamError::Untrusted { fault, remedy } = error else { unreachable!("it was matched above") };
            assert!(told.to_string().contains(remedy), "the remedy reaches the log: {told}");
            (fault, remedy)
        }
        other => panic!("{kind:?}: the answer is refused, but: {other:?}"),
    }
}

#[tokio::test]
async fn an_engine_without_faults_passes() {
    for kind in KINDS {
        let engine = FakeEngine::start(kind).await;
        let options = UpstreamOptions { vocabulary: Some(VOCABULARY as u32), ..options(kind, &[&engine]) };
        let upstream = Upstream::new(options).expect("the options are usable");
        ask(&upstream, "Hi").await.expect("the answer passes");
    }
}

#[tokio::test]
async fn missing_ids_are_named_with_what_removes_them() {
    for kind in KINDS {
        let (found, remedy) = fault(kind, |switches| switches.id_fault = IdFault::NoPrompt).await;
        assert_eq!(found, Fault::PromptIds);
        assert!(remedy.contains("return_token_ids"), "{remedy}");
        let (found, remedy) = fault(kind, |switches| switches.id_fault = IdFault::NoSampled).await;
        assert_eq!(found, Fault::TokenIds);
        assert!(remedy.contains("router"), "{remedy}");
        let (found, remedy) = fault(kind, |switches| switches.id_fault = IdFault::Router).await;
        assert_eq!(found, Fault::PromptIds);
        assert!(remedy.contains("name the workers themselves"), "{remedy}");
    }
}

#[tokio::test]
async fn log_probabilities_that_are_none_are_named() {
    for kind in KINDS {
        let with = |value| move |switches: &mut Switches| switches.logprob_fault = value;
        let (found, remedy) = fault(kind, with(LogprobFault::Sentinel)).await;
        assert_eq!(found, Fault::Sentinel { index: 0 });
        assert!(remedy.contains("--logprobs-mode processed_logprobs"), "{remedy}");
        assert_eq!(fault(kind, with(LogprobFault::Null)).await.0, Fault::NotFinite { index: 0 });
        assert_eq!(fault(kind, with(LogprobFault::Positive)).await.0, Fault::Positive { index: 0, value: 0.5 });
        let (found, _) = fault(kind, with(LogprobFault::Short)).await;
        assert!(
            matches!(found, Fault::Lengths { logprobs, ids } if logprobs + 1 == ids)
                || matches!(found, Fault::Conflict { .. }),
            "{kind:?}: {found}"
        );
    }
    let missing = |switches: &mut Switches| switches.logprob_fault = LogprobFault::Missing;
    assert_eq!(fault(EngineKind::Vllm, missing).await.0, Fault::Logprobs);
    assert_eq!(fault(EngineKind::Sglang, missing).await.0, Fault::Logprobs);
}

#[tokio::test]
async fn an_id_outside_the_vocabulary_is_named() {
    for kind in KINDS {
        let (found, _) = fault(kind, |switches| switches.id_fault = IdFault::Foreign).await;
        assert_eq!(found, Fault::Vocabulary { id: i64::from(VOCABULARY) + 7 });
    }
}

#[tokio::test]
async fn an_unknown_finish_reason_is_named() {
    for kind in KINDS {
        let (found, _) = fault(kind, |switches| switches.finish_reason = Some("content_filter".to_owned())).await;
        assert_eq!(found, Fault::FinishReason { reason: "content_filter".to_owned() });
    }
}

#[tokio::test]
async fn an_answer_that_is_no_chat_completion_is_refused() {
    for (text, expected) in [
        ("<html>", None),
        (r#"{"choices": []}"#, Some(Fault::Choices { count: 0 })),
        (r#"{"choices": [{"finish_reason": "stop"}, {"finish_reason": "stop"}]}"#, Some(Fault::Choices { count: 2 })),
        (r#"{"choices": [{"finish_reason": "stop", "logprobs": {"content": [{"logprob": NaN}]}}]}"#, None),
    ] {
        let (found, _) = fault(EngineKind::Vllm, |switches| switches.failures = Some((1, 200, text.to_owned()))).await;
        match expected {
            Some(expected) => assert_eq!(found, expected),
            None => assert!(matches!(found, Fault::Shape { .. }), "{found}"),
        }
    }
}

#[tokio::test]
async fn sglangs_short_content_does_not_matter_beside_its_meta_info() {
    let engine = FakeEngine::start(EngineKind::Sglang).await;
    engine.switch(|switches| switches.logprob_fault = LogprobFault::ShortContent);
    let upstream = Upstream::new(options(EngineKind::Sglang, &[&engine])).expect("the options are usable");
    let completion = ask(&upstream, "Hi").await.expect("the answer passes").completion;
    assert_eq!(completion.tokens.len(), completion.logprobs.len());
}

/// The answer to a call that is answered with this text.
async fn answered(kind: EngineKind, text: &str) -> Result<(Vec<i32>, Vec<f32>), UpstreamError> {
    let engine = FakeEngine::start(kind).await;
    engine.switch(|switches| switches.failures = Some((1, 200, text.to_owned())));
    let upstream = Upstream::new(options(kind, &[&engine])).expect("the options are usable");
    ask(&upstream, "Hi").await.map(|answered| (answered.completion.tokens, answered.completion.logprobs))
}

#[tokio::test]
async fn the_ids_of_sglang_may_lack_the_token_that_ended_the_answer() {
    let answer = |ids: &str| {
        format!(
            r#"{{"choices": [{{"finish_reason": "stop", "prompt_token_ids": [1], "matched_stop": 9,
                "response_token_ids": {ids},
                "meta_info": {{"output_token_logprobs": [[-0.5, 4, null], [-0.25, 9, null]]}}}}]}}"#
        )
    };
    for ids in ["[4]", "[4, 9]"] {
        let found = answered(EngineKind::Sglang, &answer(ids)).await.expect("the answer passes");
        assert_eq!(found, (vec![4, 9], vec![-0.5, -0.25]));
    }
    for (ids, index) in [("[5, 9]", 0), ("[4, 8]", 1), ("[4, 9, 9]", 2), ("[]", 0)] {
        let error = answered(EngineKind::Sglang, &answer(ids)).await.expect_err("the ids differ");
        let UpstreamError::Untrusted { fault, .. } = &error else { panic!("the check refuses it, but: {error}") };
        assert_eq!(*fault, Fault::Conflict { index });
    }
}

#[tokio::test]
async fn certainty_may_come_out_a_little_above_zero_and_nothing_is_recorded_above_it() {
    let answer = |value: &str| {
        format!(
            r#"{{"prompt_token_ids": [1], "choices": [{{"finish_reason": "stop", "token_ids": [4],
                "logprobs": {{"content": [{{"logprob": {value}}}]}}}}]}}"#
        )
    };
    assert_eq!(answered(EngineKind::Vllm, &answer("1e-6")).await.expect("the answer passes").1, [0.0]);
    answered(EngineKind::Vllm, &answer("0.01")).await.expect_err("that is no rounding");
    answered(EngineKind::Vllm, &answer("-1e39")).await.expect_err("that is infinite in 32 bits");
}

#[tokio::test]
async fn ids_that_the_usage_counts_must_be_there() {
    let answer = |count: u32| {
        format!(
            r#"{{"prompt_token_ids": [1], "usage": {{"completion_tokens": {count}}},
                "choices": [{{"finish_reason": "stop", "token_ids": []}}]}}"#
        )
    };
    assert_eq!(answered(EngineKind::Vllm, &answer(0)).await.expect("nothing was sampled").0, [0; 0]);
    let error = answered(EngineKind::Vllm, &answer(3)).await.expect_err("three ids are missing");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::TokenIds, .. }), "{error}");
}

#[tokio::test]
async fn an_answer_that_was_ended_because_it_repeats_itself_is_recorded() {
    for kind in KINDS {
        let engine = FakeEngine::start(kind).await;
        engine.switch(|switches| switches.finish_reason = Some("repetition".to_owned()));
        let upstream = Upstream::new(options(kind, &[&engine])).expect("the options are usable");
        let completion = ask(&upstream, "Hi").await.expect("the answer passes").completion;
        assert_eq!((completion.finish, &completion.stop_matched), (Finish::Stop, &None));
        assert!(!completion.stopped_on_token());
    }
}

#[test]
fn arguments_of_a_tool_call_may_be_an_object() {
    for (sent, expected) in
        [(r#"{"b": 1.50, "a": [2 ]}"#, r#"{"b": 1.50, "a": [2 ]}"#), (r#""{\"b\": 1}""#, r#"{"b": 1}"#), ("null", "")]
    {
        let answer = format!(
            r#"{{"prompt_token_ids": [1], "choices": [{{"finish_reason": "tool_calls", "token_ids": [],
                "message": {{"tool_calls": [{{"id": "c", "function": {{"name": "f", "arguments": {sent}}}}}]}}}}]}}"#
        );
        let options =
            UpstreamOptions::new("test", EngineKind::Vllm, ["http://engine"]).expect("the options are usable");
        let completion = read_answer(answer.as_bytes(), 0, &options).expect("the answer passes");
        assert_eq!(completion.message.tool_calls[0].arguments, expected);
    }
}

#[tokio::test]
async fn what_an_engine_counts_and_calls_itself_is_told_to_the_agent() {
    for (kind, usage) in [
        (
            EngineKind::Vllm,
            r#"{"prompt_tokens_details": {"cached_tokens": 5}, "completion_tokens_details": {"reasoning_tokens": 1}}"#,
        ),
        (EngineKind::Sglang, r#"{"prompt_tokens_details": {"cached_tokens": 5}, "reasoning_tokens": 1}"#),
    ] {
        let (engine, upstream) = start(kind).await;
        let answer = |fingerprint: &str| {
            format!(
                r#"{{"system_fingerprint": "{fingerprint}", "prompt_token_ids": [1], "usage": {usage}, "choices": [
                    {{"finish_reason": "stop", "token_ids": [4], "logprobs": {{"content": [{{"logprob": -1}}]}}}}]}}"#
            )
        };
        let ask = async |text: String| {
            engine.switch(|switches| switches.failures = Some((1, 200, text)));
            ask(&upstream, "Hi").await.expect("the answer passes").completion
        };
        let found = ask(answer("vllm-0.32.0-13e593bb")).await;
        assert_eq!((found.usage.cached_tokens, found.usage.reasoning_tokens), (Some(5), Some(1)));
        assert_eq!(found.system_fingerprint.as_deref(), Some("vllm-0.32.0-13e593bb"));
        // It is stored with each call, so it is not kept if it is long.
        assert_eq!(ask(answer(&"x".repeat(257))).await.system_fingerprint, None);
    }
}
