//! What a call takes in memory, measured with an allocator that counts, for bodies and answers of any shape.
//!
//! This is a program of its own with one test, because the allocator counts what the whole process does.

use std::{alloc::System, cell::Cell, fmt::Write as _};

use forebay_fake_engine::FakeEngine;
use forebay_gateway::{
    Dialect, Request,
    cancel::Cancellation,
    canonical::{Canonical, History},
    completion::AssistantMessage,
    exact::{Bounds, Family, Renderer, RendererOptions},
    structure::{VALUES_MAX, price},
    upstream::{EngineCall, EngineKind, Sampling, SpecialTokensInText, UpstreamOptions, engine_body, read_answer},
};
use peakmem_alloc::{INSTRUMENTED_SYSTEM, PeakMemAlloc, PeakMemAllocTrait as _};
use proptest::{
    prelude::*,
    sample::select,
    test_runner::{TestCaseError, TestRunner},
};
use serde_json::{Value, json};

#[global_allocator]
static MEMORY: &PeakMemAlloc<System> = &INSTRUMENTED_SYSTEM;

/// How many times its price a call may take.
const RATIO_MAX: usize = 8;

/// What any call may take, however small it is.
const FREE_BYTES: usize = 1 << 20;

/// The size of a large body, with which the service was attacked.
const LARGE_BYTES: usize = 16 << 20;

/// The size of a small body.
const SMALL_BYTES: usize = 64 << 10;

/// Ids that a session has room for by default.
const TOKENS_MAX: usize = 2_000_000;

/// How Qwen divides texts into words. Each digit is one.
const WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A body with a place that is filled with copies of a text.
#[derive(Clone, Debug)]
struct Shape {
    dialect: Dialect,
    before: String,
    copy: String,
    after: &'static str,
}

impl Shape {
    /// `place` is a body in which `@` stands for the copies.
    fn new(dialect: Dialect, place: &'static str, copy: impl Into<String>) -> Self {
        let (before, after) = place.split_once('@').expect("the body has a place");
        Self { dialect, before: before.to_owned(), copy: copy.into(), after }
    }

    fn body(&self, copies: usize) -> Vec<u8> {
        let mut body = String::with_capacity(self.before.len() + copies * (self.copy.len() + 1) + self.after.len());
        body.push_str(&self.before);
        for copy in 0..copies {
            // In a list, the copies have commas between them. A text has none.
            if copy > 0 && self.before.ends_with(['[', '{']) {
                body.push(',');
            }
            match self.copy.split_once('%') {
                // Names differ.
                Some((left, right)) => write!(body, "{left}{copy}{right}").expect("a string accepts all text"),
                None => body.push_str(&self.copy),
            }
        }
        body.push_str(self.after);
        body.into_bytes()
    }

    /// As many copies as these bytes have room for.
    fn filled(&self, bytes: usize) -> Vec<u8> {
        self.body(bytes / (self.copy.len() + 1))
    }
}

const CHAT: &str = r#"{"model":"m","messages":[@]}"#;
const PARTS: &str = r#"{"model":"m","messages":[{"role":"user","content":[@]}]}"#;
const TEXT: &str = r#"{"model":"m","messages":[{"role":"user","content":"@"}]}"#;
const STOP: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stop":[@]}"#;
const FIELDS: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":{@}}"#;
const TOP: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],@}"#;
const KWARGS: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"x":[@]}}"#;
const TOOLS: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[@]}"#;
const SCHEMA: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[@]}}}]}"#;
const CALLS: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":[@]}]}"#;
const ARGUMENTS: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{\"a\":[0@]}"}}]}]}"#;
const INPUT: &str = r#"{"model":"m","input":[@]}"#;
const BLOCKS: &str = r#"{"model":"m","max_tokens":9,"messages":[{"role":"user","content":[@]}]}"#;
const LEFT_OUT: &str =
    r#"{"model":"m","max_tokens":9,"messages":[{"role":"assistant","content":[@]},{"role":"user","content":"x"}]}"#;

