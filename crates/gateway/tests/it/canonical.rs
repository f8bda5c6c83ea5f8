//! Requests compared with the calls before them.

use forebay_gateway::{
    Dialect,
    canonical::{
        BreakCause, CALLS_MAX, Canonical, Extended, History, HistoryError, MESSAGES_MAX, Record, chat_messages,
    },
    completion::AssistantMessage,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{DIALECTS, answer, completion, full_message, parsed, tool_call};

fn canonical(messages: &Value) -> Canonical {
    request(&json!({"messages": messages}))
}

fn request(body: &Value) -> Canonical {
    let mut whole = json!({"model": "m"});
    for (name, value) in body.as_object().expect("a body is an object") {
        whole[name] = value.clone();
    }
    Canonical::of(&parsed(Dialect::Chat, &whole))
}

fn said(text: &str) -> AssistantMessage {
    AssistantMessage { content: Some(text.to_owned()), ..AssistantMessage::default() }
}

/// Adds a call and returns the JSON that is stored with it.
fn add(history: &mut History, seq: u32, request: &Canonical, answer: &AssistantMessage) -> String {
    let record = history.record(request);
    assert!(history.add(seq, &record, answer).expect("the record fits its history"));
    record.to_json()
}

/// A history of one call: the user says `Start.`, and the answer has reasoning, a text and a tool call.
fn one_call() -> History {
    let mut history = History::default();
    let thought = AssistantMessage {
        content: Some("I look.".to_owned()),
        reasoning: Some("First.".to_owned()),
        tool_calls: vec![tool_call("call_1", "bash", r#"{"command": "ls", "n": 1.0, "deep": {"a": [1, 2], "b": ""}}"#)],
    };
    add(&mut history, 1, &canonical(&json!([user("Start.")])), &thought);
    history
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// The answer of [`one_call`] as the agent sends it back, with this value in one of its fields.
fn echo(pointer: &str, value: Value) -> Value {
    let mut message = json!({
        "role": "assistant", "content": "I look.", "reasoning_content": "First.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {
            "name": "bash", "arguments": r#"{"command": "ls", "n": 1.0, "deep": {"a": [1, 2], "b": ""}}"#,
        }}],
    });
    if !pointer.is_empty() {
        *message.pointer_mut(pointer).expect("the field exists") = value;
    }
    message
}

fn next(message: &Value) -> Canonical {
    canonical(&json!([user("Start."), message, {"role": "tool", "tool_call_id": "other", "content": "ok"}]))
}

const ARGUMENTS: &str = "/tool_calls/0/function/arguments";

#[test]
fn an_agent_that_writes_an_answer_differently_continues_it() {
    let history = one_call();
    let found = Some(Extended { seq: 1, messages: 2 });
    let mut dropped = echo("", Value::Null);
    dropped.as_object_mut().expect("an object").remove("reasoning_content");
    let mut marked = echo("", Value::Null);
    (marked["provider_specific_fields"], marked["refusal"]) = (json!({"a": 1}), Value::Null);
    for (echo, cause) in [
        (echo("", Value::Null), BreakCause::Tokens),
        (echo("/tool_calls/0/id", json!("toolu_9")), BreakCause::Tokens),
        (marked, BreakCause::Tokens),
        (dropped, BreakCause::Reasoning),
        (echo("/reasoning_content", json!("")), BreakCause::Reasoning),
        (
            echo("/content", json!([{"type": "text", "text": "I "}, {"type": "text", "text": "look."}])),
            BreakCause::Tokens,
        ),
        (echo("/content", json!("I look.\n")), BreakCause::Rewrite),
        (echo(ARGUMENTS, json!(r#"{"deep":{"b":"","a":[1,2.0]},"n":1,"command":"l\u0073"}"#)), BreakCause::Arguments),
    ] {
        let request = next(&echo);
        assert_eq!(history.find(&request), found, "{echo}");
        assert_eq!(history.cause(1, &request), Some(cause), "{echo}");
    }
}

#[test]
fn an_agent_that_changes_an_answer_does_not_continue_it() {
    let history = one_call();
    for (echo, cause) in [
        (echo("/reasoning_content", json!("Second.")), BreakCause::Reasoning),
        (echo("/content", json!("I looked.")), BreakCause::Rewrite),
        (echo("/content", json!("I look. Calling tools: bash")), BreakCause::Rewrite),
        (echo(ARGUMENTS, json!(r#"{"command": "ls"}"#)), BreakCause::Rewrite),
        (echo(ARGUMENTS, json!(r#"{"command": "ls", "n": 1.0, "deep": {"a": [2, 1], "b": ""}}"#)), BreakCause::Rewrite),
        (echo(ARGUMENTS, json!(r#"{"command": "ls", "n": 1.0, "deep": {"a": [1, 2]}}"#)), BreakCause::Rewrite),
        (echo("/tool_calls/0/function/name", json!("sh")), BreakCause::Rewrite),
        (echo("/tool_calls", json!([])), BreakCause::Rewrite),
        (echo("/role", json!("user")).as_object().map(|_| user("I look.")).expect("an object"), BreakCause::Rewrite),
    ] {
        let request = next(&echo);
        assert_eq!(history.find(&request), None, "{echo}");
        assert_eq!(history.cause(1, &request), Some(cause), "{echo}");
    }
}

/// The tool `edit`, whose schema has defaults, with this addition.
fn edit_tool(extra: &Value) -> Value {
    let one = json!({"type": "object", "properties": {"old": {"type": "string"}, "all": {"type": "boolean", "default": false}}});
    json!([{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
        "path": {"type": "string"}, "limit": {"type": "number", "default": 30}, "mode": {"default": null},
        "edits": {"type": "array", "items": one}, "extra": extra,
    }}}}])
}

/// A request with the tool `edit` in which the only answer calls it.
fn edits(arguments: &str) -> Canonical {
    let call = json!({"id": "c", "function": {"name": "edit", "arguments": arguments}});
    let answer = json!({"role": "assistant", "content": "", "tool_calls": [call]});
    request(&json!({"messages": [user("Start."), answer, user("More.")], "tools": edit_tool(&json!({}))}))
}

#[test]
fn defaults_of_a_tool_are_absent_arguments() {
    let start = |extra: &Value| request(&json!({"messages": [user("Start.")], "tools": edit_tool(extra)}));
    let written = r#"{"path": "a", "limit": 30, "edits": [{"old": "b"}]}"#;
    let answer = AssistantMessage { tool_calls: vec![tool_call("c", "edit", written)], ..AssistantMessage::default() };
    let mut history = History::default();
    let stored = add(&mut history, 1, &start(&json!({})), &answer);
    let of_the_tool = r#""defaults":{"edit":{"properties":{"edits":{"items":{"properties":{"all":{"default":"false"}}}},"limit":{"default":"30.0"},"mode":{"default":"null"}}}}"#;
    assert!(stored.contains(of_the_tool), "{stored}");
    // The same from what is stored.
    let mut read = History::default();
    read.add(1, &Record::from_json(&stored).expect("it is a record"), &answer).expect("the record fits");
    for (arguments, is_found) in [
        (r#"{"edits":[{"old":"b"}],"path":"a","limit":30.0}"#, true),
        (r#"{"path":"a","edits":[{"old":"b","all":false}],"mode":null}"#, true),
        (r#"{"path":"a","limit":31,"edits":[{"old":"b"}]}"#, false),
        (r#"{"path":"a","edits":[{"old":"b","all":true}]}"#, false),
        (r#"{"path":"a","edits":[{"old":"b","all":null}]}"#, false),
        (r#"{"path":"a","edits":[{"old":"b"}],"all":false}"#, false),
        (r#"{"path":"a","edits":[{"old":"b"},{}]}"#, false),
    ] {
        let request = edits(arguments);
        for history in [&history, &read] {
            assert_eq!(history.find(&request).is_some(), is_found, "{arguments}");
        }
        let cause = if is_found { BreakCause::Arguments } else { BreakCause::Rewrite };
        assert_eq!(history.cause(1, &request), Some(cause), "{arguments}");
    }
    // Later calls with the same tools need not store them again, and other tools have other defaults.
    assert!(!add(&mut history, 2, &edits(r#"{"path":"a","mode":null}"#), &answer).contains("defaults"));
    assert!(add(&mut history, 3, &start(&json!({"default": 1})), &answer).contains("\"extra\":{\"default\":\"1.0\"}"));
    // Very many tools with defaults are compared as they are.
    let long = start(&json!({"default": "x".repeat(20_000)}));
    assert!(!add(&mut history, 4, &long, &answer).contains("defaults"));
    for seq in 5..40 {
        add(&mut history, seq, &start(&json!({"default": seq})), &answer);
    }
    assert_eq!(history.len(), 39);
    assert!(history.find(&edits(r#"{"path":"a","edits":[{"old":"b"}]}"#)).is_some());
}

/// Two workers with one prompt, whose answers differ only in their reasoning and the ids of their tool calls.
fn twins(agents: [Option<&str>; 2]) -> History {
    let mut history = History::default();
    for (seq, (name, agent)) in (1..).zip(["a", "b"].into_iter().zip(agents)) {
        let answer = AssistantMessage {
            reasoning: Some(format!("Plan {name}.")),
            tool_calls: vec![tool_call(&format!("call_{name}"), "bash", "{}")],
            ..AssistantMessage::default()
        };
        add(&mut history, seq, &canonical(&json!([user("Start.")])).sent_by(agent, false), &answer);
    }
    history
}

/// How a worker goes on that drops its reasoning.
fn after(id: &str) -> Value {
    let call = json!({"id": id, "type": "function", "function": {"name": "bash", "arguments": "{}"}});
    let result = json!({"role": "tool", "tool_call_id": id, "content": "ok"});
    json!([user("Start."), {"role": "assistant", "content": null, "tool_calls": [call]}, result])
}

fn found(history: &History, request: &Canonical) -> Option<u32> {
    history.find(request).map(|found| found.seq)
}

#[test]
fn of_equal_answers_the_one_whose_tool_calls_come_back_is_continued() {
    let mut history = twins([None; 2]);
    for (seq, name) in [(1, "a"), (2, "b")] {
        let request = canonical(&after(&format!("call_{name}")));
        assert_eq!(found(&history, &request), Some(seq));
        history.take(seq, &request);
        assert_eq!(found(&history, &request), Some(seq), "the ids count more than who went on before");
        // The answers to both are equal, too, and have no tool calls. The workers are known by their earlier ones.
        let record = history.record(&request).continuing(Some(seq));
        assert!(history.add(seq + 2, &record, &said("Done.")).expect("the record fits"));
    }
    for (seq, name) in [(3, "a"), (4, "b")] {
        let mut messages = after(&format!("call_{name}"));
        let further = [json!({"role": "assistant", "content": "Done."}), user("Go on.")];
        messages.as_array_mut().expect("a list").extend(further);
        assert_eq!(found(&history, &canonical(&messages)), Some(seq));
    }
}

/// Two branches of an agent whose tool took another time in each.
#[test]
fn in_a_later_attempt_tools_may_take_another_time() {
    let timed = |time: &str| {
        let mut messages = after("call_a");
        messages[2]["content"] = json!(format!("ok in {time}"));
        messages
    };
    let mut history = twins([None; 2]);
    for (seq, time) in [(3, "0.03s"), (4, "0.90s")] {
        add(&mut history, seq, &canonical(&timed(time)), &said("Done."));
    }
    let equal = |time: &str, attempt| history.repeated(&canonical(&timed(time)).in_attempt(attempt)).equal;
    assert_eq!([equal("0.5s", 1), equal("0.5s", 2)], [vec![], vec![3, 4]]);
    assert_eq!([equal("0.03s", 1), equal("0.03s", 2)], [[3], [3]]);
    assert!(equal("5", 2).is_empty(), "the result is another one");
    let next = |time: &str, attempt| {
        let mut messages = timed(time);
        let further = [json!({"role": "assistant", "content": "Done."}), user("Go on.")];
        messages.as_array_mut().expect("a list").extend(further);
        found(&history, &canonical(&messages).in_attempt(attempt))
    };
    // In the first attempt it continues the call before, whose request has no result.
    assert_eq!([next("0.5s", 1), next("0.5s", 2)], [Some(1), Some(4)]);
    assert_eq!([next("0.03s", 1), next("0.03s", 2)], [Some(3), Some(3)]);
}

#[test]
fn of_equal_answers_that_ids_do_not_tell_apart_the_one_of_the_agent_is_continued() {
    let history = twins([Some("one"), Some("two")]);
    for (seq, agent) in [(1, "one"), (2, "two")] {
        assert_eq!(found(&history, &canonical(&after("renamed")).sent_by(Some(agent), false)), Some(seq));
    }
}

#[test]
fn equal_answers_that_nothing_tells_apart_are_each_continued_once() {
    let mut history = twins([None; 2]);
    let request = canonical(&after("renamed"));
    assert_eq!(found(&history, &request), Some(2));
    history.take(2, &request);
    assert_eq!(found(&history, &request), Some(1));
    let record = history.record(&request).continuing(Some(1));
    assert!(history.add(3, &record, &said("One.")).expect("the record fits"));
    // Nothing says which of them a third request continues, unless its client has sent it before.
    assert_eq!(found(&history, &request), None);
    assert_eq!(found(&history, &canonical(&after("renamed")).sent_by(None, true)), Some(2));
    let record = Record::from_json(&history.record(&request).to_json()).expect("it is a record");
    assert!(history.add(4, &record, &said("Two.")).expect("the record fits"));
    assert_eq!(history.cause_between(1, 4, None), Some(BreakCause::Siblings));
    assert_eq!(history.cause_between(1, 3, None), Some(BreakCause::Reasoning));
}

#[test]
fn fields_without_a_value_are_absent() {
    let mut history = History::default();
    let called = AssistantMessage { tool_calls: vec![tool_call("a", "now", "")], ..AssistantMessage::default() };
    add(&mut history, 1, &canonical(&json!([user("Start.")])), &called);
    for (content, arguments) in [(json!(null), "{}"), (json!(""), " "), (json!([]), "null"), (json!(" \n"), "{ }")] {
        let call = json!({"id": "b", "function": {"name": "now", "arguments": arguments}});
        let message = json!({"role": "assistant", "content": content, "reasoning": null, "tool_calls": [call]});
        assert_eq!(history.find(&next(&message)), Some(Extended { seq: 1, messages: 2 }), "{message}");
    }
    // An answer without calls, in its three forms.
    add(&mut history, 2, &canonical(&json!([user("Empty.")])), &AssistantMessage::default());
    for message in [json!({"role": "assistant"}), json!({"role": "assistant", "content": "", "tool_calls": []})] {
        let request = canonical(&json!([user("Empty."), message, user("Go on.")]));
        assert_eq!(history.find(&request), Some(Extended { seq: 2, messages: 2 }));
    }
}

#[test]
fn what_precedes_the_messages_must_be_the_same() {
    let tool = |name: &str, description: &str| json!({"type": "function", "function": {"name": name, "description": description, "parameters": {"b": 1, "a": 2}}});
    let body = |extra: Value| {
        let mut body =
            json!({"messages": [{"role": "developer", "content": "S"}, user("Start.")], "tools": [tool("f", "F")]});
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        body
    };
    let continued = |mut body: Value| {
        let messages = body["messages"].as_array_mut().expect("a list");
        messages.extend([json!({"role": "assistant", "content": "Yes."}), user("More.")]);
        body
    };
    let mut history = History::default();
    add(&mut history, 1, &request(&body(json!({"chat_template_kwargs": {"enable_thinking": true}}))), &said("Yes."));
    let marked = json!({"cache_control": {"type": "ephemeral"}, "type": "function", "function":
        {"parameters": {"a": 2.0, "b": 1}, "description": "F", "name": "f", "cache_control": {}}});
    let thinking = json!({"enable_thinking": true});
    for (extra, is_found) in [
        (json!({"chat_template_kwargs": thinking}), true),
        (json!({"chat_template_kwargs": thinking, "tools": [marked]}), true),
        (json!({"chat_template_kwargs": thinking, "user": "someone", "tool_choice": "required"}), true),
        (json!({"chat_template_kwargs": thinking, "documents": [], "reasoning_effort": null}), true),
        (json!({"chat_template_kwargs": {"enable_thinking": false}}), false),
        (json!({"chat_template_kwargs": thinking, "reasoning_effort": "low"}), false),
        (json!({}), false),
        (json!({"chat_template_kwargs": thinking, "tools": []}), false),
        (json!({"chat_template_kwargs": thinking, "tools": [tool("f", "G")]}), false),
        (json!({"chat_template_kwargs": thinking, "tools": [tool("f", "F"), tool("g", "G")]}), false),
    ] {
        let request = request(&continued(body(extra.clone())));
        assert_eq!(history.find(&request).is_some(), is_found, "{extra}");
        let cause = if is_found { BreakCause::Tokens } else { BreakCause::System };
        assert_eq!(history.cause(1, &request), Some(cause), "{extra}");
    }
    // The other word for the same role, and another text under it.
    let system = |text: &str| {
        let mut body = continued(body(json!({"chat_template_kwargs": thinking})));
        body["messages"][0] = json!({"role": "system", "content": text});
        request(&body)
    };
    assert!(history.find(&system("S")).is_some());
    assert!(history.find(&system("T")).is_none());
    assert_eq!(history.cause(1, &system("T")), Some(BreakCause::System));
}

#[test]
fn the_call_with_the_most_messages_is_continued_and_of_equal_calls_the_last() {
    let mut history = History::default();
    let turns = |count: usize| -> Vec<Value> {
        let turn = |number| [user(&format!("{number}")), json!({"role": "assistant", "content": format!("a{number}")})];
        (0..count).flat_map(turn).take((2 * count).saturating_sub(1)).collect()
    };
    for count in 1..=3 {
        add(&mut history, count, &canonical(&json!(turns(count as usize))), &said(&format!("a{}", count - 1)));
    }
    assert_eq!(history.find(&canonical(&json!(turns(4)))), Some(Extended { seq: 3, messages: 6 }));
    assert_eq!(history.find(&canonical(&json!(turns(2)))), Some(Extended { seq: 1, messages: 2 }));
    assert_eq!(history.find(&canonical(&json!(turns(1)))), None);
    // The same call again with the same answer, and again with another one.
    add(&mut history, 4, &canonical(&json!(turns(3))), &said("a2"));
    add(&mut history, 5, &canonical(&json!(turns(3))), &said("b"));
    assert_eq!(history.find(&canonical(&json!(turns(4)))), Some(Extended { seq: 4, messages: 6 }));
}

#[test]
fn a_faithful_agent_continues_its_calls_in_every_dialect() {
    for dialect in DIALECTS {
        let start = match dialect {
            Dialect::Responses => json!({"model": "m", "input": [{"role": "user", "content": "Start."}]}),
            Dialect::Chat | Dialect::Messages => json!({"model": "m", "messages": [user("Start.")]}),
        };
        let first = Canonical::of(&parsed(dialect, &start));
        let completion = completion(full_message());
        let mut history = History::default();
        add(&mut history, 1, &first, &completion.message);
        let mut answer = answer(dialect, &completion);
        let mut body = start;
        match dialect {
            Dialect::Chat => {
                let list = body["messages"].as_array_mut().expect("a list");
                list.extend([answer["choices"][0]["message"].take(), user("Go on.")]);
            }
            Dialect::Messages => {
                let mut content = answer["content"].take();
                content[0]["signature"] = json!("other");
                content[1]["cache_control"] = json!({"type": "ephemeral"});
                let list = body["messages"].as_array_mut().expect("a list");
                list.extend([json!({"role": "assistant", "content": content}), user("Go on.")]);
            }
            Dialect::Responses => {
                let list = body["input"].as_array_mut().expect("a list");
                list.extend(answer["output"].as_array().expect("a list").iter().cloned());
                list.push(json!({"role": "user", "content": "Go on."}));
            }
        }
        let found = history.find(&Canonical::of(&parsed(dialect, &body)));
        assert_eq!(found, Some(Extended { seq: 1, messages: 2 }), "{dialect:?}");
    }
}

#[test]
fn what_is_stored_has_this_form() {
    let mut history = one_call();
    let request = next(&echo(
        "/content",
        json!([{"type": "text", "text": "I look."}, {"type": "refusal", "refusal": "No.", "id": "1"}]),
    ));
    let record = history.record(&request);
    let stored = r#"{"after":1,"shared":1,"head":"352bd266dae53c6e6a29244011cfa029","ids":"3738cfa975885c1a5896ba1f84392b51","messages":[{"role":"assistant","text":"I look.","parts":[{"refusal":"No.","type":"refusal"}],"reasoning":"First.","calls":[{"name":"bash","arguments":"{\"command\": \"ls\", \"n\": 1.0, \"deep\": {\"a\": [1, 2], \"b\": \"\"}}"}]},{"role":"tool","text":"ok"}],"links":["call_1","other"]}"#;
    assert_eq!(record.to_json(), stored);
    assert_eq!(Record::from_json(stored).expect("it is a record"), record);
    // A request without tool calls has no ids.
    assert!(Record::from_json(&stored.replace(r#""ids":"3738cfa975885c1a5896ba1f84392b51","#, "")).is_ok());
    history.add(2, &record, &said("Done.")).expect("the record fits");
    let next = canonical(&json!([user("Other."), {"role": "tool", "tool_call_id": "t", "name": "f", "content": "é"}]));
    let stored = r#"{"head":"352bd266dae53c6e6a29244011cfa029","messages":[{"role":"user","text":"Other."},{"role":"tool","name":"f","text":"é"}],"links":["t"]}"#;
    assert_eq!(history.record(&next).to_json(), stored);
    for damaged in [r#"{"head":"12"}"#, r#"{"messages":[]}"#, r#"{"head":"+52bd266dae53c6e6a29244011cfa029"}"#, "[]"] {
        assert!(Record::from_json(damaged).is_err(), "{damaged}");
    }
}

#[test]
fn readers_get_all_that_is_kept_of_a_conversation() {
    let first = History::default().record(&canonical(&json!([user("Start.")])));
    let request = next(&echo(
        "/content",
        json!([{"type": "text", "text": "I look."}, {"type": "refusal", "refusal": "No.", "id": "1"}]),
    ));
    let second = one_call().record(&request);
    let messages = chat_messages(vec![(first, said("Never sent.")), (second, said("Done."))]);
    let arguments = r#"{"command": "ls", "n": 1.0, "deep": {"a": [1, 2], "b": ""}}"#;
    let parts = json!([{"type": "text", "text": "I look."}, {"refusal": "No.", "type": "refusal"}]);
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}});
    let expected = json!([
        {"role": "user", "content": "Start."},
        {"role": "assistant", "reasoning_content": "First.", "content": parts, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "other"},
        {"role": "assistant", "content": "Done."},
    ]);
    assert_eq!(serde_json::from_str::<Value>(messages.get()).expect("it is JSON"), expected);
    let request = canonical(&json!([{"role": "user", "name": "ann", "content": "Hello."}]));
    let named = chat_messages(vec![(History::default().record(&request), said("Hi."))]);
    assert!(named.get().starts_with(r#"[{"role":"user","name":"ann","content":"Hello."}"#), "{}", named.get());
}

#[test]
fn a_record_has_only_the_messages_that_no_call_has() {
    let mut history = History::default();
    let mut messages = vec![user("A task of many words.")];
    let mut lengths = Vec::new();
    for seq in 1..=100 {
        let request = canonical(&json!(messages));
        lengths.push(add(&mut history, seq, &request, &said("An answer.")).len());
        messages.extend([json!({"role": "assistant", "content": "An answer."}), user("A result.")]);
    }
    assert!(lengths[99] < lengths[1] + 10, "{lengths:?}");
    // An agent that rewrites its first answer shares what is before it.
    messages[1]["content"] = json!("Another answer.");
    let record: Value = serde_json::from_str(&history.record(&canonical(&json!(messages))).to_json()).expect("JSON");
    assert_eq!((record["shared"].as_u64(), record["messages"].as_array().map(Vec::len)), (Some(1), Some(200)));
}

#[test]
fn a_record_that_fits_no_call_is_refused() {
    let head = "352bd266dae53c6e6a29244011cfa029";
    for (record, after, shared) in [
        (json!({"after": 7, "shared": 1, "head": head}), 7, 1),
        (json!({"after": 1, "shared": 3, "head": head}), 1, 3),
        (json!({"shared": 1, "head": head}), 0, 1),
    ] {
        let record = Record::from_json(&record.to_string()).expect("it is a record");
        let refused = one_call().add(2, &record, &said(""));
        assert_eq!(refused, Err(HistoryError::Damaged { seq: 2, after, shared }));
    }
    assert_eq!(one_call().cause(2, &canonical(&json!([user("")]))), None);
    assert_eq!(one_call().cause_between(1, 2, None), None);
}

#[test]
fn a_full_history_keeps_what_it_has() {
    let mut history = one_call();
    let record = history.record(&canonical(&json!([user("Again.")])));
    assert!(!history.add(1, &record, &said("")).expect("the record fits"), "the call is there already");
    for seq in 2..=CALLS_MAX as u32 {
        assert!(history.add(seq, &record, &said("")).expect("the record fits"));
    }
    assert!(!history.add(CALLS_MAX as u32 + 1, &record, &said("")).expect("the record fits"));
    assert_eq!(history.len(), CALLS_MAX);
    assert!(history.find(&next(&echo("", Value::Null))).is_some());
    let mut history = History::default();
    let many: Vec<Value> = (0..MESSAGES_MAX).map(|_| user("")).collect();
    let record = history.record(&canonical(&json!(many)));
    assert!(!history.add(1, &record, &said("")).expect("the record fits"));
    assert!(history.is_empty() && !history.contains(1));
}

/// A message of the model of the property test.
#[derive(Clone, Debug, PartialEq)]
struct Said {
    by_assistant: bool,
    text: u8,
    reasoning: Option<u8>,
    /// How the arguments of its call are written.
    spaces: u8,
}

impl Said {
    fn stands_for(&self, stored: &Self) -> bool {
        (self.by_assistant, self.text) == (stored.by_assistant, stored.text)
            && (self.reasoning.is_none() || self.reasoning == stored.reasoning)
    }

    fn arguments(&self) -> String {
        format!("{{\"n\":{}{}}}", " ".repeat(self.spaces.into()), self.text)
    }

    fn wire(&self) -> Value {
        if !self.by_assistant {
            return user(&self.text.to_string());
        }
        let call = json!({"id": "c", "function": {"name": "f", "arguments": self.arguments()}});
        let reasoning = self.reasoning.map(|reasoning| format!("because {reasoning}"));
        json!({"role": "assistant", "content": self.text.to_string(), "reasoning": reasoning, "tool_calls": [call]})
    }

    fn answer(&self) -> AssistantMessage {
        AssistantMessage {
            content: Some(self.text.to_string()),
            reasoning: self.reasoning.map(|reasoning| format!("because {reasoning}")),
            tool_calls: vec![tool_call("c", "f", &self.arguments())],
        }
    }
}

fn wire(messages: &[Said], effort: u8) -> Canonical {
    let efforts = ["low", "high"];
    let messages: Vec<Value> = messages.iter().map(Said::wire).collect();
    request(&json!({"messages": messages, "reasoning_effort": efforts[usize::from(effort)]}))
}

fn said_by(by_assistant: bool) -> impl Strategy<Value = Said> {
    (0..2_u8, proptest::option::of(0..2_u8), 0..2_u8).prop_map(move |(text, reasoning, spaces)| Said {
        by_assistant,
        text,
        reasoning: reasoning.filter(|_| by_assistant),
        spaces,
    })
}

/// A call: which one it continues, what the agent changes of its messages, what is new, the effort, and the answer.
type Step = (prop::sample::Index, Vec<(prop::sample::Index, u8)>, Vec<Said>, u8, Said);

fn step() -> impl Strategy<Value = Step> {
    let edits = proptest::collection::vec((any::<prop::sample::Index>(), 0..4_u8), 0..3);
    let new = proptest::collection::vec(said_by(false), 0..2);
    (any::<prop::sample::Index>(), edits, new, 0..2_u8, said_by(true))
}

fn edited(mut messages: Vec<Said>, edits: &[(prop::sample::Index, u8)]) -> Vec<Said> {
    let count = messages.len();
    for (place, edit) in edits.iter().filter(|_| count > 0) {
        let message = &mut messages[place.index(count)];
        match edit {
            0 => message.reasoning = None,
            1 => message.spaces = 2,
            2 => message.text = 1 - message.text,
            _ => message.reasoning = message.reasoning.map(|reasoning| 1 - reasoning),
        }
    }
    messages
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// A history finds what a search through all calls finds, also after a restart.
    #[test]
    fn a_history_finds_the_call_that_a_request_continues(steps in proptest::collection::vec(step(), 1..24)) {
        let mut history = History::default();
        let mut rows: Vec<(String, AssistantMessage)> = Vec::new();
        let mut calls: Vec<(Vec<Said>, u8)> = Vec::new();
        for (from, edits, new, effort, answer) in &steps {
            let before = if calls.is_empty() { Vec::new() } else { calls[from.index(calls.len())].0.clone() };
            let mut messages = edited(before, edits);
            messages.extend(new.iter().cloned());
            if messages.is_empty() {
                continue;
            }
            let request = wire(&messages, *effort);
            let continues = |path: &[Said]| {
                path.len() <= messages.len() && messages.iter().zip(path).all(|(sent, stored)| sent.stands_for(stored))
            };
            let numbered = (1_u32..).zip(&calls).filter(|(_, (path, head))| head == effort && continues(path));
            let expected = numbered.map(|(seq, (path, _))| (path.len(), seq)).max();
            let expected = expected.map(|(messages, seq)| Extended { seq, messages });
            prop_assert_eq!(history.find(&request), expected);

            let mut rebuilt = History::default();
            for (seq, (record, answer)) in (1..).zip(&rows) {
                let record = Record::from_json(record).expect("it was written by the history");
                prop_assert!(rebuilt.add(seq, &record, answer).expect("the record fits"));
            }
            prop_assert_eq!(rebuilt.find(&request), expected);
            prop_assert_eq!(rebuilt.record(&request), history.record(&request));

            let seq = rows.len() as u32 + 1;
            rows.push((add(&mut history, seq, &request, &answer.answer()), answer.answer()));
            messages.push(answer.clone());
            calls.push((messages, *effort));
            for nearest in 1..seq {
                prop_assert_eq!(history.cause_between(nearest, seq, None), history.cause(nearest, &request));
            }
        }
    }
}
