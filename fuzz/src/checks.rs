//! Properties that every parser has for every input: it ends soon, it never panics, and the same content gives the same
//! result.
//!
//! There is one function per fuzz target, and each takes bytes. `tests/it/fuzz.rs` includes this file and runs it on
//! the seeds.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    time::{Duration, Instant},
};

use forebay::config::Config;
use forebay_api::{
    http::{body::BodyLimits, budgets::ByteBudgets},
    parsers,
};
use forebay_domain::{
    assemble::{After, Assembly, Call, CallSet},
    formats::{canonical::ContentDigest, payload::Payload},
    ids::{GroupId, POLICY_NAME_BYTES_MAX, PolicyName, RolloutId},
    ingest::new_rollout::NewRollout,
    rules::{
        Rules,
        filter::{Filters, reward::RewardExpression},
    },
    surrogates::LoneSurrogates,
    trajectory::{Trajectory, TrajectoryLimits, VIOLATIONS_MAX},
};
use forebay_formats::{Importer, Options, Record};
use forebay_gateway::{
    Completion, Dialect, Request,
    canonical::Canonical,
    completion::{AssistantMessage, Finish, ToolCall, Usage},
    dialect::{Envelope, Events},
    lineage::AgentLabel,
    upstream::{self, EngineKind, UpstreamOptions},
};
use forebay_wire as wire;
use http::{HeaderMap, HeaderName, HeaderValue};
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// The limits are small, so that a fuzzer reaches them.
const LIMITS: TrajectoryLimits = TrajectoryLimits {
    tokens_max: 4_096,
    segments_max: 64,
    metadata_bytes_max: 4_096,
    lone_surrogates: LoneSurrogates::Replace,
};

const BODY_LIMITS: BodyLimits = BodyLimits {
    body_bytes_max: 1 << 20,
    budgets: ByteBudgets { posts: 4 << 20, control: 4 << 20, samples: 4 << 20 },
    read_timeout: Duration::from_secs(1),
};

/// Checking an expression takes milliseconds. The bound is larger because instrumentation, sanitizers and busy machines
/// slow it down.
const FILTER_TIME_MAX: Duration = Duration::from_secs(10);

/// An accepted trajectory can be packed, and unpacking returns what was sent.
pub fn trajectory(bytes: &[u8]) {
    let Ok(sent) = serde_json::from_slice::<wire::Trajectory>(bytes) else { return };
    let parsed = match Trajectory::parse(sent.clone(), &LIMITS) {
        Ok(parsed) => parsed,
        Err(violations) => {
            assert!((1..=VIOLATIONS_MAX).contains(&violations.len()), "a refusal has reasons, and not too many");
            return;
        }
    };
    comes_back(&Payload::pack(&parsed), &sent);
    // The service accepts its own JSON of the trajectory and reads the same content from it.
    if sent.rollout_id.is_some() {
        let written = serde_json::to_vec(&sent).expect("a trajectory is JSON");
        let again: wire::Trajectory = serde_json::from_slice(&written).expect("what is written can be read");
        let again = Trajectory::parse(again, &LIMITS).expect("what was taken is taken again");
        assert_eq!(content(again), content(parsed));
    }
}

fn content(trajectory: Trajectory) -> ContentDigest {
    NewRollout::pack(trajectory).content
}

fn comes_back(payload: &Payload, sent: &wire::Trajectory) {
    let unpacked = payload.unpack().expect("what was packed unpacks");
    let text = |raw: &Option<Box<RawValue>>| raw.as_ref().map(|raw| raw.get().to_owned());
    assert_eq!(text(&unpacked.messages), text(&sent.messages));
    assert_eq!(text(&unpacked.metadata), text(&sent.metadata));
    assert_eq!(unpacked.environment, sent.environment);
    assert_eq!(unpacked.status, sent.status);
    assert_eq!(unpacked.sampling, sent.sampling);
    if !sent.turns.is_empty() {
        let ids = sent.turns.iter().map(|turn| turn.tokens.len()).sum::<usize>();
        let trained = unpacked.segments.iter().flat_map(|segment| &segment.loss_mask).filter(|bit| **bit == 1).count();
        assert!(trained <= ids, "no sampled id is trained twice");
        return;
    }
    let lengthless = |segment: &wire::Segment| wire::Segment { response_length: None, ..segment.clone() };
    assert_eq!(unpacked.segments, sent.segments.iter().map(lengthless).collect::<Vec<_>>());
}

