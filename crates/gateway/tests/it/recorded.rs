//! What a real engine answered.
//!
//! A fake engine that was written together with the gateway proves only that both agree. The files in
//! `tests/recordings` have what vLLM 0.32.0 answered to the requests of these tests, with a small model of random
//! sentences. A request that was not recorded fails its test.
//!
//! With the address of an engine in `FOREBAY_ENGINE_PROCESSED` or `FOREBAY_ENGINE_RAW`, the tests whose engine has these
//! log-probabilities ask it instead, and write the files anew, to the folder `FOREBAY_RECORDINGS` if it is named.
//! `make outside NAME=engines` does that, and compares the fields with those of the files here.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    extract::{Request as HttpRequest, State},
    http::StatusCode,
};
use forebay_fake_engine::EngineKind;
use forebay_gateway::{
    Completion, Dialect, Request, Upstream,
    completion::{Finish, StopMatch},
    upstream::{EngineCall, ExactPrompt, Sampling, Scoring, UpstreamOptions, probe::LogprobScale},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::support::{call, parsed, plain_client};

/// `<|im_end|>` and `<|endoftext|>` of Qwen.
const STOPS: [i32; 2] = [151_645, 151_643];

/// "city rain" by the user, and the beginning of an answer without thoughts, as Qwen 3's template writes them.
const PROMPT: [i32; 14] =
    [151_644, 872, 198, 8_926, 11_174, 151_645, 198, 151_644, 77_091, 198, 151_667, 271, 151_668, 271];

/// How many ids of it are left without the empty thoughts.
const THINKS: usize = 10;

/// One request with its answer.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Exchange {
    path: String,
    request: Value,
    status: u16,
    answer: Value,
}

/// The engine of a file.
struct Recorded {
    file: PathBuf,
    /// The real one, if there is one.
    engine: Option<String>,
    exchanges: Mutex<VecDeque<Exchange>>,
    client: reqwest::Client,
}

impl Recorded {
    /// Starts it, and returns a client of it.
    async fn start(name: &str, logprobs: &str) -> (Arc<Self>, Upstream) {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/recordings/vllm-0.32.0");
        let engine = std::env::var(format!("FOREBAY_ENGINE_{logprobs}")).ok();
        let written = engine.as_ref().and_then(|_| std::env::var("FOREBAY_RECORDINGS").ok());
        let file = written.map_or(folder, PathBuf::from).join(format!("{name}.jsonl"));
        let text =
            if engine.is_some() { String::new() } else { std::fs::read_to_string(&file).expect("the recording") };
        let exchanges = text.lines().map(|line| serde_json::from_str(line).expect("an exchange")).collect();
        let recorded = Arc::new(Self { file, engine, exchanges: Mutex::new(exchanges), client: plain_client() });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("it has an address"));
        let router = Router::new().fallback(Self::answer).with_state(Arc::clone(&recorded));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let options = UpstreamOptions::new("recorded", EngineKind::Vllm, [url]).expect("the URL is usable");
        let options = UpstreamOptions { context_tokens: Some(4_096), ..options };
        (recorded, Upstream::new(options).expect("the options are usable"))
    }

    async fn answer(State(recorded): State<Arc<Self>>, request: HttpRequest) -> (StatusCode, String) {
        let path = request.uri().path().to_owned();
        let body = axum::body::to_bytes(request.into_body(), usize::MAX).await.expect("the body arrives");
        let mut request: Value = serde_json::from_slice(&body).expect("the gateway sends JSON");
        without_ids(&mut request);
        let exchange = match &recorded.engine {
            Some(engine) => recorded.ask(engine, path, request, body.to_vec()).await,
            None => recorded.find(&path, &request),
        };
        let status = StatusCode::from_u16(exchange.status).expect("a status");
        (status, exchange.answer.to_string())
    }

    /// The first answer to such a request that was not used yet.
    fn find(&self, path: &str, request: &Value) -> Exchange {
        let mut exchanges = self.exchanges.lock().expect("no test panics with it");
        let place = exchanges.iter().position(|exchange| exchange.path == path && exchange.request == *request);
        match place.and_then(|place| exchanges.remove(place)) {
            Some(exchange) => exchange,
            None => Exchange {
                path: path.to_owned(),
                request: Value::Null,
                status: 418,
                answer: json!({"error": {"message": format!("not recorded: {path} {request}")}}),
            },
        }
    }

    async fn ask(&self, engine: &str, path: String, request: Value, body: Vec<u8>) -> Exchange {
        let sent = self.client.post(format!("{engine}{path}")).header("content-type", "application/json").body(body);
        let response = sent.send().await.expect("the engine answers");
        let status = response.status().as_u16();
        let mut answer: Value = serde_json::from_str(&response.text().await.expect("a body")).expect("JSON");
        answer.as_object_mut().expect("an object").retain(|_, value| !value.is_null());
        let exchange = Exchange { path, request, status, answer };
        self.exchanges.lock().expect("no test panics with it").push_back(exchange.clone());
        exchange
    }

    /// Writes what was recorded, or checks that all of it was used.
    fn finish(&self) {
        let exchanges = self.exchanges.lock().expect("no test panics with it");
        if self.engine.is_none() {
            assert!(exchanges.is_empty(), "recorded, but not asked for: {exchanges:?}");
            return;
        }
        let lines = exchanges.iter().map(|exchange| serde_json::to_string(exchange).expect("it is written") + "\n");
        std::fs::create_dir_all(self.file.parent().expect("a folder")).expect("the folder is made");
        std::fs::write(&self.file, lines.collect::<String>()).expect("the file is written");
    }
}

