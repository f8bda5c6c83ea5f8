//! Chat records with token ids: requests and answers of OpenAI's chat completions, as vLLM and SGLang extend them.
//!
//! A record is one rollout. It has its calls in `calls`, or one call as `request` and `response`, or it is an answer
//! itself (`choices`), or it has only `messages`. Its labels stand beside them under the names of `POST /trajectories`.

mod answer;

use forebay_wire::{Sampling, Trajectory, Turn, Violation};
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

use self::answer::{Answer, Ids};
use crate::{
    format::{Document, Format, Imported, Layout, Note, each},
    ids::digest_id,
    json::{self, Fields, Problems},
    labels::{Labels, sampling},
    options::Options,
    tools, turns,
};

pub(crate) const FORMAT: Format = Format {
    name: "chat",
    about: "chat completions with token ids, one rollout per line or in one file",
    layout: Layout::LinesOrDocument,
    reader: |options| each(options, convert),
};

/// The fields of a record that hold its calls and its text; the others are labels, or are ignored.
const CONTENT: [&str; 10] = [
    "calls",
    "request",
    "response",
    "choices",
    "messages",
    "tools",
    "prompt_token_ids",
    "token_ids",
    "completion_token_ids",
    "logprobs",
];

#[derive(Default, Deserialize)]
#[serde(default)]
struct Call {
    request: Option<Request>,
    response: Answer,
    /// The agent that made the call.
    agent: Option<String>,
    /// Whether the agent received the answer.
    delivered: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Request {
    messages: Option<Vec<Box<RawValue>>>,
    tools: Option<Box<RawValue>>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i32>,
}

fn convert(document: &Document<'_>, options: &Options) -> Result<Imported, Vec<Violation>> {
    let mut imported = Imported::default();
    let text = json::characters(document.text, &mut imported)?;
    let mut fields = json::fields(text.as_bytes())?;
    let record: &RawValue = json::whole(text.as_bytes())?;
    let mut problems = Problems::default();
    let mut content: Fields<'_> =
        CONTENT.iter().filter_map(|&name| Some((name.to_owned(), fields.remove(name)?))).collect();
    let own = Labels::take(&mut fields, "", &mut problems);
    let has_metadata = own.metadata.is_some();
    let given = Labels::of_options(options, record, &mut problems);
    let messages: Option<Vec<Box<RawValue>>> = problems.take(&mut content, "", "messages");
    let tools: Option<Box<RawValue>> = problems.take(&mut content, "", "tools");
    let calls = calls(&mut content, record, &mut problems);
    let mut turns: Vec<Turn> = calls.iter().filter_map(|call| call.turn(&mut imported, &mut problems)).collect();
    if calls.is_empty() && messages.is_none() && problems.is_empty() {
        problems.push("", "has neither `calls`, `response`, `choices` nor `messages`");
    }
    let sampling = calls.iter().find_map(|call| call.call.request.as_ref()?.sampling());
    let labels = given.or(own).or(Labels { sampling, ..Labels::default() });
    let mut trajectory: Trajectory = labels.trajectory(options, || digest_id(FORMAT.name, document.text));
    problems.or(())?;
    turns::shorten(&mut turns);
    trajectory.turns = turns;
    trajectory.messages = match messages {
        Some(messages) => Some(json::raw(&messages)),
        None => calls.last().map(|last| json::raw(&last.conversation())),
    };
    if !has_metadata {
        let model = calls.iter().find_map(|call| call.call.response.model.as_deref());
        let source: Value = json!({"source": {"format": FORMAT.name, "model": model}});
        trajectory.metadata = Some(json::raw(&source));
    }
    // The messages are those of the last call, so its tools are theirs.
    let of_calls = || calls.iter().rev().find_map(|call| call.call.request.as_ref()?.tools.as_deref());
    tools::add(&mut trajectory.metadata, tools.as_deref().or_else(of_calls), &mut imported);
    imported.trajectories.push(trajectory);
    Ok(imported)
}

/// A call and its place in the record.
struct Placed {
    call: Call,
    /// The place of the answer.
    at: String,
}

/// The calls of a record, in their order.
fn calls(content: &mut Fields<'_>, record: &RawValue, problems: &mut Problems) -> Vec<Placed> {
    if content.contains_key("calls") {
        let calls: Vec<Call> = problems.take(content, "", "calls").unwrap_or_default();
        let placed = |(index, call)| Placed { call, at: format!("/calls/{index}/response") };
        return calls.into_iter().enumerate().map(placed).collect();
    }
    let request = problems.take(content, "", "request");
    if content.contains_key("response") {
        let response = problems.take(content, "", "response").unwrap_or_default();
        let call = Call { request, response, ..Call::default() };
        return vec![Placed { call, at: "/response".to_owned() }];
    }
    if content.contains_key("choices") {
        let response = json::parse("", record.get()).map_err(|violation| problems.add(violation)).unwrap_or_default();
        return vec![Placed { call: Call { request, response, ..Call::default() }, at: String::new() }];
    }
    if ["token_ids", "completion_token_ids"].iter().any(|&name| content.contains_key(name)) {
        let ids = json::parse::<Ids>("", record.get()).map_err(|violation| problems.add(violation)).unwrap_or_default();
        let call = Call { request, response: Answer::of_ids(ids, problems), ..Call::default() };
        return vec![Placed { call, at: String::new() }];
    }
    Vec::new()
}

impl Placed {
    /// The turn of a call that sampled tokens.
    fn turn(&self, imported: &mut Imported, problems: &mut Problems) -> Option<Turn> {
        let sampled = self.call.response.sampled(&self.at, problems)?;
        if sampled.tokens.is_empty() {
            return None;
        }
        if sampled.prompt_tokens.is_empty() {
            imported.note(Note::CallWithoutPrompt, 1);
            return None;
        }
        Some(Turn { agent: self.call.agent.clone(), delivered: self.call.delivered.unwrap_or(true), ..sampled })
    }

