//! Tests of how accepted rules evaluate on records.

use std::{collections::BTreeMap, thread};

use forebay_wire::{FilterAction, FilterScope};

use super::{
    super::variables, compile, components, evaluate_group, evaluate_rollout, group_facts, group_rule, metadata,
    rollout_facts, rollout_rule,
};
use crate::rules::filter::facts::{GroupFacts, RolloutFacts};

const METADATA: &str = r#"{
    "task": "swe-17", "attempt": 3, "score": 0.25, "tags": ["hard", "flaky"],
    "host": {"zone": "b"}, "none": null, "seed": 18446744073709551615
}"#;

#[test]
fn filters_are_shared_between_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&compile(&[]));
}

#[test]
fn every_rollout_variable_has_its_value() {
    let (components, metadata) = (components(), metadata(METADATA));
    let facts = rollout_facts(&components, Some(&metadata));
    let expressions = [
        r#"status == "aborted""#,
        "reward == 0.75",
        "reward_components == {'tests': 1.0, 'cost': -0.25}",
        "scores == {'tests': 1.0, 'cost': -0.25}",
        "environment == 'swe-bench'",
        "policy_version == 11",
        "version_current == 13",
        "staleness == 2",
        "segments == 4",
        "tokens == 900",
        "response_tokens == 700",
        "trained_tokens == 500",
        "max_segment_tokens == 300",
        "temperature == 0.5",
        "metadata.task == 'swe-17'",
    ];
    for when in expressions {
        assert_eq!(evaluate_rollout(when, &facts), Some(true), "{when}");
    }
    assert_eq!(expressions.map(first_name).as_slice(), variables::names(FilterScope::Rollout));
    assert_eq!(evaluate_rollout("status == 'completed'", &facts), Some(false));
}

#[test]
fn absent_facts_are_null() {
    let components = BTreeMap::new();
    let facts = RolloutFacts { reward: None, environment: None, ..rollout_facts(&components, None) };
    for when in [
        "reward == null",
        "environment == null",
        "metadata == null",
        "size(reward_components) == 0",
        "!(reward != null && reward > 0.0)",
    ] {
        assert_eq!(evaluate_rollout(when, &facts), Some(true), "{when}");
    }
}

#[test]
fn every_group_variable_has_its_value() {
    let components = [0.0, 1.0, 0.5, 0.5].map(|value| BTreeMap::from([("acc".to_owned(), value)]));
    let components: Vec<_> = components.iter().collect();
    let facts = GroupFacts { components: &components, ..group_facts(&[0.0, 1.0, 0.5, 0.5]) };
    let expressions = [
        "size == 8",
        "kept == 6",
        "masked == 2",
        "rewards == [0.0, 1.0, 0.5, 0.5]",
        "reward_mean == 0.5",
        // The population's variance: (0.25 + 0.25) / 4.
        "reward_std > 0.353553390 && reward_std < 0.353553391",
        "reward_min == 0.0",
        "reward_max == 1.0",
        "components.acc.mean == 0.5",
        "tokens == 9000",
        "environment == 'swe-bench'",
        "age_s == 12.5",
    ];
    for when in expressions {
        assert_eq!(evaluate_group(when, &facts), Some(true), "{when}");
    }
    assert_eq!(expressions.map(first_name).as_slice(), variables::names(FilterScope::Group));
}

/// The name with which an expression begins.
fn first_name(expression: &str) -> &str {
    let is_of_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
    expression.split(|character| !is_of_name(character)).next().unwrap_or_default()
}

#[test]
fn equal_rewards_have_no_spread() {
    let when = "reward_std < 1e-6";
    assert_eq!(evaluate_group(when, &group_facts(&[0.5, 0.5, 0.5])), Some(true));
    assert_eq!(evaluate_group(when, &group_facts(&[0.5, 0.5, 0.6])), Some(false));
}

#[test]
fn components_have_statistics_over_the_rollouts_that_have_them() {
    let rollouts = [
        BTreeMap::from([("acc".to_owned(), 1.0), ("fmt".to_owned(), 0.25)]),
        BTreeMap::from([("acc".to_owned(), 0.0)]),
        BTreeMap::from([("acc".to_owned(), 0.5), ("fmt".to_owned(), 0.25)]),
        BTreeMap::from([("acc".to_owned(), 0.5)]),
    ];
    let components: Vec<_> = rollouts.iter().collect();
    let facts = GroupFacts { components: &components, ..group_facts(&[0.0, 1.0, 0.5, 0.5]) };
    for when in [
        "components.acc.std > 0.353553390 && components.acc.std < 0.353553391",
        "components.acc.min == 0.0 && components.acc.max == 1.0",
        "components.fmt.std < 1e-6 && components[\"fmt\"].mean == 0.25",
        "components.acc.count == 4 && components.fmt.count == 2 && 2 * components.fmt.count == size / 2",
        "has(components.acc) && !has(components.cost)",
        "!['acc', 'fmt'].all(name, components[name].std < 1e-6)",
        "['acc', 'fmt'].exists(name, components[name].std < 1e-6)",
        "has(components.acc.std)",
    ] {
        assert_eq!(evaluate_group(when, &facts), Some(true), "{when}");
    }
    assert_eq!(evaluate_group("components.cost.std < 1e-6", &facts), None);
}

#[test]
fn all_components_that_a_filter_may_read_are_known_from_its_text() {
    let named = |when: &str| compile(&[group_rule("filter", when)]).components().iter().cloned().collect::<Vec<_>>();
    assert_eq!(named("components.acc.std < 1e-6 && components['fmt'].mean > 0.0"), ["acc", "fmt"]);
    assert_eq!(named("['a', 'b'].all(name, has(components.c) || components[name].std < 1.0)"), ["a", "b", "c"]);
    assert!(named("environment == 'acc'").is_empty());
}

