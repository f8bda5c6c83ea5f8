//! What real agents sent, as `make outside NAME=clients` records it in `tests/clients/recordings`.
//!
//! A recording has all requests of a run of an agent, with placeholders for prompts and descriptions of tools, and what
//! the engine answered. So a test can send the same again without the agent.

use std::{collections::BTreeMap, io, path::Path};

use serde::Deserialize;
use serde_json::{json, value::RawValue};

use crate::Answer;

/// The runs of one agent.
#[derive(Debug, Deserialize)]
pub struct Recording {
    /// The name of its program in `tests/clients`.
    pub client: String,
    pub runs: Vec<Run>,
}

/// One run of an agent, which was one session.
#[derive(Debug, Deserialize)]
pub struct Run {
    /// What became of its calls.
    pub counts: Counts,
    /// What the engine answered.
    pub scripts: Vec<Script>,
    /// What the agent sent, in the order of arrival.
    pub requests: Vec<Sent>,
}

/// What became of the calls of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Counts {
    /// Whether the model wrote reasoning.
    pub reasoning: bool,
    /// Calls that were recorded.
    pub calls: u64,
    /// What they became where the engine renders the prompts.
    pub observe: Made,
    /// What they became where the service renders them.
    pub exact: Made,
}

/// What the calls of a run become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Made {
    /// Segments that were assembled of them.
    pub segments: u64,
    /// Prompts that differ from the earlier call instead of continuing it.
    pub breaks: u64,
}

/// Answers, and the text by which [`FakeEngine::script`](crate::FakeEngine::script) finds them.
#[derive(Debug, Deserialize)]
pub struct Script {
    /// A part of a message of the user.
    pub key: String,
    answers: Vec<Step>,
}

#[derive(Debug, Deserialize)]
struct Step {
    reasoning: Option<String>,
    #[serde(default)]
    content: String,
    #[serde(default)]
    calls: Vec<(String, String)>,
}

/// A request of an agent.
#[derive(Debug, Deserialize)]
pub struct Sent {
    method: String,
    /// The path behind the address of the session.
    pub path: String,
    headers: BTreeMap<String, String>,
    /// The status of the answer.
    pub status: u16,
    #[serde(default)]
    fields: Vec<Field>,
}

/// A field of a body. Its value is that of an earlier request, or begins with items of an earlier one, or is here.
#[derive(Debug, Deserialize)]
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

impl Recording {
    /// Reads the recording of a program.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
    }
}

impl Script {
    /// The answers in their order.
    pub fn answers(&self) -> impl Iterator<Item = Answer> {
        self.answers.iter().map(Step::answer)
    }
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

impl Run {
    /// The bodies of the requests as JSON text, empty for a request without one.
    #[must_use]
    pub fn bodies(&self) -> Vec<String> {
        let mut bodies: Vec<Body> = Vec::new();
        for sent in &self.requests {
            bodies.push(sent.body(&bodies));
        }
        bodies.iter().map(written).collect()
    }
}

impl Sent {
    /// The same request with this body, to a session whose address ends before `/v1`.
    pub fn request(&self, http: &reqwest::Client, session: &str, key: &str, body: String) -> reqwest::RequestBuilder {
        let method = http::Method::from_bytes(self.method.as_bytes()).expect("a recorded method is valid");
        let mut request = http.request(method, format!("{session}{}", self.path));
        for (name, value) in &self.headers {
            // A recording has `KEY` for the whole value of a header with a key.
            let key = if name == "authorization" { format!("Bearer {key}") } else { key.to_owned() };
            request = request.header(name, if value == "KEY" { &key } else { value });
        }
        if body.is_empty() { request } else { request.body(body) }
    }

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
}

fn written(body: &Body) -> String {
    if body.is_empty() {
        return String::new();
    }
    let fields: Vec<String> = body.iter().map(|(name, text)| format!("{}:{text}", json!(name))).collect();
    format!("{{{}}}", fields.join(","))
}
