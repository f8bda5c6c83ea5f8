//! Rollouts of NeMo Gym: a line per rollout, with an OpenAI Responses object whose items have the ids of their call.
//!
//! An item with `generation_token_ids` ends a call, and its `prompt_token_ids` are the whole prompt of the call. So the
//! rollout becomes turns, which the service assembles.

mod items;

use std::{collections::HashSet, fmt};

use forebay_wire::{Number, Object, Segment, Status, Turn, Violation};
use serde::{
    Deserialize, Deserializer,
    de::{
        MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};
use serde_json::{Map, Value, json, value::RawValue};

use crate::{
    format::{Document, Format, Imported, Layout, Note, each},
    ids::digest_id,
    json::{self, Fields, Problems},
    labels::{Id, Labels, sampling},
    options::Options,
    tools, turns,
};

pub(crate) const FORMAT: Format = Format {
    name: "nemo-gym",
    about: "rollouts of NeMo Gym, one JSON object per line",
    layout: Layout::Lines,
    reader: |options| each(options, convert),
};

/// The most scalar fields of a record that its metadata keeps.
const SCALARS_MAX: usize = 64;

/// The most bytes of a scalar field that the metadata keeps.
const SCALAR_BYTES_MAX: usize = 256;

#[derive(Default, Deserialize)]
#[serde(default)]
struct Response {
    id: Option<String>,
    model: Option<String>,
    status: Option<String>,
    incomplete_details: Option<Value>,
    output: Vec<Entry>,
    /// The task, in the responses of agents that drive an environment.
    group_id: Option<Id>,
}

/// An entry of the output.
enum Entry {
    Item(Item),
    /// All that an agent which drives an environment had before it as its next input: the parameters' input, the items
    /// of all calls so far, and what the environment answered. There is one after each step.
    State(Vec<Object<Item>>),
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntryVisitor;

        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an item, or a list of items")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Entry, A::Error> {
                Item::deserialize(MapAccessDeserializer::new(map)).map(Entry::Item)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Entry, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(Entry::State)
            }
        }

        deserializer.deserialize_any(EntryVisitor)
    }
}

