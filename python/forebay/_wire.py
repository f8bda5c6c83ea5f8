"""The bodies of the API as dataclasses, named as in the OpenAPI document.

`make generate` writes this file from openapi/forebay.json: change the types in crates/wire instead. Requests take every
field by its name and leave out what is None. Answers ignore fields that this version does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._uuid import uuid7
from ._wire_base import Floats, Ints, Logprobs, MaybeSpooled

__all__ = [
    "AbortRequest",
    "AckRequest",
    "Admission",
    "AdmissionRequest",
    "AdmissionRules",
    "AdvantageName",
    "AfterWait",
    "Assembly",
    "BacklogRules",
    "BaseUrls",
    "BatchDescriptor",
    "BatchOrder",
    "BatchPage",
    "BatchRequest",
    "BatchRules",
    "BatchState",
    "BulkLine",
    "CheckpointRequest",
    "CheckpointResponse",
    "CloseRequest",
    "ColumnDtype",
    "ColumnRetention",
    "ColumnRows",
    "ColumnRule",
    "ColumnUpload",
    "ContentMessage",
    "Delivered",
    "DiscardRequest",
    "DroppedCalls",
    "EnvironmentRules",
    "EvalDifference",
    "EvalList",
    "EvalRollout",
    "EvalTask",
    "EvalTaskList",
    "EvalTaskResult",
    "EvalVersion",
    "ExportResult",
    "ExportedRollout",
    "ExtendRequest",
    "FailedFilter",
    "FilterAction",
    "FilterNames",
    "FilterRule",
    "FilterScope",
    "FilterVariable",
    "FinishRequest",
    "Gdpo",
    "GdpoKind",
    "Gigpo",
    "GigpoKind",
    "GroupInfo",
    "GroupOutcomes",
    "GroupPage",
    "GroupRules",
    "GroupState",
    "Health",
    "HeldBatch",
    "IdKind",
    "IdMatch",
    "IdWhy",
    "ImportRefusal",
    "ImportReport",
    "ImportVerdicts",
    "JournalEntry",
    "JournalPage",
    "KeyCreated",
    "KeyInfo",
    "KeyPage",
    "KeyRequest",
    "LeaseRules",
    "LifeStep",
    "ListOrder",
    "LookedAt",
    "LossWeighting",
    "MessagePage",
    "NackRequest",
    "Norm",
    "NumberSpread",
    "OnDrop",
    "OpenGroup",
    "Overview",
    "OverviewPolicy",
    "OverviewReward",
    "OverviewStaleness",
    "PassAt",
    "PolicyCondition",
    "PolicyList",
    "PolicyRules",
    "PolicySeries",
    "PolicyStats",
    "PolicyStatus",
    "PolicySteps",
    "PolicyWhy",
    "Problem",
    "Purpose",
    "Receipt",
    "ReceiptGroup",
    "RecordRules",
    "Requirement",
    "ResetRequest",
    "ResetResponse",
    "ResumeRequest",
    "ResumeResponse",
    "RetentionRules",
    "Retries",
    "Role",
    "RolloutOutcomes",
    "RolloutState",
    "Sample",
    "Sampling",
    "SavedState",
    "ScoreExtendRequest",
    "ScoreExtended",
    "ScoreInclude",
    "ScoreInfo",
    "ScoreItem",
    "ScoreItemRollout",
    "ScoreLeaseRequest",
    "ScoreLeases",
    "ScoreLine",
    "ScoreList",
    "ScoreOmitted",
    "ScoreReceipt",
    "ScoreRequest",
    "ScoreRetried",
    "ScoreRetryRequest",
    "ScoreRules",
    "ScoreWork",
    "ScoreWorkPer",
    "Segment",
    "SegmentSummary",
    "SegmentText",
    "SegmentVersions",
    "SessionAssembly",
    "SessionBreak",
    "SessionDropped",
    "SessionEnded",
    "SessionFinish",
    "SessionInfo",
    "SessionModel",
    "SessionOpened",
    "SessionPage",
    "SessionPolicy",
    "SessionRequest",
    "SessionResume",
    "SessionRules",
    "SessionState",
    "SessionTurn",
    "SessionTurns",
    "Settle",
    "ShardBalance",
    "ShardCount",
    "StalenessAction",
    "StalenessRules",
    "Stats",
    "Status",
    "StepBucket",
    "StepInfo",
    "StoryGroup",
    "SuiteEvals",
    "SuiteInfo",
    "SuiteRequest",
    "TokenMap",
    "TokenWindow",
    "TrainedVersions",
    "Trajectory",
    "TrajectoryContent",
    "TrajectoryPage",
    "TrajectoryStory",
    "TriedChange",
    "TriedGroups",
    "TriedOutcome",
    "TriedRollouts",
    "TriedState",
    "TryNote",
    "TryRequest",
    "TryResult",
    "Turn",
    "TurnReturn",
    "TurnReturnKind",
    "TurnSpan",
    "Unjudged",
    "Upload",
    "Verdict",
    "VersionRange",
    "VersionRequest",
    "Violation",
    "Waiting",
    "WaitingConsumer",
    "WaitingEnvironment",
    "Whiten",
    "WhoAmI",
    "WhyCause",
    "WhyFinding",
]

AdvantageName = Literal["grpo", "grpo_mean", "rloo", "reward", "none", "posted"]
"""Advantage estimator over the rewards R of a group."""

AfterWait = Literal["drop", "mask"]
"""What happens to a group that was waited for in vain."""

BatchOrder = Literal["fifo", "freshest"]
"""Which ready groups are delivered first."""

BatchState = Literal["leased", "returned", "trained", "checkpointed", "quarantined", "split", "discarded"]
"""State of a batch."""

ColumnDtype = Literal["u8", "u16", "i32", "f16", "bf16", "f32"]
"""Type of the numbers of a column. All are little-endian."""

ColumnRetention = Literal["rollout", "ack", "checkpoint"]
"""How long a column is kept."""

ColumnRows = Literal["response", "sequence", "sequence-1"]
"""Which tokens of a segment have a row of a column."""

FilterAction = Literal["drop", "mask"]
"""What happens to a rollout or group that matches."""

FilterScope = Literal["rollout", "group"]
"""Whether a filter examines rollouts or groups."""

GdpoKind = Literal["gdpo"]
"""The kind of an advantage by reward component."""

GigpoKind = Literal["gigpo"]
"""The kind of an advantage by the states of turns."""

GroupState = Literal["open", "ready", "batched", "stale", "discarded", "quarantined"]
"""State of a group."""

IdKind = Literal["rollout", "group", "batch", "session"]
"""What an id names."""

ListOrder = Literal["oldest", "newest"]
"""The order of a list."""

LossWeighting = Literal["rollout_mean", "turn_mean", "sample_mean", "token_mean", "prompt_mean", "constant"]
"""How the tokens of a batch are weighted in the loss."""

Norm = Literal["std", "none"]
"""How values x are compared with each other."""

OnDrop = Literal["refill", "shrink"]
"""Whether a dropped rollout uses up one of the group's places."""

PolicyCondition = Literal[
    "broken", "stuck", "starved", "untaken", "held-back", "stale", "flat", "dropping", "fed", "idle"
]
"""How a policy is, the worst first."""

Purpose = Literal["train", "eval"]
"""What a rollout is for."""

Requirement = Literal["tokens", "logprobs", "policy_version", "teacher_logprobs", "values", "advantages"]
"""A column that a policy may require."""

Retries = Literal["transport", "last", "keep"]
"""Which answers are not trained, of those that no trained call continues."""

Role = Literal["produce", "score", "train", "read", "admin"]
"""What a key permits. The service's `api::roles` lists the roles that each route accepts."""

RolloutState = Literal[
    "scoring",
    "open",
    "ready",
    "leased",
    "returned",
    "trained",
    "checkpointed",
    "discarded",
    "stale",
    "quarantined",
    "dropped",
    "late",
]
"""State of a rollout. These states are the terms of the conservation equation."""

ScoreInclude = Literal["messages", "metadata", "text", "segments"]
"""A part of a rollout that work for scorers can have with it."""

ScoreOmitted = Literal["size", "damaged"]
"""Why the contents of a rollout are not sent along."""

ScoreWorkPer = Literal["rollout", "group"]
"""What one piece of work for scorers is about."""

SessionState = Literal["open", "parked", "finishing", "finished", "aborted", "expired"]
"""State of a session."""

Settle = Literal["checkpoint", "ack"]
"""What settles an acked batch, so that no resume without `force` brings it back."""

ShardBalance = Literal["tokens", "squared_tokens"]
"""What the shards of a batch have about equal amounts of: tokens, or the sum of the squared lengths of their rows, with
which the time of attention grows."""

StalenessAction = Literal["drop", "mask", "wait"]
"""What happens to a group that exceeds the staleness bound."""

Status = Literal["completed", "truncated", "aborted", "failed"]
"""How an execution ended, as reported by the producer."""

TriedState = Literal["ready", "discarded", "open", "unjudged"]
"""What becomes of a group that filters are tried on."""

TurnReturnKind = Literal["turn_return"]
"""The kind of an advantage by the returns of turns."""

Verdict = Literal["kept", "masked", "dropped", "late"]
"""The decision of ingest about a rollout."""

Whiten = Literal["batch", "none"]
"""Over which rollouts advantages A are whitened: (A - mean) / (unbiased standard deviation + 1e-6)."""


@dataclass(slots=True, kw_only=True)
class AbortRequest:
    """A request to end a session without a reward."""

    reason: str
    """Why, 1 to 256 bytes."""
    keep: bool | None = None
    """Whether the trajectories have the segments of the recorded calls; `false` when absent."""
    attempt: int | None = None
    """The attempt that it ends. If another one has begun, the request is refused, so that the program of an attempt
    that was given up does not end the next one."""


@dataclass(slots=True, kw_only=True)
class AckRequest:
    """Reports that an optimizer step consumed the batch."""

    lease: str
    """The lease."""
    step: int
    """Optimizer step, 0 or above."""
    epoch: int | None = None
    """Epoch of the caller."""


@dataclass(slots=True, kw_only=True)
class Admission:
    """Room that was reserved."""

    admission_id: str
    """Id of the admission; posts that use it send it as the `admission_id` of the trajectory."""
    granted: int
    """Number of rollouts with reserved room, from 0 to the number requested."""
    policy_version: int
    """Current weight version. Rollouts posted under the admission without a version of their own get this one."""
    expires_in_ms: int
    """Milliseconds until unused room is given back."""
    reason: str | None = None
    """Why nothing was granted: the rule and what ends it. Absent if room was granted."""


@dataclass(slots=True, kw_only=True)
class AdmissionRequest:
    """A request to reserve room for rollouts that are about to start."""

    policy: str | None = None
    """Policy that will produce the rollouts; `default` when absent."""
    rollouts: int
    """Number of rollouts to reserve room for, at least 1."""
    group_id: str | None = None
    """Group of all these rollouts. Missing places of a group that has begun always get room, and a new group is opened
    only if all of its places fit."""
    group_size: int | None = None
    """Rollouts of the group, if they are not as many as in the rules of the policy. Only together with `group_id`."""
    environment: str | None = None
    """Label of the environment of these rollouts. Room is kept for an environment whose `min_share` the next batch
    lacks."""
    purpose: Purpose | None = None
    """Whether they are trained (`train`, the default) or evaluate the policy (`eval`). Evaluation has its own room,
    `admissions.eval` of the rules."""
    suite: str | None = None
    """Name of the suite that they are results of; it may be known later."""
    task: str | None = None
    """Name of their task in the suite, if it is known."""


@dataclass(slots=True, kw_only=True)
class AdmissionRules:
    """Room for rollouts that are not trained."""

    eval: int = 4096
    """Number of rollouts that evaluate the policy and that are under way, or wait for scores."""


@dataclass(slots=True, kw_only=True)
class Assembly:
    """What became of posted turns. Calls that are in segments and calls that were dropped are together all calls."""

    calls: int
    """Number of turns."""
    segments: int
    """Number of segments that were assembled."""
    breaks: int
    """Number of prompts that share more than 64 ids with an earlier turn and then differ from what was recorded. Each
    of them begins a segment that a client which repeats its history exactly would not need."""
    dropped: DroppedCalls
    """Turns that are in no segment, by reason."""
    trimmed: int
    """Sampled stop tokens that are not trained, because the next prompt has another id in their place."""


@dataclass(slots=True, kw_only=True)
class BacklogRules:
    """Bounds of the data that is not yet trained. A post that would open a group beyond them is answered with 429,
    unless training waits for the group: then there may be twice as much."""

    max_ready_rollouts: int = 65536
    """Number of rollouts that are open, ready, leased or returned."""
    max_bytes: int = 8589934592
    """Bytes of the stored payloads of these rollouts."""


@dataclass(slots=True, kw_only=True)
class BaseUrls:
    """The addresses of a session for the clients of agents."""

    openai: str
    """For clients of OpenAI's APIs. It ends with `/v1`."""
    anthropic: str
    """For clients of Anthropic's API, which append `/v1` themselves."""


@dataclass(slots=True, kw_only=True)
class ShardCount:
    """Contents of one shard of a batch."""

    rollouts: int
    """Number of rollouts that have a row in the shard. The rows of a rollout may be in several shards."""
    samples: int
    """Number of rows."""
    tokens: int
    """Number of prompt and response tokens."""


