//! Anthropic Messages: what is read, what is refused, and what is answered.

use forebay_gateway::{
    Completion, Dialect, Request,
    completion::{AssistantMessage, Finish, StopMatch},
    dialect::{Model, token_count},
    request::{Content, Message, Role, ToolChoice},
};
use http::{HeaderMap, HeaderValue};
use serde_json::{Value, json};

use crate::{
    sse::{Seen, read_events},
    support::{LATE, answer, completion, field_of, full_message, late_events, parsed, parsed_text, refused, tool_call},
};

const MESSAGES: Dialect = Dialect::Messages;

fn body(messages: Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 100});
    body["messages"] = messages;
    body
}

fn with(fields: Value) -> Value {
    let mut body = body(json!([{"role": "user", "content": "Hi"}]));
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    body.as_object_mut().expect("the body is an object").extend(fields);
    body
}

fn text(message: &Message) -> &str {
    match &message.content {
        Content::Text(text) => text,
        other => panic!("the content is a text, but: {other:?}"),
    }
}

#[test]
fn blocks_become_messages_in_their_order() {
    let request = parsed(
        MESSAGES,
        &json!({
            "model": "m",
            "max_tokens": 50,
            "system": [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2", "cache_control": {}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "R", "signature": "x"},
                    {"type": "text", "text": "A"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": 2}},
                    {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": true,
                        "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
                    {"type": "text", "text": "Go on."},
                ]},
                {"role": "system", "content": "M"},
            ],
        }),
    );
    let found: Vec<(Role, &str)> = request.messages.iter().map(|message| (message.role, text(message))).collect();
    let expected = [
        (Role::System, "S1\nS2"),
        (Role::User, "U1\nU2"),
        (Role::Assistant, "A"),
        (Role::Tool, "one"),
        (Role::Tool, "two\nthree"),
        (Role::User, "Go on."),
        (Role::System, "M"),
    ];
    assert_eq!(found, expected);
    assert_eq!(request.messages[2].reasoning.as_deref(), Some("R"));
    assert_eq!(request.messages[2].tool_calls[1], tool_call("t2", "g", "{}"));
    assert_eq!(request.messages[4].tool_call_id.as_deref(), Some("t2"));
}

#[test]
fn the_arguments_and_schemas_keep_their_text() {
    let request = parsed_text(
        MESSAGES,
        r#"{"model":"m","messages":[{"role":"user","content":"u"},
            {"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"z": 1.50,"a":2}}]},
            {"role":"user","content":[{"type":"tool_result","tool_use_id":"t"}]}],
            "tools":[{"name":"f","cache_control":{},"input_schema":{"z":1e2,"a":[ 2 ]},"description":"D"}],
            "chat_template_kwargs":{"z": true, "a": false}}"#,
    );
    assert_eq!(request.messages[1].tool_calls[0].arguments, r#"{"z": 1.50,"a":2}"#);
    assert!(matches!(request.messages[1].content, Content::Absent));
    assert_eq!(
        request.tools[0].definition.get(),
        r#"{"type":"function","function":{"name":"f","description":"D","parameters":{"z":1e2,"a":[ 2 ]}}}"#
    );
    assert_eq!(request.other[0].1.get(), r#"{"z": true, "a": false}"#);
}

#[test]
fn a_moved_cache_mark_changes_nothing() {
    let block = |marked: bool| {
        let mut block = json!({"type": "text", "text": "U"});
        if marked {
            block["cache_control"] = json!({"type": "ephemeral"});
        }
        block
    };
    let of = |marked| {
        let request = parsed(MESSAGES, &body(json!([{"role": "user", "content": [block(marked)]}])));
        format!("{:?}", Request { bytes: 0, ..request })
    };
    assert_eq!(of(true), of(false));
}

#[test]
fn choices_of_tools_are_translated() {
    let choice = |choice: Value| {
        let tool = json!({"name": "f", "input_schema": {"type": "object"}});
        parsed(MESSAGES, &with(json!({"tools": [tool], "tool_choice": choice})))
    };
    assert_eq!(choice(json!({"type": "auto"})).tool_choice, Some(ToolChoice::Auto));
    assert_eq!(choice(json!({"type": "any"})).tool_choice, Some(ToolChoice::Required));
    assert_eq!(choice(json!({"type": "none"})).tool_choice, Some(ToolChoice::None));
    let one = choice(json!({"type": "tool", "name": "f", "disable_parallel_tool_use": true}));
    assert_eq!(one.tool_choice, Some(ToolChoice::Function("f".to_owned())));
    assert_eq!((one.other[0].0.as_str(), one.other[0].1.get()), ("parallel_tool_calls", "false"));
}

#[test]
fn tools_of_anthropics_service_are_left_out_with_a_warning() {
    let tools = json!([
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "custom", "name": "f", "input_schema": {}},
    ]);
    let request = parsed(MESSAGES, &with(json!({"tools": tools, "mcp_servers": [{"url": "x"}]})));
    assert_eq!(request.tools.len(), 1);
    assert_eq!(request.warnings.len(), 2, "{:?}", request.warnings);
    let only = json!({"tools": [{"type": "computer_20250124", "name": "c"}], "tool_choice": {"type": "any"}});
    assert_eq!(field_of(&refused(MESSAGES, &with(only))), ("tool_choice", 400));
}

