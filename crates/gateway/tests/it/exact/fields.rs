//! The fields of vLLM's and SGLang's chat requests that could change what is rendered, or what is left of an answer's text.

use forebay_fake_engine::{Answer, EngineKind, tokenizer::decode};
use forebay_gateway::{Dialect, DialectError, cancel::Cancellation, completion::StopMatch};
use serde_json::{Value, json};

use super::{ENDPOINTS, Endpoint, Session, family, renderer_for, renderer_with, user};
use crate::support::{field_of, parsed};
use Fate::{Refused, Rendered, Same};

/// What becomes of a field in the mode exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The call is refused with 400.
    Refused,
    /// The prompt is another one.
    Rendered,
    /// The prompt is the same.
    Same,
}

/// A template that shows all of its variables.
const TEMPLATE: &str = "{{ documents | tojson }} {{ reasoning_effort }} {{ enable_thinking }} {{ other }}\
                        {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The prompt of a request with a field, or why there is none.
fn prompt(field: &str, value: &Value) -> Result<String, DialectError> {
    let renderer = renderer_with(Some(TEMPLATE), family()).expect("the template fits");
    let mut body = json!({"model": "m", "messages": [user("Go.")]});
    body[field] = value.clone();
    let prompt = renderer.prompt(&parsed(Dialect::Chat, &body), 0, None, &Cancellation::default());
    prompt.map(|prompt| decode(&prompt.ids)).map_err(|error| DialectError::from(&error))
}

#[test]
fn a_field_is_rendered_or_refused_but_never_ignored() {
    let fields = [
        ("add_generation_prompt", json!(false), Refused),
        ("add_generation_prompt", json!(true), Same),
        ("add_special_tokens", json!(true), Refused),
        ("add_special_tokens", json!(false), Same),
        ("continue_final_message", json!(true), Refused),
        ("continue_final_message", json!(false), Same),
        ("truncate_prompt_tokens", json!(100), Refused),
        ("truncate_prompt_tokens", json!(-1), Refused),
        // It says from which side, if anything is cut.
        ("truncation_side", json!("left"), Same),
        ("documents", json!([{"title": "T", "text": "D"}]), Rendered),
        ("reasoning_effort", json!("low"), Rendered),
        ("chat_template_kwargs", json!({"other": 3}), Rendered),
        ("chat_template_kwargs", json!({"enable_thinking": false}), Rendered),
        ("chat_template_kwargs", json!({"add_generation_prompt": false}), Refused),
        ("chat_template_kwargs", json!({"add_generation_prompt": true}), Same),
        ("chat_template_kwargs", json!({"continue_final_message": true}), Refused),
        ("chat_template_kwargs", json!({"truncate_prompt_tokens": 5}), Refused),
        ("chat_template_kwargs", json!({"messages": []}), Refused),
        ("chat_template_kwargs", json!({"conversation": []}), Refused),
        ("chat_template_kwargs", json!({"tools": []}), Refused),
        // These concern the answer. The endpoints of ids, or the parsers behind them, are told.
        ("include_stop_str_in_output", json!(true), Same),
        ("no_stop_trim", json!(true), Same),
        ("separate_reasoning", json!(false), Same),
        ("skip_special_tokens", json!(false), Same),
        ("spaces_between_special_tokens", json!(false), Same),
        ("parallel_tool_calls", json!(false), Same),
        ("response_format", json!({"type": "json_object"}), Same),
        ("user", json!("u"), Same),
    ];
    let plain = prompt("user", &Value::Null).expect("it can be rendered");
    for (field, value, fate) in fields {
        let found = match prompt(field, &value) {
            Ok(text) if text == plain => Same,
            Ok(_) => Rendered,
            Err(error) => {
                assert_eq!(field_of(&error), (field, 400));
                assert!(error.to_string().contains("absent in the mode exact, because"), "{error}");
                Refused
            }
        };
        assert_eq!(found, fate, "{field}: {value}");
        assert_eq!(prompt(field, &Value::Null).expect("null is as if absent"), plain, "{field}");
    }
}

