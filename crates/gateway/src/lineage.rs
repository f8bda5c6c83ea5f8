//! Which of an agent's sub-agents makes a call, from the headers that some agents send.
//!
//! The label separates sub-agents in the stored calls. It never decides what is trained: segments follow from token
//! ids alone.

use http::HeaderMap;
use serde::Deserialize;

/// The label of an agent's own conversation.
const MAIN: &str = "main";

/// Longer ids are cut. The headers are written by the agent, and every call stores its label of at most 256 bytes.
const ID_BYTES_MAX: usize = 127;

/// The label of an agent or sub-agent within a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentLabel(String);

impl AgentLabel {
    /// Reads the label from the headers of a call: `main`, `agent:ID` for a sub-agent, or `KIND:ID` for upkeep such as
    /// a compaction. `None` if the agent sends no such headers.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        claude_code(headers).or_else(|| codex(headers)).or_else(|| opencode(headers))
    }

    /// The label.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn main() -> Self {
        Self(MAIN.to_owned())
    }

    fn of_kind(kind: &str, id: &str) -> Self {
        let printable = |text: &str| -> String {
            let printable: String = text.chars().filter(|c| !c.is_control()).take(ID_BYTES_MAX).collect();
            printable[..printable.floor_char_boundary(ID_BYTES_MAX)].to_owned()
        };
        Self(format!("{}:{}", printable(kind), printable(id)))
    }
}

/// Claude Code names an agent only in the calls of agents that it spawned.
fn claude_code(headers: &HeaderMap) -> Option<AgentLabel> {
    match header(headers, "x-claude-code-agent-id") {
        Some(id) => Some(AgentLabel::of_kind("agent", id)),
        None => header(headers, "x-claude-code-session-id").map(|_| AgentLabel::main()),
    }
}

/// What Codex says about a turn, in JSON.
#[derive(Deserialize, Default)]
#[serde(default)]
struct TurnMetadata {
    thread_id: Option<String>,
    parent_thread_id: Option<String>,
    thread_source: Option<String>,
    subagent_kind: Option<String>,
}

fn codex(headers: &HeaderMap) -> Option<AgentLabel> {
    let kind = header(headers, "x-openai-subagent");
    let metadata = header(headers, "x-codex-turn-metadata").map(serde_json::from_str::<TurnMetadata>);
    let Some(Ok(metadata)) = metadata else {
        return kind.map(|kind| AgentLabel::of_kind(upkeep(kind).unwrap_or("agent"), kind));
    };
    let is_subagent = metadata.thread_source.as_deref() == Some("subagent") || metadata.parent_thread_id.is_some();
    if !is_subagent {
        return Some(AgentLabel::main());
    }
    let kind = metadata.subagent_kind.as_deref().or(kind).unwrap_or_default();
    let id = metadata.thread_id.as_deref().unwrap_or(kind);
    Some(AgentLabel::of_kind(upkeep(kind).unwrap_or("agent"), id))
}

/// The kinds of Codex' sub-agents that only keep its conversation in order.
fn upkeep(kind: &str) -> Option<&str> {
    matches!(kind, "compact" | "memory_consolidation").then_some(kind)
}

fn opencode(headers: &HeaderMap) -> Option<AgentLabel> {
    let session = header(headers, "x-session-id")?;
    match header(headers, "x-parent-session-id") {
        Some(_) => Some(AgentLabel::of_kind("agent", session)),
        None => Some(AgentLabel::main()),
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().filter(|value| !value.is_empty())
}
