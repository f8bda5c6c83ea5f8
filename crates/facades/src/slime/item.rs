//! Items of slime's rollout buffer as trajectories, and back.
//!
//! The messages of an item are stored as messages, and its tokens as a segment. The rest is the metadata of the rollout,
//! with `null` in the places of what is stored elsewhere, so that filters can use it. The entry [`MARK`] says what to put
//! back. So an item comes back as it was written, except that log-probabilities are 32-bit floats, and 0 where they were
//! null.

use std::collections::BTreeMap;

use forebay_wire::{Logprobs, Mask, Number, Purpose, Sample, Sampling, Segment, Status, Trajectory, Violation};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::object::{Object, ObjectWriter};

/// The entry of the metadata that marks an item. Items must not have it.
const MARK: &str = "$forebay";

/// Fields of an item that are stored as columns of its segment.
const COLUMNS: [&str; 4] = ["tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs"];

/// The most bytes of an `instance_id`. The ids of its groups and of its execution are longer.
const INSTANCE_ID_BYTES_MAX: usize = 200;

/// An item that was written.
pub(super) struct Item {
    /// Its instance, as text.
    pub(super) instance_id: String,
    /// What is stored. Its group is that of the instance's first generation.
    pub(super) trajectory: Trajectory,
}

/// What is wrong with a field.
pub(super) fn wrong(field: &str, detail: impl Into<String>) -> Vec<Violation> {
    let pointer = if field.is_empty() { String::new() } else { format!("/{field}") };
    vec![Violation { pointer, detail: detail.into() }]
}

impl Item {
    /// Reads an item. `reward_key` names the entry of a reward with several names.
    pub(super) fn parse(text: &str, reward_key: Option<&str>) -> Result<Self, Vec<Violation>> {
        let item = Object::of(text).ok_or_else(|| wrong("", "must be an object"))?;
        if item.has(MARK) {
            return Err(wrong(MARK, "is reserved"));
        }
        let instance_id = id(&item, "instance_id", INSTANCE_ID_BYTES_MAX)?
            .ok_or_else(|| wrong("instance_id", "is required: the task, whose items form a group"))?;
        let extra = item.get("extra_info").and_then(Object::of).unwrap_or_default();
        let messages = item.get("messages").filter(|text| text.starts_with('['));
        let segment = segment(&item)?;
        let is_empty = segment.is_none() && messages.is_some_and(ends_without_content);
        // Nothing was generated, so there is nothing to reward. The buffer drops a rollout without a reward.
        let reward = if is_empty { None } else { reward(&item, reward_key)? };
        let trajectory = Trajectory {
            purpose: Purpose::Train,
            suite: None,
            task: None,
            policy: None,
            rollout_id: id(&item, "uid", forebay_domain::ids::ID_BYTES_MAX)?,
            group_id: None,
            group_size: None,
            environment: None,
            execution_id: None,
            policy_version: version(&item),
            admission_id: None,
            status: if is_empty { Status::Failed } else { status(&item, &extra) },
            reward,
            reward_components: std::collections::BTreeMap::new(),
            sampling: sampling(&extra),
            messages: messages.map(raw),
            metadata: Some(raw(metadata(&item, &extra, messages, segment.is_some()))),
            segments: segment.into_iter().collect(),
            turns: Vec::new(),
        };
        Ok(Self { instance_id, trajectory })
    }
}

/// A JSON text as a value. It is a part of a valid text, or was written here.
fn raw(text: impl AsRef<str>) -> Box<RawValue> {
    RawValue::from_string(text.as_ref().to_owned()).expect("the text is JSON")
}

/// An id, which may be a text or an integer.
fn id(item: &Object<'_>, key: &str, bytes_max: usize) -> Result<Option<String>, Vec<Violation>> {
    let Some(text) = item.get(key) else { return Ok(None) };
    // An integer may have any number of digits, as in Python.
    let is_integer = text.strip_prefix('-').unwrap_or(text).bytes().all(|byte| byte.is_ascii_digit());
    let id = match serde_json::from_str(text) {
        Ok(id) => id,
        Err(_) if is_integer => text.to_owned(),
        Err(_) => return Err(wrong(key, "must be a text or an integer")),
    };
    if id.is_empty() || id.len() > bytes_max || id.chars().any(char::is_control) {
        return Err(wrong(key, format!("must have 1 to {bytes_max} bytes and no control characters")));
    }
    Ok(Some(id))
}

