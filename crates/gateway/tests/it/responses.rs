//! OpenAI Responses: what is read, what is refused, and what is answered.

use forebay_gateway::{
    Completion, Dialect,
    completion::{AssistantMessage, Finish},
    dialect::{Events, References, message_of},
    request::{Content, Message, Role, ToolChoice},
};
use serde_json::{Value, json};

use crate::{
    sse::read_events,
    support::{
        LATE, answer, completion, envelope, events, field_of, full_message, late_events, parsed, parsed_text, refused,
        tool_call,
    },
};

const RESPONSES: Dialect = Dialect::Responses;

fn input(items: Value) -> Value {
    let mut body = json!({"model": "m"});
    body["input"] = items;
    body
}

fn with(fields: Value) -> Value {
    let mut body = input(json!("Hi"));
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    body.as_object_mut().expect("the body is an object").extend(fields);
    body
}

fn text(message: &Message) -> Option<&str> {
    match &message.content {
        Content::Text(text) => Some(text),
        Content::Absent => None,
        Content::Parts(_) => panic!("there are no parts in this dialect"),
    }
}

#[test]
fn the_items_of_one_turn_become_one_message() {
    let mut body = input(json!([
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "U1"}, {"type": "input_text", "text": "U2"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"b\": 1}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": "three"},
    ]));
    body["instructions"] = json!("S");
    let request = parsed(RESPONSES, &body);
    let found: Vec<_> = request.messages.iter().map(|message| (message.role, text(message))).collect();
    let expected = [
        (Role::System, Some("S")),
        (Role::Developer, Some("D")),
        (Role::User, Some("U1\nU2")),
        (Role::Assistant, Some("A")),
        (Role::Tool, Some("one")),
        (Role::Tool, Some("two")),
        (Role::Assistant, None),
        (Role::Tool, Some("three")),
    ];
    assert_eq!(found, expected);
    assert_eq!(request.messages[3].reasoning.as_deref(), Some("R"));
    assert_eq!(request.messages[3].tool_calls, [tool_call("c1", "f", r#"{"b": 1}"#), tool_call("c2", "g", "{}")]);
    assert_eq!(request.messages[5].tool_call_id.as_deref(), Some("c2"));
}

#[test]
fn turns_that_follow_each_other_stay_apart() {
    let said = |text: &str| json!({"role": "assistant", "content": text});
    let thought = |text: &str| json!({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]});
    let question = json!({"role": "user", "content": "q"});
    let items = [question, thought("1"), thought("2"), said("a"), thought("3"), said("b"), said("c")];
    let request = parsed(RESPONSES, &input(json!(items)));
    let turns = request.messages[1..].iter().map(|message| (message.reasoning.as_deref(), text(message)));
    let expected = [(Some("1\n2"), Some("a")), (Some("3"), Some("b")), (None, Some("c"))];
    assert_eq!(turns.collect::<Vec<_>>(), expected);
}

#[test]
fn reasoning_is_read_from_its_content_or_its_summary() {
    let both = json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}],
        "content": [{"type": "reasoning_text", "text": "long"}]});
    let request = parsed(RESPONSES, &input(json!([both, {"role": "assistant", "content": "a"}])));
    assert_eq!(request.messages[0].reasoning.as_deref(), Some("long"));
    let empty = json!({"type": "reasoning", "summary": [], "encrypted_content": "x"});
    let request = parsed(RESPONSES, &input(json!([empty, {"role": "assistant", "content": "a"}])));
    assert_eq!(request.messages[0].reasoning, None);
}

#[test]
fn a_text_is_a_question() {
    let request = parsed(RESPONSES, &input(json!("Hi")));
    assert_eq!(
        (request.messages.len(), request.messages[0].role, text(&request.messages[0])),
        (1, Role::User, Some("Hi"))
    );
}

