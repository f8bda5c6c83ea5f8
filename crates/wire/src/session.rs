//! `/sessions`: the service records the calls of an agent to an inference engine and assembles its rollout from them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Purpose, Receipt, Sampling, Status};

/// A request to open a session: one execution of an agent, whose calls are recorded.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SessionRequest {
    /// Policy that every model name stands for; `default` when absent. Not together with `models`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// What the model names of the agent stand for, at most 64. `*` stands for all other names. Without it, a call with
    /// another name is refused.
    #[serde(default, deserialize_with = "super::object::named", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, SessionModel>>))]
    pub models: BTreeMap<String, SessionModel>,
    /// Id of the rollout of each policy. If absent, the service creates one, and a repeated request opens another
    /// session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub rollout_id: Option<String>,
    /// Id of the group of each policy; if absent, the rollouts are groups of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub group_id: Option<String>,
    /// Size of the group in rollouts; the policy's `group.size` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65536))]
    pub group_size: Option<u32>,
    /// Label of the environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub environment: Option<String>,
    /// Id of the execution that the session belongs to. If absent, the service creates one when the session ends; sessions
    /// without one that are finished together share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub execution_id: Option<String>,
    /// Whether its rollouts are trained (`train`, the default) or evaluate the policy (`eval`).
    #[serde(default, deserialize_with = "super::object::or_default", skip_serializing_if = "Purpose::is_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Purpose>, default = "train"))]
    pub purpose: Purpose,
    /// Name of the suite that they are results of; needed with the purpose `eval`, and only with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub suite: Option<String>,
    /// Name of their task in the suite, with the purpose `eval`; `rollout_id` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub task: Option<String>,
    /// How tokens are sampled. It replaces what the agent's calls ask for.
    #[serde(default, deserialize_with = "super::object::one_or_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Sampling>))]
    pub sampling: Sampling,
    /// Seconds after which the session expires; `sessions.ttl_s` of the configuration when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 2_592_000))]
    pub ttl_s: Option<u64>,
    /// Seconds without a call after which the session expires; `sessions.idle_s` of the configuration when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 2_592_000))]
    pub idle_s: Option<u64>,
    /// The most calls; `sessions.max_calls` of the configuration when absent, which is also the maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub max_calls: Option<u32>,
    /// JSON object of bounded depth and size, which becomes the metadata of the trajectories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
}

/// What a model name of an agent stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SessionModel {
    /// The policy whose rollout the calls belong to. `null` means that calls are forwarded and not recorded, because the
    /// model is not in training.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
}

/// A session that is open. The key is only in this answer and cannot be read again.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionOpened {
    /// Id of the session.
    pub session_id: String,
    /// Key for the calls of the agent. It can be used for nothing else.
    pub key: String,
    /// Id of the rollout of each policy.
    pub rollout_id: String,
    /// Whether the session was opened before, so that only the key is new.
    pub duplicate: bool,
    /// The attempt that the key belongs to, from 1.
    pub attempt: u32,
    /// The most attempts.
    pub max_attempts: u32,
    /// Where the agent reaches the session.
    pub base_urls: BaseUrls,
    /// When the session expires, unless it ends before.
    pub expires_at: String,
}

/// The addresses of a session for the clients of agents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BaseUrls {
    /// For clients of OpenAI's APIs. It ends with `/v1`.
    pub openai: String,
    /// For clients of Anthropic's API, which append `/v1` themselves.
    pub anthropic: String,
}

impl std::fmt::Debug for SessionOpened {
    /// Hides the key, which is a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionOpened").field("session_id", &self.session_id).finish_non_exhaustive()
    }
}

/// A request to resume a session, whose agent died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SessionResume {
    /// The attempt to follow. If another one has begun meanwhile, the request is refused, so that of several programs
    /// that look after the same sessions only one starts the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub attempt: Option<u32>,
}

/// What an agent or its sandbox has stored to go on from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SavedState {
    /// Number of the last call before it; 0 before the first one.
    pub call: u32,
    /// The attempt that stored it.
    pub attempt: u32,
    /// Number of bytes.
    pub bytes: u64,
    /// When it was stored.
    pub stored_at: String,
}

