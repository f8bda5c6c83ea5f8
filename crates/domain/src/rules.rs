//! The rules of a policy, validated together and with their filters compiled.

pub mod changes;
pub mod filter;

use std::collections::{BTreeMap, BTreeSet};

use forebay_wire::{
    Advantage, AdvantageName, BatchOrder, FilterRule, Gdpo, Gigpo, LossWeighting, PolicyRules, Requirement, ScoreWork,
    StalenessAction, TurnReturn, Violation, Whiten,
};

use self::filter::{FilterViolation, Filters, reward::RewardExpression};
use super::{
    batch::GROUPS_MAX,
    columns,
    formats::canonical::escape,
    ids::{GroupId, check_name},
    states::Verdict,
    trajectory::{GROUP_SIZE_MAX, REWARD_COMPONENTS_MAX},
};

/// Seconds of ten years. A longer duration is a typing error.
const DURATION_S_MAX: u64 = 315_360_000;

/// The least size of a stored payload: its header alone takes as many bytes.
const PAYLOAD_BYTES_MIN: u64 = 64;

/// Least and greatest divisor of `constant` loss weighting. With these bounds, weights and their inverses fit a 32-bit
/// float in any batch.
const LOSS_CONSTANT_MIN: f64 = 1e-20;
const LOSS_CONSTANT_MAX: f64 = 1e20;

/// The most environments with rules of their own. Each is a label of metrics, and a search whenever a batch is cut.
const ENVIRONMENTS_MAX: usize = 64;

/// Least and greatest weight of an environment. With these bounds, no environment has too small a share to be counted.
const ENVIRONMENT_WEIGHT_MIN: f64 = 1e-6;
const ENVIRONMENT_WEIGHT_MAX: f64 = 1e6;

/// Least and greatest weight of a reward component, without its sign. With these bounds, no component is lost beside
/// another, and rewards that a double holds do not overflow.
const COMPONENT_WEIGHT_MIN: f64 = 1e-6;
const COMPONENT_WEIGHT_MAX: f64 = 1e6;

/// The greatest weight of what turns of the same state say, beside 1 for what whole rollouts say.
const OMEGA_MAX: f64 = 1e6;

/// The most scores that a rollout may have to wait for.
const REQUIRED_SCORES_MAX: usize = 16;

/// The most leases of one piece of work for scorers.
const WORK_ATTEMPTS_MAX: u32 = 1_000;

/// The most attempts of a session. Each may have many keys.
const SESSION_ATTEMPTS_MAX: u32 = 100;

/// Seconds of a day: the longest lease, also after a heartbeat.
pub const LEASE_TTL_S_MAX: u64 = 86_400;

/// Rules that were checked. Only [`Rules::parse`] and [`Rules::stored`] make them.
#[derive(Debug)]
pub struct Rules {
    wire: PolicyRules,
    filters: Filters,
    /// The expression of the reward, if the rules have one.
    reward: Option<RewardExpression>,
    /// The reward components that filters of groups and advantages read.
    components: BTreeSet<String>,
}

impl Rules {
    /// Checks all rules. On failure, returns every violation with its JSON pointer.
    pub fn parse(wire: PolicyRules) -> Result<Self, Vec<Violation>> {
        let mut violations = Vec::new();
        check_numbers(&wire, &mut violations);
        let reward = wire.scores.reward.as_deref().map(RewardExpression::compile).transpose();
        match (Filters::compile(&wire.filter), reward) {
            (Ok(filters), Ok(reward)) if violations.is_empty() => return Ok(Self::new(wire, filters, reward)),
            (filters, reward) => {
                violations.extend(reward.err().into_iter().flat_map(reward_violations));
                violations.extend(filters.err().into_iter().flat_map(filter_violations));
            }
        }
        Err(violations)
    }

    /// Reads rules that were checked when they were written. They are not checked again, because an earlier version may
    /// have allowed more, and groups that are open under them must still be decided by them.
    pub fn stored(wire: PolicyRules) -> Result<Self, Vec<Violation>> {
        let filters = Filters::compile_stored(&wire.filter).map_err(filter_violations)?;
        let reward = wire.scores.reward.as_deref().map(RewardExpression::compile_stored).transpose();
        let reward = reward.map_err(reward_violations)?;
        Ok(Self::new(wire, filters, reward))
    }