/// A JSON body is accepted, or refused with a problem of bounded length that blames the client. If the fast parser
/// accepts a body, the general parser accepts it too and reads the same.
pub fn bundle(bytes: &[u8]) {
    if let Some((quick, general)) = parsers::readings(bytes, &LIMITS) {
        let written = |read: &Vec<wire::Trajectory>| serde_json::to_string(read).expect("trajectories are JSON");
        assert_eq!(Some(written(&quick)), general.as_ref().map(written));
    }
    match parsers::trajectories(bytes, &LIMITS) {
        Ok(trajectories) => assert!(!trajectories.is_empty(), "a body without a trajectory is refused"),
        Err(problem) => {
            assert!(matches!(problem.status, 400 | 422), "{problem:?}");
            assert!(problem.errors.len() <= VIOLATIONS_MAX);
        }
    }
}

/// An Arrow stream is accepted, or refused with a problem that blames the client. Panics of its reader are all caught.
pub fn arrow(bytes: &[u8]) {
    match parsers::arrow(bytes, &LIMITS) {
        Ok(trajectories) => assert!(!trajectories.is_empty(), "a body without a trajectory is refused"),
        Err(problem) => assert!(matches!(problem.status, 400 | 422), "{problem:?}"),
    }
}

/// Lines are numbered in order, and together they contain everything except line ends and blanks.
pub fn lines(bytes: &[u8]) {
    let Ok(lines) = parsers::lines(bytes) else { return };
    let mut last = 0;
    for (number, line) in &lines {
        assert!(*number > last, "numbers ascend");
        assert!(!line.contains(&b'\n'), "a line is one line");
        last = *number;
        bundle(line);
    }
    let held = |bytes: &[u8]| bytes.iter().filter(|byte| !byte.is_ascii_whitespace()).count();
    assert_eq!(lines.iter().map(|(_, line)| held(line)).sum::<usize>(), held(bytes));
}

/// Every document of a source becomes rollouts with ids or is refused with reasons, and the same source gives the same
/// rollouts again. The first line of the bytes is the name of the format.
pub fn import(bytes: &[u8]) {
    let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else { return };
    let Some(format) = std::str::from_utf8(&bytes[..end]).ok().and_then(forebay_formats::format) else { return };
    let read = || {
        let options = Options { tokens_max: LIMITS.tokens_max, ..Options::default() };
        let mut importer = Importer::new(format, &options, &bytes[end + 1..]);
        let mut records: Vec<Record> = Vec::new();
        while let Some(record) = importer.next_record().expect("a slice can be read") {
            records.push(record);
        }
        records
    };
    let (first, second) = (read(), read());
    assert_eq!(format!("{first:?}"), format!("{second:?}"));
    for record in first {
        match record.outcome {
            Err(violations) => assert!((1..=VIOLATIONS_MAX).contains(&violations.len()), "a refusal has reasons"),
            Ok(imported) => imported.trajectories.into_iter().for_each(imported_rollout),
        }
    }
}

/// A rollout of an import has an id, and the service takes it or says what is wrong.
fn imported_rollout(sent: wire::Trajectory) {
    assert!(sent.rollout_id.is_some(), "a second import is recognised by the id");
    let tokens: usize = sent.segments.iter().map(|segment| segment.tokens.len()).sum();
    assert!(tokens <= LIMITS.tokens_max, "the segments of a rollout are bounded");
    serde_json::to_vec(&sent).expect("a trajectory is JSON");
    if let Err(violations) = Trajectory::parse(sent, &LIMITS) {
        assert!((1..=VIOLATIONS_MAX).contains(&violations.len()), "a refusal has reasons, and not too many");
    }
}

/// A compressed body is expanded within its limits, or refused. The first byte selects the coding.
pub fn expand(bytes: &[u8]) {
    let Some((coding, sent)) = bytes.split_first() else { return };
    let coding = if coding % 2 == 0 { "gzip" } else { "zstd" };
    match parsers::expand(sent, coding, BODY_LIMITS) {
        Ok(expanded) => assert!(expanded.len() <= BODY_LIMITS.body_bytes_max),
        Err(problem) => assert!(matches!(problem.status, 400 | 413), "{problem:?}"),
    }
}