#[test]
fn opaque_parts_keep_their_text() {
    let request = parsed_text(
        RESPONSES,
        r#"{"model":"m","input":"u","tools":[{"type":"function","strict":true,"parameters":{"z":1e2,"a":[2 ]},
            "name":"f","description":"D","defer_loading":true}],"chat_template_kwargs":{"z": true, "a": false},
            "text":{"format":{"type":"json_schema","name":"n","schema":{"z":1.50,"a":2}},"verbosity":"low"}}"#,
    );
    assert_eq!(
        request.tools[0].definition.get(),
        r#"{"type":"function","function":{"name":"f","description":"D","parameters":{"z":1e2,"a":[2 ]}}}"#
    );
    let others: Vec<_> = request.other.iter().map(|(name, value)| (name.as_str(), value.get())).collect();
    let format = r#"{"type":"json_schema","json_schema":{"name":"n","schema":{"z":1.50,"a":2}}}"#;
    assert_eq!(others, [("chat_template_kwargs", r#"{"z": true, "a": false}"#), ("response_format", format)]);
    assert!(request.constrained());
}

#[test]
fn tools_of_the_provider_are_left_out_with_a_warning() {
    let tools = json!([
        {"type": "web_search"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "mcp", "server_label": "s"},
        {"type": "function", "name": "f", "parameters": {}},
    ]);
    let request =
        parsed(RESPONSES, &with(json!({"tools": tools, "tool_choice": "auto", "parallel_tool_calls": false})));
    assert_eq!(request.tools.len(), 1);
    assert_eq!(request.warnings.len(), 3, "{:?}", request.warnings);
    assert_eq!(request.tool_choice, Some(ToolChoice::Auto));
    assert_eq!((request.other[0].0.as_str(), request.other[0].1.get()), ("parallel_tool_calls", "false"));
    let items = json!([{"role": "user", "content": "q"}, {"type": "web_search_call", "id": "ws"}]);
    assert_eq!(parsed(RESPONSES, &input(items)).warnings.len(), 1);
}

#[test]
fn fields_of_openais_service_do_not_reach_the_engine() {
    let fields = json!({
        "store": false, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "metadata": {"a": "b"},
        "client_metadata": {}, "truncation": "auto", "service_tier": "auto", "background": false, "temperature": 0.1,
        "previous_response_id": null, "reasoning": {"effort": "none", "summary": "auto"}, "max_output_tokens": 77,
        "text": {"verbosity": "low", "format": {"type": "text"}}, "stream": true,
    });
    let request = parsed(RESPONSES, &with(fields));
    assert!(request.other.is_empty(), "{:?}", request.other);
    assert!(request.stream);
    assert_eq!(request.max_tokens, Some(77));
    for (sent, expected) in [("low", "low"), ("minimal", "low"), ("xhigh", "high"), ("max", "high")] {
        let request = parsed(RESPONSES, &with(json!({"reasoning": {"effort": sent}})));
        let (name, value) = &request.other[0];
        assert_eq!((name.as_str(), value.get()), ("reasoning_effort", &*format!("{expected:?}")));
    }
}

#[test]
fn refusals_name_the_field() {
    let item = |item: Value| input(json!([item]));
    let cases = [
        (json!({"input": "x"}), "model", 400),
        (json!({"model": "m"}), "input", 400),
        (input(json!(5)), "input", 400),
        (input(json!([])), "input", 400),
        (item(json!({"type": "web_search_call"})), "input", 400),
        (item(json!({"role": "tool", "content": "x"})), "input[0].role", 400),
        (item(json!({"role": "user"})), "input[0].content", 400),
        (item(json!({"role": "user", "content": [{"type": "input_image"}]})), "input[0].content[0]", 422),
        (item(json!({"type": "item_reference"})), "input[0].id", 400),
        (item(json!({"type": "custom_tool_call"})), "input[0].call_id", 400),
        (item(json!({"type": "local_shell_call", "call_id": "c"})), "input[0].action", 400),
        (item(json!({"type": "function_call", "name": "f"})), "input[0].call_id", 400),
        (item(json!({"type": "function_call_output", "call_id": "c"})), "input[0].output", 400),
        (item(json!({"type": "reasoning", "summary": [{"type": "summary_text"}]})), "input[0].summary[0].text", 400),
        (with(json!({"previous_response_id": 1})), "previous_response_id", 400),
        (with(json!({"conversation": "conv_1"})), "conversation", 422),
        (with(json!({"background": true})), "background", 422),
        (with(json!({"tools": [{"type": "function"}]})), "tools[0].name", 400),
        (
            with(json!({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}})),
            "tool_choice.type",
            400,
        ),
        (with(json!({"text": {"format": {"type": "grammar"}}})), "text.format.type", 400),
        (with(json!({"max_output_tokens": "many"})), "max_output_tokens", 400),
        (with(json!({"presence_penalty": 1})), "presence_penalty", 400),
    ];
    for (body, field, status) in cases {
        assert_eq!(field_of(&refused(RESPONSES, &body)), (field, status), "{body}");
    }
}

#[test]
fn an_answer_has_an_item_for_each_part() {
    let answer = answer(RESPONSES, &completion(full_message()));
    let kinds: Vec<_> = answer["output"].as_array().expect("items").iter().map(|item| item["type"].clone()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(answer["output"][0]["summary"][0]["text"], answer["output"][0]["content"][0]["text"]);
    assert_eq!(answer["output"][2]["arguments"], full_message().tool_calls[0].arguments);
    assert_eq!(answer["output"][2]["call_id"], "call_1");
    assert_eq!((&answer["status"], &answer["id"]), (&json!("completed"), &json!("resp_7f3c")));
    assert_eq!(answer["usage"]["total_tokens"], 7);
    let ids: std::collections::BTreeSet<_> =
        answer["output"].as_array().expect("items").iter().map(|item| item["id"].to_string()).collect();
    assert_eq!(ids.len(), 4, "ids of items are unique");
    let usage = &answer["usage"];
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 2);
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], 1);
}

