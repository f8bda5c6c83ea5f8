//! What real agents sent, sent again: the recordings of `make test-clients`.
//!
//! A recording has all requests of a run of an agent, with placeholders for prompts and descriptions of tools. The same
//! answers are scripted as in that run. So the same number of prompts must continue earlier calls.

use std::{collections::BTreeMap, path::PathBuf};

use forebay_gateway::{
    Dialect,
    completion::Completion,
    dialect::token_count,
    engine::{Answer, EngineKind, model},
};
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use crate::support::{answer, call, envelope, parsed_text, start};

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

#[derive(Deserialize)]
struct Counts {
    reasoning: bool,
    calls: usize,
    segments: usize,
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
    path: String,
    headers: BTreeMap<String, String>,
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

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files of a folder of `tests/clients` with one of these extensions.
fn files(folder: &str, extensions: &[&str]) -> Vec<String> {
    let entries = std::fs::read_dir(repository().join("tests/clients").join(folder)).expect("the folder can be read");
    let paths = entries.map(|entry| entry.expect("the folder can be read").path());
    let is_wanted = |path: &PathBuf| path.extension().is_some_and(|found| extensions.iter().any(|name| found == *name));
    let mut paths: Vec<PathBuf> = paths.filter(is_wanted).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read_to_string(path).expect("it is text")).collect()
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
    fn fields(&self, before: &[Body]) -> Body {
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

    /// The dialect of a call; none if the request is no call.
    fn dialect(&self) -> Option<Dialect> {
        match self.path.split('?').next() {
            Some("/v1/chat/completions") => Some(Dialect::Chat),
            Some("/v1/messages") => Some(Dialect::Messages),
            Some("/v1/responses") => Some(Dialect::Responses),
            _ => None,
        }
    }
}

fn json_text(fields: &[(String, String)]) -> String {
    let fields: Vec<String> = fields.iter().map(|(name, text)| format!("{}:{text}", json!(name))).collect();
    format!("{{{}}}", fields.join(","))
}

/// How many segments the calls become: each prompt that does not begin with all ids of an earlier call begins one.
fn segments(calls: &[Completion]) -> usize {
    let continues = |place: usize| {
        calls[..place].iter().any(|before| {
            let prompt = &calls[place].prompt_tokens;
            prompt.strip_prefix(&before.prompt_tokens[..]).is_some_and(|rest| rest.starts_with(&before.tokens))
        })
    };
    (0..calls.len()).filter(|&place| !continues(place)).count()
}

fn check_logprobs(completion: &Completion, temperature: f64) {
    let mut context = model::Context::new(&completion.prompt_tokens);
    for (&token, &value) in completion.tokens.iter().zip(&completion.logprobs) {
        assert!((value - context.logprob(token, temperature)).abs() < 1e-6);
        context = context.with(token);
    }
}

#[tokio::test]
async fn what_real_agents_sent_becomes_the_same_segments() {
    let recordings = files("recordings", &["json"]);
    assert!(!recordings.is_empty());
    for text in recordings {
        let recording: Recording = serde_json::from_str(&text).expect("it is a recording");
        for run in &recording.runs {
            let name = format!("{}, reasoning {}", recording.client, run.counts.reasoning);
            let (engine, upstream) = start(EngineKind::Sglang).await;
            engine.switch(|switches| switches.context_tokens = 1 << 20);
            for script in &run.scripts {
                engine.script(&script.key, script.answers.iter().map(Step::answer));
            }
            let mut bodies: Vec<Body> = Vec::new();
            let mut calls = Vec::new();
            for sent in &run.requests {
                let fields = sent.fields(&bodies);
                let body = json_text(&fields);
                bodies.push(fields);
                let Some(dialect) = sent.dialect() else {
                    assert!(!token_count(body.as_bytes(), None).is_empty());
                    continue;
                };
                assert_eq!(sent.headers.contains_key("anthropic-version"), dialect == Dialect::Messages, "{name}");
                let request = parsed_text(dialect, &body);
                let completion = upstream.complete(&call(&request)).await.expect("the engine answers").completion;
                check_logprobs(&completion, call(&request).sampling.temperature);
                if request.stream {
                    let last = dialect.events(&completion, &envelope()).last().expect("there are events");
                    assert!(last.after_commit, "{name}");
                } else {
                    assert!(answer(dialect, &completion).is_object(), "{name}");
                }
                calls.push(completion);
            }
            assert_eq!((calls.len(), segments(&calls)), (run.counts.calls, run.counts.segments), "{name}");
        }
    }
}

/// The guide prints parts of the programs that `make test-clients` runs.
#[test]
fn the_snippets_of_the_guide_are_those_that_are_tried() {
    let programs = files(".", &["py", "sh"]);
    let guide = std::fs::read_to_string(repository().join("docs/connect.md")).expect("the guide is text");
    let mut tried = 0;
    for block in guide.split("\n```").skip(1).step_by(2) {
        let (language, text) = block.split_once('\n').expect("a block has lines");
        if matches!(language, "python" | "sh") && !text.starts_with("curl ") {
            assert!(programs.iter().any(|program| program.contains(text)), "no program contains:\n{text}");
            tried += 1;
        }
    }
    assert!(tried > 8, "only {tried} snippets");
}
