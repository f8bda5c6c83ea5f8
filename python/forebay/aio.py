"""The asynchronous client: the calls of `Client`, made on threads of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ._agents import AsyncAgentMethods
from ._bodies import Compression
from ._http import SILENCE_TIMEOUT_S, Cancellation, cancellable
from ._retry import Retry
from ._spool import BYTES_MAX, Spool
from ._threads import Threads
from .client import Client
from .versions import Version, follow_async

T = TypeVar("T")
P = ParamSpec("P")

ITEMS_AT_ONCE = 256
"""Items of an iterator that are fetched by one task of a thread."""

ROLLOUTS_AT_ONCE = 8
"""The same for rollouts, each of which may have megabytes."""


def _twin(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    """The asynchronous form of a call."""

    @functools.wraps(method)
    async def call(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(functools.partial(method, self.sync, *args, **kwargs))

    return call


def _twin_iterator(
    method: Callable[Concatenate[Client, P], Iterator[T]], items_at_once: int = ITEMS_AT_ONCE
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """The asynchronous form of a call that yields."""

    @functools.wraps(method)
    async def generate(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        items = method(self.sync, *args, **kwargs)
        try:
            while found := await self.run(lambda: list(islice(items, items_at_once))):
                for item in found:
                    yield item
        finally:
            # If the task is cancelled, its thread may still run the call; its connection is closed, which ends it.
            with contextlib.suppress(ValueError):
                cast("Any", items).close()

    return generate


class AsyncClient(AsyncAgentMethods):
    """`Client` for asyncio: the same calls with the same arguments, to be awaited, and the same configuration.

    If the task of a call is cancelled, its connection is closed, so that the service forgets a request that waits. It
    is then unknown whether the service has processed the request.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        ca: str | os.PathLike[str] | None = None,
        identity: str | os.PathLike[str] | None = None,
        timeout_s: float = SILENCE_TIMEOUT_S,
        retry: Retry | None = None,
        compression: Compression = "auto",
        check_version: bool = True,
        spool: str | os.PathLike[str] | None = None,
        spool_bytes_max: int = BYTES_MAX,
    ) -> None:
        self._start(
            Client(
                url,
                key,
                ca=ca,
                identity=identity,
                timeout_s=timeout_s,
                retry=retry,
                compression=compression,
                check_version=check_version,
                spool=spool,
                spool_bytes_max=spool_bytes_max,
            )
        )

    def _start(self, sync: Client) -> None:
        self.sync = sync
        """The synchronous client with the same connections."""
        self._threads = Threads("forebay-async")

    async def run(self, call: Callable[[], T]) -> T:
        """Runs a function that makes calls of `sync` on a thread; its calls end when the task is cancelled."""
        cancellation = Cancellation()

        def scoped() -> T:
            with cancellable(cancellation):
                return call()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, scoped)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def with_options(self, *, timeout_s: float | None = None, retry: Retry | None = None) -> AsyncClient:
        """Returns a client with other timeouts or another rule of repeats, which shares the connections."""
        other = type(self).__new__(type(self))
        other._start(self.sync.with_options(timeout_s=timeout_s, retry=retry))
        return other

    @property
    def spool(self) -> Spool | None:
        """The posts that wait on disk for the service, if the client has a spool."""
        return self.sync.spool

    @property
    def url(self) -> str:
        """The address of the service."""
        return self.sync.url

    async def close(self) -> None:
        """Closes the connections. Calls that still wait end with `errors.Cancelled`."""
        # With a spool this may take some seconds.
        await asyncio.get_running_loop().run_in_executor(self._threads, self.sync.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.sync)[1:]}"

    def __getstate__(self) -> Any:
        return self.sync

    def __setstate__(self, sync: Client) -> None:
        self._start(sync)

    def versions(self, policy: str = "default") -> AsyncIterator[Version]:
        """Yields the newest weight version whenever it is another one, for ever; at first the current one.

        While no version has been published, nothing is yielded. A resume or a reset may lower the version. All
        followers of a policy in a process share one long poll, which goes on while the service cannot be reached.
        """
        return follow_async(self.sync, self.sync.config, policy)

    post = _twin(Client.post)
    post_body = _twin(Client.post_body)
    post_many = _twin_iterator(Client.post_many)
    import_ = _twin(Client.import_)
    admit = _twin(Client.admit)
    get_trajectory = _twin(Client.get_trajectory)
    get_content = _twin(Client.get_content)
    list_trajectories = _twin_iterator(Client.list_trajectories)
    list_groups = _twin_iterator(Client.list_groups)
    close_group = _twin(Client.close_group)
    discard_group = _twin(Client.discard_group)

    score = _twin(Client.score)
    score_all = _twin(Client.score_all)
    scores = _twin(Client.scores)
    lease_scores = _twin(Client.lease_scores)
    extend_scores = _twin(Client.extend_scores)
    retry_scores = _twin(Client.retry_scores)

    put_suite = _twin(Client.put_suite)
    evals = _twin(Client.evals)
    wait_evals = _twin(Client.wait_evals)
    eval_tasks = _twin_iterator(Client.eval_tasks)

    upload = _twin(Client.upload)
    upload_column = _twin(Client.upload_column)
    put_column = _twin(Client.put_column)
    put_media = _twin(Client.put_media)
    get_media = _twin(Client.get_media)

    open_session = _twin(Client.open_session)
    resume_session = _twin(Client.resume_session)
    save_session_state = _twin(Client.save_session_state)
    get_session_state = _twin(Client.get_session_state)
    get_session = _twin(Client.get_session)
    list_sessions = _twin_iterator(Client.list_sessions)
    list_session_turns = _twin(Client.list_session_turns)
    finish_session = _twin(Client.finish_session)
    finish_sessions = _twin(Client.finish_sessions)
    abort_session = _twin(Client.abort_session)

    lease = _twin(Client.lease)
    get_batch = _twin(Client.get_batch)
    list_batches = _twin_iterator(Client.list_batches)
    samples = _twin(Client.samples)
    samples_arrow = _twin(Client.samples_arrow)
    extend = _twin(Client.extend)
    ack = _twin(Client.ack)
    nack = _twin(Client.nack)
    readmit = _twin(Client.readmit)
    checkpoint = _twin(Client.checkpoint)
    resume = _twin(Client.resume)
    publish = _twin(Client.publish)
    reset = _twin(Client.reset)

    get_policy = _twin(Client.get_policy)
    wait_version = _twin(Client.wait_version)
    version = _twin(Client.version)
    get_tokenizer = _twin(Client.get_tokenizer)
    list_overview = _twin_iterator(Client.list_overview)
    get_why = _twin(Client.get_why)
    why = _twin(Client.why)
    get_series = _twin(Client.get_series)
    list_steps = _twin_iterator(Client.list_steps)
    get_step_buckets = _twin(Client.get_step_buckets)
    list_journal = _twin_iterator(Client.list_journal)
    list_policies = _twin_iterator(Client.list_policies)
    put_policy = _twin(Client.put_policy)
    patch_policy = _twin(Client.patch_policy)
    export = _twin_iterator(Client.export, ROLLOUTS_AT_ONCE)
    filter_variables = _twin(Client.filter_variables)
    try_filters = _twin(Client.try_filters)
    whoami = _twin(Client.whoami)
    stats = _twin(Client.stats)
    create_key = _twin(Client.create_key)
    list_keys = _twin_iterator(Client.list_keys)
    revoke_key = _twin(Client.revoke_key)
    health = _twin(Client.health)
    is_ready = _twin(Client.is_ready)
    metrics = _twin(Client.metrics)
    openapi = _twin(Client.openapi)
