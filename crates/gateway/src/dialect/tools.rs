//! Tools and the choice between them, as far as dialects treat them alike.
//!
//! Hosted tools (web search, code interpreters, MCP servers) run at the provider, so nothing here can run them, and
//! computer use needs images. Their definitions are left out with a warning. If the request requires one of them, it is
//! refused. Tools that run at the client in another shape than that of a function are in `client_tools`.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use forebay_wire::replace_lone_surrogates;

use super::{
    client_tool::{ClientTool, ClientTools},
    error::DialectError,
};
use crate::{
    json::{self, Item, Object},
    request::{Tool, ToolChoice, Warnings},
};

/// The most hosted tools that a refusal names.
const NAMED_MAX: usize = 16;

/// The tools of a request while they are read.
#[derive(Default)]
pub(super) struct Offer {
    tools: Vec<Tool>,
    /// The place of each tool.
    places: BTreeMap<String, usize>,
    of_client: ClientTools,
    left_out: Vec<String>,
    /// Whether a tool replaces one with its name, which is refused otherwise.
    replaces: bool,
}

/// What is offered to the model.
#[derive(Default)]
pub(super) struct Offered {
    pub(super) tools: Vec<Tool>,
    pub(super) client_tools: ClientTools,
    pub(super) choice: Option<ToolChoice>,
}

impl Offer {
    /// Adds a function.
    pub(super) fn add(&mut self, tool: Tool, item: &Item<'_>) -> Result<(), DialectError> {
        self.put(tool, None, item)
    }

    /// Adds a tool that is no plain function at the client.
    pub(super) fn add_of_client(
        &mut self,
        (tool, of_client): (Tool, ClientTool),
        item: &Item<'_>,
    ) -> Result<(), DialectError> {
        self.put(tool, Some(of_client), item)
    }

    fn put(&mut self, tool: Tool, of_client: Option<ClientTool>, item: &Item<'_>) -> Result<(), DialectError> {
        if tool.name.is_empty() {
            return Err(item.invalid("has no name"));
        }
        let place = self.places.get(&tool.name).copied();
        if place.is_some() && !self.replaces {
            return Err(item.invalid(format!("has the same name as another tool: {:?}", tool.name)));
        }
        match of_client {
            Some(of_client) => self.of_client.insert(tool.name.clone(), of_client),
            None => self.of_client.remove(&tool.name),
        };
        if let Some(place) = place {
            self.tools[place] = tool;
        } else {
            self.places.insert(tool.name.clone(), self.tools.len());
            self.tools.push(tool);
        }
        Ok(())
    }

    /// From now on, a tool replaces one with its name: a client repeats tools in its history.
    pub(super) fn replace_repeated(&mut self) {
        self.replaces = true;
    }

    pub(super) fn leave_out(&mut self, kind: &str, item: &Item<'_>, warnings: &mut Warnings) {
        warnings.left_out(item, "tool", kind);
        if self.left_out.len() < NAMED_MAX {
            self.left_out.push(kind.to_owned());
        }
    }

    /// Keeps only the tools that a choice allows, and returns how the model may choose between them. `name` is the
    /// function of an entry; none if it is no tool that can run here.
    pub(super) fn allow(
        &mut self,
        allowed: &mut Object<'_>,
        name: impl Fn(&mut Object<'_>) -> Result<Option<String>, DialectError>,
    ) -> Result<ToolChoice, DialectError> {
        let mode = allowed.require("mode")?;
        let choice = match mode.string()?.as_str() {
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(mode.invalid("must be \"auto\" or \"required\"")),
        };
        let mut names = BTreeSet::new();
        allowed.require("tools")?.each(|item| {
            names.extend(name(&mut item.object()?)?);
            Ok(())
        })?;
        self.tools.retain(|tool| names.contains(&tool.name));
        self.of_client.retain(|name, _| names.contains(name));
        self.places = self.tools.iter().enumerate().map(|(place, tool)| (tool.name.clone(), place)).collect();
        Ok(choice)
    }

    /// Checks the choice against the tools. Without tools there is nothing to choose, and some engines refuse a choice.
    pub(super) fn choose(self, choice: Option<(ToolChoice, Item<'_>)>) -> Result<Offered, DialectError> {
        let offered = |tools, choice| Offered { tools, client_tools: self.of_client, choice };
        let Some((choice, item)) = choice else { return Ok(offered(self.tools, None)) };
        match &choice {
            ToolChoice::Function(name) if !self.places.contains_key(name) => {
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
        Ok(offered(self.tools, choice))
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

/// The text for an image.
pub(super) const IMAGE: &str = "[There is an image here, which you cannot see.]";

/// The images of a request, for which texts stand: a model that cannot see them should know that there are some.
#[derive(Default)]
pub(super) struct Images {
    /// The path of the first one.
    pub(super) first: Option<String>,
}

impl Images {
    /// Whether a part of this type is an image in any dialect. If it is, it is noted.
    pub(super) fn has(&mut self, part: &Item<'_>, kind: &str) -> bool {
        let is_image = matches!(kind, "image" | "image_url" | "input_image");
        if is_image {
            self.first.get_or_insert_with(|| part.path().to_owned());
        }
        is_image
    }
}
