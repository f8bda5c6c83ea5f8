//! What holds for every parser whatever it is given: it ends soon, panics never, and means the same when asked again.
//!
//! One function per fuzz target, each from bytes. `tests/it/fuzz.rs` includes this file and runs it on the seeds.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use forebay::{
    api::{BodyLimits, ByteBudgets, parsers},
    buffer::{
        canonical::ContentDigest,
        filter::Filters,
        ids::{GroupId, KeyForm, POLICY_NAME_BYTES_MAX, PolicyName, RolloutId},
        ingest::NewRollout,
        payload::{Codec, Payload},
        rules::Rules,
        trajectory::{Trajectory, TrajectoryLimits, VIOLATIONS_MAX},
    },
    config::Config,
};
use forebay_client::wire;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// Small, so that a fuzzer meets them.
const LIMITS: TrajectoryLimits = TrajectoryLimits { tokens_max: 4_096, segments_max: 64, metadata_bytes_max: 4_096 };

const BODY_LIMITS: BodyLimits = BodyLimits {
    body_bytes_max: 1 << 20,
    budgets: ByteBudgets { posts: 4 << 20, control: 4 << 20, samples: 4 << 20 },
    read_timeout: Duration::from_secs(1),
};

/// Checking an expression takes milliseconds; instruments, sanitizers and busy machines slow it down.
const FILTER_TIME_MAX: Duration = Duration::from_secs(10);

const CODECS: [Codec; 2] = [Codec::Zstd, Codec::Columns];

/// A trajectory that is taken is packed and comes back as it was sent.
pub fn trajectory(bytes: &[u8]) {
    let Ok(sent) = serde_json::from_slice::<wire::Trajectory>(bytes) else { return };
    let parsed = match Trajectory::parse(sent.clone(), &LIMITS) {
        Ok(parsed) => parsed,
        Err(violations) => {
            assert!((1..=VIOLATIONS_MAX).contains(&violations.len()), "a refusal has reasons, and not too many");
            return;
        }
    };
    for codec in CODECS {
        comes_back(&Payload::pack(&parsed, codec), &sent);
    }
    // What the service would write is what it would take, as the same content.
    if sent.rollout_id.is_some() {
        let written = serde_json::to_vec(&sent).expect("a trajectory is JSON");
        let again: wire::Trajectory = serde_json::from_slice(&written).expect("what is written can be read");
        let again = Trajectory::parse(again, &LIMITS).expect("what was taken is taken again");
        assert_eq!(content(again), content(parsed));
    }
}

fn content(trajectory: Trajectory) -> ContentDigest {
    NewRollout::pack(trajectory, Codec::Columns).content
}

fn comes_back(payload: &Payload, sent: &wire::Trajectory) {
    let unpacked = payload.unpack().expect("what was packed unpacks");
    let text = |raw: &Option<Box<RawValue>>| raw.as_ref().map(|raw| raw.get().to_owned());
    assert_eq!(text(&unpacked.messages), text(&sent.messages));
    assert_eq!(text(&unpacked.metadata), text(&sent.metadata));
    assert_eq!(unpacked.environment, sent.environment);
    assert_eq!(unpacked.status, sent.status);
    assert_eq!(unpacked.sampling, sent.sampling);
    let lengthless = |segment: &wire::Segment| wire::Segment { response_length: None, ..segment.clone() };
    assert_eq!(unpacked.segments, sent.segments.iter().map(lengthless).collect::<Vec<_>>());
}

/// A JSON body is taken or refused with a problem of the client's, whose text is bounded. What the quick reader takes,
/// the general one takes and reads the same.
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

/// An Arrow stream is taken or refused with a problem of the client's; its reader does not panic beyond what is caught.
pub fn arrow(bytes: &[u8]) {
    match parsers::arrow(bytes, &LIMITS) {
        Ok(trajectories) => assert!(!trajectories.is_empty(), "a body without a trajectory is refused"),
        Err(problem) => assert!(matches!(problem.status, 400 | 422), "{problem:?}"),
    }
}

/// Lines are numbered in order, and what they hold is all there was but line ends and blanks.
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

/// A compressed body is expanded within its limits or refused. The first byte chooses the coding.
pub fn expand(bytes: &[u8]) {
    let Some((coding, sent)) = bytes.split_first() else { return };
    let coding = if coding % 2 == 0 { "gzip" } else { "zstd" };
    match parsers::expand(sent, coding, BODY_LIMITS) {
        Ok(expanded) => assert!(expanded.len() <= BODY_LIMITS.body_bytes_max),
        Err(problem) => assert!(matches!(problem.status, 400 | 413), "{problem:?}"),
    }
}

/// The same JSON in another spelling is the same content.
pub fn canonical(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(raw) = serde_json::from_str::<Box<RawValue>>(text) else { return };
    // Every character of a text becomes up to twelve.
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

/// Writes JSON with blanks, entries of objects in reverse and every character escaped; none where it is not to be
/// compared: nested beyond what is taken, or with text that is none.
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

/// An object's entries in order, twins included.
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

/// A payload that was never packed is damaged, not a panic.
pub fn unpack(bytes: &[u8]) {
    for codec in CODECS {
        let _ = Payload::claimed(codec, bytes.to_vec()).unpack();
    }
}

/// An expression is compiled and rehearsed, or refused, within its time.
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
}

/// Rules that are taken are taken again as they are written.
pub fn rules(bytes: &[u8]) {
    let Ok(sent) = serde_json::from_slice::<wire::PolicyRules>(bytes) else { return };
    let Ok(rules) = Rules::parse(sent.clone()) else { return };
    let written = serde_json::to_vec(&*rules).expect("rules are JSON");
    let again: wire::PolicyRules = serde_json::from_slice(&written).expect("what is written can be read");
    assert_eq!(again, sent);
    assert!(Rules::parse(again).is_ok(), "what was taken is taken again");
}

/// A configuration is taken, or refused with a reason.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(error) = Config::parse(text) {
        assert!(!error.to_string().is_empty(), "a refusal has a reason");
    }
}

/// The body of a control call is taken or refused with a problem of the client's.
pub fn control(bytes: &[u8]) {
    for problem in parsers::control(bytes) {
        assert!(matches!(problem.status, 400 | 422), "{problem:?}");
    }
}

/// A query is taken or refused with a problem of the client's.
pub fn query(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for problem in parsers::query(text) {
        assert_eq!(problem.status, 422, "{problem:?}");
    }
}

/// Names that are taken need no encoding in a path and are none that a path resolves; ids break no line.
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
        for form in [KeyForm::Hashed, KeyForm::Ordered] {
            assert_eq!(id.key(form), GroupId::from(&id).key(form));
        }
    }
}
