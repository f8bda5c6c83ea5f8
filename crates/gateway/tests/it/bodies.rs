//! Bodies in the shapes of real clients, written by hand.

use forebay_gateway::{Dialect, Request};
use serde_json::{Value, json};

/// A body that a client could send, with the dialect.
pub(crate) struct Posted {
    pub(crate) client: &'static str,
    pub(crate) dialect: Dialect,
    pub(crate) body: Value,
}

/// One body of each client.
pub(crate) fn all() -> Vec<Posted> {
    chat().into_iter().chain(messages()).chain(responses()).collect()
}

fn shell_tool() -> Value {
    json!({"type": "function", "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }})
}

/// Bodies of clients of chat completions.
pub(crate) fn chat() -> Vec<Posted> {
    let body = |client, body| Posted { client, dialect: Dialect::Chat, body };
    vec![
        body("openai", json!({"model": "default", "messages": [{"role": "user", "content": "Hi"}]})),
        body(
            "langchain",
            json!({
                "model": "default", "temperature": 0.7, "n": 1, "presence_penalty": 0.0, "stream": false,
                "messages": [
                    {"role": "system", "content": "You compute."},
                    {"role": "user", "content": "2 + 2?"},
                    {"role": "assistant", "content": null, "tool_calls": [
                        {"type": "function", "id": "call_1",
                        "function": {"name": "bash", "arguments": "{\"command\": \"expr 2 + 2\"}"}},
                    ]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "4"},
                ],
                "tools": [shell_tool()],
            }),
        ),
        body(
            "smolagents",
            json!({
                "model": "default", "temperature": 0.2,
                "stop": ["Observation:", "Calling tools:"], "tool_choice": "required",
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "Solve the task."}]},
                    {"role": "user", "content": [{"type": "text", "text": "New task:\nCount."}]},
                ],
                "tools": [shell_tool()],
            }),
        ),
        body(
            "mini-swe-agent",
            json!({
                "model": "default", "temperature": 0.0,
                "messages": [
                    {"role": "user", "content": "Fix it."},
                    {"role": "assistant", "content": "", "reasoning_content": "Look first.", "function_call": null,
                        "provider_specific_fields": {"refusal": null, "reasoning": "Look first."},
                        "tool_calls": [{"id": "call_9", "type": "function", "index": 0,
                            "function": {"name": "bash", "arguments": "{\"command\": \"ls\"}"}}]},
                    {"role": "tool", "tool_call_id": "call_9", "content": "a.py\n", "extra": {"returncode": 0}},
                ],
                "tools": [shell_tool()],
            }),
        ),
        body(
            "openhands",
            json!({
                "model": "default", "max_completion_tokens": 4096, "top_p": 1.0,
                "messages": [
                    {"role": "system", "content": [
                        {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
                    ]},
                    {"role": "user", "content": [{"type": "text", "text": "Write."}]},
                ],
                "tools": [shell_tool()],
            }),
        ),
        body(
            "opencode",
            json!({
                "model": "default", "max_tokens": 32000, "stream": true, "stream_options": {"include_usage": true},
                "tool_choice": "auto",
                "messages": [
                    {"role": "system", "content": "You are in a terminal."},
                    {"role": "user", "content": "Go on."},
                    {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function",
                        "function": {"name": "bash", "arguments": "{\"command\":\"ls\"}"}}]},
                    {"role": "tool", "tool_call_id": "c", "content": "README.md"},
                    {"role": "system", "content": "The user has changed a file."},
                ],
                "tools": [shell_tool()],
            }),
        ),
    ]
}

/// Bodies of clients of Messages.
pub(crate) fn messages() -> Vec<Posted> {
    let body = |client, body| Posted { client, dialect: Dialect::Messages, body };
    vec![
        body(
            "anthropic",
            json!({
                "model": "default", "max_tokens": 1024, "messages": [{"role": "user", "content": "Hi"}],
            }),
        ),
        body(
            "claude-code",
            json!({
                "model": "default", "max_tokens": 32000, "stream": true, "temperature": 1,
                "metadata": {"user_id": "u"},
                "thinking": {"type": "enabled", "budget_tokens": 31999},
                "system": [
                    {"type": "text", "text": "x-anthropic-billing-header: a=1; cch=7;"},
                    {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
                ],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "<system-reminder>r</system-reminder>"},
                        {"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}}]},
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "Look.", "signature": "forebay-1"},
                        {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}},
                    ]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": "a.py", "is_error": false},
                    ]},
                    {"role": "system", "content": [{"type": "text", "text": "The date has changed."}]},
                ],
                "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}}],
            }),
        ),
        body(
            "langchain-anthropic",
            json!({
                "model": "default", "max_tokens": 1024, "system": "You compute.",
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": false},
                "messages": [
                    {"role": "user", "content": "2 + 2?"},
                    {"role": "assistant", "content": [{"type": "text", "text": "I add."},
                        {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 2, "b": 2}}]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "4"}]},
                    ]},
                ],
                "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            }),
        ),
    ]
}

/// Bodies of clients of Responses.
pub(crate) fn responses() -> Vec<Posted> {
    let body = |client, body| Posted { client, dialect: Dialect::Responses, body };
    let tool = json!({"type": "function", "name": "shell", "strict": false, "parameters": {"type": "object"}});
    vec![
        body("openai", json!({"model": "default", "input": "Hi"})),
        body(
            "openai-agents",
            json!({
                "model": "default", "instructions": "You compute.", "include": [], "parallel_tool_calls": false,
                "input": [
                    {"role": "user", "content": "2 + 2?"},
                    {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "c", "name": "shell",
                        "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "4"},
                ],
                "tools": [tool],
            }),
        ),
        body(
            "codex",
            json!({
                "model": "default", "instructions": "You are in a terminal.", "stream": true, "store": false,
                "tool_choice": "auto", "parallel_tool_calls": true, "prompt_cache_key": "k",
                "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"},
                "input": [
                    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
                    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look."}]},
                    {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "shell",
                        "arguments": "{\"command\":[\"ls\"]}"},
                    {"type": "function_call_output", "call_id": "c", "output": "README.md"},
                ],
                "tools": [tool, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [tool]}],
            }),
        ),
    ]
}

#[test]
fn the_bodies_of_all_clients_are_accepted() {
    for Posted { client, dialect, body } in all() {
        let request = dialect.parse(body.to_string().as_bytes()).and_then(Request::recorded);
        let request = request.unwrap_or_else(|error| panic!("{client} is understood, but: {error}"));
        assert_eq!(request.model, "default", "{client}");
        assert!(!request.messages.is_empty(), "{client}");
    }
}
