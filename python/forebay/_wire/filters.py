"""The names that filters know, and what a draft of filters would have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .rules import FilterRule, FilterScope

TriedState = Literal["ready", "discarded", "open", "unjudged"]
"""What becomes of a group that filters are tried on."""


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
class TriedGroups:
    """Groups by what became of them: as they were decided, by the filters that the policy has now, and by the draft."""

    as_decided: GroupOutcomes
    """As they were decided."""
    rules_now: GroupOutcomes
    """By the filters that the policy has now."""
    draft: GroupOutcomes
    """By the draft."""


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
class TriedRollouts:
    """Rollouts by what became of them."""

    as_decided: RolloutOutcomes
    """As they were decided."""
    rules_now: RolloutOutcomes
    """By the filters that the policy has now."""
    draft: RolloutOutcomes
    """By the draft."""


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
class TriedOutcome:
    """What becomes of a group."""

    state: TriedState
    """What becomes of it."""
    reason: str | None = None
    """Why it is discarded, or why it cannot be judged."""


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
class Unjudged:
    """Rollouts on which a draft could not be tried."""

    reason: str
    """`payload-purged`, `payload-damaged` or `payload-too-large`."""
    rollouts: int
    """Number of rollouts."""


@dataclass(slots=True, kw_only=True)
class TryNote:
    """What to keep in mind about a result."""

    code: str
    """`flat-groups-enter`, `length-shift`, `refill-not-simulated` or `versions-derived`."""
    text: str
    """A sentence with the numbers."""