#[test]
fn of_a_field_and_an_argument_the_one_counts_that_counts_for_the_engine() {
    let arguments = json!({"reasoning_effort": "high", "other": 1});
    for body in [
        json!({"reasoning_effort": "low", "chat_template_kwargs": arguments, "messages": [user("Go.")], "model": "m"}),
        json!({"chat_template_kwargs": arguments, "reasoning_effort": "low", "messages": [user("Go.")], "model": "m"}),
    ] {
        for (kind, variables) in [(EngineKind::Vllm, "null low True 1<"), (EngineKind::Sglang, "null high  1<")] {
            let renderer = renderer_for(kind, Some(TEMPLATE)).expect("the template fits");
            let prompt = renderer.prompt(&parsed(Dialect::Chat, &body), 0, None, &Cancellation::default());
            let text = decode(&prompt.expect("it can be rendered").ids);
            assert!(text.starts_with(variables), "{kind:?}: {text}");
        }
    }
}

#[test]
fn sglang_switches_reasoning_with_an_effort_or_by_its_own_field() {
    let template = format!("{{{{ reasoning_effort }}}} {{{{ thinking }}}} {{{{ enable_thinking }}}}{TEMPLATE}");
    let renderer = renderer_for(EngineKind::Sglang, Some(&template)).expect("the template fits");
    for (fields, variables) in [
        (json!({"reasoning": {"effort": "low", "enabled": true}}), "low True Truenull"),
        (json!({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}), "low  null"),
        (json!({"reasoning": {"effort": "most"}, "reasoning_effort": "high"}), "high  null"),
        (json!({"reasoning_effort": "none"}), "none False Falsenull"),
        (json!({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": true}}), "none True Falsenull"),
    ] {
        let mut body = fields;
        (body["model"], body["messages"]) = (json!("m"), json!([user("Go.")]));
        let prompt = renderer.prompt(&parsed(Dialect::Chat, &body), 0, None, &Cancellation::default());
        let text = decode(&prompt.expect("it can be rendered").ids);
        assert!(text.starts_with(variables), "{variables}: {text}");
    }
}

#[tokio::test]
async fn a_stop_text_that_the_agent_wants_stays_in_the_answer() {
    for (endpoint, names_stops) in ENDPOINTS.into_iter().flat_map(|endpoint| [(endpoint, true), (endpoint, false)]) {
        let (engine, mut session) = Session::start_at(endpoint).await;
        engine.switch(|switches| switches.names_stops = names_stops);
        engine.script("Search", [Answer::text("<search>rain</search> and more")]);
        let field = if endpoint == Endpoint::Vllm { "include_stop_str_in_output" } else { "no_stop_trim" };
        let mut body = json!({"model": "m", "messages": [user("Search!")], "stop": ["</search>"]});
        body[field] = json!(true);
        let completion = session.call(&parsed(Dialect::Chat, &body)).await.expect("the engine answers").0.completion;
        assert_eq!(completion.message.content.as_deref(), Some("<search>rain</search>"), "{endpoint:?}");
        assert_eq!(completion.stop_matched, Some(StopMatch::Text("</search>".to_owned())), "{endpoint:?}");
    }
}

#[tokio::test]
async fn reasoning_that_should_not_be_separated_stays_in_the_answer() {
    let (engine, mut session) = Session::start_at(Endpoint::Generate).await;
    engine.script("Think", [Answer::text("Yes.").thinking("Perhaps.")]);
    let body = json!({"model": "m", "messages": [user("Think!")], "separate_reasoning": false});
    let message = session.call(&parsed(Dialect::Chat, &body)).await.expect("the engine answers").0.completion.message;
    assert_eq!(message.content.as_deref(), Some("<think>\nPerhaps.\n</think>\n\nYes."));
    assert_eq!(message.reasoning, None);
}
