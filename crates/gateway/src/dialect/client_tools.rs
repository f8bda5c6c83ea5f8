//! Tools that run at the client and are no plain functions: free-form ones, those in a namespace, shells, patches.
//!
//! Engines know only functions. So each of these tools becomes one, and its calls are written in the client's shape
//! again. A conversation that a client sends back is read with the same names and arguments, so that it is equal to what
//! was recorded.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{client_tool::ClientTool, error::DialectError, tools};
use crate::{
    completion::ToolCall,
    json::{self, Fields, Object},
    request::Tool,
};

/// OpenAI's namespace for functions that have none.
const FUNCTIONS: &str = "functions";

/// The argument that has the input of a free-form tool.
const INPUT: &str = "input";

/// The name of the function that stands for a tool in a namespace. Clients name a tool of an MCP server in the same way
/// where they know no namespaces: `mcp__server__tool`.
pub(super) fn function_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        None | Some("" | FUNCTIONS) => name.to_owned(),
        Some(namespace) => format!("{}__{name}", namespace.trim_end_matches("__")),
    }
}

/// The function for a tool of Responses that has no name and runs at the client. `None` if it is none.
pub(super) fn unnamed(kind: &str, tool: &mut Object<'_>) -> Result<Option<(Tool, ClientTool)>, DialectError> {
    let found = match kind {
        "local_shell" => (local_shell(), ClientTool::LocalShell),
        "shell" if runs_at_client(tool)? => (shell(), ClientTool::Shell),
        "apply_patch" => (apply_patch(), ClientTool::ApplyPatch),
        "tool_search" if tool.take_string("execution")?.as_deref() == Some("client") => {
            let fields = tool.take_fields(["description", "parameters"].into_iter());
            (Tool::function(kind.to_owned(), fields), ClientTool::ToolSearch)
        }
        _ => return Ok(None),
    };
    Ok(Some(found))
}

fn runs_at_client(tool: &mut Object<'_>) -> Result<bool, DialectError> {
    let Some(environment) = tool.take("environment") else { return Ok(true) };
    Ok(environment.object()?.require("type")?.string()? == "local")
}

/// The function for a free-form tool. A grammar of its input is described, because under a grammar the log-probabilities
/// would not be those of the policy.
pub(super) fn free_form(tool: &mut Object<'_>, namespace: Option<&str>) -> Result<(Tool, ClientTool), DialectError> {
    let name = tool.require("name")?.string()?;
    let description = tool.take("description").map(|item| ("description".to_owned(), item.to_raw()));
    let grammar = tool.take("format").map(|format| grammar(&mut format.object()?)).transpose()?.flatten();
    let what = match grammar {
        Some((syntax, definition)) => {
            format!("The input as text, which this {syntax} grammar describes:\n{definition}")
        }
        None => "The input as text.".to_owned(),
    };
    let parameters = json!({
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": what}},
        "required": [INPUT],
    });
    let fields = description.into_iter().chain([("parameters".to_owned(), json::raw(&parameters))]).collect();
    let function = Tool::function(function_name(namespace, &name), fields);
    Ok((function, ClientTool::Custom { name, namespace: namespace.map(str::to_owned) }))
}

/// The syntax and the definition of a grammar, in the shape of Responses or in that of chat completions.
fn grammar(format: &mut Object<'_>) -> Result<Option<(String, String)>, DialectError> {
    let mut inner = format.take("grammar").map(|inner| inner.object()).transpose()?;
    let format = inner.as_mut().unwrap_or(format);
    let syntax = format.take_string("syntax")?;
    Ok(syntax.zip(format.take_string("definition")?))
}

/// The arguments of a call of a free-form tool.
pub(super) fn free_form_arguments(input: &str) -> String {
    json!({INPUT: input}).to_string()
}

/// The input of a call of a free-form tool. A model may write anything; what is no such object is the input itself.
pub(super) fn free_form_input(arguments: &str) -> Cow<'_, str> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Arguments {
        input: String,
    }
    serde_json::from_str(arguments).map_or(Cow::Borrowed(arguments), |Arguments { input }| Cow::Owned(input))
}

/// A call as an item of Responses without its id and status. A call whose arguments do not fit its shape is an ordinary
/// one, which the client answers with an error that the model can read.
pub(super) fn item(tool: Option<&ClientTool>, call: &ToolCall) -> Value {
    let shaped = tool.and_then(|tool| shaped(tool, &call.arguments));
    let mut item =
        shaped.unwrap_or_else(|| json!({"type": "function_call", "name": call.name, "arguments": call.arguments}));
    item["call_id"] = json!(call.id);
    item
}

/// The events for the text of a call of Responses, and the field that has it. `None` if it has an object.
pub(super) fn text_of(item: &Value) -> Option<((&'static str, &'static str), &'static str)> {
    match item["type"].as_str()? {
        "function_call" => {
            Some((("response.function_call_arguments.delta", "response.function_call_arguments.done"), "arguments"))
        }
        "custom_tool_call" => {
            Some((("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"), INPUT))
        }
        _ => None,
    }
}