/// The reward, which may be an object with several rewards by name, as for slime's `--reward-key`.
fn reward(item: &Object<'_>, reward_key: Option<&str>) -> Result<Option<f64>, Vec<Violation>> {
    let Some(sent) = item.get("reward") else { return Ok(None) };
    let Some(named) = Object::of(sent) else { return number("reward", sent) };
    let Some(key) = reward_key else {
        let detail = "is an object: say with `reward_key` in [facades.slime] which of its entries is the reward";
        return Err(wrong("reward", detail));
    };
    if !named.has(key) {
        return Err(wrong("reward", format!("has no entry `{key}`, which `reward_key` in [facades.slime] names")));
    }
    named.get(key).map_or(Ok(None), |sent| number("reward", sent))
}

fn number(field: &str, sent: &str) -> Result<Option<f64>, Vec<Violation>> {
    let number = serde_json::from_str(sent).ok().map(|Number(number)| number).filter(|number| number.is_finite());
    number.map(Some).ok_or_else(|| wrong(field, "must be a finite number"))
}

/// Whether the last message has no content, as after a failed query.
fn ends_without_content(messages: &str) -> bool {
    let messages: Vec<&RawValue> = serde_json::from_str(messages).unwrap_or_default();
    let last = messages.last().and_then(|last| Object::of(last.get()));
    last.is_some_and(|last| last.get("content").is_none() && last.get("tool_calls").is_none())
}

fn status(item: &Object<'_>, extra: &Object<'_>) -> Status {
    if let Some(status) = item.read("status") {
        return status;
    }
    let reason: Option<String> = extra.read("finish_reason").or_else(|| item.read("finish_reason"));
    match reason.as_deref() {
        Some("length") => Status::Truncated,
        Some("abort") => Status::Aborted,
        _ => Status::Completed,
    }
}

/// How the tokens were sampled, as far as it is known and valid.
fn sampling(extra: &Object<'_>) -> Sampling {
    let temperature = extra.read("temperature").filter(|value: &f32| value.is_finite() && *value > 0.0);
    Sampling { temperature: temperature.unwrap_or(Sampling::default().temperature), ..Sampling::default() }
}

/// The oldest of the versions that generated the item.
fn version(item: &Object<'_>) -> Option<i64> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Version {
        Number(i64),
        Text(String),
    }
    let known = |version: Version| match version {
        Version::Number(version) => Some(version),
        Version::Text(text) => text.parse().ok(),
    };
    let one = item.read::<Version>("policy_version").and_then(known);
    let versions: Vec<Version> = item.read("weight_versions").unwrap_or_default();
    let all: Option<Vec<i64>> = versions.into_iter().map(known).collect();
    one.or_else(|| all?.into_iter().min()).filter(|version| *version >= 0)
}

/// The tokens of an item with the fields of slime's `Sample`; none if it has only text.
fn segment(item: &Object<'_>) -> Result<Option<Segment>, Vec<Violation>> {
    let Some(tokens) = column::<Vec<i32>>(item, "tokens", "token ids")?.filter(|tokens| !tokens.is_empty()) else {
        return Ok(None);
    };
    let response_length = column::<u32>(item, "response_length", "a number of tokens")?;
    let mask = column(item, "loss_mask", "0 and 1 for each response token")?.map(|Mask(mask)| mask);
    let mask = match (mask, response_length) {
        (Some(mask), _) => mask,
        (None, Some(length)) if (length as usize) < tokens.len() => vec![1; length as usize],
        (None, Some(_)) => return Err(wrong("response_length", "must be less than the number of `tokens`")),
        (None, None) => {
            return Err(wrong("response_length", "is required with `tokens`, unless there is a `loss_mask`"));
        }
    };
    let is_removed = item.read("remove_sample") == Some(true);
    let logprobs = |key: &str| {
        let column = column(item, key, "log-probabilities of the response tokens")?;
        Ok::<_, Vec<Violation>>(column.map(|Logprobs(logprobs)| logprobs))
    };
    Ok(Some(Segment {
        columns: BTreeMap::default(),
        media: Vec::new(),
        kind: None,
        tokens,
        loss_mask: if is_removed { vec![0; mask.len()] } else { mask },
        response_length,
        logprobs: logprobs("rollout_log_probs")?,
        teacher_logprobs: logprobs("teacher_log_probs")?,
        values: None,
        advantages: None,
        turns: None,
        versions: None,
    }))
}

/// A value of an expected type. None if it is absent or null.
fn column<'a, T: Deserialize<'a>>(item: &Object<'a>, key: &str, what: &str) -> Result<Option<T>, Vec<Violation>> {
    let Some(text) = item.get(key) else { return Ok(None) };
    serde_json::from_str(text).map(Some).map_err(|error| wrong(key, format!("must be {what}: {error}")))
}

