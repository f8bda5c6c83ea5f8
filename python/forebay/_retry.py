"""Decides whether and when a call is repeated. The rule is that of the Rust client (`client/src/client/retry.rs`)."""

from __future__ import annotations

import email.utils
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often and for how long a call is repeated, with exponential back-off and full jitter.

    The pause before attempt n + 1 is random between zero and the smaller of `first_pause_s * 2^(n - 1)` and
    `pause_max_s`. If the service sends `Retry-After` with a 429 or 503, that time is added: the service asked for at
    least this wait, and many clients received the same value.
    """

    attempts_max: int = 10
    """Number of attempts, including the first; 0 counts as 1."""
    first_pause_s: float = 0.1
    """Longest pause after the first attempt."""
    pause_max_s: float = 5.0
    """Upper bound of each pause as the back-off grows."""
    pause_total_max_s: float = 60.0
    """Upper bound of the sum of all pauses of one call. A call that would have to wait longer fails at once."""

    @staticmethod
    def none() -> Retry:
        """Makes only one attempt."""
        return Retry(attempts_max=1)

    def pause_s(self, attempts: int, retry_after_s: float | None, jitter: float) -> float:
        """Returns the pause after `attempts` attempts; `jitter` is random in [0, 1)."""
        growth = 2.0 ** min(attempts - 1, 32)
        return (retry_after_s or 0.0) + min(self.first_pause_s * growth, self.pause_max_s) * jitter


class Effect(Enum):
    """What the service may have done before an attempt failed."""

    NOT_BEGUN = "not begun"
    """The service did not begin the call, and a repeat may succeed."""
    UNKNOWN = "unknown"
    """It is unknown whether the service processed the call."""
    FINAL = "final"
    """The service answered, and a repeat would receive the same answer."""


NOT_BEGUN = ("overloaded", "too-many-waiters", "stopping")
"""Problem types of those 503 answers that are decided before anything is stored. After any other 503, such as
`store-unavailable`, the outcome is unknown."""


def effect(status: int, problem_type: str | None) -> Effect:
    """What the service has done before it answered with an error."""
    if status == 429 or (status == 503 and problem_type in NOT_BEGUN):
        return Effect.NOT_BEGUN
    if status in (502, 503, 504):
        return Effect.UNKNOWN
    return Effect.FINAL


def retry_after_s(status: int, headers: Mapping[str, str]) -> float | None:
    """Returns the time to wait that the service asks for, if its status may ask for one."""
    asked = headers.get("Retry-After")
    if status not in (429, 503) or asked is None:
        return None
    if asked.strip().isdigit():
        return float(asked)
    until = _date(asked)
    if until is None:
        return None
    # The date was set by the service's clock, so it is compared with the answer's `Date` header if there is one.
    now = _date(headers.get("Date")) or datetime.now(timezone.utc)
    return max(0.0, (until - now).total_seconds())


def _date(text: str | None) -> datetime | None:
    try:
        date = email.utils.parsedate_to_datetime(text or "")
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)
