//! Chat completions: what is read, what is refused, and what is answered.

use forebay_gateway::{
    Dialect,
    completion::{AssistantMessage, Finish, StopMatch},
    dialect::{Envelope, Events, Model},
    request::{Content, Role, ToolChoice},
};
use serde_json::{Value, json};

use crate::{
    sse::read_events,
    support::{
        LATE, answer, completion, envelope, events, field_of, full_message, late_events, parsed, parsed_text, refused,
    },
};

const CHAT: Dialect = Dialect::Chat;

/// A request with one message and further fields.
fn body(fields: Value) -> Value {
    let mut body = json!({"model": "default", "messages": [{"role": "user", "content": "Hi"}]});
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    body.as_object_mut().expect("the body is an object").extend(fields);
    body
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

#[test]
fn a_conversation_with_tools_keeps_its_parts() {
    let text = r#"{"model":"m","messages":[
        {"role":"system","content":"S"},
        {"role":"user","content":[{"type":"text","text":"U","zeta":1,"alpha":{"z":1,"a":2}}]},
        {"role":"assistant","content":null,"reasoning_content":"R","name":"A",
         "tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"b\": 1}"}}]},
        {"role":"tool","tool_call_id":"c1","content":"T"},
        {"role":"developer","content":"D"}],
        "tools":[{"type":"function","function":{"parameters":{"z":1.50,"a":2},"name":"f"}}],
        "chat_template_kwargs":{"z": true, "a": false},"max_tokens":5,"stop":"END"}"#;
    let request = parsed_text(CHAT, text);
    let roles: Vec<Role> = request.messages.iter().map(|message| message.role).collect();
    assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::Tool, Role::Developer]);
    let Content::Parts(parts) = &request.messages[1].content else { panic!("parts stay parts") };
    assert_eq!(parts.get(), r#"[{"type":"text","text":"U","zeta":1,"alpha":{"z":1,"a":2}}]"#);
    let assistant = &request.messages[2];
    assert_eq!(assistant.reasoning.as_deref(), Some("R"));
    assert_eq!(assistant.tool_calls[0].arguments, r#"{"b": 1}"#);
    assert_eq!(assistant.other[0].0, "name");
    assert_eq!(request.messages[3].tool_call_id.as_deref(), Some("c1"));
    assert_eq!(
        request.tools[0].definition.get(),
        r#"{"type":"function","function":{"parameters":{"z":1.50,"a":2},"name":"f"}}"#
    );
    assert_eq!(request.other[0].0, "chat_template_kwargs");
    assert_eq!(request.other[0].1.get(), r#"{"z": true, "a": false}"#);
    assert_eq!((request.max_tokens, request.stop), (Some(5), vec!["END".to_owned()]));
}

#[test]
fn both_names_of_reasoning_are_read() {
    for name in ["reasoning", "reasoning_content"] {
        let message = json!({"role": "assistant", "content": "a", name: "because"});
        let request = parsed(CHAT, &json!({"model": "m", "messages": [message]}));
        assert_eq!(request.messages[0].reasoning.as_deref(), Some("because"), "{name}");
    }
}

#[test]
fn the_policys_sampling_replaces_the_agents_and_a_seed_is_dropped() {
    let request = parsed(CHAT, &body(json!({"temperature": 0.2, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7})));
    let mut replaced: Vec<&str> = request.sampling.iter().map(|(name, _)| name.as_str()).collect();
    replaced.sort_unstable();
    assert_eq!(replaced, ["min_p", "seed", "temperature", "top_k", "top_p"]);
    assert!(request.other.is_empty(), "nothing of it reaches the engine: {:?}", request.other);
}

#[test]
fn what_changes_the_distribution_is_refused_unless_it_is_neutral() {
    let cases = [
        ("presence_penalty", json!(0.0), json!(0.5)),
        ("frequency_penalty", json!(0), json!(-1)),
        ("repetition_penalty", json!(1.0), json!(1.1)),
        ("logit_bias", json!({}), json!({"50256": -100})),
        ("bad_words", json!([]), json!(["no"])),
        ("min_tokens", json!(0), json!(16)),
        ("ignore_eos", json!(false), json!(true)),
        ("n", json!(1), json!(2)),
        ("best_of", json!(1), json!(4)),
        ("lora_path", json!(null), json!("adapter")),
        ("logits_processors", json!([]), json!(["a.B"])),
        ("custom_params", json!({}), json!({"a": 1})),
        ("vllm_xargs", json!(null), json!({"a": 1})),
        ("watermarking", json!(false), json!(true)),
        ("watermarking", json!({}), json!({"key": 5})),
        ("thinking_token_budget", json!(null), json!(5)),
        ("top_n_sigma", json!(-1), json!(1)),
        ("dry_multiplier", json!(0), json!(0.8)),
        ("xtc_probability", json!(0), json!(0.5)),
        ("mirostat", json!(0), json!(2)),
        ("min_new_tokens", json!(0), json!(3)),
    ];
    for (field, neutral, other) in cases {
        let request = parsed(CHAT, &body(json!({field: neutral})));
        assert!(request.other.is_empty(), "{field} is not passed on");
        assert_eq!(field_of(&refused(CHAT, &body(json!({field: other})))), (field, 400));
    }
}

#[test]
fn a_call_that_is_not_recorded_is_sampled_as_the_agent_asks() {
    let fields = json!({"n": 1, "temperature": 0.2, "seed": 7, "presence_penalty": 0.5, "logit_bias": {"5": 1},
        "include_reasoning": false, "tools": [function("f")]});
    let request = CHAT.parse(body(fields).to_string().as_bytes()).expect("it is accepted");
    let mut sampling: Vec<&str> = request.sampling.iter().map(|(name, _)| name.as_str()).collect();
    sampling.sort_unstable();
    assert_eq!(sampling, ["include_reasoning", "logit_bias", "presence_penalty", "seed", "temperature"]);
    for (field, value) in [("vllm_xargs", json!({"a": 1})), ("custom_logit_processor", json!("code")), ("n", json!(2))]
    {
        let error = CHAT.parse(body(json!({field: value})).to_string().as_bytes()).expect_err("no agent may choose it");
        assert_eq!(field_of(&error), (field, 400));
    }
}

#[test]
fn fields_that_only_the_gateway_may_set_do_not_reach_the_engine() {
    let fields = json!({"input_ids": [1], "rid": "x", "return_token_ids": false, "logprobs": true, "top_logprobs": 5,
        "return_meta_info": false, "session_id": "s", "data_parallel_rank": 1, "include_reasoning": false, "user": "u"});
    let request = parsed(CHAT, &body(fields));
    let names: Vec<&str> = request.other.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["user"]);
    assert_eq!(request.warnings.len(), 1, "the agent does not get log-probabilities: {:?}", request.warnings);
}

#[test]
fn the_bound_of_tokens_is_the_smaller_of_the_agents_and_the_room() {
    assert_eq!(parsed(CHAT, &body(json!({}))).max_tokens_within(Some(100)), Some(100));
    assert_eq!(parsed(CHAT, &body(json!({}))).max_tokens_within(None), None);
    let both = parsed(CHAT, &body(json!({"max_tokens": 9, "max_completion_tokens": 50})));
    assert_eq!((both.max_tokens_within(None), both.max_tokens_within(Some(100))), (Some(50), Some(50)));
    assert_eq!(both.max_tokens_within(Some(20)), Some(20));
}

#[test]
fn hosted_tools_are_left_out_with_a_warning() {
    let request = parsed(
        CHAT,
        &body(json!({
            "tools": [{"type": "web_search"}, function("f")], "tool_choice": "required", "web_search_options": {},
        })),
    );
    assert_eq!(request.tools.len(), 1);
    assert_eq!(request.tool_choice, Some(ToolChoice::Required));
    assert_eq!(request.warnings.len(), 2, "{:?}", request.warnings);
    assert!(request.warnings.iter().any(|warning| warning.starts_with("tools[0]")), "{:?}", request.warnings);
}

#[test]
fn a_choice_that_needs_a_tool_that_is_not_there_is_refused() {
    let hosted = json!({"tools": [{"type": "web_search"}], "tool_choice": "required"});
    assert_eq!(field_of(&refused(CHAT, &body(hosted))), ("tool_choice", 400));
    let other = json!({"tools": [function("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}});
    assert_eq!(field_of(&refused(CHAT, &body(other))), ("tool_choice", 400));
    let custom = json!({"tools": [function("f")], "tool_choice": {"type": "web_search"}});
    assert_eq!(field_of(&refused(CHAT, &body(custom))), ("tool_choice.type", 400));
}

#[test]
fn without_tools_there_is_no_choice() {
    let request = parsed(CHAT, &body(json!({"tools": [], "tool_choice": "auto"})));
    assert_eq!(request.tool_choice, None);
}

#[test]
fn a_grammar_is_noticed() {
    assert!(!parsed(CHAT, &body(json!({}))).constrained());
    assert!(!parsed(CHAT, &body(json!({"response_format": {"type": "text"}}))).constrained());
    assert!(parsed(CHAT, &body(json!({"response_format": {"type": "json_object"}}))).constrained());
    assert!(!parsed(CHAT, &body(json!({"tools": [function("f")], "tool_choice": "auto"}))).constrained());
    assert!(parsed(CHAT, &body(json!({"tools": [function("f")], "tool_choice": "required"}))).constrained());
}

#[test]
fn refusals_name_the_field() {
    let message = |message: Value| json!({"model": "m", "messages": [message]});
    let cases = [
        (json!([]), "body", 400),
        (json!({"messages": []}), "model", 400),
        (json!({"model": 3, "messages": []}), "model", 400),
        (json!({"model": "", "messages": []}), "model", 400),
        (json!({"model": "m".repeat(257), "messages": []}), "model", 400),
        (json!({"model": "a\nb", "messages": []}), "model", 400),
        (json!({"model": "m"}), "messages", 400),
        (json!({"model": "m", "messages": []}), "messages", 400),
        (json!({"model": "m", "messages": [3]}), "messages[0]", 400),
        (message(json!({"content": "x"})), "messages[0].role", 400),
        (message(json!({"role": "function", "content": "x"})), "messages[0].role", 400),
        (message(json!({"role": "user"})), "messages[0]", 400),
        (message(json!({"role": "user", "content": 5})), "messages[0].content", 400),
        (message(json!({"role": "user", "content": [{"text": "x"}]})), "messages[0].content[0].type", 400),
        (message(json!({"role": "user", "content": [{"type": "text"}]})), "messages[0].content[0].text", 400),
        (message(json!({"role": "user", "content": [{"type": "image_url"}]})), "messages[0].content[0]", 422),
        (message(json!({"role": "tool", "content": "x"})), "messages[0].tool_call_id", 400),
        (message(json!({"role": "assistant", "tool_calls": [{"id": "a"}]})), "messages[0].tool_calls[0].function", 400),
        (message(json!({"role": "assistant", "function_call": {}})), "messages[0].function_call", 400),
        (body(json!({"max_tokens": 0})), "max_tokens", 400),
        (body(json!({"max_tokens": -5})), "max_tokens", 400),
        (body(json!({"stream": "yes"})), "stream", 400),
        (body(json!({"stop": 5})), "stop", 400),
        (body(json!({"functions": []})), "functions", 400),
        (body(json!({"tools": [function("f"), function("f")]})), "tools[1]", 400),
        (body(json!({"tools": [{"type": "function"}]})), "tools[0].function", 400),
        (body(json!({"tool_choice": "maybe"})), "tool_choice", 400),
    ];
    for (body, field, status) in cases {
        assert_eq!(field_of(&refused(CHAT, &body)), (field, status), "{body}");
    }
}

#[test]
fn a_field_that_is_sent_twice_is_refused() {
    let error = CHAT.parse(br#"{"model":"a","model":"b","messages":[]}"#).expect_err("two models");
    assert!(error.to_string().contains("\"model\" twice"), "{error}");
}

#[test]
fn an_answer_has_both_names_of_reasoning_and_the_arguments_verbatim() {
    let answer = answer(CHAT, &completion(full_message()));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["reasoning"], full_message().reasoning.expect("it has reasoning"));
    assert_eq!(choice["message"]["reasoning_content"], choice["message"]["reasoning"]);
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], full_message().tool_calls[0].arguments);
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(answer["usage"]["total_tokens"], 7);
    assert_eq!(answer["id"], "chatcmpl-7f3c");
}

#[test]
fn an_answer_has_what_engines_say_beside_its_text() {
    let mut stopped = completion(AssistantMessage { content: Some("a".to_owned()), ..AssistantMessage::default() });
    for (stop, reason) in [
        (Some(StopMatch::Text("</end>".to_owned())), json!("</end>")),
        // vLLM names only texts, and tokens that an agent asks for.
        (Some(StopMatch::Token(9)), Value::Null),
        (Some(StopMatch::EndOfSequence), Value::Null),
        (None, Value::Null),
    ] {
        stopped.stop_matched = stop;
        let answer = answer(CHAT, &stopped);
        assert_eq!(answer["choices"][0].get("stop_reason"), Some(&reason));
        assert_eq!(answer["system_fingerprint"], "engine-1");
        assert_eq!(answer["usage"]["prompt_tokens_details"], json!({"cached_tokens": 2}));
        assert_eq!(answer["usage"]["completion_tokens_details"], json!({"reasoning_tokens": 1}));
        let seen = read_events(&events(CHAT, &stopped));
        let last = seen[seen.len() - 2].json();
        assert_eq!(last["choices"][0].get("stop_reason"), Some(&reason));
        assert_eq!(last["system_fingerprint"], "engine-1");
    }
    (stopped.system_fingerprint, stopped.usage.reasoning_tokens) = (None, None);
    let answer = answer(CHAT, &stopped);
    assert_eq!((answer.get("system_fingerprint"), answer["usage"].get("completion_tokens_details")), (None, None));
}

#[test]
fn an_answer_without_tool_calls_has_a_text() {
    let mut silent = completion(AssistantMessage::default());
    silent.finish = Finish::Length;
    let answer = answer(CHAT, &silent);
    assert_eq!(answer["choices"][0]["message"]["content"], "");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[test]
fn an_answer_that_is_sent_back_is_read_as_the_same_turn() {
    let message = answer(CHAT, &completion(full_message()))["choices"][0]["message"].take();
    let request = parsed(CHAT, &json!({"model": "m", "messages": [{"role": "user", "content": "q"}, message]}));
    let returned = &request.messages[1];
    let Content::Text(text) = &returned.content else { panic!("the content is a text") };
    assert_eq!(Some(text), full_message().content.as_ref());
    assert_eq!(returned.reasoning, full_message().reasoning);
    assert_eq!(returned.tool_calls, full_message().tool_calls);
}

#[test]
fn the_events_make_the_same_turn_as_the_answer() {
    for (signs, pieces) in LATE {
        let seen = read_events(&late_events(CHAT, &completion(full_message()), signs, pieces));
        let (mut content, mut reasoning, mut calls, mut finishes) =
            (String::new(), String::new(), Vec::new(), Vec::new());
        for event in &seen[..seen.len() - 1] {
            let chunk = event.json();
            let choice = &chunk["choices"][0];
            content += choice["delta"]["content"].as_str().unwrap_or_default();
            reasoning += choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
            if let Some(found) = choice["delta"]["tool_calls"].as_array() {
                for more in found {
                    if more["index"] == calls.len() {
                        calls.push(more.clone());
                        continue;
                    }
                    assert_eq!(more["index"], 0, "the calls come one after the other");
                    assert_eq!((calls.len(), &more["id"]), (1, &Value::Null), "only the first comes in pieces");
                    let begun = calls[0]["function"]["arguments"].as_str().expect("arguments are a text");
                    let more = more["function"]["arguments"].as_str().expect("arguments are a text");
                    calls[0]["function"]["arguments"] = json!(begun.to_owned() + more);
                }
            }
            finishes.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
        assert_eq!(Some(content), full_message().content);
        assert_eq!(Some(reasoning), full_message().reasoning);
        let made: Vec<_> = calls.iter().map(|call| (&call["id"], &call["type"], &call["function"])).collect();
        let answer = answer(CHAT, &completion(full_message()));
        let whole = answer["choices"][0]["message"]["tool_calls"].as_array().expect("calls");
        assert_eq!(made, whole.iter().map(|call| (&call["id"], &call["type"], &call["function"])).collect::<Vec<_>>());
        assert_eq!(finishes, ["tool_calls"]);
        assert_eq!(seen.last().map(|event| event.data.as_str()), Some("[DONE]"));
        assert_eq!(seen.iter().filter(|event| event.data == "[DONE]").count(), 1);
    }
}

#[test]
fn the_usage_is_streamed_if_it_was_asked_for() {
    let request = parsed(CHAT, &body(json!({"stream": true, "stream_options": {"include_usage": true}})));
    assert!(request.stream && request.stream_usage);
    let envelope = Envelope { stream_usage: request.stream_usage, ..envelope() };
    let events: Vec<_> = Events::new(CHAT).answer(&completion(full_message()), &envelope);
    let seen = read_events(&events);
    let last = seen[seen.len() - 2].json();
    assert_eq!(last["usage"]["completion_tokens"], 3);
    assert_eq!(last["choices"], json!([]));
}

#[test]
fn the_models_are_listed() {
    let model = |name, context_tokens| Model { name, context_tokens };
    let models = [model("a", Some(4096)), model("b", None)];
    let list: Value = serde_json::from_slice(&CHAT.models(&models, 5)).expect("the list is JSON");
    assert_eq!(list["object"], "list");
    assert_eq!((&list["data"][1]["id"], &list["data"][1]["created"]), (&json!("b"), &json!(5)));
    assert_eq!((&list["data"][0]["max_model_len"], &list["data"][1]["max_model_len"]), (&json!(4096), &Value::Null));
    let one: Value = serde_json::from_slice(&CHAT.model(&models[0], 5)).expect("the model is JSON");
    assert_eq!(one, list["data"][0]);
}

#[test]
fn a_tool_may_return_nothing() {
    let call = json!({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]});
    let result = json!({"role": "tool", "tool_call_id": "c", "content": null});
    let request = parsed(CHAT, &body(json!({"messages": [{"role": "user", "content": "q"}, call, result]})));
    assert!(matches!(&request.messages[2].content, Content::Text(text) if text.is_empty()));
    let missing = json!({"messages": [{"role": "tool", "tool_call_id": "c"}]});
    assert_eq!(field_of(&refused(CHAT, &body(missing))), ("messages[0].content", 400));
}

#[test]
fn an_effort_is_a_word_that_engines_know() {
    for (sent, expected) in [("minimal", "low"), ("medium", "medium"), ("xhigh", "high"), ("none", "none")] {
        let request = parsed(CHAT, &body(json!({"reasoning_effort": sent})));
        let found = request.other.iter().find(|(name, _)| name == "reasoning_effort").expect("it is passed on");
        assert_eq!(found.1.get(), format!("{expected:?}"));
    }
}

#[test]
fn only_allowed_tools_are_offered() {
    let allow = |names: &[&str], mode: &str| {
        let tools: Vec<_> = names.iter().map(|name| json!({"type": "function", "function": {"name": name}})).collect();
        let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}});
        body(json!({"tools": [function("f"), function("g")], "tool_choice": choice}))
    };
    let request = parsed(CHAT, &allow(&["g", "other"], "required"));
    assert_eq!(request.tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["g"]);
    assert_eq!(request.tool_choice, Some(ToolChoice::Required));
    assert_eq!(parsed(CHAT, &allow(&["f", "g"], "auto")).tools.len(), 2);
    assert_eq!(field_of(&refused(CHAT, &allow(&["f"], "some"))).0, "tool_choice.allowed_tools.mode");
    assert_eq!(field_of(&refused(CHAT, &allow(&[], "required"))), ("tool_choice", 400));
}
