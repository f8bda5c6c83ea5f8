//! Parser for the most common form of trajectories. It reads the text once and writes numbers directly into columns.
//!
//! It accepts nothing that the general parser would refuse, and reads the same values. It leaves unusual, invalid and
//! too large bodies to the general parser, which also explains errors.

mod elements;
mod numbers;

use forebay_domain::trajectory::TrajectoryLimits;
use forebay_wire::{Components, NamedObjects, Number, Object, Sampling, Segment, Trajectory, Turn};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::codecs::decode::{BODY_SEGMENTS_MAX, BUNDLE_MAX, Shape, fast_path::numbers::Text};

/// The longest text of a small part, such as the reward components. The value parsed from it takes several times its
/// length.
const PART_BYTES_MAX: usize = 64 << 10;

/// Parses a body with one trajectory or an array of them.
pub(super) fn body(bytes: &[u8], limits: &TrajectoryLimits) -> Option<(Vec<Trajectory>, Shape)> {
    let mut text = Text::new(bytes);
    let mut bounds = Bounds { limits, segments_left: BODY_SEGMENTS_MAX };
    let (bundle, shape) = if text.peek()? == b'[' {
        (text.array(BUNDLE_MAX, 0, |text| trajectory(text, &mut bounds))?, Shape::Array)
    } else {
        (vec![trajectory(&mut text, &mut bounds)?], Shape::Object)
    };
    (text.is_at_end() && !bundle.is_empty()).then_some((bundle, shape))
}

/// Limits of a body, which are checked before anything is allocated.
struct Bounds<'l> {
    limits: &'l TrajectoryLimits,
    /// Segments and turns that the rest of the body may have.
    segments_left: usize,
}

/// The fields that were present, as a set of bits.
#[derive(Default)]
struct Seen(u32);

impl Seen {
    /// Returns the value of a field, or nothing if the field was present before. Each field has its own number.
    fn once<T>(&mut self, field: u32, value: Option<T>) -> Option<T> {
        let is_first = !self.has(field);
        self.0 |= 1 << field;
        value.filter(|_| is_first)
    }

    fn has(&self, field: u32) -> bool {
        self.0 & (1 << field) != 0
    }
}

fn trajectory(text: &mut Text<'_>, bounds: &mut Bounds<'_>) -> Option<Trajectory> {
    let mut sent = Trajectory::default();
    let mut seen = Seen::default();
    text.object(|text, name| {
        match name {
            b"policy" | b"policy_name" => sent.policy = seen.once(0, text.value())?,
            b"rollout_id" => sent.rollout_id = seen.once(1, text.value())?,
            b"group_id" => sent.group_id = seen.once(2, text.value())?,
            b"group_size" => sent.group_size = seen.once(3, text.value())?,
            b"environment" => sent.environment = seen.once(4, text.value())?,
            b"execution_id" => sent.execution_id = seen.once(15, text.value())?,
            b"policy_version" => sent.policy_version = seen.once(5, text.value())?,
            b"admission_id" => sent.admission_id = seen.once(6, text.value())?,
            b"status" => sent.status = seen.once(7, text.value())?,
            b"reward" => sent.reward = seen.once(8, text.value::<Option<Number>>())?.map(|Number(reward)| reward),
            b"reward_components" => sent.reward_components = seen.once(9, part::<Components>(text))?.0,
            b"sampling" => sent.sampling = seen.once(10, text.value::<Object<Sampling>>())?.0,
            b"segments" => sent.segments = seen.once(11, segments(text, bounds))?,
            b"turns" => sent.turns = seen.once(14, turns(text, bounds))?,
            b"messages" => sent.messages = seen.once(12, text.value())?,
            b"metadata" => sent.metadata = seen.once(13, text.value())?,
            b"purpose" => sent.purpose = seen.once(16, text.value())?,
            b"suite" => sent.suite = seen.once(17, text.value())?,
            b"task" => sent.task = seen.once(18, text.value())?,
            _ => return None,
        }
        Some(())
    })?;
    Some(sent)
}

