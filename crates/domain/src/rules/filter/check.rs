//! The first check of an expression: its shape.
//!
//! This check covers size, syntax, names, functions, loops and regular expressions. It evaluates nothing, because an
//! expression must be known to be safe before it is evaluated. [`trial_evaluation`](super::trial_evaluation) is the
//! second check.

use std::{
    collections::{BTreeSet, HashMap},
    ops::RangeInclusive,
    thread,
};

use cel::{
    ParseErrors, Program,
    common::ast::{CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, SourceInfo, operators},
};
use forebay_wire::{FilterRule, FilterScope};
use regex::{Regex, RegexBuilder};

use super::variables;

/// Far more than a readable rule needs, and few enough to check in milliseconds.
const SOURCE_BYTES_MAX: usize = 4096;
/// The interpreter recurses, and runs on worker threads with 2 MiB of stack.
const NESTING_MAX: usize = 100;
/// The parser recurses for every term of a sum: 4 KiB of `+1` overflow an ordinary stack.
const PARSER_STACK_BYTES: usize = 64 << 20;
/// Bounds of the memory that a compiled pattern takes, which also bound the time to compile it. The `regex` crate does
/// not tell a pattern's size, so the least of these bounds that it fits counts as its size.
const PATTERN_BYTES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// Memory of all patterns of a policy: enough for twenty patterns with Unicode's word characters.
const PATTERNS_BYTES_MAX: usize = 2 << 20;
/// Memory that matching may cache for a pattern, for each thread that matches.
const PATTERN_CACHE_BYTES_MAX: usize = 256 << 10;

/// The functions called as `value.name(..)`, with the number of their arguments. None of them can
/// build a value much larger than its arguments.
pub(super) const METHODS: [(&str, RangeInclusive<usize>); 5] =
    [("contains", 1..=1), ("endsWith", 1..=1), ("matches", 1..=1), ("size", 0..=0), ("startsWith", 1..=1)];
/// The functions called as `name(..)`, with the number of their arguments.
pub(super) const FUNCTIONS: [(&str, RangeInclusive<usize>); 11] = [
    ("bool", 1..=1),
    ("bytes", 1..=1),
    ("double", 1..=1),
    ("dyn", 1..=1),
    ("int", 1..=1),
    ("matches", 2..=2),
    ("max", 1..=8),
    ("min", 1..=8),
    ("size", 1..=1),
    ("string", 1..=1),
    ("uint", 1..=1),
];
/// The message when the parser fails without a reason.
const UNREADABLE: &str = "the parser cannot read this";
/// Macros that the parser itself expands, for the message about an unknown function.
pub(super) const MACROS: &str = "has, all, exists, exists_one, map, filter";

/// The compiled patterns of a policy.
pub(super) struct Patterns {
    pub(super) regexes: HashMap<String, Regex>,
    /// The bytes that each pattern takes.
    pub(super) bytes: HashMap<String, usize>,
    bytes_max: usize,
}

impl Patterns {
    /// No patterns yet, for rules that are new.
    pub(super) fn bounded() -> Self {
        Self { regexes: HashMap::new(), bytes: HashMap::new(), bytes_max: PATTERNS_BYTES_MAX }
    }

    /// No patterns yet, for rules that were accepted before, perhaps by a version without a bound.
    pub(super) fn unbounded() -> Self {
        Self { bytes_max: usize::MAX, ..Self::bounded() }
    }

    fn add(&mut self, pattern: &str) -> Result<(), String> {
        if self.regexes.contains_key(pattern) {
            return Ok(());
        }
        let compile =
            |bytes| RegexBuilder::new(pattern).size_limit(bytes).dfa_size_limit(PATTERN_CACHE_BYTES_MAX).build();
        let mut compiled = Err(String::new());
        for bytes in PATTERN_BYTES {
            match compile(bytes) {
                Ok(regex) => {
                    compiled = Ok((regex, bytes));
                    break;
                }
                // The lines before the last one show the pattern, which the column points at already.
                Err(error) => {
                    let error = error.to_string();
                    compiled = Err(error.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned());
                }
            }
        }
        let (regex, bytes) = compiled?;
        if self.bytes.values().sum::<usize>() + bytes > self.bytes_max {
            return Err(format!(
                "takes, with the patterns before it, more than {} bytes when compiled",
                self.bytes_max
            ));
        }
        self.bytes.insert(pattern.to_owned(), bytes);
        self.regexes.insert(pattern.to_owned(), regex);
        Ok(())
    }

