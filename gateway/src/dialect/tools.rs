//! Tools and the choice between them, as far as dialects treat them alike.
//!
//! Hosted tools (web search, code interpreters, computer use, MCP) run at the provider, so no engine here can run them.
//! Their definitions are left out with a warning. If the request requires one of them, it is refused.

use std::{borrow::Cow, collections::BTreeSet};

use forebay_client::wire::replace_lone_surrogates;

use crate::{
    dialect::DialectError,
    json::{self, Item, Object},
    request::{Tool, ToolChoice},
};

/// The most warnings of a request. A body may have a hundred thousand blocks that are left out, and a warning is longer
/// than such a block.
const WARNINGS_MAX: usize = 64;

/// Notes that a part of a request was left out, because nothing here can run it.
pub(super) fn left_out(warnings: &mut Vec<String>, item: &Item<'_>, what: &str, kind: &str) {
    if warnings.len() < WARNINGS_MAX {
        warnings.push(format!("{}: {what} of type {kind:?} cannot run here and was left out", item.path()));
    }
}

/// The tools of a request while they are read.
#[derive(Default)]
pub(super) struct Offer {
    tools: Vec<Tool>,
    names: BTreeSet<String>,
    left_out: Vec<String>,
}

impl Offer {
    pub(super) fn add(&mut self, tool: Tool, item: &Item<'_>) -> Result<(), DialectError> {
        if tool.name.is_empty() {
            return Err(item.invalid("has no name"));
        }
        if !self.names.insert(tool.name.clone()) {
            return Err(item.invalid(format!("has the same name as another tool: {:?}", tool.name)));
        }
        self.tools.push(tool);
        Ok(())
    }

    pub(super) fn leave_out(&mut self, kind: &str, item: &Item<'_>, warnings: &mut Vec<String>) {
        left_out(warnings, item, "a tool", kind);
        if self.left_out.len() < WARNINGS_MAX {
            self.left_out.push(kind.to_owned());
        }
    }

    /// Checks the choice against the tools. Without tools there is nothing to choose, and some engines refuse a choice.
    pub(super) fn choose(
        self,
        choice: Option<(ToolChoice, Item<'_>)>,
    ) -> Result<(Vec<Tool>, Option<ToolChoice>), DialectError> {
        let Some((choice, item)) = choice else { return Ok((self.tools, None)) };
        match &choice {
            ToolChoice::Function(name) if !self.names.contains(name) => {
                return Err(item.invalid(format!("names {name:?}, which is no function of `tools`")));
            }
            ToolChoice::Required if self.tools.is_empty() && self.left_out.is_empty() => {
                return Err(item.invalid("requires a tool, but `tools` is empty"));
            }
            ToolChoice::Required if self.tools.is_empty() => {
                let kinds = self.left_out.join(", ");
                return Err(item.invalid(format!("requires a tool, but none of {kinds} can run here")));
            }
            _ => {}
        }
        let choice = (!self.tools.is_empty()).then_some(choice);
        Ok((self.tools, choice))
    }
}

/// The names of arguments that are no JSON object, in a dialect whose arguments are one.
const INVALID: &str = "invalid_arguments";

/// The arguments of a call as the text of a JSON object. A model may write anything; if it is no object, the tool finds
/// the text under a name that it does not know, and can tell the model.
pub(super) fn object_text(arguments: &str) -> Cow<'_, str> {
    let trimmed = arguments.trim();
    if trimmed.is_empty() {
        return Cow::Borrowed("{}");
    }
    if json::is_object(trimmed) {
        return Cow::Borrowed(trimmed);
    }
    Cow::Owned(serde_json::json!({INVALID: arguments}).to_string())
}

/// The arguments of a call that an agent sends back, as the model wrote them. A model may have written anything, and its
/// agent repeats it in every later call, so nothing is refused.
pub(super) fn arguments(item: Option<Item<'_>>) -> String {
    let Some(item) = item else { return String::new() };
    let text = match item.object().ok().and_then(|mut object| written(&mut object)) {
        Some(text) => text,
        None if item.is_string() => item.string().unwrap_or_default(),
        None => item.verbatim().to_owned(),
    };
    match replace_lone_surrogates(&text) {
        Cow::Borrowed(_) => text,
        Cow::Owned(replaced) => replaced,
    }
}

/// The text that [`object_text`] has put into an object.
fn written(object: &mut Object<'_>) -> Option<String> {
    let text = object.take(INVALID)?.string().ok()?;
    (object.is_empty() && !json::is_object(&text)).then_some(text)
}