    /// The messages of the request and of the answer.
    fn conversation(&self) -> Vec<&RawValue> {
        let sent = self.call.request.iter().flat_map(|request| request.messages.iter().flatten());
        sent.map(|message| &**message).chain(self.call.response.message()).collect()
    }
}

impl Request {
    fn sampling(&self) -> Option<Sampling> {
        let has_some = self.temperature.is_some() || self.top_p.is_some() || self.top_k.is_some();
        has_some.then(|| sampling(self.temperature, self.top_p, self.top_k))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Imported, Vec<Violation>> {
        convert(&Document { line: 1, text: text.as_bytes() }, &Options::default())
    }

    fn one(text: &str) -> Trajectory {
        read(text).expect("the record is right").trajectories.remove(0)
    }

    const VLLM: &str = r#"{"group_id":7,"rollout_id":"r","reward":true,"policy":"math",
        "request":{"model":"m","messages":[{"role":"user","content":"q"}],"temperature":0.6},
        "response":{"id":"chatcmpl-1","model":"m","prompt_token_ids":[1,2],"choices":[{"index":0,
            "message":{"role":"assistant","content":"a"},"finish_reason":"stop","token_ids":[3,4],
            "logprobs":{"content":[{"token":"a","logprob":-0.1},{"token":"b","logprob":-0.2}]}}]}}"#;

    #[test]
    fn an_answer_of_vllm_is_a_turn() {
        let trajectory = one(VLLM);
        assert_eq!((trajectory.policy.as_deref(), trajectory.group_id.as_deref()), (Some("math"), Some("7")));
        assert_eq!(trajectory.reward, Some(1.0));
        let turn = &trajectory.turns[0];
        assert_eq!((&turn.prompt_tokens[..], &turn.tokens[..]), (&[1, 2][..], &[3, 4][..]));
        assert_eq!(turn.logprobs.as_deref(), Some(&[-0.1, -0.2][..]));
        assert!(turn.stopped_on_token);
        assert_eq!(trajectory.messages.expect("there are messages").get().matches("role").count(), 2);
    }

