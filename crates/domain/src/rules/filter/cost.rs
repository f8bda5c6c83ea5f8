//! The most that evaluating an expression may cost, known before it is evaluated.
//!
//! The `cel` crate has no limit of its own. The bound here follows from the shape of an expression and from the size of
//! the values that it reads. These sizes bound everything: a loop runs once for each value of its range, loops are not
//! nested, and a step only reads a part of the range.

use std::collections::HashMap;

use cel::common::ast::{ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, operators};

use super::{
    check::{is_by_component, is_of_numbers},
    variables::{STATISTICS, Type, type_of},
};

/// The most steps that the filters of a rollout may take together. A step takes about a tenth of a microsecond.
pub(super) const ROLLOUT_STEPS_MAX: u64 = 4_000_000;

/// The most steps that the filters of a group may take together, besides those for each of its rewards. They run while
/// the group is locked, and a transaction may decide thousands of groups.
pub(super) const GROUP_STEPS_MAX: u64 = 1_024;
pub(super) const GROUP_STEPS_PER_REWARD_MAX: u64 = 256;

/// Bytes of text that count as much as one value.
const TEXT_BYTES: u64 = 64;

/// Labels have up to 256 bytes.
const LABEL: u64 = 1 + 256 / TEXT_BYTES;

/// The components of a reward: 64 names and numbers.
const COMPONENTS: u64 = 64 * (1 + LABEL);

/// The size of the values that have no bound of their own. A single value counts as one, and so do 64 bytes of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Amounts {
    pub(super) metadata: u64,
    pub(super) rewards: u64,
}

/// The size of a typical record: 16 KiB of metadata, or a group of 64.
pub(super) const TYPICAL: Amounts = Amounts { metadata: 256, rewards: 64 };

impl Amounts {
    /// Raises the amounts to those of a typical record, for which costs are known beforehand.
    fn or_usual(self) -> Self {
        Self { metadata: self.metadata.max(TYPICAL.metadata), rewards: self.rewards.max(TYPICAL.rewards) }
    }

    /// The amounts of one rollout: at least the size of its metadata. A separator inside a text counts like one of
    /// JSON.
    pub(super) fn of_rollout(metadata: Option<&str>) -> Self {
        let of_text = |text: &str| {
            let separators = text.bytes().filter(|byte| matches!(byte, b',' | b':' | b'[' | b'{')).count();
            1 + separators as u64 + text.len() as u64 / TEXT_BYTES
        };
        Self { metadata: metadata.map_or(1, of_text), rewards: 0 }.or_usual()
    }

    /// The amounts of a group with this number of rewards, and at least those of a typical group.
    pub(super) fn of_group(rewards: usize) -> Self {
        Self::of_rewards(rewards as u64).or_usual()
    }

    /// The amounts of a group with exactly this number of rewards.
    pub(super) fn of_rewards(rewards: u64) -> Self {
        Self { metadata: 0, rewards }
    }

    /// The most steps that the filters of a group may take together.
    pub(super) fn group_steps_max(self) -> u64 {
        GROUP_STEPS_MAX + self.rewards.saturating_mul(GROUP_STEPS_PER_REWARD_MAX)
    }
}

/// The size of an entry of a collection.
fn entry(collection: &IdedExpr) -> u64 {
    if is_by_component(collection) { 1 + STATISTICS.len() as u64 } else { 1 }
}

/// The most steps that evaluating an expression takes. `patterns` gives the bytes of each compiled pattern.
pub(super) fn steps(expression: &IdedExpr, amounts: Amounts, patterns: &HashMap<String, usize>) -> u64 {
    let mut estimate = Estimate { amounts, patterns, within: None, steps: 0 };
    estimate.visit(expression, 1);
    estimate.steps
}

/// Adds up steps. Sums saturate, because doubling a list a hundred times gives a number that no integer holds.
struct Estimate<'e> {
    amounts: Amounts,
    patterns: &'e HashMap<String, usize>,
    /// The loop whose body is visited, and the size of its range.
    within: Option<(&'e ComprehensionExpr, u64)>,
    steps: u64,
}

