//! Answers that reach the agent while the engine samples them.

use std::sync::Arc;

use forebay_fake_engine::{Answer, EngineKind, FakeEngine};
use forebay_gateway::{
    Completion, Dialect, Request, UpstreamError,
    completion::{AssistantMessage, Finish, Piece, ToolCall},
    dialect::{ClientTool, ClientTools},
    upstream::{Streaming, probe::Verdict},
};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{Session, check_logprobs, user, with_tools};
use crate::support::{parsed, tool_call};

const GENERATE: &str = "/inference/v1/generate";

/// What an agent has received of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Said {
    reasoning: String,
    text: String,
    /// The first call with the beginning of its arguments.
    call: Option<ToolCall>,
}

#[derive(Clone, Default)]
struct Received(Arc<watch::Sender<Said>>);

impl Received {
    fn streaming(&self) -> Streaming {
        self.streaming_with(ClientTools::default())
    }

    fn streaming_with(&self, tools: ClientTools) -> Streaming {
        let said = Arc::clone(&self.0);
        Streaming::new(Arc::new(tools), move |piece| {
            said.send_modify(|Said { reasoning, text, call }| match piece {
                Piece::Reasoning(more) => *reasoning += &more,
                Piece::Text(more) => *text += &more,
                Piece::Call { id, name } => {
                    assert_eq!(call.replace(tool_call(&id, &name, "")), None, "a call begins once");
                }
                Piece::Arguments(more) => call.as_mut().expect("the call has begun").arguments += &more,
            });
        })
    }

    fn said(&self) -> Said {
        self.0.borrow().clone()
    }

    async fn wait(&self, holds: impl FnMut(&Said) -> bool) {
        self.0.subscribe().wait_for(holds).await.expect("it is not dropped");
    }

    fn begins(&self, message: &AssistantMessage) {
        let Said { reasoning, text, call } = self.said();
        let whole = |text: &Option<String>| text.clone().unwrap_or_default();
        assert!(whole(&message.reasoning).starts_with(&reasoning), "{reasoning:?} {message:?}");
        assert!(whole(&message.content).starts_with(&text), "{text:?} {message:?}");
        let Some(call) = call else { return };
        let first = message.tool_calls.first().expect("the call that has begun");
        assert_eq!((&first.id, &first.name), (&call.id, &call.name));
        assert!(first.arguments.starts_with(&call.arguments), "{call:?} {first:?}");
        let is_whole = serde_json::from_str::<Value>(&call.arguments).is_ok();
        assert!(!is_whole, "some clients would run the tool: {call:?}");
    }
}

/// The message without the ids of its calls, which vLLM makes up each time that it reads them.
fn without_ids(mut message: AssistantMessage) -> AssistantMessage {
    message.tool_calls.iter_mut().for_each(|call| call.id.clear());
    message
}