    /// The bytes that all patterns take, with the caches of matching.
    pub(super) fn bytes_held(&self) -> usize {
        self.bytes.values().map(|bytes| bytes + PATTERN_CACHE_BYTES_MAX).sum()
    }
}

/// Parses and checks the expression of `rule`, adding its patterns to `patterns`. Returns every
/// fault that has nothing to do with values.
pub(super) fn parse(rule: &FilterRule, patterns: &mut Patterns) -> Result<Program, Vec<String>> {
    if rule.when.len() > SOURCE_BYTES_MAX {
        let length = rule.when.len();
        return Err(vec![format!("at most {SOURCE_BYTES_MAX} bytes, not {length}")]);
    }
    let program = parse_apart(&rule.when).map_err(|message| vec![message])?;
    let mut checker =
        Checker { scope: rule.scope, source: program.source_info(), within: None, patterns, faults: Vec::new() };
    checker.visit(program.expression());
    let faults = checker.faults;
    if faults.is_empty() { Ok(program) } else { Err(faults) }
}

/// Parses on a stack that no expression of the permitted size exhausts, and refuses expressions whose evaluation would
/// exhaust an ordinary stack. A panic of the parser is a refusal, too.
fn parse_apart(source: &str) -> Result<Program, String> {
    let parse = || {
        let program = Program::compile(source).map_err(|errors| first_error(&errors))?;
        if nesting(program.expression()) > NESTING_MAX {
            return Err(format!("nested more than {NESTING_MAX} deep; a sum of n terms counts n"));
        }
        Ok(program)
    };
    thread::scope(|threads| {
        thread::Builder::new()
            .name("filter-parser".to_owned())
            .stack_size(PARSER_STACK_BYTES)
            .spawn_scoped(threads, parse)
            .expect("a service that cannot start a thread cannot serve either")
            .join()
            .unwrap_or_else(|_| Err(UNREADABLE.to_owned()))
    })
}

/// Only the first error. Most of the others are its consequences.
fn first_error(errors: &ParseErrors) -> String {
    let Some(error) = errors.errors.first() else {
        return UNREADABLE.to_owned();
    };
    let (line, column) = error.pos;
    if error.msg.contains("Recursion limit") {
        return format!("line {line}, column {column}: nested too deeply");
    }
    // The list of tokens that were expected instead is most of the grammar.
    let message = error.msg.split(" expecting ").next().unwrap_or_default();
    let message = message.trim_start_matches("Syntax error: ");
    format!("line {line}, column {column}: {message}")
}

fn nesting(node: &IdedExpr) -> usize {
    1 + parts(node).into_iter().map(nesting).max().unwrap_or(0)
}

/// The parts of a node that are expressions.
pub(super) fn parts(node: &IdedExpr) -> Vec<&IdedExpr> {
    match &node.expr {
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => Vec::new(),
        Expr::Call(call) => call.target.as_deref().into_iter().chain(&call.args).collect(),
        Expr::Select(select) => vec![&select.operand],
        Expr::List(list) => list.elements.iter().collect(),
        Expr::Map(map) => map.entries.iter().flat_map(|entry| entry_parts(&entry.expr)).collect(),
        Expr::Struct(message) => message.entries.iter().flat_map(|entry| entry_parts(&entry.expr)).collect(),
        Expr::Comprehension(each) => {
            vec![&each.iter_range, &each.accu_init, &each.loop_cond, &each.loop_step, &each.result]
        }
    }
}

fn entry_parts(entry: &EntryExpr) -> Vec<&IdedExpr> {
    match entry {
        EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
        EntryExpr::StructField(field) => vec![&field.value],
    }
}

/// Whether a node is the variable that holds statistics by component.
pub(super) fn is_by_component(node: &IdedExpr) -> bool {
    matches!(&node.expr, Expr::Ident(name) if variables::type_of(name) == Some(variables::Type::Statistics))
}

