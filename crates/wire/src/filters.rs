//! `/filters/variables` and `/policies/{policy}/filters/try`: for people who write filters.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{FilterRule, FilterScope};

/// The names that filters know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FilterNames {
    /// The variables: first those of scope `rollout`, then those of scope `group`.
    pub variables: Vec<FilterVariable>,
    /// Functions that are called as `name(..)`.
    pub functions: Vec<String>,
    /// Functions that are called as `value.name(..)`.
    pub methods: Vec<String>,
    /// Macros; all but `has` are called as `list.name(x, ..)`.
    pub macros: Vec<String>,
}

/// A variable of filters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FilterVariable {
    /// The scope of the filters that may use it. A variable of both scopes has an entry for each.
    pub scope: FilterScope,
    /// Its name in expressions.
    pub name: String,
    /// The type of its value, such as `double or null`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What it means.
    pub meaning: String,
    /// A value that many records have, as JSON.
    pub typical: String,
}

/// Filters to try on the groups that were decided last. Nothing is changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TryRequest {
    /// The draft: all filters of the policy, as in its rules.
    #[serde(deserialize_with = "super::object::many")]
    pub filter: Vec<FilterRule>,
    /// The most groups to try it on, 1 to 2,000; 500 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 2000))]
    pub groups: Option<u32>,
    /// Only groups of this environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// The most examples of changed groups, at most 100; 10 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(maximum = 100))]
    pub examples: Option<u32>,
}

/// What a draft of filters would have done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TryResult {
    /// What it was tried on.
    pub looked_at: LookedAt,
    /// What became of the groups.
    pub groups: TriedGroups,
    /// What became of their rollouts.
    pub rollouts: TriedRollouts,
    /// How many groups the draft decides differently from the rules that the policy has now.
    pub changed_groups: u64,
    /// The newest of them.
    pub changes: Vec<TriedChange>,
    /// Filters of the draft that could not be evaluated on some records. There they do not match.
    pub failed: Vec<FailedFilter>,
    /// Why the draft could not be tried on some rollouts. The groups of these rollouts are `unjudged`.
    pub unjudged: Vec<Unjudged>,
    /// What to keep in mind about the result.
    pub notes: Vec<TryNote>,
    /// The service's time.
    pub at: String,
}

/// What a draft was tried on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LookedAt {
    /// Number of groups.
    pub groups: u64,
    /// Number of their rollouts.
    pub rollouts: u64,
    /// Number of groups that were read to find them: also open ones, those of other environments, and those that were
    /// discarded before the rules could decide them.
    pub examined: u64,
    /// The decision of the first of the groups; null without groups.
    pub from: Option<String>,
    /// The decision of the last of the groups.
    pub to: Option<String>,
    /// Bytes of the payloads that were read, unpacked.
    pub payload_bytes: u64,
    /// Whether there was time and memory for all of the groups. If not, the oldest are missing.
    pub complete: bool,
}

/// Groups by what became of them: as they were decided, by the filters that the policy has now, and by the draft.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TriedGroups {
    /// As they were decided.
    pub as_decided: GroupOutcomes,
    /// By the filters that the policy has now.
    pub rules_now: GroupOutcomes,
    /// By the draft.
    pub draft: GroupOutcomes,
}

/// What became of groups.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GroupOutcomes {
    /// Groups that became ready.
    pub ready: u64,
    /// Groups that were discarded, by the reason.
    pub discarded: BTreeMap<String, u64>,
    /// Groups that would still wait for rollouts, because other rollouts are dropped.
    pub open: u64,
    /// Groups that cannot be judged.
    pub unjudged: u64,
}

/// Rollouts by what became of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TriedRollouts {
    /// As they were decided.
    pub as_decided: RolloutOutcomes,
    /// By the filters that the policy has now.
    pub rules_now: RolloutOutcomes,
    /// By the draft.
    pub draft: RolloutOutcomes,
}

/// What became of rollouts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RolloutOutcomes {
    /// Kept rollouts.
    pub kept: u64,
    /// Masked rollouts, by the filter.
    pub masked: BTreeMap<String, u64>,
    /// Dropped rollouts, by the reason.
    pub dropped: BTreeMap<String, u64>,
    /// Rollouts that arrived after the decision of their group.
    pub late: u64,
    /// Rollouts of groups that cannot be judged.
    pub unjudged: u64,
}

/// What becomes of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TriedOutcome {
    /// What becomes of it.
    pub state: TriedState,
    /// Why it is discarded, or why it cannot be judged.
    pub reason: Option<String>,
}

/// What becomes of a group that filters are tried on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum TriedState {
    /// It becomes ready.
    Ready,
    /// It is discarded.
    Discarded,
    /// It would still wait for rollouts.
    Open,
    /// It cannot be judged.
    Unjudged,
}

/// A group that a draft decides differently from the rules that the policy has now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TriedChange {
    /// Its id.
    pub group_id: String,
    /// How it was decided.
    pub was: TriedOutcome,
    /// How the filters that the policy has now decide it.
    pub now: TriedOutcome,
    /// How the draft decides it.
    pub would_be: TriedOutcome,
    /// Number of rollouts that the draft keeps or masks.
    pub members: u64,
    /// Their rewards, at most the first 64.
    pub rewards: Vec<f64>,
}

/// A filter that could not be evaluated on some records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FailedFilter {
    /// Its name.
    pub filter: String,
    /// Its scope.
    pub scope: FilterScope,
    /// Number of records.
    pub count: u64,
    /// Why, for the newest of them.
    pub message: String,
    /// The group of the newest of them.
    pub group_id: String,
    /// The newest of them, if it is a rollout.
    pub rollout_id: Option<String>,
}

/// Rollouts on which a draft could not be tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Unjudged {
    /// `payload-purged`, `payload-damaged` or `payload-too-large`.
    pub reason: String,
    /// Number of rollouts.
    pub rollouts: u64,
}

/// What to keep in mind about a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TryNote {
    /// `flat-groups-enter`, `length-shift`, `refill-not-simulated` or `versions-derived`.
    pub code: String,
    /// A sentence with the numbers.
    pub text: String,
}
