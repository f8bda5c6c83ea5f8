//! Tools that run at the client and are no functions: what the engine is offered, and what the client gets back.

use std::sync::Arc;

use forebay_gateway::{
    Dialect, Request,
    completion::{AssistantMessage, ToolCall},
    dialect::{Envelope, Events},
    request::{LeftOut, ToolChoice},
};
use serde_json::{Value, json};

use crate::{
    sse::{Seen, read_events},
    support::{completion, envelope, parsed, pieces, tool_call},
};

const RESPONSES: Dialect = Dialect::Responses;

/// The functions that the engine is offered.
fn functions(request: &Request) -> Vec<Value> {
    let definition = |text: &str| serde_json::from_str::<Value>(text).expect("a definition is JSON")["function"].take();
    request.tools.iter().map(|tool| definition(tool.definition.get())).collect()
}

fn names(request: &Request) -> Vec<&str> {
    request.tools.iter().map(|tool| tool.name.as_str()).collect()
}

/// The output of an answer with these calls to a request, which is the same as events.
fn output(request: &Request, calls: &[ToolCall]) -> Vec<Value> {
    let completion = completion(AssistantMessage { tool_calls: calls.to_vec(), ..AssistantMessage::default() });
    let envelope = Envelope { tools: Arc::new(request.client_tools.clone()), ..envelope() };
    let answer: Value = serde_json::from_slice(&RESPONSES.answer(&completion, &envelope)).expect("an answer is JSON");
    let events = Events::new(RESPONSES).answer(&completion, &envelope);
    let seen = read_events(&events);
    let of_type = |kind: &str| -> Vec<Value> {
        let found = seen.iter().map(Seen::json).filter(|data| data["type"] == kind);
        found.map(|mut data| data["item"].take()).collect()
    };
    let output = answer["output"].as_array().expect("a list").clone();
    assert_eq!(of_type("response.output_item.done"), output);
    for (added, done) in of_type("response.output_item.added").iter().zip(&output) {
        assert_eq!((&added["type"], &added["name"]), (&done["type"], &done["name"]));
        assert_eq!((&added["status"], &done["status"]), (&json!("in_progress"), &json!("completed")));
    }
    output
}

/// A request with these tools and this history behind a question.
fn request(tools: &Value, history: &[Value]) -> Request {
    let mut input = vec![json!({"role": "user", "content": "Go."})];
    input.extend(history.iter().cloned());
    parsed(RESPONSES, &json!({"model": "m", "input": input, "tools": tools}))
}

/// Calls that come back as they were sent have the meaning that the model gave them.
fn assert_come_back(tools: &Value, calls: &[ToolCall], output: &[Value]) {
    let sent_back = request(tools, output);
    let found = &sent_back.messages.last().expect("there is a turn").tool_calls;
    let value = |text: &str| serde_json::from_str::<Value>(text).expect("arguments are JSON");
    for (found, call) in found.iter().zip(calls) {
        assert_eq!((&found.id, &found.name), (&call.id, &call.name));
        assert_eq!(value(&found.arguments), value(&call.arguments));
    }
    assert_eq!(found.len(), calls.len());
}

#[test]
fn tools_of_a_namespace_are_functions_and_their_calls_name_it() {
    let tool = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}});
    let tools = json!([
        {"type": "namespace", "name": "mcp__calc", "description": "d", "tools": [tool("secret"), tool("add")]},
        {"type": "namespace", "name": "functions", "tools": [tool("wait")]},
        tool("secret"),
    ]);
    let request = request(&tools, &[]);
    assert_eq!(names(&request), ["mcp__calc__secret", "mcp__calc__add", "wait", "secret"]);
    assert_eq!(functions(&request)[0]["parameters"], json!({"type": "object"}));
    let calls = [
        tool_call("c1", "mcp__calc__secret", "{\"a\": 1}"),
        tool_call("c2", "wait", "{}"),
        tool_call("c3", "secret", "{}"),
    ];
    let output = output(&request, &calls);
    let found: Vec<_> = output.iter().map(|item| (&item["type"], &item["namespace"], &item["name"])).collect();
    let call = json!("function_call");
    let expected = [
        (&call, &json!("mcp__calc"), &json!("secret")),
        (&call, &json!("functions"), &json!("wait")),
        (&call, &Value::Null, &json!("secret")),
    ];
    assert_eq!(found, expected);
    assert_come_back(&tools, &calls, &output);
}

