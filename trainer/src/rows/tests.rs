use std::collections::BTreeMap;

use forebay_client::wire::{Status, Verdict};

use super::*;

/// A row with `prompt` prompt tokens and one response token per entry of `mask`; ids count up from 1.
pub(crate) fn sample(rollout: &str, prompt: usize, mask: &[u8]) -> Sample {
    let logprobs = (0..mask.len()).map(|t| -0.1 * (t as f32 + 1.0)).collect();
    Sample {
        columns: BTreeMap::new(),
        media: Vec::new(),
        rollout_id: rollout.to_owned(),
        group_id: "group".to_owned(),
        segment: 0,
        segments: 1,
        kind: None,
        environment: None,
        verdict: Verdict::Kept,
        status: Status::Completed,
        tokens: Some((1..=(prompt + mask.len()) as i32).collect()),
        response_length: mask.len() as i32,
        loss_mask: Some(mask.to_vec()),
        logprobs: Some(logprobs),
        teacher_logprobs: None,
        values: None,
        temperature: 1.0,
        top_p: 1.0,
        top_k: -1,
        reward: Some(1.0),
        advantage: Some(0.5),
        advantages: None,
        loss_weight: 0.25,
        policy_version: Some(3),
        versions: None,
        messages: None,
        metadata: None,
    }
}

#[test]
fn each_trained_token_has_its_advantage() {
    let mut one = sample("a", 2, &[1, 0, 1]);
    one.advantage = None;
    one.advantages = Some(vec![0.25, f32::NAN, -2.0]);
    let other = sample("b", 2, &[0, 1, 1]);
    let found = rows(&[one.clone(), other]);
    assert_eq!(found.trained().iter().map(Row::advantages).collect::<Vec<_>>(), [[0.25, -2.0], [0.5, 0.5]]);
    one.advantages = None;
    let error = Rows::read(&[one], &EXPECTED, 5).expect_err("a row without any advantage teaches nothing");
    assert_eq!(error.violations[0].field, "advantages");
}

pub(crate) fn rows(samples: &[Sample]) -> Rows {
    Rows::read(samples, &EXPECTED, 5).expect("the fixture is well formed")
}

/// What the fixtures have.
const EXPECTED: Expected =
    Expected { vocabulary: 100, tokens_max: 32, needs: Needs { logprobs: None, teacher_logprobs: None, reward: None } };

#[test]
fn columns_cover_the_trained_tokens_alone() {
    let rows = rows(&[sample("a", 3, &[0, 1, 1, 0, 1, 0])]);
    let row = &rows.trained()[0];
    assert_eq!(row.positions(), [1, 2, 4]);
    assert_eq!(row.targets(), [5, 6, 8]);
    assert_eq!(row.logprobs(), Some(&[-0.2, -0.3, -0.5][..]));
    assert_eq!(row.inputs(), [1, 2, 3, 4, 5, 6, 7], "the last trained token predicts nothing that is trained");
    assert_eq!((row.prompt_length(), row.response_length(), row.trained_length()), (3, 6, 3));
}

#[test]
fn garbage_at_masked_tokens_changes_nothing() {
    let clean = sample("a", 2, &[1, 0, 1]);
    let mut dirty = clean.clone();
    dirty.logprobs.as_mut().expect("it has some")[1] = f32::NAN;
    assert_eq!(rows(&[clean]).trained(), rows(&[dirty]).trained());
}

#[test]
fn rows_without_trained_tokens_count_in_the_statistics_alone() {
    let mut bare = sample("bare", 1, &[1]);
    (bare.tokens, bare.loss_mask, bare.logprobs, bare.response_length) = (None, None, None, 0);
    bare.reward = Some(0.0);
    let mut masked = sample("masked", 1, &[0, 0]);
    masked.reward = None;
    let first = sample("trained", 2, &[1, 1]);
    let mut second = sample("trained", 2, &[1]);
    second.segment = 1;
    let mut empty = sample("empty", 2, &[]);
    (empty.reward, empty.logprobs) = (Some(0.5), None);
    let rows = rows(&[bare, masked, first, second, empty]);
    assert_eq!(rows.trained().iter().map(Row::index).collect::<Vec<_>>(), [2, 3]);
    let expected = BatchStatistics {
        rollouts: 4,
        rollouts_trained: 1,
        rows: 5,
        rows_without_tokens: 1,
        tokens: 12,
        tokens_trained: 3,
        rows_without_logprobs: 0,
        rows_top_sampled: 0,
        reward_mean: Some(0.5),
        reward_trained_mean: Some(1.0),
        staleness_mean: Some(2.0),
        staleness_max: Some(2),
    };
    assert_eq!(*rows.statistics(), expected);
}

