"""The spool: finished rollouts are kept on disk while the service cannot be reached, and posted when it can.

    DIR/{uuid7}/lock                 locked by the process that the folder belongs to
    DIR/{uuid7}/service              the address of the service that its posts are for
    DIR/{uuid7}/{uuid7}.json.gz      the body of one post
    DIR/rejected/{uuid7}.json.gz     what the service refused for good, with {uuid7}.problem.json beside it

A process has a folder of its own. When it starts, it also takes over the folders whose processes have ended. A body is
written once and posted as it is, so the service recognises it if it was stored already.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import heapq
import json
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from . import _durable, errors
from ._http import json_body
from ._posts import Posted
from ._retry import ASKED_MAX_S, Retry
from ._uuid import uuid7
from ._wire import PolicyStatus, Receipt, ReceiptGroup, Trajectory

if TYPE_CHECKING:
    from .client import Client

log = logging.getLogger("forebay")

BYTES_MAX = 1 << 30
"""Bytes that a spool holds unless the client says otherwise."""

CLOSE_S = 5.0
"""How long a process that ends tries to post what is in its spool."""

FIRST_PAUSE_S = 0.25
PAUSE_MAX_S = 30.0
"""Longest pause between two attempts to reach the service, and between two attempts to post what it answers with an
error that may pass."""

REFUSED = (400, 404, 409, 410, 413, 415, 422)
"""Statuses after which the same body would be refused again."""

GZIP_LEVEL = 4
"""Token ids and log-probabilities shrink to a quarter; higher levels gain little and take longer."""

ENDING = ".json.gz"
LOCK = "lock"
SERVICE = "service"
REJECTED = "rejected"

Send = Callable[[Sequence[Posted], bool], list[Receipt]]
"""Sends trajectories, only once if the flag is true."""


class SpooledReceipt(Receipt):
    """Says that a rollout is on disk and will be posted. The service has not decided anything about it."""

    __slots__ = ()

    @property
    def spooled(self) -> bool:
        return True


@dataclass(slots=True)
class SpoolCounts:
    """What became of posts in the spool of this process."""

    spooled: int = 0
    """Posts that were written to disk."""
    delivered: int = 0
    """Posts that the service has, and that left the disk."""
    duplicates: int = 0
    """Rollouts of delivered posts that the service had already."""
    late: int = 0
    """Rollouts of delivered posts that arrived after their group was decided."""
    rejected: int = 0
    """Posts that the service refused for good."""
    waiting: int = 0
    """Posts that are on disk now."""


@dataclass(slots=True)
class _Folder:
    """A folder that this process has locked."""

    path: Path
    lock: int
    is_own: bool
    posts: int = 0
    """Posts in it that are not delivered yet."""


@dataclass(order=True, slots=True)
class _Entry:
    """A post on disk. Names sort by the time at which they were made."""

    name: str
    folder: _Folder = field(compare=False)

    @property
    def path(self) -> Path:
        return self.folder.path / self.name


class Spool:
    """The spool of one client. Threads may share it, and a process that was forked begins with an empty one."""

    def __init__(self, root: str | os.PathLike[str], client: Client, *, bytes_max: int = BYTES_MAX) -> None:
        self.root = Path(root)
        self._bytes_max = bytes_max
        self._client = client
        self._versions: dict[str, PolicyStatus] = {}
        self._admissions: dict[str, int] = {}
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.ConfigurationError(f"{self.root} cannot be a spool: {error}") from None
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise errors.ConfigurationError(f"{self.root} cannot be a spool: it is not writable")
        self._forget()
        _open.add(self)

    def _forget(self) -> None:
        self._changed = threading.Condition()
        self._folders: list[_Folder] = []
        self._entries: list[_Entry] = []
        self._deferred: list[tuple[float, _Entry]] = []
        self._counts = SpoolCounts()
        self._current: _Entry | None = None
        self._thread: threading.Thread | None = None
        self._is_down = False
        self._resume = False
        self._stop_at: float | None = None

    # What the client calls.

    def post(self, client: Client, trajectories: Sequence[Posted], send: Send, *, is_bundle: bool) -> list[Receipt]:
        """Sends trajectories that have ids, and writes them to disk if the service cannot be reached."""
        completed = [self._complete(client, item) for item in trajectories]
        try:
            receipts = send(completed, self._is_down)
        except errors.ForebayError as error:
            if not _is_away(error):
                raise
            unknown = next((item for item in completed if _get(item, "policy_version") is None), None)
            if unknown is not None:
                raise errors.SpoolError(
                    f"the rollout {_get(unknown, 'rollout_id')} was not spooled, because its policy_version is not "
                    f"known: state it, or make one call about the policy before the service is away. {error.message}",
                    method=error.method,
                    path=error.path,
                ) from error
            sized = [self._sized(item) for item in completed]
            self._put(json_body(sized if is_bundle else sized[0], "POST", "/trajectories"), error)
            return [_receipt(item) for item in sized]
        self._is_reached()
        return receipts

    def note(self, status: PolicyStatus) -> None:
        """Remembers the version of a policy, for posts that state none."""
        self._versions[status.policy] = status

    def noted(self, policy: str, error: errors.ForebayError) -> PolicyStatus | None:
        """What was noted last about a policy, if the service is away. Newer weights may have been published since, so
        what begins now may count as older than it is, and never as fresher."""
        return self._versions.get(policy) if _is_away(error) else None

    def note_admission(self, admission_id: str, version: int) -> None:
        """Remembers the version of an admission, which the service forgets when the admission expires."""
        while len(self._admissions) >= 65_536:
            del self._admissions[next(iter(self._admissions))]
        self._admissions[admission_id] = version

    @property
    def counts(self) -> SpoolCounts:
        """What became of posts so far."""
        with self._changed:
            return replace(self._counts, waiting=self._left())

    def adopt(self, *, any_service: bool = False) -> int:
        """Takes over the folders of processes that have ended, and returns the number of their posts.

        Folders with posts for another service are left alone, unless `any_service` is true.
        """
        adopted = 0
        for path in sorted(entry for entry in self.root.iterdir() if entry.is_dir() and entry.name != REJECTED):
            if any(folder.path == path for folder in self._folders):
                continue
            try:
                adopted += self._adopt(path, any_service)
            except FileNotFoundError:
                # Another process took the folder over.
                pass
            except OSError as error:
                # One damaged folder must not keep clients from starting, nor the other folders from being posted.
                log.error("%s cannot be read, and is left as it is: %s", path, error)
        return adopted

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is left on disk, for at most `timeout_s`. Returns whether that is so."""
        end = time.monotonic() + timeout_s
        with self._changed:
            self._resume = True
            self._changed.notify_all()
            while self._left():
                remaining = end - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)
        return True

    def close(self, timeout_s: float | None = None) -> None:
        """Tries to post what is left for some seconds, and lets another process take over the rest.

        The spool can be used again afterwards.
        """
        timeout_s = CLOSE_S if timeout_s is None else timeout_s
        with self._changed:
            thread = self._thread
            self._stop_at = time.monotonic() + timeout_s
            self._resume = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        with self._changed:
            self._thread = None
            self._stop_at = None
            self._entries.clear()
            self._deferred.clear()
            self._current = None
            folders, self._folders = self._folders, []
        for folder in folders:
            _release(folder)

    # Before a post is written.

    def _complete(self, client: Client, item: Posted) -> Posted:
        """Fills in the version. Otherwise the service would assume the one at the arrival of the post."""
        if _get(item, "policy_version") is not None:
            return item
        admission = _get(item, "admission_id")
        version = self._admissions.get(admission) if admission is not None else None
        if version is None:
            policy = _get(item, "policy") or "default"
            with contextlib.suppress(errors.ForebayError):
                if not self._is_down or policy not in self._versions:
                    client.with_options(retry=Retry.none()).get_policy(policy)
            status = self._versions.get(policy)
            version = status.version if status is not None else None
        return item if version is None else _with(item, policy_version=version)

    def _sized(self, item: Posted) -> Posted:
        """States the size of the group, because the rules may change until the post arrives."""
        status = self._versions.get(_get(item, "policy") or "default")
        if status is None or _get(item, "group_id") is None or _get(item, "group_size") is not None:
            return item
        return _with(item, group_size=status.rules.group.size)

    def _put(self, body: bytes, error: errors.ForebayError) -> None:
        data = gzip.compress(body, GZIP_LEVEL, mtime=0)
        with self._changed:
            try:
                held = sum(file.stat().st_size for file in _files(self.root))
                if held + len(data) > self._bytes_max:
                    raise errors.SpoolFull(
                        f"the spool {self.root} has {held} bytes and may have {self._bytes_max}, so this post of "
                        f"{len(data)} bytes was not spooled: {error.message}",
                        method=error.method,
                        path=error.path,
                    ) from error
                folder = self._own_folder()
                name = uuid7() + ENDING
                _durable.replace(folder.path / name, data)
            except OSError as broken:
                raise errors.SpoolError(
                    f"the post could not be written to the spool {self.root} ({broken}): {error.message}",
                    method=error.method,
                    path=error.path,
                ) from error
            self._counts.spooled += 1
            self._is_down = True
            self._add(folder, [name])
        log.warning("a post is in the spool %s until the service answers: %s", self.root, error.message)

    def _own_folder(self) -> _Folder:
        for folder in self._folders:
            if folder.is_own:
                return folder
        while True:
            path = self.root / uuid7()
            path.mkdir(mode=0o700)
            # A process that starts may have taken the folder over before it was locked.
            with contextlib.suppress(FileNotFoundError):
                held = _durable.lock(path / LOCK)
                if held is not None:
                    break
        _durable.replace(path / SERVICE, self._client.url.encode())
        _durable.sync_folder(self.root)
        folder = _Folder(path, held, is_own=True)
        self._folders.append(folder)
        return folder

    def _adopt(self, path: Path, any_service: bool) -> int:
        held = _durable.lock(path / LOCK)
        if held is None:
            return 0
        folder = _Folder(path, held, is_own=False)
        try:
            for leftover in path.glob("*" + _durable.TEMPORARY):
                # The process was killed while it wrote: nobody was told that this is on disk.
                leftover.unlink()
            names = [file.name for file in path.glob("*" + ENDING)]
            # A damaged address is that of another service: `forebay.spool flush --all` posts what is there.
            service = (path / SERVICE).read_text("utf-8", "replace") if (path / SERVICE).exists() else ""
        except BaseException:
            os.close(held)
            raise
        if not names:
            _release(folder)
            return 0
        if service != self._client.url and not any_service:
            log.warning("%s has %d posts for %s, which this client leaves there", path, len(names), service or "nobody")
            os.close(held)
            return 0
        with self._changed:
            self._folders.append(folder)
            self._add(folder, names)
        log.info("%d posts of a process that has ended are taken over from %s", len(names), path)
        return len(names)

    # The thread that posts what is on disk.

    def _add(self, folder: _Folder, names: Sequence[str]) -> None:
        for name in names:
            heapq.heappush(self._entries, _Entry(name, folder))
        folder.posts += len(names)
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="forebay-spool", daemon=True)
            self._thread.start()

    def _is_reached(self) -> None:
        if self._is_down or self._entries:
            with self._changed:
                self._is_down = False
                self._resume = True
                self._changed.notify_all()

    def _run(self) -> None:
        failures = 0
        while True:
            with self._changed:
                entry = self._next()
                if entry is None:
                    return
                remaining = None if self._stop_at is None else max(self._stop_at - time.monotonic(), 0.1)
            client = self._client.with_options(retry=Retry.none(), timeout_s=remaining)
            try:
                pause = self._deliver(client, entry)
            except Exception:
                # The thread has to go on: the others may be fine, and this one is still on disk.
                log.exception("a post of the spool could not be posted: %s", entry.path)
                pause = self._defer(entry, PAUSE_MAX_S)
            with self._changed:
                if self._is_ended():
                    return
                self._current = None
                self._changed.notify_all()
                if pause is None:
                    failures = 0
                    continue
                failures += 1
                back_off = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16), PAUSE_MAX_S)
                self._wait(pause + back_off * random.random())

    def _is_ended(self) -> bool:
        """Whether the spool was closed, so that its entries are another process's by now."""
        return threading.current_thread() is not self._thread

    def _next(self) -> _Entry | None:
        """Waits for the oldest post that may be tried. None when the thread has to end."""
        while not self._is_ended():
            now = time.monotonic()
            for item in [item for item in self._deferred if item[0] <= now]:
                self._deferred.remove(item)
                heapq.heappush(self._entries, item[1])
            is_over = self._stop_at is not None and (now >= self._stop_at or not self._entries)
            if is_over or not self._left():
                self._thread = None
                return None
            if self._entries:
                self._current = heapq.heappop(self._entries)
                return self._current
            self._changed.wait(min(due for due, _ in self._deferred) - now)
        return None

    def _wait(self, seconds: float) -> None:
        """Waits, but not if a call of the client has reached the service meanwhile."""
        end = time.monotonic() + seconds
        while not self._resume and not self._is_ended() and (remaining := end - time.monotonic()) > 0:
            self._changed.wait(remaining if self._stop_at is None else min(remaining, self._stop_at - time.monotonic()))
            if self._stop_at is not None and time.monotonic() >= self._stop_at:
                break
        self._resume = False

    def _left(self) -> int:
        """The number of posts that are on disk and belong to this process."""
        return len(self._entries) + len(self._deferred) + (self._current is not None)

    def _deliver(self, client: Client, entry: _Entry) -> float | None:
        """Posts an entry. Returns None if the next one may be tried, or else how long to wait besides the back-off."""
        try:
            receipts = client.post_body(entry.path.read_bytes(), encoding="gzip")
        except FileNotFoundError:
            # Another process has taken the folder over, after this spool was closed.
            return None
        except errors.Unavailable as error:
            return self._keep(entry, error, _asked_s(error, 0.0))
        except errors.ServiceError as error:
            if error.status in REFUSED:
                self._reject(entry, error)
                return None
            # The policy is full, or the key does not allow it: other posts need not wait for this one.
            log.log(
                logging.DEBUG if isinstance(error, errors.Backlog) else logging.ERROR,
                "a post of the spool was not taken yet: %s: %s",
                entry.path,
                error,
            )
            return self._defer(entry, _asked_s(error, PAUSE_MAX_S))
        except errors.ForebayError as error:
            return self._keep(entry, error, 0.0)
        entry.path.unlink(missing_ok=True)
        late = [receipt for receipt in receipts if receipt.verdict == "late"]
        for receipt in late:
            log.warning("the rollout %s of the spool was late for its group %s", receipt.rollout_id, receipt.group_id)
        with self._changed:
            self._is_down = False
            self._counts.delivered += 1
            self._counts.late += len(late)
            self._counts.duplicates += sum(receipt.duplicate for receipt in receipts)
            self._drained(entry)
        return None

    def _keep(self, entry: _Entry, error: errors.ForebayError, wait_s: float) -> float:
        """The service is away, so all posts wait."""
        log.debug("the service cannot take the posts of the spool %s yet: %s", self.root, error)
        with self._changed:
            self._is_down = True
            if not self._is_ended():
                heapq.heappush(self._entries, entry)
        return wait_s

    def _defer(self, entry: _Entry, wait_s: float) -> None:
        """Only this post waits."""
        with self._changed:
            if not self._is_ended():
                self._deferred.append((time.monotonic() + wait_s, entry))

    def _reject(self, entry: _Entry, error: errors.ServiceError) -> None:
        rejected = self.root / REJECTED
        rejected.mkdir(mode=0o700, exist_ok=True)
        problem = {**asdict(error.problem), "request_id": error.request_id, "service": self._client.url}
        name = entry.name.removesuffix(ENDING)
        # The problem comes first: a body in the folder always has its problem beside it.
        _durable.replace(rejected / f"{name}.problem.json", json.dumps(problem, indent=2).encode() + b"\n")
        os.replace(entry.path, rejected / entry.name)
        _durable.sync_folder(rejected)
        log.error("a post of the spool was refused, and is kept as %s: %s", rejected / entry.name, error)
        with self._changed:
            self._counts.rejected += 1
            self._drained(entry)

    def _drained(self, entry: _Entry) -> None:
        """Removes a folder that was taken over, if this was its last post."""
        folder = entry.folder
        folder.posts -= 1
        if folder.posts == 0 and not folder.is_own and folder in self._folders:
            self._folders.remove(folder)
            _release(folder)