/// The shapes with which the service was attacked, and their siblings.
fn attacks() -> Vec<(&'static str, Shape)> {
    let chat = |place, copy: &str| Shape::new(Dialect::Chat, place, copy);
    let call = r#"{"id":"c","function":{"name":"f","arguments":""}}"#;
    let tool = r#"{"type":"function","function":{"name":"f%"}}"#;
    vec![
        ("a text of digits", chat(TEXT, "7")),
        ("a text of words", chat(TEXT, "a ")),
        ("a text of one word", chat(TEXT, "a")),
        ("a text of escapes", chat(TEXT, "\\n")),
        ("a text of characters of four bytes", chat(TEXT, "\u{1f642} ")),
        ("unknown parts", chat(PARTS, r#"{"type":"x"}"#)),
        ("parts of text", chat(PARTS, r#"{"type":"text","text":""}"#)),
        ("messages that are numbers", chat(CHAT, "0")),
        ("messages without fields", chat(CHAT, "{}")),
        ("empty messages", chat(CHAT, r#"{"role":"user","content":""}"#)),
        ("messages with a tool call", chat(CHAT, &format!(r#"{{"role":"assistant","tool_calls":[{call}]}}"#))),
        ("messages with fields", chat(CHAT, r#"{"role":"user","content":"","a":0,"b":0}"#)),
        ("stop texts", chat(STOP, r#""a""#)),
        ("fields of an unknown object", chat(FIELDS, r#""%":0"#)),
        ("unknown fields", chat(TOP, r#""%":0"#)),
        ("arguments of the template", chat(KWARGS, "0")),
        ("tools", chat(TOOLS, tool)),
        ("tools that cannot run", chat(TOOLS, r#"{"type":"x"}"#)),
        ("a schema", chat(SCHEMA, "0")),
        ("tool calls", chat(CALLS, call)),
        ("arguments of a tool call", chat(ARGUMENTS, ",0")),
        ("arguments with objects", chat(ARGUMENTS, r#",{\"a\":0}"#)),
        ("items", Shape::new(Dialect::Responses, INPUT, r#"{"role":"user","content":""}"#)),
        ("items of calls", Shape::new(Dialect::Responses, INPUT, r#"{"type":"function_call","call_id":"","name":""}"#)),
        ("items that cannot run", Shape::new(Dialect::Responses, INPUT, r#"{"type":"mcp_call"}"#)),
        ("blocks", Shape::new(Dialect::Messages, BLOCKS, r#"{"type":"text","text":""}"#)),
        ("results", Shape::new(Dialect::Messages, BLOCKS, r#"{"type":"tool_result","tool_use_id":""}"#)),
        ("blocks that cannot run", Shape::new(Dialect::Messages, LEFT_OUT, r#"{"type":"mcp_tool_use"}"#)),
    ]
}

const ANSWER: &str = r#"{"choices":[@]}"#;
const OF_CHOICE: &str = r#"{"choices":[{"finish_reason":"stop","prompt_token_ids":[1],"token_ids":[1],@}]}"#;

/// Answers of an engine that are large by one list.
fn answers() -> Vec<(&'static str, Shape)> {
    let list = |place: &'static str, copy: &str| Shape::new(Dialect::Chat, place, copy);
    vec![
        ("choices", list(ANSWER, "{}")),
        ("unknown fields", list(OF_CHOICE, r#""%":0"#)),
        ("ids", list(r#"{"choices":[{"finish_reason":"stop","prompt_token_ids":[@]}]}"#, "0")),
        ("log-probabilities", list(r#"{"choices":[{"logprobs":{"content":[@]}}]}"#, r#"{"logprob":0}"#)),
        ("empty log-probabilities", list(r#"{"choices":[{"logprobs":{"content":[@]}}]}"#, "{}")),
        ("best tokens", list(r#"{"choices":[{"logprobs":{"content":[{"top_logprobs":[@]}]}}]}"#, "{}")),
        ("fields of meta_info", list(r#"{"choices":[{"meta_info":{"x":[@]}}]}"#, "0")),
        ("pairs", list(r#"{"choices":[{"meta_info":{"output_token_logprobs":[@]}}]}"#, "[0,0]")),
        ("tool calls", list(r#"{"choices":[{"message":{"tool_calls":[@]}}]}"#, r#"{"function":{"name":""}}"#)),
        ("a stop text", list(r#"{"choices":[{"matched_stop":[@]}]}"#, "0")),
        ("a label", list(r#"{"metadata":{"weight_version":[@]}}"#, "0")),
        ("spans", list(r#"{"metadata":{"weight_versions":[@]}}"#, r#"{"version":0,"start":0,"end":0}"#)),
    ]
}

/// The most memory that work takes.
fn peak(work: impl FnOnce()) -> usize {
    MEMORY.reset_peak_memory();
    work();
    MEMORY.get_peak_memory()
}

/// A tokenizer that takes each digit for a word.
fn renderer() -> Renderer {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    FakeEngine::write_model(folder.path()).expect("the folder can be written to");
    let tokenizer = folder.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).expect("the file is there");
    let mut file: Value = serde_json::from_str(&text).expect("it is JSON");
    let split = json!({"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false});
    let bytes = file["pre_tokenizer"].clone();
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
    std::fs::write(&tokenizer, file.to_string()).expect("the folder can be written to");
    let close = Some("<|im_end|>".to_owned());
    let family = Family { stops: vec!["<|im_end|>".to_owned()], close, trims: Vec::new() };
    let special_tokens_in_text = SpecialTokensInText::Allow;
    Renderer::load(&RendererOptions {
        tokenizer,
        template: None,
        family,
        special_tokens_in_text,
        kind: EngineKind::Sglang,
    })
    .expect("the model can be rendered")
}

/// All that is done with the body of a call, in the order of the service. Returns whether the body was accepted. `memory`
/// takes bytes besides the price of the body.
fn call(dialect: Dialect, body: Vec<u8>, renderer: &Renderer, memory: &dyn Fn(usize) -> bool) -> bool {
    let Ok(request) = dialect.parse(&body).and_then(Request::recorded) else { return false };
    let canonical = Canonical::of(&request);
    drop(body);
    let bounds = Bounds { tokens_max: TOKENS_MAX, cancellation: &Cancellation::default(), memory };
    // What cannot be rendered is refused.
    let _ = renderer.prompt_within(&request, 0, None, bounds);
    let call = EngineCall {
        request: &request,
        model: "m",
        sampling: Sampling::default(),
        max_tokens: request.max_tokens,
        exact: None,
        streaming: None,
        session: "s",
        rid: "r",
        version: &|| 0,
    };
    let options = UpstreamOptions::new("fake", EngineKind::Vllm, ["http://localhost"]).expect("the options are usable");
    drop(engine_body(&call, &options));
    let mut history = History::default();
    let record = history.record(&canonical);
    let text = record.to_json();
    history.add(0, &record, &AssistantMessage::default()).expect("the history is empty");
    drop(text);
    true
}

/// The shape with as many values as a body may have, unless it is a large body before.
fn dense(shape: &Shape) -> Vec<u8> {
    let values = |copies: usize| {
        let body = shape.body(copies);
        price(&body) - body.len()
    };
    let all = format!("[{}]", "0,".repeat(VALUES_MAX));
    let all = price(all.as_bytes()) - all.len();
    let of_copy = (values(1_001) - values(1)).div_ceil(1_000).max(1);
    shape.body(((all - values(1)) / of_copy).min(LARGE_BYTES / (shape.copy.len() + 1)))
}

/// Measures a shape. Returns a line about it, and whether it takes too much.
fn row(name: &str, shape: &Shape, body: &[u8], renderer: &Renderer) -> (String, bool) {
    let (accepted, taken) = (Cell::new(false), Cell::new(0));
    let memory = |bytes: usize| {
        taken.set(bytes.max(taken.get()));
        true
    };
    let peak = peak(|| accepted.set(call(shape.dialect, body.to_vec(), renderer, &memory)));
    let outcome = if accepted.get() { "accepted" } else { "refused" };
    let times = |bytes: usize| peak as f64 / bytes as f64;
    let (length, price) = (body.len(), price(body) + taken.get());
    let line = format!(
        "{name}: {length} bytes {outcome}, {peak} bytes of memory, {:.1} x body, {:.1} x price",
        times(length),
        times(price)
    );
    eprintln!("{line}");
    let most = RATIO_MAX * price + FREE_BYTES;
    // A large body is measured by its bytes.
    let is_large = length >= LARGE_BYTES / 2;
    (line, peak > most || is_large && peak > RATIO_MAX * length)
}

#[test]
fn a_call_takes_at_most_eight_times_its_price() {
    let renderer = renderer();
    let mut rows = Vec::new();
    for (name, shape) in attacks() {
        for bytes in [SMALL_BYTES, LARGE_BYTES] {
            rows.push(row(name, &shape, &shape.filled(bytes), &renderer));
        }
        let dense = dense(&shape);
        if dense.len() < LARGE_BYTES / 2 {
            rows.push(row(name, &shape, &dense, &renderer));
        }
    }
    let options =
        UpstreamOptions::new("fake", EngineKind::Sglang, ["http://localhost"]).expect("the options are usable");
    for (name, shape) in answers() {
        let body = shape.filled(LARGE_BYTES);
        let peak = peak(|| drop(read_answer(&body, 0, &options))) + body.len();
        let line = format!("an answer with {name}: {:.1} x body", peak as f64 / body.len() as f64);
        rows.push((line, peak > RATIO_MAX * body.len()));
    }
    let too_much: Vec<_> = rows.into_iter().filter_map(|(line, is_too_much)| is_too_much.then_some(line)).collect();
    assert!(too_much.is_empty(), "too much memory:\n{}", too_much.join("\n"));
    random_shapes(&renderer);
}

/// Bodies that are a random text many times, in random places.
fn random_shapes(renderer: &Renderer) {
    let mut runner =
        TestRunner::new(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() });
    let tested = runner.run(&shape(), |shape| {
        for body in [shape.filled(SMALL_BYTES), shape.filled(1 << 20), dense(&shape)] {
            let (line, is_too_much) = row("random", &shape, &body, renderer);
            if is_too_much {
                return Err(TestCaseError::fail(line));
            }
        }
        Ok(())
    });
    tested.unwrap_or_else(|error| panic!("{error}"));
}

fn shape() -> impl Strategy<Value = Shape> {
    let value = any::<u8>().prop_map(|_| "0".to_owned()).boxed();
    let leaf = prop_oneof![
        value,
        select(vec!["null", "1.5e9", r#""""#, r#""a b""#, r#""\n\"""#, "[]", "{}"]).prop_map(str::to_owned)
    ];
    let json = leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(|list| format!("[{}]", list.join(","))),
            proptest::collection::vec(inner, 0..4).prop_map(|list| {
                let entries: Vec<_> =
                    list.iter().enumerate().map(|(name, value)| format!("\"{name}\":{value}")).collect();
                format!("{{{}}}", entries.join(","))
            }),
        ]
    });
    let places = vec![
        (Dialect::Chat, CHAT, r#"{"role":"user","content":"","a":@}"#),
        (Dialect::Chat, CHAT, r#"{"role":"assistant","content":[{"type":"x","a":@}]}"#),
        (
            Dialect::Chat,
            CHAT,
            r#"{"role":"assistant","tool_calls":[{"id":"","function":{"name":"","arguments":{"a":@}}}]}"#,
        ),
        (Dialect::Chat, CHAT, r#"{"role":"tool","tool_call_id":"","content":"@"}"#),
        (Dialect::Chat, PARTS, r#"{"type":"x","a":@}"#),
        (
            Dialect::Chat,
            TOOLS,
            r#"{"type":"function","function":{"name":"f%","parameters":{"properties":{"a":{"default":@}}}}}"#,
        ),
        (Dialect::Chat, SCHEMA, "@"),
        (Dialect::Chat, KWARGS, "@"),
        (Dialect::Chat, FIELDS, r#""%":@"#),
        (Dialect::Chat, TEXT, "@"),
        (Dialect::Chat, ARGUMENTS, ",@"),
        (Dialect::Responses, INPUT, r#"{"type":"message","role":"user","content":"","a":@}"#),
        (Dialect::Responses, INPUT, r#"{"type":"function_call","call_id":"","name":"","arguments":"@"}"#),
        (Dialect::Messages, LEFT_OUT, r#"{"type":"tool_use","id":"","name":"","input":{"a":@}}"#),
        (Dialect::Messages, BLOCKS, r#"{"type":"tool_result","tool_use_id":"","content":"@"}"#),
    ];
    (select(places), json).prop_map(|((dialect, place, copy), value)| {
        // In a text, JSON is escaped.
        let in_text = copy.contains("\"@\"") || [TEXT, ARGUMENTS].contains(&place);
        let value = if in_text { value.replace('\\', "\\\\").replace('"', "\\\"") } else { value };
        Shape::new(dialect, place, copy.replace('@', &value))
    })
}
