//! The mode exact: prompts of ids that the gateway renders.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use forebay_gateway::{
    Completion, Dialect, DialectError, Request, Upstream, UpstreamError,
    canonical::{BreakCause, Canonical, Paths, Record},
    completion::{AssistantMessage, Finish, StopMatch, VersionSpan},
    engine::{
        Answer, EngineKind, FakeEngine, IdFault, LogprobFault, VersionReport,
        model::logprob,
        tokenizer::{IM_END, IM_START, decode, encode},
    },
    exact::{ExactError, Family, Prompt, Renderer, RendererOptions},
    upstream::{
        Answered, EngineCall, ExactPrompt, Fault, Parsers, UpstreamOptions,
        probe::{Verdict, probe_request},
    },
};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{answer, call, options, parsed, question};

/// The end of the fake engine's answers.
fn family() -> Family {
    Family { stops: vec!["<|im_end|>".to_owned()], close: Some("<|im_end|>".to_owned()), trims: Vec::new() }
}

/// The fake engine's tokenizer with its template, or with another one.
fn renderer_with(template: Option<&str>, family: Family) -> Result<Renderer, ExactError> {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    FakeEngine::write_model(folder.path()).expect("the folder can be written to");
    if let Some(template) = template {
        std::fs::write(folder.path().join("other.jinja"), template).expect("the folder can be written to");
    }
    Renderer::load(&RendererOptions {
        tokenizer: folder.path().join("tokenizer.json"),
        template: template.map(|_| folder.path().join("other.jinja")),
        family,
    })
}

fn renderer() -> Renderer {
    renderer_with(None, family()).expect("the fake engine's model can be rendered")
}

/// A session of an agent in the mode exact, as the service keeps it.
struct Session {
    renderer: Arc<Renderer>,
    upstream: Upstream,
    paths: Paths,
    rows: Vec<(String, Completion)>,
}

const KINDS: [EngineKind; 2] = [EngineKind::Sglang, EngineKind::Vllm];

/// What takes the ids of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    /// SGLang's chat endpoint.
    Chat,
    /// `/generate` of an SGLang whose chat endpoint does not.
    Generate,
    /// vLLM's endpoint of ids.
    Vllm,
}

const ENDPOINTS: [Endpoint; 3] = [Endpoint::Chat, Endpoint::Generate, Endpoint::Vllm];

/// The parsers of the fake engine.
fn parsers() -> Parsers {
    Parsers { tool_call: Some("qwen25".to_owned()), reasoning: Some("qwen3".to_owned()) }
}

impl Session {
    async fn start(kind: EngineKind) -> (FakeEngine, Self) {
        let engine = FakeEngine::start(kind).await;
        let session = Self::of(options(kind, &[&engine]), Arc::new(renderer()));
        (engine, session)
    }

    async fn start_at(endpoint: Endpoint) -> (FakeEngine, Self) {
        match endpoint {
            Endpoint::Chat => Self::start(EngineKind::Sglang).await,
            Endpoint::Vllm => Self::start(EngineKind::Vllm).await,
            Endpoint::Generate => {
                let engine = FakeEngine::start(EngineKind::Sglang).await;
                engine.switch(|switches| switches.id_fault = IdFault::NoneInChat);
                let options = UpstreamOptions { parsers: Some(parsers()), ..options(EngineKind::Sglang, &[&engine]) };
                let session = Self::of(options, Arc::new(renderer()));
                assert_eq!(session.probe().await, Verdict::Ready);
                (engine, session)
            }
        }
    }

    async fn probe(&self) -> Verdict {
        let request = probe_request();
        let prompt = self.renderer.prompt(&request, 0, None).expect("it can be rendered");
        let text = |ids: &[i32]| self.renderer.decode(ids);
        let exact = ExactPrompt { ids: &prompt.ids, stop_ids: self.renderer.stop_ids(), text: &text };
        self.upstream.probe_exact("fake", &request, exact).await
    }

    fn of(options: UpstreamOptions, renderer: Arc<Renderer>) -> Self {
        let upstream = Upstream::new(options).expect("the options are usable");
        Self { renderer, upstream, paths: Paths::default(), rows: Vec::new() }
    }

    fn prompt(&self, request: &Request) -> Prompt {
        let continued = self.paths.continued(&Canonical::of(request));
        self.renderer.prompt(request, 0, continued.as_ref()).expect("the request can be rendered")
    }

    /// A call, recorded under the next number. Also what it continues.
    async fn call(&mut self, request: &Request) -> Result<(Answered, Option<u32>), UpstreamError> {
        self.call_with(request, &|| 7).await
    }