/// Parses a part that is small in all normal bodies.
fn part<T: DeserializeOwned>(text: &mut Text<'_>) -> Option<T> {
    let raw: &RawValue = text.value()?;
    let is_small = raw.get().len() <= PART_BYTES_MAX;
    is_small.then(|| serde_json::from_str(raw.get()).ok()).flatten()
}

fn segments(text: &mut Text<'_>, bounds: &mut Bounds<'_>) -> Option<Vec<Segment>> {
    let max = bounds.segments_left.min(bounds.limits.segments_max);
    let mut tokens_left = bounds.limits.tokens_max;
    let segments = text.array(max, 1, |text| {
        let segment = segment(text, tokens_left)?;
        tokens_left -= segment.tokens.len();
        Some(segment)
    })?;
    bounds.segments_left -= segments.len();
    Some(segments)
}

/// Parses a segment of at most `max` tokens. No column of a valid segment is longer than its tokens.
fn segment(text: &mut Text<'_>, max: usize) -> Option<Segment> {
    const TOKENS: u32 = 1;
    const LOSS_MASK: u32 = 2;
    let mut sent = Segment::default();
    let mut seen = Seen::default();
    text.object(|text, name| {
        let expected = if sent.loss_mask.is_empty() { sent.tokens.len() } else { sent.loss_mask.len() };
        match name {
            b"kind" => sent.kind = seen.once(0, text.value())?,
            b"tokens" => sent.tokens = seen.once(TOKENS, text.ids(max, expected))?,
            b"loss_mask" => sent.loss_mask = seen.once(LOSS_MASK, text.bits(max, expected))?,
            b"response_length" => sent.response_length = seen.once(3, text.value())?,
            b"logprobs" | b"rollout_log_probs" | b"log_probs" | b"response_logprobs" => {
                seen.once(4, floats(text, max, expected, &mut sent.logprobs))?;
            }
            b"teacher_logprobs" | b"teacher_log_probs" => {
                seen.once(5, floats(text, max, expected, &mut sent.teacher_logprobs))?;
            }
            b"values" => seen.once(6, floats(text, max, expected, &mut sent.values))?,
            b"advantages" => seen.once(8, floats(text, max, expected, &mut sent.advantages))?,
            b"versions" => sent.versions = seen.once(7, part(text))?,
            b"turns" => sent.turns = seen.once(9, part(text))?,
            b"columns" => sent.columns = seen.once(10, part::<NamedObjects<_>>(text))?.0,
            b"media" => sent.media = seen.once(11, part::<Option<_>>(text))?.unwrap_or_default(),
            _ => return None,
        }
        Some(())
    })?;
    (seen.has(TOKENS) && seen.has(LOSS_MASK)).then_some(sent)
}

fn turns(text: &mut Text<'_>, bounds: &mut Bounds<'_>) -> Option<Vec<Turn>> {
    let max = bounds.segments_left.min(bounds.limits.segments_max);
    let mut tokens_left = bounds.limits.tokens_max;
    let turns = text.array(max, 1, |text| {
        let turn = turn(text, tokens_left)?;
        tokens_left -= turn.prompt_tokens.len() + turn.tokens.len();
        Some(turn)
    })?;
    bounds.segments_left -= turns.len();
    Some(turns)
}

/// Parses a turn of at most `max` tokens, with those of its prompt.
fn turn(text: &mut Text<'_>, max: usize) -> Option<Turn> {
    const TOKENS: u32 = 3;
    let mut sent = Turn::default();
    let mut seen = Seen::default();
    text.object(|text, name| {
        match name {
            b"id" => sent.id = seen.once(0, text.value())?,
            b"after" => sent.after = seen.once(1, text.value())?,
            b"prompt_tokens" | b"prompt_token_ids" => {
                sent.prompt_tokens = seen.once(2, text.ids(max - sent.tokens.len(), 0))?;
            }
            b"tokens" | b"token_ids" | b"response_token_ids" | b"output_ids" => {
                let expected = sent.logprobs.as_ref().map_or(0, Vec::len);
                sent.tokens = seen.once(TOKENS, text.ids(max - sent.prompt_tokens.len(), expected))?;
            }
            b"logprobs" | b"rollout_log_probs" | b"log_probs" | b"response_logprobs" => {
                seen.once(4, floats(text, max, sent.tokens.len(), &mut sent.logprobs))?;
            }
            b"versions" => sent.versions = seen.once(5, part(text))?,
            b"finish_reason" => sent.finish_reason = seen.once(6, text.value())?,
            b"stopped_on_token" => sent.stopped_on_token = seen.once(7, text.value())?,
            b"agent" => sent.agent = seen.once(8, text.value())?,
            b"delivered" => sent.delivered = seen.once(9, text.value())?,
            b"retry_count" => sent.retry_count = seen.once(10, text.value())?,
            b"reward" => sent.reward = seen.once(11, text.value::<Option<Number>>())?.map(|Number(reward)| reward),
            b"state_key" => sent.state_key = seen.once(12, text.value())?,
            _ => return None,
        }
        Some(())
    })?;
    seen.has(TOKENS).then_some(sent)
}

