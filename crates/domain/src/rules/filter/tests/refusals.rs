//! Tests of expressions that are refused when rules are written.

use forebay_wire::{FilterAction, FilterRule, FilterScope};

use super::{
    super::{FilterViolation, Filters, RULES_MAX},
    compile, evaluate_group, group_facts, group_rule, rollout_rule, rule,
};
use crate::reasons;

fn violations(rules: &[FilterRule]) -> Vec<FilterViolation> {
    Filters::compile(rules).expect_err("the rules must be refused")
}

/// The only fault of an expression.
#[track_caller]
fn refusal(scope: FilterScope, when: &str) -> String {
    let violations = violations(&[rule("filter", scope, when)]);
    let [violation] = violations.as_slice() else {
        panic!("one violation of {when}, not {violations:?}");
    };
    assert_eq!((violation.index, violation.field), (0, "when"));
    violation.message.clone()
}

#[track_caller]
fn assert_refused(scope: FilterScope, when: &str, message: &str) {
    let refusal = refusal(scope, when);
    assert!(refusal.contains(message), "{when}: {refusal}");
}

#[test]
fn the_sixty_fifth_rule_is_refused() {
    let rules: Vec<_> = (0..=RULES_MAX).map(|index| rollout_rule(&format!("filter-{index}"), "reward < 0")).collect();
    compile(&rules[..RULES_MAX]);
    let violations = violations(&rules);
    assert_eq!(violations.len(), 1);
    assert_eq!((violations[0].index, violations[0].field), (64, "name"));
}

#[test]
fn names_have_1_to_64_plain_bytes() {
    for name in ["", &"a".repeat(65), "two words", "größe", "a/b"] {
        let violations = violations(&[rollout_rule(name, "reward < 0")]);
        assert_eq!(violations.len(), 1, "{name}");
        assert_eq!(violations[0].field, "name", "{name}");
    }
    for name in ["A.z_0-9", &"a".repeat(64)] {
        compile(&[rollout_rule(name, "reward < 0")]);
    }
}

#[test]
fn names_are_unique_over_both_scopes() {
    let violations = violations(&[rollout_rule("zero", "reward == 0"), group_rule("zero", "reward_mean == 0")]);
    assert_eq!(violations.len(), 1);
    assert_eq!((violations[0].index, violations[0].field), (1, "name"));
    assert!(violations[0].message.contains("`zero`"));
}

#[test]
fn names_of_built_in_reasons_are_refused() {
    for name in reasons::ALL {
        let violations = violations(&[rollout_rule(name, "reward < 0")]);
        assert_eq!(violations.len(), 1, "{name}");
        assert!(violations[0].message.contains("built-in"), "{name}");
        // A policy that has such a filter from an earlier version goes on.
        Filters::compile_stored(&[rollout_rule(name, "reward < 0")]).expect("the rules can be used");
    }
}

#[test]
fn groups_cannot_be_masked() {
    let mut rules = [group_rule("flat", "reward_std < 1e-6")];
    rules[0].action = FilterAction::Mask;
    let violations = violations(&rules);
    assert_eq!(violations.len(), 1);
    assert_eq!((violations[0].index, violations[0].field), (0, "action"));
}

#[test]
fn every_violation_is_returned_in_the_order_of_the_rules() {
    let rules = [
        rollout_rule("types", "reward * 2 > 1.0"),
        rollout_rule("good", "reward > 1.0"),
        rollout_rule("bad name", "nope > 1 || nada > 1"),
    ];
    let places: Vec<_> = violations(&rules).iter().map(|violation| (violation.index, violation.field)).collect();
    assert_eq!(places, [(0, "when"), (2, "name"), (2, "when"), (2, "when")]);
}

#[test]
fn expressions_have_at_most_4_kib() {
    let padding = " ".repeat(4096 - "reward < 0".len());
    compile(&[rollout_rule("filter", &format!("reward < 0{padding}"))]);
    let longer = format!("reward < 0 {padding}");
    assert_refused(FilterScope::Rollout, &longer, "at most 4096 bytes");
}

