//! Which weight version sampled which ids.

use forebay_fake_engine::{Answer, EngineKind, FakeEngine, Switches, VersionReport};
use forebay_gateway::{Upstream, completion::VersionSpan, upstream::UpstreamOptions};

use crate::support::{ask, options};

/// The spans of an answer of four ids, of which the policy's published version was 7 when the call began.
async fn spans(kind: EngineKind, change: impl FnOnce(&mut Switches)) -> (Vec<(i64, u32, u32)>, bool) {
    let engine = FakeEngine::start(kind).await;
    engine.script("Count", [Answer::text("123")]);
    engine.switch(change);
    let labels = [("default".to_owned(), 0), ("step-42".to_owned(), 42)].into();
    let options = UpstreamOptions { version_labels: labels, ..options(kind, &[&engine]) };
    let upstream = Upstream::new(options).expect("the options are usable");
    let completion = ask(&upstream, "Count.").await.expect("the engine answers").completion;
    assert_eq!(completion.tokens.len(), 4);
    let spans = completion.spans.iter().map(|&VersionSpan { version, start, len }| (version, start, len));
    (spans.collect(), completion.version_assumed)
}

fn label(switches: &mut Switches, label: &str) {
    label.clone_into(&mut switches.weight_version);
}

#[tokio::test]
async fn the_spans_of_sglang_are_kept() {
    let one = spans(EngineKind::Sglang, |switches| label(switches, "9")).await;
    assert_eq!(one, (vec![(9, 0, 4)], false));
    let two = spans(EngineKind::Sglang, |switches| {
        label(switches, "5");
        switches.version_change = Some((3, "6".to_owned()));
    });
    assert_eq!(two.await, (vec![(5, 0, 3), (6, 3, 1)], false));
}

#[tokio::test]
async fn a_lone_version_names_the_end_of_a_call_and_is_an_assumption_for_the_rest() {
    let last = |version: &'static str| {
        move |switches: &mut Switches| {
            label(switches, version);
            switches.version_report = VersionReport::Last;
        }
    };
    assert_eq!(spans(EngineKind::Sglang, last("9")).await, (vec![(7, 0, 4)], true));
    assert_eq!(spans(EngineKind::Sglang, last("6")).await, (vec![(6, 0, 4)], true));
}

#[tokio::test]
async fn an_engine_that_says_nothing_has_the_published_version() {
    let nothing = |switches: &mut Switches| switches.version_report = VersionReport::Nothing;
    assert_eq!(spans(EngineKind::Sglang, nothing).await, (vec![(7, 0, 4)], true));
    assert_eq!(spans(EngineKind::Vllm, |_| {}).await, (vec![(7, 0, 4)], true));
}

#[tokio::test]
async fn labels_that_are_no_numbers_are_mapped_or_assumed() {
    let mapped = spans(EngineKind::Sglang, |switches| {
        label(switches, "default");
        switches.version_change = Some((1, "step-42".to_owned()));
    });
    assert_eq!(mapped.await, (vec![(0, 0, 1), (42, 1, 3)], false));
    let unknown = spans(EngineKind::Sglang, |switches| {
        label(switches, "5");
        switches.version_change = Some((2, "main-branch".to_owned()));
    });
    assert_eq!(unknown.await, (vec![(5, 0, 2), (7, 2, 2)], true));
    let negative = spans(EngineKind::Sglang, |switches| label(switches, "-3"));
    assert_eq!(negative.await, (vec![(7, 0, 4)], true));
}

#[tokio::test]
async fn spans_that_do_not_tile_the_answer_are_repaired_only_as_assumptions() {
    let cases = [
        // The engine counts the ids differently.
        (r#"[{"version":"5","start":0,"end":2}]"#, vec![(5, 0, 3)], true),
        (r#"[{"version":"5","start":0,"end":9}]"#, vec![(5, 0, 3)], false),
        (r#"[{"version":"5","start":0,"end":1},{"version":"5","start":1,"end":3}]"#, vec![(5, 0, 3)], false),
        (r#"[{"version":5,"start":0,"end":0},{"version":6,"start":0,"end":3}]"#, vec![(6, 0, 3)], false),
        // A gap: only the lone label is left.
        (r#"[{"version":"5","start":0,"end":1},{"version":"6","start":2,"end":3}]"#, vec![(6, 0, 3)], true),
        (r#"[{"version":"5","start":1,"end":3}]"#, vec![(6, 0, 3)], true),
        ("[]", vec![(6, 0, 3)], true),
    ];
    for (weight_versions, expected, assumed) in cases {
        let engine = FakeEngine::start(EngineKind::Sglang).await;
        let text = format!(
            r#"{{"metadata": {{"weight_version": "6", "weight_versions": {weight_versions}}}, "choices": [
                {{"finish_reason": "stop", "prompt_token_ids": [1], "token_ids": [4, 5, 6],
                  "meta_info": {{"output_token_logprobs": [[-1, 4, null], [-1, 5, null], [-1, 6, null]]}}}}]}}"#
        );
        engine.switch(|switches| switches.failures = Some((1, 200, text)));
        let upstream = Upstream::new(options(EngineKind::Sglang, &[&engine])).expect("the options are usable");
        let completion = ask(&upstream, "Hi").await.expect("the engine answers").completion;
        let found: Vec<_> = completion.spans.iter().map(|span| (span.version, span.start, span.len)).collect();
        assert_eq!((found, completion.version_assumed), (expected, assumed), "{weight_versions}");
    }
}
