//! The log-probabilities of given ids, as a teacher reports them.

use forebay_fake_engine::{EngineKind, FakeEngine, IdFault, LogprobFault, Switches, model::logprob};
use forebay_gateway::{
    Upstream, UpstreamError,
    upstream::{Scoring, UpstreamOptions, probe::LogprobScale},
};

use crate::support::{options, start};

const IDS: [i32; 9] = [5, 30, 7, 7, 41, 2, 60, 19, 3];
const TEACHERS: [EngineKind; 2] = [EngineKind::Sglang, EngineKind::Vllm];

fn scoring(prompt_len: usize, temperature: f64) -> Scoring<'static> {
    Scoring { ids: &IDS, prompt_len, temperature, model: "fake", session: "session", rid: "rid" }
}

/// Switches a fault of the engine on.
type Fault = fn(&mut Switches);

#[tokio::test]
async fn each_id_behind_the_prompt_is_scored_behind_the_ids_before_it() {
    for kind in TEACHERS {
        let (engine, upstream) = start(kind).await;
        engine.switch(|switches| switches.sharpness = 1.5);
        for (prompt_len, temperature) in [(1, 1.0), (4, 0.7), (8, 1.3), (9, 1.0)] {
            let scores = upstream.score(&scoring(prompt_len, temperature)).await.expect("the answer can be trusted");
            let expected: Vec<f32> =
                (prompt_len..IDS.len()).map(|at| logprob(&IDS[..at], IDS[at], temperature / 1.5)).collect();
            assert_eq!(scores, expected, "{kind:?}, prompt of {prompt_len}");
        }
    }
}

#[tokio::test]
async fn an_answer_that_is_no_score_of_these_ids_is_refused() {
    let faults: [(Fault, &str); 6] = [
        (|switches| switches.logprob_fault = LogprobFault::Missing, "no log-probabilities of the ids"),
        (|switches| switches.logprob_fault = LogprobFault::Short, "log-probabilities for"),
        (|switches| switches.logprob_fault = LogprobFault::Null, "no finite number"),
        (|switches| switches.logprob_fault = LogprobFault::Sentinel, "-9999.0"),
        (|switches| switches.logprob_fault = LogprobFault::Positive, "above zero"),
        (|switches| switches.id_fault = IdFault::Foreign, "from id 8 on"),
    ];
    for kind in TEACHERS {
        for (fault, expected) in faults {
            let (engine, upstream) = start(kind).await;
            engine.switch(fault);
            let error = upstream.score(&scoring(4, 1.0)).await.expect_err("the answer cannot be trusted");
            assert!(matches!(error, UpstreamError::Untrusted { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{kind:?}: {error}");
            assert!(error.to_string().contains("a teacher needs"), "{kind:?}: {error}");
        }
    }
}

#[tokio::test]
async fn what_cannot_be_scored_is_not_sent() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let openai = Upstream::new(options(EngineKind::Openai, &[&engine])).expect("the options are usable");
    let error = openai.score(&scoring(4, 1.0)).await.expect_err("no such endpoint");
    assert!(error.to_string().contains("kind openai"), "{error}");
    let small = UpstreamOptions { vocabulary: Some(60), ..options(EngineKind::Vllm, &[&engine]) };
    let small = Upstream::new(small).expect("the options are usable");
    let error = small.score(&scoring(4, 1.0)).await.expect_err("the id 60 is not in a vocabulary of 60");
    assert!(error.to_string().contains("the id 60 is outside"), "{error}");
    let error = small.score(&scoring(0, 1.0)).await.expect_err("nothing precedes the first id");
    assert!(error.to_string().contains("at least one id"), "{error}");
    assert!(engine.log().received.is_empty());
}

#[tokio::test]
async fn a_probe_tells_whether_scores_contain_the_temperature() {
    for kind in TEACHERS {
        let (engine, upstream) = start(kind).await;
        let scale = upstream.probe_scores("fake").await.expect("the engine answers");
        assert_eq!(scale, LogprobScale::Scaled);
        assert_eq!(scale.check_scores(0.7), Ok(()));
        engine.switch(|switches| switches.raw_logprobs = true);
        let scale = upstream.probe_scores("fake").await.expect("the engine answers");
        assert_eq!(scale, LogprobScale::Raw);
        assert_eq!(scale.check_scores(1.0), Ok(()));
        assert!(scale.check_scores(0.7).is_err_and(|why| why.contains("do not contain the temperature")));
    }
}

#[tokio::test]
async fn the_probe_asks_every_worker() {
    let (first, second) = (FakeEngine::start(EngineKind::Sglang).await, FakeEngine::start(EngineKind::Sglang).await);
    let upstream = Upstream::new(options(EngineKind::Sglang, &[&first, &second])).expect("the options are usable");
    second.switch(|switches| switches.raw_logprobs = true);
    assert_eq!(upstream.probe_scores("fake").await.expect("both answer"), LogprobScale::Raw);
    second.switch(|switches| switches.logprob_fault = LogprobFault::Missing);
    upstream.probe_scores("fake").await.expect_err("the second worker reports nothing");
}