@dataclass(slots=True, kw_only=True)
class BatchDescriptor:
    """An immutable list of whole ready groups of one policy: what one optimizer step consumes."""

    batch_id: str
    """Identity of the batch; the same at every delivery."""
    state: BatchState
    """State of the batch."""
    lease: str | None = None
    """Token that proves the lease; present only in the answer to `POST /batches`."""
    consumer: str | None = None
    """Consumer that held the last lease."""
    epoch: int
    """Epoch of the last lease."""
    policy: str
    """Policy of every rollout in the batch."""
    expires_at: str | None = None
    """When the lease expires; null when the batch is not leased."""
    expires_in_ms: int | None = None
    """Milliseconds until the lease expires; null when the batch is not leased."""
    attempt: int
    """Number of this delivery, counted from 1."""
    step: int | None = None
    """Optimizer step that consumed the batch, or that had consumed it before a resume brought it back."""
    reason: str | None = None
    """Why the batch was given back or quarantined."""
    groups: int
    """Number of groups; a batch holds whole groups."""
    rollouts: int
    """Number of kept and masked rollouts."""
    samples: int
    """Number of rows of `/samples`: one per segment, and one for a rollout without segments."""
    tokens: int
    """Number of prompt and response tokens."""
    policy_version: VersionRange
    """Weight versions at the time of the cut."""
    metrics: dict[str, float]
    """Statistics for the trainer's log: rewards, staleness, and drops since the previous batch."""
    samples_url: str
    """URL of the samples."""
    shards: list[ShardCount] | None = None
    """Contents of each shard, for `?shards=n`."""
    created_at: str
    """When the batch was cut."""
    acked_at: str | None = None
    """When the batch was acked; null unless it is trained or checkpointed."""
    waited_ms: int
    """Milliseconds for which the holder of the last lease had asked for a batch."""
    held_ms: int | None = None
    """Milliseconds from the beginning of the last lease until the ack, or until now; null unless the batch is leased,
    trained or checkpointed."""


@dataclass(slots=True, kw_only=True)
class BatchPage:
    """Batches in the order in which they were cut, or the newest first."""

    batches: list[BatchDescriptor]
    """Descriptors, without leases."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the last."""
    examined: int
    """Number of entries that were examined to find those of the page, at most 10,000 in a filtered list."""


@dataclass(slots=True, kw_only=True)
class BatchRequest:
    """A request for the next batch of a policy."""

    policy: str | None = None
    """Policy; `default` when absent."""
    consumer: str | None = None
    """Name of the consumer, the scope of `request_id`."""
    request_id: str | None = None
    """Makes the request safe to repeat: while the lease is alive, the same request returns the same batch and lease."""
    wait_ms: int | None = None
    """Milliseconds to wait for a batch, at most 60,000."""
    partial: bool | None = None
    """Return the groups that are ready after `wait_ms`, even if they are fewer than a full batch."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class EnvironmentRules:
    """The share of an environment in each batch."""

    weight: float = 1.0
    """Weight with which the environment shares what the minimums leave, 0.000001 to 1,000,000. It is shared among the
    environments that have ready groups."""
    min_share: float = 0.0
    """The part of each batch that is of this environment at least, 0 to 1. A batch waits for it. The minimums of a
    policy add up to at most 1."""


@dataclass(slots=True, kw_only=True)
class BatchRules:
    """Contents of one batch, which is the data of one optimizer step."""

    groups: int = 1
    """Number of groups of a batch."""
    max_tokens: int | None = None
    """Number of tokens that a batch may not exceed, except that a group which exceeds it alone is a batch of its own.
    Unbounded when absent."""
    order: BatchOrder = "fifo"
    """Which ready groups are delivered first."""
    environments: dict[str, EnvironmentRules] = field(default_factory=dict[str, EnvironmentRules])
    """The shares of environments in each batch, by their labels, at most 64. If this is empty, batches do not depend on
    environments. Otherwise, environments that are not named have weight 1 and no minimum, and so have all groups
    without a label, together."""


@dataclass(slots=True, kw_only=True)
class Receipt(MaybeSpooled):
    """The decision of ingest about one rollout. A retry receives the same verdict as the first post."""

    policy: str
    """Policy of the rollout."""
    rollout_id: str
    """Id of the rollout; created by the service if the producer sent none."""
    group_id: str
    """Group of the rollout."""
    execution_id: str
    """Execution of the rollout; created by the service if the producer sent none."""
    verdict: Verdict
    """The decision."""
    reason: str | None = None
    """Name of the filter that matched, or a built-in code: `no-reward`, `group-decided`, `group-full`, `unscored`."""
    scoring: list[str] = field(default_factory=list[str])
    """Required scores that the rollout lacks. As long as there are some, its verdict is `kept` and not final."""
    duplicate: bool
    """True if the same rollout was already stored and this post changed nothing."""
    warnings: list[str]
    """Problems for which the rollout was not refused. Each is a name, a colon and a sentence. The names are
    `group-decided`, `group-full`, `no-reward`, `admission-lapsed`, `delivered-dropped`, `filter-failed`,
    `filter-over-budget`, `logprobs-above-zero`, `logprobs-improbable`, `sampling-truncated`, `mask-without-ones`,
    `mixed-environments`, `lone-surrogates`, `unsupported-part`, `images-replaced` and `version-ahead`."""
    group: ReceiptGroup
    """The group after this post."""
    assembly: Assembly | None = None
    """What became of the turns; absent if the rollout was posted without turns."""


@dataclass(slots=True, kw_only=True)
class Violation:
    """One error in a request."""

    pointer: str
    """JSON pointer (RFC 6901) into the body, or the name of the query parameter if the request has no body."""
    detail: str
    """Description of the error."""


@dataclass(slots=True, kw_only=True)
class Problem:
    """RFC 9457 problem details."""

    type: str
    """Stable code of the problem, e.g. `rollout-conflict`; a relative reference in the sense of RFC 9457."""
    title: str
    """Title that belongs to the code."""
    status: int
    """HTTP status."""
    detail: str | None = None
    """What happened in this request."""
    instance: str | None = None
    """Id of the request; the log and the `x-request-id` header show the same id."""
    errors: list[Violation] = field(default_factory=list[Violation])
    """The errors in the request, at most 100 entries."""
    verdict: Verdict | None = None
    """In a `rollout-conflict`: the verdict of the stored rollout."""
    retry_after_s: int | None = None
    """Seconds to wait before a retry; the same as `Retry-After`."""


@dataclass(slots=True, kw_only=True)
class BulkLine:
    """One line of the answer to a bulk (`application/x-ndjson`) post."""

    line: int
    """Line of the request, counted from 1. Empty lines are counted but not answered."""
    status: int
    """HTTP status that the line would have received as a request of its own."""
    receipt: Receipt | None = None
    """Receipt of a line that was accepted."""
    problem: Problem | None = None
    """Problem of a line that was refused."""


@dataclass(slots=True, kw_only=True)
class CheckpointRequest:
    """Reports that the trainer has saved a step durably."""

    step: int
    """The saved step: the last acked step or an earlier one."""
    force: bool | None = None
    """Settle a step even if it is above the last acked one."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class CheckpointResponse:
    """Answer to a checkpoint."""

    checkpoint_step: int
    """Last settled step."""
    settled_batches: int
    """Number of batches settled by this call."""


@dataclass(slots=True, kw_only=True)
class CloseRequest:
    """Decides a group now, as if it had timed out."""

    policy: str | None = None
    """Policy; `default` when absent."""
    group_id: str
    """Id of the group."""


@dataclass(slots=True, kw_only=True)
class ColumnRule:
    """A column: an array of numbers for each token, as raw bytes. The segments of rollouts name uploads of it, and
    trainers read what they need of it."""

    dtype: ColumnDtype
    """Type of its numbers."""
    shape: list[int] = field(default_factory=list[int])
    """Shape of a row, row-major: at most 3 dimensions, and 64 KiB per row. One number per row when absent."""
    rows: ColumnRows = "response"
    """Which tokens have a row."""
    ragged: bool = False
    """Whether a row is a list of numbers of any length. The upload then begins with one offset more than there are
    rows, as little-endian `u32`: the numbers of row `i` are those from `offsets[i]` to `offsets[i + 1]`."""
    required: bool = False
    """Whether every segment must have it."""
    retention: ColumnRetention = "rollout"
    """How long it is kept."""


@dataclass(slots=True, kw_only=True)
class ColumnUpload:
    """A column of a segment: an upload with the bytes of its rows, one after the other."""

    digest: str
    """BLAKE3 digest of the upload."""
    bytes: int
    """Its length in bytes."""


@dataclass(slots=True, kw_only=True)
class ContentMessage:
    """One chat message."""

    index: int
    """Its index, from 0."""
    bytes: int
    """Its length in bytes."""
    message: dict[str, Any] | None = None
    """The message as the producer sent it; null if it has more than 256 KiB and was not asked for alone."""
    role: str | None = None
    """The `role` of a message that is left out."""


@dataclass(slots=True, kw_only=True)
class Delivered:
    """The batch that contains a rollout."""

    batch_id: str
    """Id of the batch."""
    state: BatchState
    """State of the batch."""
    attempt: int
    """Number of its last delivery."""
    step: int | None = None
    """Optimizer step that consumed it, or that had consumed it before a resume brought it back."""
    loss_weights: list[float]
    """Weight of each trained token in the loss, by segment; a rollout without segments has one."""


@dataclass(slots=True, kw_only=True)
class DiscardRequest:
    """Discards a group that is open, ready or quarantined."""

    policy: str | None = None
    """Policy; `default` when absent."""
    group_id: str
    """Id of the group."""
    reason: str
    """Reason, 1 to 256 bytes."""


@dataclass(slots=True, kw_only=True)
class DroppedCalls:
    """Turns that are in no segment, by reason."""

    empty: int
    """Turns without tokens."""
    undelivered: int
    """Turns that were not delivered and that no other turn continues."""
    retry: int
    """Turns that were delivered and that no other turn continues, in whose place another one is trained."""


@dataclass(slots=True, kw_only=True)
class EvalDifference:
    """The difference between two versions over the tasks that both have."""

    version: int
    """The version before."""
    tasks: int
    """Tasks that both have."""
    mean: float
    """Mean of the differences of the tasks' mean rewards."""
    low: float | None = None
    """Bounds of the interval of 95%: the mean, and 1.96 standard errors of it to both sides; null with fewer than two
    tasks."""
    high: float | None = None
    """The upper bound."""
    won: int
    """Tasks whose mean reward is higher than before."""
    lost: int
    """Tasks whose mean reward is lower."""


@dataclass(slots=True, kw_only=True)
class EvalList:
    """What suites say about the versions of a policy."""

    policy: str
    """Policy that is evaluated."""
    suites: list[SuiteEvals]
    """The suites, by name."""


@dataclass(slots=True, kw_only=True)
class EvalRollout:
    """A rollout of a task."""

    rollout_id: str
    """Id of the rollout."""
    reward: float | None = None
    """Its reward; null if it has none, or waits for scores."""
    status: Status
    """How its execution ended."""


@dataclass(slots=True, kw_only=True)
class EvalTaskResult:
    """What the rollouts of a task say at a version."""

    n: int
    """Rollouts that count."""
    passed: int
    """How many of them pass."""
    mean: float
    """Their mean reward."""
    rollouts: list[EvalRollout]
    """The first of its rollouts whose rows are still there, at most 16."""


@dataclass(slots=True, kw_only=True)
class EvalTask:
    """A task at two versions."""

    task: str
    """Name of the task."""
    now: EvalTaskResult | None = None
    """What its rollouts say; null if it has none."""
    before: EvalTaskResult | None = None
    """What they said at the version before; null if it had none."""


@dataclass(slots=True, kw_only=True)
class EvalTaskList:
    """The tasks of a suite at a version, beside those of the version before."""

    policy: str
    """Policy that is evaluated."""
    suite: str
    """Name of the suite."""
    version: int
    """Weight version."""
    before: int | None = None
    """The version that it is compared with; null if there is none before."""
    tasks: list[EvalTask]
    """The tasks by name."""
    next: str | None = None
    """The name to send as `after` for the next page; null on the last one."""


@dataclass(slots=True, kw_only=True)
class EvalVersion:
    """What a suite says about a version. Tasks count alike, however many rollouts they have."""

    version: int
    """Weight version."""
    step: int | None = None
    """Optimizer step of the version, if it is known."""
    complete: bool
    """Whether as many tasks as the suite has have as many rollouts as it wants."""
    n: int
    """Rollouts that count: they have a reward, and tokens of one version only."""
    tasks: int
    """Tasks with such a rollout."""
    mixed_versions: int
    """Rollouts with a reward that do not count, because their tokens are of several versions."""
    mean: float
    """Mean of the mean rewards of tasks."""
    standard_error: float | None = None
    """Standard error of that mean: the unbiased standard deviation of the tasks' means, over the root of their number;
    null with fewer than two tasks."""
    pass_at: list[PassAt]
    """pass@k for each k from 1 to `repeats`, as far as tasks have k rollouts."""
    difference: EvalDifference | None = None
    """How it differs from the version before that has tasks in common with it."""
    first_at: str
    """When its first rollout that counts was decided."""
    last_at: str
    """When its last one was."""