/// The same JSON in another spelling has the same content digest.
pub fn canonical(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(raw) = serde_json::from_str::<Box<RawValue>>(text) else { return };
    // Escaping turns one character into up to twelve.
    if raw.get().len() > 1_024 {
        return;
    }
    let content_of = |raw: Box<RawValue>| {
        let sent = wire::Trajectory {
            rollout_id: Some("r".to_owned()),
            status: wire::Status::Aborted,
            messages: raw.get().starts_with('[').then(|| raw.clone()),
            metadata: raw.get().starts_with('{').then_some(raw),
            ..wire::Trajectory::default()
        };
        let limits = TrajectoryLimits { metadata_bytes_max: usize::MAX, ..LIMITS };
        Trajectory::parse(sent, &limits).ok().map(content)
    };
    let mut other = String::new();
    if respell(&raw, 0, &mut other).is_none() {
        return;
    }
    let other = RawValue::from_string(other).expect("the other spelling is JSON");
    assert_eq!(content_of(raw), content_of(other.clone()), "{}", other.get());
}

/// Writes JSON with blanks, object entries in reverse order and every character escaped. Returns `None` if the text is
/// nested too deeply or is not JSON, because it then cannot be compared.
fn respell(raw: &RawValue, depth: usize, other: &mut String) -> Option<()> {
    let text = raw.get();
    match text.as_bytes().first()? {
        _ if depth > 100 => return None,
        b'[' => {
            let items: Vec<Box<RawValue>> = serde_json::from_str(text).ok()?;
            other.push_str("[ ");
            for (index, item) in items.iter().enumerate() {
                other.push_str(if index == 0 { "" } else { "\r\n, " });
                respell(item, depth + 1, other)?;
            }
            other.push_str("\t]");
        }
        b'{' => {
            let Entries(entries) = serde_json::from_str(text).ok()?;
            other.push('{');
            for (index, (key, value)) in entries.iter().rev().enumerate() {
                other.push_str(if index == 0 { "" } else { " ,\n" });
                escape(key, other);
                other.push_str(" : ");
                respell(value, depth + 1, other)?;
            }
            other.push('}');
        }
        b'"' => escape(&serde_json::from_str::<String>(text).ok()?, other),
        _ => other.push_str(text),
    }
    Some(())
}

fn escape(text: &str, other: &mut String) {
    other.push('"');
    for unit in text.encode_utf16() {
        let _ = write!(other, "\\u{unit:04X}");
    }
    other.push('"');
}

/// An object's entries in order, including duplicates.
struct Entries(Vec<(String, Box<RawValue>)>);

impl<'de> serde::Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Entries;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}

/// The most ids of all prompts of a set of calls, so that a set takes little time.
const PROMPT_IDS_MAX: usize = 1 << 14;

/// A call that is made from bytes.
#[derive(Clone, Default)]
struct Recorded {
    prompt: Vec<i32>,
    ids: Vec<i32>,
    logprobs: Vec<f32>,
    versions: Vec<wire::VersionSpan>,
    after: Option<(After, usize)>,
    flags: u8,
}

impl Recorded {
    fn full(&self) -> Vec<i32> {
        [&self.prompt[..], &self.ids].concat()
    }
}

/// Reads calls that continue, repeat or nearly repeat each other: four bytes for each, and then its ids.
fn recorded(mut bytes: &[u8]) -> Vec<Recorded> {
    let mut calls: Vec<Recorded> = Vec::new();
    let mut held = 0;
    while let Some((&[how, pick, lengths, flags], rest)) = bytes.split_first_chunk() {
        let (tail, rest) = rest.split_at(rest.len().min(usize::from(lengths % 16)));
        let (ids, rest) = rest.split_at(rest.len().min(usize::from(lengths / 16)));
        bytes = rest;
        let few = |ids: &[u8]| ids.iter().map(|id| i32::from(id % 4)).collect::<Vec<_>>();
        let number = calls.len();
        let picked = usize::from(pick).checked_rem(number).map(|picked| (picked, &calls[picked]));
        let common = match picked {
            None => Vec::new(),
            Some((_, call)) => match how % 4 {
                0 => Vec::new(),
                1 => call.full(),
                2 => call.full().split_last().map(|(_, rest)| rest.to_vec()).unwrap_or_default(),
                _ => call.prompt.clone(),
            },
        };
        let is_follower = how % 4 == 1 || (how % 4 == 2 && picked.is_some_and(|(_, call)| !call.ids.is_empty()));
        let after = picked.filter(|_| is_follower && how >= 128);
        let after = after.map(|(call, _)| (After { call, trimmed: how % 4 == 2 }, common.len()));
        let mut prompt = [common, few(tail)].concat();
        if prompt.is_empty() {
            prompt.push(0);
        }
        held += prompt.len();
        if held > PROMPT_IDS_MAX {
            break;
        }
        let ids = few(ids);
        let version = wire::VersionSpan(number as i64, 0, ids.len() as i64);
        calls.push(Recorded {
            logprobs: (0..ids.len()).map(|place| -((number * 16 + place) as f32)).collect(),
            versions: if ids.is_empty() { Vec::new() } else { vec![version] },
            prompt,
            ids,
            after,
            flags,
        });
    }
    calls
}

