//! The rules of a policy. TOML files and `PUT /policies/{p}` use the same table.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Advantage;

/// How trajectories of a policy are filtered, grouped, batched and kept. Omitted keys take their defaults.
///
/// When rules are replaced, these stay fixed for a group from the arrival of its first rollout: `require`, `filter`,
/// `group`, `columns`, `advantage`, `sessions.retries` of posted turns, `retention.dropped_s` of what is dropped or discarded,
/// and `retention.tombstone_s` of what is purged. All other rules, including `staleness`, apply to all groups from the next request on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct PolicyRules {
    /// Columns that every trajectory must have; others are refused. If empty, trajectories with text alone are accepted
    /// too.
    pub require: Vec<Requirement>,
    /// When a group is complete.
    #[serde(deserialize_with = "super::object::one")]
    pub group: GroupRules,
    /// What one batch holds.
    #[serde(deserialize_with = "super::object::one")]
    pub batch: BatchRules,
    /// How long a lease lasts and how many deliveries a batch has.
    #[serde(deserialize_with = "super::object::one")]
    pub lease: LeaseRules,
    /// Advantage estimator, applied once when the group is finalized.
    pub advantage: Advantage,
    /// How the tokens of a batch are weighted in the loss; fixed when the batch is cut.
    pub loss_weighting: LossWeighting,
    /// The divisor `L` of `constant` loss weighting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_constant: Option<f64>,
    /// How old trained tokens may be when they are first delivered.
    #[serde(deserialize_with = "super::object::one")]
    pub staleness: StalenessRules,
    /// Room for rollouts that are not trained.
    #[serde(deserialize_with = "super::object::one", skip_serializing_if = "AdmissionRules::are_default")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub admissions: AdmissionRules,
    /// Bounds of the data that is not yet trained.
    #[serde(deserialize_with = "super::object::one")]
    pub backlog: BacklogRules,
    /// What settles an acked batch.
    pub settle: Settle,
    /// How long payloads and ledger rows are kept.
    #[serde(deserialize_with = "super::object::one")]
    pub retention: RetentionRules,
    /// How the calls of an agent become segments.
    #[serde(deserialize_with = "super::object::one")]
    pub sessions: SessionRules,
    /// What is kept of an agent's calls besides what is trained.
    #[serde(deserialize_with = "super::object::one")]
    pub record: RecordRules,
    /// Scores that a rollout must have before it is judged.
    #[serde(deserialize_with = "super::object::one", skip_serializing_if = "ScoreRules::are_default")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub scores: ScoreRules,
    /// What rollouts have for each token besides its id, mask and log-probability, by name: at most 32 columns.
    #[serde(deserialize_with = "super::object::named", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub columns: BTreeMap<String, ColumnRule>,
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
            admissions: AdmissionRules::default(),
            backlog: BacklogRules::default(),
            settle: Settle::default(),
            retention: RetentionRules::default(),
            sessions: SessionRules::default(),
            record: RecordRules::default(),
            scores: ScoreRules::default(),
            columns: BTreeMap::new(),
            filter: Vec::new(),
        }
    }
}

/// A column that a policy may require.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Requirement {
    /// Segments with token ids. Not required of aborted and failed rollouts.
    Tokens,
    /// Behaviour log-probabilities in every segment.
    Logprobs,
    /// The weight version, of the trajectory or as spans of every segment.
    PolicyVersion,
    /// Teacher log-probabilities in every segment.
    TeacherLogprobs,
    /// Critic values in every segment.
    Values,
    /// Advantages of tokens in every segment. The rule `advantage = "posted"` requires them, too.
    Advantages,
}

/// When a group is complete, and what happens when it is not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GroupRules {
    /// Number of rollouts of a group.
    pub size: u32,
    /// Number of rollouts that suffice when the group times out; the size of the group when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_size: Option<u32>,
    /// Seconds from the arrival of the first rollout until the group is decided with the rollouts that have arrived.
    pub timeout_s: u64,
    /// Whether a dropped rollout uses up one of the group's places.
    pub on_drop: OnDrop,
}

impl Default for GroupRules {
    fn default() -> Self {
        Self { size: 1, min_size: None, timeout_s: 3600, on_drop: OnDrop::default() }
    }
}

/// Whether a dropped rollout uses up one of the group's places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnDrop {
    /// A dropped rollout uses no place. Producers send replacements; a group accepts at most four times its size in
    /// posts.
    #[default]
    Refill,
    /// A dropped rollout uses a place. When all places are used, the group consists of the rollouts that were not
    /// dropped.
    Shrink,
}