#[test]
fn an_answer_without_anything_has_an_empty_text() {
    let answer = answer(RESPONSES, &completion(AssistantMessage::default()));
    assert_eq!(answer["output"][0]["content"][0]["text"], "");
}

#[test]
fn an_answer_that_was_cut_is_incomplete() {
    let message = AssistantMessage { content: Some("a".to_owned()), ..AssistantMessage::default() };
    let cut = Completion { finish: Finish::Length, ..completion(message) };
    let answer = answer(RESPONSES, &cut);
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(answer["incomplete_details"]["reason"], "max_output_tokens");
    let seen = read_events(&events(RESPONSES, &cut));
    let last = seen.last().expect("there are events");
    assert_eq!((last.event.as_deref(), &last.json()["response"]), (Some("response.completed"), &answer));
}

#[test]
fn the_events_make_the_same_answer() {
    for (message, (signs, pieces)) in
        [full_message(), AssistantMessage::default()].iter().flat_map(|message| LATE.map(|late| (message, late)))
    {
        let completion = completion(message.clone());
        let answer = answer(RESPONSES, &completion);
        let seen = read_events(&late_events(RESPONSES, &completion, signs, pieces));
        let mut output = Vec::new();
        let mut deltas = String::new();
        for (number, event) in seen.iter().enumerate() {
            let data = event.json();
            assert_eq!(data["sequence_number"], number, "events are numbered");
            assert_eq!(event.event.as_deref(), data["type"].as_str(), "the name is also in the data");
            match data["type"].as_str().expect("each event has a type") {
                "response.output_item.added" => {
                    assert_eq!(data["output_index"], output.len(), "items come one after the other");
                    deltas.clear();
                }
                "response.output_text.delta" | "response.function_call_arguments.delta" => {
                    deltas += data["delta"].as_str().expect("a delta is a text");
                }
                "response.output_text.done" => assert_eq!(data["text"], deltas),
                "response.function_call_arguments.done" => assert_eq!(data["arguments"], deltas),
                "response.output_item.done" => output.push(data["item"].clone()),
                _ => {}
            }
        }
        assert_eq!(json!(output), answer["output"]);
        let last = seen.last().expect("there are events");
        assert_eq!((last.event.as_deref(), &last.json()["response"]), (Some("response.completed"), &answer));
        assert_eq!(seen.iter().filter(|event| event.event.as_deref() == Some("response.completed")).count(), 1);
    }
}

#[test]
fn an_answer_that_is_sent_back_is_read_as_the_same_turn() {
    let mut items = answer(RESPONSES, &completion(full_message()))["output"].take();
    // Codex sends back only the summary.
    items[0].as_object_mut().expect("an item").remove("content");
    let request = parsed(RESPONSES, &input(items));
    assert_eq!(request.messages.len(), 1);
    let returned = &request.messages[0];
    assert_eq!(text(returned), full_message().content.as_deref());
    assert_eq!(returned.reasoning, full_message().reasoning);
    assert_eq!(returned.tool_calls, full_message().tool_calls);
}

