//! What answers and lists of models contain that no engine says. All dialects are given it.

use std::sync::Arc;

use super::client_tool::ClientTools;

/// A model that an agent can call.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    /// Its name.
    pub name: &'a str,
    /// The size of the context of its engine, if it is known.
    pub context_tokens: Option<u32>,
}

/// What an answer contains besides the completion.
#[derive(Clone, Debug)]
pub struct Envelope {
    /// A unique id of letters, digits, `-` and `_`. Each dialect puts its own prefix before it.
    pub id: String,
    /// Seconds since 1970.
    pub created_s: u64,
    /// The model as the agent named it.
    pub model: String,
    /// Whether the events of chat completions contain the usage:
    /// [`Request::stream_usage`](crate::Request::stream_usage).
    pub stream_usage: bool,
    /// What the client calls its tools: [`Request::client_tools`](crate::Request::client_tools).
    pub tools: Arc<ClientTools>,
}