#[test]
fn syntax_errors_say_where() {
    assert_refused(FilterScope::Rollout, "", "line 1, column 1: ");
    assert_refused(FilterScope::Rollout, "reward <", "line 1, column 9: ");
    assert_refused(FilterScope::Rollout, "reward < 0 &&\n|| true", "line 2, column 1: ");
    assert_refused(FilterScope::Rollout, "has(reward)", "line 1, column 5: ");
}

#[test]
fn unknown_names_are_refused_where_evaluation_would_skip_them() {
    let refusal = refusal(FilterScope::Rollout, "reward < 0 || nope > 1");
    assert!(refusal.starts_with("line 1, column 15: unknown name `nope`"), "{refusal}");
    assert!(refusal.contains("max_segment_tokens"), "{refusal}");
}

#[test]
fn columns_count_characters() {
    assert_refused(FilterScope::Rollout, "status == 'é' ||\n  nope", "line 2, column 3: ");
    assert_refused(FilterScope::Rollout, "status == 'é' || nope", "line 1, column 18: ");
}

#[test]
fn names_of_the_other_scope_are_unknown() {
    assert_refused(FilterScope::Rollout, "reward_mean > 0", "unknown name `reward_mean`");
    assert_refused(FilterScope::Group, "reward > 0", "unknown name `reward`");
}

#[test]
fn a_loop_variable_is_known_only_in_its_loop() {
    compile(&[group_rule("filter", "rewards.all(r, r > 0)")]);
    let outside = "rewards.all(r, r > 0) && r > 0";
    assert_refused(FilterScope::Group, outside, "column 26: unknown name `r`");
    assert_refused(FilterScope::Group, "r.all(r, r > 0)", "column 1: unknown name `r`");
}

#[test]
fn functions_outside_the_list_are_refused() {
    for (when, message) in [
        ("timestamp(status) == null", "no function `timestamp` with 1 arg"),
        ("status.lowerAscii() == 'x'", "no method `lowerAscii` with 0 arg"),
        ("type(reward) == null", "no function `type`"),
        ("contains(status, 'a')", "no function `contains` with 2 arg"),
        ("max() == null", "no function `max` with 0 arg"),
        ("metadata.tags.all(t)", "no method `all` with 1 arg"),
    ] {
        let violations = violations(&[rollout_rule("filter", when)]);
        let found = violations.iter().any(|violation| violation.message.contains(message));
        assert!(found, "{when}: {violations:?}");
    }
}

#[test]
fn optional_values_and_messages_are_refused() {
    assert_refused(FilterScope::Rollout, "metadata.?task == null", "unsupported syntax");
    assert_refused(FilterScope::Rollout, "A{b: 1} == null", "messages");
    let violations = violations(&[rollout_rule("filter", "optional.of(reward).hasValue()")]);
    assert!(violations.iter().any(|violation| violation.message.contains("`optional`")));
}

#[test]
fn nested_loops_are_refused() {
    let bomb = "rewards.all(a, rewards.all(b, rewards.all(c, rewards.all(d, a+b+c+d >= 0.0))))";
    assert_refused(FilterScope::Group, bomb, "column 27: loops");
    let hidden = "metadata.a.map(a, [a, metadata.b.filter(b, b > a).size()]).size() > 0";
    assert_refused(FilterScope::Rollout, hidden, "loops");
}

#[test]
fn loop_bodies_cannot_look_at_whole_collections() {
    let message = "`metadata` cannot be used in the body of a loop";
    for when in [
        "metadata.a.map(x, metadata.a).size() > 0",
        "metadata.a.all(x, x in metadata.b)",
        "reward_components.exists(k, k == metadata.task)",
    ] {
        assert_refused(FilterScope::Rollout, when, message);
    }
    let message = "can only be indexed in the body of a loop";
    assert_refused(FilterScope::Group, "rewards.all(r, r < max(rewards))", message);
    assert_refused(FilterScope::Group, "rewards.all(r, r < rewards[size(rewards) - 1])", message);

    let facts = group_facts(&[0.5, 0.5]);
    assert_eq!(evaluate_group("rewards.all(r, r == rewards[0])", &facts), Some(true));
}

#[test]
fn patterns_must_be_literals_that_compile() {
    let literal = "must be a string literal";
    assert_refused(FilterScope::Rollout, "status.matches(environment)", literal);
    assert_refused(FilterScope::Rollout, "matches(status, 'a' + 'b')", literal);
    assert_refused(FilterScope::Rollout, "metadata.task.matches('(')", "unclosed group");
    assert_refused(FilterScope::Rollout, r"status.matches(r'(\w{99}){99}')", "size limit");
}

