//! What filters refuse when they are written, and what they say about records.

mod costs;
mod judgements;
mod refusals;

use std::collections::BTreeMap;

use forebay_client::wire::{FilterAction, FilterRule, FilterScope};
use serde_json::value::RawValue;

use super::{Filters, GroupFacts, Judgement, RolloutFacts};

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

/// No two numbers are equal, so that no variable passes for another.
fn rollout_facts<'a>(reward_components: &'a BTreeMap<String, f64>, metadata: Option<&'a RawValue>) -> RolloutFacts<'a> {
    RolloutFacts {
        status: "aborted",
        reward: Some(0.75),
        reward_components,
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
    GroupFacts { size: 8, kept: 6, masked: 2, rewards, tokens: 9000, environment: Some("swe-bench"), age_s: 12.5 }
}

#[track_caller]
fn judge_rollout(when: &str, facts: &RolloutFacts<'_>) -> Option<bool> {
    verdict(&compile(&[rollout_rule("filter", when)]).judge_rollout(facts))
}

#[track_caller]
fn judge_group(when: &str, facts: &GroupFacts<'_>) -> Option<bool> {
    verdict(&compile(&[group_rule("filter", when)]).judge_group(facts))
}

/// Whether the only filter matched; `None` when it could not be evaluated.
fn verdict(judgement: &Judgement<'_>) -> Option<bool> {
    judgement.failed.is_empty().then_some(judgement.matched.is_some())
}
