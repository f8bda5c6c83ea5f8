"""What happened to a policy over time, for people who look at it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class PolicySeries:
    """What happened to a policy in the buckets of a window. All lists have one entry for each bucket."""

    from_: str = field(metadata={"name": "from"})
    """Begin of the first bucket."""
    to: str
    """End of the last bucket."""
    step_s: int
    """Width of a bucket in seconds. It is more than requested if the window begins where only the totals of longer times
    are kept."""
    at: list[int]
    """Begins of the buckets in seconds since the Unix epoch."""
    metrics: dict[str, list[float | None]]
    """Values by the names of the metrics: of a counter what happened in the bucket, of a gauge the number at its end. Null
    where the service was not running."""