    async fn call_with(
        &mut self,
        request: &Request,
        version: &(dyn Fn() -> i64 + Sync),
    ) -> Result<(Answered, Option<u32>), UpstreamError> {
        let prompt = self.prompt(request);
        let text = |ids: &[i32]| self.renderer.decode(ids);
        let exact = ExactPrompt { ids: &prompt.ids, stop_ids: self.renderer.stop_ids(), text: &text };
        let engine_call = EngineCall { exact: Some(exact), version: &version, ..call(request) };
        let answered = self.upstream.complete(&engine_call).await?;
        let completion = &answered.completion;
        assert_eq!(completion.prompt_tokens, prompt.ids);
        let record = self.paths.history().record(&Canonical::of(request));
        self.rows.push((record.to_json(), completion.clone()));
        let seq = self.rows.len() as u32;
        assert!(self.add(seq));
        Ok((answered, prompt.continues))
    }

    fn add(&mut self, seq: u32) -> bool {
        let (record, completion) = &self.rows[seq as usize - 1];
        let record = Record::from_json(record).expect("it is a record");
        let added = self.paths.add(seq, &record, &completion.prompt_tokens, &completion.tokens, &completion.message);
        added.expect("the record fits")
    }

    /// Builds the calls anew from what is stored.
    fn restart(&mut self) {
        self.paths = Paths::default();
        for seq in 1..=self.rows.len() as u32 {
            assert!(self.add(seq));
        }
    }
}

/// All ids of a call.
fn path(completion: &Completion) -> Vec<i32> {
    [&completion.prompt_tokens[..], &completion.tokens].concat()
}

/// Panics unless each sampled id has the log-probability of its true context.
fn check_logprobs(completion: &Completion) {
    let mut context = completion.prompt_tokens.clone();
    assert_eq!(completion.tokens.len(), completion.logprobs.len());
    for (&token, &value) in completion.tokens.iter().zip(&completion.logprobs) {
        assert!((value - logprob(&context, token, 0.8)).abs() < 1e-6);
        context.push(token);
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}])
}

/// A request with a tool.
fn with_tools(messages: &Value) -> Request {
    parsed(Dialect::Chat, &json!({"model": "m", "messages": messages, "tools": tools()}))
}

/// An answer as the agent receives it.
fn received(completion: &Completion) -> Value {
    answer(Dialect::Chat, completion)["choices"][0]["message"].take()
}

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
        let prompt = RENDERER.with(|renderer| renderer.prompt(&question(&text), 0, None));
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

#[tokio::test]
async fn what_an_engine_is_sent() {
    let (engine, mut session) = Session::start(EngineKind::Sglang).await;
    let (answered, _) = session.call(&question("Go.")).await.expect("the engine answers");
    let sent = engine.log().calls().next().expect("the engine was called").json();
    assert_eq!(sent["input_ids"], json!(answered.completion.prompt_tokens));
    assert_eq!(sent["stop_token_ids"], json!([IM_END]));
    assert_eq!((sent["max_tokens"].clone(), sent["messages"][0]["content"].clone()), (json!(1000), json!("Go.")));
    assert_eq!(sent["return_prompt_token_ids"], true);

    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    let body = json!({"model": "m", "messages": [user("Go.")], "stop": ["END"], "max_tokens": 9, "tools": tools()});
    let (answered, _) = session.call(&parsed(Dialect::Chat, &body)).await.expect("the engine answers");
    let log = engine.log();
    let sent = log.at("/inference/v1/generate").next().expect("the engine was called").json();
    assert_eq!(sent["token_ids"], json!(answered.completion.prompt_tokens));
    let sampling = json!({
        "max_tokens": 9, "temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "logprobs": 1, "stop": ["END"], "stop_token_ids": [IM_END],
        "skip_special_tokens": false,
    });
    assert_eq!(sent["sampling_params"], sampling);
    let parse = log.at("/v1/chat/completions/derender").next().expect("the answer was parsed").json();
    assert_eq!(parse["generate_response"]["choices"][0]["token_ids"], json!(answered.completion.tokens));
    assert_eq!((parse["chat_request"]["tools"].clone(), parse["model"].clone()), (tools(), json!("fake")));
    assert_eq!(log.calls().count(), 0);
}