    /// The same rules with other filters, which are checked like those of new rules.
    pub fn with_filters(&self, filter: Vec<FilterRule>) -> Result<Self, Vec<Violation>> {
        let filters = Filters::compile(&filter).map_err(filter_violations)?;
        let reward = self.wire.scores.reward.as_deref().map(RewardExpression::compile_stored).transpose();
        let reward = reward.map_err(reward_violations)?;
        Ok(Self::new(PolicyRules { filter, ..self.wire.clone() }, filters, reward))
    }

    fn new(wire: PolicyRules, filters: Filters, reward: Option<RewardExpression>) -> Self {
        let mut components = filters.components().clone();
        if let Advantage::Gdpo(gdpo) = &wire.advantage {
            components.extend(gdpo.components.keys().cloned());
        }
        Self { wire, filters, reward, components }
    }

    /// The filters of both scopes.
    #[must_use]
    pub fn filters(&self) -> &Filters {
        &self.filters
    }

    /// The expression of the reward, if the rules have one.
    #[must_use]
    pub fn reward(&self) -> Option<&RewardExpression> {
        self.reward.as_ref()
    }

    /// Whether rollouts have scores that are not those of their producers, or a reward that is computed.
    #[must_use]
    pub fn use_scores(&self) -> bool {
        !self.wire.scores.required.is_empty() || self.reward.is_some()
    }

    /// The required scores that are not among these, in the order of the rules.
    #[must_use]
    pub fn missing_scores(&self, scores: &BTreeMap<String, f64>) -> Vec<String> {
        self.wire.scores.required.iter().filter(|name| !scores.contains_key(*name)).cloned().collect()
    }

    /// How scorers lease the work of giving a score; none if they cannot.
    #[must_use]
    pub fn work(&self, score: &str) -> Option<&ScoreWork> {
        self.wire.scores.work.get(score)
    }

    /// Whether scorers can lease work.
    #[must_use]
    pub fn have_work(&self) -> bool {
        !self.wire.scores.work.is_empty()
    }

    /// Whether something must be evaluated to judge a rollout.
    #[must_use]
    pub fn evaluate_rollouts(&self) -> bool {
        self.filters.have_rollout_filters() || self.reward.is_some()
    }

    /// Whether what is evaluated to judge a rollout depends on the versions of the rollout and of the policy.
    #[must_use]
    pub fn depend_on_versions(&self) -> bool {
        self.filters.depend_on_versions() || self.reward.as_ref().is_some_and(RewardExpression::depends_on_versions)
    }

    /// The most steps that it takes to judge a typical rollout.
    #[must_use]
    pub fn typical_rollout_steps(&self) -> u64 {
        let reward = self.reward.as_ref().map_or(0, RewardExpression::typical_steps);
        self.filters.typical_rollout_steps().saturating_add(reward)
    }

    /// The columns that every rollout must have.
    pub fn required(&self) -> impl Iterator<Item = Requirement> {
        let posted = self.wire.advantage == Advantage::Named(AdvantageName::Posted)
            && !self.wire.require.contains(&Requirement::Advantages);
        self.wire.require.iter().copied().chain(posted.then_some(Requirement::Advantages))
    }

    /// Whether each token has an advantage of its own, which is delivered in place of that of the rollout.
    #[must_use]
    pub fn tokens_have_advantages(&self) -> bool {
        self.compare_turns() || self.wire.advantage == Advantage::Named(AdvantageName::Posted)
    }

    /// Whether the advantages are those of turns.
    #[must_use]
    pub fn compare_turns(&self) -> bool {
        matches!(self.wire.advantage, Advantage::TurnReturn(_) | Advantage::Gigpo(_))
    }

    /// Whether the decision of a group reads reward components.
    #[must_use]
    pub fn read_components(&self) -> bool {
        !self.components.is_empty()
    }

    /// Whether the decision of a group reads this reward component.
    #[must_use]
    pub fn reads_component(&self, name: &str) -> bool {
        self.components.contains(name)
    }

    /// Those reward components of a rollout that the decision of its group reads.
    #[must_use]
    pub fn components_of(&self, rollout: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
        let of_name = |name: &String| rollout.get(name).map(|value| (name.clone(), *value));
        self.components.iter().filter_map(of_name).collect()
    }

