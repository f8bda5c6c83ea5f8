//! Agents that died are started again: their calls are answered with what was recorded until they differ.

use forebay_fake_engine::{Answer, EngineKind, FakeEngine};
use serde_json::{Value, json};

use super::{Agent, DIALECTS, Dialect, answers, engines::start, error, metric, success, trained};
use crate::support::{Backend, TestApp, text};

impl Agent {
    /// The agent of the next attempt.
    pub(super) async fn resumed(&self, app: &TestApp) -> Self {
        let session = app.post(&format!("/sessions/{}/resume", self.id()), json!({})).await.expect(200);
        Self { http: app.http.clone(), session }
    }
}

/// The number of calls that an engine was asked.
pub(super) fn asked(engine: &FakeEngine) -> usize {
    let log = engine.log();
    log.calls().count() + log.at("/generate").count() + log.at("/inference/v1/generate").count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_goes_on_where_it_died_in_every_dialect() {
    let app = start(600).await;
    let mut resumed = 0;
    for dialect in DIALECTS {
        for stream in [false, true] {
            let first = Agent::open(&app, json!({})).await;
            let question = format!("Count, {dialect:?} {stream}.");
            let before = first.talk(dialect, stream, 3, &question).await;
            let asked_before = asked(&app.engine);
            let second = first.resumed(&app).await;
            let (status, retry, refusal) = error(first.call(dialect, &dialect.body(&before, stream)).await).await;
            assert_eq!((status.as_u16(), retry), (409, Some(false)), "{refusal}");
            // It does the same again, and one turn more.
            let after = second.talk(dialect, stream, 4, &question).await;
            assert_eq!(after[..before.len()], before);
            assert_eq!(asked(&app.engine), asked_before + 1);
            let turns = second.turns(&app).await;
            let uses: Vec<_> = turns.iter().map(|turn| (turn["attempt"].as_u64(), turn["used_in"].as_u64())).collect();
            let [old, new] = [(Some(1), Some(2)), (Some(2), Some(2))];
            assert_eq!(uses, [old, old, old, new]);
            let ended = second.finish(&app, 1.0).await;
            assert_eq!(ended["assembly"]["dropped"]["abandoned"], 0);
            assert_eq!(ended["assembly"]["calls"], 4);
            trained(&app).await;
            resumed += 3;
            let metrics = format!("forebay_agent_calls_total{{dialect=\"{}\",outcome=\"resumed\"}}", dialect.name());
            let expected = if stream { 6.0 } else { 3.0 };
            assert_eq!(metric(&app, &metrics).await, Some(expected));
        }
    }
    assert_eq!(resumed, 18);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_differs_goes_to_the_engine_and_so_does_all_behind_it() {
    let app = start(600).await;
    let first = Agent::open(&app, json!({})).await;
    app.engine.script("List the files.", answers(&["ls", "cat a", "done"]));
    let ask = async |agent: &Agent, conversation: &[&str]| {
        let conversation: Vec<String> = conversation.iter().map(|text| (*text).to_owned()).collect();
        let answer = success(agent.call(Dialect::Chat, &Dialect::Chat.body(&conversation, false)).await).await;
        Dialect::Chat.text(&answer)
    };
    let begin = "List the files.";
    assert_eq!(ask(&first, &[begin]).await, "ls");
    assert_eq!(ask(&first, &[begin, "ls", "a b"]).await, "cat a");
    assert_eq!(ask(&first, &[begin, "ls", "a b", "cat a", "text"]).await, "done");
    app.engine.script("List the files.", answers(&["pwd", "ls -a", "cat a"]));
    let second = first.resumed(&app).await;
    assert_eq!(ask(&second, &[begin]).await, "ls");
    // There is another file now.
    assert_eq!(ask(&second, &[begin, "ls", "a b c"]).await, "ls -a");
    assert_eq!(ask(&second, &[begin, "ls", "a b c", "ls -a", "a b c"]).await, "cat a");
    let ended = second.finish(&app, 1.0).await;
    let assembly = &ended["assembly"];
    assert_eq!((&assembly["calls"], &assembly["dropped"]["abandoned"]), (&json!(5), &json!(2)));
    trained(&app).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn equal_calls_are_replayed_one_by_one() {
    let app = start(600).await;
    let first = Agent::open(&app, json!({})).await;
    app.engine.script("Begin.", answers(&["yes", "no"]));
    let body = |texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        Dialect::Chat.body(&texts, false)
    };
    let ask = async |agent: &Agent, body: &Value| success(agent.call(Dialect::Chat, body).await).await;
    ask(&first, &body(&["Begin."])).await;
    ask(&first, &body(&["Begin.", "yes", "Go on."])).await;
    let second = first.resumed(&app).await;
    // Two equal calls: the first attempt made one of them.
    ask(&second, &body(&["Begin."])).await;
    ask(&second, &body(&["Begin."])).await;
    let third = first.resumed(&app).await;
    let asked_before = asked(&app.engine);
    // The third attempt makes what the second one made.
    ask(&third, &body(&["Begin."])).await;
    ask(&third, &body(&["Begin."])).await;
    assert_eq!(asked(&app.engine), asked_before);
    let turns = third.turns(&app).await;
    let used: Vec<_> = turns.iter().map(|turn| turn["used_in"].as_u64()).collect();
    assert_eq!(used, [Some(3), Some(1), Some(3)]);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replayed_answer_that_was_lost_is_given_again() {
    let app = start(600).await;
    let first = Agent::open(&app, json!({"max_calls": 1})).await;
    first.ask("Hello.").await;
    let second = first.resumed(&app).await;
    let body = Dialect::Chat.body(&["Hello.".to_owned()], false);
    let call = |count: &str| second.request(Dialect::Chat, &body).header("x-stainless-retry-count", count);
    // The session is full, but what was recorded needs no room.
    let answer = success(call("0").send().await.expect("the listener answers")).await;
    second.lose_the_first_answer(&app).await;
    let again = success(call("1").send().await.expect("the listener answers")).await;
    assert_eq!(answer["id"], again["id"]);
    assert_eq!(second.turns(&app).await.len(), 1);
    let (status, _, _) = error(call("0").send().await.expect("the listener answers")).await;
    assert_eq!(status, 400, "one answer was recorded, and the second call has none");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_saves_a_state_with_the_key_of_its_agent() {
    let app = start(600).await;
    let first = Agent::open(&app, json!({})).await;
    let at = format!("http://{}/sessions/{}/state", app.agents, first.id());
    let put = async |agent: &Agent, query: &str, content: Vec<u8>| {
        let sent = app.http.put(format!("{at}{query}")).bearer_auth(agent.key()).body(content).send().await;
        let answer = sent.expect("the listener answers");
        (answer.status().as_u16(), answer.json::<Value>().await.expect("an answer is JSON"))
    };
    let get = async |agent: &Agent| {
        let found = app.http.get(&at).bearer_auth(agent.key()).send().await.expect("the listener answers");
        (found.status().as_u16(), found.bytes().await.expect("the answer ends well").to_vec())
    };
    assert_eq!(get(&first).await.0, 404);
    first.ask("Hello.").await;
    // Bytes that are no text stay as they are.
    let (status, saved) = put(&first, "", vec![0, 255, 0xed, 0xa0, 0x80]).await;
    assert_eq!((status, &saved["call"], &saved["bytes"]), (200, &json!(1), &json!(5)));
    for query in ["?call=7", "?call=last"] {
        assert_eq!(put(&first, query, Vec::new()).await.0, 400);
    }
    assert_eq!(put(&first, "", vec![0; (1 << 20) + 1]).await.0, 413);
    let second = first.resumed(&app).await;
    assert_eq!(get(&second).await, (200, vec![0, 255, 0xed, 0xa0, 0x80]));
    assert_eq!(put(&first, "", Vec::new()).await.0, 409);
    assert_eq!(put(&second, "?call=1", b"second".to_vec()).await.1["attempt"], 2);
    assert_eq!(app.get(&format!("/sessions/{}", first.id())).await.expect(200)["attempt"], 2);
    app.finish().await;
}

#[cfg(feature = "exact")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_the_mode_exact_tool_calls_and_reasoning_come_back_although_tools_take_another_time() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let script = [
        Answer::text("").thinking("Look first.").call("ls", r#"{"path": "."}"#),
        Answer::text("").call("cat", r#"{"path": "a"}"#),
        Answer::text("Done."),
    ];
    engine.script("Start.", script);
    let (app, _folder) = super::exact::start(Backend::Sqlite, &engine, "vllm").await;
    let tools = json!([{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "cat", "parameters": {"type": "object"}}}]);
    let first = Agent::open(&app, json!({})).await;
    let run = async |agent: &Agent, turns: usize, time: &str| {
        let mut messages = vec![json!({"role": "user", "content": "Start."})];
        for _ in 0..turns {
            let body = json!({"model": "m", "messages": messages, "tools": tools});
            let answer = success(agent.call(Dialect::Chat, &body).await).await;
            let message = answer["choices"][0]["message"].clone();
            messages.push(message.clone());
            if let Some(call) = message["tool_calls"].get(0) {
                messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": format!("a, in {time}")}));
            }
        }
        messages.retain(|message| message["role"] == "assistant");
        messages
    };
    let before = run(&first, 2, "0.03s").await;
    let asked_before = asked(&engine);
    let second = first.resumed(&app).await;
    let after = run(&second, 3, "0.041s").await;
    assert_eq!(after[..before.len()], before);
    assert_eq!(asked(&engine), asked_before + 1);
    assert_eq!(text(&after[after.len() - 1]["content"]), "Done.");
    let ended = second.finish(&app, 1.0).await;
    let assembly = &ended["assembly"];
    assert_eq!((&assembly["segments"], &assembly["breaks"], &assembly["calls"]), (&json!(1), &json!(0), &json!(3)));
    trained(&app).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_resumed_at_any_replica() {
    let app = TestApp::start(Backend::Postgres).await;
    let mut other = app.replica().await;
    let first = Agent::open(&app, json!({})).await;
    let before = first.talk(Dialect::Chat, false, 2, "Count.").await;
    let session = other.post(&format!("/sessions/{}/resume", first.id()), json!({})).await.expect(200);
    let second = Agent { http: app.http.clone(), session };
    // It has asked its engine what it is when it opens a session, so that only calls are counted from here on.
    Agent::open(&other, json!({})).await;
    let asked_before = asked(&app.engine) + asked(&other.engine);
    let mut conversation = vec!["Count.".to_owned()];
    for (turn, replica) in [&other, &app].into_iter().enumerate() {
        let url = format!("http://{}/sessions/{}/v1/chat/completions", replica.agents, second.id());
        let body = Dialect::Chat.body(&conversation, false);
        let sent = second.http.post(url).bearer_auth(second.key()).json(&body).send().await;
        let answer = success(sent.expect("the listener answers")).await;
        conversation.push(Dialect::Chat.text(&answer));
        conversation.push(format!("Go on {turn}."));
    }
    assert_eq!(conversation, before);
    assert_eq!(asked(&app.engine) + asked(&other.engine), asked_before);
    // The first agent is told by either.
    let (status, ..) = error(first.call(Dialect::Chat, &Dialect::Chat.body(&conversation, false)).await).await;
    assert_eq!(status, 409);
    other.stop().await;
    app.finish().await;
}
