//! Tests of the bounds of cost: when rules are written, and again for each record.

use std::collections::BTreeMap;

use forebay_wire::{FilterRule, FilterScope};

use super::{
    super::{Filters, cost},
    compile, group_facts, group_rule, metadata, rollout_facts, rollout_rule, rule,
};

fn refusals(rules: &[FilterRule]) -> Vec<(usize, String)> {
    let violations = Filters::compile(rules).expect_err("the rules must be refused");
    violations.into_iter().map(|violation| (violation.index, violation.message)).collect()
}

/// As many short tags as fit into the metadata of a trajectory.
fn many_tags() -> Box<serde_json::value::RawValue> {
    metadata(&format!("{{\"tags\":[{}1]}}", "1,".repeat(130_000)))
}

#[test]
fn what_doubles_in_every_step_is_refused_without_being_evaluated() {
    for scope in [FilterScope::Rollout, FilterScope::Group] {
        let when = format!("[1]{}.exists(x, true)", ".map(x, [x, x])".repeat(60));
        let violations = refusals(&[rule("double", scope, &when)]);
        assert!(violations[0].1.contains("steps"), "{violations:?}");
    }
    let sum = format!("size({}) > 3", vec!["[metadata]"; 90].join(" + "));
    compile(&[rollout_rule("sum", &sum)]);
}

#[test]
fn group_filters_are_bounded_together() {
    let loops = |count: usize| -> Vec<FilterRule> {
        (0..count).map(|index| group_rule(&format!("f{index}"), "rewards.exists(r, r > 0.5 && r < 0.7)")).collect()
    };
    compile(&loops(4));
    let violations = refusals(&loops(64));
    assert_eq!(violations.len(), 1);
    assert!(violations[0].0 > 4 && violations[0].1.contains("steps"), "{violations:?}");
    compile(&(0..64).map(|index| group_rule(&format!("f{index}"), "reward_std < 0.1")).collect::<Vec<_>>());
}

#[test]
fn what_group_filters_may_take_holds_for_groups_of_any_size() {
    let rules: Vec<FilterRule> =
        (0..4).map(|index| group_rule(&format!("f{index}"), "rewards.all(r, r < 0.5) && rewards[0] > 2.0")).collect();
    let filters = compile(&rules);
    for size in [1, 2, 63, 64, 65, 1_000, 65_536] {
        let rewards = vec![0.25; size];
        assert!(filters.evaluate_group(&group_facts(&rewards)).over_budget.is_empty(), "{size}");
    }
}

#[test]
fn filters_that_would_cost_too_much_on_a_record_are_not_evaluated_and_named() {
    let exists = |name: &str| rollout_rule(name, "metadata.tags.exists(t, t == 2 || t == 3)");
    let rules: Vec<FilterRule> =
        ["a", "b", "c", "d"].map(exists).into_iter().chain([rollout_rule("last", "tokens > 1")]).collect();
    let filters = compile(&rules);
    let (components, large, small) = (BTreeMap::new(), many_tags(), metadata("{\"tags\":[1,2]}"));
    let evaluation = filters.evaluate_rollout(&rollout_facts(&components, Some(&large)));
    assert_eq!(evaluation.matched.map(|found| found.name), Some("last"), "what is cheap is asked");
    assert!((1..4).contains(&evaluation.over_budget.len()), "{evaluation:?}");
    assert_eq!(evaluation.failed, evaluation.over_budget);
    assert_eq!(evaluation.over_budget.last(), Some(&"d"), "the first are asked");
    let evaluation = filters.evaluate_rollout(&rollout_facts(&components, Some(&small)));
    assert_eq!((evaluation.matched.map(|found| found.name), evaluation.failed.len()), (Some("a"), 0));
}

#[test]
fn patterns_count_with_the_text_that_they_may_look_at() {
    let steps = |when: &str, amounts| {
        let rules = [rollout_rule("f", when)];
        let filters = compile(&rules);
        cost::steps(filters.rollout[0].program.expression(), amounts, &filters.patterns)
    };
    let amounts = cost::Amounts { metadata: 1_000, rewards: 0 };
    let plain = steps("metadata.x.contains('abc')", amounts);
    let short = steps("metadata.x.matches('abc')", amounts);
    let long = steps("metadata.x.matches('\\\\w{4}')", amounts);
    assert!(plain < short && short * 4 < long, "{plain} {short} {long}");
    assert!(steps("environment.matches('\\\\w{4}')", amounts) < long / 100);
}

#[test]
fn patterns_of_a_policy_are_bounded_together() {
    let large = |index: usize| rollout_rule(&format!("f{index}"), &format!("environment.matches('{index}\\\\w{{4}}')"));
    let rules: Vec<FilterRule> = (0..64).map(large).collect();
    let violations = refusals(&rules);
    assert!(violations.iter().all(|(_, message)| message.contains("bytes when compiled")), "{violations:?}");
    assert!(violations.len() > 32, "{}", violations.len());
    // Rules that were accepted before can still be read.
    Filters::compile_stored(&rules).expect("these rules were accepted before");
    compile(
        &(0..64)
            .map(|index| rollout_rule(&format!("f{index}"), &format!("environment.matches('^task-{index}$')")))
            .collect::<Vec<_>>(),
    );
}
