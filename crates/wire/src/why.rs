//! Why: the states of policies with their causes, and what became of one rollout, group or batch, in sentences.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Numbers by their names.
pub type WhyNumbers = BTreeMap<String, serde_json::Number>;

/// How a policy is, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PolicyCondition {
    /// The store cannot write, or the tallies do not add up.
    Broken,
    /// A batch fails again and again, a lease lasts too long, or something is quarantined.
    Stuck,
    /// A trainer waits for a batch.
    Starved,
    /// A batch is ready and nobody asks for it.
    Untaken,
    /// The backlog is full, and agents are refused.
    HeldBack,
    /// Groups are too old when a batch could take them, or nearly.
    Stale,
    /// Half of what is trained has equal rewards.
    Flat,
    /// Half of what arrives is lost, or twice as much as before.
    Dropping,
    /// Nothing of the above.
    Fed,
    /// Nothing was posted and nobody asked for an hour.
    Idle,
}

impl PolicyCondition {
    /// All conditions, the worst first.
    pub const ALL: [Self; 10] = [
        Self::Broken,
        Self::Stuck,
        Self::Starved,
        Self::Untaken,
        Self::HeldBack,
        Self::Stale,
        Self::Flat,
        Self::Dropping,
        Self::Fed,
        Self::Idle,
    ];

    /// The name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Broken => "broken",
            Self::Stuck => "stuck",
            Self::Starved => "starved",
            Self::Untaken => "untaken",
            Self::HeldBack => "held-back",
            Self::Stale => "stale",
            Self::Flat => "flat",
            Self::Dropping => "dropping",
            Self::Fed => "fed",
            Self::Idle => "idle",
        }
    }

    /// A sign that tells the conditions apart without colours.
    #[must_use]
    pub const fn glyph(self) -> &'static str {
        match self {
            Self::Broken => "✖",
            Self::Stuck => "■",
            Self::Starved => "▼",
            Self::Untaken => "△",
            Self::HeldBack => "▮",
            Self::Stale => "◷",
            Self::Flat => "≈",
            Self::Dropping => "▽",
            Self::Fed => "●",
            Self::Idle => "○",
        }
    }
}

/// Why a policy is as it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyWhy {
    /// Policy.
    pub policy: String,
    /// The service's time of the facts.
    pub at: String,
    /// How the policy is: the worst state that applies.
    pub state: PolicyCondition,
    /// The state in one sentence.
    pub headline: String,
    /// What explains the state, the most important first.
    pub causes: Vec<WhyCause>,
    /// What was looked at and is not the reason.
    pub ruled_out: Vec<WhyFinding>,
    /// What cannot be known.
    pub unknown: Vec<WhyFinding>,
}

/// Something that explains a state.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WhyCause {
    /// Stable code.
    pub code: String,
    /// Filter that the cause is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// Importance, 0 to 1. Causes of waiting are ranked by the part of the time that would be saved without them.
    pub weight: f64,
    /// One sentence.
    pub text: String,
    /// The numbers of the sentence, by their names. Names of seconds end with `_s`, names of bytes with `_bytes`, and
    /// `share` is a part of a whole.
    #[cfg_attr(feature = "openapi", schema(value_type = BTreeMap<String, f64>))]
    pub numbers: WhyNumbers,
    /// A call that shows what the cause is about, relative to the service's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub see: Option<String>,
}

/// Something that was looked at and explains nothing, or that cannot be known.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WhyFinding {
    /// Stable code.
    pub code: String,
    /// One sentence.
    pub text: String,
    /// The numbers of the sentence, by their names.
    #[cfg_attr(feature = "openapi", schema(value_type = BTreeMap<String, f64>))]
    pub numbers: WhyNumbers,
}

/// What became of a rollout, group, batch or session.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct IdWhy {
    /// The id that was asked about.
    pub id: String,
    /// What it names.
    pub kind: IdKind,
    /// Its policy.
    pub policy: String,
    /// The service's time of the facts.
    pub at: String,
    /// Its state, as in the ledger.
    pub state: String,
    /// The state in one sentence.
    pub headline: String,
    /// The steps of its life, the oldest first.
    pub causes: Vec<LifeStep>,
    /// Empty; policies have it.
    pub ruled_out: Vec<WhyFinding>,
    /// Empty; policies have it.
    pub unknown: Vec<WhyFinding>,
    /// A call that shows it, relative to the service's address.
    pub see: String,
    /// What else has the same id.
    pub also: Vec<IdMatch>,
}

/// Something that has an id.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct IdMatch {
    /// What it is.
    pub kind: IdKind,
    /// Its policy.
    pub policy: String,
}

/// What an id names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum IdKind {
    /// A rollout.
    Rollout,
    /// A group.
    Group,
    /// A batch.
    Batch,
    /// A session whose rollout has not arrived.
    Session,
}

impl IdKind {
    /// The name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rollout => "rollout",
            Self::Group => "group",
            Self::Batch => "batch",
            Self::Session => "session",
        }
    }
}

/// A step in a life.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LifeStep {
    /// Stable code.
    pub code: String,
    /// When it happened; null if it has not happened yet, and if the time is not known.
    pub at: Option<String>,
    /// One sentence.
    pub text: String,
    /// The rule that decided, as it was when the group was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
}

/// All policies that the caller may access, the worst first.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Overview {
    /// The service's time of the facts, at most a second or two ago.
    pub at: String,
    /// Policies, the worst first; among equals by name.
    pub policies: Vec<OverviewPolicy>,
    /// Value of `after` for the next page; null on the last page.
    pub next: Option<String>,
}

/// A policy at a glance.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverviewPolicy {
    /// Policy.
    pub policy: String,
    /// How it is: the worst state that applies.
    pub state: PolicyCondition,
    /// The state in one sentence.
    pub headline: String,
    /// Rollouts received per minute in the last 15 minutes; null without a history.
    pub received_per_min: Option<f64>,
    /// Their tokens per minute.
    pub tokens_per_min: Option<f64>,
    /// Number of ready groups.
    pub ready_groups: i64,
    /// Number of groups that a batch needs.
    pub needed_groups: i64,
    /// How old the groups of the newest steps were when they were trained; null without a step.
    pub staleness: Option<OverviewStaleness>,
    /// Rewards of what was trained; null without a step.
    pub reward: Option<OverviewReward>,
    /// Rollouts of the last hour that will not be trained: dropped, late, or in groups that were discarded or went
    /// stale; null without a history.
    pub lost_last_hour: Option<i64>,
    /// When the last rollout arrived.
    pub last_post_at: Option<String>,
    /// When the last batch was acked.
    pub last_ack_at: Option<String>,
    /// Current weight version.
    pub version: i64,
}

/// Staleness at a glance, over the newest 20 steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverviewStaleness {
    /// Mean.
    pub mean: f64,
    /// Greatest.
    pub max: i64,
    /// The bound in the rules.
    pub bound: Option<u64>,
}

/// Rewards at a glance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverviewReward {
    /// Mean reward of the newest step.
    pub trained: Option<f64>,
    /// How much it is higher than 20 steps before; null with fewer steps.
    pub change_20_steps: Option<f64>,
}