/// An item of the output. Its other fields are read as a part of the conversation.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Item {
    prompt_token_ids: Option<Vec<i32>>,
    generation_token_ids: Option<Vec<i32>>,
    generation_log_probs: Option<Vec<f32>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Parameters {
    temperature: Option<f32>,
    top_p: Option<f32>,
    tools: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct AgentRef {
    name: Option<String>,
}

fn convert(document: &Document<'_>, options: &Options) -> Result<Imported, Vec<Violation>> {
    let mut imported = Imported::default();
    let text = json::characters(document.text, &mut imported)?;
    let mut fields = json::fields(text.as_bytes())?;
    let record: &RawValue = json::whole(text.as_bytes())?;
    let mut problems = Problems::default();
    let given = Labels::of_options(options, record, &mut problems);
    let (response_text, parameters_text) =
        (fields.get("response").copied(), fields.get("responses_create_params").copied());
    problems.require(response_text.is_some(), "/response", "is missing: a rollout of NeMo Gym has it");
    let response: Response = problems.take(&mut fields, "", "response").unwrap_or_default();
    let parameters: Parameters = problems.take(&mut fields, "", "responses_create_params").unwrap_or_default();
    let mask_sample = fields.get_key_value("mask_sample").map(|(name, value)| (name.clone(), *value));
    let is_masked = problems.take(&mut fields, "", "mask_sample").unwrap_or(false);
    let own = labels(&mut fields, parameters_text, &parameters, &response, &mut problems);
    let mut turns = calls(&response, &mut imported, &mut problems);
    let messages = items::messages(parameters_text, response_text, &mut problems);
    fields.extend(mask_sample);
    let metadata = metadata(&fields, &response);
    let mut trajectory = given.or(own).trajectory(options, || digest_id(FORMAT.name, document.text));
    problems.or(())?;
    trajectory.messages = (!messages.is_empty()).then(|| json::raw(&messages));
    trajectory.metadata = Some(json::raw(&metadata));
    let defined = parameters.tools.map(tools::of_responses);
    tools::add(&mut trajectory.metadata, defined.as_deref(), &mut imported);
    if is_masked {
        trajectory.segments = turns.last().map(masked).into_iter().collect();
    } else {
        turns::shorten(&mut turns);
        trajectory.turns = turns;
    }
    imported.trajectories.push(trajectory);
    Ok(imported)
}

fn labels(
    fields: &mut Fields<'_>,
    parameters_text: Option<&RawValue>,
    parameters: &Parameters,
    response: &Response,
    problems: &mut Problems,
) -> Labels {
    let mut id = |name: &str| problems.take(fields, "", name).map(Id::into_inner);
    let (task, rollout, named) = (id("_ng_task_index"), id("_ng_rollout_index"), id("_ng_rollout_id"));
    let attempt: u64 = problems.take(fields, "", "_ng_attempt_index").unwrap_or(0);
    let failed = fields.contains_key("_ng_failure_class");
    let indexed = || Some(format!("{}-{}", task.as_deref()?, rollout.as_deref()?));
    let rollout_id = named.or_else(indexed);
    let environment: Option<AgentRef> = problems.take(fields, "", "agent_ref");
    let is_cut = response.status.as_deref() == Some("incomplete")
        || response.incomplete_details.as_ref().is_some_and(|details| !details.is_null());
    Labels {
        rollout_id: rollout_id.map(|id| if attempt > 0 { format!("{id}-a{attempt}") } else { id }),
        // Rollouts of the same task were made with the same parameters.
        group_id: task
            .or_else(|| response.group_id.clone().map(Id::into_inner))
            .or_else(|| Some(digest_id("nemo-gym-task", parameters_text?.get().as_bytes()))),
        environment: environment.and_then(|agent| agent.name),
        reward: problems.take(fields, "", "reward").map(|Number(reward)| reward),
        status: Some(match (failed, is_cut) {
            (true, _) => Status::Failed,
            (false, true) => Status::Truncated,
            (false, false) => Status::Completed,
        }),
        sampling: Some(sampling(parameters.temperature, parameters.top_p, None)),
        ..Labels::default()
    }
}

/// The calls, which are the items with sampled ids. The states of an agent repeat the calls of the states before them.
fn calls(response: &Response, imported: &mut Imported, problems: &mut Problems) -> Vec<Turn> {
    let mut turns = Vec::new();
    let mut known = HashSet::new();
    for (index, entry) in response.output.iter().enumerate() {
        match entry {
            Entry::Item(item) => turns.extend(call(item, &format!("/response/output/{index}"), imported, problems)),
            Entry::State(items) => {
                for (place, Object(item)) in items.iter().enumerate() {
                    if known.insert((&item.prompt_token_ids, &item.generation_token_ids)) {
                        let pointer = format!("/response/output/{index}/{place}");
                        turns.extend(call(item, &pointer, imported, problems));
                    }
                }
            }
        }
    }
    turns
}

/// The call that an item ends; none if the item has no sampled ids.
fn call(item: &Item, pointer: &str, imported: &mut Imported, problems: &mut Problems) -> Option<Turn> {
    let tokens = item.generation_token_ids.as_ref().filter(|ids| !ids.is_empty())?;
    let Some(prompt_tokens) = item.prompt_token_ids.as_ref().filter(|ids| !ids.is_empty()) else {
        imported.note(Note::CallWithoutPrompt, 1);
        return None;
    };
    if let Some(logprobs) = &item.generation_log_probs
        && logprobs.len() != tokens.len()
    {
        let detail = format!("has {} entries for {} tokens", logprobs.len(), tokens.len());
        problems.push(format!("{pointer}/generation_log_probs"), detail);
    }
    Some(Turn {
        prompt_tokens: prompt_tokens.clone(),
        tokens: tokens.clone(),
        logprobs: item.generation_log_probs.clone(),
        ..Turn::default()
    })
}

/// The segment of a rollout that must not be trained: its last call, with a mask of zeros. It still votes in the baseline
/// of its group.
fn masked(last: &Turn) -> Segment {
    Segment {
        tokens: [last.prompt_tokens.as_slice(), &last.tokens].concat(),
        loss_mask: vec![0; last.tokens.len()],
        logprobs: last.logprobs.clone(),
        ..Segment::default()
    }
}

/// Where the rollout comes from, and the scalar fields of its record, for filters.
fn metadata(fields: &Fields<'_>, response: &Response) -> Value {
    let scalar = |(name, value): (&String, &&RawValue)| {
        let is_small = value.get().len() + name.len() <= SCALAR_BYTES_MAX;
        let is_scalar = !value.get().starts_with(['{', '[', 'n']);
        let value: Value = (is_small && is_scalar).then(|| serde_json::from_str(value.get()).ok())??;
        Some((name.clone(), value))
    };
    let record: Map<String, Value> = fields.iter().filter_map(scalar).take(SCALARS_MAX).collect();
    json!({
        "source": {"format": FORMAT.name, "response_id": response.id, "model": response.model},
        "record": record,
    })
}

#[cfg(test)]
mod tests {
    use forebay_wire::Trajectory;

    use super::*;

    fn read(text: &str) -> Result<Imported, Vec<Violation>> {
        convert(&Document { line: 1, text: text.as_bytes() }, &Options::default())
    }

    fn one(text: &str) -> Trajectory {
        read(text).expect("the record is right").trajectories.remove(0)
    }

    const CALLS: &str = r#"{"_ng_task_index":3,"_ng_rollout_index":1,"reward":0.5,"resolved":true,
        "agent_ref":{"name":"swe"},
        "responses_create_params":{"input":[{"role":"user","content":"q"}],"temperature":0.7},
        "response":{"id":"resp_1","model":"m","output":[
            {"type":"reasoning","summary":[{"type":"summary_text","text":"hm"}]},
            {"type":"function_call","call_id":"c1","name":"run","arguments":"{}",
             "prompt_token_ids":[1,2],"generation_token_ids":[3,4],"generation_log_probs":[-0.1,-0.2]},
            {"type":"function_call_output","call_id":"c1","output":"ok"},
            {"type":"message","role":"assistant","content":[{"type":"output_text","text":"done"}],
             "prompt_token_ids":[1,2,3,4,5],"generation_token_ids":[6],"generation_log_probs":[-0.3]}]}}"#;

    #[test]
    fn indices_are_group_and_rollout_and_items_with_ids_are_turns() {
        let trajectory = one(CALLS);
        assert_eq!(trajectory.group_id.as_deref(), Some("3"));
        assert_eq!(trajectory.rollout_id.as_deref(), Some("3-1"));
        assert_eq!((trajectory.reward, trajectory.environment.as_deref()), (Some(0.5), Some("swe")));
        assert!((trajectory.sampling.temperature - 0.7).abs() < f32::EPSILON);
        let prompts: Vec<&[i32]> = trajectory.turns.iter().map(|turn| turn.prompt_tokens.as_slice()).collect();
        assert_eq!(prompts, [&[1, 2][..], &[5]], "the second prompt continues the first call");
        assert_eq!(trajectory.turns[1].tokens, [6]);
        let messages: Value =
            serde_json::from_str(trajectory.messages.expect("there are messages").get()).expect("JSON");
        assert_eq!(
            messages,
            json!([
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": null, "reasoning_content": "hm",
                 "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "ok"},
                {"role": "assistant", "content": "done"},
            ])
        );
        let metadata: Value =
            serde_json::from_str(trajectory.metadata.expect("there is metadata").get()).expect("JSON");
        assert_eq!(metadata["record"], json!({"resolved": true}));
    }

    #[test]
    fn lengths_that_differ_are_refused_with_their_path() {
        let found = read(&CALLS.replace("[-0.3]", "[-0.3,-0.4]")).expect_err("the lengths differ");
        assert_eq!(found[0].pointer, "/response/output/3/generation_log_probs");
        assert_eq!(found[0].detail, "has 2 entries for 1 tokens");
        assert_eq!(read("{\"reward\":1}").expect_err("there is no response")[0].pointer, "/response");
        let nested = read(r#"{"response":{"output":[[{}, 7]]},"reward":1}"#).expect_err("an item is an object");
        assert_eq!(nested[0].pointer, "/response/output/0/1");
        let number = read(r#"{"response":{"output":[7]},"reward":1}"#).expect_err("an item is an object");
        assert_eq!(number[0].pointer, "/response/output/0");
    }

    #[test]
    fn an_item_that_cannot_be_read_is_refused_with_its_path() {
        let cases = [
            (CALLS.replace(r#"{"role":"user","content":"q"}"#, "7"), "/responses_create_params/input/0"),
            (CALLS.replace(r#"[{"role":"user","content":"q"}]"#, "7"), "/responses_create_params/input"),
            (CALLS.replace(r#""output":"ok""#, r#""output":1e999"#), "/response/output/2/output"),
        ];
        for (text, pointer) in cases {
            let found = read(&text).expect_err(pointer);
            assert_eq!(found[0].pointer, pointer, "{found:?}");
        }
        assert!(read(&CALLS.replace(r#"[{"role":"user","content":"q"}]"#, "null")).is_ok());
    }

    #[test]
    fn the_states_of_an_agent_in_an_environment_have_each_call_once_and_the_last_has_all_messages() {
        let record = r#"{"reward":1,"responses_create_params":{"input":[]},"response":{"group_id":"7","output":[
            [{"role":"user","content":"look"},
             {"type":"function_call","call_id":"c1","name":"go","arguments":"{}",
              "prompt_token_ids":[1],"generation_token_ids":[2],"generation_log_probs":[-0.1]},
             {"type":"function_call_output","call_id":"c1","output":"a door"}],
            [{"role":"user","content":"[hidden]"},
             {"type":"function_call","call_id":"c1","name":"go","arguments":"{}",
              "prompt_token_ids":[1],"generation_token_ids":[2],"generation_log_probs":[-0.1]},
             {"type":"function_call_output","call_id":"c1","output":"a door"},
             {"type":"message","role":"assistant","content":[{"type":"output_text","text":"out"}],
              "prompt_token_ids":[1,2,3],"generation_token_ids":[4],"generation_log_probs":[-0.2]}]]}}"#;
        let trajectory = one(record);
        assert_eq!(trajectory.group_id.as_deref(), Some("7"));
        let tokens: Vec<&[i32]> = trajectory.turns.iter().map(|turn| turn.tokens.as_slice()).collect();
        assert_eq!(tokens, [[2], [4]]);
        let messages: Vec<Value> =
            serde_json::from_str(trajectory.messages.expect("there are messages").get()).expect("JSON");
        let roles: Vec<&Value> = messages.iter().map(|message| &message["role"]).collect();
        assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
        assert_eq!(messages[0]["content"], "[hidden]");
    }

    #[test]
    fn a_masked_sample_trains_nothing() {
        let trajectory = one(&CALLS.replace("\"reward\":0.5", "\"reward\":0.5,\"mask_sample\":true"));
        assert!(trajectory.turns.is_empty());
        assert_eq!(trajectory.segments[0].tokens, [1, 2, 3, 4, 5, 6]);
        assert_eq!(trajectory.segments[0].loss_mask, [0]);
    }

    #[test]
    fn rollouts_of_a_task_without_an_index_share_a_group() {
        let text = |answer: &str| {
            format!(
                r#"{{"responses_create_params":{{"input":"q"}},"reward":1,"response":{{"output":[
                    {{"type":"message","role":"assistant","content":"{answer}"}}]}}}}"#
            )
        };
        let (one, other) = (self::one(&text("a")), self::one(&text("b")));
        assert_eq!(one.group_id, other.group_id);
        assert_ne!(one.rollout_id, other.rollout_id);
        assert!(one.turns.is_empty() && one.segments.is_empty(), "there are no ids");
    }
}
