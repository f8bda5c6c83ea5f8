//! What real agents sent, sent again: the recordings of `make test-clients`.
//!
//! A recording has all requests of a run of an agent, with placeholders for prompts and descriptions of tools. The same
//! answers are scripted as in that run. So the same calls must become as many segments.

use std::path::PathBuf;

use forebay::config::Config;
use forebay_gateway::engine::Answer;
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use super::{Agent, trained};
use crate::support::{Backend, TestApp};

#[derive(Deserialize)]
struct Recording {
    client: String,
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    counts: Counts,
    scripts: Vec<Script>,
    requests: Vec<Sent>,
}

#[derive(Debug, Deserialize)]
struct Counts {
    reasoning: bool,
    calls: u64,
    segments: u64,
    breaks: u64,
}

#[derive(Deserialize)]
struct Script {
    key: String,
    answers: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    reasoning: Option<String>,
    #[serde(default)]
    content: String,
    #[serde(default)]
    calls: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct Sent {
    method: String,
    path: String,
    headers: std::collections::BTreeMap<String, String>,
    status: u16,
    #[serde(default)]
    fields: Vec<Field>,
}

/// A field of a body. Its value is that of an earlier request, or begins with items of an earlier one, or is here.
#[derive(Deserialize)]
struct Field {
    name: String,
    kept: Option<usize>,
    of: Option<usize>,
    #[serde(default)]
    prefix: usize,
    value: Option<Box<RawValue>>,
}

/// The fields of a body in their order, as JSON text.
type Body = Vec<(String, String)>;

fn recordings() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/clients/recordings");
    let entries = std::fs::read_dir(&folder).expect("there are recordings");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("the folder can be read").path()).collect();
    paths.sort();
    paths
}

impl Step {
    fn answer(&self) -> Answer {
        let answer = Answer::text(&self.content);
        let answer = self.calls.iter().fold(answer, |answer, (name, arguments)| answer.call(name, arguments));
        match &self.reasoning {
            Some(reasoning) => answer.thinking(reasoning),
            None => answer,
        }
    }
}

impl Sent {
    fn body(&self, before: &[Body]) -> Body {
        let earlier = |place: usize, name: &str| -> &str {
            let field = before[place].iter().find(|(found, _)| found == name);
            &field.unwrap_or_else(|| panic!("request {place} has no field {name}")).1
        };
        let text = |field: &Field| match (field.kept, field.of, &field.value) {
            (Some(place), ..) => earlier(place, &field.name).to_owned(),
            (_, Some(place), Some(value)) => {
                let items: Vec<&RawValue> = serde_json::from_str(earlier(place, &field.name)).expect("a list");
                let new: Vec<&RawValue> = serde_json::from_str(value.get()).expect("a list");
                let items: Vec<&str> = items[..field.prefix].iter().chain(&new).map(|item| item.get()).collect();
                format!("[{}]", items.join(","))
            }
            (.., Some(value)) => value.get().to_owned(),
            _ => panic!("the field {} has no value", field.name),
        };
        self.fields.iter().map(|field| (field.name.clone(), text(field))).collect()
    }

    async fn send(&self, agent: &Agent, body: &Body) {
        let base = agent.url("");
        let base = base.strip_suffix("/v1").expect("it is the base URL of OpenAI's clients");
        let method = Method::from_bytes(self.method.as_bytes()).expect("a method");
        let mut request = agent.http.request(method, format!("{base}{}", self.path));
        for (name, value) in &self.headers {
            // A recording has `KEY` for the whole value of a header with a key.
            let key = if name == "authorization" { format!("Bearer {}", agent.key()) } else { agent.key().to_owned() };
            request = request.header(name, if value == "KEY" { &key } else { value });
        }
        if !body.is_empty() {
            let fields: Vec<String> = body.iter().map(|(name, text)| format!("{}:{text}", json!(name))).collect();
            request = request.body(format!("{{{}}}", fields.join(",")));
        }
        let response = request.send().await.expect("the listener answers");
        let status = response.status();
        let text = response.text().await.expect("the answer ends well");
        assert_eq!(status, StatusCode::from_u16(self.status).expect("a status"), "{}: {text}", self.path);
        let streams = body.iter().any(|(name, text)| name == "stream" && text == "true");
        let last = ["data: [DONE]", "event: message_stop", "event: response.completed"];
        assert_eq!(streams, last.iter().any(|end| text.contains(end)), "{}: {text}", self.path);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_real_agents_sent_becomes_the_same_segments() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.engine.switch(|switches| switches.context_tokens = 1 << 20);
    let paths = recordings();
    assert!(!paths.is_empty());
    for path in paths {
        let text = std::fs::read(&path).expect("a recording can be read");
        let recording: Recording = serde_json::from_slice(&text).expect("it is a recording");
        for run in &recording.runs {
            let name = format!("{}, reasoning {}", recording.client, run.counts.reasoning);
            for script in &run.scripts {
                app.engine.script(&script.key, script.answers.iter().map(Step::answer));
            }
            let agent = Agent::open(&app, json!({"rollout_id": name})).await;
            let mut bodies: Vec<Body> = Vec::new();
            for sent in &run.requests {
                let body = sent.body(&bodies);
                sent.send(&agent, &body).await;
                bodies.push(body);
            }
            let assembly = agent.finish(&app, 1.0).await["assembly"].take();
            let counts = (&assembly["calls"], &assembly["segments"], &assembly["breaks"]);
            let expected = (&json!(run.counts.calls), &json!(run.counts.segments), &json!(run.counts.breaks));
            assert_eq!(counts, expected, "{name}");
            let (rows, tokens) = trained(&app).await;
            assert_eq!(
                (json!(rows.len()), json!(tokens)),
                (json!(run.counts.segments), assembly["trained_tokens"].clone()),
                "{name}"
            );
        }
    }
    app.finish().await;
}

/// The guide prints parts of the programs that `make test-clients` runs.
#[test]
fn the_snippets_of_the_guide_are_those_that_are_tried() {
    let repository = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(repository.join("tests/clients")).expect("the folder can be read");
    let files = entries.map(|entry| entry.expect("the folder can be read").path());
    let is_program = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "py" || extension == "sh");
    let programs: Vec<String> =
        files.filter(is_program).map(|path| std::fs::read_to_string(path).expect("it is text")).collect();
    let guide = std::fs::read_to_string(repository.join("docs/connect.md")).expect("the guide is text");
    let mut tried = 0;
    for block in guide.split("\n```").skip(1).step_by(2) {
        let (language, text) = block.split_once('\n').expect("a block has lines");
        match language {
            "toml" => assert!(Config::parse(text).is_ok(), "{text}"),
            "python" | "sh" if !text.starts_with("curl ") => {
                assert!(programs.iter().any(|program| program.contains(text)), "no program contains:\n{text}");
                tried += 1;
            }
            _ => {}
        }
    }
    assert!(tried > 8, "only {tried} snippets");
}
