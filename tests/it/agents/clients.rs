//! What real agents sent, sent again: the recordings of `make outside NAME=clients`.
//!
//! The same answers are scripted as in the recorded run. So the same calls must become as many segments.

use std::path::PathBuf;

use forebay::config::Config;
use forebay_fake_engine::{
    FakeEngine,
    recording::{Counts, Made, Recording, Sent},
};
use serde_json::{Value, json};

use super::{Agent, attempts::asked, trained};
use crate::support::{Backend, TestApp};

/// The longest context of the engine. Most characters of a prompt are tokens here.
pub(super) const CONTEXT_TOKENS: usize = 1 << 20;

fn recordings() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/clients/recordings");
    let entries = std::fs::read_dir(&folder).expect("there are recordings");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("the folder can be read").path()).collect();
    paths.sort();
    paths
}

async fn send(agent: &Agent, sent: &Sent, body: &str) {
    let base = agent.url("");
    let base = base.strip_suffix("/v1").expect("it is the base URL of OpenAI's clients");
    let request = sent.request(&agent.http, base, agent.key(), body.to_owned());
    let response = request.send().await.expect("the listener answers");
    let status = response.status();
    let text = response.text().await.expect("the answer ends well");
    assert_eq!(status.as_u16(), sent.status, "{}: {text}", sent.path);
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    let last = ["data: [DONE]", "event: message_stop", "event: response.completed"];
    assert_eq!(body["stream"] == true, last.iter().any(|end| text.contains(end)), "{}: {text}", sent.path);
}

/// Sends all recordings again, and checks that their calls become as many segments as `expected` says.
pub(super) async fn replay(app: &TestApp, engine: &FakeEngine, expected: impl Fn(&Counts) -> Made) {
    engine.switch(|switches| switches.context_tokens = CONTEXT_TOKENS);
    let paths = recordings();
    assert!(!paths.is_empty());
    for path in paths {
        let recording = Recording::read(&path).expect("it is a recording");
        for run in &recording.runs {
            let name = format!("{}, reasoning {}", recording.client, run.counts.reasoning);
            for script in &run.scripts {
                engine.script(&script.key, script.answers());
            }
            let agent = Agent::open(app, json!({"rollout_id": name})).await;
            for (sent, body) in run.requests.iter().zip(run.bodies()) {
                send(&agent, sent, &body).await;
            }
            let assembly = agent.finish(app, 1.0).await["assembly"].take();
            let Made { segments, breaks } = expected(&run.counts);
            let counts = (&assembly["calls"], &assembly["segments"], &assembly["breaks"]);
            assert_eq!(counts, (&json!(run.counts.calls), &json!(segments), &json!(breaks)), "{name}");
            let (rows, tokens) = trained(app).await;
            assert_eq!(
                (json!(rows.len()), json!(tokens)),
                (json!(segments), assembly["trained_tokens"].clone()),
                "{name}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_real_agents_sent_becomes_the_same_segments() {
    let app = TestApp::start(Backend::Sqlite).await;
    replay(&app, &app.engine, |counts| counts.observe).await;
    app.finish().await;
}

/// Each agent dies in the middle, is started again, and sends what it sent before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_real_agents_sent_is_not_sampled_again_after_they_died() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.engine.switch(|switches| switches.context_tokens = CONTEXT_TOKENS);
    for path in recordings() {
        let recording = Recording::read(&path).expect("it is a recording");
        for run in &recording.runs {
            let name = format!("{}, reasoning {}", recording.client, run.counts.reasoning);
            for script in &run.scripts {
                app.engine.script(&script.key, script.answers());
            }
            // The first opening has asked the engine what it is.
            let first = Agent::open(&app, json!({"rollout_id": name})).await;
            let asked_before = asked(&app.engine);
            let sent: Vec<_> = run.requests.iter().zip(run.bodies()).collect();
            for (sent, body) in &sent[..sent.len() / 2] {
                send(&first, sent, body).await;
            }
            let second = first.resumed(&app).await;
            for (sent, body) in &sent {
                send(&second, sent, body).await;
            }
            assert_eq!(json!(asked(&app.engine) - asked_before), json!(run.counts.calls), "{name}");
            let assembly = second.finish(&app, 1.0).await["assembly"].take();
            let counts = (&assembly["calls"], &assembly["segments"], &assembly["dropped"]["abandoned"]);
            assert_eq!(counts, (&json!(run.counts.calls), &json!(run.counts.observe.segments), &json!(0)), "{name}");
            trained(&app).await;
        }
    }
    app.finish().await;
}

/// The guide prints parts of the programs that `make outside NAME=clients` runs. Other tests run the blocks with curl.
#[test]
fn the_snippets_of_the_guide_are_those_that_are_tried() {
    let repository = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(repository.join("tests/clients")).expect("the folder can be read");
    let files = entries.map(|entry| entry.expect("the folder can be read").path());
    let is_program = |path: &PathBuf| {
        path.extension().is_some_and(|extension| ["py", "sh", "cjs"].iter().any(|&name| extension == name))
    };
    let programs: Vec<String> =
        files.filter(is_program).map(|path| std::fs::read_to_string(path).expect("it is text")).collect();
    let guide = std::fs::read_to_string(repository.join("docs/connect.md")).expect("the guide is text");
    let mut tried = 0;
    for block in guide.split("\n```").skip(1).step_by(2) {
        let (language, text) = block.split_once('\n').expect("a block has lines");
        match language {
            "toml" => assert!(Config::parse(text).is_ok(), "{text}"),
            "python" | "sh" | "js" if !text.starts_with("curl ") && !text.contains("\"$forebay/") => {
                assert!(programs.iter().any(|program| program.contains(text)), "no program contains:\n{text}");
                tried += 1;
            }
            _ => {}
        }
    }
    assert!(tried > 16, "only {tried} snippets");
}