/// Contents of one batch, which is the data of one optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct BatchRules {
    /// Number of groups of a batch.
    pub groups: u32,
    /// Number of tokens that a batch may not exceed, except that a group which exceeds it alone is a batch of its own.
    /// Unbounded when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// Which ready groups are delivered first.
    pub order: BatchOrder,
    /// The shares of environments in each batch, by their labels, at most 64. If this is empty, batches do not depend on
    /// environments. Otherwise, environments that are not named have weight 1 and no minimum, and so have all groups
    /// without a label, together.
    #[serde(deserialize_with = "super::object::named", skip_serializing_if = "BTreeMap::is_empty")]
    pub environments: BTreeMap<String, EnvironmentRules>,
}

impl Default for BatchRules {
    fn default() -> Self {
        Self { groups: 1, max_tokens: None, order: BatchOrder::default(), environments: BTreeMap::new() }
    }
}

/// The share of an environment in each batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EnvironmentRules {
    /// Weight with which the environment shares what the minimums leave, 0.000001 to 1,000,000. It is shared among the
    /// environments that have ready groups.
    pub weight: f64,
    /// The part of each batch that is of this environment at least, 0 to 1. A batch waits for it. The minimums of a
    /// policy add up to at most 1.
    pub min_share: f64,
}

impl Default for EnvironmentRules {
    fn default() -> Self {
        Self { weight: 1.0, min_share: 0.0 }
    }
}

/// Which ready groups are delivered first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum BatchOrder {
    /// Groups in the order in which they became ready.
    #[default]
    Fifo,
    /// Groups whose oldest trained token has the highest version, and groups without trained tokens, are delivered
    /// first; equal groups in the order of `fifo`.
    Freshest,
}

/// How long a lease lasts and how many deliveries of a batch may fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LeaseRules {
    /// Seconds until a lease expires if it is not extended.
    pub ttl_s: u64,
    /// Number of deliveries that may expire or be given back before the batch is quarantined.
    pub max_deliveries: u32,
    /// Number of leases that resumes may end before the batch is quarantined; 0 means unbounded.
    pub max_resumes: u32,
}

impl Default for LeaseRules {
    fn default() -> Self {
        Self { ttl_s: 600, max_deliveries: 5, max_resumes: 20 }
    }
}

/// How the tokens of a batch are weighted in the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum LossWeighting {
    /// Every rollout has the same weight.
    #[default]
    RolloutMean,
    /// Every rollout has the same weight, which its turns share equally.
    TurnMean,
    /// Every trained sample has the same weight.
    SampleMean,
    /// Every trained token has the same weight.
    TokenMean,
    /// Every group has the same weight, which its trained tokens share equally.
    PromptMean,
    /// Every token is divided by a constant (Dr. GRPO); needs `loss_constant`.
    Constant,
}

/// How old trained tokens may be when they are first delivered. The age is measured when a batch is cut, by the rules
/// and the version at that time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StalenessRules {
    /// Number of versions that a trained token may be behind; unbounded when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(format = Int64, maximum = 4_294_967_295_u32))]
    pub max: Option<u32>,
    /// What happens to a group that exceeds the bound.
    pub action: StalenessAction,
    /// With `wait`, the seconds for which no batch is granted for the sake of the same rollouts.
    #[serde(skip_serializing_if = "is_hour")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub wait_s: u64,
    /// With `wait`, what happens to a group that exceeds the bound all the same, because it was waited for in vain.
    #[serde(skip_serializing_if = "AfterWait::is_default")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub after_wait: AfterWait,
}

/// The default is not stored, so that versions that do not know the key can read rules without it.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_hour(seconds: &u64) -> bool {
    *seconds == WAIT_S
}

const WAIT_S: u64 = 3_600;

impl Default for StalenessRules {
    fn default() -> Self {
        Self { max: None, action: StalenessAction::default(), wait_s: WAIT_S, after_wait: AfterWait::default() }
    }
}

/// What happens to a group that exceeds the staleness bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum StalenessAction {
    /// The group becomes `stale` and is never delivered.
    #[default]
    Drop,
    /// Tokens that exceed the bound are delivered with mask 0. The group becomes `stale` when no trained token is left.
    Mask,
    /// No batch is granted while the version that follows from it would make a rollout too old that is under way, for at
    /// most `wait_s` seconds. The oldest groups are delivered first.
    Wait,
}

