//! A fake inference engine for tests, over real sockets.
//!
//! It speaks the chat endpoints of SGLang and vLLM with the fields that return token ids, and their endpoints of ids.
//! Its model is a function: the log-probability of a token follows from the ids before it ([`model::logprob`]), so a
//! test can check any trained token against its true context. Ids that come with messages must be the prompt of these
//! messages. Tests say what it answers ([`FakeEngine::script`]), and switch its faults on ([`Switches`]).

pub mod model;
mod prompt;
pub mod recording;
mod score;
mod server;
mod template;
pub mod tokenizer;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::Value;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

pub use forebay_gateway::upstream::EngineKind;

/// How long a test waits for something that should happen at once. It is far longer than any load delays it.
const PATIENCE: Duration = Duration::from_mins(1);

/// A running engine. Dropping it closes its connections.
#[derive(Debug)]
pub struct FakeEngine {
    url: String,
    state: Arc<State>,
    task: JoinHandle<()>,
}

/// What one call is answered with. Without a script, the engine samples by its seed.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    reasoning: Option<String>,
    content: String,
    calls: Vec<(String, String)>,
    in_bytes: bool,
}

impl Answer {
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self { content: text.to_owned(), ..Self::default() }
    }

    /// The same answer with reasoning before it.
    #[must_use]
    pub fn thinking(self, reasoning: &str) -> Self {
        Self { reasoning: Some(reasoning.to_owned()), ..self }
    }

    /// The same answer with one more tool call. `arguments` is JSON text, which is kept as it is.
    #[must_use]
    pub fn call(mut self, name: &str, arguments: &str) -> Self {
        self.calls.push((name.to_owned(), arguments.to_owned()));
        self
    }

    /// The same answer, sampled as single bytes. When the text comes back in a later prompt, the tokenizer merges
    /// bytes, so the ids differ.
    #[must_use]
    pub fn in_bytes(self) -> Self {
        Self { in_bytes: true, ..self }
    }
}

/// What the engine does, and does wrong. A test changes it at any time; it holds for calls that begin afterwards.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "a test switches each on by itself")]
pub struct Switches {
    /// Which sampled answers belong together: the same seed samples the same answer to the same prompt.
    pub seed: u64,
    /// The label of the weights.
    pub weight_version: String,
    /// From this sampled id on, the weights have another label.
    pub version_change: Option<(usize, String)>,
    /// What SGLang says of it. vLLM says nothing.
    pub version_report: VersionReport,
    /// The longest prompt plus `max_tokens`.
    pub context_tokens: usize,
    /// The names of adapters, which the list of models has besides the model.
    pub adapters: Vec<String>,
    /// What is wrong with the ids.
    pub id_fault: IdFault,
    /// What is wrong with the log-probabilities.
    pub logprob_fault: LogprobFault,
    /// Reports log-probabilities at temperature 1, whatever the temperature is.
    pub raw_logprobs: bool,
    /// Scores given ids at temperature 1, whatever the temperature is, as vLLM does.
    pub raw_scores: bool,
    /// Logits are multiplied by this when given ids are scored, so that a teacher is another model than the engine that
    /// sampled the ids.
    pub sharpness: f64,
    /// Replaces the finish reason.
    pub finish_reason: Option<String>,
    /// Whether vLLM's endpoint of ids names the stop text that ended an answer. Old versions do not.
    pub names_stops: bool,
    /// The prompt that vLLM tells at its endpoint that renders, for any conversation. If absent, it has no such endpoint.
    pub rendered: Option<String>,
    /// Whether answers are parsed for thoughts and tool calls. vLLM does it only where it is started with a parser.
    pub parses: bool,
    /// Parses the parts of an answer without looking for thoughts and tool calls, but the whole with them.
    pub parses_parts_apart: bool,
    /// Writes the arguments of the calls of a whole answer with other spaces than the model, as vLLM's parsers do. It does
    /// not in parts.
    pub respells_calls: bool,
    /// How many of the next whole answers vLLM fails to parse.
    pub parse_failures: u32,
    /// How many of the next parts of answers vLLM fails to parse.
    pub part_failures: u32,
    /// Whether vLLM's endpoint of ids answers with events where it is asked to. What is in between may not.
    pub sends_events: bool,
    /// Holds the events of an answer back behind so many of its ids.
    pub hold_behind: Option<usize>,
    /// Refuses messages with a system message that is not the first, as templates of Qwen 3.5 and later do.
    pub one_system: bool,
    /// How many of the next calls are aborted after half of their ids.
    pub aborts: u32,
    /// Keeps calls waiting until it is off again.
    pub stall: bool,
    /// The same for requests that score given ids.
    pub stall_scores: bool,
    /// How many of the next connections are closed before the first byte of the answer.
    pub cuts_before_head: u32,
    /// How many of the next answers end in the middle of their body.
    pub cuts_in_body: u32,
    /// How many of the next calls are answered with this status and body instead.
    pub failures: Option<(u32, u16, String)>,
    /// Sends this many bytes of white space behind an answer.
    pub padding: usize,
}

impl Default for Switches {
    fn default() -> Self {
        Self {
            seed: 1,
            weight_version: "0".to_owned(),
            version_change: None,
            version_report: VersionReport::Spans,
            context_tokens: 65536,
            adapters: Vec::new(),
            id_fault: IdFault::None,
            logprob_fault: LogprobFault::None,
            raw_logprobs: false,
            raw_scores: false,
            sharpness: 1.0,
            finish_reason: None,
            names_stops: true,
            rendered: None,
            parses: true,
            parses_parts_apart: false,
            respells_calls: false,
            parse_failures: 0,
            part_failures: 0,
            sends_events: true,
            hold_behind: None,
            one_system: false,
            aborts: 0,
            stall: false,
            stall_scores: false,
            cuts_before_head: 0,
            cuts_in_body: 0,
            failures: None,
            padding: 0,
        }
    }
}

