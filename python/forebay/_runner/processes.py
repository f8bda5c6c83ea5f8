"""Keeps processes alive: starts them, starts them again when they end, kills them on request, and stops them in order.

All of it is done by one thread, which calls `Supervisor.check` often. Every process has a process group of its own, so
that Ctrl-C reaches only the runner, and ends when the runner is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ForebayError

PAUSES_S = (1.0, 2.0, 4.0)
"""Time before a process is started again, by how often that happened; the last one repeats."""

RESTARTS_MAX = 5
"""How often a service, an engine or a trainer may end by itself in one run. Then something is wrong with it."""

STOP_S = 20.0
"""How long a process may take to end after SIGTERM, before SIGKILL."""

POLL_S = 0.1

WORKS_AFTER_S = 30.0
"""A program of agents that ran for so long has found its packages, the service and its engines."""

LOG_LINE_CHARS = 300
"""How much of the last line of a process's log is shown when it ends."""

LOG_TAIL_BYTES = 2_000
"""How much of a log an error shows."""

PSS = re.compile(r"^Pss: +(\d+) kB$", re.MULTILINE)
"""The memory of a process in /proc/PID/smaps_rollup, in which a shared page counts in parts."""

_PR_SET_PDEATHSIG = 1


class RunFailed(ForebayError):
    """The run cannot go on. The message has the end of a log."""


@dataclass(kw_only=True)
class Process:
    """A process that is kept alive."""

    name: str
    kind: str
    """service, engine, trainer or agent: what `--chaos` names."""
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    ends: bool = False
    """Whether it is done when it ends with status 0. Others are started again."""
    restarts_max: int | None = RESTARTS_MAX
    works_after_s: float | None = None
    """It may end however often once it has run for so long."""
    restarts: int = 0
    kills: int = 0
    """How often `kill` ended it."""
    is_done: bool = False
    child: subprocess.Popen[bytes] | None = None
    began_at: float = 0.0
    begins_again_at: float | None = None
    was_killed: bool = False
    log_began: int = 0
    """How many bytes the log had when the process was started."""

    @property
    def is_running(self) -> bool:
        """Whether the process runs now."""
        return self.child is not None and self.child.poll() is None

    def tail(self, begin: int = 0) -> str:
        """The end of its log, or of what is in it behind so many bytes."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(begin, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def last_line(self) -> str:
        """The last line that it has written since it was started."""
        return self.tail(self.log_began).strip().rpartition("\n")[2][:LOG_LINE_CHARS]


class Supervisor:
    """The processes of a run, in the order in which they were started."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.processes: list[Process] = []
        self._say = say
        # Loaded before a fork, because a child may only call it.
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def start(self, process: Process) -> Process:
        """Starts a process, and keeps it alive from now on."""
        self.processes.append(process)
        self._spawn(process)
        return process

    def of_kind(self, kind: str) -> list[Process]:
        """The processes of a kind."""
        return [process for process in self.processes if process.kind == kind]

    def check(self) -> None:
        """Starts what has ended again. Raises `RunFailed` if a process ended too often."""
        now = time.monotonic()
        for process in self.processes:
            if process.is_done or process.is_running:
                continue
            if process.begins_again_at is None:
                self._ended(process, now)
            elif now >= process.begins_again_at:
                self._spawn(process)

    def memory(self) -> int | None:
        """Bytes of memory that the running processes have, in which a page that several share counts once.

        None if this system does not tell.
        """
        found: list[int] = []
        for process in self.processes:
            if process.child is not None and process.is_running:
                with contextlib.suppress(OSError):
                    rollup = Path(f"/proc/{process.child.pid}/smaps_rollup").read_text()
                    found += [int(kilobytes) * 1024 for kilobytes in PSS.findall(rollup)]
        return sum(found) or None

    def wait(self, until: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Waits until something holds, and keeps the processes alive meanwhile."""
        end = time.monotonic() + timeout_s
        while not until():
            self.check()
            if time.monotonic() > end:
                tails = "\n".join(f"{process.name}:\n{process.tail()}" for process in self.processes[-1:])
                raise RunFailed(f"{what} did not happen within {timeout_s:.0f} s\n{tails}")
            time.sleep(POLL_S)

    def kill(self, kind: str, choose: random.Random) -> Process | None:
        """Kills one process of a kind, as a crash would. It is started again and not counted."""
        running = [process for process in self.of_kind(kind) if process.is_running]
        if not running:
            return None
        process = choose.choice(running)
        process.was_killed = True
        process.kills += 1
        self._signal(process, signal.SIGKILL)
        return process

    def stop(self, kinds: Sequence[str]) -> None:
        """Stops the processes of these kinds, one kind after the other."""
        for kind in kinds:
            processes = self.of_kind(kind)
            for process in processes:
                process.is_done = True
                self._signal(process, signal.SIGTERM)
            end = time.monotonic() + STOP_S
            while any(process.is_running for process in processes) and time.monotonic() < end:
                time.sleep(POLL_S)
            for process in processes:
                # Also what the process has started, and left behind.
                self._signal(process, signal.SIGKILL)
                if process.child is not None:
                    process.child.wait()

    def drop(self, processes: Sequence[Process]) -> None:
        """Forgets processes that are done."""
        self.processes = [process for process in self.processes if process not in processes]

    def _spawn(self, process: Process) -> None:
        process.begins_again_at = None
        process.began_at = time.monotonic()
        process.log.parent.mkdir(parents=True, exist_ok=True)
        with process.log.open("ab") as log:
            process.log_began = log.tell()
            process.child = subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # One thread per process: small models are not faster with more, and the processes share the machine.
                env={**os.environ, "OMP_NUM_THREADS": "1", **process.environment},
                start_new_session=True,
                preexec_fn=self._end_with_parent,
            )

    def _end_with_parent(self) -> None:
        if self._libc is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def _ended(self, process: Process, now: float) -> None:
        status = process.child.returncode if process.child is not None else None
        self._signal(process, signal.SIGKILL)
        if process.was_killed:
            process.was_killed = False
            self._say(f"{process.name} was killed, and is started again")
            process.begins_again_at = now
            return
        if process.ends and status == 0:
            process.is_done = True
            return
        process.restarts += 1
        if process.works_after_s is not None and now - process.began_at >= process.works_after_s:
            process.restarts_max = None
        if process.restarts_max is not None and process.restarts > process.restarts_max:
            raise RunFailed(
                f"{process.name} ended {process.restarts} times, the last time with status {status}:\n" + process.tail()
            )
        pause_s = PAUSES_S[min(process.restarts, len(PAUSES_S)) - 1]
        self._say(f"{process.name} ended with status {status}, and is started again in {pause_s:.0f} s ({process.log})")
        if last := process.last_line():
            self._say(f"{process.name} wrote: {last}")
        process.begins_again_at = now + pause_s

    def _signal(self, process: Process, number: int) -> None:
        if process.child is None:
            return
        try:
            os.killpg(process.child.pid, number)
        except (ProcessLookupError, PermissionError):
            return
