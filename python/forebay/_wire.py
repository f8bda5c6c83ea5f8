"""The bodies of the API as dataclasses, named as in the OpenAPI document; a test compares the two.

Requests take every field by its name and leave out what is None. Answers ignore fields that this version does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ._uuid import uuid7


class ToList(Protocol):
    """An array of numpy, a tensor of torch, or anything else with `tolist`."""

    def tolist(self) -> Any: ...


Ints = Sequence[int] | ToList
"""Token ids or a mask: a list, or anything with `tolist`."""

Floats = Sequence[float] | ToList
"""Numbers: a list, or anything with `tolist`."""

Advantage = Literal["grpo", "grpo_mean", "rloo", "reward", "none"]
"""Advantage estimator over the rewards of a group. Each rollout counts once."""

BatchOrder = Literal["fifo", "freshest"]
"""Which ready groups are delivered first."""

BatchState = Literal["leased", "returned", "trained", "checkpointed", "quarantined", "split", "discarded"]
"""State of a batch."""

FilterAction = Literal["drop", "mask"]
"""What happens to a rollout or group that matches."""

FilterScope = Literal["rollout", "group"]
"""Whether a filter examines rollouts or groups."""

GroupState = Literal["open", "ready", "batched", "stale", "discarded", "quarantined"]
"""State of a group."""

LossWeighting = Literal["rollout_mean", "turn_mean", "sample_mean", "token_mean", "constant"]
"""How the tokens of a batch are weighted in the loss."""

OnDrop = Literal["refill", "shrink"]
"""Whether a dropped rollout uses up one of the group's places."""

Requirement = Literal["tokens", "logprobs", "policy_version", "teacher_logprobs", "values"]
"""A column that a policy may require."""

Retries = Literal["drop", "keep"]
"""Whether calls are trained that have the same agent and the same prompt as another one, and that no call continues."""

Role = Literal["produce", "train", "read", "admin"]
"""What a key permits. The service's `api::roles` lists the roles that each route accepts."""

RolloutState = Literal[
    "open", "ready", "leased", "returned", "trained", "checkpointed", "discarded", "stale", "quarantined", "dropped",
    "late",
]
"""State of a rollout. These states are the terms of the conservation equation."""

SessionState = Literal["open", "finishing", "finished", "aborted", "expired"]
"""State of a session."""

Settle = Literal["checkpoint", "ack"]
"""What settles an acked batch, so that no resume without `force` brings it back."""

StalenessAction = Literal["drop", "mask"]
"""What happens to a group that exceeds the staleness bound."""

Status = Literal["completed", "truncated", "aborted", "failed"]
"""How an execution ended, as reported by the producer."""

Verdict = Literal["kept", "masked", "dropped", "late"]
"""The decision of ingest about a rollout."""


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
class Segment:
    """One training sequence of a rollout. All per-token arrays cover only the response."""

    kind: str | None = None
    """Label: turn, subagent, compaction, final, ..."""
    tokens: Ints
    """Prompt and response token ids. At least one of them must be a prompt token."""
    loss_mask: Ints
    """0 or 1 per response token. The length of this array, at least 1, is the length of the response."""
    response_length: int | None = None
    """Length of the response; must equal the length of the mask when present."""
    logprobs: Floats | None = None
    """Log-probabilities under the behaviour policy: log-softmax of logits / temperature."""
    teacher_logprobs: Floats | None = None
    """Log-probabilities under a teacher."""
    values: Floats | None = None
    """Critic values, read before each response token."""
    versions: Sequence[Sequence[int]] | None = None
    """`[version, start, length]` spans that cover the response without gaps or overlaps."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One call to an inference engine: the ids of its prompt and the ids that were sampled. The order of the turns in
    the list is the order in which the calls ended. It decides labels, the order of the segments, and which one of
    several retries is kept. It is not part of the content."""

    id: str | None = None
    """Id, unique within the trajectory. Only turns that another turn names in `after` need one."""
    after: str | None = None
    """The id of another turn of the list. The prompt is then the prompt of that turn, its tokens, and
    `prompt_tokens` behind them."""
    prompt_tokens: Ints | None = None
    """Ids of the whole prompt, at least one, or of its part behind `after`."""
    tokens: Ints
    """Ids that were sampled. A turn without any is counted and dropped."""
    logprobs: Floats | None = None
    """Log-probabilities of `tokens` under the behaviour policy. Either all turns have them or none."""
    versions: Sequence[Sequence[int]] | None = None
    """`[version, start, length]` spans that cover `tokens` without gaps or overlaps. If other turns have them and
    this one has none, its version is the `policy_version` of the trajectory."""
    finish_reason: str | None = None
    """Why the engine stopped: `stop`, `length`, `tool_calls` or another label."""
    stopped_on_token: bool | None = None
    """Whether the last of `tokens` is a stop token; `false` when absent. The next prompt may then have another id
    in its place."""
    agent: str | None = None
    """Name of the agent or sub-agent that made the call."""
    delivered: bool | None = None
    """Whether the agent received the answer; `true` when absent."""


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
class Receipt:
    """The decision of ingest about one rollout. A retry receives the same verdict as the first post."""

    policy: str
    """Policy of the rollout."""
    rollout_id: str
    """Id of the rollout; created by the service if the producer sent none."""
    group_id: str
    """Group of the rollout."""
    execution_id: str | None = None
    """Execution of the rollout; created by the service if the producer sent none. Absent if an earlier version of
    the service stored the rollout."""
    verdict: Verdict
    """The decision."""
    reason: str | None = None
    """Name of the filter that matched, or a built-in code: `no-reward`, `group-decided`."""
    duplicate: bool
    """True if the same rollout was already stored and this post changed nothing."""
    warnings: list[str]
    """Problems for which the rollout was not refused. Each is a name, a colon and a sentence. The names are `group-
    decided`, `no-reward`, `admission-lapsed`, `filter-failed`, `filter-over-budget`, `logprobs-above-zero`,
    `logprobs-improbable`, `sampling-truncated`, `mask-without-ones` and `version-ahead`."""
    group: ReceiptGroup
    """The group after this post."""
    assembly: Assembly | None = None
    """What became of the turns; absent if the rollout was posted without turns."""