@dataclass(slots=True, kw_only=True)
class ExportResult:
    """What became of an exported rollout, as it was when its row was read."""

    run: int
    """Run of the policy."""
    verdict: Verdict
    """The decision of ingest."""
    reason: str | None = None
    """Name of the filter that matched, or a built-in code."""
    state: RolloutState
    """State."""
    advantage: float | None = None
    """Advantage; null until the group is decided."""
    step: int | None = None
    """Optimizer step that consumed the rollout."""
    policy_version: int
    """Weight version of the rollout: its oldest span with a trained token."""
    policy_version_assumed: bool
    """Whether that version was assumed, because the producer sent none."""
    received_at: str
    """Time of arrival."""


@dataclass(slots=True, kw_only=True)
class ExportedRollout:
    """One line of an export: a rollout, and what became of it."""

    trajectory: Trajectory
    """The rollout as `POST /trajectories` takes it. `rollout_id`, `group_id` and `group_size` are always present, and
    segments stand in the place of turns. `policy_version` is absent only if every segment has `versions`."""
    result: ExportResult
    """What became of the rollout."""


@dataclass(slots=True, kw_only=True)
class ExtendRequest:
    """Extends a lease (a heartbeat)."""

    lease: str
    """The lease."""
    ttl_s: int
    """Seconds from now until the lease expires, 1 to 86,400."""
    epoch: int | None = None
    """Epoch of the caller."""


@dataclass(slots=True, kw_only=True)
class FailedFilter:
    """A filter that could not be evaluated on some records."""

    filter: str
    """Its name."""
    scope: FilterScope
    """Its scope."""
    count: int
    """Number of records."""
    message: str
    """Why, for the newest of them."""
    group_id: str
    """The group of the newest of them."""
    rollout_id: str | None = None
    """The newest of them, if it is a rollout."""


@dataclass(slots=True, kw_only=True)
class FilterNames:
    """The names that filters know."""

    variables: list[FilterVariable]
    """The variables: first those of scope `rollout`, then those of scope `group`."""
    functions: list[str]
    """Functions that are called as `name(..)`."""
    methods: list[str]
    """Functions that are called as `value.name(..)`."""
    macros: list[str]
    """Macros; all but `has` are called as `list.name(x, ..)`."""


@dataclass(slots=True, kw_only=True)
class FilterRule:
    """One CEL filter."""

    name: str
    """Reason that a match is given; unique within the policy."""
    scope: FilterScope
    """Whether the filter examines rollouts or groups."""
    when: str
    """CEL expression that evaluates to a bool, 4 KiB at most."""
    action: FilterAction
    """What happens to a rollout or group that matches."""


@dataclass(slots=True, kw_only=True)
class FilterVariable:
    """A variable of filters."""

    scope: FilterScope
    """The scope of the filters that may use it. A variable of both scopes has an entry for each."""
    name: str
    """Its name in expressions."""
    type: str
    """The type of its value, such as `double or null`."""
    meaning: str
    """What it means."""
    typical: str
    """A value that many records have, as JSON."""


@dataclass(slots=True, kw_only=True)
class FinishRequest:
    """A request to finish a session."""

    reward: float | None = None
    """Reward of every policy that is not in `rewards`. It must be finite; the sign of a zero is not kept."""
    rewards: Mapping[str, float] | None = None
    """Rewards by policy."""
    reward_components: Mapping[str, float] | None = None
    """Named parts of the reward: scores by the producer, for filters and export. Each name may occur once. `scores` is
    another name of the field."""
    turn_rewards: Mapping[str, float] | None = None
    """Rewards of calls, for policies whose rule `advantage` compares turns. A call is named by the id of its answer, as
    the agent received it, or by its number in the session."""
    turn_state_keys: Mapping[str, str] | None = None
    """Names of the states in which calls were made, for the same policies. Calls are named as in `turn_rewards`."""
    status: Status | None = None
    """How the execution ended; `completed` when absent, or `truncated` if a call was refused because a bound of the
    session was reached."""
    metadata: Mapping[str, Any] | None = None
    """JSON object whose members are added to the metadata of the session, and replace members with the same names."""
    wait_ms: int | None = None
    """Milliseconds to wait for calls in flight before they are cancelled; 5,000 when absent."""
    attempt: int | None = None
    """The attempt that it ends. If another one has begun, the request is refused, so that the program of an attempt
    that was given up does not end the next one."""


@dataclass(slots=True, kw_only=True)
class Gdpo:
    """The weighted sum of an advantage for each reward component, which is that of `grpo` over the rollouts of the
    group that have the component (GDPO, arXiv 2601.05242). A rollout without a component has 0 for it."""

    kind: GdpoKind = field(default="gdpo", init=False)
    """The kind."""
    components: Mapping[str, float]
    """The weights of the components, by their names in `reward_components`: 1 to 64, each 0.000001 to 1,000,000 or the
    negative of that."""
    whiten: Whiten = "batch"
    """Over which rollouts the sums are whitened."""


@dataclass(slots=True, kw_only=True)
class Gigpo:
    """An advantage for each turn: `A_E + omega * A_S` (`GiGPO`, arXiv 2505.10978). `A_E` is the reward of the rollout
    compared with those of its group. `A_S` is the return of the turn, as in `turn_return` with `outcome`, compared with
    those of the turns of the group that began in the same state: 0 without a `state_key`, or for a state in which one
    turn began."""

    kind: GigpoKind = field(default="gigpo", init=False)
    """The kind."""
    gamma: float = 1.0
    """What a reward counts one turn earlier, 0 to 1."""
    omega: float = 1.0
    """The weight of `A_S`, 0 to 1,000,000."""
    norm: Norm = "std"
    """How values x are compared."""


@dataclass(slots=True, kw_only=True)
class TrainedVersions:
    """The weight versions that generated trained tokens."""

    min: int
    """The oldest version."""
    max: int
    """The newest version."""


@dataclass(slots=True, kw_only=True)
class GroupInfo:
    """A group in the ledger."""

    policy: str
    """Policy of the group."""
    run: int
    """Run of the policy in which it was opened."""
    group_id: str
    """Id of the group."""
    state: GroupState
    """State of the group."""
    reason: str | None = None
    """Why the group was discarded or quarantined."""
    failed_filters: list[str] = field(default_factory=list[str])
    """Group filters whose evaluation failed for this group, at most 16 names."""
    environment: str | None = None
    """Environment label of the group's first rollout."""
    size: int
    """Size of the group: the number of places for rollouts."""
    min_size: int
    """Number of rollouts that suffice when the group times out."""
    arrived: int
    """Number of kept and masked rollouts."""
    kept: int
    """Number of kept rollouts."""
    masked: int
    """Number of masked rollouts."""
    dropped: int
    """Number of dropped rollouts."""
    scoring: int = 0
    """Number of kept rollouts that lack a required score."""
    late: int
    """Number of rollouts that arrived after the group was decided."""
    batch_id: str | None = None
    """Batch that contains the group."""
    tokens: int | None = None
    """Number of prompt and response tokens of its kept and masked rollouts; null until it is decided."""
    trained_tokens: int | None = None
    """Number of trained tokens of its kept rollouts; null until it is decided."""
    reward_mean: float | None = None
    """Mean reward of its kept rollouts; null until it is decided."""
    reward_min: float | None = None
    """Lowest reward of its kept rollouts. It is the highest as well if there is nothing to learn from the group."""
    reward_max: float | None = None
    """Highest reward of its kept rollouts."""
    versions: TrainedVersions | None = None
    """Versions of its trained tokens; null until it is decided, and if no token is trained."""
    opened_at: str
    """When the first rollout of the group arrived."""
    deadline_at: str | None = None
    """When an open group is decided with the rollouts that have arrived."""
    decided_at: str | None = None
    """When the group was decided."""
    purged_at: str | None = None
    """When its payloads were purged."""


@dataclass(slots=True, kw_only=True)
class GroupOutcomes:
    """What became of groups."""

    ready: int
    """Groups that became ready."""
    discarded: dict[str, int]
    """Groups that were discarded, by the reason."""
    open: int
    """Groups that would still wait for rollouts, because other rollouts are dropped."""
    unjudged: int
    """Groups that cannot be judged."""


@dataclass(slots=True, kw_only=True)
class GroupPage:
    """Groups, in the order in which they were opened, or the newest first."""

    groups: list[GroupInfo]
    """Groups."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the last."""
    examined: int
    """Number of entries that were examined to find those of the page, at most 10,000 in a filtered list."""


@dataclass(slots=True, kw_only=True)
class GroupRules:
    """When a group is complete, and what happens when it is not."""

    size: int = 1
    """Number of rollouts of a group."""
    min_size: int | None = None
    """Number of rollouts that suffice when the group times out; the size of the group when absent."""
    timeout_s: int = 3600
    """Seconds from the arrival of the first rollout until the group is decided with the rollouts that have arrived."""
    on_drop: OnDrop = "refill"
    """Whether a dropped rollout uses up one of the group's places."""


@dataclass(slots=True, kw_only=True)
class Health:
    """The answer that shows that the process is alive."""

    status: str
    """Always `ok`."""
    version: str
    """The service's version, e.g. `0.1.0`."""


@dataclass(slots=True, kw_only=True)
class HeldBatch:
    """A batch that a consumer holds."""

    batch_id: str
    """Id of the batch."""
    consumer: str | None = None
    """Who holds it; null if the consumer sent no name."""
    since: str
    """When the lease began."""
    expires_at: str | None = None
    """When the lease ends, unless it is extended."""
    attempt: int
    """Number of the delivery."""


@dataclass(slots=True, kw_only=True)
class IdMatch:
    """Something that has an id."""

    kind: IdKind
    """What it is."""
    policy: str
    """Its policy."""


@dataclass(slots=True, kw_only=True)
class IdWhy:
    """What became of a rollout, group, batch or session."""

    id: str
    """The id that was asked about."""
    kind: IdKind
    """What it names."""
    policy: str
    """Its policy."""
    at: str
    """The service's time of the facts."""
    state: str
    """Its state, as in the ledger."""
    headline: str
    """The state in one sentence."""
    causes: list[LifeStep]
    """The steps of its life, the oldest first."""
    ruled_out: list[WhyFinding]
    """Empty; policies have it."""
    unknown: list[WhyFinding]
    """Empty; policies have it."""
    see: str
    """A call that shows it, relative to the service's address."""
    also: list[IdMatch]
    """What else has the same id."""


@dataclass(slots=True, kw_only=True)
class ImportRefusal:
    """Why a document or a rollout was refused."""

    line: int
    """Line on which the document begins, counted from 1."""
    rollout_id: str | None = None
    """Id of the rollout, if the document could be read."""
    type: str
    """`invalid-document` if the document could not be read, otherwise the type of the problem with which the service
    refused the rollout, e.g. `rollout-conflict`."""
    pointer: str
    """JSON pointer (RFC 6901): into the document if it could not be read, otherwise into the trajectory that was made
    of it."""
    detail: str
    """Description of the error."""


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """What became of the documents of one source."""

    file: str | None = None
    """The file; absent if the source was a body."""
    format: str
    """Name of the format."""
    documents: int
    """Number of documents that were read."""
    rollouts: int
    """Number of rollouts in them, without those of refused documents."""
    stored: int
    """Number of rollouts that were stored now."""
    duplicates: int
    """Number of rollouts that had been stored before and are the same."""
    verdicts: ImportVerdicts
    """The rollouts that were stored now, by verdict."""
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    """The rollouts that were stored now and are not kept, by reason."""
    notes: dict[str, int] = field(default_factory=dict[str, int])
    """What was left out of documents that were not refused, by a stable name."""
    refused: int
    """Number of documents that could not be read, and of rollouts that the service did not store."""
    refusals: list[ImportRefusal] = field(default_factory=list[ImportRefusal])
    """What was wrong, at most 100 entries."""


@dataclass(slots=True, kw_only=True)
class ImportVerdicts:
    """Numbers of rollouts by verdict."""

    kept: int
    """Number of kept rollouts."""
    masked: int
    """Number of masked rollouts."""
    dropped: int
    """Number of dropped rollouts."""
    late: int
    """Number of rollouts whose group was already decided."""


@dataclass(slots=True, kw_only=True)
class JournalEntry:
    """Something that an operator or time did to a policy."""

    at: str
    """When it happened."""
    kind: str
    """What happened: `rules-changed`, `resumed`, `reset`, `batch-quarantined`, `groups-quarantined`, `readmitted`,
    `group-closed`, `group-discarded`, `leases-expired`, `backlog-full`, `backlog-freed` or `filter-fails`. More kinds
    may follow."""
    key_id: str | None = None
    """Id of the key of the caller; null if nobody called, or if the service needs no keys."""
    detail: dict[str, Any]
    """More about it. The fields depend on the kind."""