/// The names for which an expression may look into `components`. Those are literals, as [`parse`] has checked.
pub(super) fn components_named(expression: &IdedExpr) -> BTreeSet<String> {
    let (mut names, mut rest, mut is_asked) = (BTreeSet::new(), vec![expression], false);
    while let Some(node) = rest.pop() {
        is_asked |= is_by_component(node);
        match &node.expr {
            Expr::Select(select) if is_by_component(&select.operand) => names.insert(select.field.clone()),
            Expr::Literal(LiteralValue::String(name)) => names.insert(name.inner().to_owned()),
            _ => false,
        };
        rest.extend(parts(node));
    }
    if is_asked { names } else { BTreeSet::new() }
}

/// Whether a node is a variable that holds something small for each of many keys.
pub(super) fn is_of_numbers(node: &IdedExpr) -> bool {
    matches!(&node.expr, Expr::Ident(name) if variables::type_of(name).is_some_and(variables::Type::is_of_numbers))
}

/// Prefixes a message with the place of a node. Columns count characters, as the parser's do.
pub(super) fn at(source: &SourceInfo, node: &IdedExpr, message: &str) -> String {
    let before = source.offset_for(node.id).and_then(|(start, _)| source.source.get(..start as usize));
    let Some(before) = before else {
        return message.to_owned();
    };
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = before.matches('\n').count() + 1;
    let column = before[line_start..].chars().count() + 1;
    format!("line {line}, column {column}: {message}")
}

/// Walks an expression and checks its shape.
struct Checker<'e> {
    scope: FilterScope,
    source: &'e SourceInfo,
    /// The loop whose body is being visited. Loops are not nested, so there is only one.
    within: Option<&'e ComprehensionExpr>,
    patterns: &'e mut Patterns,
    faults: Vec<String>,
}

impl<'e> Checker<'e> {
    fn visit(&mut self, node: &'e IdedExpr) {
        match &node.expr {
            Expr::Comprehension(each) => return self.visit_loop(node, each),
            // A group may have thousands of names. Those that rules write are all that is read of its rollouts.
            Expr::Select(select) if self.is_components(&select.operand) => return,
            Expr::Call(call) if call.func_name == operators::INDEX && self.is_components(&call.args[0]) => {
                return self.check_key(&call.args[1]);
            }
            Expr::Select(select) if self.is_component(&select.operand) => self.check_statistic(node, &select.field),
            Expr::Call(call) if call.func_name == operators::INDEX && self.is_component(&call.args[0]) => {
                if let Expr::Literal(LiteralValue::String(name)) = &call.args[1].expr {
                    self.check_statistic(node, name.inner());
                }
            }
            Expr::Ident(_) if self.is_components(node) => {
                self.refuse(node, "`components` can only be asked for one component: `components.NAME.std`");
            }
            Expr::Ident(name) => self.check_name(node, name),
            Expr::Call(call) => self.check_call(node, call),
            Expr::Struct(_) => self.refuse(node, "messages cannot be constructed"),
            _ => {}
        }
        for part in parts(node) {
            self.visit(part);
        }
    }

    /// Refuses a loop in the body of another, because their costs multiply: four nested loops over 64 rewards run for
    /// 15 seconds. The costs of a loop over the result of another only add up.
    fn visit_loop(&mut self, node: &'e IdedExpr, each: &'e ComprehensionExpr) {
        if self.within.is_some() {
            return self.refuse(node, "loops (all, exists, map, filter) cannot be nested");
        }
        self.visit(&each.iter_range);
        self.within = Some(each);
        for part in [&each.accu_init, &each.loop_cond, &each.loop_step, &each.result] {
            self.visit(part);
            self.check_body(part);
        }
        self.within = None;
    }

    /// Refuses uses of a whole collection in the body of a loop, because they are loops, too: `metadata.a.map(x,
    /// metadata.a)` makes 900 million values of 30,000. A body may only read single numbers of a collection.
    fn check_body(&mut self, node: &IdedExpr) {
        match &node.expr {
            // A nested loop has been refused already.
            Expr::Comprehension(_) => {}
            Expr::Select(select) if is_of_numbers(&select.operand) => {}
            Expr::Call(call) if call.func_name == operators::INDEX && is_of_numbers(&call.args[0]) => {
                self.check_body(&call.args[1]);
            }
            Expr::Ident(name) if variables::type_of(name) == Some(variables::Type::Metadata) => {
                self.refuse(node, "`metadata` cannot be used in the body of a loop");
            }
            Expr::Ident(name) if is_of_numbers(node) && !self.is_of_loop(name) => {
                let message = format!("`{name}` can only be indexed in the body of a loop");
                self.refuse(node, &message);
            }
            _ => parts(node).into_iter().for_each(|part| self.check_body(part)),
        }
    }