    /// Whether the advantages of the batch are whitened when it is read.
    #[must_use]
    pub fn whiten(&self) -> bool {
        matches!(&self.wire.advantage, Advantage::Gdpo(Gdpo { whiten: Whiten::Batch, .. }))
    }

    /// The bytes that the compiled filters hold, approximately.
    #[must_use]
    pub fn bytes_held(&self) -> usize {
        let reward = self.reward.as_ref().map_or(0, RewardExpression::bytes_held);
        size_of::<Self>() + self.filters.bytes_held() + reward
    }

    /// The number of rollouts of one batch of whole groups.
    #[must_use]
    pub fn batch_rollouts(&self) -> u64 {
        batch_rollouts(&self.wire)
    }

    /// Whether a rollout counts in the mean reward of what arrives. A filter that drops without a look at the reward, such
    /// as one by a label, says that the rollout is no training data. A filter by the reward selects from training data.
    #[must_use]
    pub fn judges(&self, verdict: Verdict, reason: Option<&str>) -> bool {
        let dropped_by = reason.filter(|_| verdict == Verdict::Dropped);
        dropped_by
            .is_none_or(|filter| self.filters.rollout_filter_names(filter, &["reward", "reward_components", "scores"]))
    }

    /// The number of rollouts that suffice for a group of this size.
    #[must_use]
    pub fn min_size(&self, size: u32) -> u32 {
        self.wire.group.min_size.map_or(size, |min_size| min_size.min(size))
    }
}

impl std::ops::Deref for Rules {
    type Target = PolicyRules;

    fn deref(&self) -> &PolicyRules {
        &self.wire
    }
}

fn filter_violations(found: Vec<FilterViolation>) -> Vec<Violation> {
    let on_wire = |violation: FilterViolation| Violation {
        pointer: format!("/filter/{}/{}", violation.index, violation.field),
        detail: violation.message,
    };
    found.into_iter().map(on_wire).collect()
}

fn reward_violations(messages: Vec<String>) -> Vec<Violation> {
    messages.into_iter().map(|detail| Violation { pointer: "/scores/reward".to_owned(), detail }).collect()
}

fn check_numbers(rules: &PolicyRules, violations: &mut Vec<Violation>) {
    let mut within = |pointer: &str, value: u64, min: u64, max: u64| {
        if !(min..=max).contains(&value) {
            let detail = format!("must be {min} to {max}, is {value}");
            violations.push(Violation { pointer: pointer.to_owned(), detail });
        }
    };
    let group = &rules.group;
    within("/group/size", group.size.into(), 1, GROUP_SIZE_MAX.into());
    if let Some(min_size) = group.min_size {
        within("/group/min_size", min_size.into(), 1, group.size.max(1).into());
    }
    within("/group/timeout_s", group.timeout_s, 1, DURATION_S_MAX);
    within("/batch/groups", rules.batch.groups.into(), 1, GROUPS_MAX.into());
    if let Some(max_tokens) = rules.batch.max_tokens {
        within("/batch/max_tokens", max_tokens, 1, i64::MAX as u64);
    }
    within("/lease/ttl_s", rules.lease.ttl_s, 1, LEASE_TTL_S_MAX);
    within("/lease/max_deliveries", rules.lease.max_deliveries.into(), 1, 1_000);
    within("/lease/max_resumes", rules.lease.max_resumes.into(), 0, 1_000);
    within("/backlog/max_ready_rollouts", rules.backlog.max_ready_rollouts, 1, i64::MAX as u64);
    within("/backlog/max_bytes", rules.backlog.max_bytes, 1, i64::MAX as u64);
    within("/staleness/wait_s", rules.staleness.wait_s, 1, DURATION_S_MAX);
    within("/admissions/eval", rules.admissions.eval, 1, i64::MAX as u64);
    within("/sessions/max_attempts", rules.sessions.max_attempts.into(), 1, SESSION_ATTEMPTS_MAX.into());
    let retention = &rules.retention;
    within("/retention/trained_s", retention.trained_s, 0, DURATION_S_MAX);
    within("/retention/settled_s", retention.settled_s, 0, DURATION_S_MAX);
    within("/retention/dropped_s", retention.dropped_s, 0, DURATION_S_MAX);
    within("/retention/evaluated_s", retention.evaluated_s, 0, DURATION_S_MAX);
    within("/retention/tombstone_s", retention.tombstone_s, 0, DURATION_S_MAX);
    if rules.staleness.action == StalenessAction::Wait && rules.batch.order == BatchOrder::Freshest {
        let detail = "must be `fifo` beside `staleness.action = \"wait\"`, which delivers the oldest groups first";
        violations.push(Violation { pointer: "/batch/order".to_owned(), detail: detail.to_owned() });
    }
    check_environments(rules, violations);
    check_backlog(rules, violations);
    check_advantage(rules, violations);
    check_loss_constant(rules, violations);
    check_teacher(rules, violations);
    check_scores(rules, violations);
    columns::check_rules(rules, violations);
}