fn assembled(calls: &[Recorded], retries: wire::Retries, backwards: bool) -> (Assembly, Vec<wire::Segment>) {
    let name = |call: usize| if backwards { calls.len() - 1 - call } else { call };
    let mut given: Vec<Call<'_>> = calls
        .iter()
        .enumerate()
        .map(|(number, call)| Call {
            ended: number as u64,
            after: call.after.map(|(After { call, trimmed }, _)| After { call: name(call), trimmed }),
            prompt: &call.prompt[call.after.map_or(0, |(_, common)| common)..],
            ids: &call.ids,
            logprobs: Some(&call.logprobs),
            versions: Some(&call.versions),
            stopped_on_token: call.flags & 1 > 0,
            agent: [None, Some("a"), Some("b"), None][usize::from(call.flags / 2 % 4)],
            delivered: call.flags & 8 == 0,
            abandoned: call.flags & 64 > 0,
            retry_count: u32::from(call.flags >> 4 & 1),
            reward: (call.flags & 32 > 0).then_some(number as f64),
            state_key: None,
        })
        .collect();
    if backwards {
        given.reverse();
    }
    let set = CallSet::new(given).expect("every call follows an earlier one");
    let assembly = set.assemble(retries);
    let segments = assembly.chains.iter().map(|chain| set.segment(chain)).collect();
    (assembly, segments)
}

/// Every token that is trained is behind the ids that it was sampled behind, and is trained once; every call is in a
/// segment or dropped; the order in which calls are given changes nothing.
pub fn calls(bytes: &[u8]) {
    let calls = recorded(bytes);
    for retries in [wire::Retries::Transport, wire::Retries::Last, wire::Retries::Keep] {
        let (assembly, segments) = assembled(&calls, retries, false);
        assert_eq!(segments, assembled(&calls, retries, true).1);
        let owned: usize = assembly.chains.iter().map(|chain| chain.calls.len()).sum();
        assert_eq!(owned + assembly.dropped.len(), calls.len());
        let mut trained = BTreeSet::new();
        let mut sampled = 0;
        for (chain, segment) in assembly.chains.iter().zip(&segments) {
            assert_eq!((chain.tokens, chain.response), (segment.tokens.len(), segment.loss_mask.len()));
            sampled += chain.calls.iter().map(|&call| calls[call].ids.len()).sum::<usize>();
            let logprobs = segment.logprobs.as_ref().expect("every call has log-probabilities");
            let versions = segment.versions.as_ref().expect("every call has a version");
            let mut end = 0;
            for &wire::VersionSpan(_, start, length) in versions {
                assert!(start == end && length > 0, "spans tile the response");
                end += length;
            }
            assert_eq!(end as usize, chain.response);
            let rewards = || calls.iter().enumerate().map(|(call, of)| (of.flags & 32 > 0).then_some(call as f64));
            assert_eq!(segment.turns.is_some(), rewards().any(|reward| reward.is_some()));
            for (turn, &call) in segment.turns.iter().flatten().zip(&chain.calls) {
                assert_eq!(turn.reward, rewards().nth(call).expect("the chain has calls of the set"));
                let of_turn = &segment.loss_mask[turn.start as usize..(turn.start + turn.length) as usize];
                assert!(turn.length > 0 && of_turn.iter().all(|bit| *bit == 1), "a turn is what a call sampled");
            }
            let of_turns: i64 = segment.turns.iter().flatten().map(|turn| turn.length).sum();
            let ones: i64 = segment.loss_mask.iter().map(|bit| i64::from(*bit)).sum();
            assert!(segment.turns.is_none() || of_turns == ones, "every trained token is of a turn");
            for place in (0..chain.response).filter(|&place| segment.loss_mask[place] == 1) {
                let number = -logprobs[place] as usize;
                let (call, index) = (&calls[number / 16], number % 16);
                let at = chain.tokens - chain.response + place;
                assert_eq!(segment.tokens[..=at], [&call.prompt[..], &call.ids[..=index]].concat());
                assert!(trained.insert(number), "token {index} of call {} is trained twice", number / 16);
            }
        }
        assert_eq!(trained.len() + assembly.trimmed, sampled);
    }
}