@dataclass(slots=True, kw_only=True)
class ReceiptGroup:
    """The state of a group, as receipts show it."""

    state: GroupState
    """State after this post."""
    arrived: int
    """Number of kept and masked rollouts."""
    size: int
    """Size of the group: the number of places for rollouts."""


@dataclass(slots=True, kw_only=True)
class Assembly:
    """What became of posted turns. Calls that are in segments and calls that were dropped are together all calls."""

    calls: int
    """Number of turns."""
    segments: int
    """Number of segments that were assembled."""
    breaks: int
    """Number of prompts that share more than 64 ids with an earlier turn and then differ from what was recorded.
    Each of them begins a segment that a client which repeats its history exactly would not need."""
    dropped: DroppedCalls
    """Turns that are in no segment, by reason."""
    trimmed: int
    """Sampled stop tokens that are not trained, because the next prompt has another id in their place."""


@dataclass(slots=True, kw_only=True)
class DroppedCalls:
    """Turns that are in no segment, by reason."""

    empty: int
    """Turns without tokens."""
    undelivered: int
    """Turns that were not delivered and that no other turn continues."""
    retry: int
    """Turns that no other turn continues, and whose prompt the same agent sent again."""


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
    errors: list[Violation] = field(default_factory=list)
    """The errors in the request, at most 100 entries."""
    verdict: Verdict | None = None
    """In a `rollout-conflict`: the verdict of the stored rollout."""
    retry_after_s: int | None = None
    """Seconds to wait before a retry; the same as `Retry-After`."""


@dataclass(slots=True, kw_only=True)
class Violation:
    """One error in a request."""

    pointer: str
    """JSON pointer (RFC 6901) into the body, or the name of the query parameter if the request has no body."""
    detail: str
    """Description of the error."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One row of `/samples`: one segment of a rollout. `loss = sum_i loss_weight_i * sum_t loss_mask_it * l_it` over
    the rows of a batch, however the rows are split into microbatches. `messages` and `metadata` belong to the rollout
    and are sent once, on its first row (`segment` 0). A shard holds whole rollouts, so it always contains that
    row."""

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
    top_p: float = 1.0
    """Nucleus mass at sampling; below 1, importance ratios are biased."""
    top_k: int = 0
    """Number of candidates at sampling, -1 for all; above 0, importance ratios are biased."""
    reward: float | None = None
    """Reward of the rollout."""
    advantage: float
    """Advantage of the rollout."""
    loss_weight: float
    """Weight of each trained token of this row in the loss."""
    policy_version: int | None = None
    """Weight version of the rollout: its oldest span with a trained token."""
    versions: list[list[int]] | None = None
    """Version spans as the producer sent them."""
    messages: list[dict[str, Any]] | None = None
    """Messages as the producer sent them, on the row of segment 0; null on the other rows of the rollout."""
    metadata: dict[str, Any] | None = None
    """Metadata as the producer sent it, on the row of segment 0; null on the other rows of the rollout."""