/// A request to finish a session.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FinishRequest {
    /// Reward of every policy that is not in `rewards`. It must be finite; the sign of a zero is not kept.
    #[serde(
        default,
        deserialize_with = "super::numbers::reward",
        skip_serializing_if = "Option::is_none",
        serialize_with = "super::finite::serialize"
    )]
    pub reward: Option<f64>,
    /// Rewards by policy.
    #[serde(default, deserialize_with = "super::object::components", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, f64>>))]
    pub rewards: BTreeMap<String, f64>,
    /// Named parts of the reward: scores by the producer, for filters and export. Each name may occur once. `scores` is
    /// another name of the field.
    #[serde(
        default,
        alias = "scores",
        deserialize_with = "super::object::components",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, f64>>))]
    pub reward_components: BTreeMap<String, f64>,
    /// Rewards of calls, for policies whose rule `advantage` compares turns. A call is named by the id of its answer, as the
    /// agent received it, or by its number in the session.
    #[serde(default, deserialize_with = "super::object::components", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, f64>>))]
    pub turn_rewards: BTreeMap<String, f64>,
    /// Names of the states in which calls were made, for the same policies. Calls are named as in `turn_rewards`.
    #[serde(default, deserialize_with = "super::object::or_default", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, String>>))]
    pub turn_state_keys: BTreeMap<String, String>,
    /// How the execution ended; `completed` when absent, or `truncated` if a call was refused because a bound of the
    /// session was reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    /// JSON object whose members are added to the metadata of the session, and replace members with the same names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
    /// Milliseconds to wait for calls in flight before they are cancelled; 5,000 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 600_000))]
    pub wait_ms: Option<u64>,
    /// The attempt that it ends. If another one has begun, the request is refused, so that the program of an attempt that
    /// was given up does not end the next one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub attempt: Option<u32>,
}

/// One session of a request that finishes several of them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SessionFinish {
    /// Id of the session.
    pub session_id: String,
    /// Reward of every policy that is not in `rewards`. It must be finite; the sign of a zero is not kept.
    #[serde(
        default,
        deserialize_with = "super::numbers::reward",
        skip_serializing_if = "Option::is_none",
        serialize_with = "super::finite::serialize"
    )]
    pub reward: Option<f64>,
    /// Rewards by policy.
    #[serde(default, deserialize_with = "super::object::components", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, f64>>))]
    pub rewards: BTreeMap<String, f64>,
    /// Named parts of the reward: scores by the producer, for filters and export. Each name may occur once. `scores` is
    /// another name of the field.
    #[serde(
        default,
        alias = "scores",
        deserialize_with = "super::object::components",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, f64>>))]
    pub reward_components: BTreeMap<String, f64>,
    /// Rewards of calls, for policies whose rule `advantage` compares turns. A call is named by the id of its answer, as the
    /// agent received it, or by its number in the session.
    #[serde(default, deserialize_with = "super::object::components", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, f64>>))]
    pub turn_rewards: BTreeMap<String, f64>,
    /// Names of the states in which calls were made, for the same policies. Calls are named as in `turn_rewards`.
    #[serde(default, deserialize_with = "super::object::or_default", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, String>>))]
    pub turn_state_keys: BTreeMap<String, String>,
    /// How the execution ended; `completed` when absent, or `truncated` if a call was refused because a bound of the
    /// session was reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    /// JSON object whose members are added to the metadata of the session, and replace members with the same names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
    /// Milliseconds to wait for calls in flight before they are cancelled; 5,000 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 600_000))]
    pub wait_ms: Option<u64>,
    /// The attempt that it ends. If another one has begun, the request is refused, so that the program of an attempt that
    /// was given up does not end the next one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub attempt: Option<u32>,
}

impl SessionFinish {
    /// The request for one session.
    #[must_use]
    pub fn of(session_id: impl Into<String>, request: FinishRequest) -> Self {
        let FinishRequest {
            reward,
            rewards,
            reward_components,
            turn_rewards,
            turn_state_keys,
            status,
            metadata,
            wait_ms,
            attempt,
        } = request;
        Self {
            session_id: session_id.into(),
            reward,
            rewards,
            reward_components,
            turn_rewards,
            turn_state_keys,
            status,
            metadata,
            wait_ms,
            attempt,
        }
    }
}