/// A payload that was never packed is reported as damaged and causes no panic.
pub fn unpack(bytes: &[u8]) {
    let _ = Payload::claimed(bytes.to_vec()).unpack();
}

/// An expression is compiled and evaluated on trial, or refused, within its time.
pub fn filter(bytes: &[u8]) {
    let Some((choice, when)) = bytes.split_first() else { return };
    let Ok(when) = std::str::from_utf8(when) else { return };
    let scope = if choice % 2 == 0 { wire::FilterScope::Rollout } else { wire::FilterScope::Group };
    let rule =
        wire::FilterRule { name: "fuzzed".to_owned(), scope, when: when.to_owned(), action: wire::FilterAction::Drop };
    let started = Instant::now();
    let compiled = Filters::compile(&[rule]);
    assert!(started.elapsed() < FILTER_TIME_MAX, "took {:?}", started.elapsed());
    if let Err(violations) = compiled {
        assert!(!violations.is_empty(), "a refusal has reasons");
    }
    let started = Instant::now();
    let compiled = RewardExpression::compile(when);
    assert!(started.elapsed() < FILTER_TIME_MAX, "took {:?}", started.elapsed());
    if let Err(messages) = compiled {
        assert!(!messages.is_empty(), "a refusal has reasons");
    }
}

/// Accepted rules are accepted again in the form in which the service writes them.
pub fn rules(bytes: &[u8]) {
    let Ok(sent) = serde_json::from_slice::<wire::PolicyRules>(bytes) else { return };
    let Ok(rules) = Rules::parse(sent.clone()) else { return };
    let written = serde_json::to_vec(&*rules).expect("rules are JSON");
    let again: wire::PolicyRules = serde_json::from_slice(&written).expect("what is written can be read");
    assert_eq!(again, sent);
    assert!(Rules::parse(again).is_ok(), "what was taken is taken again");
}

/// A configuration is accepted, or refused with a reason.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(error) = Config::parse(text) {
        assert!(!error.to_string().is_empty(), "a refusal has a reason");
    }
}

/// The body of a control call is accepted, or refused with a problem that blames the client.
pub fn control(bytes: &[u8]) {
    for problem in parsers::control(bytes) {
        assert!(matches!(problem.status, 400 | 422), "{problem:?}");
    }
}

/// A query is accepted, or refused with a problem that blames the client.
pub fn query(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for problem in parsers::query(text) {
        assert_eq!(problem.status, 422, "{problem:?}");
    }
}

/// Accepted names need no encoding in a path and are not resolved as path segments such as `..`. Accepted ids contain
/// no line break.
pub fn ids(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(name) = PolicyName::parse(text) {
        assert_eq!(name.as_str(), text);
        assert!((1..=POLICY_NAME_BYTES_MAX).contains(&text.len()) && text != "." && text != "..");
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)));
    }
    assert_eq!(RolloutId::parse(text).is_ok(), GroupId::parse(text).is_ok());
    if let Ok(id) = RolloutId::parse(text) {
        assert_eq!(id.as_str(), text);
        assert!(!text.chars().any(char::is_control));
        assert_eq!(id.key(), GroupId::from(&id).key());
    }
}

/// See [`dialect`].
pub fn chat(bytes: &[u8]) {
    dialect(Dialect::Chat, bytes);
}

/// See [`dialect`].
pub fn messages(bytes: &[u8]) {
    dialect(Dialect::Messages, bytes);
}

/// See [`dialect`].
pub fn responses(bytes: &[u8]) {
    dialect(Dialect::Responses, bytes);
}