@dataclass(slots=True, kw_only=True)
class TrajectoryStory:
    """What happened to a rollout, from its arrival until its payload is purged."""

    policy: str
    """Policy of the rollout."""
    run: int
    """Run of the policy in which it arrived."""
    rollout_id: str
    """Identity of the rollout."""
    execution_id: str | None = None
    """Execution that the rollout belongs to; null if an earlier version of the service stored the rollout."""
    verdict: Verdict
    """Verdict of ingest."""
    reason: str | None = None
    """Name of the filter, or the built-in code, that caused the verdict."""
    failed_filters: list[str] = field(default_factory=list)
    """Filters whose evaluation failed for this rollout, at most 16 names."""
    state: RolloutState
    """State of the rollout."""
    group: StoryGroup
    """Group of the rollout."""
    batches: list[str]
    """Ids of the batches that contained the rollout, in order."""
    step: int | None = None
    """Optimizer step that consumed the rollout."""
    reward: float | None = None
    """Reward as the producer sent it."""
    advantage: float | None = None
    """Advantage; present once the group is ready."""
    policy_version: int
    """Weight version: the version of the oldest span with a trained token."""
    policy_version_assumed: bool
    """True when the producer sent no version."""
    segments: int
    """Number of segments."""
    tokens: int
    """Number of prompt and response tokens."""
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
class StoryGroup:
    """The group in the story of a rollout."""

    group_id: str
    """Id of the group."""
    state: GroupState
    """State of the group."""
    reason: str | None = None
    """Why the group was discarded or quarantined."""
    arrived: int
    """Number of kept and masked rollouts."""
    size: int
    """Size of the group: the number of places for rollouts."""


@dataclass(slots=True, kw_only=True)
class TrajectoryPage:
    """Rollouts, in the order in which they arrived."""

    trajectories: list[TrajectoryStory]
    """Stories."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the
    last."""


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
    failed_filters: list[str] = field(default_factory=list)
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
    late: int
    """Number of rollouts that arrived after the group was decided."""
    batch_id: str | None = None
    """Batch that contains the group."""
    opened_at: str
    """When the first rollout of the group arrived."""
    deadline_at: str | None = None
    """When an open group is decided with the rollouts that have arrived."""
    decided_at: str | None = None
    """When the group was decided."""


@dataclass(slots=True, kw_only=True)
class GroupPage:
    """Groups, in the order in which they were opened."""

    groups: list[GroupInfo]
    """Groups."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the
    last."""


@dataclass(slots=True, kw_only=True)
class CloseRequest:
    """Decides a group now, as if it had timed out."""

    policy: str | None = None
    """Policy; `default` when absent."""
    group_id: str
    """Id of the group."""


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
class AdmissionRequest:
    """A request to reserve room for rollouts that are about to start."""

    policy: str | None = None
    """Policy that will produce the rollouts; `default` when absent."""
    rollouts: int
    """Number of rollouts to reserve room for, at least 1."""


@dataclass(slots=True, kw_only=True)
class Admission:
    """Room that was reserved."""

    admission_id: str
    """Id of the reservation; posts that use it send it as the `admission_id` of the trajectory."""
    granted: int
    """Number of rollouts with reserved room, from 0 to the number requested."""
    policy_version: int
    """Current weight version. Rollouts posted under the admission without a version of their own get this one."""
    expires_in_ms: int
    """Milliseconds until unused room is given back."""


@dataclass(slots=True, kw_only=True)
class SessionRequest:
    """A request to open a session: one execution of an agent, whose calls are recorded."""

    policy: str | None = None
    """Policy that every model name stands for; `default` when absent. Not together with `models`."""
    models: Mapping[str, SessionModel] | None = None
    """What the model names of the agent stand for, at most 64. `*` stands for all other names. Without it, a call
    with another name is refused."""
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
    sampling: Sampling | None = None
    """How tokens are sampled. It replaces what the agent's calls ask for."""
    ttl_s: int | None = None
    """Seconds after which the session expires; `sessions.ttl_s` of the configuration when absent."""
    idle_s: int | None = None
    """Seconds without a call after which the session expires; `sessions.idle_s` of the configuration when
    absent."""
    max_calls: int | None = None
    """The most calls; `sessions.max_calls` of the configuration when absent, which is also the maximum."""
    metadata: Mapping[str, Any] | None = None
    """JSON object of bounded depth and size, which becomes the metadata of the trajectories."""