#[test]
fn statistics_of_no_rewards_are_null() {
    let facts = GroupFacts { environment: None, ..group_facts(&[]) };
    for when in [
        "reward_mean == null",
        "reward_std == null",
        "reward_min == null",
        "reward_max == null",
        "environment == null",
        "rewards.size() == 0",
    ] {
        assert_eq!(evaluate_group(when, &facts), Some(true), "{when}");
    }
}

#[test]
fn doubles_compare_with_whole_numbers() {
    let components = components();
    let facts = rollout_facts(&components, None);
    for when in ["reward > 0", "reward < 1", "reward != 1", "reward_components.tests == 1"] {
        assert_eq!(evaluate_rollout(when, &facts), Some(true), "{when}");
    }
}

#[test]
fn allowed_functions_work() {
    let components = components();
    let facts = rollout_facts(&components, None);
    for when in [
        "status.contains('ort') && status.startsWith('ab') && status.endsWith('ed')",
        "status.size() == 7 && size(status) == 7",
        "environment.matches('^swe-(bench|gym)$') && matches(environment, 'bench')",
        "!environment.matches('^bench')",
        "max(tokens, 1000) == 1000 && min(1, 2, 3) == 1",
        "double(tokens) * 0.5 > 449.0 && int(reward) == 0 && uint(tokens) == 900u",
        "string(tokens) == '900' && bytes('a') == b'a' && bool('true') && dyn(1) == 1",
        "'tests' in reward_components && has(reward_components.cost)",
        "reward_components.exists_one(k, reward_components[k] < 0)",
    ] {
        assert_eq!(evaluate_rollout(when, &facts), Some(true), "{when}");
    }
}

#[test]
fn metadata_is_looked_up_as_it_was_posted() {
    let (components, metadata) = (components(), metadata(METADATA));
    let facts = rollout_facts(&components, Some(&metadata));
    for when in [
        "metadata['task'].startsWith('swe')",
        "metadata.attempt + 1 == 4",
        "metadata.score * 4.0 == 1.0",
        "'flaky' in metadata.tags && metadata.tags[0] == 'hard'",
        "metadata.host.zone == 'b'",
        "metadata.none == null && has(metadata.none) && !has(metadata.other)",
        "metadata.seed == 18446744073709551615u",
        "metadata.tags.exists(t, t.matches('^fl'))",
    ] {
        assert_eq!(evaluate_rollout(when, &facts), Some(true), "{when}");
    }
}

#[test]
fn records_that_cannot_be_evaluated_are_reported_and_do_not_match() {
    let components = components();
    let flag = metadata(r#"{"flag": 1}"#);
    let deep = metadata(&format!("{}{}", "[".repeat(500), "]".repeat(500)));
    let facts = RolloutFacts { reward: None, ..rollout_facts(&components, Some(&flag)) };
    assert_eq!(evaluate_rollout("reward < 0.5", &facts), None);
    assert_eq!(evaluate_rollout("metadata.missing == 1", &facts), None);
    assert_eq!(evaluate_rollout("metadata.flag", &facts), None);
    let facts = rollout_facts(&components, Some(&deep));
    assert_eq!(evaluate_rollout("size(metadata) == 1", &facts), None);
}

#[test]
fn the_first_match_wins_and_failures_before_it_are_named() {
    let mut rules = [
        rollout_rule("no-task", "metadata.task == 'x'"),
        group_rule("flat", "reward_std < 1e-6"),
        rollout_rule("good", "reward > 0.9"),
        rollout_rule("long", "tokens > 800"),
        rollout_rule("also-long", "tokens > 700"),
        rollout_rule("no-task-either", "metadata.task == 'y'"),
    ];
    rules[3].action = FilterAction::Mask;
    let filters = compile(&rules);
    let components = components();

    let evaluation = filters.evaluate_rollout(&rollout_facts(&components, None));
    let matched = evaluation.matched.expect("a rollout of 900 tokens is long");
    assert_eq!((matched.name, matched.action), ("long", FilterAction::Mask));
    assert_eq!(evaluation.failed, ["no-task"]);

    let short = RolloutFacts { tokens: 600, ..rollout_facts(&components, None) };
    let evaluation = filters.evaluate_rollout(&short);
    assert_eq!(evaluation.matched, None);
    assert_eq!(evaluation.failed, ["no-task", "no-task-either"]);

    let evaluation = filters.evaluate_group(&group_facts(&[1.0, 1.0]));
    let matched = evaluation.matched.expect("equal rewards are flat");
    assert_eq!((matched.name, matched.action), ("flat", FilterAction::Drop));
}

#[test]
fn a_loop_over_the_result_of_a_loop_is_accepted() {
    let when = "rewards.map(r, r * 2.0).filter(r, r > 1.0).size() == 1";
    assert_eq!(evaluate_group(when, &group_facts(&[0.25, 0.75])), Some(true));
}

#[test]
fn what_is_accepted_evaluates_on_a_small_stack() {
    let sum = format!("tokens > 1{}", "+1".repeat(97));
    let choice = format!("{}false", "tokens < 1 ? true : ".repeat(30));
    let facts = components();
    for when in [sum, choice] {
        let evaluate = || evaluate_rollout(&when, &rollout_facts(&facts, None));
        let verdict = thread::scope(|threads| {
            thread::Builder::new()
                .stack_size(1 << 20)
                .spawn_scoped(threads, evaluate)
                .expect("the test starts a thread")
                .join()
                .expect("the stack is large enough")
        });
        assert!(verdict.is_some(), "{when}");
    }
}