#[test]
fn fields_of_anthropics_service_do_not_reach_the_engine() {
    let fields = json!({
        "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}, "service_tier": "auto",
        "context_management": {}, "temperature": 1, "top_k": 5, "stop_sequences": ["END"], "stream": true,
        "output_config": {"task_budget": {}},
    });
    let request = parsed(MESSAGES, &with(fields));
    assert!(request.other.is_empty(), "{:?}", request.other);
    assert!(request.stream);
    assert_eq!(request.stop, ["END"]);
    assert_eq!(request.max_tokens, Some(100));
}

/// The effort that an engine is sent.
fn effort(fields: Value) -> Option<String> {
    let request = parsed(MESSAGES, &with(fields));
    let found = request.other.iter().find(|(name, _)| name == "reasoning_effort");
    found.map(|(_, word)| word.get().trim_matches('"').to_owned())
}

#[test]
fn an_effort_is_that_of_the_other_dialects() {
    let adaptive = json!({"type": "adaptive", "display": "omitted"});
    for (sent, expected) in [("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high"), ("max", "high")]
    {
        let fields = json!({"output_config": {"effort": sent}, "thinking": adaptive});
        assert_eq!(effort(fields).as_deref(), Some(expected));
    }
    assert_eq!(effort(json!({"output_config": {"effort": "some"}})), None);
    assert_eq!(effort(json!({"output_config": null, "thinking": adaptive})), None);
    // An engine would take the effort for a wish to reason.
    let fields = json!({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}});
    assert_eq!(effort(fields), None);
}

/// Claude Code states an effort again where it changes, also in a message without text.
#[test]
fn the_effort_that_was_stated_last_counts() {
    let user = |text: &str| json!({"role": "user", "content": text});
    let stated = |content: Value, effort: &str| json!({"role": "system", "content": content, "output_config": {"effort": effort}});
    let text = json!([{"type": "text", "text": "S"}]);
    let messages = json!([user("a"), stated(text, "medium"), user("b"), stated(json!([]), "low"), user("c")]);
    let fields = json!({"output_config": {"effort": "high"}, "messages": messages});
    assert_eq!(effort(fields.clone()).as_deref(), Some("low"));
    let request = parsed(MESSAGES, &with(fields));
    let roles: Vec<_> = request.messages.iter().map(|message| message.role).collect();
    assert_eq!(roles, [Role::User, Role::System, Role::User, Role::User]);
}