/// What is put back into an item that is read.
#[derive(Default, Deserialize, serde::Serialize)]
#[serde(default)]
struct Mark {
    /// Fields whose values are columns of the segment.
    columns: Vec<String>,
    /// Whether the messages are put back.
    messages: bool,
    /// Whether the messages are put back into `extra_info`, too, where slime's generator repeats them.
    extra_messages: bool,
}

/// The rest of an item, with a mark.
fn metadata(item: &Object<'_>, extra: &Object<'_>, messages: Option<&str>, has_tokens: bool) -> String {
    let mark = Mark {
        columns: COLUMNS
            .into_iter()
            .filter(|column| has_tokens && item.get(column).is_some())
            .map(str::to_owned)
            .collect(),
        messages: messages.is_some(),
        extra_messages: messages.is_some() && extra.get("messages") == messages,
    };
    let mut text = String::new();
    let mut writer = ObjectWriter::new(&mut text);
    for (key, value) in item.entries() {
        match key {
            "messages" if mark.messages => writer.entry(key, "null"),
            "extra_info" if mark.extra_messages => write_extra(writer.key(key), extra, "null"),
            _ if mark.columns.iter().any(|column| column == key) => writer.entry(key, "null"),
            _ => writer.entry(key, value),
        }
    }
    writer.entry(MARK, &serde_json::to_string(&mark).expect("a mark is plain data"));
    writer.end();
    text
}

/// Writes `extra_info` with other messages.
fn write_extra(text: &mut String, extra: &Object<'_>, messages: &str) {
    let mut writer = ObjectWriter::new(text);
    for (key, value) in extra.entries() {
        writer.entry(key, if key == "messages" { messages } else { value });
    }
    writer.end();
}

/// Writes an item for its reader, from the rows of its rollout. Returns the text of its `instance_id`.
pub(super) fn write(text: &mut String, rows: &[Sample]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let messages = first.messages.as_deref().map_or("[]", RawValue::get);
    let metadata = first.metadata.as_deref().map_or("{}", RawValue::get);
    let fields = Object::of(metadata).unwrap_or_default();
    match fields.read::<Mark>(MARK) {
        Some(mark) => {
            write_back(text, first, &fields, &mark, messages);
            fields.get("instance_id").unwrap_or("null").to_owned()
        }
        None => write_other(text, rows, messages, metadata),
    }
}

fn write_back(text: &mut String, row: &Sample, fields: &Object<'_>, mark: &Mark, messages: &str) {
    let mut writer = ObjectWriter::new(text);
    for (key, value) in fields.entries() {
        match key {
            MARK => {}
            "messages" if mark.messages => writer.entry(key, messages),
            "extra_info" if mark.extra_messages => {
                write_extra(writer.key(key), &Object::of(value).unwrap_or_default(), messages);
            }
            _ if mark.columns.iter().any(|column| column == key) => writer.entry(key, &column_of(row, key)),
            _ => writer.entry(key, value),
        }
    }
    writer.end();
}

fn column_of(row: &Sample, key: &str) -> String {
    let text = match key {
        "tokens" => serde_json::to_string(&row.tokens),
        "loss_mask" => serde_json::to_string(&row.loss_mask),
        "rollout_log_probs" => serde_json::to_string(&row.logprobs),
        _ => serde_json::to_string(&row.teacher_logprobs),
    };
    text.expect("numbers are plain data")
}

/// Writes a rollout that was not written as an item, with the fields that slime's trainer requires.
fn write_other(text: &mut String, rows: &[Sample], messages: &str, metadata: &str) -> String {
    let row = &rows[0];
    let quoted = |id: &str| serde_json::to_string(id).expect("a text is always JSON");
    let instance_id = quoted(&row.group_id);
    let mut writer = ObjectWriter::new(text);
    writer.entry("uid", &quoted(&row.rollout_id));
    writer.entry("instance_id", &instance_id);
    writer.entry("messages", messages);
    writer.entry("reward", &row.reward.map_or("null".to_owned(), |reward| serde_json::json!(reward).to_string()));
    writer.entry("extra_info", metadata);
    // A rollout of several segments is no single sequence. It has only its messages.
    if rows.len() == 1 && row.tokens.is_some() {
        for column in COLUMNS {
            let value = column_of(row, column);
            if value != "null" {
                writer.entry(column, &value);
            }
        }
        writer.entry("response_length", &row.response_length.to_string());
    }
    writer.end();
    instance_id
}
