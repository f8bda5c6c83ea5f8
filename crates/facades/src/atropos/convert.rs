//! A scored group as rollouts, and samples as scored groups again.
//!
//! A sequence is a rollout with one segment, and its score is the reward. What Forebay has no column for is stored in the
//! metadata of the rollout under `atropos`, as it was sent: with each sequence what belongs to it, and with the first
//! one what belongs to the group. So `/batch` returns a group as it came, and filters see everything.

#[cfg(test)]
mod tests;

use std::{borrow::Cow, collections::BTreeMap};

use forebay_domain::warnings::LOGPROB_MAX;
use forebay_wire::{Sample, Sampling, Segment, Status, Trajectory};
use serde_json::value::RawValue;

use crate::atropos::wire::{MASKED, NO_LOGPROB, ScoredData};

/// The key of the metadata under which the fields are stored.
const ATROPOS: &str = "atropos";

/// The field of the first sequence with what belongs to the group as a whole.
const WHOLE: &str = "whole";

/// The ids and labels of the rollouts of a group.
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) policy: String,
    pub(super) group_id: String,
    /// The label of the environment; none if the group has no registered one.
    pub(super) environment: Option<String>,
}

/// Fields with their JSON texts.
type Fields<'a> = Vec<(&'static str, Cow<'a, str>)>;

/// The id of the rollout of a sequence.
pub(super) fn rollout_id(group_id: &str, index: usize) -> String {
    format!("{group_id}-{index}")
}

/// The rollouts of a group, in the order of its sequences.
pub(super) fn rollouts(scored: ScoredData, names: &Names) -> Vec<Trajectory> {
    let sequences = scored.tokens.0.len();
    let lists = [
        ("advantages", &scored.advantages),
        ("ref_logprobs", &scored.ref_logprobs),
        ("messages", &scored.messages),
        ("overrides", &scored.overrides),
        ("distill_token_ids", &scored.distill_token_ids),
        ("distill_logprobs", &scored.distill_logprobs),
    ];
    let mut whole: Fields<'_> = raw("images", scored.images.as_deref()).collect();
    let mut of_sequence: Vec<Fields<'_>> = vec![Vec::new(); sequences];
    for (name, list) in lists {
        let Some(list) = list else { continue };
        match serde_json::from_str::<Vec<&RawValue>>(list.get()) {
            Ok(entries) if entries.len() == sequences => {
                let places = of_sequence.iter_mut().zip(entries);
                places.for_each(|(fields, entry)| fields.push((name, entry.get().into())));
            }
            _ => whole.push((name, list.get().into())),
        }
    }
    let mut logprobs = scored.inference_logprobs.map(|columns| {
        columns.0.into_iter().map(|column| column.into_iter().map(|value| value.0).collect()).collect::<Vec<Vec<f32>>>()
    });
    if let Some(others) = logprobs.take_if(|columns| columns.len() != sequences) {
        whole.push(("inference_logprobs", json(&others)));
    }
    let mut common: Fields<'_> = raw("generation_params", scored.generation_params.as_deref()).collect();
    common.extend(raw("group_overrides", scored.group_overrides.as_deref()));
    common.extend(scored.env_id.map(|env_id| ("env_id", json(&env_id))));
    let columns = scored.tokens.0.into_iter().zip(scored.masks.0).zip(scored.scores.0);
    let mut logprobs = logprobs.into_iter().flatten();
    let mut rollouts = Vec::with_capacity(sequences);
    for (index, (((tokens, masks), score), fields)) in columns.zip(of_sequence).enumerate() {
        let tokens = tokens.into_iter().map(|token| token.0).collect();
        let masks: Vec<i32> = masks.into_iter().map(|mask| mask.0).collect();
        let mut fields = Sequence { fields, common: &common, logprobs: logprobs.next() };
        if index == 0 && !whole.is_empty() {
            fields.fields.push((WHOLE, object(&whole).into()));
        }
        rollouts.push(fields.rollout(names, index, tokens, &masks, score.0, sequences as u32));
    }
    rollouts
}

fn raw<'a>(name: &'static str, value: Option<&'a RawValue>) -> impl Iterator<Item = (&'static str, Cow<'a, str>)> {
    value.map(|value| (name, Cow::from(value.get()))).into_iter()
}