/// An engine that answers `request` with a thought, a text and a call, and a session.
async fn start() -> (FakeEngine, Session, Request) {
    let (engine, session) = Session::start(EngineKind::Vllm).await;
    let script = Answer::text("I look for the größte thing for €€€€€€€€€ and then for one more.")
        .thinking("The user wants a thing, and I have not seen it.")
        .call("bash", r#"{"command": "ls"}"#)
        .in_bytes();
    engine.script("Look", [script]);
    assert_eq!(session.probe().await, Verdict::Ready);
    (engine, session, with_tools(&json!([user("Look!")])))
}

/// What the same engine makes of the answer when nobody waits for its beginning.
async fn whole(engine: &FakeEngine, session: &mut Session, request: &Request) -> Completion {
    engine.switch(|switches| switches.hold_behind = None);
    let answered = session.call(request).await.expect("the engine answers").0;
    let sent = engine.log().at(GENERATE).last().expect("the engine was called").json();
    assert_eq!(sent["stream"], false);
    answered.completion
}

#[tokio::test]
async fn pieces_arrive_while_the_engine_samples() {
    for parses in [true, false] {
        let (engine, mut session, request) = start().await;
        engine.switch(|switches| switches.parses = parses);
        session.probe().await;
        let received = Received::default();
        engine.switch(|switches| switches.hold_behind = Some(20));
        let streaming = received.streaming();
        let calling = session.streamed(&request, &streaming);
        let watching = async {
            received.wait(|said| *said != Said::default()).await;
            let first = received.said();
            engine.switch(|switches| switches.hold_behind = Some(60));
            received.wait(|said| *said != first).await;
            engine.switch(|switches| switches.hold_behind = Some(110));
            received.wait(|said| said.text.contains("I look")).await;
            assert!(!received.said().text.contains("more"));
            engine.switch(|switches| switches.hold_behind = None);
        };
        let (answered, ()) = tokio::join!(calling, watching);
        let completion = answered.expect("the engine answers").completion;
        check_logprobs(&completion);
        received.begins(&completion.message);
        assert!(!parses || received.said().text.ends_with("one more."), "a tool call is no text");
        let mut whole = whole(&engine, &mut session, &request).await;
        whole.message = without_ids(whole.message);
        let message = without_ids(completion.message);
        // Only events name the counts.
        assert_eq!(Completion { usage: whole.usage, message, ..completion }, whole, "parses: {parses}");
    }
}

#[tokio::test]
async fn an_answer_goes_on_behind_what_was_sent() {
    // The engine aborts the call, or the connection breaks.
    for is_cut in [false, true] {
        let (engine, mut session, request) = start().await;
        let probed = engine.log().at(GENERATE).count();
        let received = Received::default();
        let streaming = received.streaming();
        let said = if is_cut {
            engine.switch(|switches| switches.cuts_in_body = 1);
            let broken = session.streamed(&request, &streaming).await.expect_err("the connection breaks");
            assert!(matches!(broken, UpstreamError::Unreachable { .. }), "{broken}");
            received.said()
        } else {
            engine.switch(|switches| switches.aborts = 1);
            Said::default()
        };
        let answered = session.streamed(&request, &streaming).await.expect("the engine answers");
        assert_eq!(answered.aborts, u32::from(!is_cut));
        let completion = answered.completion;
        check_logprobs(&completion);
        received.begins(&completion.message);
        assert!(
            !is_cut || (!said.reasoning.is_empty() && received.said().reasoning.starts_with(&said.reasoning)),
            "{said:?}"
        );
        let log = engine.log();
        let sent: Vec<_> = log.at(GENERATE).skip(probed).map(|request| request.json()["token_ids"].clone()).collect();
        let [first, second] = &sent[..] else { panic!("{sent:?}") };
        let (first, second) = (first.as_array().expect("ids").len(), second.as_array().expect("ids").len());
        assert!(second > first + 20, "the second request begins behind the ids of the first: {first} {second}");
        let whole = whole(&engine, &mut session, &request).await.message;
        assert_eq!(without_ids(completion.message), without_ids(whole));
    }
}

#[tokio::test]
async fn an_answer_whose_connection_breaks_behind_its_last_id_is_whole() {
    let (engine, session, _) = start().await;
    let body = json!({"model": "m", "messages": [user("Look!")], "max_tokens": 1});
    let request = parsed(Dialect::Chat, &body);
    engine.switch(|switches| switches.cuts_in_body = 1);
    let answered = session.streamed(&request, &Received::default().streaming()).await.expect("it is whole");
    assert_eq!(answered.completion.tokens.len(), 1);
}

/// What was sampled and sent is parsed when the engine can.
#[tokio::test]
async fn an_answer_that_could_not_be_parsed_is_not_sampled_again() {
    let (engine, mut session, request) = start().await;
    let probed = engine.log().at(GENERATE).count();
    let received = Received::default();
    let streaming = received.streaming();
    engine.switch(|switches| switches.parse_failures = 1);
    let failed = session.streamed(&request, &streaming).await.expect_err("it cannot be parsed");
    assert!(matches!(failed, UpstreamError::Failed { status: 500, .. }), "{failed}");
    let answered = session.streamed(&request, &streaming).await.expect("the engine answers");
    assert_eq!(engine.log().at(GENERATE).count(), probed + 1);
    received.begins(&answered.completion.message);
    let whole = whole(&engine, &mut session, &request).await.message;
    assert_eq!(without_ids(answered.completion.message), without_ids(whole));
}

#[tokio::test]
async fn an_answer_with_stop_texts_comes_as_a_whole() {
    let (engine, mut session, _) = start().await;
    let body = json!({"model": "m", "messages": [user("Look!")], "stop": ["thing"]});
    let request = parsed(Dialect::Chat, &body);
    let received = Received::default();
    let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
    assert_eq!(received.said(), Said::default());
    assert_eq!(answered.completion.message, whole(&engine, &mut session, &request).await.message);
}

#[tokio::test]
async fn an_engine_that_sends_no_events_is_asked_for_the_whole() {
    let (engine, mut session, request) = start().await;
    engine.switch(|switches| switches.sends_events = false);
    assert_eq!(session.probe().await, Verdict::Ready);
    let received = Received::default();
    let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
    assert_eq!(received.said(), Said::default());
    assert_eq!(answered.completion, whole(&engine, &mut session, &request).await);
}

#[tokio::test]
async fn what_was_sent_stays_if_the_engine_reads_the_whole_otherwise() {
    let (engine, session, request) = start().await;
    engine.switch(|switches| switches.parses_parts_apart = true);
    let received = Received::default();
    let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
    let message = answered.completion.message;
    received.begins(&message);
    let text = message.content.expect("it has text");
    assert!(text.starts_with("<think>\nThe user") && text.ends_with("</tool_call>"), "{text}");
    assert_eq!((message.reasoning, message.tool_calls.len()), (None, 0));
}

/// Arguments that are longer than all that is before them.
fn long_arguments() -> String {
    json!({"command": "echo ".repeat(100)}).to_string().replace(':', ": ")
}

/// What the model writes before the arguments of a call.
const BEFORE_CALL: &str =
    "<think>\nFirst look.\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"bash\", \"arguments\": ";

/// An engine that answers with a thought, a text and these calls.
async fn start_with_calls(calls: &[&str]) -> (FakeEngine, Session, Request) {
    let (engine, session) = Session::start(EngineKind::Vllm).await;
    let script = Answer::text("I look.").thinking("First look.");
    let script = calls.iter().fold(script, |script, arguments| script.call("bash", arguments));
    engine.script("Look", [script.in_bytes()]);
    assert_eq!(session.probe().await, Verdict::Ready);
    (engine, session, with_tools(&json!([user("Look!")])))
}

#[tokio::test]
async fn the_first_call_arrives_while_the_engine_samples() {
    // vLLM writes the arguments of the whole answer with other spaces; what was sent stays.
    for respells in [false, true] {
        let arguments = long_arguments();
        let (engine, session, request) = start_with_calls(&[&arguments, r#"{"command": "pwd"}"#]).await;
        engine.switch(|switches| switches.respells_calls = respells);
        let received = Received::default();
        let streaming = received.streaming();
        engine.switch(|switches| switches.hold_behind = Some(BEFORE_CALL.len() + 200));
        let watching = async {
            received.wait(|said| said.call.as_ref().is_some_and(|call| call.arguments.contains("echo echo"))).await;
            let Said { reasoning, text, call } = received.said();
            assert_eq!((reasoning.trim_end(), text.as_str()), ("First look.", "I look."));
            let sent = call.expect("it has begun").arguments;
            assert!(sent.len() < 220 && arguments.starts_with(&sent), "{sent}");
            engine.switch(|switches| switches.hold_behind = None);
        };
        let (answered, ()) = tokio::join!(session.streamed(&request, &streaming), watching);
        let completion = answered.expect("the engine answers").completion;
        check_logprobs(&completion);
        received.begins(&completion.message);
        let made: Vec<_> = completion.message.tool_calls.iter().map(|call| call.arguments.as_str()).collect();
        assert_eq!(made, [&arguments, r#"{"command": "pwd"}"#]);
        assert_ne!(completion.message.tool_calls[0].id, completion.message.tool_calls[1].id);
        assert_eq!(completion.finish, Finish::ToolCalls);
    }
}

#[tokio::test]
async fn a_call_that_has_begun_goes_on_behind_what_was_sent() {
    // The engine aborts the call, the connection breaks, or the parts cannot be parsed.
    for fault in ["abort", "cut", "parse"] {
        let arguments = long_arguments();
        let (engine, session, request) = start_with_calls(&[&arguments]).await;
        let received = Received::default();
        let streaming = received.streaming();
        engine.switch(|switches| match fault {
            "abort" => switches.aborts = 1,
            "cut" => switches.cuts_in_body = 1,
            _ => switches.hold_behind = Some(BEFORE_CALL.len() + 200),
        });
        let has_begun = |said: &Said| said.call.as_ref().is_some_and(|call| call.arguments.contains("echo"));
        if fault == "cut" {
            session.streamed(&request, &streaming).await.expect_err("the connection breaks");
            assert!(has_begun(&received.said()), "{:?}", received.said());
        }
        let watching = async {
            received.wait(has_begun).await;
            engine.switch(|switches| {
                switches.part_failures = u32::from(fault == "parse");
                switches.hold_behind = None;
            });
        };
        let (answered, ()) = tokio::join!(session.streamed(&request, &streaming), watching);
        let answered = answered.expect("the engine answers");
        assert_eq!(answered.aborts, u32::from(fault == "abort"));
        received.begins(&answered.completion.message);
        let [call] = &answered.completion.message.tool_calls[..] else { panic!("{fault}") };
        assert_eq!(call.arguments, arguments, "{fault}");
    }
}

/// vLLM reads no call in the whole answer then.
#[tokio::test]
async fn an_agent_keeps_the_beginning_of_a_call_that_the_bound_of_tokens_cuts() {
    let arguments = long_arguments();
    let (_engine, session, _) = start_with_calls(&[&arguments]).await;
    let max_tokens = BEFORE_CALL.len() + 150;
    let body = json!({"model": "m", "messages": [user("Look!")], "tools": super::tools(), "max_tokens": max_tokens});
    let request = parsed(Dialect::Chat, &body);
    let received = Received::default();
    let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
    assert_eq!(answered.completion.finish, Finish::Length);
    let message = answered.completion.message;
    received.begins(&message);
    assert_eq!(message.content.as_deref(), Some("I look."));
    let half = &message.tool_calls[0].arguments;
    assert!(half.len() > 100 && half.len() < arguments.len() && arguments.starts_with(half), "{half}");

    // Of a tool in a shape of the client nothing was sent, so the agent gets what vLLM makes of it, which is text.
    let received = Received::default();
    let tool = ClientTool::Custom { name: "bash".to_owned(), namespace: None };
    let streaming = received.streaming_with([("bash".to_owned(), tool)].into());
    let text = session.streamed(&request, &streaming).await.expect("the engine answers").completion.message;
    received.begins(&text);
    assert_eq!((received.said().call, text.tool_calls.len()), (None, 0));
    assert!(text.content.expect("it has text").ends_with(half));
}

#[tokio::test]
async fn half_of_a_call_that_has_not_begun_for_the_agent_is_left_out() {
    let arguments = long_arguments();
    let (engine, session, _) = start_with_calls(&[&arguments, &arguments]).await;
    let max_tokens = BEFORE_CALL.len() + arguments.len() + 200;
    let body = json!({"model": "m", "messages": [user("Look!")], "tools": super::tools(), "max_tokens": max_tokens});
    let request = parsed(Dialect::Chat, &body);
    // The rest is what vLLM makes of the whole, or of the parts.
    for respells in [false, true] {
        engine.switch(|switches| switches.respells_calls = respells);
        let received = Received::default();
        let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
        let message = answered.completion.message;
        received.begins(&message);
        let made: Vec<_> = message.tool_calls.iter().map(|call| call.arguments.as_str()).collect();
        assert_eq!((made, message.content.as_deref()), (vec![arguments.as_str()], Some("I look.")));
        assert_eq!(answered.completion.finish, Finish::Length);
    }
}

#[tokio::test]
async fn a_call_that_has_a_shape_of_the_client_comes_as_a_whole() {
    let arguments = long_arguments();
    let (_engine, session, request) = start_with_calls(&[&arguments]).await;
    for (tool, comes_in_pieces) in [
        (ClientTool::LocalShell, false),
        (ClientTool::Function { name: "bash".to_owned(), namespace: "mcp__here".to_owned() }, true),
    ] {
        let received = Received::default();
        let streaming = received.streaming_with([("bash".to_owned(), tool)].into());
        let answered = session.streamed(&request, &streaming).await.expect("the engine answers");
        assert_eq!(received.said().call.is_some(), comes_in_pieces);
        assert_eq!(received.said().text, "I look.");
        assert_eq!(answered.completion.message.tool_calls[0].arguments, arguments);
    }
}

/// In parts, vLLM takes all that follows for arguments.
#[tokio::test]
async fn what_follows_an_object_is_no_part_of_the_arguments() {
    let behind = format!(r#"{{"a": 1}}, "more": "{}""#, "a text ".repeat(60));
    let (_engine, session, request) = start_with_calls(&[&behind]).await;
    let received = Received::default();
    let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
    received.begins(&answered.completion.message);
    assert_eq!(answered.completion.message.tool_calls[0].arguments, r#"{"a": 1}"#);
}

/// Their end could be read in another way than their beginning.
#[tokio::test]
async fn arguments_that_are_no_object_come_as_a_whole() {
    let strange = json!("a text ".repeat(60)).to_string();
    let (_engine, session, request) = start_with_calls(&[&strange]).await;
    let received = Received::default();
    let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
    assert_eq!(received.said().call.expect("it has begun").arguments, "");
    received.begins(&answered.completion.message);
    assert_eq!(answered.completion.message.tool_calls[0].arguments, strange);
}
