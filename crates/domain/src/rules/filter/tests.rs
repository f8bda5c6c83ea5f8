//! Tests of filters: what is refused when rules are written, and how records are evaluated.

mod costs;
mod documentation;
mod evaluations;
mod refusals;

use std::collections::BTreeMap;

use forebay_wire::{FilterAction, FilterRule, FilterScope};
use serde_json::value::RawValue;

use super::{Evaluation, Filters};
use crate::rules::filter::facts::{GroupFacts, RolloutFacts};

fn rule(name: &str, scope: FilterScope, when: &str) -> FilterRule {
    FilterRule { name: name.to_owned(), scope, when: when.to_owned(), action: FilterAction::Drop }
}

fn rollout_rule(name: &str, when: &str) -> FilterRule {
    rule(name, FilterScope::Rollout, when)
}

fn group_rule(name: &str, when: &str) -> FilterRule {
    rule(name, FilterScope::Group, when)
}

#[track_caller]
fn compile(rules: &[FilterRule]) -> Filters {
    Filters::compile(rules).expect("the rules must be accepted")
}

/// The components of a rollout's reward.
fn components() -> BTreeMap<String, f64> {
    BTreeMap::from([("tests".to_owned(), 1.0), ("cost".to_owned(), -0.25)])
}

fn metadata(json: &str) -> Box<RawValue> {
    RawValue::from_string(json.to_owned()).expect("the test writes JSON")
}

/// No two numbers are equal, so that a test cannot pass with the value of another variable.
fn rollout_facts<'a>(reward_components: &'a BTreeMap<String, f64>, metadata: Option<&'a RawValue>) -> RolloutFacts<'a> {
    RolloutFacts {
        status: "aborted",
        reward: Some(0.75),
        reward_components,
        scores: reward_components,
        environment: Some("swe-bench"),
        policy_version: 11,
        version_current: 13,
        staleness: 2,
        segments: 4,
        tokens: 900,
        response_tokens: 700,
        trained_tokens: 500,
        max_segment_tokens: 300,
        temperature: 0.5,
        metadata,
    }
}

fn group_facts(rewards: &[f64]) -> GroupFacts<'_> {
    GroupFacts {
        size: 8,
        kept: 6,
        masked: 2,
        rewards,
        components: &[],
        tokens: 9000,
        environment: Some("swe-bench"),
        age_s: 12.5,
    }
}

#[track_caller]
fn evaluate_rollout(when: &str, facts: &RolloutFacts<'_>) -> Option<bool> {
    verdict(&compile(&[rollout_rule("filter", when)]).evaluate_rollout(facts))
}

#[track_caller]
fn evaluate_group(when: &str, facts: &GroupFacts<'_>) -> Option<bool> {
    verdict(&compile(&[group_rule("filter", when)]).evaluate_group(facts))
}

/// Whether the only filter matched; `None` when it could not be evaluated.
fn verdict(evaluation: &Evaluation<'_>) -> Option<bool> {
    evaluation.failed.is_empty().then_some(evaluation.matched.is_some())
}