@dataclass(slots=True, kw_only=True)
class SessionModel:
    """What a model name of an agent stands for."""

    policy: str | None = None
    """The policy whose rollout the calls belong to. `null` means that calls are forwarded and not recorded, because
    the model is not in training."""


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
    base_urls: BaseUrls
    """Where the agent reaches the session."""
    expires_at: str
    """When the session expires, unless it ends before."""


@dataclass(slots=True, kw_only=True)
class BaseUrls:
    """The addresses of a session for the clients of agents."""

    openai: str
    """For clients of OpenAI's APIs. It ends with `/v1`."""
    anthropic: str
    """For clients of Anthropic's API, which append `/v1` themselves."""


@dataclass(slots=True, kw_only=True)
class FinishRequest:
    """A request to finish a session."""

    reward: float | None = None
    """Reward of every policy that is not in `rewards`. It must be finite; the sign of a zero is not kept."""
    rewards: Mapping[str, float] | None = None
    """Rewards by policy."""
    reward_components: Mapping[str, float] | None = None
    """Named parts of the reward, for filters and export. Each name may occur once."""
    status: Status | None = None
    """How the execution ended; `completed` when absent, or `truncated` if a call was refused because a bound of the
    session was reached."""
    metadata: Mapping[str, Any] | None = None
    """JSON object whose members are added to the metadata of the session, and replace members with the same
    names."""
    wait_ms: int | None = None
    """Milliseconds to wait for calls in flight before they are cancelled; 5,000 when absent."""


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
    """Named parts of the reward, for filters and export. Each name may occur once."""
    status: Status | None = None
    """How the execution ended; `completed` when absent, or `truncated` if a call was refused because a bound of the
    session was reached."""
    metadata: Mapping[str, Any] | None = None
    """JSON object whose members are added to the metadata of the session, and replace members with the same
    names."""
    wait_ms: int | None = None
    """Milliseconds to wait for calls in flight before they are cancelled; 5,000 when absent."""


@dataclass(slots=True, kw_only=True)
class AbortRequest:
    """A request to end a session without a reward."""

    reason: str
    """Why, 1 to 256 bytes."""
    keep: bool | None = None
    """Whether the trajectories have the segments of the recorded calls; `false` when absent."""


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
class SessionAssembly:
    """What became of the calls of a session. The calls are those in segments and those that were dropped, and the
    sampled tokens are those that are trained, those that were dropped, and those that were trimmed."""

    calls: int
    """Number of calls."""
    segments: int
    """Number of segments that were assembled."""
    breaks: int
    """Number of prompts that share more than 64 ids with an earlier call and then differ from what was recorded.
    Each of them begins a segment that an agent which repeats its history exactly would not need."""
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
class SessionDropped:
    """A number of calls or tokens by the reason for which they are in no segment."""

    empty: int
    """The call sampled no tokens."""
    undelivered: int
    """The agent did not receive the answer, and no other call continues the call."""
    retry: int
    """No other call continues the call, and the same agent sent its prompt again."""
    aborted: int
    """The session was aborted or expired, and its segments were not kept."""


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
    opened_at: str
    """When it was opened."""
    last_call_at: str | None = None
    """When its last recorded call ended."""
    due_at: str | None = None
    """When it expires, unless a call is recorded or it ends before."""
    expires_at: str
    """When it expires at the latest."""
    ended_at: str | None = None
    """When it ended."""
    receipts: list[Receipt] | None = None
    """The receipts of its trajectories; absent before it ends."""
    assembly: SessionAssembly | None = None
    """What became of its calls; absent before it ends."""


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


@dataclass(slots=True, kw_only=True)
class SessionPage:
    """A page of sessions."""

    sessions: list[SessionInfo]
    """Sessions in the order in which they were opened."""
    next: str | None = None
    """The `after` of the next page; absent on the last page."""


@dataclass(slots=True, kw_only=True)
class SessionTurns:
    """The recorded calls of a session."""

    turns: list[SessionTurn]
    """Calls in the order in which they were recorded. They are deleted some time after the session has ended."""