/// Parses a column that may be absent.
fn floats(text: &mut Text<'_>, max: usize, expected: usize, column: &mut Option<Vec<f32>>) -> Option<()> {
    if text.peek()? == b'n' {
        return text.value();
    }
    *column = Some(text.floats(max, expected)?);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_domain::surrogates::LoneSurrogates;
    use forebay_wire::{ColumnUpload, MediaSpan, Purpose, Status, TurnSpan, VersionSpan};

    const LIMITS: TrajectoryLimits = TrajectoryLimits {
        tokens_max: 8,
        segments_max: 3,
        metadata_bytes_max: 1_000,
        lone_surrogates: LoneSurrogates::Replace,
    };

    fn written(trajectory: &Trajectory) -> String {
        serde_json::to_string(trajectory).expect("a trajectory is JSON")
    }

    fn takes(text: &str) -> bool {
        body(text.as_bytes(), &LIMITS).is_some()
    }

    #[test]
    fn it_reads_what_the_general_parser_reads() {
        let whole = r#" {"policy_name": "p", "rollout_id": "r\u0041", "group_id": null, "group_size": 2, "status": "truncated",
            "environment": "e", "execution_id": "x\u0041", "policy_version": 3, "admission_id": "a", "reward": 0.6455555555555557,
            "reward_components": {"a": 1, "b": -0.5}, "sampling": {"temperature": 0.7},
            "messages": [{"role": "user", "content": "h\u00e4"}], "metadata": {"k": [1e400, "]}"]},
            "segments": [
                {"kind": "final", "loss_mask": [1, 0], "tokens": [1, 2, 128000], "log_probs": [-0.1, -1e-07],
                 "teacher_logprobs": null, "values": [0.5,1], "advantages": [0.25, -1], "versions": [[3, 0, 2]], "response_length": 2,
                 "turns": [{"start": 0, "length": 2, "reward": true, "state_key": "s"}],
                 "columns": {"c\u0041": {"digest": "d", "bytes": 7}}, "media": [[0, 1, "d", "image"]]},
                {"tokens":[],"loss_mask":[]}],
            "turns": [
                {"id": "a", "prompt_token_ids": [1, 2], "output_ids": [3], "log_probs": [-0.5], "versions": [[3, 0, 1]],
                 "finish_reason": "stop", "stopped_on_token": true, "agent": "main", "delivered": false,
                 "reward": 1, "state_key": "s"},
                {"logprobs": null, "after": "a", "token_ids": [], "prompt_tokens": [4, 5]},
                {"response_token_ids": [6]}]} "#;
        for (text, shape) in [(whole.to_owned(), Shape::Object), (format!("[{whole},{whole}]"), Shape::Array)] {
            let (fast, found) = body(text.as_bytes(), &LIMITS).expect("it is a form that is taken");
            assert_eq!(found, shape);
            let general: Trajectory = serde_json::from_str(whole).expect("it is a trajectory");
            for trajectory in &fast {
                assert_eq!(written(trajectory), written(&general));
            }
        }
    }

    /// A body with a field that the fast path does not know is read correctly, but takes four times as long, and nothing
    /// else tells. So all fields of the wire are written here, without a rest.
    #[test]
    fn it_knows_every_field() {
        let raw = |text: &str| serde_json::value::RawValue::from_string(text.to_owned()).ok();
        let segment = Segment {
            kind: Some("final".to_owned()),
            tokens: vec![1, 2],
            loss_mask: vec![1],
            response_length: Some(1),
            logprobs: Some(vec![-0.5]),
            teacher_logprobs: Some(vec![-0.5]),
            values: Some(vec![0.5]),
            advantages: Some(vec![0.5]),
            versions: Some(vec![VersionSpan(3, 0, 1)]),
            turns: Some(vec![TurnSpan { start: 0, length: 1, reward: Some(0.5), state_key: Some("s".to_owned()) }]),
            columns: [("c".to_owned(), ColumnUpload { digest: "d".to_owned(), bytes: 7 })].into(),
            media: vec![MediaSpan(0, 1, "d".to_owned(), "image".to_owned())],
        };
        let turn = Turn {
            id: Some("b".to_owned()),
            after: Some("a".to_owned()),
            prompt_tokens: vec![1, 2],
            tokens: vec![3],
            logprobs: Some(vec![-0.5]),
            versions: Some(vec![VersionSpan(3, 0, 1)]),
            finish_reason: Some("stop".to_owned()),
            stopped_on_token: true,
            agent: Some("main".to_owned()),
            delivered: false,
            retry_count: 1,
            reward: Some(0.5),
            state_key: Some("s".to_owned()),
        };
        let trajectory = Trajectory {
            policy: Some("p".to_owned()),
            rollout_id: Some("r".to_owned()),
            group_id: Some("g".to_owned()),
            group_size: Some(2),
            environment: Some("e".to_owned()),
            execution_id: Some("x".to_owned()),
            policy_version: Some(3),
            admission_id: Some("a".to_owned()),
            purpose: Purpose::Eval,
            suite: Some("s".to_owned()),
            task: Some("t".to_owned()),
            status: Status::Truncated,
            reward: Some(0.5),
            reward_components: [("a".to_owned(), 1.0)].into(),
            sampling: Sampling { temperature: 0.5, top_p: 0.5, top_k: 7 },
            segments: vec![segment],
            turns: vec![turn],
            messages: raw("[{}]"),
            metadata: raw("{}"),
        };
        let (read, _) = body(written(&trajectory).as_bytes(), &LIMITS).expect("the fast path knows all fields");
        assert_eq!(read.iter().map(written).collect::<Vec<_>>(), [written(&trajectory)]);
    }

    #[test]
    fn what_is_odd_or_too_much_is_left_to_the_general_parser() {
        let segment = r#"{"tokens":[1,2,3],"loss_mask":[1,1]}"#;
        let trajectory = format!(r#"{{"status":"completed","segments":[{segment}]}}"#);
        assert!(takes(&trajectory));
        for (from, to) in [
            ("status", "stat\\u0075s"),
            ("\"completed\"", "\"done\""),
            ("\"status\"", "\"reward_components\":{\"a\":1,\"a\":1},\"status\""),
            ("\"status\"", "\"reward\":1,\"reward\":null,\"status\""),
            ("\"tokens\":[1,2,3],", ""),
            ("[1,2,3]", "[1,2,-3]"),
            ("[1,2,3]", "[1,2,3,4,5,6,7,8,9]"),
            ("[1,1]", "[1,2]"),
            ("[1,1]", "[1,1],\"unknown\":1"),
            ("}]}", "}]} 1"),
        ] {
            assert!(!takes(&trajectory.replacen(from, to, 1)), "{from} -> {to}");
        }
        for text in ["", "[]", "null", "[null]", "{\"status\":\"completed\"", "[{\"status\":\"failed\"}"] {
            assert!(!takes(text), "{text}");
        }
        let many = |count: usize| vec![segment; count].join(",");
        let with = |segments: &str| format!(r#"{{"status":"completed","segments":[{segments}]}}"#);
        assert!(takes(&with(&many(2))));
        assert!(!takes(&with(&many(3))), "more tokens than a trajectory may have");
        let empty = r#"{"tokens":[],"loss_mask":[]}"#;
        assert!(!takes(&with(&[empty; 4].join(","))), "more segments than a trajectory may have");
    }
}