#[tokio::test]
async fn an_answer_is_recorded_with_its_parts() {
    for endpoint in ENDPOINTS {
        let (engine, mut session) = Session::start_at(endpoint).await;
        let script = Answer::text("I look.").thinking("The user wants files.").call("bash", r#"{"b":1, "a": 2}"#);
        engine.script("Look", [script]);
        let request = with_tools(&json!([user("Look!")]));
        let completion = session.call(&request).await.expect("the engine answers").0.completion;
        assert_eq!(completion.message.content.as_deref(), Some("I look."), "{endpoint:?}");
        assert_eq!(completion.message.reasoning.as_deref(), Some("The user wants files."), "{endpoint:?}");
        assert_eq!(completion.message.tool_calls[0].arguments, r#"{"b":1, "a": 2}"#);
        assert_eq!(completion.finish, Finish::ToolCalls);
        assert_eq!(completion.stop_matched, Some(StopMatch::Token(IM_END)));
        assert!(completion.stopped_on_token());
        assert_eq!(completion.usage.completion_tokens as usize, completion.tokens.len());
        assert_eq!(completion.spans, [VersionSpan { version: 0, start: 0, len: completion.tokens.len() as u32 }]);
        assert!(!completion.version_assumed);
    }
}

#[tokio::test]
async fn a_stop_text_ends_an_answer() {
    for endpoint in ENDPOINTS {
        let (engine, mut session) = Session::start_at(endpoint).await;
        engine.script("Act", [Answer::text("I act. Observation: none"), Answer::text("Done.")]);
        let body = |messages: Value| {
            parsed(Dialect::Chat, &json!({"model": "m", "messages": messages, "stop": ["Observation:"]}))
        };
        let first = session.call(&body(json!([user("Act!")]))).await.expect("the engine answers").0.completion;
        assert_eq!(first.message.content.as_deref(), Some("I act. "), "{endpoint:?}");
        assert_eq!(first.stop_matched, Some(StopMatch::Text("Observation:".to_owned())), "{endpoint:?}");
        let messages = json!([user("Act!"), received(&first), user("Observation: a file")]);
        let (second, continues) = session.call(&body(messages)).await.expect("the engine answers");
        assert_eq!(continues, Some(1));
        let path = path(&first);
        assert!(decode(&path).ends_with("Observation:"));
        assert_eq!(second.completion.prompt_tokens[path.len()], IM_END, "the message is closed");
    }
}

#[tokio::test]
async fn an_engine_that_renders_the_messages_is_not_trusted() {
    let (engine, mut session) = Session::start(EngineKind::Sglang).await;
    engine.switch(|switches| switches.id_fault = IdFault::Rendered);
    // The template of the engine and that of the gateway write tools differently.
    let request = with_tools(&json!([user("Go.")]));
    let error = session.call(&request).await.expect_err("the engine is not trusted");
    let UpstreamError::Untrusted { fault: Fault::Prompt { index }, remedy } = &error else { panic!("{error}") };
    assert!(*index > 0 && remedy.contains("mode = \"observe\""), "{error}");
    let told = DialectError::from(&error);
    assert_eq!((told.status(), told.should_retry()), (502, true));
    assert!(session.rows.is_empty());
    // The prompt of SGLang is known only from its answer.
    engine.switch(|switches| switches.id_fault = IdFault::NoPrompt);
    let error = session.call(&question("Go.")).await.expect_err("the engine is not trusted");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::PromptIds, .. }), "{error}");
}

/// The tests above show little if the fake engine answers any ids.
#[tokio::test]
async fn the_fake_engine_compares_ids_with_the_messages_beside_them() {
    let renderer = Arc::new(renderer());
    let (engine, session) = Session::start(EngineKind::Sglang).await;
    let called = json!({"role": "assistant", "content": "I look.", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{\"command\":\"ls\",\"all\":true}"}}]});
    let messages = |place: usize, pointer: &str, value: Value| {
        let result = json!({"role": "tool", "tool_call_id": "c", "content": "ok"});
        let mut messages = json!([{"role": "system", "content": "S"}, user("Go."), called, result]);
        *messages[place].pointer_mut(pointer).expect("the field exists") = value;
        with_tools(&messages)
    };
    let whole = messages(1, "/content", json!("Go."));
    let ids = renderer.prompt(&whole, 0, None).expect("it can be rendered").ids;
    let ask = async |request: &Request, ids: &[i32]| {
        let exact = ExactPrompt { ids, stop_ids: renderer.stop_ids(), text: &|_| String::new() };
        session.upstream.complete(&EngineCall { exact: Some(exact), ..call(request) }).await.map(drop)
    };
    let arguments = "/tool_calls/0/function/arguments";
    // Spelling is the agent's matter.
    let same = messages(2, arguments, json!("{\"all\": true, \"command\": \"ls\", \"more\": null}"));
    assert_eq!(ask(&same, &ids).await, Ok(()));
    for other in [
        messages(0, "/content", json!("T")),
        messages(1, "/content", json!("Go")),
        messages(2, "/content", json!("I looked.")),
        messages(2, arguments, json!("{\"command\": \"ls\"}")),
        messages(2, "/tool_calls/0/function/name", json!("sh")),
        messages(3, "/content", json!("")),
        messages(3, "/role", json!("user")),
        Request { tools: Vec::new(), ..whole.clone() },
        Request { messages: whole.messages[..3].to_vec(), ..whole.clone() },
    ] {
        let error = ask(&other, &ids).await.expect_err("these are other messages");
        assert!(error.to_string().contains("are not the prompt of the messages"), "{error}");
    }
    let (doubled, foreign) = ([&ids[..], &ids].concat(), [&ids[..], &[100_000]].concat());
    for ids in [&ids[..ids.len() - 1], &ids[1..], &doubled[1..], &foreign] {
        assert!(ask(&whole, ids).await.is_err());
    }
    assert_eq!(engine.log().calls().count(), 14);
}