/// Claude Code adds tools that it finds on the way.
#[test]
fn tools_that_messages_add_are_offered() {
    let tool = |name: &str| json!({"name": name, "input_schema": {"type": "object"}});
    let change = |kind: &str, tool: Value| json!({"type": kind, "tool": tool});
    let defined = |name: &str| json!({"type": "tool_definition", "definition": tool(name)});
    let named = |name: &str| json!({"type": "tool_reference", "name": name});
    let changes = json!([
        {"type": "text", "text": "S"}, change("tool_addition", defined("g")), change("tool_addition", named("f")),
        change("tool_removal", named("f")),
    ]);
    let user = json!({"role": "user", "content": "Go."});
    let system = json!({"role": "system", "content": changes});
    // Clients repeat their history.
    let messages = json!([user, system, user, system, user]);
    let request = parsed(MESSAGES, &with(json!({"messages": messages, "tools": [tool("f")]})));
    let offered: Vec<_> = request.tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(offered, ["f", "g"]);
    let expected = "S\nThe tool g is available.\nThe tool f is available.\nThe tool f is not available.";
    assert_eq!(text(&request.messages[1]), expected);
    let again = with(json!({"tools": [tool("f"), tool("f")]}));
    assert_eq!(field_of(&refused(MESSAGES, &again)), ("tools[1]", 400));
}

#[test]
fn a_schema_of_the_answer_is_translated_and_noticed() {
    let format = json!({"type": "json_schema", "schema": {"type": "object"}});
    for fields in [json!({"output_format": format}), json!({"output_config": {"format": format}})] {
        let request = parsed(MESSAGES, &with(fields));
        assert!(request.constrained());
        let value: Value = serde_json::from_str(request.other[0].1.get()).expect("it is JSON");
        assert_eq!(value["json_schema"]["schema"]["type"], "object");
    }
}

#[test]
fn refusals_name_the_field() {
    let user = |content: Value| body(json!([{"role": "user", "content": content}]));
    let cases = [
        (json!({"messages": []}), "model", 400),
        (body(json!([])), "messages", 400),
        (body(json!([{"role": "user"}])), "messages[0].content", 400),
        (body(json!([{"role": "tool", "content": "x"}])), "messages[0].role", 400),
        (body(json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "{"}])), "messages[1]", 400),
        (user(json!([])), "messages[0].content", 400),
        (user(json!(5)), "messages[0].content", 400),
        (user(json!([{"type": "image", "source": {}}])), "messages[0].content[0]", 422),
        (user(json!([{"type": "tool_result"}])), "messages[0].content[0].tool_use_id", 400),
        (
            user(json!([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}])),
            "messages[0].content[0].content[0]",
            422,
        ),
        (with(json!({"system": [{"type": "image"}]})), "system[0]", 422),
        (with(json!({"tools": [{"name": "f"}]})), "tools[0].input_schema", 400),
        (with(json!({"tool_choice": {"type": "some"}})), "tool_choice.type", 400),
        (with(json!({"stop_sequences": "x", "max_tokens": 0})), "max_tokens", 400),
        (with(json!({"n": 2})), "n", 400),
    ];
    for (body, field, status) in cases {
        assert_eq!(field_of(&refused(MESSAGES, &body)), (field, status), "{body}");
    }
}

#[test]
fn an_answer_has_thinking_text_and_tools_as_blocks() {
    let answer = answer(MESSAGES, &completion(full_message()));
    let kinds: Vec<_> =
        answer["content"].as_array().expect("blocks").iter().map(|block| block["type"].clone()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
    assert!(answer["content"][0]["signature"].as_str().is_some_and(|text| !text.is_empty()));
    assert_eq!(answer["content"][2]["input"], json!({"command": "ls -la", "b": 1, "a": 2}));
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(
        (&answer["id"], &answer["type"], &answer["role"]),
        (&json!("msg_7f3c"), &json!("message"), &json!("assistant"))
    );
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["input_tokens"], &usage["cache_read_input_tokens"], &usage["output_tokens"]),
        (&json!(2), &json!(2), &json!(3))
    );
}