@dataclass(slots=True, kw_only=True)
class JournalPage:
    """A page of the journal of a policy."""

    entries: list[JournalEntry]
    """Entries in the requested order."""
    next: str | None = None
    """Cursor of the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class KeyCreated:
    """A new key. Only this answer contains the secret."""

    key: str
    """Value to send as `Authorization: Bearer`."""
    info: KeyInfo
    """The key as it appears in lists."""


@dataclass(slots=True, kw_only=True)
class KeyInfo:
    """A key in a list. It never contains the secret, because the service does not store it."""

    key_id: str
    """Id of the key, which is public: the part between `fb_` and the secret."""
    name: str
    """Who or what the key is for."""
    role: Role
    """Role of the key."""
    policies: list[str]
    """Policies that the key may access."""
    created_at: str
    """When it was created."""
    last_used_at: str | None = None
    """When the key was last accepted; null if never."""
    expires_at: str | None = None
    """When the key expires; null if never."""
    revoked_at: str | None = None
    """When the key was revoked; null if it was not."""


@dataclass(slots=True, kw_only=True)
class KeyPage:
    """A page of keys."""

    keys: list[KeyInfo]
    """Keys, in the order in which they were created."""
    next: str | None = None
    """Value of `after` for the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class KeyRequest:
    """A request for a new key."""

    name: str
    """Who or what the key is for: a label, not an identity."""
    role: Role
    """Role of the key."""
    policies: Sequence[str] | None = None
    """Policies that the key may access: names, in which `*` stands for any characters. All policies when absent."""
    expires_in_s: int | None = None
    """Seconds from now until the key expires; it never expires when absent."""


@dataclass(slots=True, kw_only=True)
class LeaseRules:
    """How long a lease lasts and how many deliveries of a batch may fail."""

    ttl_s: int = 600
    """Seconds until a lease expires if it is not extended."""
    max_deliveries: int = 5
    """Number of deliveries that may expire or be given back before the batch is quarantined."""
    max_resumes: int = 20
    """Number of leases that resumes may end before the batch is quarantined; 0 means unbounded."""


@dataclass(slots=True, kw_only=True)
class LifeStep:
    """A step in a life."""

    code: str
    """Stable code."""
    at: str | None = None
    """When it happened; null if it has not happened yet, and if the time is not known."""
    text: str
    """One sentence."""
    rule: str | None = None
    """The rule that decided, as it was when the group was opened."""


@dataclass(slots=True, kw_only=True)
class LookedAt:
    """What a draft was tried on."""

    groups: int
    """Number of groups."""
    rollouts: int
    """Number of their rollouts."""
    examined: int
    """Number of groups that were read to find them: also open ones, those of other environments, and those that were
    discarded before the rules could decide them."""
    from_: str | None = field(default=None, metadata={"name": "from"})
    """The decision of the first of the groups; null without groups."""
    to: str | None = None
    """The decision of the last of the groups."""
    payload_bytes: int
    """Bytes of the payloads that were read, unpacked."""
    complete: bool
    """Whether there was time and memory for all of the groups. If not, the oldest are missing."""


@dataclass(slots=True, kw_only=True)
class MessagePage:
    """A page of chat messages."""

    count: int
    """Number of messages of the rollout."""
    from_: int = field(metadata={"name": "from"})
    """Index of the first message of the page."""
    items: list[ContentMessage]
    """Messages in order, together at most 1 MiB."""
    next: int | None = None
    """Index of the first message of the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class NackRequest:
    """Gives a batch back."""

    lease: str
    """The lease."""
    reason: str | None = None
    """Reason, up to 1,024 bytes."""
    groups: Sequence[str] | None = None
    """Ids of the groups to quarantine; the batch is then split."""
    epoch: int | None = None
    """Epoch of the caller."""


@dataclass(slots=True, kw_only=True)
class NumberSpread:
    """A number of several steps."""

    mean: float
    """The mean."""
    min: float
    """The least."""
    max: float
    """The greatest."""


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """An open group and the number of rollouts in it."""

    state: GroupState
    """State after this post."""
    reason: str | None = None
    """Why it was discarded or quarantined, such as the name of a filter; absent otherwise."""
    arrived: int
    """Number of kept and masked rollouts."""
    size: int
    """Size of the group: the number of places for rollouts."""
    group_id: str
    """Id of the group."""


@dataclass(slots=True, kw_only=True)
class Overview:
    """All policies that the caller may access, the worst first."""

    at: str
    """The service's time of the facts, at most a second or two ago."""
    policies: list[OverviewPolicy]
    """Policies, the worst first; among equals by name."""
    next: str | None = None
    """Value of `after` for the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class OverviewStaleness:
    """Staleness at a glance, over the newest 20 steps."""

    mean: float
    """Mean."""
    max: int
    """Greatest."""
    bound: int | None = None
    """The bound in the rules."""


@dataclass(slots=True, kw_only=True)
class OverviewReward:
    """Rewards at a glance."""

    trained: float | None = None
    """Mean reward of the newest step."""
    change_20_steps: float | None = None
    """How much it is higher than 20 steps before; null with fewer steps."""


@dataclass(slots=True, kw_only=True)
class OverviewPolicy:
    """A policy at a glance."""

    policy: str
    """Policy."""
    state: PolicyCondition
    """How it is: the worst state that applies."""
    headline: str
    """The state in one sentence."""
    received_per_min: float | None = None
    """Rollouts received per minute in the last 15 minutes; null without a history."""
    tokens_per_min: float | None = None
    """Their tokens per minute."""
    ready_groups: int
    """Number of ready groups."""
    needed_groups: int
    """Number of groups that a batch needs."""
    staleness: OverviewStaleness | None = None
    """How old the groups of the newest steps were when they were trained; null without a step."""
    reward: OverviewReward | None = None
    """Rewards of what was trained; null without a step."""
    lost_last_hour: int | None = None
    """Rollouts of the last hour that will not be trained: dropped, late, or in groups that were discarded or went
    stale; null without a history."""
    last_post_at: str | None = None
    """When the last rollout arrived."""
    last_ack_at: str | None = None
    """When the last batch was acked."""
    version: int
    """Current weight version."""


@dataclass(slots=True, kw_only=True)
class PassAt:
    """The probability that at least one of k rollouts of a task passes."""

    k: int
    """Number of rollouts."""
    estimate: float
    """Mean over tasks of `1 - C(n - c, k) / C(n, k)`, where c of the n rollouts of a task pass."""
    tasks: int
    """Tasks with at least k rollouts."""
    low: float | None = None
    """Bounds of the interval of 95% over tasks: the estimate, and 1.96 standard errors to both sides; null with fewer
    than two tasks."""
    high: float | None = None
    """The upper bound."""


@dataclass(slots=True, kw_only=True)
class PolicyList:
    """Names of all policies."""

    policies: list[PolicyStatus]
    """Policies, in the order of their names."""
    next: str | None = None
    """Cursor of the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class StalenessRules:
    """How old trained tokens may be when they are first delivered. The age is measured when a batch is cut, by the
    rules and the version at that time."""

    max: int | None = None
    """Number of versions that a trained token may be behind; unbounded when absent."""
    action: StalenessAction = "drop"
    """What happens to a group that exceeds the bound."""
    wait_s: int = 3600
    """With `wait`, the seconds for which no batch is granted for the sake of the same rollouts."""
    after_wait: AfterWait = "drop"
    """With `wait`, what happens to a group that exceeds the bound all the same, because it was waited for in vain."""


@dataclass(slots=True, kw_only=True)
class RetentionRules:
    """How many seconds payloads are kept. After that only the ledger row is kept."""

    trained_s: int = 604800
    """Seconds after the ack, while the batch is not settled."""
    settled_s: int = 3600
    """Seconds after the checkpoint that settled the batch."""
    dropped_s: int = 0
    """Seconds after a drop, a discard or a staleness verdict. With 0, payloads of dropped and late rollouts are not
    stored at all."""
    evaluated_s: int = 604800
    """Seconds after the decision about a rollout that evaluates the policy."""
    tombstone_s: int = 604800
    """Seconds that ledger rows are kept after their payloads are purged."""


@dataclass(slots=True, kw_only=True)
class SessionRules:
    """How the calls of an agent, which are posted as `turns` or recorded in a session, become segments. For a recorded
    session, the rules at its finish count."""

    retries: Retries = "transport"
    """Which answers are not trained."""
    max_attempts: int = 5
    """How often an agent may be started in one session, the first time included. A session whose agent makes no calls
    is parked while it may be resumed; with 1 it expires. The rules at its opening count."""
    teacher: str | None = None
    """The name of an `[[upstream]]` of the configuration. When a session is finished, it scores the segments of the
    policy, and their `teacher_logprobs` are filled in. Posted trajectories are not scored."""


@dataclass(slots=True, kw_only=True)
class RecordRules:
    """What is kept of the calls of a recorded session besides what is trained. The rules at its finish count."""

    messages: bool = True
    """Whether the rollout gets the conversation as `messages`: the messages of its last call, and the answer."""


@dataclass(slots=True, kw_only=True)
class ScoreWork:
    """How scorers lease the work of giving a score."""

    per: ScoreWorkPer = "rollout"
    """Whether a scorer gets one rollout, or the rollouts of a group at once."""
    max_attempts: int = 5
    """How many leases may end without the score. Then the work is `exhausted` and waits for `POST /scores/retry`."""


@dataclass(slots=True, kw_only=True)
class ScoreRules:
    """Scores that a rollout must have before it is judged. A score is a named number about a rollout: its `reward`,
    each of its `reward_components`, and what others post to `/scores`, also later."""

    required: list[str] = field(default_factory=list[str])
    """Names of the scores, at most 16. A rollout that lacks one has its place in its group and is `scoring` until it
    has all of them. Its group is not decided before."""
    timeout_s: int = 3600
    """Seconds from the arrival of a rollout after which it is dropped as `unscored` if it still lacks a score."""
    reward: str | None = None
    """CEL expression of the reward, over the variables of filters of scope `rollout`, 4 KiB at most. When absent, the
    score `reward` is the reward."""
    work: dict[str, ScoreWork] = field(default_factory=dict[str, ScoreWork])
    """The required scores that scorers can lease as work, by name."""


@dataclass(slots=True, kw_only=True)
class PolicyRules:
    """How trajectories of a policy are filtered, grouped, batched and kept. Omitted keys take their defaults.

    When rules are replaced, these stay fixed for a group from the arrival of its first rollout: `require`, `filter`,
    `group`, `columns`, `advantage`, `sessions.retries` of posted turns, `retention.dropped_s` of what is dropped or
    discarded, and `retention.tombstone_s` of what is purged. All other rules, including `staleness`, apply to all
    groups from the next request on.
    """

    require: list[Requirement] = field(default_factory=lambda: ["tokens"])
    """Columns that every trajectory must have; others are refused. If empty, trajectories with text alone are accepted
    too."""
    group: GroupRules = field(default_factory=GroupRules)
    """When a group is complete."""
    batch: BatchRules = field(default_factory=BatchRules)
    """What one batch holds."""
    lease: LeaseRules = field(default_factory=LeaseRules)
    """How long a lease lasts and how many deliveries a batch has."""
    advantage: AdvantageName | Gdpo | TurnReturn | Gigpo = "grpo"
    """Advantage estimator, applied once when the group is finalized."""
    loss_weighting: LossWeighting = "rollout_mean"
    """How the tokens of a batch are weighted in the loss; fixed when the batch is cut."""
    loss_constant: float | None = None
    """The divisor `L` of `constant` loss weighting."""
    staleness: StalenessRules = field(default_factory=StalenessRules)
    """How old trained tokens may be when they are first delivered."""
    admissions: AdmissionRules = field(default_factory=AdmissionRules)
    """Room for rollouts that are not trained."""
    backlog: BacklogRules = field(default_factory=BacklogRules)
    """Bounds of the data that is not yet trained."""
    settle: Settle = "checkpoint"
    """What settles an acked batch."""
    retention: RetentionRules = field(default_factory=RetentionRules)
    """How long payloads and ledger rows are kept."""
    sessions: SessionRules = field(default_factory=SessionRules)
    """How the calls of an agent become segments."""
    record: RecordRules = field(default_factory=RecordRules)
    """What is kept of an agent's calls besides what is trained."""
    scores: ScoreRules = field(default_factory=ScoreRules)
    """Scores that a rollout must have before it is judged."""
    columns: dict[str, ColumnRule] = field(default_factory=dict[str, ColumnRule])
    """What rollouts have for each token besides its id, mask and log-probability, by name: at most 32 columns."""
    filter: list[FilterRule] = field(default_factory=list[FilterRule])
    """CEL filters, in order; the first match wins."""


@dataclass(slots=True, kw_only=True)
class PolicySeries:
    """What happened to a policy in the buckets of a window. All lists have one entry for each bucket."""

    from_: str = field(metadata={"name": "from"})
    """Begin of the first bucket."""
    to: str
    """End of the last bucket."""
    step_s: int
    """Width of a bucket in seconds. It is more than requested if the window begins where only the totals of longer
    times are kept."""
    at: list[int]
    """Begins of the buckets in seconds since the Unix epoch."""
    metrics: dict[str, list[float | None]]
    """Values by the names of the metrics: of a counter what happened in the bucket, of a gauge the number at its end.
    Null where the service was not running."""


@dataclass(slots=True, kw_only=True)
class PolicyStats:
    """Totals of one policy since it was created."""

    received: int
    """Number of receipts with `duplicate = false`."""
    rollouts: dict[str, int]
    """Number of rollouts by state; `forgotten` counts those whose tombstone expired."""
    groups: dict[str, int]
    """Number of groups by state."""
    batches: dict[str, int]
    """Number of batches by state."""
    dropped: dict[str, int]
    """Number of rollouts and groups dropped, by rule."""
    live_bytes: int
    """Bytes of stored payloads that are not yet trained."""
    conserved: bool
    """True when `received` equals the sum of `rollouts`."""


