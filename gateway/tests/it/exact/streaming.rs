//! Answers that reach the agent while the engine samples them.

use std::sync::Arc;

use forebay_gateway::{
    Completion, Dialect, Request, UpstreamError,
    completion::{AssistantMessage, Piece},
    engine::{Answer, EngineKind, FakeEngine},
    upstream::{Streaming, probe::Verdict},
};
use serde_json::json;
use tokio::sync::watch;

use super::{Session, check_logprobs, user, with_tools};
use crate::support::parsed;

const GENERATE: &str = "/inference/v1/generate";

/// The thought and the text that an agent has received.
#[derive(Clone, Default)]
struct Received(Arc<watch::Sender<(String, String)>>);

impl Received {
    fn streaming(&self) -> Streaming {
        let said = Arc::clone(&self.0);
        Streaming::new(move |piece| {
            said.send_modify(|(reasoning, text)| match piece {
                Piece::Reasoning(more) => *reasoning += &more,
                Piece::Text(more) => *text += &more,
            });
        })
    }

    fn said(&self) -> (String, String) {
        self.0.borrow().clone()
    }

    async fn wait(&self, holds: impl FnMut(&(String, String)) -> bool) {
        self.0.subscribe().wait_for(holds).await.expect("it is not dropped");
    }

    fn begins(&self, message: &AssistantMessage) {
        let (reasoning, text) = self.said();
        let whole = |text: &Option<String>| text.clone().unwrap_or_default();
        assert!(whole(&message.reasoning).starts_with(&reasoning), "{reasoning:?} {message:?}");
        assert!(whole(&message.content).starts_with(&text), "{text:?} {message:?}");
    }
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
            received.wait(|said| *said != Default::default()).await;
            let first = received.said();
            engine.switch(|switches| switches.hold_behind = Some(60));
            received.wait(|said| *said != first).await;
            engine.switch(|switches| switches.hold_behind = Some(110));
            received.wait(|(_, text)| text.contains("I look")).await;
            assert!(!received.said().1.contains("more"));
            engine.switch(|switches| switches.hold_behind = None);
        };
        let (answered, ()) = tokio::join!(calling, watching);
        let completion = answered.expect("the engine answers").completion;
        check_logprobs(&completion);
        received.begins(&completion.message);
        assert!(!parses || received.said().1.ends_with("one more."), "a tool call is no text");
        let whole = whole(&engine, &mut session, &request).await;
        // Only events name the counts.
        assert_eq!(Completion { usage: whole.usage, ..completion }, whole, "parses: {parses}");
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
            (String::new(), String::new())
        };
        let answered = session.streamed(&request, &streaming).await.expect("the engine answers");
        assert_eq!(answered.aborts, u32::from(!is_cut));
        let completion = answered.completion;
        check_logprobs(&completion);
        received.begins(&completion.message);
        assert!(!is_cut || (!said.0.is_empty() && received.said().0.starts_with(&said.0)), "{said:?}");
        let log = engine.log();
        let sent: Vec<_> = log.at(GENERATE).skip(probed).map(|request| request.json()["token_ids"].clone()).collect();
        let [first, second] = &sent[..] else { panic!("{sent:?}") };
        let (first, second) = (first.as_array().expect("ids").len(), second.as_array().expect("ids").len());
        assert!(second > first + 20, "the second request begins behind the ids of the first: {first} {second}");
        assert_eq!(completion.message, whole(&engine, &mut session, &request).await.message);
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
    assert_eq!(answered.completion.message, whole(&engine, &mut session, &request).await.message);
}

#[tokio::test]
async fn an_answer_with_stop_texts_comes_as_a_whole() {
    let (engine, mut session, _) = start().await;
    let body = json!({"model": "m", "messages": [user("Look!")], "stop": ["thing"]});
    let request = parsed(Dialect::Chat, &body);
    let received = Received::default();
    let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
    assert_eq!(received.said(), (String::new(), String::new()));
    assert_eq!(answered.completion.message, whole(&engine, &mut session, &request).await.message);
}

#[tokio::test]
async fn an_engine_that_sends_no_events_is_asked_for_the_whole() {
    let (engine, mut session, request) = start().await;
    engine.switch(|switches| switches.sends_events = false);
    assert_eq!(session.probe().await, Verdict::Ready);
    let received = Received::default();
    let answered = session.streamed(&request, &received.streaming()).await.expect("the engine answers");
    assert_eq!(received.said(), (String::new(), String::new()));
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
