"""Keeps leases alive while a trainer computes or a scorer judges, in one thread for all leases of either.

A process that was stopped, or a machine that slept, finds out the truth when it goes on: the end of a lease is kept on
a clock that continues meanwhile, and the service is asked at once.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from . import errors
from ._retry import Retry
from ._wire import BatchDescriptor, ScoreItem
from .client import Client

log = logging.getLogger("forebay")

BEATS_PER_TTL = 3
"""Heartbeats within one lease time: two may fail before the lease is in danger."""

ATTEMPTS_PER_PERIOD = 4
"""Attempts within one period while they fail. An answer of something other than the service, such as a proxy, must not
cost a whole period."""

TTL_S_MAX = 86_400


def now_s() -> float:
    """A clock that goes on while the process is stopped and while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(slots=True, kw_only=True)
class Lease:
    """A lease that is extended."""

    key: str
    """What it is known by among the leases of one thread."""
    what: str
    """What it is a lease of, for the log."""
    token: str
    ttl_s: float
    """How long it lasts when it is extended."""
    expires: float
    """When the lease has certainly ended, unless it was extended meanwhile."""
    next_beat: float
    is_over: bool = False
    """Whether the service said that the lease is lost."""

    @property
    def period_s(self) -> float:
        return self.ttl_s / BEATS_PER_TTL

    @property
    def is_lost(self) -> bool:
        """Whether the service said that it is lost, or did not extend it before its end."""
        return self.is_over or now_s() >= self.expires


L = TypeVar("L", bound=Lease)


class Heartbeats(Generic[L]):
    """Leases and the thread that extends them. The thread starts with the first lease."""

    at_once = 1
    """How many leases one call extends."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._forget()
        if hasattr(os, "register_at_fork"):
            of_child = weakref.WeakMethod(self._forget)
            os.register_at_fork(after_in_child=lambda: (of_child() or _nothing)())

    def _forget(self) -> None:
        """A process that was forked has neither the thread nor the leases of its parent."""
        self._changed = threading.Condition()
        self._leases: dict[str, L] = {}
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def _hold(self, lease: L) -> None:
        with self._changed:
            self._leases[lease.key] = lease
            if self._thread is None:
                self._is_stopped = False
                self._thread = threading.Thread(target=self._run, name="forebay-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, key: str) -> None:
        """Stops extending a lease: it has ended, or nobody needs it."""
        with self._changed:
            self._leases.pop(key, None)

    def is_lost(self, key: str) -> bool:
        """Whether a lease is lost that is still to be extended."""
        with self._changed:
            lease = self._leases.get(key)
            return lease is not None and lease.is_lost

    def stop(self) -> None:
        """Stops extending all leases. They end when their time is over, or with the next resume."""
        with self._changed:
            self._leases.clear()
            self._is_stopped = True
            self._thread = None
            self._changed.notify_all()

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                if self._is_stopped or self._thread is not thread:
                    return
                # A list, because the garbage collector may remove a lease meanwhile, in this thread as well.
                alive = [lease for lease in list(self._leases.values()) if not lease.is_over]
                # When one is due, others are extended before their time, so that all take few calls.
                first = heapq.nsmallest(self.at_once, alive, key=lambda lease: lease.next_beat)
                wait_s = first[0].next_beat - now_s() if first else None
                if wait_s is None or wait_s > 0:
                    # The condition's own clock may stand still while the machine sleeps.
                    self._changed.wait(None if wait_s is None else min(wait_s, 60.0))
                    continue
            self._beat(first)

    def _beat(self, leases: list[L]) -> None:
        """Makes one attempt to extend leases, and decides when the next one is due."""
        began = now_s()
        # An attempt that hangs must not use up the time of the next one.
        timeout_s = max(min(lease.period_s for lease in leases), 1.0)
        client = self._client.with_options(retry=Retry.none(), timeout_s=timeout_s)
        try:
            lost = self._extend(client, leases)
        except errors.ForebayError as error:
            if is_final(error):
                self._end(leases, str(error))
                return
            what = leases[0].what + (f" and {len(leases) - 1} others" if len(leases) > 1 else "")
            log.info("the lease of %s could not be extended yet: %s", what, error)
            with self._changed:
                for lease in leases:
                    lease.next_beat = now_s() + lease.period_s / ATTEMPTS_PER_PERIOD
        else:
            # The lease time is counted from the answer, so that no end is assumed before the service's own.
            with self._changed:
                for lease in leases:
                    lease.expires = now_s() + lease.ttl_s
                    lease.next_beat = began + lease.period_s
            self._end(lost, "the work is settled, or it is given to others")

    def _end(self, leases: Sequence[L], why: str) -> None:
        with self._changed:
            for lease in leases:
                lease.is_over = True
        for lease in leases:
            log.warning("the lease of %s is lost: %s", lease.what, why)

    def _extend(self, client: Client, leases: Sequence[L]) -> Sequence[L]:
        """Asks the service to extend leases. Returns those that it says are lost."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class BatchLease(Lease):
    """The lease of a batch."""

    epoch: int