/// Removes the ids of requests, which differ each time.
fn without_ids(request: &mut Value) {
    for place in ["", "/generate_response"] {
        if let Some(object) = request.pointer_mut(place).and_then(Value::as_object_mut) {
            object.remove("request_id");
        }
    }
}

fn request(thinks: bool, stop: &[&str]) -> Request {
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": "city rain"}],
        "max_tokens": 60,
        "stop": stop,
        "chat_template_kwargs": {"enable_thinking": thinks},
    });
    parsed(Dialect::Chat, &body)
}

async fn complete(upstream: &Upstream, thinks: bool, stop: &[&str]) -> Completion {
    complete_at(upstream, 0.8, thinks, stop).await
}

async fn complete_at(upstream: &Upstream, temperature: f64, thinks: bool, stop: &[&str]) -> Completion {
    let request = request(thinks, stop);
    let text = |ids: &[i32]| if ids.iter().all(|&id| id >= 151_643) { String::new() } else { "text".to_owned() };
    let ids = if thinks { &PROMPT[..THINKS] } else { &PROMPT };
    let prompt = ExactPrompt { ids, stop_ids: &STOPS, text: &text };
    let sampling = Sampling { temperature, ..Sampling::default() };
    let call = EngineCall { model: "qwen", exact: Some(prompt), sampling, ..call(&request) };
    upstream.complete(&call).await.expect("the engine answers").completion
}

#[tokio::test]
async fn the_token_that_ends_an_answer_is_not_in_its_text() {
    let (recorded, upstream) = Recorded::start("stop_token", "PROCESSED").await;
    let mut ended = 0;
    for _ in 0..12 {
        let completion = complete(&upstream, false, &[]).await;
        let text = completion.message.content.unwrap_or_default();
        assert!(!text.contains("<|im_end|>") && !text.contains("<|endoftext|>"), "{text:?}");
        if completion.finish == Finish::Stop {
            let last = completion.tokens.last().copied().expect("the token is recorded");
            assert!(STOPS.contains(&last));
            assert_eq!(completion.stop_matched, Some(StopMatch::Token(last)));
            ended += 1;
        }
    }
    assert!(ended >= 6, "most answers end by themselves: {ended}");
    recorded.finish();
}

#[tokio::test]
async fn any_number_of_stop_texts_is_cut_from_answers_and_thoughts() {
    const TEXTS: [&str; 5] = [" rain", " sun", " the", " city", " number"];
    let (recorded, upstream) = Recorded::start("stop_texts", "PROCESSED").await;
    let (mut stopped, mut in_thoughts) = (0, 0);
    for _ in 0..24 {
        let Completion { message, stop_matched, .. } = complete(&upstream, true, &TEXTS).await;
        let texts = [message.reasoning.as_deref().unwrap_or(""), message.content.as_deref().unwrap_or("")];
        assert!(TEXTS.iter().all(|stop| texts.iter().all(|text| !text.contains(stop))), "{texts:?}");
        if let Some(StopMatch::Text(stop)) = stop_matched {
            assert!(TEXTS.contains(&stop.as_str()));
            stopped += 1;
            in_thoughts += u32::from(message.content.is_none());
        }
    }
    assert!(stopped >= 6 && in_thoughts > 0, "{stopped} {in_thoughts}");
    recorded.finish();
}