fn check_scores(rules: &PolicyRules, violations: &mut Vec<Violation>) {
    let required = &rules.scores.required;
    let mut push = |pointer: String, detail: String| violations.push(Violation { pointer, detail });
    if required.len() > REQUIRED_SCORES_MAX {
        push("/scores/required".into(), format!("must be at most {REQUIRED_SCORES_MAX} names, are {}", required.len()));
    }
    for (index, name) in required.iter().enumerate() {
        let pointer = format!("/scores/required/{index}");
        if let Err(detail) = check_name(name) {
            push(pointer, detail);
        } else if required[..index].contains(name) {
            push(pointer, format!("`{name}` is in the list already"));
        }
    }
    if !(1..=DURATION_S_MAX).contains(&rules.scores.timeout_s) {
        let detail = format!("must be 1 to {DURATION_S_MAX}, is {}", rules.scores.timeout_s);
        push("/scores/timeout_s".into(), detail);
    }
    for (name, work) in &rules.scores.work {
        let pointer = format!("/scores/work/{}", escape(name));
        if !required.contains(name) {
            push(pointer.clone(), format!("`{name}` is not among `scores.required`, so no rollout waits for it"));
        }
        if !(1..=WORK_ATTEMPTS_MAX).contains(&work.max_attempts) {
            let detail = format!("must be 1 to {WORK_ATTEMPTS_MAX}, is {}", work.max_attempts);
            push(format!("{pointer}/max_attempts"), detail);
        }
    }
}

fn check_environments(rules: &PolicyRules, violations: &mut Vec<Violation>) {
    let environments = &rules.batch.environments;
    let mut push = |pointer: String, detail: String| violations.push(Violation { pointer, detail });
    if environments.len() > ENVIRONMENTS_MAX {
        let detail = format!("must be at most {ENVIRONMENTS_MAX} environments, are {}", environments.len());
        push("/batch/environments".into(), detail);
        return;
    }
    for (label, of) in environments {
        let pointer = format!("/batch/environments/{}", escape(label));
        if let Err(error) = GroupId::parse(label) {
            push(pointer.clone(), format!("the label {error}"));
        }
        if !(ENVIRONMENT_WEIGHT_MIN..=ENVIRONMENT_WEIGHT_MAX).contains(&of.weight) {
            let detail = format!("must be {ENVIRONMENT_WEIGHT_MIN} to {ENVIRONMENT_WEIGHT_MAX}, is {}", of.weight);
            push(format!("{pointer}/weight"), detail);
        }
        if !(0.0..=1.0).contains(&of.min_share) {
            push(format!("{pointer}/min_share"), format!("must be 0 to 1, is {}", of.min_share));
        }
    }
    // Parts such as 0.1 are not exact in binary.
    let sum: f64 = environments.values().map(|of| of.min_share).sum();
    if sum > 1.0 + 1e-9 {
        push("/batch/environments".into(), format!("the minimums add up to {sum}, which is more than 1"));
    }
}

/// Checks the form of the name. Which names there are depends on the configuration of each process.
fn check_teacher(rules: &PolicyRules, violations: &mut Vec<Violation>) {
    let Some(teacher) = &rules.sessions.teacher else { return };
    if let Err(detail) = check_name(teacher) {
        violations.push(Violation { pointer: "/sessions/teacher".into(), detail });
    }
}

