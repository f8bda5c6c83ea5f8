use forebay_wire::Verdict;
use serde_json::{Value, json};

use super::*;

const NULLS: [&str; 11] = [
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
];

fn converted(body: &Value) -> Vec<Trajectory> {
    let scored = ScoredData::parse(body.to_string().as_bytes()).expect("it can be read");
    let environment = Some("math_0".to_owned());
    rollouts(scored, &Names { policy: "p".to_owned(), group_id: "g".to_owned(), environment })
}

fn sample(rollout: Trajectory) -> Sample {
    let segment = rollout.segments.into_iter().next();
    Sample {
        columns: BTreeMap::new(),
        media: Vec::new(),
        rollout_id: rollout.rollout_id.unwrap_or_default(),
        group_id: rollout.group_id.unwrap_or_default(),
        segment: 0,
        segments: 1,
        kind: None,
        environment: rollout.environment,
        verdict: Verdict::Kept,
        status: rollout.status,
        response_length: segment.as_ref().map_or(0, |segment| segment.loss_mask.len() as i32),
        loss_mask: segment.as_ref().map(|segment| segment.loss_mask.clone()),
        logprobs: segment.as_ref().and_then(|segment| segment.logprobs.clone()),
        tokens: segment.map(|segment| segment.tokens),
        teacher_logprobs: None,
        values: None,
        advantages: None,
        temperature: rollout.sampling.temperature,
        top_p: rollout.sampling.top_p,
        top_k: rollout.sampling.top_k,
        reward: rollout.reward,
        advantage: Some(0.0),
        loss_weight: 1.0,
        policy_version: None,
        versions: None,
        messages: rollout.messages,
        metadata: rollout.metadata,
    }
}

fn returned(samples: &[Sample]) -> Value {
    let mut text = Vec::new();
    scored_data(&mut text, samples);
    serde_json::from_slice(&text).expect("it is JSON")
}

fn round_trip(body: &Value) -> Value {
    returned(&converted(body).into_iter().map(sample).collect::<Vec<_>>())
}

/// The body with null for every optional field that it does not have.
fn completed(mut body: Value) -> Value {
    for name in NULLS {
        let fields = body.as_object_mut().expect("it is an object");
        fields.entry(name).or_insert(Value::Null);
    }
    body
}

#[test]
fn a_group_is_returned_as_it_came() {
    let body = completed(json!({
        "tokens": [[1, 2, 3, 4], [5, 6, 7]],
        "masks": [[-100, -100, 3, 4], [-100, 6, -100]],
        "scores": [1.0, -0.5],
        "inference_logprobs": [[1.0, 1.0, -0.1, -0.25], [1.0, -2.5, 1.0]],
        "advantages": [[0.1, 0.2], [0.3]],
        "ref_logprobs": [[-0.123_456_789_012_345], [0]],
        "messages": [[{"role": "user", "content": "a \u{e9}", "reward": null}], []],
        "generation_params": {"temperature": 0.7},
        "overrides": [{"temperature": 0.5}, {"x": [1]}],
        "group_overrides": {"sft": true},
        "images": ["abc", null],
        "env_id": 0,
        "distill_token_ids": [[[1, 2]], [[3]]],
        "distill_logprobs": [[[-0.5, -1]], [[-2]]],
    }));
    assert_eq!(round_trip(&body), body);
    let rollouts = converted(&body);
    let first = &rollouts[0];
    assert_eq!((first.rollout_id.as_deref(), first.group_size), (Some("g-0"), Some(2)));
    assert_eq!(first.segments[0].tokens, [1, 2, 3, 4]);
    assert_eq!(first.segments[0].loss_mask, [1, 1]);
    assert_eq!(first.segments[0].logprobs, Some(vec![-0.1, -0.25]));
    assert_eq!(rollouts[1].segments[0].loss_mask, [1, 0]);
    assert_eq!(first.reward, Some(1.0));
    assert_eq!([first, &rollouts[1]].map(|rollout| rollout.sampling.temperature.to_string()), ["0.5", "0.7"]);
    let metadata = first.metadata.as_deref().map(RawValue::get).unwrap_or_default();
    assert!(!metadata.contains("masks"), "they follow from the segment: {metadata}");
}

