"""The rules of a policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Advantage = Literal["grpo", "grpo_mean", "rloo", "reward", "none"]
"""Advantage estimator over the rewards of a group. Each rollout counts once."""

BatchOrder = Literal["fifo", "freshest"]
"""Which ready groups are delivered first."""

FilterAction = Literal["drop", "mask"]
"""What happens to a rollout or group that matches."""

FilterScope = Literal["rollout", "group"]
"""Whether a filter examines rollouts or groups."""

LossWeighting = Literal["rollout_mean", "turn_mean", "sample_mean", "token_mean", "constant"]
"""How the tokens of a batch are weighted in the loss."""

OnDrop = Literal["refill", "shrink"]
"""Whether a dropped rollout uses up one of the group's places."""

Requirement = Literal["tokens", "logprobs", "policy_version", "teacher_logprobs", "values"]
"""A column that a policy may require."""

Retries = Literal["transport", "last", "keep"]
"""Which answers are not trained, of those that no call continues."""

Settle = Literal["checkpoint", "ack"]
"""What settles an acked batch, so that no resume without `force` brings it back."""

StalenessAction = Literal["drop", "mask"]
"""What happens to a group that exceeds the staleness bound."""


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
    """Number of tokens that a batch may not exceed, except that a group which exceeds it alone is a batch of its
    own. Unbounded when absent."""
    order: BatchOrder = "fifo"
    """Which ready groups are delivered first."""
    environments: dict[str, EnvironmentRules] = field(default_factory=dict[str, EnvironmentRules])
    """The shares of environments in each batch, by their labels, at most 64. If this is empty, batches do not depend on
    environments. Otherwise, environments that are not named have weight 1 and no minimum, and so have all groups
    without a label, together."""


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
    """Bounds of the data that is not yet trained. A post that would open a group beyond them is answered with 429,
    unless training waits for the group: then there may be twice as much."""

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

    retries: Retries = "transport"
    """Which answers are not trained."""
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
class PolicyRules:
    """How trajectories of a policy are filtered, grouped, batched and kept. Omitted keys take their defaults. When
    rules are replaced, these stay fixed for a group from the arrival of its first rollout: `require`, `filter`,
    `group`, `advantage`, `sessions.retries`, `retention.dropped_s` of what is dropped or discarded, and
    `retention.tombstone_s` of what is purged. All other rules, including `staleness`, apply to all groups from the
    next request on."""

    require: list[Requirement] = field(default_factory=lambda: ["tokens"])
    """Columns that every trajectory must have; others are refused. If empty, trajectories with text alone are
    accepted too."""
    group: GroupRules = field(default_factory=GroupRules)
    """When a group is complete."""
    batch: BatchRules = field(default_factory=BatchRules)
    """What one batch holds."""
    lease: LeaseRules = field(default_factory=LeaseRules)
    """How long a lease lasts and how many deliveries a batch has."""
    advantage: Advantage = "grpo"
    """Advantage estimator, applied once when the group is finalized."""
    loss_weighting: LossWeighting = "rollout_mean"
    """How the tokens of a batch are weighted in the loss; fixed when the batch is cut."""
    loss_constant: float | None = None
    """The divisor `L` of `constant` loss weighting."""
    staleness: StalenessRules = field(default_factory=StalenessRules)
    """How old trained tokens may be when they are first delivered."""
    backlog: BacklogRules = field(default_factory=BacklogRules)
    """Bounds of the data that is not yet trained."""
    settle: Settle = "checkpoint"
    """What settles an acked batch."""
    retention: RetentionRules = field(default_factory=RetentionRules)
    """How long payloads and ledger rows are kept."""
    sessions: SessionRules = field(default_factory=SessionRules)
    """How the calls of an agent become segments."""
    filter: list[FilterRule] = field(default_factory=list[FilterRule])
    """CEL filters, in order; the first match wins."""