impl<'e> Estimate<'e> {
    /// Adds the steps of a node that is evaluated `times` times. Returns the total size of its values.
    fn visit(&mut self, node: &'e IdedExpr, times: u64) -> u64 {
        self.add(times);
        match &node.expr {
            Expr::Literal(LiteralValue::String(text)) => {
                times.saturating_mul(1 + text.inner().len() as u64 / TEXT_BYTES)
            }
            Expr::Literal(LiteralValue::Bytes(bytes)) => {
                times.saturating_mul(1 + bytes.inner().len() as u64 / TEXT_BYTES)
            }
            Expr::Unspecified | Expr::Literal(_) => times,
            Expr::Ident(name) => self.variable(name, times),
            Expr::Select(select) if is_of_numbers(&select.operand) => times.saturating_mul(entry(&select.operand)),
            Expr::Select(select) => self.visit(&select.operand, times),
            Expr::List(list) => {
                list.elements.iter().fold(times, |held, part| held.saturating_add(self.visit(part, times)))
            }
            Expr::Map(map) => self.entries(map.entries.iter().map(|entry| &entry.expr), times),
            Expr::Struct(message) => self.entries(message.entries.iter().map(|entry| &entry.expr), times),
            Expr::Comprehension(each) => self.comprehension(each, times),
            Expr::Call(call) if call.func_name == operators::INDEX && is_of_numbers(&call.args[0]) => {
                self.visit(&call.args[1], times);
                times.saturating_mul(entry(&call.args[0]))
            }
            Expr::Call(call) => {
                let parts: Vec<u64> =
                    call.target.as_deref().into_iter().chain(&call.args).map(|part| self.visit(part, times)).collect();
                let all = parts.iter().fold(0_u64, |all, part| all.saturating_add(*part));
                match call.func_name.as_str() {
                    // The operand of an index is not copied.
                    operators::INDEX => return parts.first().copied().unwrap_or(times),
                    operators::CONDITIONAL => return all,
                    "matches" => self.add(all.saturating_mul(self.steps_of_pattern(call.args.last()))),
                    _ => self.add(all),
                }
                match call.func_name.as_str() {
                    operators::ADD | "string" | "bytes" | "dyn" | "min" | "max" => all,
                    _ => times,
                }
            }
        }
    }

    fn comprehension(&mut self, each: &'e ComprehensionExpr, times: u64) -> u64 {
        let range = self.visit(&each.iter_range, times).max(1);
        // Every element is copied once.
        self.add(range);
        self.visit(&each.accu_init, times);
        let outside = self.within.replace((each, range));
        self.visit(&each.loop_cond, range);
        let held = self.visit(&each.loop_step, range);
        self.visit(&each.result, times);
        self.within = outside;
        held
    }

    fn entries(&mut self, entries: impl Iterator<Item = &'e EntryExpr>, times: u64) -> u64 {
        let mut held = times;
        for entry in entries {
            let parts = match entry {
                EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
                EntryExpr::StructField(field) => vec![&field.value],
            };
            for part in parts {
                held = held.saturating_add(self.visit(part, times));
            }
        }
        held
    }

    fn variable(&self, name: &str, times: u64) -> u64 {
        if let Some((each, range)) = self.within {
            if each.iter_var == name {
                return range;
            }
            if each.accu_var == name {
                return times;
            }
        }
        let each = match type_of(name) {
            Some(Type::Metadata) => self.amounts.metadata,
            Some(Type::Rewards) => self.amounts.rewards,
            Some(Type::Components | Type::Statistics) => COMPONENTS,
            Some(Type::Label) => LABEL,
            Some(Type::Text | Type::Int | Type::Double | Type::NullableDouble) | None => 1,
        };
        times.saturating_mul(each)
    }

    /// The steps for each stretch of text. For every byte, a long pattern may visit all of its states.
    fn steps_of_pattern(&self, pattern: Option<&IdedExpr>) -> u64 {
        let bytes = match pattern.map(|node| &node.expr) {
            Some(Expr::Literal(LiteralValue::String(pattern))) => self.patterns.get(pattern.inner()).copied(),
            _ => None,
        };
        4 * (1 + bytes.unwrap_or_default() as u64 / 1024)
    }

    fn add(&mut self, steps: u64) {
        self.steps = self.steps.saturating_add(steps);
    }
}
