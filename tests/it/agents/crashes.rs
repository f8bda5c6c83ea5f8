//! `kill -9` of the service while an agent calls it: at every commit of a session, and at every call of the engine.
//!
//! The agent repeats what was not answered, as the clients of OpenAI and Anthropic do. At the end every call is recorded
//! once, every trained token has its true context, and every sampled token is trained, dropped with a reason, or was
//! never recorded.

use std::{collections::BTreeMap, path::PathBuf, process::ExitStatus};

use forebay_fake_engine::{Answer, EngineKind, FakeEngine};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::process::Command;

use super::{DIALECTS, Dialect, check_row};
use crate::{
    faults::{self, Call, Fault, Faults, On},
    support::{endure, eventually, fresh_database, process::Service, text, with_agents},
};

/// What the user says, of which the engine's script depends.
const QUESTIONS: [&str; 3] = ["Begin.", "Go on.", "End."];

/// When the service is killed.
#[derive(Clone, Copy, Debug)]
enum Kill {
    Never,
    /// At the nth sync of the database's log, from the first request on.
    AtSync(Fault, i64),
    /// When the engine has received the nth call of the agent.
    AtCall(usize),
    /// When the nth call was answered completely.
    AfterAnswer(usize),
    /// When the finish was sent.
    AtFinish,
}

/// An agent and its producer, and the service that is killed under them.
struct Run {
    faults: Option<Faults>,
    database: String,
    config: PathBuf,
    engine: FakeEngine,
    http: reqwest::Client,
    service: Option<Service>,
    /// What the service answered when the session was opened; null until this process was asked.
    session: Value,
    deaths: usize,
    kill: Kill,
}

impl Run {
    async fn new(folder: &tempfile::TempDir, database: String, kill: Kill) -> Self {
        let engine = FakeEngine::start(EngineKind::Sglang).await;
        let texts = ["The first answer comes back as other tokens.", "The second one does not.", "The third ends it."];
        let answers = texts.map(Answer::text);
        let [first, second, third] = answers;
        engine.script(QUESTIONS[0], [first.in_bytes(), second, third]);
        let config = folder.path().join("forebay.toml");
        std::fs::write(&config, with_agents("", &engine)).expect("the folder can be written");
        let faults = matches!(kill, Kill::AtSync(..)).then(|| Faults::new(folder.path()));
        let http = crate::support::http();
        Self { faults, database, config, engine, http, service: None, session: Value::Null, deaths: 0, kill }
    }

    /// Starts the service unless it runs, and waits until it serves agents. A killed service has another address then.
    async fn url(&mut self) -> String {
        while self.service.is_none() {
            match self.start().await {
                Ok(service) => self.service = Some(service),
                Err(status) => panic!("it ended before it served: {status}"),
            }
            self.session = Value::Null;
        }
        self.service.as_ref().map(|service| service.url.clone()).expect("it was started above")
    }

