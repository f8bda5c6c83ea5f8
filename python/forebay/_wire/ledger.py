"""What became of rollouts and groups, and the room that is reserved for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .trajectory import GroupState, Status, Verdict

RolloutState = Literal[
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


ListOrder = Literal["oldest", "newest"]
"""The order of a list."""


@dataclass(slots=True, kw_only=True)
class TrainedVersions:
    """The weight versions that generated trained tokens."""

    min: int
    """The oldest version."""
    max: int
    """The newest version."""


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
    failed_filters: list[str] = field(default_factory=list[str])
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
    trained_tokens: int
    """Number of response tokens with mask 1, without those that are masked as stale."""
    response_tokens: int | None = None
    """Number of response tokens; null if an earlier version of the service stored the rollout."""
    status: Status | None = None
    """How the execution ended; null if an earlier version of the service stored the rollout."""
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
class TrajectoryPage:
    """Rollouts, in the order in which they arrived, or the newest first."""

    trajectories: list[TrajectoryStory]
    """Stories."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the
    last."""
    examined: int
    """Number of entries that were examined to find those of the page, at most 10,000 in a filtered list."""


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
class GroupPage:
    """Groups, in the order in which they were opened, or the newest first."""

    groups: list[GroupInfo]
    """Groups."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the
    last."""
    examined: int
    """Number of entries that were examined to find those of the page, at most 10,000 in a filtered list."""


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
    group_id: str | None = None
    """
    Group of all these rollouts. Missing places of a group that has begun always get room, and a new group is opened
    only if all of its places fit.
    """
    group_size: int | None = None
    """Rollouts of the group, if they are not as many as in the rules of the policy. Only together with `group_id`."""
    environment: str | None = None
    """
    Label of the environment of these rollouts. Room is kept for an environment whose `min_share` the next batch
    lacks.
    """


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
    reason: str | None = None
    """Why nothing was granted: the rule and what ends it. Absent if room was granted."""