    fn is_of_loop(&self, name: &str) -> bool {
        self.within.is_some_and(|each| each.iter_var == name)
    }

    /// Whether a node is the variable `components`, and not one of a loop with this name.
    fn is_components(&self, node: &IdedExpr) -> bool {
        let is_of_loop = matches!(&node.expr, Expr::Ident(name) if self.is_of_loop(name));
        self.scope == FilterScope::Group && is_by_component(node) && !is_of_loop
    }

    /// Whether a node is what `components` has for one component.
    fn is_component(&self, node: &IdedExpr) -> bool {
        match &node.expr {
            Expr::Select(select) => self.is_components(&select.operand),
            Expr::Call(call) => call.func_name == operators::INDEX && self.is_components(&call.args[0]),
            _ => false,
        }
    }

    fn check_statistic(&mut self, node: &IdedExpr, name: &str) {
        if !variables::STATISTICS.contains(&name) {
            let known = variables::STATISTICS.join(", ");
            self.refuse(node, &format!("unknown name `{name}`; a component has {known}"));
        }
    }

    /// Refuses a name of a component that is computed.
    fn check_key(&mut self, key: &IdedExpr) {
        let is_text = |node: &IdedExpr| matches!(&node.expr, Expr::Literal(LiteralValue::String(_)));
        let is_of_literals =
            |range: &IdedExpr| matches!(&range.expr, Expr::List(list) if list.elements.iter().all(is_text));
        let is_of_loop =
            |name: &str| self.within.is_some_and(|each| each.iter_var == name && is_of_literals(&each.iter_range));
        match &key.expr {
            Expr::Literal(LiteralValue::String(_)) => {}
            Expr::Ident(name) if is_of_loop(name) => {}
            _ => self.refuse(
                key,
                "the name of a component must be a string literal, or the variable of a loop over a list of them",
            ),
        }
    }

    fn check_name(&mut self, node: &IdedExpr, name: &str) {
        let own = |each: &ComprehensionExpr| each.iter_var == name || each.accu_var == name;
        let known = variables::names(self.scope);
        let scope = match self.scope {
            FilterScope::Rollout => "rollout",
            FilterScope::Group => "group",
        };
        if !known.contains(&name) && !self.within.is_some_and(own) {
            let known = known.join(", ");
            let message = format!("unknown name `{name}`; scope `{scope}` has {known}");
            self.refuse(node, &message);
        }
    }

    fn check_call(&mut self, node: &IdedExpr, call: &'e CallExpr) {
        let name = call.func_name.as_str();
        // The parser gives operators names like `_+_` or `@in`, which no function can have.
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return;
        }
        let known: &[_] = if call.target.is_some() { &METHODS } else { &FUNCTIONS };
        let fits =
            |(known, arguments): &(&str, RangeInclusive<usize>)| *known == name && arguments.contains(&call.args.len());
        if !known.iter().any(fits) {
            return self.refuse(node, &unknown_function(call));
        }
        if name == "matches" {
            self.check_pattern(node, call.args.last());
        }
    }

    fn check_pattern(&mut self, node: &IdedExpr, pattern: Option<&IdedExpr>) {
        let Some(Expr::Literal(LiteralValue::String(pattern))) = pattern.map(|node| &node.expr) else {
            return self.refuse(node, "the pattern of `matches` must be a string literal");
        };
        let pattern: &str = pattern.inner();
        if let Err(error) = self.patterns.add(pattern) {
            self.refuse(node, &format!("the pattern of `matches`: {error}"));
        }
    }

    fn refuse(&mut self, node: &IdedExpr, message: &str) {
        self.faults.push(at(self.source, node, message));
    }
}

fn unknown_function(call: &CallExpr) -> String {
    let names = |known: &[(&'static str, _)]| known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    format!(
        "no {} `{}` with {} argument(s); there are the macros {MACROS}, the functions {} and the \
         methods {}",
        if call.target.is_some() { "method" } else { "function" },
        call.func_name,
        call.args.len(),
        names(&FUNCTIONS),
        names(&METHODS),
    )
}