/// The body of a call is accepted, or refused with an error that blames the agent, as JSON of bounded length. A call that
/// is accepted can be compared with others and recorded, and its answer can be written as a body and as events.
fn dialect(dialect: Dialect, bytes: &[u8]) {
    let request = match dialect.parse(bytes).and_then(Request::recorded) {
        Ok(request) => request,
        Err(error) => {
            let reply = dialect.error(&error);
            assert!(matches!(reply.status, 400 | 404 | 413 | 422), "{error:?}");
            let body: serde_json::Value = serde_json::from_slice(&reply.body).expect("an error is JSON");
            assert!(body["error"]["message"].is_string(), "{body}");
            assert!(reply.body.len() < 4_096 + 8 * bytes.len(), "{body}");
            return;
        }
    };
    assert!(is_name(&request.model), "{:?} cannot be recorded", request.model);
    assert_eq!(Canonical::of(&request).messages().len(), request.messages.len());
    let (id, model) = ("c1".to_owned(), request.model.clone());
    let tools = request.client_tools.clone().into();
    let envelope = Envelope { id, created_s: 1, model, stream_usage: request.stream_usage, tools };
    let completion = answer();
    let body = dialect.answer(&completion, &envelope);
    assert!(serde_json::from_slice::<serde_json::Value>(&body).is_ok(), "an answer is JSON");
    let mut events = Events::new(dialect);
    assert!(!events.alive(&envelope).is_empty() && !events.answer(&completion, &envelope).is_empty());
}

/// What the store takes as a name.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= 256 && !text.chars().any(char::is_control)
}

/// An answer with text, reasoning and a tool call.
fn answer() -> Completion {
    Completion {
        prompt_tokens: vec![1, 2],
        tokens: vec![3],
        logprobs: vec![-0.5],
        spans: Vec::new(),
        version_assumed: true,
        finish: Finish::ToolCalls,
        stop_matched: None,
        message: AssistantMessage {
            reasoning: Some("Because.".to_owned()),
            content: Some("\u{1f600} text".to_owned()),
            tool_calls: vec![ToolCall {
                id: "call_1".to_owned(),
                name: "run".to_owned(),
                arguments: "{\"a\":1}".to_owned(),
            }],
        },
        usage: Usage { prompt_tokens: 2, completion_tokens: 1, ..Usage::default() },
        system_fingerprint: None,
    }
}

/// An engine's answer is refused, or can be recorded: there is a log-probability for each id, ids are those of a
/// vocabulary, and the versions tile them.
pub fn engine(bytes: &[u8]) {
    for kind in [EngineKind::Sglang, EngineKind::Vllm, EngineKind::Openai] {
        let options = UpstreamOptions::new("fuzzed", kind, ["http://127.0.0.1:1"]).expect("the address is valid");
        let Ok(completion) = upstream::read_answer(bytes, 7, &options) else { continue };
        let Completion { prompt_tokens, tokens, logprobs, spans, message, .. } = &completion;
        assert!(!prompt_tokens.is_empty(), "a prompt has ids");
        assert!(prompt_tokens.iter().chain(tokens).all(|&id| id >= 0));
        assert_eq!(tokens.len(), logprobs.len());
        assert!(logprobs.iter().all(|logprob| logprob.is_finite() && *logprob <= 0.0), "{logprobs:?}");
        let mut next = 0;
        for span in spans {
            assert!(span.version >= 0 && span.start == next && span.len > 0, "{spans:?}");
            next += span.len;
        }
        assert_eq!(next as usize, tokens.len(), "the spans tile the ids: {spans:?}");
        assert!(!completion.stopped_on_token() || !tokens.is_empty());
        assert!(message.tool_calls.iter().all(|call| !call.id.is_empty()), "agents answer calls by their ids");
        // What is stored of it can be read again.
        let stored = serde_json::to_vec(&completion).expect("an answer is text and numbers");
        serde_json::from_slice::<Completion>(&stored).expect("what is written can be read");
    }
}

/// The label that headers give a call can be stored. The input is lines of a name, a colon and a value.
pub fn lineage(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|&byte| byte == b'\n') {
        let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
        let (name, value) = (HeaderName::from_bytes(&line[..colon]), HeaderValue::from_bytes(&line[colon + 1..]));
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.insert(name, value);
        }
    }
    if let Some(label) = AgentLabel::of(&headers) {
        assert!(is_name(label.as_str()), "{label:?} cannot be stored");
    }
}
