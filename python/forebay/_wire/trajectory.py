"""What agents post, and its receipts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .._uuid import uuid7


class ToList(Protocol):
    """An array of numpy, a tensor of torch, or anything else with `tolist`."""

    def tolist(self) -> Any: ...


Ints = Sequence[int] | ToList
"""Token ids or a mask: a list, or anything with `tolist`."""

Floats = Sequence[float] | ToList
"""Numbers: a list, or anything with `tolist`."""

Logprobs = Sequence[float | None] | ToList
"""Log-probabilities, of which those are ignored whose mask is 0: they may be None, NaN or infinite."""

GroupState = Literal["open", "ready", "batched", "stale", "discarded", "quarantined"]
"""State of a group."""

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
    retry_count: int | None = None
    """How often the client has made this call before, by its own account, as in `x-stainless-retry-count`; 0 when
    absent."""


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
    decided`, `no-reward`, `admission-lapsed`, `delivered-dropped`, `filter-failed`, `filter-over-budget`,
    `logprobs-above-zero`, `logprobs-improbable`, `sampling-truncated`, `mask-without-ones`, `mixed-environments`,
    `lone-surrogates`, `unsupported-part`, `images-replaced` and `version-ahead`."""
    group: ReceiptGroup
    """The group after this post."""
    assembly: Assembly | None = None
    """What became of the turns; absent if the rollout was posted without turns."""

    @property
    def spooled(self) -> bool:
        """Whether the rollout is only in the spool of this machine. Then `verdict` and `group.state` are `spooled`."""
        return False


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
    """Turns that were delivered and that no other turn continues, in whose place another one is trained."""


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