fn shaped(tool: &ClientTool, arguments: &str) -> Option<Value> {
    let item = match tool {
        ClientTool::Function { name, namespace } => {
            json!({"type": "function_call", "name": name, "namespace": namespace, "arguments": arguments})
        }
        ClientTool::Custom { name, namespace } => {
            let mut item = json!({"type": "custom_tool_call", "name": name, INPUT: free_form_input(arguments)});
            if let Some(namespace) = namespace {
                item["namespace"] = json!(namespace);
            }
            item
        }
        ClientTool::LocalShell => {
            let mut action = object(arguments)?;
            texts(action.get("command")?)?;
            action.entry("env").or_insert_with(|| json!({}));
            action.insert("type".to_owned(), json!("exec"));
            json!({"type": "local_shell_call", "action": action})
        }
        ClientTool::Shell => {
            let mut action = object(arguments)?;
            texts(action.get("commands")?)?;
            for bound in ["timeout_ms", "max_output_length"] {
                action.entry(bound).or_insert(Value::Null);
            }
            json!({"type": "shell_call", "action": action})
        }
        ClientTool::ApplyPatch => {
            let operation = object(arguments)?;
            let has = |name: &str| operation.get(name).is_some_and(Value::is_string);
            let is_known = match operation.get("type")?.as_str()? {
                "create_file" | "update_file" => has("path") && has("diff"),
                "delete_file" => has("path"),
                _ => false,
            };
            is_known.then(|| json!({"type": "apply_patch_call", "operation": operation}))?
        }
        ClientTool::ToolSearch => {
            json!({"type": "tool_search_call", "execution": "client", "arguments": object(arguments)?})
        }
    };
    Some(item)
}

fn object(arguments: &str) -> Option<Map<String, Value>> {
    serde_json::from_str(arguments).ok()
}

fn texts(value: &Value) -> Option<()> {
    value.as_array()?.iter().all(Value::is_string).then_some(())
}

/// Reads a call that a client sends back. `None` if the item is none, or one that the provider executed.
pub(super) fn sent_back(kind: &str, object: &mut Object<'_>) -> Result<Option<ToolCall>, DialectError> {
    let (name, arguments) = match kind {
        "function_call" | "custom_tool_call" => {
            let namespace = object.take_string("namespace")?;
            let id = object.require("call_id")?.string()?;
            let name = function_name(namespace.as_deref(), &object.require("name")?.string()?);
            let arguments = match kind {
                "function_call" => tools::arguments(object.take("arguments")),
                _ => free_form_arguments(&object.take_string(INPUT)?.unwrap_or_default()),
            };
            return Ok(Some(ToolCall { id, name, arguments }));
        }
        "local_shell_call" => ("local_shell", action(object, "action", &["type"])?),
        "shell_call" => ("shell", action(object, "action", &[])?),
        "apply_patch_call" => ("apply_patch", action(object, "operation", &[])?),
        "tool_search_call" => {
            if object.take_string("execution")?.as_deref() != Some("client") {
                return Ok(None);
            }
            ("tool_search", object.require("arguments")?.verbatim().to_owned())
        }
        _ => return Ok(None),
    };
    Ok(Some(ToolCall { id: call_id(object)?, name: name.to_owned(), arguments }))
}

/// The arguments that an action was made of.
fn action(object: &mut Object<'_>, field: &str, added: &[&str]) -> Result<String, DialectError> {
    let mut action = object.require(field)?.object()?;
    action.discard(added);
    let mut fields: Fields = action.rest();
    // What a client or this service adds where the model wrote nothing.
    fields.retain(|(name, value)| value.get() != "null" && !(name == "env" && value.get() == "{}"));
    Ok(json::object_of(&fields).get().to_owned())
}