@dataclass(slots=True, kw_only=True)
class SessionTurn:
    """One recorded call."""

    seq: int
    """Its number in the session, from 1."""
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
    finish_reason: str
    """Why the engine stopped."""
    delivered: bool
    """Whether the agent received the answer."""
    retry_count: int
    """How many times the agent's client says that it has repeated the request."""
    started_at: str
    """When it began."""
    ended_at: str
    """When its answer was complete."""
    outcome: str
    """What became of it: `trained`, or the reason for which it is in no segment: `empty`, `undelivered` or `retry`.
    Later calls can change it while the session is open."""
    break_: SessionBreak | None = field(default=None, metadata={"name": "break"})
    """Where its prompt differs from an earlier call that it should have continued; absent if it does not."""


@dataclass(slots=True, kw_only=True)
class SessionBreak:
    """Where the prompt of a call differs from an earlier call that it should have continued."""

    nearest: int
    """Number of the earlier call that the prompt shares most with."""
    position: int
    """Number of ids that both begin with."""
    cause: str
    """What differs; `tokens` if nothing more is known."""
    expected: list[int]
    """The next ids of the earlier call, at most 16."""
    found: list[int]
    """The next ids of the prompt, at most 16."""


@dataclass(slots=True, kw_only=True)
class BatchRequest:
    """A request for the next batch of a policy."""

    policy: str | None = None
    """Policy; `default` when absent."""
    consumer: str | None = None
    """Name of the consumer, the scope of `request_id`."""
    request_id: str | None = None
    """Makes the request safe to repeat: while the lease is alive, the same request returns the same batch and
    lease."""
    wait_ms: int | None = None
    """Milliseconds to wait for a batch, at most 60,000."""
    partial: bool | None = None
    """Return the groups that are ready after `wait_ms`, even if they are fewer than a full batch."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


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
class ShardCount:
    """Contents of one shard of a batch."""

    rollouts: int
    """Number of rollouts; a shard holds whole rollouts."""
    samples: int
    """Number of rows."""
    tokens: int
    """Number of prompt and response tokens."""


@dataclass(slots=True, kw_only=True)
class BatchPage:
    """Batches in the order in which they were cut."""

    batches: list[BatchDescriptor]
    """Descriptors, without leases."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the
    last."""


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
class AckRequest:
    """Reports that an optimizer step consumed the batch."""

    lease: str
    """The lease."""
    step: int
    """Optimizer step, 0 or above."""
    epoch: int | None = None
    """Epoch of the caller."""


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
class ResumeRequest:
    """Reports that the trainer starts from its checkpoint of a step, or without a checkpoint."""

    step: int | None = None
    """Last saved step; null if the trainer starts without a checkpoint."""
    force: bool | None = None
    """Permits a resume below the last settled step, over purged batches (what can still be delivered comes back),
    or above the last acked step."""
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
    """Number of batches that do not come back, because resumes have ended their leases `lease.max_resumes`
    times."""
    undeliverable_batches: int
    """Number of batches acked after the step whose payloads are purged; above 0 only with `force`. Those that were
    not settled are discarded with reason `lineage-gap`."""


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
class VersionRequest:
    """Publishes a weight version."""

    version: int
    """Version; greater than the current version, or an exact repeat of it."""
    step: int | None = None
    """Step after which the weights were saved; the last acked step when absent."""
    uri: str | None = None
    """URL of the weights, up to 2,048 bytes."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class PolicyRules:
    """How trajectories of a policy are filtered, grouped, batched and kept. Omitted keys take their defaults. When
    rules are replaced, these stay fixed for a group from the arrival of its first rollout: `require`, `filter`,
    `group`, `advantage`, `sessions.retries`, `retention.dropped_s` of what is dropped or discarded, and
    `retention.tombstone_s` of what is purged. All other rules, including `staleness`, apply to all groups from the
    next request on."""

    require: list[Requirement] = field(default_factory=lambda: ["tokens"])
    """Columns that every trajectory must have; others are refused. If empty, trajectories with text alone are
    accepted too."""
    group: GroupRules = field(default_factory=lambda: GroupRules())
    """When a group is complete."""
    batch: BatchRules = field(default_factory=lambda: BatchRules())
    """What one batch holds."""
    lease: LeaseRules = field(default_factory=lambda: LeaseRules())
    """How long a lease lasts and how many deliveries a batch has."""
    advantage: Advantage = "grpo"
    """Advantage estimator, applied once when the group is finalized."""
    loss_weighting: LossWeighting = "rollout_mean"
    """How the tokens of a batch are weighted in the loss; fixed when the batch is cut."""
    loss_constant: float | None = None
    """The divisor `L` of `constant` loss weighting."""
    staleness: StalenessRules = field(default_factory=lambda: StalenessRules())
    """How old trained tokens may be when they are first delivered."""
    backlog: BacklogRules = field(default_factory=lambda: BacklogRules())
    """Bounds of the data that is not yet trained."""
    settle: Settle = "checkpoint"
    """What settles an acked batch."""
    retention: RetentionRules = field(default_factory=lambda: RetentionRules())
    """How long payloads and ledger rows are kept."""
    sessions: SessionRules = field(default_factory=lambda: SessionRules())
    """How the calls of an agent become segments."""
    filter: list[FilterRule] = field(default_factory=lambda: [])
    """CEL filters, in order; the first match wins."""