/// A request to end a session without a reward.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AbortRequest {
    /// Why, 1 to 256 bytes.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub reason: String,
    /// Whether the trajectories have the segments of the recorded calls; `false` when absent.
    #[serde(default, deserialize_with = "super::object::or_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<bool>, default = false))]
    pub keep: bool,
    /// The attempt that it ends. If another one has begun, the request is refused, so that the program of an attempt that
    /// was given up does not end the next one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub attempt: Option<u32>,
}

/// A session that has ended, and what became of its rollouts.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionEnded {
    /// Id of the session.
    pub session_id: String,
    /// Its state.
    pub state: SessionState,
    /// Why it was aborted or expired.
    pub reason: Option<String>,
    /// Whether the session had ended before this request, which changed nothing.
    pub duplicate: bool,
    /// The receipts of its trajectories, one per policy, in the order of the policies' names. They are those of the
    /// request that ended the session.
    pub receipts: Vec<Receipt>,
    /// What became of all its calls.
    pub assembly: SessionAssembly,
}

/// What became of the calls of a session. The calls are those in segments and those that were dropped, and the sampled
/// tokens are those that are trained, those that were dropped, and those that were trimmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionAssembly {
    /// Number of calls.
    pub calls: u64,
    /// Number of segments that were assembled.
    pub segments: u64,
    /// Number of prompts that share more than 64 ids with an earlier call and then differ from what was recorded. Each
    /// of them begins a segment that an agent which repeats its history exactly would not need.
    pub breaks: u64,
    /// Calls that are in no segment, by reason.
    pub dropped: SessionDropped,
    /// Tokens that were sampled.
    pub sampled_tokens: u64,
    /// Sampled tokens that segments train.
    pub trained_tokens: u64,
    /// Sampled tokens of the calls that are in no segment, by reason.
    pub dropped_tokens: SessionDropped,
    /// Sampled stop tokens that are not trained, because the next prompt has another id in their place.
    pub trimmed: u64,
}

/// A number of calls or tokens by the reason for which they are in no segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionDropped {
    /// The call sampled no tokens. If that is so of all calls of a policy, its rollout trains nothing and has a reward.
    pub empty: u64,
    /// The agent did not receive the answer, and no other call continues the call.
    pub undelivered: u64,
    /// No other call continues the call, and the same agent sent its prompt again.
    pub retry: u64,
    /// An earlier attempt made the call, and the last one neither was answered with it nor continues it.
    #[serde(default)]
    pub abandoned: u64,
    /// The session was aborted or expired, and its segments were not kept.
    pub aborted: u64,
}

/// State of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum SessionState {
    /// The agent makes calls.
    Open,
    /// The agent has made no call for too long, and can be started again. It goes on with a call, or if it is resumed.
    Parked,
    /// A finish has begun: no new call is accepted.
    Finishing,
    /// Its trajectories were ingested.
    Finished,
    /// A caller ended it without a reward.
    Aborted,
    /// It made no call for too long and could not be resumed, its room was needed while it was parked, or it lasted too
    /// long.
    Expired,
}

/// A session.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionInfo {
    /// Id of the session.
    pub session_id: String,
    /// Its state.
    pub state: SessionState,
    /// Why it was aborted or expired.
    pub reason: Option<String>,
    /// Id of the rollout of each policy.
    pub rollout_id: String,
    /// Id of the group of each policy.
    pub group_id: String,
    /// Label of the environment.
    pub environment: Option<String>,
    /// Id of the execution that it belongs to; null until the session ends if it was opened without one.
    pub execution_id: Option<String>,
    /// The policies whose rollouts it records, in the order of their names.
    pub policies: Vec<SessionPolicy>,
    /// What the model names of the agent stand for.
    pub models: BTreeMap<String, SessionModel>,
    /// Number of recorded calls.
    pub calls: u32,
    /// Stored bytes of the recorded calls.
    pub bytes: u64,
    /// Whether a call was refused because a bound of the session was reached.
    pub full: bool,
    /// The attempt that is under way, or was the last one, from 1.
    pub attempt: u32,
    /// The most attempts.
    pub max_attempts: u32,
    /// The number of versions after which its rollout is too old to be trained (`staleness.max`): 1 if the next one makes it
    /// too old, 0 if it is too old now; of several policies, the least. Null without a bound, and once it has ended. The
    /// version of the oldest sampled tokens counts, and before the first call the current one.
    pub stale_after_versions: Option<i64>,
    /// When it was opened.
    pub opened_at: String,
    /// When its last recorded call ended.
    pub last_call_at: Option<String>,
    /// When it is parked or expires, unless a call is recorded or it ends before.
    pub due_at: Option<String>,
    /// When it expires at the latest.
    pub expires_at: String,
    /// When it ended.
    pub ended_at: Option<String>,
    /// The receipts of its trajectories; absent before it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipts: Option<Vec<Receipt>>,
    /// What became of its calls; absent before it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assembly: Option<SessionAssembly>,
}

