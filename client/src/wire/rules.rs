//! The rules of a policy: the same table in TOML and in `PUT /policies/{p}`.

use serde::{Deserialize, Serialize};

/// How trajectories of a policy are filtered, grouped, batched and kept. Omitted keys take the defaults.
///
/// Replaced rules: `require`, `filter`, `group`, `advantage`, `retention.dropped_s` of what is dropped or discarded and
/// `retention.tombstone_s` of what is purged are fixed for a group when its first rollout arrives. All others, `staleness`
/// among them, hold for all groups from the next request on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct PolicyRules {
    /// Columns without which a trajectory is refused; empty accepts text only.
    pub require: Vec<Requirement>,
    /// When a group is complete.
    #[serde(deserialize_with = "super::object::one")]
    pub group: GroupRules,
    /// What one batch holds.
    #[serde(deserialize_with = "super::object::one")]
    pub batch: BatchRules,
    /// How long a batch is claimed and how often.
    #[serde(deserialize_with = "super::object::one")]
    pub lease: LeaseRules,
    /// Advantage estimator, applied once at finalize.
    pub advantage: Advantage,
    /// How a batch's tokens add up to a loss, fixed when the batch is cut.
    pub loss_weighting: LossWeighting,
    /// The divisor `L` of `constant` loss weighting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_constant: Option<f64>,
    /// How old trained tokens may be at first delivery.
    #[serde(deserialize_with = "super::object::one")]
    pub staleness: StalenessRules,
    /// Bounds of what is not yet trained.
    #[serde(deserialize_with = "super::object::one")]
    pub backlog: BacklogRules,
    /// What settles an acked batch.
    pub settle: Settle,
    /// How long payloads and ledger rows are kept.
    #[serde(deserialize_with = "super::object::one")]
    pub retention: RetentionRules,
    /// CEL filters, in order; the first match wins.
    #[serde(deserialize_with = "super::object::many")]
    pub filter: Vec<FilterRule>,
}

impl Default for PolicyRules {
    fn default() -> Self {
        Self {
            require: vec![Requirement::Tokens],
            group: GroupRules::default(),
            batch: BatchRules::default(),
            lease: LeaseRules::default(),
            advantage: Advantage::default(),
            loss_weighting: LossWeighting::default(),
            loss_constant: None,
            staleness: StalenessRules::default(),
            backlog: BacklogRules::default(),
            settle: Settle::default(),
            retention: RetentionRules::default(),
            filter: Vec::new(),
        }
    }
}

/// A column that a policy may insist on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Requirement {
    /// Segments with token ids (not of aborted and failed rollouts).
    Tokens,
    /// Behaviour log-probabilities in every segment.
    Logprobs,
    /// The weight version, of the trajectory or as spans of every segment.
    PolicyVersion,
    /// Teacher log-probabilities in every segment.
    TeacherLogprobs,
    /// Critic values in every segment.
    Values,
}

/// When a group is complete, and what happens when it is not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GroupRules {
    /// Rollouts of a group.
    pub size: u32,
    /// Rollouts that suffice at the timeout; the group's size when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_size: Option<u32>,
    /// Seconds from the first arrival until the group is decided with what is there.
    pub timeout_s: u64,
    /// Whether a dropped rollout uses up its place.
    pub on_drop: OnDrop,
}

impl Default for GroupRules {
    fn default() -> Self {
        Self { size: 1, min_size: None, timeout_s: 3600, on_drop: OnDrop::default() }
    }
}

/// Whether a dropped rollout uses up its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnDrop {
    /// It does not: producers send replacements, at most four times the size in posts.
    #[default]
    Refill,
    /// It does: when all places are used, the survivors are the group.
    Shrink,
}

/// What one batch, that is one optimizer step, holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct BatchRules {
    /// Groups of a batch.
    pub groups: u32,
    /// Tokens at which a batch is cut short; an oversize group goes alone. Unbounded when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// Which ready groups go first.
    pub order: BatchOrder,
}

impl Default for BatchRules {
    fn default() -> Self {
        Self { groups: 1, max_tokens: None, order: BatchOrder::default() }
    }
}