#[test]
fn a_failed_call_is_told_in_the_stream() {
    let error = forebay_gateway::DialectError::too_long(300, 200);
    let event = Events::new(RESPONSES).error(&error, &envelope());
    assert_eq!(event.event, Some("response.failed"));
    let data: Value = serde_json::from_str(&event.data).expect("data is JSON");
    assert_eq!(data["response"]["status"], "failed");
    assert_eq!(data["response"]["error"]["code"], "context_length_exceeded");
}

#[test]
fn a_request_may_name_answers_instead_of_sending_them() {
    let references = |ids: &[&str]| {
        let named = ids.iter().map(|id| json!({"type": "item_reference", "id": id}));
        input(json!([json!({"role": "user", "content": "q"})].into_iter().chain(named).collect::<Vec<_>>())).to_string()
    };
    let body = references(&["rs_7f3c", "msg_7f3c", "fc_7f3c_0", "fc_7f3c_1"]);
    let mut found = References::default();
    assert!(RESPONSES.parse_with(body.as_bytes(), &mut found).expect("it is right").is_none());
    assert_eq!(found.wanted().collect::<Vec<_>>(), [("7f3c", "rs_7f3c")]);
    found.found("7f3c", full_message(), 100);
    let request = RESPONSES.parse_with(body.as_bytes(), &mut found).expect("it is right").expect("all is there");
    let whole = parsed(
        RESPONSES,
        &input(json!([
            {"role": "user", "content": "q"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": full_message().reasoning}]},
            {"role": "assistant", "content": full_message().content},
            {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": full_message().tool_calls[0].arguments},
            {"type": "function_call", "call_id": "call_2", "name": "read", "arguments": "{}"},
        ])),
    );
    assert_eq!(format!("{:?}", request.messages), format!("{:?}", whole.messages));
    assert_eq!(request.bytes, body.len() + 100);
    // Anything else is not there, and the error names it.
    for id in ["fc_7f3c_2", "fc_7f3c", "msg_7f3c_0", "x", "fc_9_0"] {
        let body = references(&[id]);
        let outcome = RESPONSES.parse_with(body.as_bytes(), &mut found);
        let error = outcome.and_then(|request| request.map_or_else(|| RESPONSES.parse(body.as_bytes()), Ok));
        let error = error.expect_err("it is not there");
        assert_eq!(error.status(), 404);
        assert!(error.to_string().contains(id), "{error}");
    }
}

#[test]
fn a_request_may_go_on_behind_a_response() {
    let mut body = input(json!([{"type": "function_call_output", "call_id": "call_1", "output": "x"}]));
    body["previous_response_id"] = json!("resp_7f3c");
    body["instructions"] = json!("S");
    let body = body.to_string();
    let mut found = References::default();
    assert!(RESPONSES.parse_with(body.as_bytes(), &mut found).expect("it is right").is_none());
    assert_eq!(found.wanted_conversation(), Some("7f3c"));
    found.found_conversation(vec![Message::text(Role::User, "q"), message_of(full_message())], 100);
    let request = RESPONSES.parse_with(body.as_bytes(), &mut found).expect("it is right").expect("all is there");
    let roles: Vec<_> = request.messages.iter().map(|message| message.role).collect();
    assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::Tool]);
    assert_eq!(request.instructions, "S".len());
}

#[test]
fn a_tool_may_return_nothing() {
    for kind in ["function_call_output", "custom_tool_call_output"] {
        let output = json!({"type": kind, "call_id": "c", "output": null});
        let request = parsed(RESPONSES, &input(json!([{"role": "user", "content": "q"}, output])));
        assert_eq!((request.messages[1].role, text(&request.messages[1])), (Role::Tool, Some("")));
    }
}

#[test]
fn only_allowed_tools_are_offered() {
    let exec = json!({"type": "custom", "name": "exec"});
    let tools = json!([{"type": "function", "name": "f"}, exec, {"type": "web_search"}]);
    let choice = json!({"type": "allowed_tools", "mode": "required", "tools": [exec, {"type": "web_search"}]});
    let request = parsed(RESPONSES, &with(json!({"tools": tools, "tool_choice": choice})));
    assert_eq!(request.tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["exec"]);
    assert_eq!(request.client_tools.len(), 1);
    assert_eq!(request.tool_choice, Some(ToolChoice::Required));
}
