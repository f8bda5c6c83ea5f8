"""How policies are and why, and what became of rollouts, groups and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyCondition = Literal[
    "broken", "stuck", "starved", "untaken", "held-back", "stale", "flat", "dropping", "fed", "idle"
]
"""How a policy is, the worst first."""

IdKind = Literal["rollout", "group", "batch"]
"""What an id names."""


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
    """Rollouts of the last hour that will not be trained; null without a history."""
    last_post_at: str | None = None
    """When the last rollout arrived."""
    last_ack_at: str | None = None
    """When the last batch was acked."""
    version: int
    """Current weight version."""


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
class WhyCause:
    """Something that explains a state."""

    code: str
    """Stable code."""
    filter: str | None = None
    """Filter that the cause is about."""
    weight: float
    """Importance, 0 to 1."""
    text: str
    """One sentence."""
    numbers: dict[str, float]
    """The numbers of the sentence, by their names."""
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


@dataclass(slots=True, kw_only=True)
class IdWhy:
    """What became of a rollout, group or batch."""

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
class IdMatch:
    """Something that has an id."""

    kind: IdKind
    """What it is."""
    policy: str
    """Its policy."""


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