#[test]
fn free_form_tools_have_their_input_as_a_text() {
    let grammar = json!({"type": "grammar", "syntax": "lark", "definition": "start: X"});
    let tools = json!([
        {"type": "custom", "name": "apply_patch", "description": "D", "format": grammar},
        {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]},
    ]);
    let request = request(&tools, &[]);
    let function = &functions(&request)[0];
    assert_eq!((&function["name"], &function["description"]), (&json!("apply_patch"), &json!("D")));
    assert_eq!(function["parameters"]["required"], json!(["input"]));
    let described = function["parameters"]["properties"]["input"]["description"].as_str().expect("a text");
    assert!(described.contains("start: X"), "{described}");
    assert!(!request.constrained(), "nothing is sampled under the grammar");
    let patch = "*** Begin Patch\n+\"x\"\n";
    let calls = [
        tool_call("c1", "apply_patch", &json!({"input": patch}).to_string()),
        tool_call("c2", "exec", "{\"input\": \"text(1)\"}"),
    ];
    let output = output(&request, &calls);
    assert_eq!((&output[0]["type"], &output[0]["input"]), (&json!("custom_tool_call"), &json!(patch)));
    assert_eq!((&output[1]["name"], &output[1]["namespace"]), (&json!("exec"), &json!("functions")));
    assert_come_back(&tools, &calls, &output);
    // A model may write anything.
    let odd = [tool_call("c", "exec", "text(1)")];
    assert_eq!(self::output(&request, &odd)[0]["input"], "text(1)");
}

#[test]
fn the_input_of_a_free_form_tool_is_sent_in_events_of_its_own() {
    let request = request(&json!([{"type": "custom", "name": "exec"}]), &[]);
    let calls = vec![tool_call("c", "exec", "{\"input\":\"text(1)\"}")];
    let completion = completion(AssistantMessage { tool_calls: calls, ..AssistantMessage::default() });
    let envelope = Envelope { tools: Arc::new(request.client_tools), ..envelope() };
    let events = Events::new(RESPONSES).answer(&completion, &envelope);
    let seen = read_events(&events);
    let of = |name: &str| seen.iter().find(|event| event.event.as_deref() == Some(name)).map(Seen::json);
    assert_eq!(of("response.custom_tool_call_input.delta").expect("a delta")["delta"], "text(1)");
    assert_eq!(of("response.custom_tool_call_input.done").expect("the input")["input"], "text(1)");
    assert_eq!(of("response.function_call_arguments.delta"), None);
}

/// The first call is one of a namespace and comes in pieces. Behind it is a tool whose calls have no pieces.
#[test]
fn calls_of_different_shapes_follow_the_pieces_of_the_first() {
    let tools = json!([
        {"type": "namespace", "name": "mcp__calc", "tools": [{"type": "function", "name": "add"}]},
        {"type": "custom", "name": "exec"},
        {"type": "function", "name": "wait"},
    ]);
    let request = request(&tools, &[]);
    let calls = [
        tool_call("c1", "mcp__calc__add", "{\"a\": 1}"),
        tool_call("c2", "exec", "{\"input\": \"text(1)\"}"),
        tool_call("c3", "wait", "{}"),
    ];
    let message = AssistantMessage { tool_calls: calls.to_vec(), ..AssistantMessage::default() };
    let envelope = Envelope { tools: Arc::new(request.client_tools.clone()), ..envelope() };
    let mut events = Events::new(RESPONSES);
    let mut seen: Vec<_> = pieces(&message).iter().flat_map(|piece| events.piece(piece, &envelope)).collect();
    seen.extend(events.answer(&completion(message), &envelope));
    let seen: Vec<Value> = read_events(&seen).iter().map(Seen::json).collect();
    let of = |kind: &str, field: &str| -> Vec<Value> {
        seen.iter().filter(|data| data["type"] == kind).map(|data| data[field].clone()).collect()
    };
    assert_eq!(of("response.output_item.done", "item"), output(&request, &calls));
    assert_eq!(of("response.output_item.added", "output_index"), [0, 1, 2]);
    assert_eq!(of("response.output_item.added", "item")[0]["namespace"], "mcp__calc");
    let deltas = of("response.function_call_arguments.delta", "delta");
    let deltas: String = deltas.iter().filter_map(Value::as_str).collect();
    assert_eq!(deltas, "{\"a\": 1}{}");
}

