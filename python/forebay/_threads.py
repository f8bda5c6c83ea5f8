"""Threads for `AsyncClient`. Unlike those of `concurrent.futures` they do not keep a program alive that ends."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

IDLE_S = 10.0
"""How long a thread without work is kept."""

Work = Callable[[], None]


class Threads(Executor):
    """Runs each task on a thread that has nothing to do, and starts a thread if there is none.

    There are as many threads as calls that wait at the same time: a bound would let long polls block acks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._idle = 0
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs the function on a thread."""
        if self._process != os.getpid():
            # The threads belong to the parent process.
            self._forget()
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            has_idle = self._idle > 0
            if has_idle:
                self._idle -= 1
            # Under the lock, so that no thread ends between the decision and the arrival of its work.
            self._work.put(work)
        if not has_idle:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing: threads without work end by themselves."""

    def _run(self) -> None:
        waiting = self._work
        while True:
            try:
                work = waiting.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if waiting.empty():
                        self._idle -= 1
                        return
                continue
            work()
            del work
            with self._lock:
                self._idle += 1
