//! The steps of a trajectory as chat messages.

use forebay_wire::Object;
use serde_json::{Map, Value, json};

use super::schema::{Content, Part, PartType, Source, Step, ToolCall, Trajectory};
use crate::ids::compact;

/// The conversation of a trajectory, without those of its sub-agents.
pub(super) fn of(trajectory: &Trajectory) -> Vec<Value> {
    trajectory.steps.iter().flat_map(|Object(step)| of_step(step)).collect()
}

fn of_step(step: &Step) -> Vec<Value> {
    let role = match step.source {
        Source::System => "system",
        Source::User => "user",
        Source::Agent => "assistant",
    };
    let mut message =
        Map::from_iter([("role".to_owned(), json!(role)), ("content".to_owned(), content(&step.message))]);
    if let Some(reasoning) = &step.reasoning_content {
        message.insert("reasoning_content".to_owned(), json!(reasoning));
    }
    if let Some(calls) = step.tool_calls.as_ref().filter(|calls| !calls.is_empty()) {
        message.insert("tool_calls".to_owned(), calls.iter().map(|Object(call)| tool_call(call)).collect());
    }
    let mut messages = vec![Value::Object(message)];
    let results = step.observation.iter().flat_map(|Object(observation)| &observation.results);
    for Object(result) in results {
        let Some(text) = result.content.as_ref().map(content) else { continue };
        // A result of no call is what the environment says to the agent.
        messages.push(match &result.source_call_id {
            Some(id) => json!({"role": "tool", "tool_call_id": id, "content": text}),
            None => json!({"role": "user", "content": text}),
        });
    }
    messages
}

fn tool_call(call: &ToolCall) -> Value {
    json!({
        "id": call.tool_call_id,
        "type": "function",
        "function": {"name": call.function_name, "arguments": compact(call.arguments.get())},
    })
}

fn content(content: &Content) -> Value {
    match content {
        Content::Text(text) => json!(text),
        Content::Parts(parts) => parts.iter().map(part).collect(),
    }
}

/// A part in OpenAI's form. Audio has no such form for a file, so it stays as it is.
fn part(part: &Part) -> Value {
    match (part.r#type, &part.source) {
        (PartType::Image, Some(source)) => json!({"type": "image_url", "image_url": {"url": source.path}}),
        _ => serde_json::to_value(part).expect("plain data is JSON"),
    }
}