#[test]
fn shells_and_patches_have_actions() {
    let tools = json!([
        {"type": "local_shell"},
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "apply_patch"},
        {"type": "tool_search", "execution": "client", "description": "D", "parameters": {"type": "object"}},
    ]);
    let request = request(&tools, &[]);
    assert_eq!(names(&request), ["local_shell", "shell", "apply_patch", "tool_search"]);
    let delete = json!({"type": "delete_file", "path": "a.py"});
    let calls = [
        tool_call("c1", "local_shell", "{\"command\": [\"ls\", \"-l\"], \"timeout_ms\": 5}"),
        tool_call("c2", "shell", "{\"commands\": [\"ls\"]}"),
        tool_call("c3", "apply_patch", &delete.to_string()),
        tool_call("c4", "tool_search", "{\"query\": \"calc\"}"),
    ];
    let output = output(&request, &calls);
    let kinds: Vec<_> = output.iter().map(|item| item["type"].as_str().expect("a type")).collect();
    assert_eq!(kinds, ["local_shell_call", "shell_call", "apply_patch_call", "tool_search_call"]);
    let action = json!({"type": "exec", "command": ["ls", "-l"], "timeout_ms": 5, "env": {}});
    assert_eq!(output[0]["action"], action);
    assert_eq!(output[1]["action"]["commands"], json!(["ls"]));
    assert_eq!(output[2]["operation"], delete);
    assert_eq!((&output[3]["execution"], &output[3]["arguments"]), (&json!("client"), &json!({"query": "calc"})));
    assert_come_back(&tools, &calls, &output);
    // What fits no action is a call that the client answers with an error.
    for (name, arguments) in [
        ("local_shell", "ls"),
        ("local_shell", "{}"),
        ("local_shell", "{\"command\": \"ls\"}"),
        ("local_shell", "[]"),
        ("shell", "{\"commands\": \"ls\"}"),
        ("apply_patch", "{\"type\": \"create_file\", \"path\": \"a.py\"}"),
        ("apply_patch", "{\"type\": \"move_file\", \"path\": \"a.py\"}"),
    ] {
        let item = &self::output(&request, &[tool_call("c", name, arguments)])[0];
        assert_eq!((&item["type"], &item["arguments"]), (&json!("function_call"), &json!(arguments)));
    }
}

#[test]
fn a_search_for_tools_that_the_provider_runs_is_left_out() {
    let request = request(&json!([{"type": "tool_search"}]), &[]);
    assert!(request.tools.is_empty());
    assert_eq!(request.warnings.kinds().map(|part| part.kind.as_str()).collect::<Vec<_>>(), ["tool_search"]);
}