@dataclass(slots=True, kw_only=True)
class GroupRules:
    """When a group is complete, and what happens when it is not."""

    size: int = 1
    """Number of rollouts of a group."""
    min_size: int | None = None
    """Number of rollouts that suffice when the group times out; the size of the group when absent."""
    timeout_s: int = 3600
    """Seconds from the arrival of the first rollout until the group is decided with the rollouts that have
    arrived."""
    on_drop: OnDrop = "refill"
    """Whether a dropped rollout uses up one of the group's places."""


@dataclass(slots=True, kw_only=True)
class BatchRules:
    """Contents of one batch, which is the data of one optimizer step."""

    groups: int = 1
    """Number of groups of a batch."""
    max_tokens: int | None = None
    """Number of tokens that a batch may not exceed, except that a group which exceeds it alone is a batch of its
    own. Unbounded when absent."""
    order: BatchOrder = "fifo"
    """Which ready groups are delivered first."""


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
class StalenessRules:
    """How old trained tokens may be when they are first delivered. The age is measured when a batch is cut, by the
    rules and the version at that time."""

    max: int | None = None
    """Number of versions that a trained token may be behind; unbounded when absent."""
    action: StalenessAction = "drop"
    """What happens to a group that exceeds the bound."""


@dataclass(slots=True, kw_only=True)
class BacklogRules:
    """Bounds of the data that is not yet trained. A post that would open a group beyond them is answered with 429."""

    max_ready_rollouts: int = 65536
    """Number of rollouts that are open, ready, leased or returned."""
    max_bytes: int = 8589934592
    """Bytes of the stored payloads of these rollouts."""


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
    tombstone_s: int = 604800
    """Seconds that ledger rows are kept after their payloads are purged."""


@dataclass(slots=True, kw_only=True)
class SessionRules:
    """How the calls of an agent, which are posted as `turns`, become segments."""

    retries: Retries = "drop"
    """Whether repeated calls are trained."""
    teacher: str | None = None
    """The name of an `[[upstream]]` of the configuration. When a session is finished, it scores the segments of the
    policy, and their `teacher_logprobs` are filled in. Posted trajectories are not scored."""


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
class PolicyStatus:
    """A policy: its rules, its weight versions and the contents of its buffer."""

    policy: str
    """Name of the policy."""
    rules: PolicyRules
    """Rules. Some apply to groups opened from now on, the others from the next request on."""
    warnings: list[str] = field(default_factory=list)
    """In the answer to `PUT /policies/{p}`: settings that changed although the request did not name them."""
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
    reserved_rollouts: int = 0
    """Number of rollouts with reserved room that have not been posted."""
    last_post_at: str | None = None
    """When the last rollout was received."""
    dropped_last_hour: dict[str, int]
    """Number of rollouts and groups dropped in the last hour, by rule."""
    stale_last_hour: int
    """Number of groups that became stale in the last hour."""


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """An open group and the number of rollouts in it."""

    group_id: str
    """Id of the group."""
    state: GroupState
    """State after this post."""
    arrived: int
    """Number of kept and masked rollouts."""
    size: int
    """Size of the group: the number of places for rollouts."""


@dataclass(slots=True, kw_only=True)
class PolicyList:
    """Names of all policies."""

    policies: list[PolicyStatus]
    """Policies, in the order of their names."""
    next: str | None = None
    """Cursor of the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class Stats:
    """Totals of the whole service."""

    policies: dict[str, PolicyStats]
    """Totals of every policy, by name."""
    conserved: bool
    """True when, for every policy, the number received equals the sum over all states."""


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
class Health:
    """The answer that shows that the process is alive."""

    status: str
    """Always `ok`."""
    version: str
    """The service's version, e.g. `0.1.0`."""
