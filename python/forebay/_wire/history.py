"""What happened to a policy over time, for people who look at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    """Number of groups of several rewards that are all equal: nothing can be learned from them."""
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
class NumberSpread:
    """A number of several steps."""

    mean: float
    """The mean."""
    min: float
    """The least."""
    max: float
    """The greatest."""


@dataclass(slots=True, kw_only=True)
class JournalPage:
    """A page of the journal of a policy."""

    entries: list[JournalEntry]
    """Entries in the requested order."""
    next: str | None = None
    """Cursor of the next page; null on the last page."""


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