#[test]
fn outputs_answer_their_calls() {
    let call = |kind: &str, fields: Value| {
        let mut item = json!({"type": kind, "call_id": "c"});
        item.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        item
    };
    let printed = json!([{"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]);
    let cases = [
        (call("custom_tool_call_output", json!({"output": "o"})), "o".to_owned()),
        (call("custom_tool_call_output", json!({"output": [{"type": "input_text", "text": "o"}]})), "o".to_owned()),
        (call("shell_call_output", json!({"output": printed})), printed.to_string()),
        (call("apply_patch_call_output", json!({"status": "failed", "output": "why"})), "why".to_owned()),
        (call("apply_patch_call_output", json!({"status": "completed"})), "completed".to_owned()),
        (json!({"type": "local_shell_call_output", "id": "c", "output": "o"}), "o".to_owned()),
        (call("tool_search_output", json!({"tools": []})), "No tools were found.".to_owned()),
    ];
    for (item, expected) in cases {
        let request = request(&json!([]), &[item]);
        let message = &request.messages[1];
        assert_eq!(message.tool_call_id.as_deref(), Some("c"));
        assert_eq!(serde_json::to_value(&message.content).expect("a content is JSON"), json!(expected));
    }
}

#[test]
fn items_of_the_history_add_tools_and_may_repeat_them() {
    let tool = |name: &str, text: &str| json!({"type": "function", "name": name, "description": text});
    let found = json!({"type": "namespace", "name": "mcp__calc", "tools": [tool("add", "")]});
    let added = |tools: Value| json!({"type": "additional_tools", "role": "developer", "tools": tools});
    let history = [
        added(json!([tool("g", "old"), {"type": "web_search"}])),
        added(json!([tool("g", "new"), {"type": "custom", "name": "f"}])),
        json!({"type": "tool_search_output", "call_id": "c", "tools": [found.clone()]}),
        added(json!([found, {"type": "custom", "name": "h"}])),
        added(json!([tool("h", "")])),
    ];
    let request = request(&json!([tool("f", "")]), &history);
    assert_eq!(names(&request), ["f", "g", "mcp__calc__add", "h"]);
    let output = output(&request, &[tool_call("c1", "f", "{\"input\": \"x\"}"), tool_call("c2", "h", "{}")]);
    assert_eq!((&output[0]["type"], &output[1]["type"]), (&json!("custom_tool_call"), &json!("function_call")));
    assert_eq!(functions(&request)[1]["description"], "new");
    assert_eq!(functions(&request)[0]["parameters"]["required"], json!(["input"]));
    assert_eq!(request.tool_choice, None);
    let text = serde_json::to_value(&request.messages[1].content).expect("a content is JSON");
    assert_eq!(text, json!("mcp__calc__add"));
    assert_eq!(request.warnings.kinds().map(|part| part.kind.as_str()).collect::<Vec<_>>(), ["web_search"]);
}

#[test]
fn a_choice_may_name_such_a_tool() {
    let chosen = |tool: Value, choice: Value| {
        let body = json!({"model": "m", "input": "Go.", "tools": [tool], "tool_choice": choice});
        parsed(RESPONSES, &body).tool_choice
    };
    let function = |name: &str| Some(ToolChoice::Function(name.to_owned()));
    let exec = json!({"type": "custom", "name": "exec"});
    assert_eq!(chosen(exec.clone(), exec), function("exec"));
    let inner = json!({"type": "function", "name": "add"});
    let calc = json!({"type": "namespace", "name": "mcp__calc", "tools": [inner]});
    let choice = json!({"type": "function", "name": "add", "namespace": "mcp__calc"});
    assert_eq!(chosen(calc, choice), function("mcp__calc__add"));
    let shell = json!({"type": "local_shell"});
    assert_eq!(chosen(shell.clone(), shell), function("local_shell"));
}

#[test]
fn unknown_items_of_the_history_are_left_out() {
    let kinds = ["compaction", "context_compaction", "reasoning_trace", "web_search_call", "mcp_list_tools"];
    let mut history: Vec<Value> = kinds.iter().map(|kind| json!({"type": kind, "encrypted_content": "x"})).collect();
    let part = json!({"type": "encrypted_content", "encrypted_content": "x"});
    let text = json!({"type": "input_text", "text": "Look there."});
    for content in [json!([part]), json!([text, part])] {
        history.push(json!({"type": "agent_message", "author": "a", "recipient": "b", "content": content}));
    }
    // A client may name a kind with any text.
    history.push(json!({"type": "x".repeat(100_000)}));
    let request = request(&json!([]), &history);
    let texts: Vec<_> = request.messages.iter().map(|message| serde_json::to_value(&message.content)).collect();
    let texts: Vec<Value> = texts.into_iter().collect::<Result<_, _>>().expect("a content is JSON");
    assert_eq!(texts, [json!("Go."), json!("Look there.")]);
    let left_out: Vec<_> = request.warnings.kinds().map(|part| part.kind.as_str()).collect();
    let long = "x".repeat(64);
    let mut expected = [&kinds[..], &["encrypted_content", &long]].concat();
    expected.sort_unstable();
    let mut found = left_out.clone();
    found.sort_unstable();
    assert_eq!(found, expected);
    assert!(request.warnings.iter().all(|text| text.len() < 200));
}

#[test]
fn chat_completions_have_free_form_tools() {
    let tool = json!({"type": "custom", "custom": {
        "name": "exec", "description": "D",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "x+"}},
    }});
    let body = |messages: Value| {
        let choice = json!({"type": "custom", "custom": {"name": "exec"}});
        json!({"model": "m", "messages": messages, "tools": [tool], "tool_choice": choice})
    };
    let question = json!({"role": "user", "content": "Go."});
    let request = parsed(Dialect::Chat, &body(json!([question])));
    assert_eq!(request.tool_choice, Some(ToolChoice::Function("exec".to_owned())));
    assert!(functions(&request)[0]["parameters"].to_string().contains("x+"));
    let call = tool_call("c", "exec", "{\"input\":\"text(1)\"}");
    let completion = completion(AssistantMessage { tool_calls: vec![call.clone()], ..AssistantMessage::default() });
    let envelope = Envelope { tools: Arc::new(request.client_tools), ..envelope() };
    let answer: Value = serde_json::from_slice(&Dialect::Chat.answer(&completion, &envelope)).expect("it is JSON");
    let message = &answer["choices"][0]["message"];
    let custom = json!({"id": "c", "type": "custom", "custom": {"name": "exec", "input": "text(1)"}});
    assert_eq!(message["tool_calls"], json!([custom]));
    let events = Events::new(Dialect::Chat).answer(&completion, &envelope);
    let mut streamed = custom.clone();
    streamed["index"] = json!(0);
    let calls = |data: &Value| data["choices"][0]["delta"]["tool_calls"][0].clone();
    assert!(read_events(&events).iter().any(|event| calls(&event.json()) == streamed));
    let request =
        parsed(Dialect::Chat, &body(json!([question, message, {"role": "tool", "tool_call_id": "c", "content": "1"}])));
    assert_eq!(request.messages[1].tool_calls, [call]);
}

#[test]
fn tools_of_anthropic_that_run_at_the_client_have_schemas() {
    let tools = json!([
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
    ]);
    let body = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Go."}], "tools": tools});
    let request = parsed(Dialect::Messages, &body);
    assert_eq!(names(&request), ["bash", "str_replace_based_edit_tool", "str_replace_editor", "memory"]);
    let functions = functions(&request);
    let has = |place: usize, name: &str| functions[place]["parameters"]["properties"].get(name).is_some();
    assert!(has(0, "command") && has(0, "restart"));
    assert!(has(1, "insert_text") && !has(2, "insert_text") && has(3, "new_path"));
    let commands = |place: usize| functions[place]["parameters"]["properties"]["command"]["enum"].to_string();
    assert!(commands(2).contains("undo_edit") && !commands(1).contains("undo_edit"));
    assert_eq!(request.warnings.kinds().map(LeftOut::undated).collect::<Vec<_>>(), ["web_fetch"]);
}

#[test]
fn unknown_blocks_of_the_assistant_are_left_out() {
    let blocks = json!([
        {"type": "compaction", "content": "x"},
        {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {}},
        {"type": "text", "text": "A"},
    ]);
    let messages = json!([
        {"role": "user", "content": "Go."}, {"role": "assistant", "content": blocks}, {"role": "user", "content": "On."},
    ]);
    let request = parsed(Dialect::Messages, &json!({"model": "m", "max_tokens": 9, "messages": messages}));
    assert_eq!(serde_json::to_value(&request.messages[1].content).expect("it is JSON"), json!("A"));
    assert_eq!(request.warnings.len(), 2);
}