/// What happens to a group that was waited for in vain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum AfterWait {
    /// The same as with the action `drop`.
    #[default]
    Drop,
    /// The same as with the action `mask`.
    Mask,
}

impl AfterWait {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Bounds of the data that is not yet trained. A post that would open a group beyond them is answered with 429, unless
/// training waits for the group: then there may be twice as much.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct BacklogRules {
    /// Number of rollouts that are open, ready, leased or returned.
    pub max_ready_rollouts: u64,
    /// Bytes of the stored payloads of these rollouts.
    pub max_bytes: u64,
}

impl Default for BacklogRules {
    fn default() -> Self {
        Self { max_ready_rollouts: 65_536, max_bytes: 8_589_934_592 }
    }
}

/// Room for rollouts that are not trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionRules {
    /// Number of rollouts that evaluate the policy and that are under way, or wait for scores.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub eval: u64,
}

impl AdmissionRules {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn are_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for AdmissionRules {
    fn default() -> Self {
        Self { eval: 4_096 }
    }
}

/// What settles an acked batch, so that no resume without `force` brings it back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Settle {
    /// A checkpoint at the batch's step or a later one.
    #[default]
    Checkpoint,
    /// The ack itself, for trainers that never save checkpoints.
    Ack,
}

/// How many seconds payloads are kept. After that only the ledger row is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RetentionRules {
    /// Seconds after the ack, while the batch is not settled.
    pub trained_s: u64,
    /// Seconds after the checkpoint that settled the batch.
    pub settled_s: u64,
    /// Seconds after a drop, a discard or a staleness verdict. With 0, payloads of dropped and late rollouts are not
    /// stored at all.
    pub dropped_s: u64,
    /// Seconds after the decision about a rollout that evaluates the policy.
    #[serde(skip_serializing_if = "is_week")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub evaluated_s: u64,
    /// Seconds that ledger rows are kept after their payloads are purged.
    pub tombstone_s: u64,
}

/// The default is not stored, so that versions that do not know the key can read rules without it.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_week(seconds: &u64) -> bool {
    *seconds == WEEK_S
}

const WEEK_S: u64 = 604_800;

impl Default for RetentionRules {
    fn default() -> Self {
        Self { trained_s: WEEK_S, settled_s: 3600, dropped_s: 0, evaluated_s: WEEK_S, tombstone_s: WEEK_S }
    }
}

/// How the calls of an agent, which are posted as `turns` or recorded in a session, become segments. For a recorded
/// session, the rules at its finish count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SessionRules {
    /// Which answers are not trained.
    pub retries: Retries,
    /// How often an agent may be started in one session, the first time included. A session whose agent makes no calls is
    /// parked while it may be resumed; with 1 it expires. The rules at its opening count.
    #[serde(skip_serializing_if = "is_five")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub max_attempts: u32,
    /// The name of an `[[upstream]]` of the configuration. When a session is finished, it scores the segments of the
    /// policy, and their `teacher_logprobs` are filled in. Posted trajectories are not scored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher: Option<String>,
}

/// The default is not stored, so that versions that do not know the key can read rules without it.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_five(attempts: &u32) -> bool {
    *attempts == MAX_ATTEMPTS
}

const MAX_ATTEMPTS: u32 = 5;

impl Default for SessionRules {
    fn default() -> Self {
        Self { retries: Retries::default(), max_attempts: MAX_ATTEMPTS, teacher: None }
    }
}

/// What is kept of the calls of a recorded session besides what is trained. The rules at its finish count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RecordRules {
    /// Whether the rollout gets the conversation as `messages`: the messages of its last call, and the answer.
    pub messages: bool,
}

impl Default for RecordRules {
    fn default() -> Self {
        Self { messages: true }
    }
}

/// Scores that a rollout must have before it is judged. A score is a named number about a rollout: its `reward`, each of
/// its `reward_components`, and what others post to `/scores`, also later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ScoreRules {
    /// Names of the scores, at most 16. A rollout that lacks one has its place in its group and is `scoring` until it has
    /// all of them. Its group is not decided before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 16, required = false))]
    pub required: Vec<String>,
    /// Seconds from the arrival of a rollout after which it is dropped as `unscored` if it still lacks a score.
    pub timeout_s: u64,
    /// CEL expression of the reward, over the variables of filters of scope `rollout`, 4 KiB at most. When absent, the
    /// score `reward` is the reward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<String>,
    /// The required scores that scorers can lease as work, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub work: BTreeMap<String, ScoreWork>,
}