    async fn start(&self) -> Result<Service, ExitStatus> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["--listen", "127.0.0.1:0", "--database", &self.database, "--log", "json", "--config"]);
        command.arg(&self.config);
        if let Some(faults) = &self.faults {
            command.envs(faults.environment());
        }
        Service::spawn(command).await
    }

    /// The service was killed. There is one fault in a run.
    async fn died(&mut self) {
        self.deaths += 1;
        assert_eq!(self.deaths, 1, "one fault ends one life");
        if let Some(faults) = &self.faults {
            faults.disarm();
        }
        self.session = Value::Null;
        let status = self.service.take().expect("it was called").ended().await;
        assert!(!status.success(), "it ended as if nothing had happened");
    }

    /// Sends a request of the producer until it is answered.
    async fn post(&mut self, path: &str, body: &Value) -> Value {
        self.request(Method::POST, path, body).await
    }

    async fn get(&mut self, path: &str) -> Value {
        self.request(Method::GET, path, &Value::Null).await
    }

    async fn request(&mut self, method: Method, path: &str, body: &Value) -> Value {
        loop {
            let url = self.url().await;
            let sent = self.http.request(method.clone(), format!("{url}{path}")).json(body).send().await;
            let Ok(response) = sent else {
                self.died().await;
                continue;
            };
            let status = response.status().as_u16();
            match response.json::<Value>().await {
                Ok(answer) => {
                    assert!(matches!(status, 200 | 201), "{path}: {status} {answer}");
                    return answer;
                }
                Err(_) => self.died().await,
            }
        }
    }

    /// Opens the session, or opens it again where the service has started again since.
    async fn open(&mut self) {
        while self.session.is_null() {
            let url = self.url().await;
            let http = self.http.clone();
            // Engines are probed when the service starts, and until then no session is opened.
            let is_ready = || async {
                let ready = http.post(format!("{url}/sessions")).json(&json!({"rollout_id": "r"})).send().await;
                ready.map_or(true, |response| response.status() != 503)
            };
            eventually("the engine is ready", is_ready).await;
            let opened = self.post("/sessions", &json!({"rollout_id": "r"})).await;
            if self.service.is_some() {
                self.session = opened;
            }
        }
    }

    /// Makes a call, and repeats it until it is answered completely. Returns the text of the answer.
    async fn call(&mut self, dialect: Dialect, conversation: &[String], stream: bool, number: usize) -> String {
        let body = dialect.body(conversation, stream);
        for retries in 0.. {
            self.open().await;
            let url = format!("{}{}", text(&self.session["base_urls"]["openai"]), dialect.path());
            let request = self.http.post(url).json(&body).header("x-stainless-retry-count", retries);
            let request = request.bearer_auth(text(&self.session["key"])).header("anthropic-version", "2023-06-01");
            let sending = async {
                let response = request.send().await?;
                assert_eq!(response.status(), 200);
                response.text().await
            };
            let killing = async {
                if let (Kill::AtCall(nth), 0) = (self.kill, self.deaths)
                    && nth == number
                {
                    let calls = |log: &forebay_fake_engine::Log| of_agent(log).len();
                    self.engine.wait(|log| calls(log) >= number).await;
                    self.kill().await;
                }
            };
            let (answer, ()) = tokio::join!(sending, killing);
            if let (Kill::AfterAnswer(nth), 0) = (self.kill, self.deaths)
                && nth == number
            {
                self.kill().await;
                self.died().await;
            }
            match answer {
                Ok(answer) if stream => return dialect.text_of_events(&answer),
                Ok(answer) => return dialect.text(&serde_json::from_str(&answer).expect("the answer is JSON")),
                Err(_) => self.died().await,
            }
        }
        unreachable!("one fault ends one life")
    }

    async fn kill(&self) {
        self.service.as_ref().expect("it runs").signal("KILL").await;
    }

    async fn finish(&mut self) -> Value {
        self.open().await;
        let path = format!("/sessions/{}/finish", text(&self.session["session_id"]));
        if let (Kill::AtFinish, 0) = (self.kill, self.deaths) {
            let url = self.url().await;
            let finish = self.http.post(format!("{url}{path}")).json(&json!({"reward": 1.0})).send();
            let (_, ()) = tokio::join!(finish, self.kill());
            self.died().await;
        }
        self.post(&path, &json!({"reward": 1.0})).await
    }
}

/// The calls of the agent that the engine has received, by their number of messages. The service's own calls, by which it
/// tests an engine, name no session of the service.
fn of_agent(log: &forebay_fake_engine::Log) -> Vec<usize> {
    let messages = |received: &forebay_fake_engine::Received| {
        let body = received.json();
        let messages = body["messages"].as_array()?;
        (messages.first()?["content"] == QUESTIONS[0]).then_some(messages.len())
    };
    log.calls().filter_map(messages).collect()
}

/// Runs the whole session with one kill. Returns whether it happened.
async fn run(folder: &tempfile::TempDir, database: String, kill: Kill, dialect: Dialect, stream: bool) -> bool {
    let mut run = Run::new(folder, database, kill).await;
    run.url().await;
    if let (Some(faults), Kill::AtSync(fault, nth)) = (&run.faults, kill) {
        faults.arm(fault, Call::Sync, On::Wal, nth);
    }
    let mut conversation: Vec<String> = Vec::new();
    for (index, question) in QUESTIONS.into_iter().enumerate() {
        conversation.push(question.to_owned());
        let answer = run.call(dialect, &conversation, stream, index + 1).await;
        conversation.push(answer);
        // This stores which answers were delivered, so that only the mark of the interrupted call can be lost.
        run.open().await;
        run.get(&format!("/sessions/{}/turns", text(&run.session["session_id"]))).await;
    }
    let ended = run.finish().await;
    check(&mut run, &ended, &format!("{kill:?} {dialect:?} {stream}")).await;
    let struck = run.deaths > 0;
    if let Some(service) = run.service.take() {
        service.kill().await;
    }
    struck
}

