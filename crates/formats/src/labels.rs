//! Whose rollout a record is: its policy, ids, group and reward. They come from the options of the caller, from the
//! record, or from the format, in this order of precedence.

use forebay_wire::{Components, Number, Object, Purpose, Sampling, Status, Trajectory};
use serde::{Deserialize, Deserializer, de};
use serde_json::value::RawValue;

use crate::{
    json::{Fields, Problems, parse, value_at},
    options::Options,
};

/// The labels of a rollout that a source may have. Absent ones are left to the next source.
#[derive(Debug, Default)]
pub(crate) struct Labels {
    pub(crate) policy: Option<String>,
    pub(crate) rollout_id: Option<String>,
    pub(crate) group_id: Option<String>,
    pub(crate) group_size: Option<u32>,
    pub(crate) environment: Option<String>,
    pub(crate) execution_id: Option<String>,
    pub(crate) policy_version: Option<i64>,
    pub(crate) status: Option<Status>,
    pub(crate) reward: Option<f64>,
    pub(crate) reward_components: Option<Components>,
    pub(crate) sampling: Option<Sampling>,
    pub(crate) metadata: Option<Box<RawValue>>,
}

impl Labels {
    /// Takes the labels out of an object of a record, under their names in the API.
    pub(crate) fn take(fields: &mut Fields<'_>, base: &str, problems: &mut Problems) -> Self {
        let labels = Self::take_identity(fields, base, problems);
        Self {
            execution_id: problems.take(fields, base, "execution_id").map(Id::into_inner),
            status: problems.take(fields, base, "status"),
            reward_components: problems.take(fields, base, "reward_components"),
            sampling: problems.take(fields, base, "sampling").map(|Object(sampling)| sampling),
            metadata: problems.take(fields, base, "metadata"),
            ..labels
        }
    }

    /// Takes only the labels out of an object that say whose rollout it is and how good. This is for objects that are
    /// free-form, so that few names are taken from them.
    pub(crate) fn take_identity(fields: &mut Fields<'_>, base: &str, problems: &mut Problems) -> Self {
        let mut text = |name: &str| problems.take(fields, base, name).map(Id::into_inner);
        let (policy, policy_name) = (text("policy"), text("policy_name"));
        let (rollout_id, group_id, environment) = (text("rollout_id"), text("group_id"), text("environment"));
        Self {
            policy: policy.or(policy_name),
            rollout_id,
            group_id,
            environment,
            group_size: problems.take(fields, base, "group_size"),
            policy_version: problems.take(fields, base, "policy_version"),
            reward: problems.take(fields, base, "reward").map(|Number(reward)| reward),
            ..Self::default()
        }
    }

    /// The labels that the caller gives, some of which are places in the record.
    pub(crate) fn of_options(options: &Options, record: &RawValue, problems: &mut Problems) -> Self {
        let mut id = |at: Option<&str>| found_at::<Id>(at, record, problems).map(Id::into_inner);
        let (group_id, rollout_id) = (id(options.group_at.as_deref()), id(options.rollout_at.as_deref()));
        Self {
            policy: options.policy.clone(),
            environment: options.environment.clone(),
            group_size: options.group_size,
            policy_version: options.policy_version,
            group_id,
            rollout_id,
            reward: found_at::<Number>(options.reward_at.as_deref(), record, problems).map(|Number(reward)| reward),
            ..Self::default()
        }
    }

    /// These labels, and those of `other` where these are absent.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            policy: self.policy.or(other.policy),
            rollout_id: self.rollout_id.or(other.rollout_id),
            group_id: self.group_id.or(other.group_id),
            group_size: self.group_size.or(other.group_size),
            environment: self.environment.or(other.environment),
            execution_id: self.execution_id.or(other.execution_id),
            policy_version: self.policy_version.or(other.policy_version),
            status: self.status.or(other.status),
            reward: self.reward.or(other.reward),
            reward_components: self.reward_components.or(other.reward_components),
            sampling: self.sampling.or(other.sampling),
            metadata: self.metadata.or(other.metadata),
        }
    }

    /// A trajectory with these labels and nothing else. `id` is its id if no source has one.
    pub(crate) fn trajectory(self, options: &Options, id: impl FnOnce() -> String) -> Trajectory {
        let prefix = options.prefix.as_deref().unwrap_or_default();
        Trajectory {
            policy: self.policy,
            rollout_id: Some(format!("{prefix}{}", self.rollout_id.unwrap_or_else(id))),
            group_id: self.group_id.map(|id| format!("{prefix}{id}")),
            group_size: self.group_size,
            environment: self.environment,
            execution_id: self.execution_id,
            policy_version: self.policy_version,
            status: self.status.unwrap_or_default(),
            reward: self.reward,
            reward_components: self.reward_components.map(|Components(parts)| parts).unwrap_or_default(),
            sampling: self.sampling.unwrap_or_default(),
            metadata: self.metadata,
            // Records of other formats are for training.
            purpose: Purpose::Train,
            suite: None,
            task: None,
            // These are no labels: the reader of the format fills them.
            admission_id: None,
            segments: Vec::new(),
            turns: Vec::new(),
            messages: None,
        }
    }
}

/// Sampling parameters of a request. A temperature of 0 stands for the most probable token, of which engines return the
/// log-probability without a temperature, which is that of temperature 1.
pub(crate) fn sampling(temperature: Option<f32>, top_p: Option<f32>, top_k: Option<i32>) -> Sampling {
    let defaults = Sampling::default();
    Sampling {
        temperature: temperature.filter(|&temperature| temperature > 0.0).unwrap_or(defaults.temperature),
        top_p: top_p.filter(|&top_p| top_p > 0.0).unwrap_or(defaults.top_p),
        // Engines use 0 and -1 for all candidates.
        top_k: top_k.filter(|&top_k| top_k > 0).unwrap_or(defaults.top_k),
    }
}

/// Reads the value at a pointer that the caller gave. It is an error if there is none.
fn found_at<'d, T: Deserialize<'d>>(at: Option<&str>, record: &'d RawValue, problems: &mut Problems) -> Option<T> {
    let at = at?;
    let Some(value) = value_at(record, at) else {
        problems.push(at, "there is nothing at this place, which the options name");
        return None;
    };
    parse(at, value.get()).map_err(|violation| problems.add(violation)).ok()
}

/// An id: a text, or a whole number, which many records use.
#[derive(Clone, Debug)]
pub(crate) struct Id(String);

impl Id {
    pub(crate) fn into_inner(self) -> String {
        self.0
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IdVisitor;

        impl de::Visitor<'_> for IdVisitor {
            type Value = Id;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text or a whole number")
            }

            fn visit_str<E>(self, text: &str) -> Result<Id, E> {
                Ok(Id(text.to_owned()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }
        }

        deserializer.deserialize_any(IdVisitor)
    }
}