/// Which ready groups go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum BatchOrder {
    /// In the order in which they became ready.
    #[default]
    Fifo,
    /// Those whose oldest trained token is of the highest version, or that train nothing; among equals as in `fifo`.
    Freshest,
}

/// How long a batch is claimed and how often it may fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LeaseRules {
    /// Seconds until a lease expires unless extended.
    pub ttl_s: u64,
    /// Deliveries that may expire or be given back before the batch is quarantined.
    pub max_deliveries: u32,
    /// Leases that a resume may end before the batch is quarantined; 0 is no bound.
    pub max_resumes: u32,
}

impl Default for LeaseRules {
    fn default() -> Self {
        Self { ttl_s: 600, max_deliveries: 5, max_resumes: 20 }
    }
}

/// Advantage estimator over the rewards of a group; one vote per rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Advantage {
    /// (R - mean) / (unbiased standard deviation + 1e-6).
    #[default]
    Grpo,
    /// R - mean (Dr. GRPO).
    GrpoMean,
    /// R - mean of the others.
    Rloo,
    /// R.
    Reward,
    /// 0: the trainer derives its own from the reward.
    None,
}

/// How a batch's tokens add up to a loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum LossWeighting {
    /// Every rollout is one unit.
    #[default]
    RolloutMean,
    /// Every rollout is one unit, shared equally by its turns.
    TurnMean,
    /// Every trained sample is one unit.
    SampleMean,
    /// Every trained token is one unit.
    TokenMean,
    /// Tokens over a constant (Dr. GRPO); needs `loss_constant`.
    Constant,
}

/// How old trained tokens may be at first delivery, measured when a batch is cut, by the rules and the version of then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StalenessRules {
    /// Versions that a trained token may be behind; unbounded when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(format = Int64, maximum = 4_294_967_295_u32))]
    pub max: Option<u32>,
    /// What happens to a group over the bound.
    pub action: StalenessAction,
}

/// What happens to a group over the staleness bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum StalenessAction {
    /// It becomes `stale` and is never delivered.
    #[default]
    Drop,
    /// Its tokens over the bound are delivered with mask 0; it becomes `stale` when no trained token is left.
    Mask,
}

/// Bounds of what is not yet trained; a post that would open a group beyond them is 429.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct BacklogRules {
    /// Rollouts that are open, ready, leased or returned.
    pub max_ready_rollouts: u64,
    /// Bytes of their stored payloads.
    pub max_bytes: u64,
}

impl Default for BacklogRules {
    fn default() -> Self {
        Self { max_ready_rollouts: 65_536, max_bytes: 8_589_934_592 }
    }
}

/// What settles an acked batch, so that no resume brings it back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Settle {
    /// A checkpoint at or after its step.
    #[default]
    Checkpoint,
    /// The ack itself, for trainers that never save.
    Ack,
}

/// Seconds that payloads are kept; then the ledger row alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RetentionRules {
    /// After the ack, while not settled.
    pub trained_s: u64,
    /// After the checkpoint that settled them.
    pub settled_s: u64,
    /// After a drop, a discard or a staleness verdict; 0 stores no payload of dropped and late rollouts at all.
    pub dropped_s: u64,
    /// Seconds that ledger rows outlive their payloads.
    pub tombstone_s: u64,
}

impl Default for RetentionRules {
    fn default() -> Self {
        Self { trained_s: 604_800, settled_s: 3600, dropped_s: 0, tombstone_s: 604_800 }
    }
}

/// One CEL filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FilterRule {
    /// Reason given for what it matches, unique within the policy.
    pub name: String,
    /// What it looks at.
    pub scope: FilterScope,
    /// CEL expression that evaluates to a bool, 4 KiB at most.
    pub when: String,
    /// What happens to a match.
    pub action: FilterAction,
}

/// What a filter looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum FilterScope {
    /// One rollout at ingest.
    Rollout,
    /// One group at finalize.
    Group,
}

/// What happens to a match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum FilterAction {
    /// A rollout is dropped, a group discarded.
    Drop,
    /// A rollout votes in the baseline and trains nothing.
    Mask,
}