fn batch_rollouts(rules: &PolicyRules) -> u64 {
    u64::from(rules.batch.groups) * u64::from(rules.group.size)
}

/// Checks that the backlog has room for one batch. Otherwise it would be full before one batch is complete, and stay
/// full for ever: posts would be refused, and there would be no batch to lease.
fn check_backlog(rules: &PolicyRules, violations: &mut Vec<Violation>) {
    let (groups, size, rollouts) = (rules.batch.groups, rules.group.size, batch_rollouts(rules));
    let bounds = [
        ("/backlog/max_ready_rollouts", rules.backlog.max_ready_rollouts, rollouts),
        ("/backlog/max_bytes", rules.backlog.max_bytes, rollouts * PAYLOAD_BYTES_MIN),
    ];
    for (pointer, found, least) in bounds {
        if (1..least).contains(&found) {
            let detail =
                format!("must be at least {least}, is {found}: one batch is {groups} groups of {size} rollouts");
            violations.push(Violation { pointer: pointer.to_owned(), detail });
        }
    }
}

fn check_advantage(rules: &PolicyRules, violations: &mut Vec<Violation>) {
    let mut push = |pointer: String, detail: String| violations.push(Violation { pointer, detail });
    let components = match &rules.advantage {
        Advantage::Named(_) => return,
        Advantage::Gdpo(Gdpo { components, .. }) => components,
        Advantage::TurnReturn(TurnReturn { gamma, .. }) | Advantage::Gigpo(Gigpo { gamma, .. }) => {
            if !(0.0..=1.0).contains(gamma) {
                push("/advantage/gamma".into(), format!("must be 0 to 1, is {gamma}"));
            }
            if let Advantage::Gigpo(Gigpo { omega, .. }) = &rules.advantage
                && !(0.0..=OMEGA_MAX).contains(omega)
            {
                push("/advantage/omega".into(), format!("must be 0 to {OMEGA_MAX}, is {omega}"));
            }
            return;
        }
    };
    if !(1..=REWARD_COMPONENTS_MAX).contains(&components.len()) {
        let detail = format!("must be 1 to {REWARD_COMPONENTS_MAX} components, are {}", components.len());
        push("/advantage/components".into(), detail);
        return;
    }
    for (name, weight) in components {
        let pointer = format!("/advantage/components/{}", escape(name));
        if !(COMPONENT_WEIGHT_MIN..=COMPONENT_WEIGHT_MAX).contains(&weight.abs()) {
            let range = format!("{COMPONENT_WEIGHT_MIN} to {COMPONENT_WEIGHT_MAX}");
            push(pointer, format!("must be {range}, or the negative of that, is {weight}"));
        }
    }
}

fn check_loss_constant(rules: &PolicyRules, violations: &mut Vec<Violation>) {
    let detail = match (rules.loss_weighting, rules.loss_constant) {
        (LossWeighting::Constant, None) => "is needed where `loss_weighting` is `constant`",
        (LossWeighting::Constant, Some(l)) if !(LOSS_CONSTANT_MIN..=LOSS_CONSTANT_MAX).contains(&l) => {
            &format!("must be {LOSS_CONSTANT_MIN:e} to {LOSS_CONSTANT_MAX:e}, is {l:e}")
        }
        (weighting, Some(_)) if weighting != LossWeighting::Constant => "is only for `loss_weighting` = `constant`",
        _ => return,
    };
    violations.push(Violation { pointer: "/loss_constant".into(), detail: detail.into() });
}

