//! The second check of an expression: a trial evaluation.
//!
//! Every part is evaluated by itself on a typical record, because `&&`, `||` and `?:` would skip some parts and hide
//! their type errors. An error that depends on the data refuses nothing, for example a key that metadata may or may not
//! have.

use std::collections::HashSet;

use cel::{
    Context, ExecutionError, Program, Value,
    common::ast::{ComprehensionExpr, Expr, IdedExpr, LiteralValue, SourceInfo, operators},
};
use forebay_wire::FilterScope;

use super::{
    check::{at, parts},
    variables::{TypicalValues, scope_of},
};

/// A hint for the most common error of new authors of rules.
const MIXED_HINT: &str = "; int and double compare but do not mix in arithmetic: write 2.0 rather than 2";

/// Evaluates every part of a checked expression on a typical record, and requires conditions where
/// conditions belong. Returns the first fault, innermost and leftmost. `place` is what the whole expression is.
pub(super) fn evaluate(
    scope: FilterScope,
    program: &Program,
    place: Place,
    environment: &Context<'static, 'static>,
) -> Result<(), String> {
    let expression = program.expression();
    let variables = TypicalValues::new(scope, &keys_of_interest(expression));
    let scope = scope_of(environment, &variables);
    Trial { source: program.source_info() }.run(expression, place, &scope)
}

/// The type that the place of a node requires.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Condition,
    Number,
    Anything,
}

impl Place {
    fn takes(self, value: &Value) -> bool {
        match self {
            Self::Condition => matches!(value, Value::Bool(_)),
            Self::Number => matches!(value, Value::Float(_) | Value::Int(_) | Value::UInt(_)),
            Self::Anything => true,
        }
    }

    /// The place of part `index` of a node that is in this place.
    fn of_part(self, node: &IdedExpr, index: usize) -> Self {
        let Expr::Call(call) = &node.expr else {
            return Self::Anything;
        };
        match (call.func_name.as_str(), index) {
            (operators::CONDITIONAL, 1 | 2) => self,
            (operators::CONDITIONAL | operators::LOGICAL_AND | operators::LOGICAL_OR | operators::LOGICAL_NOT, _) => {
                Self::Condition
            }
            _ => Self::Anything,
        }
    }
}

/// Evaluates the parts of an expression, each by itself, inner parts first.
struct Trial<'e> {
    source: &'e SourceInfo,
}

impl Trial<'_> {
    fn run(&self, node: &IdedExpr, place: Place, scope: &Context<'_, '_>) -> Result<(), String> {
        if let Expr::Comprehension(each) = &node.expr {
            self.run_loop(each, scope)?;
        } else {
            for (index, part) in parts(node).into_iter().enumerate() {
                self.run(part, place.of_part(node, index), scope)?;
            }
        }
        match Value::resolve(node, scope) {
            Ok(value) if !place.takes(&value) => {
                let needed = if place == Place::Number { "a number" } else { "true or false" };
                let message = format!("{needed} is needed here, not {}", type_name(&value));
                Err(at(self.source, node, &message))
            }
            Err(error) if !depends_on_data(&error) => Err(at(self.source, node, &describe(&error))),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Runs the body once, for the first element. If there is no element, the types in the body stay unknown.
    fn run_loop(&self, each: &ComprehensionExpr, scope: &Context<'_, '_>) -> Result<(), String> {
        self.run(&each.iter_range, Place::Anything, scope)?;
        let element = Value::resolve(&each.iter_range, scope).ok().and_then(first_element);
        let (Some(element), Ok(result)) = (element, Value::resolve(&each.accu_init, scope)) else {
            return Ok(());
        };
        let mut body = scope.new_inner_scope();
        body.add_variable_from_value(&each.iter_var, element);
        body.add_variable_from_value(&each.accu_var, result);
        self.run(&each.loop_cond, Place::Condition, &body)?;
        self.run(&each.loop_step, Place::Anything, &body)
    }
}

fn first_element(range: Value) -> Option<Value> {
    match range {
        Value::List(values) => values.first().cloned(),
        Value::Map(entries) => entries.map.keys().next().map(Value::from),
        _ => None,
    }
}

/// Whether an evaluation on another record might not have this error.
fn depends_on_data(error: &ExecutionError) -> bool {
    matches!(
        error,
        ExecutionError::NoSuchKey(_)
            | ExecutionError::IndexOutOfBounds(_)
            | ExecutionError::DivisionByZero(_)
            | ExecutionError::RemainderByZero(_)
            | ExecutionError::Overflow(..)
            | ExecutionError::FunctionError { .. }
    )
}

/// What is wrong, without the values of the record where the interpreter would quote them.
pub(super) fn describe(error: &ExecutionError) -> String {
    match error {
        ExecutionError::UnsupportedBinaryOperator(operator, left, right) => {
            let hint = match (left, right) {
                (Value::Float(_), Value::Int(_)) | (Value::Int(_), Value::Float(_)) => MIXED_HINT,
                _ => "",
            };
            let (left, right) = (type_name(left), type_name(right));
            let operator = symbol(operator);
            format!("`{operator}` does not take {left} and {right}{hint}")
        }
        ExecutionError::NoSuchOverload(overload) => {
            let operator = symbol(overload.function());
            let types = overload.argument_types().join(" and ");
            format!("`{operator}` does not take {types}")
        }
        ExecutionError::ValuesNotComparable(left, right) => {
            let (left, right) = (type_name(left), type_name(right));
            format!("{left} and {right} do not compare")
        }
        error => error.to_string(),
    }
}

/// The symbol that a rule uses for the interpreter's name of an operator. Functions keep their names.
fn symbol(operator: &str) -> &str {
    match operator {
        "add" => "+",
        "sub" => "-",
        "mul" => "*",
        "div" => "/",
        "rem" => "%",
        operator => operator.trim_matches(['_', '@']),
    }
}

fn type_name(value: &Value) -> String {
    match value {
        Value::Float(_) => "double".to_owned(),
        other => other.type_of().to_string(),
    }
}

/// Every key that the expression may ask for, so that its use of a component is tried like its use of any other number.
fn keys_of_interest(node: &IdedExpr) -> HashSet<String> {
    let mut keys = HashSet::from(["component".to_owned()]);
    let mut rest = vec![node];
    while let Some(node) = rest.pop() {
        match &node.expr {
            Expr::Select(select) => keys.insert(select.field.clone()),
            Expr::Literal(LiteralValue::String(key)) => keys.insert(key.inner().to_owned()),
            _ => false,
        };
        rest.extend(parts(node));
    }
    keys
}