fn json(value: &impl serde::Serialize) -> Cow<'static, str> {
    serde_json::to_string(value).expect("numbers always serialize").into()
}

fn object(fields: &[(&'static str, Cow<'_, str>)]) -> String {
    let fields: Vec<String> = fields.iter().map(|(name, text)| format!("\"{name}\":{text}")).collect();
    format!("{{{}}}", fields.join(","))
}

/// What a sequence has besides tokens, masks and score.
struct Sequence<'a> {
    fields: Fields<'a>,
    /// Fields of all sequences of the group.
    common: &'a [(&'static str, Cow<'a, str>)],
    logprobs: Option<Vec<f32>>,
}

impl<'a> Sequence<'a> {
    fn rollout(
        mut self,
        names: &Names,
        index: usize,
        tokens: Vec<i32>,
        masks: &[i32],
        score: f64,
        group_size: u32,
    ) -> Trajectory {
        let sampling = self.sampling();
        let messages = self.take("messages").and_then(|text| RawValue::from_string(text.into_owned()).ok());
        let segment = self.segment(tokens, masks);
        self.fields.extend_from_slice(self.common);
        let metadata = format!("{{\"{ATROPOS}\":{}}}", object(&self.fields));
        Trajectory {
            policy: Some(names.policy.clone()),
            rollout_id: Some(rollout_id(&names.group_id, index)),
            group_id: Some(names.group_id.clone()),
            group_size: Some(group_size),
            environment: names.environment.clone(),
            // A rollout without a segment is accepted by every policy only if it failed.
            status: if segment.is_some() { Status::Completed } else { Status::Failed },
            reward: Some(score),
            sampling,
            segments: segment.into_iter().collect(),
            messages,
            metadata: Some(RawValue::from_string(metadata).expect("it is put together from valid JSON")),
            ..Trajectory::default()
        }
    }

    fn take(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let place = self.fields.iter().position(|(field, _)| *field == name)?;
        Some(self.fields.swap_remove(place).1)
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().chain(self.common).find(|(field, _)| *field == name).map(|(_, text)| text.as_ref())
    }

    /// The segment, and fields for what does not follow from it. Fewer than two tokens have nothing to predict, so they
    /// are no segment.
    fn segment(&mut self, tokens: Vec<i32>, masks: &[i32]) -> Option<Segment> {
        if tokens.len() < 2 {
            self.fields.push(("tokens", json(&tokens)));
            self.fields.push(("masks", json(&masks)));
            self.fields.extend(self.logprobs.take().map(|logprobs| ("inference_logprobs", json(&logprobs))));
            return None;
        }
        let is_trained = |mask: &i32| *mask != MASKED;
        // The first token has no tokens before it, so it is part of the prompt whatever its mask says.
        let begins = masks.iter().skip(1).position(is_trained).map_or(tokens.len() - 1, |trained| trained + 1);
        let trains = !self.advantage_is_zero();
        let loss_mask: Vec<u8> = masks[begins..].iter().map(|mask| u8::from(trains && is_trained(mask))).collect();
        if !masks.iter().copied().eq(crate::atropos::convert::masks(&tokens, &loss_mask)) {
            self.fields.push(("masks", json(&masks)));
        }
        let logprobs = self.logprobs.take().and_then(|logprobs| {
            let prompt = logprobs.get(..begins).is_some_and(|prompt| prompt.iter().all(|value| *value == NO_LOGPROB));
            let is_possible = |(value, mask): (&f32, &u8)| *mask == 0 || *value <= LOGPROB_MAX;
            let response = logprobs.get(begins..).unwrap_or_default();
            if prompt && response.len() == loss_mask.len() && response.iter().zip(&loss_mask).all(is_possible) {
                return Some(response.to_vec());
            }
            self.fields.push(("inference_logprobs", json(&logprobs)));
            None
        });
        Some(Segment { tokens, loss_mask, logprobs, ..Segment::default() })
    }

    /// Whether the environment says that the sequence must not change the weights.
    fn advantage_is_zero(&self) -> bool {
        #[derive(Default, serde::Deserialize)]
        #[serde(default)]
        struct Override {
            set_advantage_to_zero: serde_json::Value,
        }
        let read: Override =
            self.field("overrides").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        match read.set_advantage_to_zero {
            serde_json::Value::Bool(is_set) => is_set,
            serde_json::Value::Number(number) => number.as_f64() != Some(0.0),
            _ => false,
        }
    }