#[tokio::test]
async fn answers_of_ids_are_checked() {
    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    let request = question("Go.");
    engine.switch(|switches| switches.id_fault = IdFault::NoSampled);
    let error = session.call(&request).await.expect_err("the engine is not trusted");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::TokenIds, .. }), "{error}");
    // Older versions do not repeat the prompt.
    engine.switch(|switches| switches.id_fault = IdFault::NoPrompt);
    session.call(&request).await.expect("the engine is trusted");
    for (fault, expected) in [
        (LogprobFault::Missing, Fault::Logprobs),
        (LogprobFault::Sentinel, Fault::Sentinel { index: 0 }),
        (LogprobFault::Null, Fault::NotFinite { index: 0 }),
    ] {
        engine.switch(|switches| switches.logprob_fault = fault);
        let error = session.call(&request).await.expect_err("the engine is not trusted");
        assert!(matches!(&error, UpstreamError::Untrusted { fault, .. } if *fault == expected), "{error}");
    }
}

#[tokio::test]
async fn an_older_sglang_is_sent_ids_at_its_other_endpoint() {
    let (engine, mut session) = Session::start_at(Endpoint::Generate).await;
    let calls = engine.log().calls().count();
    let script = Answer::text("I look.").thinking("First.").call("bash", r#"{"command": "ls"}"#).in_bytes();
    engine.script("Look", [script.clone(), script]);
    let mut messages = vec![user("Look!")];
    let request = |messages: &[Value], extra: &Value| {
        let mut body = json!({"model": "m", "messages": messages, "tools": tools()});
        body["max_tokens"] = extra["max_tokens"].clone();
        body["stop"] = extra["stop"].clone();
        parsed(Dialect::Chat, &body)
    };
    let asked = request(&messages, &json!({"max_tokens": 99, "stop": ["END"]}));
    let first = session.call(&asked).await.expect("the engine answers").0.completion;
    check_logprobs(&first);
    let sent = engine.log().at("/generate").last().expect("the engine was called").json();
    let sampling = json!({
        "max_new_tokens": 99, "temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "stop": ["END"], "stop_token_ids": [IM_END],
        "skip_special_tokens": false,
    });
    assert_eq!(sent["sampling_params"], sampling);
    assert_eq!((&sent["input_ids"], &sent["return_logprob"]), (&json!(first.prompt_tokens), &json!(true)));
    // An answer that an update of the weights cuts is continued.
    messages.extend([received(&first), user("Look!")]);
    engine.switch(|switches| switches.aborts = 1);
    let (answered, continues) = session.call(&request(&messages, &json!({}))).await.expect("the engine answers");
    assert_eq!((answered.aborts, continues), (1, Some(1)));
    let second = answered.completion;
    check_logprobs(&second);
    assert!(second.prompt_tokens.starts_with(&path(&first)));
    assert_eq!(second.tokens, first.tokens);
    for completion in [first, second] {
        let message = &completion.message;
        assert_eq!(message.content.as_deref(), Some("I look."));
        assert_eq!((message.reasoning.as_deref(), message.tool_calls.len()), (Some("First."), 1));
        assert_eq!((completion.finish, completion.stop_matched), (Finish::ToolCalls, Some(StopMatch::Token(IM_END))));
        assert_eq!(completion.usage.cached_tokens, Some(0));
    }
    assert_eq!(engine.log().calls().count(), calls, "the chat endpoint was not asked again");
    // Without a bound it would sample 128 tokens.
    let unbounded = question("Go.");
    let ids = session.prompt(&unbounded).ids;
    let exact = ExactPrompt { ids: &ids, stop_ids: &[], text: &|_| String::new() };
    let unbounded = EngineCall { exact: Some(exact), room: None, ..call(&unbounded) };
    session.upstream.complete(&unbounded).await.expect("the engine answers");
    let log = engine.log();
    let sent = log.at("/generate").last().expect("the engine was called").json();
    assert_eq!(sent["sampling_params"].get("max_new_tokens"), Some(&Value::Null));
}

#[tokio::test]
async fn the_probe_decides_where_ids_are_sent() {
    let (engine, mut session) = Session::start_at(Endpoint::Generate).await;
    // The engine was updated.
    engine.switch(|switches| switches.id_fault = IdFault::None);
    assert_eq!(session.probe().await, Verdict::Ready);
    let generated = engine.log().at("/generate").count();
    session.call(&question("Go.")).await.expect("the engine answers");
    assert_eq!(engine.log().at("/generate").count(), generated);
    // Neither endpoint is good: the verdict names what the chat endpoint lacks.
    engine.switch(|switches| {
        (switches.id_fault, switches.logprob_fault) = (IdFault::NoneInChat, LogprobFault::Missing);
    });
    let Verdict::Refused { problem, .. } = session.probe().await else { panic!("the engine is refused") };
    assert!(problem.contains("prompt_token_ids"), "{problem}");
    // Nothing would find the tool calls in its answers.
    engine.switch(|switches| switches.logprob_fault = LogprobFault::None);
    for parsers in [None, Some(Parsers { tool_call: None, ..parsers() })] {
        let options = UpstreamOptions { parsers, ..options(EngineKind::Sglang, &[&engine]) };
        let session = Session::of(options, Arc::new(renderer()));
        let Verdict::Refused { problem, remedy } = session.probe().await else { panic!("the engine is refused") };
        assert!(problem.contains("/generate") && remedy.contains("tool_call_parser"), "{problem}; {remedy}");
    }
    // A probe that finds the engine busy changes nothing.
    engine.switch(|switches| switches.failures = Some((9, 503, "{}".to_owned())));
    assert!(matches!(session.probe().await, Verdict::Busy { .. }));
    engine.switch(|switches| (switches.failures, switches.id_fault) = (None, IdFault::None));
    session.call(&question("Go.")).await.expect("the engine answers");
}

#[tokio::test]
async fn answers_of_the_other_endpoint_are_checked() {
    let (engine, mut session) = Session::start_at(Endpoint::Generate).await;
    let request = question("Go.");
    for (fault, expected) in [
        (LogprobFault::Missing, Fault::TokenIds),
        (LogprobFault::Sentinel, Fault::Sentinel { index: 0 }),
        (LogprobFault::Positive, Fault::Positive { index: 0, value: 0.5 }),
        (LogprobFault::Null, Fault::NotFinite { index: 0 }),
    ] {
        engine.switch(|switches| switches.logprob_fault = fault);
        let error = session.call(&request).await.expect_err("the engine is not trusted");
        assert!(matches!(&error, UpstreamError::Untrusted { fault, .. } if *fault == expected), "{error}");
    }
    engine.switch(|switches| (switches.logprob_fault, switches.id_fault) = (LogprobFault::None, IdFault::Rendered));
    let error = session.call(&request).await.expect_err("the prompt has another length");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::Prompt { .. }, .. }), "{error}");
}

