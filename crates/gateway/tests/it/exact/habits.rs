//! Conversations whose answers agents send back changed.

use forebay_fake_engine::{
    Answer, EngineKind,
    tokenizer::{IM_START, decode, encode},
};
use forebay_gateway::{
    Completion, Dialect,
    cancel::Cancellation,
    canonical::{BreakCause, Canonical},
    completion::Finish,
    exact::Renderer,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{ENDPOINTS, Endpoint, KINDS, Session, check_logprobs, path, received, renderer, tools, user, with_tools};
use crate::support::{parsed, question};

/// What an agent does to the answers that it sends back.
#[derive(Clone, Copy, Debug)]
enum Habit {
    Faithful,
    DropsReasoning,
    SpellsArguments,
    DividesText,
    TrimsText,
    ChangesIds,
}

fn sent_back(habit: Habit, mut message: Value) -> Value {
    match habit {
        Habit::Faithful => {}
        Habit::DropsReasoning => {
            for name in ["reasoning", "reasoning_content"] {
                message.as_object_mut().expect("an object").remove(name);
            }
        }
        Habit::SpellsArguments => {
            for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
                let text = call["function"]["arguments"].as_str().expect("a text");
                let parsed: Value = serde_json::from_str(text).expect("the scripts write JSON");
                call["function"]["arguments"] = json!(serde_json::to_string_pretty(&parsed).expect("it is JSON"));
            }
        }
        Habit::DividesText => {
            let text = message["content"].as_str().unwrap_or_default().to_owned();
            let middle = (0..=text.len() / 2).rfind(|place| text.is_char_boundary(*place)).unwrap_or(0);
            let (left, right) = text.split_at(middle);
            let part = |text| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
            message["content"] = json!([part(left), part(right)]);
        }
        Habit::TrimsText => {
            if let Some(text) = message["content"].as_str() {
                message["content"] = json!(text.trim());
            }
        }
        Habit::ChangesIds => {
            for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
                call["id"] = json!("toolu_other");
            }
        }
    }
    message
}

/// The results of an answer's tool calls, or the next question.
fn results(message: &Value) -> Vec<Value> {
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let results: Vec<Value> = calls
        .map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": "forebay-answer-0 is <|im_end|> in there"}))
        .collect();
    if results.is_empty() { vec![user("And then, the other thing?")] } else { results }
}