/// A policy whose rollout a session records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionPolicy {
    /// Its name.
    pub policy: String,
    /// Run in which the session was opened.
    pub run: i64,
    /// Weight version that was current when the session was opened.
    pub policy_version: i64,
    /// Number of recorded calls.
    pub calls: u32,
    /// Number of tokens that were sampled in these calls.
    pub sampled_tokens: u64,
    /// Number of special tokens of the model in the texts of these calls, in the mode `exact`; 0 otherwise.
    #[serde(default)]
    pub special_tokens: u64,
    /// Warnings about these calls, each once: a name, a colon and a sentence. The receipt has them, too.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// A page of sessions.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionPage {
    /// Sessions in the order in which they were opened, or the newest first.
    pub sessions: Vec<SessionInfo>,
    /// The `after` of the next page; absent on the last page.
    pub next: Option<String>,
    /// Number of sessions that were examined to find those of the page, at most 10,000 in a filtered list.
    pub examined: u32,
}

/// The recorded calls of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionTurns {
    /// Calls in the order in which they were recorded. They are deleted some time after the session has ended.
    pub turns: Vec<SessionTurn>,
}

/// One recorded call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionTurn {
    /// Its number in the session, from 1.
    pub seq: u32,
    /// Id of its answer. The agent received it behind the prefix of its API, such as `chatcmpl-`. Null for a call that an
    /// older version recorded.
    #[serde(default)]
    pub id: Option<String>,
    /// Policy whose rollout it belongs to.
    pub policy: String,
    /// Name of the model that the agent asked for.
    pub model: String,
    /// API that the agent used.
    pub dialect: String,
    /// Name of the agent or sub-agent that made it.
    pub agent: Option<String>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: u64,
    /// Number of tokens that were sampled.
    pub sampled_tokens: u64,
    /// Whether the engine did not say the version of every sampled token, so that the policy's published version stands
    /// in.
    #[serde(default)]
    pub version_assumed: bool,
    /// Why the engine stopped.
    pub finish_reason: String,
    /// Whether the agent received the answer.
    pub delivered: bool,
    /// How many times the agent's client says that it has repeated the request.
    pub retry_count: u32,
    /// The attempt in which an engine answered it.
    pub attempt: u32,
    /// The last attempt that used it: in which an engine answered it, or in which the agent was answered with what was
    /// recorded.
    pub used_in: u32,
    /// When it began.
    pub started_at: String,
    /// When its answer was complete.
    pub ended_at: String,
    /// What became of it: `trained`, or the reason for which it is in no segment: `empty`, `undelivered`, `retry` or
    /// `abandoned`. Later calls can change it while the session is open.
    pub outcome: String,
    /// Where its prompt differs from an earlier call that it should have continued; absent if it does not.
    #[serde(default, rename = "break", skip_serializing_if = "Option::is_none")]
    pub divergence: Option<SessionBreak>,
}

/// Where the prompt of a call differs from an earlier call that it should have continued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionBreak {
    /// Number of the earlier call that the prompt shares most with.
    pub nearest: u32,
    /// Number of ids that both begin with.
    pub position: u64,
    /// What differs first: `system` (the tools, the arguments of the template, or a system message), `rewrite` (the content
    /// of a message), `reasoning` (the reasoning of an answer was dropped or changed), `arguments` (those of a tool call
    /// are the same JSON in another spelling), `tokens` (no message: the same text has other ids), `siblings`
    /// (several answers are equal to it), or `unknown`.
    pub cause: String,
    /// The next ids of the earlier call, at most 16.
    pub expected: Vec<i32>,
    /// The next ids of the prompt, at most 16.
    pub found: Vec<i32>,
    /// The text of `expected`; absent unless the service has the model's tokenizer, as in the mode `exact`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_text: Option<String>,
    /// The text of `found`; absent unless the service has the model's tokenizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found_text: Option<String>,
}