#[tokio::test]
async fn tool_calls_are_those_that_the_engine_finds_in_the_ids() {
    let (recorded, upstream) = Recorded::start("tool_calls", "PROCESSED").await;
    // The tools that `python/tests/engines/tiny.py` trains the model with.
    let tool = |name: &str, description: &str, argument: &str, others: Value| {
        let mut properties = others;
        properties[argument] = json!({"type": "string"});
        let parameters = json!({"type": "object", "properties": properties, "required": [argument]});
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}})
    };
    let days = json!({"days": {"type": "integer", "default": 1}});
    let tools = [tool("weather", "The weather.", "city", days), tool("run", "Runs a command.", "command", json!({}))];
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": "city rain"}],
        "max_tokens": 60,
        "tools": tools,
    });
    let request = parsed(Dialect::Chat, &body);
    // The engine renders the prompt for the first call, and is sent its ids for the others.
    let observed = EngineCall { model: "qwen", ..call(&request) };
    let mut completions = vec![upstream.complete(&observed).await.expect("the engine answers").completion];
    let ids = completions[0].prompt_tokens.clone();
    let text = |_: &[i32]| "text".to_owned();
    for _ in 0..11 {
        let prompt = ExactPrompt { ids: &ids, stop_ids: &STOPS, text: &text };
        let exact = EngineCall { exact: Some(prompt), ..observed };
        completions.push(upstream.complete(&exact).await.expect("the engine answers").completion);
    }
    let mut called = 0;
    for Completion { message, finish, .. } in &completions {
        let content = message.content.as_deref().unwrap_or_default();
        assert!(!content.contains("<|im_end|>"), "{content:?}");
        assert_eq!(*finish == Finish::ToolCalls, !message.tool_calls.is_empty());
        for wanted in &message.tool_calls {
            assert!(!wanted.id.is_empty() && !wanted.name.is_empty());
            assert!(serde_json::from_str::<Value>(&wanted.arguments).expect("JSON").is_object());
            called += 1;
        }
    }
    assert!(called > 0, "some answers call a tool");
    recorded.finish();
}

#[tokio::test]
async fn the_scale_of_log_probabilities_does_not_depend_on_what_was_sampled() {
    for (logprobs, expected) in [("RAW", LogprobScale::Raw), ("PROCESSED", LogprobScale::Scaled)] {
        let (recorded, upstream) = Recorded::start(&format!("scale_{}", logprobs.to_lowercase()), logprobs).await;
        for _ in 0..10 {
            assert_eq!(upstream.probe_temperature("qwen").await, Ok(expected.clone()));
        }
        recorded.finish();
    }
}

#[tokio::test]
async fn what_was_reported_fits_the_scores_of_the_same_ids_and_that_of_another_temperature_does_not() {
    let (recorded, upstream) = Recorded::start("scores", "PROCESSED").await;
    for (sampled, assumed) in [(1.0, 1.0), (0.7, 0.7), (1.5, 1.5), (1.0, 0.3)] {
        let (mut sum, mut count, mut worst) = (0.0, 0, 0.0_f64);
        for _ in 0..2 {
            let completion = complete_at(&upstream, sampled, true, &[]).await;
            let ids = [&completion.prompt_tokens[..], &completion.tokens].concat();
            let scoring = Scoring {
                ids: &ids,
                prompt_len: completion.prompt_tokens.len(),
                temperature: assumed,
                model: "qwen",
                session: "session",
                rid: "rid",
            };
            // Its scores do not contain the temperature, although its log-probabilities do.
            let ranges = upstream.rescore(&scoring, &LogprobScale::Raw).await.expect("the engine scores");
            for (value, range) in completion.logprobs.iter().zip(ranges.expect("they bound the values")) {
                (sum, count, worst) = (sum + range.distance(*value), count + 1, worst.max(range.distance(*value)));
            }
        }
        let mean = sum / f64::from(count);
        assert_eq!(mean < 0.05 && worst < 0.05, (sampled - assumed).abs() < f64::EPSILON, "{sampled} {assumed} {mean}");
    }
    recorded.finish();
}