@dataclass(slots=True, kw_only=True)
class PolicyStatus:
    """A policy: its rules, its weight versions and the contents of its buffer."""

    policy: str
    """Name of the policy."""
    rules: PolicyRules
    """Rules. Some apply to groups opened from now on, the others from the next request on."""
    warnings: list[str] = field(default_factory=list[str])
    """In the answer to `PUT` and `PATCH /policies/{p}`: settings that changed although the request did not name them,
    and what the rules probably do not mean."""
    run: int
    """Number of the current run; it starts at 1 and grows with every reset."""
    epoch: int
    """Lineage of the weights; every resume starts a new epoch."""
    version: int
    """Current weight version."""
    version_step: int | None = None
    """Step at which the version was published."""
    version_uri: str | None = None
    """URL of the version's weights."""
    checkpoint_step: int | None = None
    """Last settled step."""
    restored: bool = False
    """True after the service was restored from a backup, until a trainer resumes. A trainer that is refused as
    `superseded` in this time was not replaced by another one and should resume."""
    rollouts: dict[str, int]
    """Number of rollouts by state, with the state names of the ledger."""
    groups: dict[str, int]
    """Number of groups by state."""
    batches: dict[str, int]
    """Number of batches by state."""
    waiting: Waiting
    """What the next batch is waiting for."""


@dataclass(slots=True, kw_only=True)
class PolicySteps:
    """The steps of a trainer: one by one in `steps`, or several together in `buckets`."""

    steps: list[StepInfo]
    """Steps of the current run. A step that was acked again after a resume has an entry for each epoch."""
    next: str | None = None
    """Cursor of the next page; null on the last page."""
    buckets: list[StepBucket]
    """The requested range of steps in parts of equal size, those without an acked step left out; empty if no range was
    requested."""


@dataclass(slots=True, kw_only=True)
class PolicyWhy:
    """Why a policy is as it is."""

    policy: str
    """Policy."""
    at: str
    """The service's time of the facts."""
    state: PolicyCondition
    """How the policy is: the worst state that applies."""
    headline: str
    """The state in one sentence."""
    causes: list[WhyCause]
    """What explains the state, the most important first."""
    ruled_out: list[WhyFinding]
    """What was looked at and is not the reason."""
    unknown: list[WhyFinding]
    """What cannot be known."""


@dataclass(slots=True, kw_only=True)
class ReceiptGroup:
    """The state of a group, as receipts show it."""

    state: GroupState
    """State after this post."""
    reason: str | None = None
    """Why it was discarded or quarantined, such as the name of a filter; absent otherwise."""
    arrived: int
    """Number of kept and masked rollouts."""
    size: int
    """Size of the group: the number of places for rollouts."""


@dataclass(slots=True, kw_only=True)
class ResetRequest:
    """Starts a new run of the policy under the same name."""

    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class ResetResponse:
    """Answer to a reset."""

    run: int
    """Number of the new run."""
    epoch: int
    """The new epoch."""
    discarded_groups: int
    """Number of groups discarded with reason `reset`."""


@dataclass(slots=True, kw_only=True)
class ResumeRequest:
    """Reports that the trainer starts from its checkpoint of a step, or without a checkpoint."""

    step: int | None = None
    """Last saved step; null if the trainer starts without a checkpoint."""
    force: bool | None = None
    """Permits a resume below the last settled step, over purged batches (what can still be delivered comes back), or
    above the last acked step."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class ResumeResponse:
    """Answer to a resume."""

    epoch: int
    """The new epoch."""
    version: int
    """The current weight version: the newest version published at or before the step."""
    returned_batches: int
    """Number of batches that came back: those whose leases were revoked and those acked after the step."""
    quarantined_batches: int = 0
    """Number of batches that do not come back, because resumes have ended their leases `lease.max_resumes` times."""
    undeliverable_batches: int
    """Number of batches acked after the step whose payloads are purged; above 0 only with `force`. Those that were not
    settled are discarded with reason `lineage-gap`."""


@dataclass(slots=True, kw_only=True)
class RolloutOutcomes:
    """What became of rollouts."""

    kept: int
    """Kept rollouts."""
    masked: dict[str, int]
    """Masked rollouts, by the filter."""
    dropped: dict[str, int]
    """Dropped rollouts, by the reason."""
    late: int
    """Rollouts that arrived after the decision of their group."""
    unjudged: int
    """Rollouts of groups that cannot be judged."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One row of `/samples`: one segment of a rollout.

    `loss = sum_i loss_weight_i * sum_t loss_mask_it * l_it` over the rows of a batch, however the rows are split into
    microbatches.

    `messages` and `metadata` belong to the rollout and are sent once, on its first row (`segment` 0). The other rows
    may be in other shards.
    """

    rollout_id: str
    """Rollout that the segment belongs to."""
    group_id: str
    """Group of the rollout."""
    segment: int
    """Position of the segment in its rollout, from 0."""
    segments: int
    """Number of segments of the rollout."""
    kind: str | None = None
    """Label of the segment."""
    environment: str | None = None
    """Label of the environment."""
    verdict: Verdict
    """`kept` or `masked`."""
    status: Status
    """How the execution ended."""
    tokens: list[int] | None = None
    """Prompt and response token ids; null for a rollout without segments."""
    response_length: int
    """Number of response tokens; they are the last of `tokens`."""
    loss_mask: list[int] | None = None
    """0 or 1 per response token; all 0 where the verdict is `masked`."""
    logprobs: list[float] | None = None
    """Behaviour log-probabilities per response token."""
    teacher_logprobs: list[float] | None = None
    """Teacher log-probabilities per response token."""
    values: list[float] | None = None
    """Critic values per response token."""
    temperature: float
    """Divisor of the logits at sampling."""
    top_p: float
    """Nucleus mass at sampling; below 1, importance ratios are biased."""
    top_k: int
    """Number of candidates at sampling, -1 for all; above 0, importance ratios are biased."""
    reward: float | None = None
    """Reward of the rollout."""
    advantage: float | None = None
    """Advantage of the rollout; null if each token has its own."""
    advantages: list[float] | None = None
    """Advantage of each response token, 0 where the mask is 0; null if the rollout has one."""
    loss_weight: float
    """Weight of each trained token of this row in the loss."""
    policy_version: int | None = None
    """Weight version of the rollout: its oldest span with a trained token."""
    versions: list[list[int]] | None = None
    """Version spans as the producer sent them."""
    columns: dict[str, ColumnUpload] = field(default_factory=dict[str, ColumnUpload])
    """Uploads of those columns that the caller asked for."""
    media: list[list[int | str]] = field(default_factory=list[list[int | str]])
    """Where media stand among the tokens."""
    messages: list[dict[str, Any]] | None = None
    """Messages as the producer sent them, on the row of segment 0; null on the other rows of the rollout."""
    metadata: dict[str, Any] | None = None
    """Metadata as the producer sent it, on the row of segment 0; null on the other rows of the rollout."""


@dataclass(slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. Importance ratios are biased unless the full vocabulary was sampled."""

    temperature: float = 1.0
    """Divisor of the logits, above 0."""
    top_p: float = 1.0
    """Nucleus mass, in (0, 1]."""
    top_k: int = -1
    """Number of candidates, -1 for all."""


@dataclass(slots=True, kw_only=True)
class SavedState:
    """What an agent or its sandbox has stored to go on from."""

    call: int
    """Number of the last call before it; 0 before the first one."""
    attempt: int
    """The attempt that stored it."""
    bytes: int
    """Number of bytes."""
    stored_at: str
    """When it was stored."""


@dataclass(slots=True, kw_only=True)
class ScoreExtendRequest:
    """A heartbeat for leases of work."""

    policy: str | None = None
    """Policy of the work; `default` when absent."""
    leases: Sequence[str]
    """The leases, 1 to 256."""
    ttl_s: int | None = None
    """Seconds from now until they expire, at most 86,400; `lease.ttl_s` of the rules when absent."""


@dataclass(slots=True, kw_only=True)
class ScoreExtended:
    """What became of leases that were to be extended."""

    expires_at: str
    """When the leases that are held expire now."""
    expires_in_ms: int
    """Milliseconds until then."""
    held: list[str]
    """Leases that are held, in the order of the request."""
    lost: list[str]
    """Leases that are lost: their work is settled, or will be given to others."""


@dataclass(slots=True, kw_only=True)
class ScoreInfo:
    """A score that was given."""

    name: str
    """Name of the score."""
    turn: int | None = None
    """The number of the turn that it is the reward of; absent if it is about the whole rollout."""
    scorer: str | None = None
    """Who gave it; null for the producer of the rollout."""
    value: float
    """The score."""
    rationale: str | None = None
    """Why."""
    applied: bool
    """Whether the decision about the rollout counts the score, or will."""
    given_at: str
    """When it was given."""
    attempt: int | None = None
    """Which lease of its work it settled, counted from 1; absent if it was given without a lease."""


@dataclass(slots=True, kw_only=True)
class ScoreItem:
    """One piece of work: a score of a rollout, or of the rollouts of a group."""

    lease: str
    """Token that proves the lease, for `POST /scores`."""
    expires_at: str
    """When the lease expires."""
    expires_in_ms: int
    """Milliseconds until then."""
    attempt: int
    """Number of this attempt, counted from 1."""
    max_attempts: int
    """How many there are."""
    policy: str
    """Policy of the rollouts."""
    name: str
    """Name of the score."""
    per: ScoreWorkPer
    """Whether it is about one rollout or about a whole group."""
    group_id: str
    """Group of the rollouts."""
    rollouts: list[ScoreItemRollout]
    """The rollout, or the kept and masked rollouts of the group."""


@dataclass(slots=True, kw_only=True)
class SegmentText:
    """The text of a segment, with special tokens."""

    prompt: str
    """The prompt."""
    response: str
    """The response."""


@dataclass(slots=True, kw_only=True)
class TurnSpan:
    """One turn of a segment: response tokens `start..start + length`, of which at least one has mask 1."""

    start: int
    """First response token of the turn."""
    length: int
    """Number of response tokens."""
    reward: float | None = None
    """Reward of the turn. It must be finite; the sign of a zero is not kept."""
    state_key: str | None = None
    """Name of the state in which the turn began. Turns of a group with the same one are compared with each other."""


@dataclass(slots=True, kw_only=True)
class Segment:
    """One training sequence of a rollout. All per-token arrays cover only the response."""

    kind: str | None = None
    """Label: `turn`, `subagent`, `compaction`, `final`, ..."""
    tokens: Ints
    """Prompt and response token ids. At least one of them must be a prompt token."""
    loss_mask: Ints
    """0 or 1 per response token. The length of this array is the length of the response. It is empty if nothing was
    sampled."""
    response_length: int | None = None
    """Length of the response; must equal the length of the mask when present."""
    logprobs: Logprobs | None = None
    """Log-probabilities under the behaviour policy: log-softmax of logits / temperature. Where the mask is 0 they are
    ignored and may be null."""
    teacher_logprobs: Logprobs | None = None
    """Log-probabilities under a teacher. Where the mask is 0 they are ignored and may be null."""
    values: Floats | None = None
    """Critic values, read before each response token."""
    advantages: Logprobs | None = None
    """Advantage of each response token, for policies with the rule `advantage = "posted"`. Where the mask is 0 they are
    ignored and may be null."""
    versions: Sequence[Sequence[int]] | None = None
    """`[version, start, length]` spans that cover the response without gaps or overlaps."""
    turns: Sequence[TurnSpan] | None = None
    """The turns of the response, in order, for policies whose rule `advantage` compares turns. A segment without any
    has one for each run of tokens with mask 1."""
    columns: Mapping[str, ColumnUpload] | None = None
    """Columns of the segment that were uploaded, by the names that the rules of the policy declare."""
    media: Sequence[Sequence[int | str]] | None = None
    """Where media stand over placeholder tokens, in order."""


@dataclass(slots=True, kw_only=True)
class ScoreItemRollout:
    """A rollout that needs a score, or that stands beside one."""

    rollout_id: str
    """Id of the rollout."""
    scoring: list[str]
    """Required scores that it lacks. A rollout of a group that does not lack the score of the item needs none."""
    policy_version: int
    """Weight version of the rollout."""
    status: Status
    """How its execution ended."""
    reward: float | None = None
    """The reward that its producer sent."""
    reward_components: dict[str, float]
    """Named parts of the reward that its producer sent; in a group, those of a rollout with all of its scores have
    these with them."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages, if they were asked for and there are some."""
    metadata: dict[str, Any] | None = None
    """Metadata, if it was asked for and there is some."""
    text: list[SegmentText] | None = None
    """The segments as text, if that was asked for and the tokenizer is known."""
    segments: list[Segment] | None = None
    """The segments, if they were asked for."""
    omitted: ScoreOmitted | None = None
    """Why something is not here that was asked for, or that others have; absent if nothing is missing."""