    /// How the sequence was sampled. The example trainer reads the temperature from the same places in the same order.
    fn sampling(&self) -> Sampling {
        let number = |field: &str, name: &str| -> Option<f64> {
            let fields: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(self.field(field)?).ok()?;
            serde_json::from_str(fields.get(name)?.get()).ok()
        };
        let defaults = Sampling::default();
        let temperature = ["overrides", "generation_params", "group_overrides"]
            .into_iter()
            .find_map(|field| number(field, "temperature"))
            .map(|value| value as f32)
            .filter(|value| value.is_finite() && *value > 0.0);
        let top_p = number("generation_params", "top_p").map(|value| value as f32);
        let top_k = number("generation_params", "top_k").filter(|value| value.fract() == 0.0);
        Sampling {
            temperature: temperature.unwrap_or(defaults.temperature),
            top_p: top_p.filter(|value| *value > 0.0 && *value <= 1.0).unwrap_or(defaults.top_p),
            top_k: top_k.map(|value| value as i32).filter(|value| *value > 0).unwrap_or(defaults.top_k),
        }
    }
}

/// The masks of a segment: the token where it is trained.
fn masks<'s>(tokens: &'s [i32], loss_mask: &'s [u8]) -> impl Iterator<Item = i32> + 's {
    let prompt = tokens.len() - loss_mask.len();
    let of_response = tokens[prompt..].iter().zip(loss_mask);
    let of_response = of_response.map(|(token, is_trained)| if *is_trained == 1 { *token } else { MASKED });
    std::iter::repeat_n(MASKED, prompt).chain(of_response)
}

/// Appends the scored group of samples, in the form in which it was posted. Fields that no sequence has are null.
///
/// Rules may have dropped sequences of the group, and masked tokens of others. Samples that were not posted as scored
/// groups have the fields that follow from their columns.
pub(super) fn scored_data(text: &mut Vec<u8>, samples: &[Sample]) {
    let rows: Vec<Row<'_>> = samples.iter().map(Row::new).collect();
    let each = |text: &mut Vec<u8>, name: &str, write: &dyn Fn(&mut Vec<u8>, &Row<'_>)| {
        text.extend_from_slice(format!("\"{name}\":").as_bytes());
        list(text, rows.iter(), |text, row| write(text, row));
    };
    text.push(b'{');
    each(text, "tokens", &|text, row| row.tokens(text));
    text.push(b',');
    each(text, "masks", &|text, row| row.masks(text));
    text.push(b',');
    each(text, "scores", &|text, row| value(text, &row.sample.reward.unwrap_or(0.0)));
    let stored: [(&str, Stored); 11] = [
        ("advantages", Stored::Each(b"[]")),
        ("ref_logprobs", Stored::Each(b"[]")),
        ("messages", Stored::Each(b"[]")),
        ("generation_params", Stored::Common),
        ("inference_logprobs", Stored::Each(b"[]")),
        ("overrides", Stored::Each(b"{}")),
        ("group_overrides", Stored::Common),
        ("images", Stored::Whole),
        ("env_id", Stored::Common),
        ("distill_token_ids", Stored::Each(b"[]")),
        ("distill_logprobs", Stored::Each(b"[]")),
    ];
    let whole = rows.iter().find_map(|row| row.fields.get(WHOLE)).and_then(|raw| Row::fields_of(raw));
    for (name, kind) in stored {
        text.push(b',');
        let of_group = whole.as_ref().and_then(|fields| fields.get(name));
        let common = || rows.iter().find_map(|row| row.fields.get(name));
        match kind {
            Stored::Each(none) if of_group.is_none() && rows.iter().any(|row| row.has(name)) => {
                each(text, name, &|text, row| row.entry(text, name, none));
            }
            kind => {
                let raw = if matches!(kind, Stored::Common) { common() } else { of_group };
                text.extend_from_slice(format!("\"{name}\":{}", raw.map_or("null", |raw| raw.get())).as_bytes());
            }
        }
    }
    text.push(b'}');
}