/// What an answer says about the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionReport {
    /// Which ids were sampled by which weights.
    Spans,
    /// The weights that sampled the last id.
    Last,
    Nothing,
}

/// What is wrong with the ids of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdFault {
    /// Nothing.
    None,
    /// Those of the prompt are missing.
    NoPrompt,
    /// The sampled ones are missing.
    NoSampled,
    /// A router has removed all fields that OpenAI's answers do not have.
    Router,
    /// The first sampled one is outside the vocabulary.
    Foreign,
    /// The engine renders the messages although it was sent ids.
    Rendered,
    /// The chat endpoint takes and tells no ids, as that of SGLang before 0.5.13. `/generate` does.
    NoneInChat,
}

/// What is wrong with the log-probabilities of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogprobFault {
    /// Nothing.
    None,
    /// The first is -9999.0.
    Sentinel,
    /// The last one is missing.
    Short,
    /// The last one is missing in `logprobs.content`, but not in `meta_info`.
    ShortContent,
    /// The first is 0.5.
    Positive,
    /// The first is null.
    Null,
    /// There are none.
    Missing,
    /// All sampled ids are two nats too unlikely, as if they were those of another request of the batch.
    Shifted,
}

/// A request that the engine has received.
#[derive(Clone, Debug)]
pub struct Received {
    pub path: String,
    /// The headers, with names in lower case.
    pub headers: BTreeMap<String, String>,
    /// The body as it was sent.
    pub text: String,
}

impl Received {
    /// The body as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }
}

/// What has happened so far.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// All requests in the order of their arrival.
    pub received: Vec<Received>,
    /// Connections that were opened.
    pub connections: usize,
    /// Calls that wait because of [`Switches::stall`] or [`Switches::hold_behind`].
    pub stalled: usize,
    /// Calls whose client has closed the connection before the answer.
    pub abandoned: usize,
    /// The ids of `/abort_request`.
    pub aborted: BTreeSet<String>,
    /// How often all waiting calls were aborted.
    pub aborts_of_all: u32,
    /// Ids that the engine has sampled in answers that were not aborted.
    pub sampled_tokens: usize,
}

impl Log {
    /// The calls of chat completions.
    pub fn calls(&self) -> impl Iterator<Item = &Received> {
        self.at("/v1/chat/completions")
    }

    /// The requests of a path.
    pub fn at(&self, path: &str) -> impl Iterator<Item = &Received> {
        self.received.iter().filter(move |received| received.path == path)
    }
}

#[derive(Debug)]
struct State {
    kind: EngineKind,
    /// Everything that a waiting call may wait for.
    switches: watch::Sender<Switches>,
    log: watch::Sender<Log>,
    scripts: Mutex<Vec<(String, Vec<Answer>)>>,
}

impl State {
    fn scripts(&self) -> MutexGuard<'_, Vec<(String, Vec<Answer>)>> {
        self.scripts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FakeEngine {
    /// Starts an engine on a free port of the loopback interface.
    pub async fn start(kind: EngineKind) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let address = listener.local_addr().expect("the listener is bound");
        let state = Arc::new(State {
            kind,
            switches: watch::Sender::new(Switches::default()),
            log: watch::Sender::new(Log::default()),
            scripts: Mutex::default(),
        });
        let task = tokio::spawn(server::run(listener, Arc::clone(&state)));
        Self { url: format!("http://{address}"), state, task }
    }

    /// The address.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Writes the files of the engine's model into a folder: `tokenizer.json`, its special tokens in
    /// `tokenizer_config.json`, and a template in `chat_template.jinja`.
    pub fn write_model(folder: &std::path::Path) -> std::io::Result<()> {
        std::fs::write(folder.join("tokenizer.json"), tokenizer::file().to_string())?;
        std::fs::write(folder.join("tokenizer_config.json"), tokenizer::config().to_string())?;
        std::fs::write(folder.join("chat_template.jinja"), template::JINJA)
    }

    /// Changes what the engine does.
    pub fn switch(&self, change: impl FnOnce(&mut Switches)) {
        self.state.switches.send_modify(change);
    }

    /// Says what is answered in conversations in which `key` occurs in a message of the user: the first answer where
    /// no message of the assistant follows that message, the second where one follows it, and so on. The answer depends
    /// on nothing else, so a repeated call gets the same one. Behind the last answer the engine samples by its seed.
    /// If several scripts could answer, the latest one does.
    pub fn script(&self, key: &str, answers: impl IntoIterator<Item = Answer>) {
        self.state.scripts().push((key.to_owned(), answers.into_iter().collect()));
    }

    /// What has happened so far.
    #[must_use]
    pub fn log(&self) -> Log {
        self.state.log.borrow().clone()
    }

    /// Waits until something has happened. Panics if it does not happen at all.
    pub async fn wait(&self, until: impl FnMut(&Log) -> bool) {
        let mut log = self.state.log.subscribe();
        let found = tokio::time::timeout(PATIENCE, log.wait_for(until)).await;
        let found = found.unwrap_or_else(|_| panic!("this never happened to the engine: {:?}", self.log()));
        drop(found.expect("the engine exists as long as its log"));
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}