@dataclass(slots=True, kw_only=True)
class ScoreLeaseRequest:
    """A request for work: scores that rollouts lack and that the rules let scorers lease (`scores.work`)."""

    policy: str | None = None
    """Policy of the rollouts; `default` when absent."""
    names: Sequence[str]
    """Names of the scores that the scorer can give, 1 to 16."""
    max: int | None = None
    """The most items, at most 256; 1 when absent."""
    wait_ms: int | None = None
    """Milliseconds to wait for work, at most 60,000."""
    scorer: str | None = None
    """Name of the scorer, the scope of `request_id`; when absent, the id of the key, or `anonymous` without keys."""
    request_id: str | None = None
    """Makes the request safe to repeat: while one of its leases is alive, the same request returns the same items."""
    ttl_s: int | None = None
    """Seconds of the leases, at most 86,400; `lease.ttl_s` of the rules when absent."""
    include: list[ScoreInclude] = field(default_factory=list[ScoreInclude])
    """What of the rollouts to send along."""


@dataclass(slots=True, kw_only=True)
class ScoreLeases:
    """Work that was leased."""

    items: list[ScoreItem]
    """The items, oldest first; empty if there was no work in time."""


@dataclass(slots=True, kw_only=True)
class ScoreReceipt:
    """The answer to a score."""

    policy: str
    """Policy of the rollout."""
    rollout_id: str
    """Id of the rollout."""
    name: str
    """Name of the score."""
    turn: int | None = None
    """The number of the turn that it is the reward of; absent if it is about the whole rollout."""
    scorer: str
    """Who gave it."""
    duplicate: bool
    """True if the same score was already stored and this post changed nothing."""
    applied: bool
    """Whether the decision about the rollout counts the score, or will. A score that comes after the decision is stored
    and shown, and changes nothing."""
    failed: bool = False
    """True if no score was given, and the attempt of the lease's holder was counted as failed."""
    scoring: list[str]
    """Required scores that the rollout still lacks."""
    verdict: Verdict
    """The decision about the rollout; not final as long as it lacks scores."""
    reason: str | None = None
    """Name of the filter that matched, or a built-in code."""
    group: ReceiptGroup
    """The group after this post."""


@dataclass(slots=True, kw_only=True)
class ScoreLine:
    """One line of the answer to scores that were sent as lines (`application/x-ndjson`)."""

    line: int
    """Line of the request, counted from 1. Empty lines are counted but not answered."""
    status: int
    """HTTP status that the line would have received as a request of its own."""
    receipt: ScoreReceipt | None = None
    """Receipt of a score that was accepted."""
    problem: Problem | None = None
    """Problem of a score that was refused."""


@dataclass(slots=True, kw_only=True)
class ScoreList:
    """The scores of a rollout."""

    policy: str
    """Policy of the rollout."""
    rollout_id: str
    """Id of the rollout."""
    scoring: list[str]
    """Required scores that the rollout lacks."""
    deadline_at: str | None = None
    """When the rollout is dropped if it still lacks one; null if it lacks none."""
    scores: list[ScoreInfo]
    """Its scores, by name."""


@dataclass(slots=True, kw_only=True)
class ScoreRequest:
    """A score of a rollout, or with `failed` that the holder of a lease could not give it."""

    policy: str | None = None
    """Policy of the rollout; `default` when absent."""
    rollout_id: str
    """Id of the rollout, in the current run of its policy."""
    name: str
    """Name of the score. `reward` is the reward, unless the rules compute another one."""
    turn: int | str | None = None
    """The turn that the score is the reward of, for policies whose rule `advantage` compares turns: its number, counted
    from 0 over all segments, or the id of its call. It takes the place of the reward that came with the turn."""
    value: float | None = None
    """The score. It must be finite; the sign of a zero is not kept. Needed unless there is `failed`."""
    failed: str | None = None
    """Why the holder of the lease could not give the score, in at most 1,024 bytes. The work can be leased again, until
    its attempts are used up."""
    lease: str | None = None
    """The lease of the work that this score settles. If it has ended, nothing is stored."""
    scorer: str | None = None
    """Who gives the score, as scores of several scorers with one name are their mean; when absent, the scorer of the
    lease, without one the id of the key, or `anonymous` without keys."""
    rationale: str | None = None
    """Why, in at most 16 KiB."""
    replace: bool = False
    """Whether the score may replace another value by the same scorer, as long as the rollout is not judged."""


@dataclass(slots=True, kw_only=True)
class ScoreRetried:
    """The answer to it."""

    retried: int
    """Items that have all of their attempts again."""


@dataclass(slots=True, kw_only=True)
class ScoreRetryRequest:
    """A request to try work again whose attempts are used up."""

    policy: str | None = None
    """Policy of the work; `default` when absent."""
    name: str
    """Name of the score."""


@dataclass(slots=True, kw_only=True)
class SegmentVersions:
    """The versions that generated a segment."""

    min: int
    """The oldest version."""
    max: int
    """The newest version."""
    spans: int
    """Number of spans."""


@dataclass(slots=True, kw_only=True)
class SegmentSummary:
    """One segment without its tokens."""

    kind: str | None = None
    """Label of the segment."""
    tokens: int
    """Number of prompt and response tokens."""
    response_length: int
    """Number of response tokens; they are the last of the tokens."""
    masked_in: int
    """Number of response tokens with mask 1, as sent."""
    trained: int
    """Number of response tokens that are trained: 0 unless the verdict is `kept`, and without stale tokens that the
    policy masks."""
    versions: SegmentVersions | None = None
    """The versions that generated it; null if the producer sent none by token."""
    has: list[str]
    """What it has for each response token: `logprobs`, `teacher_logprobs`, `values`, `advantages`."""


@dataclass(slots=True, kw_only=True)
class SessionAssembly:
    """What became of the calls of a session. The calls are those in segments and those that were dropped, and the
    sampled tokens are those that are trained, those that were dropped, and those that were trimmed."""

    calls: int
    """Number of calls."""
    segments: int
    """Number of segments that were assembled."""
    breaks: int
    """Number of prompts that share more than 64 ids with an earlier call and then differ from what was recorded. Each
    of them begins a segment that an agent which repeats its history exactly would not need."""
    dropped: SessionDropped
    """Calls that are in no segment, by reason."""
    sampled_tokens: int
    """Tokens that were sampled."""
    trained_tokens: int
    """Sampled tokens that segments train."""
    dropped_tokens: SessionDropped
    """Sampled tokens of the calls that are in no segment, by reason."""
    trimmed: int
    """Sampled stop tokens that are not trained, because the next prompt has another id in their place."""


@dataclass(slots=True, kw_only=True)
class SessionBreak:
    """Where the prompt of a call differs from an earlier call that it should have continued."""

    nearest: int
    """Number of the earlier call that the prompt shares most with."""
    position: int
    """Number of ids that both begin with."""
    cause: str
    """What differs first: `system` (the tools, the arguments of the template, or a system message), `rewrite` (the
    content of a message), `reasoning` (the reasoning of an answer was dropped or changed), `arguments` (those of a tool
    call are the same JSON in another spelling), `tokens` (no message: the same text has other ids), `siblings` (several
    answers are equal to it), or `unknown`."""
    expected: list[int]
    """The next ids of the earlier call, at most 16."""
    found: list[int]
    """The next ids of the prompt, at most 16."""
    expected_text: str | None = None
    """The text of `expected`; absent unless the service has the model's tokenizer, as in the mode `exact`."""
    found_text: str | None = None
    """The text of `found`; absent unless the service has the model's tokenizer."""


@dataclass(slots=True, kw_only=True)
class SessionDropped:
    """A number of calls or tokens by the reason for which they are in no segment."""

    empty: int
    """The call sampled no tokens. If that is so of all calls of a policy, its rollout trains nothing and has a
    reward."""
    undelivered: int
    """The agent did not receive the answer, and no other call continues the call."""
    retry: int
    """No other call continues the call, and the same agent sent its prompt again."""
    abandoned: int = 0
    """An earlier attempt made the call, and the last one neither was answered with it nor continues it."""
    aborted: int
    """The session was aborted or expired, and its segments were not kept."""


@dataclass(slots=True, kw_only=True)
class SessionEnded:
    """A session that has ended, and what became of its rollouts."""

    session_id: str
    """Id of the session."""
    state: SessionState
    """Its state."""
    reason: str | None = None
    """Why it was aborted or expired."""
    duplicate: bool
    """Whether the session had ended before this request, which changed nothing."""
    receipts: list[Receipt]
    """The receipts of its trajectories, one per policy, in the order of the policies' names. They are those of the
    request that ended the session."""
    assembly: SessionAssembly
    """What became of all its calls."""


@dataclass(slots=True, kw_only=True)
class SessionFinish:
    """One session of a request that finishes several of them."""

    session_id: str
    """Id of the session."""
    reward: float | None = None
    """Reward of every policy that is not in `rewards`. It must be finite; the sign of a zero is not kept."""
    rewards: Mapping[str, float] | None = None
    """Rewards by policy."""
    reward_components: Mapping[str, float] | None = None
    """Named parts of the reward: scores by the producer, for filters and export. Each name may occur once. `scores` is
    another name of the field."""
    turn_rewards: Mapping[str, float] | None = None
    """Rewards of calls, for policies whose rule `advantage` compares turns. A call is named by the id of its answer, as
    the agent received it, or by its number in the session."""
    turn_state_keys: Mapping[str, str] | None = None
    """Names of the states in which calls were made, for the same policies. Calls are named as in `turn_rewards`."""
    status: Status | None = None
    """How the execution ended; `completed` when absent, or `truncated` if a call was refused because a bound of the
    session was reached."""
    metadata: Mapping[str, Any] | None = None
    """JSON object whose members are added to the metadata of the session, and replace members with the same names."""
    wait_ms: int | None = None
    """Milliseconds to wait for calls in flight before they are cancelled; 5,000 when absent."""
    attempt: int | None = None
    """The attempt that it ends. If another one has begun, the request is refused, so that the program of an attempt
    that was given up does not end the next one."""


@dataclass(slots=True, kw_only=True)
class SessionInfo:
    """A session."""

    session_id: str
    """Id of the session."""
    state: SessionState
    """Its state."""
    reason: str | None = None
    """Why it was aborted or expired."""
    rollout_id: str
    """Id of the rollout of each policy."""
    group_id: str
    """Id of the group of each policy."""
    environment: str | None = None
    """Label of the environment."""
    execution_id: str | None = None
    """Id of the execution that it belongs to; null until the session ends if it was opened without one."""
    policies: list[SessionPolicy]
    """The policies whose rollouts it records, in the order of their names."""
    models: dict[str, SessionModel]
    """What the model names of the agent stand for."""
    calls: int
    """Number of recorded calls."""
    bytes: int
    """Stored bytes of the recorded calls."""
    full: bool
    """Whether a call was refused because a bound of the session was reached."""
    attempt: int
    """The attempt that is under way, or was the last one, from 1."""
    max_attempts: int
    """The most attempts."""
    stale_after_versions: int | None = None
    """The number of versions after which its rollout is too old to be trained (`staleness.max`): 1 if the next one
    makes it too old, 0 if it is too old now; of several policies, the least. Null without a bound, and once it has
    ended. The version of the oldest sampled tokens counts, and before the first call the current one."""
    opened_at: str
    """When it was opened."""
    last_call_at: str | None = None
    """When its last recorded call ended."""
    due_at: str | None = None
    """When it is parked or expires, unless a call is recorded or it ends before."""
    expires_at: str
    """When it expires at the latest."""
    ended_at: str | None = None
    """When it ended."""
    receipts: list[Receipt] | None = None
    """The receipts of its trajectories; absent before it ends."""
    assembly: SessionAssembly | None = None
    """What became of its calls; absent before it ends."""


@dataclass(slots=True, kw_only=True)
class SessionModel:
    """What a model name of an agent stands for."""

    policy: str | None = None
    """The policy whose rollout the calls belong to. `null` means that calls are forwarded and not recorded, because the
    model is not in training."""


@dataclass(slots=True, kw_only=True)
class SessionOpened:
    """A session that is open. The key is only in this answer and cannot be read again."""

    session_id: str
    """Id of the session."""
    key: str
    """Key for the calls of the agent. It can be used for nothing else."""
    rollout_id: str
    """Id of the rollout of each policy."""
    duplicate: bool
    """Whether the session was opened before, so that only the key is new."""
    attempt: int
    """The attempt that the key belongs to, from 1."""
    max_attempts: int
    """The most attempts."""
    base_urls: BaseUrls
    """Where the agent reaches the session."""
    expires_at: str
    """When the session expires, unless it ends before."""


@dataclass(slots=True, kw_only=True)
class SessionPage:
    """A page of sessions."""

    sessions: list[SessionInfo]
    """Sessions in the order in which they were opened, or the newest first."""
    next: str | None = None
    """The `after` of the next page; absent on the last page."""
    examined: int
    """Number of sessions that were examined to find those of the page, at most 10,000 in a filtered list."""


@dataclass(slots=True, kw_only=True)
class SessionPolicy:
    """A policy whose rollout a session records."""

    policy: str
    """Its name."""
    run: int
    """Run in which the session was opened."""
    policy_version: int
    """Weight version that was current when the session was opened."""
    calls: int
    """Number of recorded calls."""
    sampled_tokens: int
    """Number of tokens that were sampled in these calls."""
    special_tokens: int = 0
    """Number of special tokens of the model in the texts of these calls, in the mode `exact`; 0 otherwise."""
    warnings: list[str] = field(default_factory=list[str])
    """Warnings about these calls, each once: a name, a colon and a sentence. The receipt has them, too."""


