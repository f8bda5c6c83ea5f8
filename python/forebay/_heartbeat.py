"""Keeps leases alive while a trainer computes, in one thread for all leases of a trainer.

A process that was stopped, or a machine that slept, finds out the truth when it goes on: the end of a lease is kept on
a clock that continues meanwhile, and the service is asked at once.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from dataclasses import dataclass

from . import errors
from ._retry import Retry
from ._wire import BatchDescriptor
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


@dataclass(slots=True)
class _Lease:
    batch_id: str
    lease: str
    ttl_s: int
    epoch: int
    expires: float
    """When the lease has certainly ended, unless it was extended meanwhile."""
    next_beat: float
    is_over: bool = False
    """Whether the service said that the lease is lost."""

    @property
    def period_s(self) -> float:
        return self.ttl_s / BEATS_PER_TTL


class Heartbeats:
    """The leases of one trainer and the thread that extends them. The thread starts with the first lease."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._forget()
        if hasattr(os, "register_at_fork"):
            of_child = weakref.WeakMethod(self._forget)
            os.register_at_fork(after_in_child=lambda: (of_child() or _nothing)())

    def _forget(self) -> None:
        """A process that was forked has neither the thread nor the leases of its parent."""
        self._changed = threading.Condition()
        self._leases: dict[str, _Lease] = {}
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def add(self, descriptor: BatchDescriptor, epoch: int, ttl_s: float | None) -> None:
        """Begins to extend the lease of a batch: three times in each `ttl_s`, which is by default what was granted."""
        lease = descriptor.lease
        if lease is None:
            raise errors.ConfigurationError(f"batch {descriptor.batch_id} has no lease")
        granted_s = (descriptor.expires_in_ms or 0) / 1_000
        wanted_s = min(max(math.ceil(granted_s if ttl_s is None else ttl_s), 1), TTL_S_MAX)
        now = now_s()
        # A lease time other than the granted one begins with a heartbeat.
        next_beat = now + wanted_s / BEATS_PER_TTL if ttl_s is None else now
        with self._changed:
            self._leases[descriptor.batch_id] = _Lease(
                descriptor.batch_id, lease, wanted_s, epoch, now + granted_s, next_beat
            )
            if self._thread is None:
                self._is_stopped = False
                self._thread = threading.Thread(target=self._run, name="forebay-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, batch_id: str) -> None:
        """Stops extending a lease: its batch was acked or given back."""
        with self._changed:
            self._leases.pop(batch_id, None)

    def is_lost(self, batch_id: str) -> bool:
        """Whether the lease is lost: the service said so, or it did not extend the lease before its end."""
        with self._changed:
            lease = self._leases.get(batch_id)
            return lease is not None and (lease.is_over or now_s() >= lease.expires)

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
                lease = min(
                    (lease for lease in self._leases.values() if not lease.is_over),
                    key=lambda lease: lease.next_beat,
                    default=None,
                )
                wait_s = None if lease is None else lease.next_beat - now_s()
                if wait_s is None or wait_s > 0:
                    # The condition's own clock may stand still while the machine sleeps.
                    self._changed.wait(None if wait_s is None else min(wait_s, 60.0))
                    continue
            assert lease is not None
            self._beat(lease)

    def _beat(self, lease: _Lease) -> None:
        """Makes one attempt to extend a lease, and decides when the next one is due."""
        began = now_s()
        # An attempt that hangs must not use up the time of the next one.
        client = self._client.with_options(retry=Retry.none(), timeout_s=max(lease.period_s, 1.0))
        try:
            client.extend(lease.batch_id, lease=lease.lease, ttl_s=lease.ttl_s, epoch=lease.epoch)
        except errors.ForebayError as error:
            if is_final(error):
                log.warning("the lease of batch %s is lost: %s", lease.batch_id, error)
                with self._changed:
                    lease.is_over = True
                return
            log.info("the lease of batch %s could not be extended yet: %s", lease.batch_id, error)
            with self._changed:
                lease.next_beat = now_s() + lease.period_s / ATTEMPTS_PER_PERIOD
        else:
            # The lease time is counted from the answer, so that no end is assumed before the service's own.
            with self._changed:
                lease.expires = now_s() + lease.ttl_s
                lease.next_beat = began + lease.period_s


def is_final(error: errors.ForebayError) -> bool:
    """Whether the service will never extend this lease again. A refusal because of the key, or by something that is not
    the service, says nothing about the lease."""
    if isinstance(error, errors.Conflict | errors.NotFound | errors.UnknownPolicy):
        return True
    return isinstance(error, errors.ServiceError) and error.status in (400, 409, 410, 422)


def _nothing() -> None: ...