/// Where a field is stored.
#[derive(Clone, Copy)]
enum Stored {
    /// With each sequence, and what stands for it where a sequence has none.
    Each(&'static [u8]),
    /// The same with each sequence.
    Common,
    /// With the first sequence.
    Whole,
}

/// A sample and the fields in its metadata.
struct Row<'a> {
    sample: &'a Sample,
    fields: BTreeMap<Cow<'a, str>, &'a RawValue>,
}

impl<'a> Row<'a> {
    fn new(sample: &'a Sample) -> Self {
        let stored = sample.metadata.as_deref().and_then(Self::fields_of);
        let fields = stored.and_then(|fields| Self::fields_of(fields.get(ATROPOS)?)).unwrap_or_default();
        Self { sample, fields }
    }

    fn fields_of(raw: &'a RawValue) -> Option<BTreeMap<Cow<'a, str>, &'a RawValue>> {
        serde_json::from_str(raw.get()).ok()
    }

    fn tokens(&self, text: &mut Vec<u8>) {
        match (&self.sample.tokens, self.fields.get("tokens")) {
            (Some(tokens), _) => list(text, tokens.iter(), value),
            (None, Some(raw)) => text.extend_from_slice(raw.get().as_bytes()),
            (None, None) => text.extend_from_slice(b"[]"),
        }
    }

    /// The masks as they were sent, except where the rules mask tokens that were trained.
    fn masks(&self, text: &mut Vec<u8>) {
        let sent = self.fields.get("masks").copied();
        match (self.sample.tokens.as_deref().zip(self.sample.loss_mask.as_deref()), sent) {
            (Some((tokens, loss_mask)), None) => list(text, masks(tokens, loss_mask), |text, mask| value(text, &mask)),
            (Some((_, loss_mask)), Some(sent)) if !self.was_zeroed() => {
                let sent: Vec<i32> = serde_json::from_str(sent.get()).unwrap_or_default();
                let prompt = std::iter::repeat_n(1, sent.len().saturating_sub(loss_mask.len()));
                let is_trained = prompt.chain(loss_mask.iter().copied());
                let masks = sent.iter().zip(is_trained).map(|(mask, bit)| if bit == 1 { *mask } else { MASKED });
                list(text, masks, |text, mask| value(text, &mask));
            }
            (_, sent) => text.extend_from_slice(sent.map_or("[]", RawValue::get).as_bytes()),
        }
    }

    /// Whether nothing of it was trained because its environment asked for that. The trainer reads the override itself.
    fn was_zeroed(&self) -> bool {
        let overrides = self.fields.get("overrides");
        let fields: Fields<'_> = overrides.map(|raw| ("overrides", raw.get().into())).into_iter().collect();
        Sequence { fields, common: &[], logprobs: None }.advantage_is_zero()
    }

    fn has(&self, name: &str) -> bool {
        match name {
            "messages" => self.sample.messages.is_some(),
            "inference_logprobs" => self.sample.logprobs.is_some() || self.fields.contains_key(name),
            _ => self.fields.contains_key(name),
        }
    }

    fn entry(&self, text: &mut Vec<u8>, name: &str, none: &[u8]) {
        let stored = self.fields.get(name).map(|raw| raw.get().as_bytes());
        match name {
            "messages" => {
                let messages = self.sample.messages.as_deref().map(|raw| raw.get().as_bytes());
                text.extend_from_slice(messages.unwrap_or(none));
            }
            "inference_logprobs" if self.sample.logprobs.is_some() => {
                let logprobs = self.sample.logprobs.as_deref().unwrap_or_default();
                let tokens = self.sample.tokens.as_ref().map_or(0, Vec::len);
                let prompt = std::iter::repeat_n(NO_LOGPROB, tokens - logprobs.len());
                list(text, prompt.chain(logprobs.iter().copied()), |text, logprob| value(text, &logprob));
            }
            _ => text.extend_from_slice(stored.unwrap_or(none)),
        }
    }
}

fn list<T>(text: &mut Vec<u8>, entries: impl Iterator<Item = T>, mut write: impl FnMut(&mut Vec<u8>, T)) {
    text.push(b'[');
    for (index, entry) in entries.enumerate() {
        if index > 0 {
            text.push(b',');
        }
        write(text, entry);
    }
    text.push(b']');
}

fn value(text: &mut Vec<u8>, value: &impl serde::Serialize) {
    serde_json::to_writer(text, value).expect("finite numbers always serialize");
}