@dataclass(slots=True, kw_only=True)
class SessionRequest:
    """A request to open a session: one execution of an agent, whose calls are recorded."""

    policy: str | None = None
    """Policy that every model name stands for; `default` when absent. Not together with `models`."""
    models: Mapping[str, SessionModel] | None = None
    """What the model names of the agent stand for, at most 64. `*` stands for all other names. Without it, a call with
    another name is refused."""
    rollout_id: str | None = None
    """Id of the rollout of each policy. If absent, the service creates one, and a repeated request opens another
    session."""
    group_id: str | None = None
    """Id of the group of each policy; if absent, the rollouts are groups of one."""
    group_size: int | None = None
    """Size of the group in rollouts; the policy's `group.size` when absent."""
    environment: str | None = None
    """Label of the environment."""
    execution_id: str | None = None
    """Id of the execution that the session belongs to. If absent, the service creates one when the session ends;
    sessions without one that are finished together share it."""
    purpose: Purpose | None = None
    """Whether its rollouts are trained (`train`, the default) or evaluate the policy (`eval`)."""
    suite: str | None = None
    """Name of the suite that they are results of; needed with the purpose `eval`, and only with it."""
    task: str | None = None
    """Name of their task in the suite, with the purpose `eval`; `rollout_id` when absent."""
    sampling: Sampling | None = None
    """How tokens are sampled. It replaces what the agent's calls ask for."""
    ttl_s: int | None = None
    """Seconds after which the session expires; `sessions.ttl_s` of the configuration when absent."""
    idle_s: int | None = None
    """Seconds without a call after which the session expires; `sessions.idle_s` of the configuration when absent."""
    max_calls: int | None = None
    """The most calls; `sessions.max_calls` of the configuration when absent, which is also the maximum."""
    metadata: Mapping[str, Any] | None = None
    """JSON object of bounded depth and size, which becomes the metadata of the trajectories."""


@dataclass(slots=True, kw_only=True)
class SessionResume:
    """A request to resume a session, whose agent died."""

    attempt: int | None = None
    """The attempt to follow. If another one has begun meanwhile, the request is refused, so that of several programs
    that look after the same sessions only one starts the agent."""


@dataclass(slots=True, kw_only=True)
class SessionTurn:
    """One recorded call."""

    seq: int
    """Its number in the session, from 1."""
    id: str | None = None
    """Id of its answer. The agent received it behind the prefix of its API, such as `chatcmpl-`. Null for a call that
    an older version recorded."""
    policy: str
    """Policy whose rollout it belongs to."""
    model: str
    """Name of the model that the agent asked for."""
    dialect: str
    """API that the agent used."""
    agent: str | None = None
    """Name of the agent or sub-agent that made it."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    sampled_tokens: int
    """Number of tokens that were sampled."""
    version_assumed: bool = False
    """Whether the engine did not say the version of every sampled token, so that the policy's published version stands
    in."""
    finish_reason: str
    """Why the engine stopped."""
    delivered: bool
    """Whether the agent received the answer."""
    retry_count: int
    """How many times the agent's client says that it has repeated the request."""
    attempt: int
    """The attempt in which an engine answered it."""
    used_in: int
    """The last attempt that used it: in which an engine answered it, or in which the agent was answered with what was
    recorded."""
    started_at: str
    """When it began."""
    ended_at: str
    """When its answer was complete."""
    outcome: str
    """What became of it: `trained`, or the reason for which it is in no segment: `empty`, `undelivered`, `retry` or
    `abandoned`. Later calls can change it while the session is open."""
    break_: SessionBreak | None = field(default=None, metadata={"name": "break"})
    """Where its prompt differs from an earlier call that it should have continued; absent if it does not."""


@dataclass(slots=True, kw_only=True)
class SessionTurns:
    """The recorded calls of a session."""

    turns: list[SessionTurn]
    """Calls in the order in which they were recorded. They are deleted some time after the session has ended."""


@dataclass(slots=True, kw_only=True)
class Stats:
    """Totals of the whole service."""

    policies: dict[str, PolicyStats]
    """Totals of every policy, by name."""
    conserved: bool
    """True when, for every policy, the number received equals the sum over all states."""


@dataclass(slots=True, kw_only=True)
class StepBucket:
    """Several steps of a trainer. Steps that a resume went back before are only counted."""

    step_from: int
    """The first acked step."""
    step_to: int
    """The last acked step."""
    acked_at: str
    """When the last batch was acked."""
    steps: int
    """Number of steps."""
    undone: int
    """Number of steps that a resume went back before."""
    reward_trained: NumberSpread | None = None
    """Mean reward of the rollouts that count in the baselines."""
    reward_all: NumberSpread | None = None
    """Mean reward of all rollouts that arrived before the batches were cut."""
    staleness: NumberSpread | None = None
    """Mean staleness of the groups."""
    staleness_max: int | None = None
    """The greatest staleness of a group."""
    tokens: NumberSpread | None = None
    """Tokens of a step."""
    groups: NumberSpread | None = None
    """Groups of a step."""
    flat_groups: NumberSpread | None = None
    """Groups of a step of several rewards that are all equal."""
    waited_ms: NumberSpread | None = None
    """Milliseconds for which the consumers had waited."""
    held_ms: NumberSpread | None = None
    """Milliseconds for which the consumers held the batches."""
    attempts_max: int | None = None
    """The most deliveries of a step."""
    version: int | None = None
    """The newest version when batches were cut."""


@dataclass(slots=True, kw_only=True)
class StepInfo:
    """What the batches of a step had in all."""

    step: int
    """The step."""
    epoch: int
    """Epoch in which it was acked."""
    acked_at: str
    """When its last batch was acked."""
    undone: bool
    """True if a resume went back before it."""
    batches: int
    """Number of batches."""
    groups: int
    """Number of groups."""
    flat_groups: int
    """Number of groups of several rewards that are all equal: nothing can be learned from them. Groups whose turns or
    tokens have advantages of their own are not counted."""
    rollouts: int
    """Number of rollouts."""
    tokens: int
    """Number of tokens."""
    trained_tokens: int
    """Number of trained tokens."""
    reward_trained: float | None = None
    """Mean reward of the rollouts that count in the baselines; null if there are none."""
    reward_all: float | None = None
    """Mean reward of all rollouts that arrived before the batches were cut; null if there are none."""
    staleness_mean: float | None = None
    """Mean over the groups of how many versions their oldest token is behind."""
    staleness_max: int
    """The most of it."""
    waited_ms: int
    """Milliseconds for which the consumers had waited."""
    held_ms: int
    """Milliseconds for which the consumers held the batches."""
    attempts: int
    """Number of deliveries; more than `batches` if some failed."""
    version: int
    """Version when the batches were cut."""


@dataclass(slots=True, kw_only=True)
class StoryGroup:
    """The group in the story of a rollout."""

    group_id: str
    """Id of the group."""
    state: GroupState
    """State of the group."""
    reason: str | None = None
    """Why the group was discarded or quarantined."""
    environment: str | None = None
    """Environment label of the group's first rollout."""
    arrived: int
    """Number of kept and masked rollouts."""
    size: int
    """Size of the group: the number of places for rollouts."""


@dataclass(slots=True, kw_only=True)
class SuiteEvals:
    """What a suite says about versions."""

    suite: str
    """Name of the suite."""
    tasks: int | None = None
    """How many tasks it has; null if nobody has said."""
    repeats: int
    """How many rollouts of each task it wants."""
    threshold: float
    """The reward from which a rollout passes."""
    versions: list[EvalVersion]
    """The versions, newest first."""
    more: bool
    """Whether there are older versions: ask for those `before` the last one."""


@dataclass(slots=True, kw_only=True)
class SuiteInfo:
    """A suite."""

    policy: str
    """Policy that is evaluated."""
    suite: str
    """Name of the suite."""
    tasks: int | None = None
    """How many tasks it has; null if nobody has said."""
    repeats: int
    """How many rollouts of each task it wants."""
    threshold: float
    """The reward from which a rollout passes."""


@dataclass(slots=True, kw_only=True)
class SuiteRequest:
    """When a suite is complete at a version. Omitted keys take their defaults."""

    tasks: int
    """How many tasks it has."""
    repeats: int = 1
    """How many rollouts of each task it wants, which is the largest k of pass@k."""
    threshold: float = 1.0
    """The reward from which a rollout passes. It counts for rollouts that come later."""


@dataclass(slots=True, kw_only=True)
class TokenMap:
    """A whole segment in parts of equal size. All lists have one entry for each part; the last part may be smaller."""

    segment: int
    """Index of the segment, from 0."""
    tokens_per_bucket: int
    """Number of tokens of a part."""
    buckets: int
    """Number of parts, at most 512."""
    response: list[float]
    """Share of response tokens among the tokens of the part."""
    masked_in: list[float]
    """Share of tokens with mask 1, as sent."""
    trained: list[float]
    """Share of tokens that are trained."""
    logprob_mean: list[float | None]
    """Mean log-probability of the tokens with mask 1; null where there are none."""
    logprob_min: list[float | None]
    """Smallest log-probability of the tokens with mask 1; null where there are none."""
    value_mean: list[float | None] | None = None
    """Mean critic value of the response tokens; null if the segment has none."""
    version_min: list[int | None] | None = None
    """Oldest version of a response token; null if the producer sent no versions by token."""


@dataclass(slots=True, kw_only=True)
class TokenWindow:
    """Tokens of one segment. All lists except `versions` have one entry for each token of the window; the entries of
    prompt tokens are null."""

    segment: int
    """Index of the segment, from 0."""
    from_: int = field(metadata={"name": "from"})
    """Index of the first token, from 0."""
    to: int
    """Index behind the last token."""
    prompt_tokens: int
    """Number of prompt tokens of the segment; the response begins behind them."""
    tokens: list[int]
    """Token ids."""
    loss_mask: list[int | None]
    """The mask as the producer sent it."""
    trained_mask: list[int | None]
    """The mask as it is delivered, or would be now."""
    logprobs: list[float | None] | None = None
    """Behaviour log-probabilities; null if the segment has none."""
    teacher_logprobs: list[float | None] | None = None
    """Teacher log-probabilities; null if the segment has none."""
    values: list[float | None] | None = None
    """Critic values; null if the segment has none."""
    advantages: list[float | None] | None = None
    """Advantages that the producer sent; null if the segment has none."""
    versions: list[list[int]] | None = None
    """The version spans with a token in the window, as the producer sent them: `start` counts response tokens. Null if
    the producer sent none."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One call to an inference engine: the ids of its prompt and the ids that were sampled.

    The order of the turns in the list is the order in which the calls ended. It decides labels, the order of the
    segments, and which one of several retries is kept. It is not part of the content.
    """

    id: str | None = None
    """Id, unique within the trajectory. Only turns that another turn names in `after` need one."""
    after: str | None = None
    """The id of another turn of the list. The prompt is then the prompt of that turn, its tokens, and `prompt_tokens`
    behind them."""
    prompt_tokens: Ints | None = None
    """Ids of the whole prompt, at least one, or of its part behind `after`."""
    tokens: Ints
    """Ids that were sampled. A turn without any is counted and dropped."""
    logprobs: Floats | None = None
    """Log-probabilities of `tokens` under the behaviour policy. Either all turns have them or none."""
    versions: Sequence[Sequence[int]] | None = None
    """`[version, start, length]` spans that cover `tokens` without gaps or overlaps. If other turns have them and this
    one has none, its version is the `policy_version` of the trajectory."""
    finish_reason: str | None = None
    """Why the engine stopped: `stop`, `length`, `tool_calls` or another label."""
    stopped_on_token: bool | None = None
    """Whether the last of `tokens` is a stop token; `false` when absent. The next prompt may then have another id in
    its place."""
    agent: str | None = None
    """Name of the agent or sub-agent that made the call."""
    delivered: bool | None = None
    """Whether the agent received the answer; `true` when absent."""
    retry_count: int | None = None
    """How often the client has made this call before, by its own account, as in `x-stainless-retry-count`; 0 when
    absent."""
    reward: float | None = None
    """Reward of this call, for policies whose rule `advantage` compares turns. It must be finite; the sign of a zero is
    not kept."""
    state_key: str | None = None
    """Name of the state in which the agent made the call. Calls of a group with the same one are compared with each
    other."""


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The complete record of one rollout: one execution of an agent by one policy on one task."""

    policy: str | None = None
    """Policy in training that produced the rollout; `default` when absent."""
    rollout_id: str | None = field(default_factory=uuid7)
    """Id, unique within policy and run, 1 to 256 bytes. It is made here, so that the service recognises a retry."""
    group_id: str | None = None
    """Id of the group: rollouts of one task that are compared with each other. If absent, the rollout is a group of
    one."""
    group_size: int | None = None
    """Size of the group in rollouts; fixed by the group's first rollout."""
    environment: str | None = None
    """Label of the environment."""
    execution_id: str | None = None
    """Id of the execution that the rollout belongs to, which rollouts of several policies may have in common. If
    absent, the service creates one; the rollouts of a bundle that have none share it."""
    policy_version: int | None = None
    """Weight version that generated the rollout; the current version at arrival when absent."""
    admission_id: str | None = None
    """The admission whose reserved room the rollout uses. It is not part of the rollout's content."""
    purpose: Purpose | None = None
    """Whether the rollout is trained (`train`, the default) or evaluates the policy (`eval`)."""
    suite: str | None = None
    """Name of the suite that it is a result of; needed with the purpose `eval`, and only with it."""
    task: str | None = None
    """Name of its task in the suite, with the purpose `eval`; the id of the rollout when absent."""
    status: Status | None = None
    """How the execution ended; `completed` when absent."""
    reward: float | None = None
    """Reward of the whole rollout. It must be finite; the sign of a zero is not kept."""
    reward_components: Mapping[str, float] | None = None
    """Named parts of the reward, for filters and export. Each name may occur once."""
    sampling: Sampling | None = None
    """How tokens were sampled."""
    segments: Sequence[Segment] | None = None
    """Training sequences of the rollout, in order."""
    turns: Sequence[Turn] | None = None
    """The calls of the agent to its inference engine, in the order in which they ended. They are sent instead of
    `segments`, and the service assembles the segments from them."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """Chat messages as a JSON array, returned verbatim."""
    metadata: Mapping[str, Any] | None = None
    """JSON object of bounded depth and size, returned verbatim."""


@dataclass(slots=True, kw_only=True)
class TrajectoryContent:
    """A part of the content of one rollout: a window of its tokens and a page of its messages."""

    story: TrajectoryStory
    """What happened to the rollout."""
    environment: str | None = None
    """Label of the environment."""
    status: Status
    """How the execution ended."""
    reward_components: dict[str, float]
    """Named parts of the reward."""
    sampling: Sampling
    """How tokens were sampled."""
    delivered: Delivered | None = None
    """The batch that contains the rollout; null if none does."""
    segments_total: int
    """Number of segments."""
    segments: list[SegmentSummary]
    """Segments in order, at most the first 4,096."""
    window: TokenWindow | None = None
    """A part of one segment; null for a rollout without segments."""
    map: TokenMap | None = None
    """The whole of the same segment, in at most 512 parts; null for a rollout without segments."""
    messages: MessagePage | None = None
    """A page of the chat messages; null if the producer sent none."""
    metadata: dict[str, Any] | None = None
    """Metadata as the producer sent it; null if it sent none, or more than 256 KiB."""
    metadata_bytes: int
    """Bytes of the metadata; 0 if the producer sent none."""
    at: str
    """The service's time."""