    #[test]
    fn an_answer_of_sglang_is_a_turn() {
        let text = r#"{"reward":0,"choices":[{"index":0,"message":{"role":"assistant","content":"a"},
            "finish_reason":"length","prompt_token_ids":[1,2],"token_ids":[3],
            "meta_info":{"output_token_logprobs":[[-0.1,3,null],[-0.2,4,null]]}}]}"#;
        let turn = &one(text).turns[0];
        assert_eq!((&turn.prompt_tokens[..], &turn.tokens[..]), (&[1, 2][..], &[3, 4][..]));
        assert!(!turn.stopped_on_token);
    }

    #[test]
    fn a_record_may_have_several_calls() {
        let call = |prompt: &str, ids: &str| {
            format!(
                r#"{{"response":{{"prompt_token_ids":{prompt},"choices":[{{"token_ids":{ids}}}]}},"agent":"main"}}"#
            )
        };
        let text = format!(r#"{{"calls":[{},{}],"reward":1}}"#, call("[1]", "[2]"), call("[1,2,3]", "[4]"));
        let trajectory = one(&text);
        assert_eq!(trajectory.turns.len(), 2);
        assert_eq!(trajectory.turns[1].agent.as_deref(), Some("main"));
        assert!(trajectory.rollout_id.expect("it is a digest").starts_with("chat-"));
    }

    #[test]
    fn a_record_may_be_text_or_flat_ids() {
        let text = one(r#"{"messages":[{"role":"user","content":"q"}],"reward":1}"#);
        assert!(text.turns.is_empty() && text.messages.is_some());
        let flat = one(r#"{"messages":[],"prompt_token_ids":[1],"token_ids":[2,3],"logprobs":[-0.1,-0.2],"reward":1}"#);
        assert_eq!(flat.turns[0].logprobs.as_deref(), Some(&[-0.1, -0.2][..]));
        let both = one(r#"{"prompt_token_ids":[1],"token_ids":[2],"completion_token_ids":[2],"reward":1}"#);
        assert_eq!(both.turns[0].tokens, [2]);
    }

    #[test]
    fn what_is_wrong_is_refused_with_its_path() {
        let twice = r#""choices":[{"token_ids":[1]},{"token_ids":[1]}]"#;
        let cases = [
            (VLLM.replace(r#",{"token":"b","logprob":-0.2}"#, ""), "/response/choices/0/logprobs"),
            (VLLM.replace("-0.2", "-9999.0"), "/response/choices/0/logprobs"),
            (VLLM.replace("[3,4]", "[3,\"x\"]"), "/response/choices/0/token_ids/1"),
            (VLLM.replace("\"reward\":true", "\"reward\":\"high\""), "/reward"),
            (
                VLLM.replace("\"finish_reason\":\"stop\"", "\"finish_reason\":\"abort\""),
                "/response/choices/0/finish_reason",
            ),
            (format!("{{{twice}}}"), "/choices"),
            (format!("{{\"calls\":[{{\"response\":{{{twice}}}}}]}}"), "/calls/0/response/choices"),
            (r#"{"prompt_token_ids":[1],"token_ids":[2],"logprobs":[]}"#.to_owned(), "/logprobs"),
            (
                r#"{"prompt_token_ids":[1],"token_ids":[2],"completion_token_ids":[3]}"#.to_owned(),
                "/completion_token_ids",
            ),
            ("{\"reward\":1}".to_owned(), ""),
            ("[1]".to_owned(), ""),
        ];
        for (text, pointer) in cases {
            let found = read(&text).expect_err(pointer);
            assert_eq!(found[0].pointer, pointer, "{found:?}");
        }
    }

    #[test]
    fn options_take_precedence_and_may_name_places() {
        let options = Options {
            policy: Some("other".to_owned()),
            prefix: Some("day1/".to_owned()),
            reward_at: Some("/response/choices/0/index".to_owned()),
            ..Options::default()
        };
        let imported = convert(&Document { line: 1, text: VLLM.as_bytes() }, &options).expect("the record is right");
        let trajectory = &imported.trajectories[0];
        assert_eq!((trajectory.policy.as_deref(), trajectory.reward), (Some("other"), Some(0.0)));
        assert_eq!(trajectory.rollout_id.as_deref(), Some("day1/r"));
        assert_eq!(trajectory.group_id.as_deref(), Some("day1/7"));
        let options = Options { reward_at: Some("/score".to_owned()), ..options };
        let found = convert(&Document { line: 1, text: VLLM.as_bytes() }, &options).expect_err("there is no score");
        assert_eq!(found[0].pointer, "/score");
    }
}