#[test]
fn optional_fields_are_present_as_null() {
    let body = completed(json!({"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.0]}));
    assert_eq!(round_trip(&body), body);
}

#[test]
fn what_fits_no_column_is_returned_all_the_same() {
    let odd = [
        json!({"tokens": [[1, 2, 3]], "masks": [[1, 1, 1]], "scores": [1.0]}),
        json!({"tokens": [[1, 2, 3]], "masks": [[-100, -100, -100]], "scores": [1.0]}),
        json!({"tokens": [[7]], "masks": [[7]], "scores": [1.0], "inference_logprobs": [[-0.5]]}),
        json!({"tokens": [[]], "masks": [[]], "scores": [1.0]}),
        json!({"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "inference_logprobs": [[-0.5]]}),
        json!({"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "inference_logprobs": [[1.0, 1.0]]}),
        json!({"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "inference_logprobs": [[0.5, -1.0]]}),
        json!({"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "inference_logprobs": []}),
        json!({"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "messages": [], "overrides": [{}, {}]}),
    ];
    for body in odd {
        let body = completed(body);
        assert_eq!(round_trip(&body), body);
    }
}

#[test]
fn sequences_without_anything_to_predict_have_no_segment() {
    let rollouts = converted(&json!({"tokens": [[7], [1, 2]], "masks": [[7], [1, 2]], "scores": [1, 2]}));
    assert!(rollouts[0].segments.is_empty() && rollouts[0].status == Status::Failed);
    assert_eq!(rollouts[1].segments[0].loss_mask, [1], "the first token has nothing before it");
}

#[test]
fn an_override_of_the_advantage_masks_the_sequence_for_other_trainers_only() {
    let body = completed(json!({
        "tokens": [[1, 2, 3], [1, 2, 3]], "masks": [[-100, 2, 3], [-100, 2, 3]], "scores": [1.0, 0.0],
        "overrides": [{"set_advantage_to_zero": true}, {"set_advantage_to_zero": false}],
    }));
    let masks: Vec<Vec<u8>> = converted(&body).iter().map(|rollout| rollout.segments[0].loss_mask.clone()).collect();
    assert_eq!(masks, [[0, 0], [1, 1]]);
    assert_eq!(round_trip(&body), body);
}

#[test]
fn tokens_that_the_rules_mask_are_masked_in_the_batch() {
    for sent in [[-100, 2, 3], [-100, 8, 9]] {
        let body = json!({"tokens": [[1, 2, 3]], "masks": [sent], "scores": [1]});
        let mut samples: Vec<Sample> = converted(&body).into_iter().map(sample).collect();
        samples[0].loss_mask = Some(vec![0, 1]);
        assert_eq!(returned(&samples)["masks"], json!([[-100, -100, sent[2]]]));
    }
}

#[test]
fn a_group_that_lost_sequences_to_rules_keeps_the_fields_of_the_others() {
    let body = json!({
        "tokens": [[1, 2], [3, 4]], "masks": [[-100, 2], [-100, 4]], "scores": [1, 0], "images": ["i"],
        "generation_params": {"temperature": 0.5}, "overrides": [{"a": 1}, {"b": 2}],
    });
    let samples: Vec<Sample> = converted(&body).into_iter().map(sample).skip(1).collect();
    let returned = returned(&samples);
    assert_eq!(returned["tokens"], json!([[3, 4]]));
    assert_eq!(returned["generation_params"], body["generation_params"]);
    assert_eq!(returned["overrides"], json!([{"b": 2}]));
    assert_eq!(returned["images"], Value::Null);
}

#[test]
fn samples_of_other_producers_have_the_fields_that_follow_from_their_columns() {
    let other = Trajectory {
        reward: Some(2.0),
        segments: vec![Segment {
            tokens: vec![1, 2, 3],
            loss_mask: vec![1],
            logprobs: Some(vec![-0.5]),
            ..Segment::default()
        }],
        metadata: Some(RawValue::from_string("{\"atropos\": 1}".to_owned()).expect("it is JSON")),
        ..Trajectory::default()
    };
    let expected = json!({
        "tokens": [[1, 2, 3]], "masks": [[-100, -100, 3]], "scores": [2.0], "inference_logprobs": [[1.0, 1.0, -0.5]],
    });
    assert_eq!(returned(&[sample(other)]), completed(expected));
}