class BatchHeartbeats(Heartbeats[BatchLease]):
    """The leases of one trainer, by the ids of their batches."""

    def add(self, descriptor: BatchDescriptor, epoch: int, ttl_s: float | None) -> None:
        """Begins to extend the lease of a batch: three times in each `ttl_s`, which is by default what was granted."""
        if descriptor.lease is None:
            raise errors.ConfigurationError(f"batch {descriptor.batch_id} has no lease")
        granted_s = (descriptor.expires_in_ms or 0) / 1_000
        wanted_s = min(max(math.ceil(granted_s if ttl_s is None else ttl_s), 1), TTL_S_MAX)
        now = now_s()
        lease = BatchLease(
            key=descriptor.batch_id,
            what=f"batch {descriptor.batch_id}",
            token=descriptor.lease,
            ttl_s=wanted_s,
            expires=now + granted_s,
            # A lease time other than the granted one begins with a heartbeat.
            next_beat=now + wanted_s / BEATS_PER_TTL if ttl_s is None else now,
            epoch=epoch,
        )
        self._hold(lease)

    def _extend(self, client: Client, leases: Sequence[BatchLease]) -> Sequence[BatchLease]:
        (lease,) = leases
        client.extend(lease.key, lease=lease.token, ttl_s=int(lease.ttl_s), epoch=lease.epoch)
        return []


class WorkHeartbeats(Heartbeats[Lease]):
    """The leases of one scorer, by their tokens."""

    at_once = 256

    def __init__(self, client: Client, policy: str, ttl_s: int | None) -> None:
        super().__init__(client)
        self._policy = policy
        self._ttl_s = ttl_s

    def add(self, item: ScoreItem) -> Lease:
        """Begins to extend the lease of an item: three times in the time for which it is granted."""
        ttl_s, now = _ttl_s(item.expires_in_ms), now_s()
        lease = Lease(
            key=item.lease,
            what=f"{item.name} of {item.rollouts[0].rollout_id if item.per == 'rollout' else item.group_id}",
            token=item.lease,
            ttl_s=ttl_s,
            expires=now + item.expires_in_ms / 1_000,
            next_beat=now + ttl_s / BEATS_PER_TTL,
        )
        self._hold(lease)
        return lease

    def _extend(self, client: Client, leases: Sequence[Lease]) -> Sequence[Lease]:
        tokens = [lease.token for lease in leases]
        extended = client.extend_scores(tokens, policy=self._policy, ttl_s=self._ttl_s)
        lost = set(extended.lost)
        for lease in leases:
            lease.ttl_s = _ttl_s(extended.expires_in_ms)
        with self._changed:
            # What was settled meanwhile is not lost.
            return [lease for lease in leases if lease.token in lost and lease.token in self._leases]


def _ttl_s(granted_ms: int) -> float:
    """The lease time. The service grants no less than a second, whatever is left of it when its answer arrives."""
    return max(granted_ms / 1_000, 1.0)


def is_final(error: errors.ForebayError) -> bool:
    """Whether the service will never extend this lease again. A refusal because of the key, or by something that is not
    the service, says nothing about the lease."""
    if isinstance(error, errors.Conflict | errors.NotFound | errors.UnknownPolicy):
        return True
    return isinstance(error, errors.ServiceError) and error.status in (400, 409, 410, 422)


def _nothing() -> None: ...