#[test]
fn expressions_that_would_exhaust_a_stack_are_refused() {
    let sum = format!("tokens > 1{}", "+1".repeat(2040));
    let parentheses = format!("{}true{}", "(".repeat(2000), ")".repeat(2000));
    let calls = format!("tokens > {}1", "-(".repeat(1000));
    for when in [sum, parentheses, calls] {
        assert_refused(FilterScope::Rollout, &when, "nested");
    }
}

#[test]
fn results_other_than_true_and_false_are_refused() {
    let message = "true or false is needed here, not";
    for when in [
        "reward",
        "status",
        "reward < 0 || status",
        "reward > 0 && !tokens",
        "reward < 0 ? status : true",
        "tokens ? true : false",
        "reward_components.all(k, reward_components[k])",
    ] {
        let refusal = refusal(FilterScope::Rollout, when);
        assert!(refusal.contains(message) || refusal.contains("no matching overload"), "{when}: {refusal}");
    }
}

#[test]
fn type_errors_are_refused_where_evaluation_would_skip_them() {
    let message = "write 2.0 rather than 2";
    for (scope, when) in [
        (FilterScope::Rollout, "reward * 2 > 1.0"),
        (FilterScope::Rollout, "status == 'aborted' && 2 * reward > 1.0"),
        (FilterScope::Rollout, "reward == null ? reward * 2 > 1.0 : false"),
        (FilterScope::Rollout, "reward_components.format * 2 > 1.0"),
        (FilterScope::Rollout, "reward_components['format'] + 1 > 1.0"),
        (FilterScope::Group, "rewards.all(r, r > 0.0 && r * 2 > 1.0)"),
        (FilterScope::Group, "rewards.exists(r, r == 0.0 || r - 1 > 1.0)"),
        (FilterScope::Group, "rewards.map(r, r > 0.0, r * 2).size() > 0"),
    ] {
        assert_refused(scope, when, message);
    }
    assert_refused(FilterScope::Rollout, "reward > 1 && status > 1", "column 22: ");
    assert_refused(FilterScope::Group, "size.all(r, r > 0)", "column 9: ");
}

#[test]
fn what_depends_on_the_data_refuses_nothing() {
    for when in [
        "metadata.task == 'x'",
        "metadata['task'].difficulty * 2 > 1",
        "metadata.tags.exists(t, t == 'x')",
        "reward_components.tests < 0.5",
        "tokens / (segments - 2) > 1000",
        "int(environment) > 3",
    ] {
        compile(&[rollout_rule("filter", when)]);
    }
    compile(&[group_rule("filter", "rewards[7] > 0.5")]);
}

#[test]
fn components_are_asked_for_by_literal_names() {
    for when in [
        "components == {}",
        "'acc' in components",
        "components.all(name, components[name].std < 1e-6)",
        "components[environment].std < 1e-6",
        "components['a' + 'b'].std < 1e-6",
        "[environment].exists(name, components[name].std < 1e-6)",
        "['a' + 'b'].exists(name, components[name].std < 1e-6)",
    ] {
        let message = if when.contains("components[") { "string literal" } else { "only be asked for one" };
        let found = violations(&[group_rule("filter", when)]);
        assert!(found.iter().any(|fault| fault.message.contains(message)), "{when}: {found:?}");
    }
    // A loop may have a variable of this name.
    compile(&[group_rule("loop", "rewards.exists(components, components > 0.5)")]);
    compile(&[rollout_rule("loop", "metadata.exists(components, components == 'a')")]);
    assert_refused(FilterScope::Group, "components.acc.sdt < 1e-6", "a component has mean, std, min, max, count");
    assert_refused(FilterScope::Group, "components.acc['sdt'] < 1e-6", "a component has mean, std, min, max, count");
    assert_refused(FilterScope::Group, "components.acc < 1e-6", "does not take");
    assert_refused(FilterScope::Group, "components.acc.mean + 1 > 0.5", "2.0 rather than 2");
    assert_refused(FilterScope::Rollout, "components.acc.mean > 0.5", "unknown name `components`");
}