/// How scorers lease the work of giving a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ScoreWork {
    /// Whether a scorer gets one rollout, or the rollouts of a group at once.
    pub per: ScoreWorkPer,
    /// How many leases may end without the score. Then the work is `exhausted` and waits for `POST /scores/retry`.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 1000))]
    pub max_attempts: u32,
}

impl Default for ScoreWork {
    fn default() -> Self {
        Self { per: ScoreWorkPer::Rollout, max_attempts: 5 }
    }
}

/// A column: an array of numbers for each token, as raw bytes. The segments of rollouts name uploads of it, and trainers read
/// what they need of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ColumnRule {
    /// Type of its numbers.
    pub dtype: ColumnDtype,
    /// Shape of a row, row-major: at most 3 dimensions, and 64 KiB per row. One number per row when absent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 3, required = false))]
    pub shape: Vec<u32>,
    /// Which tokens have a row.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(default = "response"))]
    pub rows: ColumnRows,
    /// Whether a row is a list of numbers of any length. The upload then begins with one offset more than there are rows,
    /// as little-endian `u32`: the numbers of row `i` are those from `offsets[i]` to `offsets[i + 1]`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ragged: bool,
    /// Whether every segment must have it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub required: bool,
    /// How long it is kept.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(default = "rollout"))]
    pub retention: ColumnRetention,
}

/// Type of the numbers of a column. All are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ColumnDtype {
    /// Unsigned, 1 byte.
    U8,
    /// Unsigned, 2 bytes.
    U16,
    /// Signed, 4 bytes.
    I32,
    /// IEEE half precision, 2 bytes.
    F16,
    /// The upper half of an `f32`, 2 bytes.
    Bf16,
    /// IEEE single precision, 4 bytes.
    F32,
}

impl ColumnDtype {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::I32 => "i32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// Bytes of a number.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
        }
    }
}

/// Which tokens of a segment have a row of a column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ColumnRows {
    /// Those of the response.
    #[default]
    Response,
    /// All.
    Sequence,
    /// All but the last one: engines route a token when they compute the next one.
    #[serde(rename = "sequence-1")]
    SequenceButLast,
}

impl ColumnRows {
    /// The number of rows of a segment with so many tokens, of which so many are the response.
    #[must_use]
    pub fn count(self, tokens: u64, response: u64) -> u64 {
        match self {
            Self::Response => response,
            Self::Sequence => tokens,
            Self::SequenceButLast => tokens.saturating_sub(1),
        }
    }

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Response => "response",
            Self::Sequence => "sequence",
            Self::SequenceButLast => "sequence-1",
        }
    }
}

/// How long a column is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ColumnRetention {
    /// As long as the payload of the rollout.
    #[default]
    Rollout,
    /// Until a batch with the rollout is acked. A resume below that step delivers it without the column.
    Ack,
    /// Until a checkpoint covers the batch, or an ack settles it.
    Checkpoint,
}

/// What one piece of work for scorers is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ScoreWorkPer {
    /// One rollout, as soon as it arrives.
    #[default]
    Rollout,
    /// All rollouts of a group, as soon as it is full. One that does not get full is leased when its own timeout is over, or
    /// when half of the time to score its first rollout is over, whichever is earlier.
    Group,
}

impl ScoreRules {
    fn are_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for ScoreRules {
    fn default() -> Self {
        Self { required: Vec::new(), timeout_s: 3600, reward: None, work: BTreeMap::new() }
    }
}

/// Which answers are not trained, of those that no trained call continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Retries {
    /// Those that the agent did not receive: the answer was not delivered, or the client says with its count of retries
    /// that it repeated the call.
    #[default]
    Transport,
    /// Also those of calls with the same agent and the same prompt as one that was used later: whose answer was delivered
    /// later, or which a later call continues.
    #[serde(alias = "drop")]
    Last,
    /// Only those that were not delivered.
    Keep,
}

/// One CEL filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FilterRule {
    /// Reason that a match is given; unique within the policy.
    pub name: String,
    /// Whether the filter examines rollouts or groups.
    pub scope: FilterScope,
    /// CEL expression that evaluates to a bool, 4 KiB at most.
    pub when: String,
    /// What happens to a rollout or group that matches.
    pub action: FilterAction,
}

/// Whether a filter examines rollouts or groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum FilterScope {
    /// One rollout, at ingest.
    Rollout,
    /// One group, when it is finalized.
    Group,
}

/// What happens to a rollout or group that matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum FilterAction {
    /// A rollout is dropped; a group is discarded.
    Drop,
    /// A rollout counts in the baseline but is not trained on.
    Mask,
}