async fn check(run: &mut Run, ended: &Value, what: &str) {
    if let Some(faults) = &run.faults {
        faults.disarm();
    }
    let session = text(&ended["session_id"]).to_owned();
    let turns = run.get(&format!("/sessions/{session}/turns")).await;
    let turns = turns["turns"].as_array().expect("a list");
    assert_eq!(turns.len(), QUESTIONS.len(), "{what}: every call is recorded once: {turns:?}");
    // The engine sampled an answer again only where the service was killed before it recorded it.
    let received = of_agent(&run.engine.log());
    assert!(received.len() <= QUESTIONS.len() + run.deaths, "{what}: {received:?}");
    let times = received.iter().fold(BTreeMap::new(), |mut times, messages| {
        *times.entry(*messages).or_insert(0_u64) += 1;
        times
    });
    let number = |value: &Value| value.as_u64().expect("a number");
    let sampled: Vec<u64> = turns.iter().map(|turn| number(&turn["sampled_tokens"])).collect();
    let asked = times.values().zip(&sampled).map(|(times, tokens)| times * tokens).sum::<u64>();
    let not_recorded = times.values().zip(&sampled).map(|(times, tokens)| (times - 1) * tokens).sum::<u64>();
    let assembly = &ended["assembly"];
    let dropped = &assembly["dropped_tokens"];
    let dropped: u64 = dropped.as_object().expect("reasons").values().map(number).sum();
    let batch = run.post("/batches", &json!({})).await;
    let url = run.url().await;
    let rows = run.http.get(format!("{url}{}", text(&batch["samples_url"]))).send().await;
    let rows = rows.expect("the service answers").text().await.expect("the stream ends well");
    let rows: Vec<Value> = rows.lines().map(|row| serde_json::from_str(row).expect("every line is a row")).collect();
    let trained: usize = rows.iter().map(|row| check_row(row, 1.0)).sum();
    let trimmed = number(&assembly["trimmed"]);
    assert_eq!(asked, trained as u64 + dropped + trimmed + not_recorded, "{what}: {assembly} {times:?}");
    // The mark that the interrupted call was delivered may be lost, but no answer is.
    assert_eq!(dropped, 0, "{what}: {assembly}");
    let stats = run.get("/stats").await;
    assert_eq!(stats["conserved"], true, "{what}: {stats}");
    let policy = run.get("/policies/default").await;
    assert_eq!(policy["waiting"]["reserved_rollouts"], 0, "{what}");
}

async fn on_sqlite(kill: Kill, dialect: Dialect, stream: bool) -> bool {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    run(&folder, faults::database(folder.path()), kill, dialect, stream).await
}

async fn on_postgres(kill: Kill, dialect: Dialect, stream: bool) -> bool {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    run(&folder, fresh_database().await, kill, dialect, stream).await
}

/// Kills the service at every nth sync, until one run ends without a kill.
async fn at_every_sync(fault: Fault) {
    let mut strikes = 0;
    for nth in (1_i64..).step_by(endure::size(2, 1)) {
        let dialect = DIALECTS[strikes % DIALECTS.len()];
        if !on_sqlite(Kill::AtSync(fault, nth), dialect, strikes % 2 == 0).await {
            break;
        }
        strikes += 1;
    }
    endure::report(&format!("{fault:?} at a sync of a session"), strikes, "lives, each at another sync");
    assert!(strikes > 3, "the calls and the end of a session are commits");
}

fn at_calls() -> Vec<Kill> {
    let mut kills = vec![Kill::Never, Kill::AtFinish];
    for number in 1..=QUESTIONS.len() {
        kills.extend([Kill::AtCall(number), Kill::AfterAnswer(number)]);
    }
    kills
}

/// Kills the service after the only answer of a session, before it stores that the answer was delivered.
async fn after_the_only_answer(database: String, dialect: Dialect, stream: bool) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let mut run = Run::new(&folder, database, Kill::AfterAnswer(1)).await;
    run.call(dialect, &[QUESTIONS[0].to_owned()], stream, 1).await;
    assert_eq!(run.deaths, 1);
    let ended = run.finish().await;
    let assembly = &ended["assembly"];
    assert_eq!((&assembly["calls"], &assembly["segments"]), (&json!(1), &json!(1)), "{ended}");
    assert_eq!(assembly["trained_tokens"], assembly["sampled_tokens"], "{ended}");
    if let Some(service) = run.service.take() {
        service.kill().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_answer_of_a_session_is_trained_although_the_service_was_killed_behind_it() {
    for (index, dialect) in DIALECTS.into_iter().enumerate() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        after_the_only_answer(faults::database(folder.path()), dialect, index % 2 == 0).await;
    }
    after_the_only_answer(fresh_database().await, Dialect::Chat, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_goes_on_after_a_kill_before_a_commit() {
    at_every_sync(Fault::KillBefore).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_goes_on_after_a_kill_between_a_commit_and_its_answer() {
    at_every_sync(Fault::KillAfter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_goes_on_after_a_kill_at_any_call_on_sqlite() {
    for (index, kill) in at_calls().into_iter().enumerate() {
        on_sqlite(kill, DIALECTS[index % DIALECTS.len()], index % 2 == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_goes_on_after_a_kill_at_any_call_on_postgres() {
    for (index, kill) in at_calls().into_iter().enumerate() {
        on_postgres(kill, DIALECTS[index % DIALECTS.len()], index % 2 == 0).await;
    }
}