#[test]
fn every_violation_is_named() {
    let mut short = sample("short", 1, &[1, 1]);
    short.logprobs = Some(vec![-1.0]);
    let mut odd = sample("odd", 1, &[1, 2]);
    odd.temperature = 0.0;
    odd.tokens = Some(vec![1, 100, -1]);
    let mut bare = sample("bare", 1, &[1]);
    bare.loss_mask = None;
    let error = Rows::read(&[short, odd, bare], &EXPECTED, 0).expect_err("all of them are malformed");
    let found: Vec<_> = error.violations.iter().map(|violation| (violation.row, violation.field)).collect();
    assert_eq!(
        found,
        [(0, "logprobs"), (1, "loss_mask"), (1, "tokens"), (1, "temperature"), (2, "loss_mask")],
        "{error}"
    );
    assert!(error.to_string().contains("rollout short"), "{error}");
}

#[test]
fn what_the_objective_or_the_model_needs_is_asked_of_trained_rows_alone() {
    let needs = Needs { logprobs: Some("a"), teacher_logprobs: Some("b"), reward: Some("c") };
    let expected = Expected { tokens_max: 4, needs, ..EXPECTED };
    let mut bare = sample("bare", 2, &[1, 1]);
    (bare.logprobs, bare.reward) = (None, None);
    let mut long = sample("long", 3, &[1, 1]);
    long.teacher_logprobs = Some(vec![-1.0; 2]);
    let mut masked = sample("masked", 9, &[0, 0]);
    (masked.logprobs, masked.reward) = (None, None);
    let samples = [masked, bare, long];
    let error = Rows::read(&samples, &expected, 0).expect_err("two of them cannot be trained");
    let found: Vec<_> = error.violations.iter().map(|violation| (violation.row, violation.field)).collect();
    assert_eq!(found, [(1, "logprobs"), (1, "teacher_logprobs"), (1, "reward"), (2, "tokens")], "{error}");
    assert_eq!(error.groups(&samples), ["group"]);
    assert!(error.to_string().contains("row 1 (rollout bare): logprobs is missing, and a reads it"), "{error}");
}

#[test]
fn logprobs_that_no_model_computes_are_refused_at_trained_tokens() {
    for (entry, is_refused) in [(0.5, true), (-1e30, true), (1e-4, false), (-80.0, false), (0.0, false)] {
        let mut odd = sample("odd", 1, &[1, 0]);
        odd.logprobs = Some(vec![entry, 7.0]);
        assert_eq!(Rows::read(&[odd], &EXPECTED, 0).is_err(), is_refused, "{entry}");
    }
}

#[test]
fn batches_of_one_step_count_alike() {
    let (first, second) = (rows(&[sample("a", 1, &[1])]), rows(&[sample("b", 1, &[1, 1]), sample("c", 1, &[1])]));
    let merged = Rows::merge(&[&first, &second]);
    assert!(merged.trained().iter().all(|row| (row.loss_weight() - 0.125).abs() < 1e-12));
    assert_eq!((merged.statistics().rollouts, merged.statistics().tokens), (3, 7));
    let alone = Rows::merge(&[&first]);
    assert_eq!((alone.trained(), alone.statistics()), (first.trained(), first.statistics()));
}

#[test]
fn rows_that_were_not_sampled_from_the_full_vocabulary_are_counted() {
    let (mut nucleus, mut candidates, mut masked) = (sample("a", 1, &[1]), sample("b", 1, &[1]), sample("c", 1, &[0]));
    (nucleus.top_p, candidates.top_k, masked.top_k) = (0.9, 50, 50);
    assert_eq!(rows(&[nucleus, candidates, masked, sample("d", 1, &[1])]).statistics().rows_top_sampled, 2);
}