#[tokio::test]
async fn another_engine_cannot_be_sent_ids() {
    let engine = FakeEngine::start(EngineKind::Openai).await;
    let mut session = Session::of(options(EngineKind::Openai, &[&engine]), Arc::new(renderer()));
    let error = session.call(&question("Go.")).await.expect_err("the mode needs another engine");
    assert!(error.to_string().contains("SGLang or vLLM"), "{error}");
}

/// An answer that an update of the weights cuts in two.
async fn cut_in_two(kind: EngineKind, parsers: Option<Parsers>) -> (FakeEngine, Answered) {
    let engine = FakeEngine::start(kind).await;
    engine.switch(|switches| {
        "5".clone_into(&mut switches.weight_version);
        switches.stall = true;
    });
    let script =
        Answer::text("I look for the thing.").thinking("First the other.").call("bash", r#"{"command": "ls"}"#);
    engine.script("Start", [script]);
    let mut session = Session::of(UpstreamOptions { parsers, ..options(kind, &[&engine]) }, Arc::new(renderer()));
    let request = with_tools(&json!([user("Start.")]));
    let calling = tokio::spawn(async move { session.call(&request).await.map(|(answered, _)| answered) });
    engine.wait(|log| log.stalled == 1).await;
    let url = format!("{}/update_weight_version", engine.url());
    post(&url, &json!({"new_version": "6"}).to_string()).await;
    let generate = if kind == EngineKind::Vllm { "/inference/v1/generate" } else { "/v1/chat/completions" };
    engine.wait(|log| log.at(generate).count() == 2 && log.stalled == 1).await;
    engine.switch(|switches| switches.stall = false);
    let answered = calling.await.expect("the call does not panic").expect("the engine answers");
    (engine, answered)
}

/// Posts a body over a connection of its own.
async fn post(url: &str, body: &str) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let (address, path) = url.trim_start_matches("http://").split_once('/').expect("the URL has a path");
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("the engine listens");
    let head = format!(
        "POST /{path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.expect("the engine reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("the engine answers");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn an_aborted_call_is_continued_and_has_two_spans() {
    for (kind, parsers) in [(EngineKind::Vllm, None), (EngineKind::Sglang, Some(parsers()))] {
        let (engine, answered) = cut_in_two(kind, parsers).await;
        assert_eq!(answered.aborts, 1);
        let completion = &answered.completion;
        check_logprobs(completion);
        let [first, second] = completion.spans[..] else { panic!("{:?}", completion.spans) };
        assert_eq!((first.version, first.start, second.version, second.start), (5, 0, 6, first.len));
        assert_eq!((second.start + second.len) as usize, completion.tokens.len());
        // The second request has the ids that were sampled before.
        let log = engine.log();
        let generate = if kind == EngineKind::Vllm { "/inference/v1/generate" } else { "/v1/chat/completions" };
        let sent = log.at(generate).last().expect("the engine was called").json();
        let ids = if kind == EngineKind::Vllm { &sent["token_ids"] } else { &sent["input_ids"] };
        let behind = [&completion.prompt_tokens[..], &completion.tokens[..first.len as usize]].concat();
        assert_eq!(*ids, json!(behind));
        let left = if kind == EngineKind::Vllm { &sent["sampling_params"]["max_tokens"] } else { &sent["max_tokens"] };
        assert_eq!(*left, json!(1000 - first.len));
        // The answer is parsed as a whole.
        let message = &completion.message;
        assert_eq!(message.content.as_deref(), Some("I look for the thing."), "{kind:?}");
        assert_eq!(message.reasoning.as_deref(), Some("First the other."), "{kind:?}");
        assert_eq!(message.tool_calls[0].arguments, r#"{"command": "ls"}"#);
        assert_eq!(completion.finish, Finish::ToolCalls);
        if kind == EngineKind::Sglang {
            let parse = log.at("/parse_function_call").next().expect("the answer was parsed").json();
            assert_eq!((parse["tool_call_parser"].clone(), parse["tools"].clone()), (json!("qwen25"), tools()));
        }
    }
}

#[tokio::test]
async fn an_aborted_call_is_repeated_if_its_parts_cannot_be_parsed_together() {
    let (_engine, answered) = cut_in_two(EngineKind::Sglang, None).await;
    assert_eq!(answered.aborts, 1);
    check_logprobs(&answered.completion);
    let whole = VersionSpan { version: 6, start: 0, len: answered.completion.tokens.len() as u32 };
    assert_eq!(answered.completion.spans, [whole]);
    assert_eq!(answered.completion.message.reasoning.as_deref(), Some("First the other."));
}

#[tokio::test]
async fn an_aborted_call_that_cannot_be_checked_is_repeated() {
    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    engine.script("Start", [Answer::text("the thing in there")]);
    engine.switch(|switches| {
        switches.aborts = 2;
        switches.version_report = VersionReport::Nothing;
    });
    // The published version when each part begins stands for what the engine does not say.
    let published = AtomicI64::new(5);
    let request = question("Start.");
    let version = || published.fetch_add(1, Ordering::Relaxed);
    let (answered, _) = session.call_with(&request, &version).await.expect("the engine answers");
    let versions: Vec<i64> = answered.completion.spans.iter().map(|span| span.version).collect();
    assert_eq!((versions, answered.completion.version_assumed, answered.aborts), (vec![5, 6, 7], true, 2));
    check_logprobs(&answered.completion);
    assert_eq!(answered.completion.message.content.as_deref(), Some("the thing in there"));

    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    engine.switch(|switches| (switches.aborts, switches.id_fault) = (1, IdFault::NoSampled));
    let error = session.call(&request).await.expect_err("the second answer lacks ids as well");
    assert!(matches!(error, UpstreamError::Untrusted { fault: Fault::TokenIds, .. }), "{error}");
    assert_eq!(engine.log().at("/inference/v1/generate").count(), 2);
}

#[tokio::test]
async fn an_engine_that_aborts_every_call_is_given_up() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    engine.switch(|switches| switches.aborts = 100);
    let options = UpstreamOptions { aborts_max: 3, ..options(EngineKind::Vllm, &[&engine]) };
    let mut session = Session::of(options, Arc::new(renderer()));
    // Without a script, each repeat has something to sample.
    let error = session.call(&question("Go.")).await.expect_err("the engine does not answer");
    assert!(matches!(error, UpstreamError::Aborted { times: 4 }), "{error}");
}

#[tokio::test]
async fn an_answer_that_is_aborted_at_its_bound_is_complete() {
    let (engine, mut session) = Session::start(EngineKind::Vllm).await;
    engine.script("Start", [Answer::text("the thing in there and so on")]);
    // Each abort keeps half of what is left.
    engine.switch(|switches| switches.aborts = 100);
    let body = json!({"model": "m", "messages": [user("Start.")], "max_tokens": 1});
    let error = session.call(&parsed(Dialect::Chat, &body)).await.expect_err("half of one is nothing");
    assert!(matches!(error, UpstreamError::Aborted { .. }), "{error}");
    engine.switch(|switches| switches.aborts = 1);
    let (answered, _) = session.call(&parsed(Dialect::Chat, &body)).await.expect("the engine answers");
    assert_eq!((answered.completion.tokens.len(), answered.completion.finish), (1, Finish::Length));
}

#[tokio::test]
async fn answers_end_with_the_context() {
    for kind in KINDS {
        let engine = FakeEngine::start(kind).await;
        engine.script("Talk", [Answer::text("one two three four five")]);
        let request = question("Talk.");
        let renderer = Arc::new(renderer());
        let ids = renderer.prompt(&request, 0, None).expect("it can be rendered").ids;
        let complete = async |context_tokens: Option<u32>| {
            let options = UpstreamOptions { context_tokens, ..options(kind, &[&engine]) };
            let upstream = Upstream::new(options).expect("the options are usable");
            let exact = ExactPrompt { ids: &ids, stop_ids: renderer.stop_ids(), text: &|_| String::new() };
            upstream.complete(&EngineCall { exact: Some(exact), room: None, ..call(&request) }).await
        };
        let answered = complete(Some(ids.len() as u32 + 3)).await.expect("the engine answers");
        assert_eq!((answered.completion.tokens.len(), answered.completion.finish), (3, Finish::Length));
        let full = complete(Some(ids.len() as u32)).await.expect_err("there is no room");
        assert_eq!(DialectError::from(&full).code(), "context_length_exceeded");
        let unbounded = complete(None).await;
        match kind {
            EngineKind::Vllm => assert!(unbounded.expect_err("vLLM needs a bound").to_string().contains("context")),
            _ => assert_eq!(unbounded.expect("the engine answers").completion.finish, Finish::Stop),
        }
    }
}

#[tokio::test]
async fn an_upstream_is_probed_with_ids() {
    let renderer = Arc::new(renderer());
    let request = probe_request();
    let prompt = renderer.prompt(&request, 0, None).expect("it can be rendered");
    let text = |ids: &[i32]| renderer.decode(ids);
    let exact = ExactPrompt { ids: &prompt.ids, stop_ids: renderer.stop_ids(), text: &text };
    for kind in KINDS {
        let (engine, session) = Session::start(kind).await;
        assert_eq!(session.upstream.probe_exact("fake", &request, exact).await, Verdict::Ready, "{kind:?}");
        engine.switch(|switches| switches.id_fault = IdFault::NoSampled);
        let verdict = session.upstream.probe_exact("fake", &request, exact).await;
        assert!(matches!(verdict, Verdict::Refused { .. }) || kind == EngineKind::Sglang, "{verdict:?}");
        engine.switch(|switches| switches.failures = Some((1, 404, "{}".to_owned())));
        let verdict = session.upstream.probe_exact("fake", &request, exact).await;
        assert!(matches!(verdict, Verdict::Refused { .. }), "{verdict:?}");
    }
}

#[test]
fn a_renderer_says_where_its_template_breaks_conversations() {
    let found = renderer().self_test().clone();
    assert!(found.has_tools);
    let difference = found.difference.expect("the reasoning of earlier answers is dropped");
    assert!(difference.before.starts_with("<think>"), "{difference:?}");
    assert!(difference.after.starts_with("I look."), "{difference:?}");
    let keeps = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                 {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let found = renderer_with(Some(keeps), family()).expect("the template fits").self_test().clone();
    assert_eq!(found.difference, None);
}

#[test]
fn a_template_that_cannot_be_continued_is_refused() {
    let refused = |template: Option<&str>, family: Family| match renderer_with(template, family) {
        Ok(_) => panic!("the renderer is refused"),
        Err(error) => error.to_string(),
    };
    let plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    assert!(refused(Some(plain), family()).contains("do not fit each other"));
    let unknown = Family { close: Some("<|end|>".to_owned()), ..family() };
    assert!(refused(None, unknown).contains("\"<|end|>\""));
    let other = Family { close: Some("</think>".to_owned()), ..family() };
    assert!(refused(None, other).contains("do not fit each other"));
    assert!(refused(None, Family { close: None, ..family() }).contains("close"));
    assert!(refused(Some("{% for %}"), family()).contains("cannot be used"));
    assert!(refused(Some("{{ raise_exception('never') }}"), family()).contains("never"));
    // A template that counts messages from the end renders an answer differently when more follows.
    let counts = "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.revindex }}\n{{ m.content }}<|im_end|>\n\
                  {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {{ messages | length }}\n{% endif %}";
    assert!(refused(Some(counts), family()).contains("instead of"));
    let missing = Renderer::load(&RendererOptions { tokenizer: "none.json".into(), template: None, family: family() });
    assert!(missing.expect_err("there is no file").to_string().contains("none.json"));
}

#[test]
fn tokens_without_a_place_in_the_conversation_are_replaced() {
    let paths = |ids: &[i32]| {
        let request = question("Start.");
        let mut paths = Paths::default();
        let record = paths.history().record(&Canonical::of(&request));
        let said = AssistantMessage { content: Some("Yes.".to_owned()), ..AssistantMessage::default() };
        paths.add(1, &record, &encode("<|im_start|>user\nStart."), ids, &said).expect("the record fits");
        paths
    };
    let next = json!([user("Start."), {"role": "assistant", "content": "Yes."}, user("More.")]);
    let next = parsed(Dialect::Chat, &json!({"model": "m", "messages": next}));
    let rest = "<|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n";
    let prompt = |ids: &[i32], family: Family| {
        let continued = paths(ids).continued(&Canonical::of(&next)).expect("the request continues the call");
        let renderer = renderer_with(None, family).expect("the family fits");
        decode(&renderer.prompt(&next, 0, Some(&continued)).expect("it can be rendered").ids)
    };
    let trims = Family { trims: vec!["</think>".to_owned()], ..family() };
    let begun = "<|im_start|>user\nStart.Yes.";
    assert_eq!(prompt(&encode("Yes.</think>"), trims.clone()), format!("{begun}{rest}"));
    assert_eq!(prompt(&encode("Yes.</think>"), family()), format!("{begun}</think>{rest}"));
    assert_eq!(prompt(&encode("Yes.<|im_end|>"), trims), format!("{begun}{rest}"));
    assert_eq!(prompt(&[], family()), format!("<|im_start|>user\nStart.{rest}"));
    // Messages that have only an opening token: it ends the answer, and belongs to the next message.
    let opening = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_start|>assistant\n";
    let family = Family { stops: vec!["<|im_start|>".to_owned()], close: None, trims: vec!["<|im_start|>".to_owned()] };
    let renderer = renderer_with(Some(opening), family).expect("the family fits");
    let continued = paths(&encode("Yes.<|im_start|>")).continued(&Canonical::of(&next)).expect("it continues the call");
    let prompt = renderer.prompt(&next, 0, Some(&continued)).expect("it can be rendered");
    assert_eq!(decode(&prompt.ids), format!("{begun}<|im_start|>user\nMore.<|im_start|>assistant"));
}

#[test]
fn a_request_that_the_template_refuses_is_told_to_the_agent() {
    let image = json!([{"role": "user", "content": [{"type": "custom", "x": 1}]}]);
    let request = parsed(Dialect::Chat, &json!({"model": "m", "messages": image}));
    let error = renderer().prompt(&request, 0, None).expect_err("the template takes text only");
    let told = DialectError::from(&error);
    assert_eq!(told.status(), 400);
    assert!(told.to_string().contains("messages"), "{told}");
}

#[test]
fn the_date_of_a_prompt_is_that_of_its_session() {
    let template = "{{ strftime_now('%d %b %Y') }} {{ effort }} {{ reasoning_effort }}{% for m in messages %}\
                    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";
    let renderer = renderer_with(Some(template), family()).expect("the template fits");
    let body = json!({"model": "m", "messages": [user("Go.")], "reasoning_effort": "low",
                      "chat_template_kwargs": {"effort": 3}});
    let prompt = renderer.prompt(&parsed(Dialect::Chat, &body), 1_700_000_000, None).expect("it can be rendered");
    assert!(decode(&prompt.ids).starts_with("14 Nov 2023 3 low<|im_start|>"));
}