fn answers() -> impl Strategy<Value = Vec<Answer>> {
    let text = prop_oneof![
        Just(String::new()),
        Just("the thing in there\n".to_owned()),
        Just("größte Zahl 数字 <b>&'\"".to_owned()),
        Just("I call forebay-answer-0 and ask the other.".to_owned()),
    ];
    let arguments = prop_oneof![
        Just("{}"),
        Just(r#"{"command":"ls","n":1.0}"#),
        Just(r#"{"b" : [1, 2, {"x": null}], "a":"<|im_end|>"}"#),
    ];
    let calls = proptest::collection::vec(arguments, 0..3);
    let answer = (text, proptest::option::of(Just("the other thing")), calls, any::<bool>()).prop_map(
        |(text, reasoning, calls, in_bytes)| {
            let mut answer = Answer::text(&text);
            if let Some(reasoning) = reasoning {
                answer = answer.thinking(reasoning);
            }
            for arguments in calls {
                answer = answer.call("bash", arguments);
            }
            if in_bytes { answer.in_bytes() } else { answer }
        },
    );
    proptest::collection::vec(answer, 1..5)
}

fn habits() -> impl Strategy<Value = Vec<Habit>> {
    use Habit::{ChangesIds, DividesText, DropsReasoning, Faithful, SpellsArguments, TrimsText};
    let all = [Faithful, DropsReasoning, SpellsArguments, DividesText, TrimsText, ChangesIds];
    proptest::collection::vec(proptest::sample::select(all.to_vec()), 5)
}

async fn converse(endpoint: Endpoint, answers: Vec<Answer>, habits: &[Habit], lengths: &[Option<u32>], restarts: bool) {
    let (engine, mut session) = Session::start_at(endpoint).await;
    let turns = answers.len();
    engine.script("Start", answers);
    let mut messages = vec![json!({"role": "system", "content": "S"}), user("Start.")];
    let mut before: Option<Completion> = None;
    for turn in 0..=turns {
        let mut body = json!({"model": "m", "messages": messages, "tools": tools()});
        if let Some(length) = lengths[turn] {
            body["max_tokens"] = json!(length);
        }
        let (answered, continues) = session.call(&parsed(Dialect::Chat, &body)).await.expect("the engine answers");
        let completion = answered.completion;
        check_logprobs(&completion);
        let prompt = &completion.prompt_tokens;
        assert_eq!(continues, (turn > 0).then_some(turn as u32));
        if let Some(before) = &before {
            let path = path(before);
            assert!(prompt.starts_with(&path), "turn {turn} extends the one before");
            let next = if before.finish == Finish::Length { "<|im_end|>\n" } else { "\n" };
            assert_eq!(decode(&prompt[path.len()..]).find("<|im_start|>"), Some(next.len()));
            assert!(decode(&prompt[path.len()..]).starts_with(next));
        }
        assert!(decode(prompt).ends_with("<|im_start|>assistant\n"));
        let message = received(&completion);
        messages.push(sent_back(habits[turn], message.clone()));
        messages.extend(results(&message));
        before = Some(completion);
        if restarts {
            session.restart();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever an agent does to answers without changing them, its conversation is one sequence of ids.
    #[test]
    fn a_conversation_extends_itself(
        endpoint in proptest::sample::select(ENDPOINTS.to_vec()),
        answers in answers(),
        habits in habits(),
        lengths in proptest::collection::vec(proptest::option::weighted(0.2, 1..9_u32), 5),
        restarts in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(converse(endpoint, answers, &habits, &lengths, restarts));
    }

    /// The tokenizer's file and the fake engine write the same ids.
    #[test]
    fn a_question_has_the_ids_that_the_engine_would_write(text in "[ -~äß数🙂\n]{0,24}|(the|in|er|ll|\\{\"|\": \"|<think>| ){0,9}") {
        thread_local!(static RENDERER: Renderer = renderer());
        let prompt = RENDERER.with(|renderer| renderer.prompt(&question(&text), 0, None, &Cancellation::default()));
        let rendered = format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
        prop_assert_eq!(prompt.expect("it can be rendered").ids, encode(&rendered));
    }
}

#[tokio::test]
async fn an_agent_that_rewrites_its_answers_begins_new_conversations() {
    for kind in KINDS {
        let (engine, mut session) = Session::start(kind).await;
        let look = Answer::text("I look.").thinking("First.").call("bash", r#"{"command": "ls"}"#);
        engine.script("Start", [look.clone(), look, Answer::text("Done.")]);
        let mut messages = vec![user("Start.")];
        for turn in 0..3_u32 {
            let request = with_tools(&json!(messages));
            let cause = session.paths.history().cause(turn, &Canonical::of(&request));
            assert_eq!(cause, (turn > 0).then_some(BreakCause::Rewrite));
            let (answered, continues) = session.call(&request).await.expect("the engine answers");
            assert_eq!(continues, None, "{kind:?}");
            let prompt = &answered.completion.prompt_tokens;
            let turns = prompt.iter().filter(|id| **id == IM_START).count();
            assert_eq!(turns, 1 + messages.len() + 1, "the whole conversation is rendered");
            // As smolagents does it.
            messages.push(json!({"role": "assistant", "content": "I look. Calling tools: bash"}));
            messages.push(user("Observation: ok"));
        }
        // A faithful continuation of the last call extends it.
        let completion = session.rows[2].1.clone();
        messages.truncate(5);
        messages.extend([received(&completion), user("More.")]);
        let (answered, continues) = session.call(&with_tools(&json!(messages))).await.expect("the engine answers");
        assert_eq!(continues, Some(3));
        assert!(answered.completion.prompt_tokens.starts_with(&path(&completion)));
    }
}

#[tokio::test]
async fn parallel_calls_continue_the_same_call() {
    let (engine, mut session) = Session::start(EngineKind::Sglang).await;
    engine.script("Start", [Answer::text("Yes.").in_bytes()]);
    let (first, _) = session.call(&question("Start.")).await.expect("the engine answers");
    let message = received(&first.completion);
    for text in ["One.", "Two."] {
        let request = parsed(Dialect::Chat, &json!({"model": "m", "messages": [user("Start."), message, user(text)]}));
        let (answered, continues) = session.call(&request).await.expect("the engine answers");
        assert_eq!(continues, Some(1));
        assert!(answered.completion.prompt_tokens.starts_with(&path(&first.completion)));
    }
    assert_eq!(session.paths.ids(), {
        let held = |index: usize| path(&session.rows[index].1).len();
        held(0) + held(1) + held(2) - 2 * held(0)
    });
}
