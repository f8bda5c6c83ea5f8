"""Follows the weight versions of a policy, with one long poll per process, however many agents wait for a version."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import errors
from ._http import Cancellation, Config, cancellable
from ._wire import PolicyStatus

if TYPE_CHECKING:
    from .client import Client

log = logging.getLogger("forebay")

POLL_MS = 30_000
"""Duration of a long poll. The service allows up to 60 s, but proxies often cut off connections earlier."""

PAUSE_MAX_S = 10.0
"""Longest pause after a failed poll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of the weights of a policy."""

    policy: str
    version: int
    """Its number; 0 if none was published in this run."""
    step: int | None
    """The optimizer step that it was published with."""
    uri: str | None
    """Where the weights are."""

    @staticmethod
    def of(status: PolicyStatus) -> Version:
        """The current version of a policy."""
        return Version(policy=status.policy, version=status.version, step=status.version_step, uri=status.version_uri)


def current(client: Client, config: Config, policy: str) -> Version:
    """Returns the current version: that of the poll that runs, or else that of a question to the service."""
    watcher = _watchers.get((os.getpid(), config, policy))
    if watcher is not None and (version := watcher.fresh()) is not None:
        return version
    try:
        status = client.get_policy(policy)
    except errors.ForebayError as error:
        # With a spool, an agent goes on while the service is away.
        status = None if client.spool is None else client.spool.noted(policy, error)
        if status is None:
            raise
        log.warning(
            "%s; the rollout begins with version %d of %s, which was noted before", error, status.version, policy
        )
    if status is None:
        raise errors.UnknownPolicy(f"the policy `{policy}` does not exist, or the key does not see it")
    return Version.of(status)


def follow(client: Client, config: Config, policy: str) -> Iterator[Version]:
    """Yields the newest version whenever it is another one; at first the current one, if one was published."""
    woken = threading.Event()
    with _subscribed(client, config, policy, woken.set) as watcher, client.cancellable() as cancellation:
        cancellation.then(woken.set)
        seen = None
        while True:
            woken.wait()
            if cancellation.is_cancelled:
                raise errors.Cancelled("the client was closed")
            woken.clear()
            version = watcher.version()
            if _is_news(version, seen):
                yield version
            seen = version


async def follow_async(client: Client, config: Config, policy: str) -> AsyncIterator[Version]:
    """The same for asyncio, without a thread per caller."""
    woken = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        # The loop may have ended before its task has left the block.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(woken.set)

    with _subscribed(client, config, policy, wake) as watcher, client.cancellable() as cancellation:
        cancellation.then(wake)
        seen = None
        while True:
            await woken.wait()
            if cancellation.is_cancelled:
                raise errors.Cancelled("the client was closed")
            woken.clear()
            version = watcher.version()
            if _is_news(version, seen):
                yield version
            seen = version


def _is_news(version: Version, seen: Version | None) -> bool:
    """Version 0 is only news to who had a later one: there is nothing to load."""
    return version != seen and (version.version > 0 or seen is not None)


class _Watcher:
    """The long poll of one policy, which a thread repeats as long as somebody follows."""

    def __init__(self, client: Client, policy: str) -> None:
        self._client = client
        self._policy = policy
        self._lock = threading.Lock()
        self._followers: list[Callable[[], None]] = []
        self._version: Version | None = None
        self._error: errors.ForebayError | None = None
        self._is_fresh = False
        self._end = Cancellation()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"forebay-versions-{self._policy}", daemon=True).start()

    def add(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._followers.append(wake)
            is_known = self._version is not None or self._error is not None
        if is_known:
            wake()

    def remove(self, wake: Callable[[], None]) -> bool:
        """Returns whether nobody follows any more; then the poll is ended."""
        with self._lock:
            self._followers.remove(wake)
            is_last = not self._followers
        if is_last:
            self._end.cancel()
        return is_last

    def version(self) -> Version:
        """The newest version, after a wake. An error that ended the poll is raised."""
        with self._lock:
            if self._error is not None:
                raise self._error
            assert self._version is not None
            return self._version

    def fresh(self) -> Version | None:
        """The newest version, unless the last poll failed."""
        with self._lock:
            return self._version if self._is_fresh else None

    @property
    def has_ended(self) -> bool:
        with self._lock:
            return self._error is not None or self._end.is_cancelled

    def _run(self) -> None:
        failures = 0
        with cancellable(self._end):
            while not self._end.is_cancelled:
                try:
                    self._poll()
                    failures = 0
                except errors.Cancelled:
                    return
                except (errors.Unreachable, errors.Unavailable, errors.UnexpectedAnswer) as error:
                    failures += 1
                    log.warning("versions of %s cannot be followed now: %s", self._policy, error)
                    with self._lock:
                        self._is_fresh = False
                    self._end.pause(min(PAUSE_MAX_S, 2.0 ** min(failures, 8)) * random.random())
                except errors.ForebayError as error:
                    with self._lock:
                        self._error = error
                    self._wake()
                    return

    def _poll(self) -> None:
        known = self._version
        if known is None or not self._is_fresh:
            status = self._client.get_policy(self._policy)
            if status is None:
                raise errors.UnknownPolicy(f"the policy `{self._policy}` does not exist, or the key does not see it")
        else:
            status = self._client.wait_version(self._policy, above=known.version, wait_ms=POLL_MS)
        version = known if status is None else Version.of(status)
        with self._lock:
            self._version, self._is_fresh = version, True
        if version != known:
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            followers = list(self._followers)
        for wake in followers:
            wake()


_watchers: dict[tuple[int, Config, str], _Watcher] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """The threads of the parent do not run in a child, and its lock may be held."""
    global _lock
    _lock = threading.Lock()
    _watchers.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _subscribed(client: Client, config: Config, policy: str, wake: Callable[[], None]) -> Generator[_Watcher]:
    place = (os.getpid(), config, policy)
    with _lock:
        watcher = _watchers.get(place)
        is_new = watcher is None or watcher.has_ended
        if watcher is None or is_new:
            # Its own connections, so that it does not end with the client that happened to be first.
            watcher = _watchers[place] = _Watcher(client.copy(), policy)
        watcher.add(wake)
    if is_new:
        watcher.start()
    try:
        yield watcher
    finally:
        with _lock:
            if watcher.remove(wake) and _watchers.get(place) is watcher:
                del _watchers[place]