#[test]
fn the_arguments_of_an_answer_keep_their_text() {
    let written = MESSAGES.answer(&completion(full_message()), &crate::support::envelope());
    let written = String::from_utf8(written).expect("an answer is text");
    assert!(written.contains(r#""input":{"command": "ls -la", "b": 1, "a": 2}"#), "{written}");
}

#[test]
fn arguments_that_are_no_object_reach_the_tool_under_a_name_of_their_own() {
    for (arguments, expected) in [
        ("", json!({})),
        (" ", json!({})),
        ("{\"a\": ", json!({"invalid_arguments": "{\"a\": "})),
        ("[1]", json!({"invalid_arguments": "[1]"})),
    ] {
        let message =
            AssistantMessage { tool_calls: vec![tool_call("c", "f", arguments)], ..AssistantMessage::default() };
        assert_eq!(answer(MESSAGES, &completion(message))["content"][0]["input"], expected);
        // The agent sends it back, and the model reads what it wrote.
        let call = json!({"type": "tool_use", "id": "c", "name": "f", "input": expected});
        let messages = json!([{"role": "assistant", "content": [call]}, {"role": "user", "content": "Go on."}]);
        let sent = parsed(MESSAGES, &json!({"model": "m", "messages": messages}));
        let written = if arguments.trim().is_empty() { "{}" } else { arguments };
        assert_eq!(sent.messages[0].tool_calls[0].arguments, written);
    }
}

#[test]
fn every_end_has_its_stop_reason() {
    let message = AssistantMessage { content: Some("a".to_owned()), ..AssistantMessage::default() };
    let plain = completion(message);
    let cases = [
        (plain.clone(), json!(["end_turn", null])),
        (Completion { finish: Finish::Length, stop_matched: None, ..plain.clone() }, json!(["max_tokens", null])),
        (
            Completion { stop_matched: Some(StopMatch::Text("END".to_owned())), ..plain.clone() },
            json!(["stop_sequence", "END"]),
        ),
        // An engine that says "stop" beside tool calls.
        (Completion { finish: Finish::Stop, ..completion(full_message()) }, json!(["tool_use", null])),
    ];
    for (completion, expected) in cases {
        let answer = answer(MESSAGES, &completion);
        assert_eq!(json!([answer["stop_reason"], answer["stop_sequence"]]), expected);
    }
}

/// The message that a client builds from events, by the rules of Anthropic's documents.
fn assemble(seen: &[Seen]) -> Value {
    let mut message = Value::Null;
    let mut partial = String::new();
    for event in seen {
        let data = event.json();
        assert_eq!(event.event.as_deref(), data["type"].as_str(), "the name is also in the data");
        let index = data["index"].as_u64().unwrap_or(0) as usize;
        let kind = data["type"].as_str().expect("each event has a type");
        match kind {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                let content = message["content"].as_array_mut().expect("a list");
                assert_eq!(content.len(), index, "blocks come one after the other");
                content.push(data["content_block"].clone());
                partial.clear();
            }
            "content_block_delta" => {
                let block = &mut message["content"][index];
                let delta = &data["delta"];
                for name in ["text", "thinking", "signature"] {
                    if let Some(more) = delta[name].as_str() {
                        block[name] = json!(block[name].as_str().unwrap_or_default().to_owned() + more);
                    }
                }
                partial += delta["partial_json"].as_str().unwrap_or_default();
            }
            "content_block_stop" if !partial.is_empty() => {
                message["content"][index]["input"] = serde_json::from_str(&partial).expect("the pieces are JSON");
            }
            "message_delta" => {
                message["stop_reason"] = data["delta"]["stop_reason"].clone();
                message["stop_sequence"] = data["delta"]["stop_sequence"].clone();
                message["usage"] = data["usage"].clone();
            }
            _ => {}
        }
    }
    message
}

#[test]
fn the_events_make_the_same_message_as_the_answer() {
    let text = AssistantMessage { content: Some("a".to_owned()), ..AssistantMessage::default() };
    for (message, (signs, pieces)) in
        [full_message(), text, AssistantMessage::default()].iter().flat_map(|message| LATE.map(|late| (message, late)))
    {
        let completion = completion(message.clone());
        let seen = read_events(&late_events(MESSAGES, &completion, signs, pieces));
        let mut made = assemble(&seen);
        // The text is in the block that was opened before anything was known, unless there are thoughts before it.
        if signs > 0 && message.content.as_deref() != Some("a") {
            let empty = made["content"].as_array_mut().expect("a list").remove(0);
            assert_eq!(empty, json!({"type": "text", "text": ""}));
        }
        let mut answer = answer(MESSAGES, &completion);
        if (signs, pieces) != (0, 0) {
            // The counts were not known at the beginning.
            for usage in [&mut made["usage"], &mut answer["usage"]] {
                usage["input_tokens"] = json!(0);
            }
        }
        assert_eq!(made, answer);
        assert_eq!(seen.last().and_then(|event| event.event.as_deref()), Some("message_stop"));
        assert_eq!(seen.iter().filter(|event| event.event.as_deref() == Some("message_stop")).count(), 1);
    }
}

#[test]
fn a_text_that_stayed_empty_is_no_part_of_a_turn() {
    let blocks = |blocks: Value| {
        let turn = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": blocks},
            {"role": "user", "content": "r"}]);
        match &parsed(MESSAGES, &body(turn)).messages[1].content {
            Content::Text(text) => Some(text.clone()),
            Content::Absent => None,
            Content::Parts(parts) => panic!("{parts}"),
        }
    };
    let (empty, call) =
        (json!({"type": "text", "text": ""}), json!({"type": "tool_use", "id": "c", "name": "f", "input": {}}));
    let thought = json!({"type": "thinking", "thinking": "t", "signature": ""});
    assert_eq!(blocks(json!([empty, thought, {"type": "text", "text": "a"}])), Some("a".to_owned()));
    assert_eq!(blocks(json!([empty, call])), None);
    assert_eq!(blocks(json!([empty])), Some(String::new()));
}