_open: weakref.WeakSet[Spool] = weakref.WeakSet()


def _after_fork() -> None:
    for spool in list(_open):
        for folder in spool._folders:  # pyright: ignore[reportPrivateUsage]
            # The lock stays with the parent process, which has the descriptor as well.
            os.close(folder.lock)
        spool._forget()  # pyright: ignore[reportPrivateUsage]


def _at_exit() -> None:
    for spool in list(_open):
        spool.close()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _is_away(error: errors.ForebayError) -> bool:
    """Whether the service could not be reached, or may have taken the post without an answer."""
    if isinstance(error, errors.CertificateRefused):
        return False
    if isinstance(error, errors.UnexpectedAnswer):
        return error.status in (502, 503, 504)
    return isinstance(error, errors.Unreachable | errors.Unavailable | errors.Cancelled)


def _asked_s(error: errors.ServiceError, otherwise: float) -> float:
    """Seconds for which a post waits after an error."""
    return float(min(error.retry_after_s or otherwise, ASKED_MAX_S))


def _receipt(item: Posted) -> Receipt:
    rollout_id = str(_get(item, "rollout_id"))
    return SpooledReceipt(
        policy=_get(item, "policy") or "default",
        rollout_id=rollout_id,
        group_id=_get(item, "group_id") or rollout_id,
        execution_id=_get(item, "execution_id"),
        verdict=cast("Any", "spooled"),
        duplicate=False,
        warnings=[],
        group=ReceiptGroup(state=cast("Any", "spooled"), arrived=0, size=_get(item, "group_size") or 0),
    )


def _get(item: Posted, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name)


def _with(item: Posted, **fields: Any) -> Posted:
    return replace(item, **fields) if isinstance(item, Trajectory) else {**item, **fields}


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path


def _release(folder: _Folder) -> None:
    """Lets another process take the folder over, or removes it if it is empty."""
    if not any(folder.path.glob("*" + ENDING)):
        with contextlib.suppress(OSError):
            (folder.path / SERVICE).unlink(missing_ok=True)
            # The lock goes last, so that no process finds the folder unlocked before it is empty.
            (folder.path / LOCK).unlink(missing_ok=True)
            folder.path.rmdir()
    os.close(folder.lock)