#[cfg(test)]
mod tests {
    use forebay_wire::{EnvironmentRules, GdpoKind};

    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Rules::parse(PolicyRules::default()).expect("defaults must pass their own check");
    }

    #[test]
    fn every_violation_is_reported_with_its_pointer() {
        let mut rules = PolicyRules { loss_weighting: LossWeighting::Constant, ..PolicyRules::default() };
        rules.group.size = 4;
        rules.group.min_size = Some(5);
        rules.lease.ttl_s = 0;
        let found = Rules::parse(rules).expect_err("these rules cannot work");
        let pointers: Vec<_> = found.iter().map(|violation| violation.pointer.as_str()).collect();
        assert_eq!(pointers, ["/group/min_size", "/lease/ttl_s", "/loss_constant"]);
    }

    #[test]
    fn components_of_an_advantage_have_weights_that_count() {
        let violations = |components: &[(String, f64)]| {
            let components = components.iter().cloned().collect();
            let gdpo = Gdpo { kind: GdpoKind::Gdpo, components, whiten: Whiten::Batch };
            let rules = PolicyRules { advantage: Advantage::Gdpo(gdpo), ..PolicyRules::default() };
            let found = Rules::parse(rules).err().unwrap_or_default();
            found.into_iter().map(|violation| violation.pointer).collect::<Vec<_>>()
        };
        let many = |count: usize| (0..count).map(|number| (number.to_string(), 1.0)).collect::<Vec<_>>();
        assert!(violations(&many(64)).is_empty());
        assert_eq!(violations(&many(65)), ["/advantage/components"]);
        assert_eq!(violations(&[]), ["/advantage/components"]);
        assert!(violations(&[("a".to_owned(), -1e6), ("b".to_owned(), 1e-6)]).is_empty());
        for weight in [0.0, 2e6, -5e-7, f64::NAN, f64::INFINITY] {
            assert_eq!(violations(&[("a/b".to_owned(), weight)]), ["/advantage/components/a~1b"], "{weight}");
        }
    }

    #[test]
    fn advantages_of_turns_have_factors_that_converge() {
        let violations = |advantage: &str| {
            let advantage = serde_json::from_str(advantage).expect("it is an advantage");
            let found = Rules::parse(PolicyRules { advantage, ..PolicyRules::default() }).err().unwrap_or_default();
            found.into_iter().map(|violation| violation.pointer).collect::<Vec<_>>()
        };
        assert!(violations(r#"{"kind":"turn_return","gamma":0}"#).is_empty());
        assert!(violations(r#"{"kind":"gigpo","gamma":1,"omega":0}"#).is_empty());
        assert_eq!(violations(r#"{"kind":"turn_return","gamma":1.01}"#), ["/advantage/gamma"]);
        let both = violations(r#"{"kind":"gigpo","gamma":-0.1,"omega":2e6}"#);
        assert_eq!(both, ["/advantage/gamma", "/advantage/omega"]);
    }

    #[test]
    fn the_minimums_of_environments_add_up_to_one_at_most() {
        let violations = |environments: &[(&str, f64, f64)]| {
            let of = |(label, weight, min_share): &(&str, f64, f64)| {
                ((*label).to_owned(), EnvironmentRules { weight: *weight, min_share: *min_share })
            };
            let mut rules = PolicyRules::default();
            rules.batch.environments = environments.iter().map(of).collect();
            let found = Rules::parse(rules).err().unwrap_or_default();
            found.into_iter().map(|violation| violation.pointer).collect::<Vec<_>>()
        };
        assert!(violations(&[("a", 1.0, 0.7), ("b", 1.0, 0.2), ("c", 1e6, 0.1)]).is_empty());
        assert_eq!(violations(&[("a", 1.0, 0.7), ("b", 1.0, 0.4)]), ["/batch/environments"]);
        assert_eq!(violations(&[("a/b", 0.0, 0.0)]), ["/batch/environments/a~1b/weight"]);
        assert_eq!(violations(&[("a", f64::NAN, 0.0), ("b", f64::INFINITY, 0.0)]).len(), 2);
        assert_eq!(violations(&[("a", 1.0, -0.1)]), ["/batch/environments/a/min_share"]);
        assert_eq!(violations(&[("", 1.0, 0.0)]), ["/batch/environments/"]);
        let many: Vec<String> = (0..65).map(|number| number.to_string()).collect();
        let many: Vec<_> = many.iter().map(|label| (label.as_str(), 1.0, 0.0)).collect();
        assert_eq!(violations(&many), ["/batch/environments"]);
    }

    #[test]
    fn a_group_smaller_than_min_size_needs_all_of_its_rollouts() {
        let mut rules = PolicyRules::default();
        rules.group.size = 8;
        rules.group.min_size = Some(4);
        let rules = Rules::parse(rules).expect("these rules can work");
        assert_eq!((rules.min_size(8), rules.min_size(2)), (4, 2));
    }
}
