"""Decides whether and when a call is repeated, as the Rust client does (`crates/client/src/client/retry.rs`)."""

from __future__ import annotations

import email.utils
import random
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
    backlog_total_max_s: float = 600.0
    """The same for a call that is refused with 429, because the policy has as much work as it may have. These refusals
    do not count as attempts: a finished rollout waits for the trainer."""

    @staticmethod
    def none() -> Retry:
        """Makes only one attempt."""
        return Retry(attempts_max=1, backlog_total_max_s=0.0)

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


LOUD_AFTER_S = 5.0
"""A call that has waited for room this long says so in the log. Otherwise a run in which nobody trains looks as if it
hung, which cost newcomers their first ten minutes."""

LOUD_EVERY_S = 60.0
"""The time until it says so again."""


class RoomWait:
    """How long a call has waited for room."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._loud_s = LOUD_AFTER_S

    def add(self, pause_s: float) -> bool:
        """Counts a pause, and returns whether the log should tell of the wait now."""
        self.waited_s += pause_s
        if self.waited_s < self._loud_s:
            return False
        self._loud_s = self.waited_s + LOUD_EVERY_S
        return True


class Attempts:
    """The failed attempts of one call."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._failed = 0
        self._paused_s = 0.0
        self._refused = 0
        self.room = RoomWait()
        self.is_loud = False
        """Whether the log should tell that the call waits for room."""

    def pause_s(self, effect: Effect, *, repeat: bool, status: int | None, asked_s: float | None) -> float | None:
        """Counts a failed attempt, and returns the pause before the next one, or None if there is none.

        `repeat` says whether the call may be sent again when its outcome is unknown.
        """
        if effect is Effect.FINAL or (effect is Effect.UNKNOWN and not repeat):
            return None
        retry, jitter = self._retry, random.random()
        if status == 429:
            self._refused += 1
            pause = retry.pause_s(self._refused, asked_s, jitter)
            self.is_loud = self.room.add(pause)
            return pause if self.room.waited_s <= retry.backlog_total_max_s else None
        self.is_loud = False
        self._failed += 1
        pause = retry.pause_s(self._failed, asked_s, jitter)
        self._paused_s += pause
        return pause if self._failed < retry.attempts_max and self._paused_s <= retry.pause_total_max_s else None


ASKED_MAX_S = 600.0
"""The longest `Retry-After` that a wait without a bound of its own obeys at a time, such as that of a spooled post. A
wrong clock of the service or of a proxy may ask for centuries."""

NOT_BEGUN = ("overloaded", "too-many-waiters", "stopping")
"""Problem types of those 503 answers that are decided before anything is stored. After any other 503, such as
`store-unavailable`, the outcome is unknown."""


def effect(status: int, problem_type: str | None) -> Effect:
    """What the service has done before it answered with an error."""
    # With 408 the body did not arrive in time, and nothing was done with its beginning.
    if status in (408, 429) or (status == 503 and problem_type in NOT_BEGUN):
        return Effect.NOT_BEGUN
    if status in (502, 503, 504):
        return Effect.UNKNOWN
    return Effect.FINAL


def retry_after_s(status: int, headers: Mapping[str, str]) -> float | None:
    """Returns the time to wait that the service asks for, if its status may ask for one."""
    asked = headers.get("Retry-After")
    if status not in (429, 503) or asked is None:
        return None
    asked = asked.strip()
    # Digits such as ² are no number for Python.
    if asked.isascii() and asked.isdigit():
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
    except (TypeError, ValueError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)