/// Reads the output of a call. `None` if the item is none.
pub(super) fn output(
    kind: &str,
    object: &mut Object<'_>,
    mut text_of: impl FnMut(&json::Item<'_>) -> Result<String, DialectError>,
) -> Result<Option<(String, String)>, DialectError> {
    let text = match kind {
        "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" | "mcp_tool_call_output" => {
            // A tool that returns nothing.
            object.require_or_null("output")?.map(|output| text_of(&output)).transpose()?.unwrap_or_default()
        }
        // Objects with what was printed and how it ended.
        "shell_call_output" => object.require("output")?.verbatim().to_owned(),
        "apply_patch_call_output" => match object.take_string("output")? {
            Some(output) => output,
            None => object.take_string("status")?.unwrap_or_default(),
        },
        _ => return Ok(None),
    };
    Ok(Some((call_id(object)?, text)))
}

/// What a model is told of a search for tools: the names of the functions that were found, which are offered to it.
pub(super) fn found(output: &mut Object<'_>) -> Result<String, DialectError> {
    let mut names = Vec::new();
    if let Some(list) = output.take("tools") {
        list.each(|item| {
            let mut tool = item.object()?;
            let Some(name) = tool.take_string("name")? else { return Ok(()) };
            let Some(inner) = tool.take("tools") else {
                names.push(name);
                return Ok(());
            };
            inner.each(|item| {
                let inner = item.object()?.take_string("name")?;
                names.extend(inner.map(|inner| function_name(Some(&name), &inner)));
                Ok(())
            })?;
            Ok(())
        })?;
    }
    Ok(if names.is_empty() { "No tools were found.".to_owned() } else { names.join("\n") })
}

/// The id of a call. Older clients have it only as the id of the item.
fn call_id(object: &mut Object<'_>) -> Result<String, DialectError> {
    match object.take_string("call_id")? {
        Some(id) => Ok(id),
        None => match object.take_string("id")? {
            Some(id) => Ok(id),
            None => object.require("call_id")?.string(),
        },
    }
}

fn described(name: &str, description: &str, parameters: &Value) -> Tool {
    let fields = [("description", json::raw(&description)), ("parameters", json::raw(parameters))];
    Tool::function(name.to_owned(), fields.map(|(name, value)| (name.to_owned(), value)).into())
}

fn local_shell() -> Tool {
    let parameters = json!({
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string", "description": "The folder in which it runs."},
            "timeout_ms": {"type": "integer", "description": "Milliseconds after which it is ended."},
            "env": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "default": {},
                "description": "Variables of its environment.",
            },
        },
        "required": ["command"],
    });
    described("local_shell", "Runs a command in the shell of this machine.", &parameters)
}

fn shell() -> Tool {
    let parameters = json!({
        "type": "object",
        "properties": {
            "commands": {
                "type": "array",
                "items": {"type": "string"},
                "description": "The commands, which run one after the other.",
            },
            "timeout_ms": {"type": "integer", "description": "Milliseconds after which a command is ended."},
            "max_output_length": {"type": "integer", "description": "The most characters of the output."},
        },
        "required": ["commands"],
    });
    described("shell", "Runs commands in the shell of this machine.", &parameters)
}

fn apply_patch() -> Tool {
    let parameters = json!({
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string", "description": "The path of the file."},
            "diff": {"type": "string", "description": "The change as a V4A diff. A file that is deleted has none."},
        },
        "required": ["type", "path"],
    });
    described("apply_patch", "Creates, updates or deletes a file.", &parameters)
}

/// A tool of Anthropic's that runs at the client, whose schema only its models know. `None` if it is none.
pub(super) fn of_anthropic(kind: &str, tool: &mut Object<'_>) -> Result<Option<Tool>, DialectError> {
    let Some(versioned) = kind.rsplit_once('_') else { return Ok(None) };
    let (description, parameters) = match versioned {
        ("bash", _) => (
            "Runs a command in a bash session that stays open between calls.",
            json!({
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "The command."},
                    "restart": {"type": "boolean", "description": "Whether to begin a new session instead."},
                },
            }),
        ),
        ("text_editor", version) => ("Shows, creates and edits text files.", editor(version)),
        ("memory", _) => ("Reads and writes the files below /memories, which outlast the conversation.", memory()),
        _ => return Ok(None),
    };
    Ok(Some(described(&tool.require("name")?.string()?, description, &parameters)))
}

fn editor(version: &str) -> Value {
    // The versions before 2025-04-29 can undo, and insert `new_str`.
    let is_older = version < "20250429";
    let mut commands = vec!["view", "create", "str_replace", "insert"];
    commands.extend(is_older.then_some("undo_edit"));
    let mut properties = json!({
        "command": {"type": "string", "enum": commands},
        "path": {"type": "string", "description": "The absolute path of the file or folder."},
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "The first and the last line to `view`; -1 is the end.",
        },
        "file_text": {"type": "string", "description": "The content of the file to `create`."},
        "old_str": {"type": "string", "description": "The text to replace, which must be there exactly once."},
        "new_str": {"type": "string", "description": "The text that replaces it."},
        "insert_line": {"type": "integer", "description": "The line behind which to `insert`; 0 is the beginning."},
    });
    if !is_older {
        properties["insert_text"] = json!({"type": "string", "description": "The text to `insert`."});
    }
    json!({"type": "object", "properties": properties, "required": ["command", "path"]})
}

fn memory() -> Value {
    json!({
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            "path": {"type": "string", "description": "The path, for all commands but `rename`."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "The first and the last line to `view`.",
            },
            "file_text": {"type": "string", "description": "The content of the file to `create`."},
            "old_str": {"type": "string", "description": "The text to replace."},
            "new_str": {"type": "string", "description": "The text that replaces it."},
            "insert_line": {"type": "integer", "description": "The line behind which to `insert`."},
            "insert_text": {"type": "string", "description": "The text to `insert`."},
            "old_path": {"type": "string", "description": "The path to `rename`."},
            "new_path": {"type": "string", "description": "The new path."},
        },
        "required": ["command"],
    })
}