#[test]
fn an_answer_that_is_sent_back_is_read_as_the_same_turn() {
    let content = answer(MESSAGES, &completion(full_message()))["content"].take();
    let request = parsed(
        MESSAGES,
        &body(json!([
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "r"}]},
        ])),
    );
    let returned = &request.messages[1];
    assert_eq!(Some(text(returned)), full_message().content.as_deref());
    assert_eq!(returned.reasoning, full_message().reasoning);
    assert_eq!(returned.tool_calls[0].id, "call_1");
}

#[test]
fn a_token_count_is_never_zero() {
    let count = |body: &[u8], known| -> Value { serde_json::from_slice(&token_count(body, known)).expect("JSON") };
    assert_eq!(count(b"", None)["input_tokens"], 1);
    assert_eq!(count(&[b'a'; 4000], None)["input_tokens"], 1000);
    assert_eq!(count(&[b'a'; 4000], Some(123))["input_tokens"], 123);
    assert_eq!(count(b"", Some(0))["input_tokens"], 1);
}

#[test]
fn the_list_of_models_has_the_shape_that_the_client_expects() {
    let mut headers = HeaderMap::new();
    assert_eq!(Dialect::of_headers(&headers), Dialect::Chat);
    headers.insert("anthropic-version", HeaderValue::from_static("2023-06-01"));
    assert_eq!(Dialect::of_headers(&headers), MESSAGES);
    let model = |name, context_tokens| Model { name, context_tokens };
    let models = [model("a", Some(4096)), model("b", None)];
    let list: Value = serde_json::from_slice(&MESSAGES.models(&models, 5)).expect("the list is JSON");
    assert_eq!((&list["data"][0]["type"], &list["last_id"]), (&json!("model"), &json!("b")));
}

#[test]
fn documents_that_are_text_are_read() {
    let plain = json!({"type": "document", "title": "T", "context": "C", "citations": {"enabled": true},
        "source": {"type": "text", "media_type": "text/plain", "data": "D"}});
    let parts = json!({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "P"}]}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [plain]});
    let request = parsed(MESSAGES, &body(json!([{"role": "user", "content": [result, plain, parts]}])));
    let texts: Vec<_> = request.messages.iter().map(|message| serde_json::to_value(&message.content)).collect();
    let texts: Vec<Value> = texts.into_iter().collect::<Result<_, _>>().expect("a content is JSON");
    assert_eq!(texts, [json!("T\nC\nD"), json!("T\nC\nD\nP")]);
    let pdf =
        json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}});
    let refused = refused(MESSAGES, &body(json!([{"role": "user", "content": [pdf]}])));
    assert_eq!(field_of(&refused), ("messages[0].content[0]", 422));
}

#[test]
fn a_tool_may_return_nothing() {
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": null});
    let request = parsed(MESSAGES, &body(json!([{"role": "user", "content": [result]}])));
    assert!(matches!(&request.messages[0].content, Content::Text(text) if text.is_empty()));
}
