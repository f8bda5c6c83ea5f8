//! What a client calls its tools that are no plain functions. It belongs to a request and is stored with its answer.
//!
//! How such tools and their calls are read and written is in `client_tools`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::completion::ToolCall;

/// What a client calls a tool, and which shape its calls have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientTool {
    /// A function in a namespace.
    Function {
        /// Its name in the namespace.
        name: String,
        /// The namespace.
        namespace: String,
    },
    /// A tool with free text as its input.
    Custom {
        /// Its name.
        name: String,
        /// Its namespace.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
    },
    /// OpenAI's `local_shell`.
    LocalShell,
    /// OpenAI's `shell` without a container.
    Shell,
    /// OpenAI's `apply_patch`.
    ApplyPatch,
    /// OpenAI's `tool_search` that the client executes.
    ToolSearch,
}

/// Such tools by the names of their functions.
pub type ClientTools = BTreeMap<String, ClientTool>;

/// Those of the tools that were called.
#[must_use]
pub fn called(tools: &ClientTools, calls: &[ToolCall]) -> ClientTools {
    let found = calls.iter().filter_map(|call| tools.get_key_value(&call.name));
    found.map(|(name, tool)| (name.clone(), tool.clone())).collect()
}