@dataclass(slots=True, kw_only=True)
class TrajectoryPage:
    """Rollouts, in the order in which they arrived, or the newest first."""

    trajectories: list[TrajectoryStory]
    """Stories."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the last."""
    examined: int
    """Number of entries that were examined to find those of the page, at most 10,000 in a filtered list."""


@dataclass(slots=True, kw_only=True)
class TrajectoryStory:
    """What happened to a rollout, from its arrival until its payload is purged."""

    policy: str
    """Policy of the rollout."""
    purpose: Purpose | None = None
    """Whether it is trained, or evaluates the policy."""
    suite: str | None = None
    """Suite that it is a result of, if it evaluates the policy."""
    task: str | None = None
    """Its task in the suite."""
    run: int
    """Run of the policy in which it arrived."""
    rollout_id: str
    """Identity of the rollout."""
    execution_id: str
    """Execution that the rollout belongs to."""
    verdict: Verdict
    """Verdict of ingest."""
    reason: str | None = None
    """Name of the filter, or the built-in code, that caused the verdict."""
    failed_filters: list[str] = field(default_factory=list[str])
    """Filters whose evaluation failed for this rollout, at most 16 names."""
    state: RolloutState
    """State of the rollout."""
    scoring: list[str] = field(default_factory=list[str])
    """Required scores that the rollout lacks. As long as there are some, its verdict is not final."""
    group: StoryGroup
    """Group of the rollout."""
    batches: list[str]
    """Ids of the batches that contained the rollout, in order."""
    step: int | None = None
    """Optimizer step that consumed the rollout."""
    reward: float | None = None
    """Reward: as the producer sent it, or as the rules make it of scores."""
    advantage: float | None = None
    """Advantage; present once the group is ready."""
    policy_version: int
    """Weight version: the version of the oldest span with a trained token."""
    policy_version_assumed: bool
    """True when the producer sent no version, or when the engine of a session did not say the version of every trained
    token. The version that was current then stands in."""
    segments: int
    """Number of segments."""
    tokens: int
    """Number of prompt and response tokens."""
    trained_tokens: int
    """Number of response tokens with mask 1, without those that are masked as stale."""
    response_tokens: int
    """Number of response tokens."""
    status: Status
    """How the execution ended."""
    attempts: int | None = None
    """Number of attempts of the session that was opened for the rollout; absent if there is none, or if it is
    forgotten."""
    versions: TrainedVersions | None = None
    """Versions of the trained tokens; null if no token is trained."""
    received_at: str
    """When the rollout was received."""
    decided_at: str | None = None
    """When the group was decided."""
    batched_at: str | None = None
    """When the batch was cut."""
    acked_at: str | None = None
    """When the batch was acked."""
    purged_at: str | None = None
    """When the payload was purged."""


@dataclass(slots=True, kw_only=True)
class TriedChange:
    """A group that a draft decides differently from the rules that the policy has now."""

    group_id: str
    """Its id."""
    was: TriedOutcome
    """How it was decided."""
    now: TriedOutcome
    """How the filters that the policy has now decide it."""
    would_be: TriedOutcome
    """How the draft decides it."""
    members: int
    """Number of rollouts that the draft keeps or masks."""
    rewards: list[float]
    """Their rewards, at most the first 64."""


@dataclass(slots=True, kw_only=True)
class TriedGroups:
    """Groups by what became of them: as they were decided, by the filters that the policy has now, and by the draft."""

    as_decided: GroupOutcomes
    """As they were decided."""
    rules_now: GroupOutcomes
    """By the filters that the policy has now."""
    draft: GroupOutcomes
    """By the draft."""


@dataclass(slots=True, kw_only=True)
class TriedOutcome:
    """What becomes of a group."""

    state: TriedState
    """What becomes of it."""
    reason: str | None = None
    """Why it is discarded, or why it cannot be judged."""


@dataclass(slots=True, kw_only=True)
class TriedRollouts:
    """Rollouts by what became of them."""

    as_decided: RolloutOutcomes
    """As they were decided."""
    rules_now: RolloutOutcomes
    """By the filters that the policy has now."""
    draft: RolloutOutcomes
    """By the draft."""


@dataclass(slots=True, kw_only=True)
class TryNote:
    """What to keep in mind about a result."""

    code: str
    """`flat-groups-enter`, `length-shift`, `refill-not-simulated` or `versions-derived`."""
    text: str
    """A sentence with the numbers."""


@dataclass(slots=True, kw_only=True)
class TryRequest:
    """Filters to try on the groups that were decided last. Nothing is changed."""

    filter: Sequence[FilterRule]
    """The draft: all filters of the policy, as in its rules."""
    groups: int | None = None
    """The most groups to try it on, 1 to 2,000; 500 when absent."""
    environment: str | None = None
    """Only groups of this environment."""
    examples: int | None = None
    """The most examples of changed groups, at most 100; 10 when absent."""


@dataclass(slots=True, kw_only=True)
class TryResult:
    """What a draft of filters would have done."""

    looked_at: LookedAt
    """What it was tried on."""
    groups: TriedGroups
    """What became of the groups."""
    rollouts: TriedRollouts
    """What became of their rollouts."""
    changed_groups: int
    """How many groups the draft decides differently from the rules that the policy has now."""
    changes: list[TriedChange]
    """The newest of them."""
    failed: list[FailedFilter]
    """Filters of the draft that could not be evaluated on some records. There they do not match."""
    unjudged: list[Unjudged]
    """Why the draft could not be tried on some rollouts. The groups of these rollouts are `unjudged`."""
    notes: list[TryNote]
    """What to keep in mind about the result."""
    at: str
    """The service's time."""


@dataclass(slots=True, kw_only=True)
class TurnReturn:
    """An advantage for each turn t: (G - mean) / (unbiased standard deviation + 1e-6) over all turns of the group,
    where G, the return of the turn, is the sum over u >= t of gamma^(u-t) times the reward of turn u. A turn without a
    reward has 0."""

    kind: TurnReturnKind = field(default="turn_return", init=False)
    """The kind."""
    gamma: float = 1.0
    """What a reward counts one turn earlier, 0 to 1."""
    outcome: bool = True
    """Whether the reward of the rollout is added to that of its last turn."""


@dataclass(slots=True, kw_only=True)
class Unjudged:
    """Rollouts on which a draft could not be tried."""

    reason: str
    """`payload-purged`, `payload-damaged` or `payload-too-large`."""
    rollouts: int
    """Number of rollouts."""


@dataclass(slots=True, kw_only=True)
class Upload:
    """How much of an upload is stored."""

    digest: str
    """BLAKE3 digest of all bytes, in hexadecimal digits."""
    bytes: int
    """Bytes of the whole."""
    stored: int
    """Bytes that are stored, from the first one on. It is whole when they are all; else go on with the byte after
    them."""
    url: str
    """What a message names it by: `forebay:` and the digest."""
    expires_at: str | None = None
    """When it is deleted unless a rollout names it until then; null while one does."""


@dataclass(slots=True, kw_only=True)
class VersionRange:
    """Weight versions at the time a batch is cut."""

    current: int
    """The policy's version when the batch was cut."""
    min: int | None = None
    """Oldest version of a trained token; null when nothing is trained."""
    max: int | None = None
    """Newest version of a trained token; null when nothing is trained."""


@dataclass(slots=True, kw_only=True)
class VersionRequest:
    """Publishes a weight version."""

    version: int
    """Version; greater than the current version by at most 2^41, or an exact repeat of it."""
    step: int | None = None
    """Step after which the weights were saved; the last acked step when absent."""
    uri: str | None = None
    """URL of the weights, up to 2,048 bytes."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""
    force: bool | None = None
    """Also publishes a version that is greater by more."""


@dataclass(slots=True, kw_only=True)
class WaitingEnvironment:
    """An environment, and how many of its groups the next batch needs."""

    environment: str
    """Its label."""
    ready_groups: int
    """Number of its groups that are ready, counted up to 1,000 or to the groups of a batch, whichever is more."""
    needed_groups: int
    """Number of its groups that the next batch waits for; 0 if it has no `min_share`."""
    open_groups: int
    """Number of its open groups, among the first 1,000 open groups of the policy."""


@dataclass(slots=True, kw_only=True)
class WaitingConsumer:
    """A consumer that waits for a batch."""

    consumer: str | None = None
    """Its name; null if it sends none."""
    since: str
    """Since when it waits. Short pauses between its requests are part of the wait."""
    until: str
    """If it does not ask again until then, it does not wait any more."""


@dataclass(slots=True, kw_only=True)
class Waiting:
    """What the next batch is waiting for."""

    ready_groups: int
    """Number of groups that are ready now."""
    needed_groups: int
    """Number of groups in a full batch."""
    returned_batches: int
    """Number of returned batches, which are delivered first."""
    open_groups: int
    """Number of open groups."""
    fullest: list[OpenGroup]
    """The open groups that need the fewest further rollouts, at most 5."""
    environments: list[WaitingEnvironment] = field(default_factory=list[WaitingEnvironment])
    """The environments that have shares in `batch.environments`, in the order of their labels. If no batch is ready
    although there are enough groups, it waits for those that have fewer ready groups than needed."""
    reserved_rollouts: int = 0
    """Number of rollouts with reserved room that have not been posted."""
    last_post_at: str | None = None
    """When the last rollout was received."""
    dropped_last_hour: dict[str, int]
    """Number of rollouts and groups dropped in the last hour, by rule."""
    stale_last_hour: int
    """Number of groups that became stale in the last hour."""
    asking: list[WaitingConsumer] = field(default_factory=list[WaitingConsumer])
    """The consumers that wait for a batch at any replica, the longest waiting first, at most 8. What is shown may be 3
    seconds old."""
    holding: list[HeldBatch] = field(default_factory=list[HeldBatch])
    """The batches that consumers hold, the longest held first, at most 8."""


@dataclass(slots=True, kw_only=True)
class WhoAmI:
    """Who the caller is, and what it may do."""

    role: Role
    """Role of the caller; `admin` for everybody while the service needs no keys."""
    policies: list[str]
    """Policies that the caller may access: names, in which `*` stands for any characters."""
    key_id: str | None = None
    """Id of the caller's key; null while the service needs no keys."""
    name: str | None = None
    """Who or what the key is for; null while the service needs no keys."""
    keys_required: bool
    """Whether calls need a key."""
    version: str
    """The service's version, e.g. `0.1.0`."""
    at: str
    """The service's time."""


@dataclass(slots=True, kw_only=True)
class WhyCause:
    """Something that explains a state."""

    code: str
    """Stable code."""
    filter: str | None = None
    """Filter that the cause is about."""
    weight: float
    """Importance, 0 to 1. Causes of waiting are ranked by the part of the time that would be saved without them."""
    text: str
    """One sentence."""
    numbers: dict[str, float]
    """The numbers of the sentence, by their names. Names of seconds end with `_s`, names of bytes with `_bytes`, and
    `share` is a part of a whole."""
    see: str | None = None
    """A call that shows what the cause is about, relative to the service's address."""


@dataclass(slots=True, kw_only=True)
class WhyFinding:
    """Something that was looked at and explains nothing, or that cannot be known."""

    code: str
    """Stable code."""
    text: str
    """One sentence."""
    numbers: dict[str, float]
    """The numbers of the sentence, by their names."""
