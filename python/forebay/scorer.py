"""The scorer's side: work that is leased item by item, kept alive, and settled by scores or given back.

An item whose scorer dies is given to the next one when its lease ends, and what the first one sends later is refused.
So no item is lost, and none is scored twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any, Literal, TypeVar, cast, overload

from . import errors
from ._heartbeat import WorkHeartbeats
from ._http import Cancellation, cancellable
from ._patience import PATIENCE_S, POLL_S, patiently
from ._threads import Threads
from ._uuid import uuid7
from ._wire import ScoreInclude, ScoreItem, ScoreItemRollout, ScoreReceipt, ScoreRequest, ScoreWorkPer
from .aio import AsyncClient
from .client import Client
from .sessions import cut

T = TypeVar("T")

log = logging.getLogger("forebay")

REASON_BYTES_MAX = 1_024
"""The longest reason of a failure that the service takes."""

TTL_S = 60
"""How long a lease lasts that nobody extends. Scorers extend theirs, so a judgement may take longer."""

SCORES_AT_ONCE = 256
"""The most scores of one post."""

NAMED_MAX = 5
"""How many rollouts an error names."""

Scores = float | Mapping[str, float]
"""The score of a rollout, or those of a group's rollouts by `rollout_id`."""

Rationales = str | Mapping[str, str]
"""Why, in the same way."""

Ended = Literal["scored", "failed", "lost"]
"""How the lease of an item ended."""


class Leased:
    """An item of work, without the calls that end its lease."""

    def __init__(self, held: Held) -> None:
        self._held = held

    @property
    def descriptor(self) -> ScoreItem:
        """Everything that the service says about the item."""
        return self._held.descriptor

    @property
    def name(self) -> str:
        """The name of the score."""
        return self.descriptor.name

    @property
    def policy(self) -> str:
        """The policy of the rollouts."""
        return self.descriptor.policy

    @property
    def per(self) -> ScoreWorkPer:
        """Whether the item is about one rollout or about a whole group."""
        return self.descriptor.per

    @property
    def group_id(self) -> str:
        """The group of the rollouts."""
        return self.descriptor.group_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.descriptor.attempt

    @property
    def max_attempts(self) -> int:
        """How many attempts there are."""
        return self.descriptor.max_attempts

    @property
    def rollouts(self) -> list[ScoreItemRollout]:
        """The rollout, or the kept and masked rollouts of the group, each with what the scorer includes."""
        return self.descriptor.rollouts

    @property
    def rollout(self) -> ScoreItemRollout:
        """The only rollout. An item about a group has none."""
        if self.per == "group":
            raise errors.ConfigurationError(f"{self._held.what} is about a whole group, so use `rollouts`")
        return self.rollouts[0]

    @property
    def ended(self) -> Ended | None:
        """How the lease ended; None while it lives, as far as is known."""
        return self._held.ended

    def is_lost(self) -> bool:
        """Whether the lease is lost. Then stop working on the item: its score would be refused."""
        return self._held.is_lost()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._held.what}: attempt {self.attempt} of {self.max_attempts}>"


class Item(Leased):
    """An item of work. Score it, or give it back with `fail`; other threads may do that, too.

    Its lease is extended until then, as long as anything refers to the item and its scorer is not closed.
    """

    @overload
    def score(self, value: float, rationale: str | None = None) -> ScoreReceipt: ...
    @overload
    def score(self, value: Mapping[str, float], rationale: Mapping[str, str] | None = None) -> list[ScoreReceipt]: ...
    def score(self, value: Scores, rationale: Rationales | None = None) -> ScoreReceipt | list[ScoreReceipt]:
        """Gives the score, which settles the item. The rationale says why, in at most 16 KiB.

        For a group both are mappings by `rollout_id`, and the scores are stored in one commit for each 256. Every
        rollout with the item's name in `scoring` needs one; those of the others are left out.

        `errors.LeaseLost` means that the item is no longer this scorer's, and `errors.NotFound` that its rollout is
        gone because the policy was reset. Nothing was stored; go on with the next item.
        """
        receipts = self._held.score(value, rationale)
        return receipts if self.per == "group" else receipts[0]

    def fail(self, reason: str) -> None:
        """Gives the item back because it could not be scored. It is leased again, until its attempts are used up.

        The reason is cut to 1,024 bytes. If the lease has ended already, nothing happens.
        """
        self._held.fail(reason)


class AsyncItem(Leased):
    """`Item` for asyncio: `score` and `fail` are awaited."""

    def __init__(self, client: AsyncClient, held: Held) -> None:
        super().__init__(held)
        self._client = client

    @overload
    async def score(self, value: float, rationale: str | None = None) -> ScoreReceipt: ...
    @overload
    async def score(
        self, value: Mapping[str, float], rationale: Mapping[str, str] | None = None
    ) -> list[ScoreReceipt]: ...
    async def score(self, value: Scores, rationale: Rationales | None = None) -> ScoreReceipt | list[ScoreReceipt]:
        """Gives the score, which settles the item. See `Item.score`."""
        receipts = await self._client.run(lambda: self._held.score(value, rationale))
        return receipts if self.per == "group" else receipts[0]

    async def fail(self, reason: str) -> None:
        """Gives the item back because it could not be scored. See `Item.fail`."""
        await self._client.run(lambda: self._held.fail(reason))


class Scorer:
    """Leases work: scores with these names that rollouts of a policy lack, and that its rules let scorers lease.

    ```python
    for item in forebay.Scorer("judge", include=["messages"]):
        item.score(judge(item.rollout.messages))
    ```

    The loop waits for work and never ends. Several threads may iterate one scorer, and each gets other items. If an
    exception leaves the loop, its item is given to the next scorer when its lease ends; `item.fail` gives it back at
    once, as `run` does.

    A thread extends the leases of all items three times in each lease time. While the service cannot be reached, calls
    are repeated for `patience_s`.
    """

    def __init__(
        self,
        *names: str,
        policy: str = "default",
        client: Client | None = None,
        scorer: str | None = None,
        include: Sequence[ScoreInclude] = (),
        ttl_s: int | None = TTL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`scorer` is who gives the scores; without it, that is the id of the key, or `anonymous` without keys.
        `include` names what of the rollouts to send along: `messages`, `metadata`, `text` and `segments`. A lease lasts
        for `ttl_s`, with None for `lease.ttl_s` of the rules: so long the item of a scorer that died waits."""
        self.names = names
        """The scores that are leased."""
        self.policy = policy
        """The policy of the rollouts."""
        self.client = client or Client()
        """The client that the calls are made with."""
        self._work = Work(self.client, names, policy, scorer, include, ttl_s, patience_s)

    def __iter__(self) -> Iterator[Item]:
        """Yields one item after the other, until the scorer is closed. An item that is not settled when the next one is
        asked for is still held, because another thread may work on it."""
        # This iterator does not hold the item while it waits for the next one.
        return iter(self.lease, None)

    def lease(self, wait_s: float | None = None) -> Item | None:
        """Leases the next item, and waits until there is one. After `wait_s`, if given, the answer is None, and so it
        is when the scorer is closed.

        If an answer is lost, the repeated request gets the same item and lease.
        """
        held = self._work.lease(wait_s)
        return None if held is None else Item(held)

    def run(self, function: Callable[[Item], Scores | None], jobs: int = 1) -> None:
        """Calls a function with each item, on `jobs` threads, until the scorer is closed.

        What it returns is the score, or a mapping of scores for a group; or None, after it has settled the item itself.
        If it raises, the item is given back with the exception as the reason. An error of a call to the service ends
        the run, unless it says that the lease is lost.
        """

        def work() -> None:
            while (held := self._work.lease(None)) is not None:
                try:
                    outcome = function(Item(held))
                except Exception as error:
                    outcome = error
                held.settle(outcome)

        _check_jobs(jobs)
        # They do not keep a program alive that ends, for example by Ctrl-C.
        threads = Threads("forebay-scorer")
        workers = [threads.submit(work) for _ in range(jobs)]
        try:
            wait(workers, return_when=FIRST_EXCEPTION)
        finally:
            self.close()
        # What the others have begun is still scored.
        for worker in workers:
            worker.result()

    def close(self) -> None:
        """Ends the loops that wait for items, and stops extending leases. An item that is not settled can still be
        scored as long as its lease lasts, and is then given to the next scorer."""
        self._work.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Scorer of {self.policy}: {', '.join(self.names)}>"


class AsyncScorer:
    """`Scorer` for asyncio: `async for item in forebay.AsyncScorer("judge")`. Several tasks may iterate one scorer."""

    def __init__(
        self,
        *names: str,
        policy: str = "default",
        client: AsyncClient | None = None,
        scorer: str | None = None,
        include: Sequence[ScoreInclude] = (),
        ttl_s: int | None = TTL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """The arguments are those of `Scorer`, with an asynchronous client."""
        self.names = names
        """The scores that are leased."""
        self.policy = policy
        """The policy of the rollouts."""
        self.client = client or AsyncClient()
        """The client that the calls are made with."""
        self._work = Work(self.client.sync, names, policy, scorer, include, ttl_s, patience_s)

    async def __aiter__(self) -> AsyncIterator[AsyncItem]:
        """Yields one item after the other, until the scorer is closed."""
        while (item := await self.lease()) is not None:
            yield item
            # It must not be held while this waits for the next one.
            del item

    async def lease(self, wait_s: float | None = None) -> AsyncItem | None:
        """Leases the next item, and waits until there is one. See `Scorer.lease`."""
        held = await self._lease(wait_s)
        return None if held is None else AsyncItem(self.client, held)

    async def run(self, function: Callable[[AsyncItem], Awaitable[Scores | None]], jobs: int = 1) -> None:
        """Awaits a function with each item, in `jobs` tasks, until the scorer is closed. See `Scorer.run`."""

        async def work() -> None:
            while (held := await self._lease(None)) is not None:
                try:
                    outcome = await function(AsyncItem(self.client, held))
                except Exception as error:
                    outcome = error
                await self.client.run(functools.partial(held.settle, outcome))

        _check_jobs(jobs)
        workers = [asyncio.ensure_future(work()) for _ in range(jobs)]
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            self._work.close()
            # What the others have begun is still scored.
            await asyncio.wait(workers)
        finally:
            self._work.close()
            for worker in workers:
                worker.cancel()
        await asyncio.gather(*workers)

    async def close(self) -> None:
        """Ends the loops that wait for items, and stops extending leases. See `Scorer.close`."""
        self._work.close()

    async def __aenter__(self) -> AsyncScorer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncScorer of {self.policy}: {', '.join(self.names)}>"

    async def _lease(self, wait_s: float | None) -> Held | None:
        # If the task is cancelled when the answer is there already, nothing refers to the item, so that its lease ends.
        return await self.client.run(lambda: self._work.lease(wait_s))


class Work:
    """The calls of a scorer. Both kinds of scorers make them here, on whichever thread they are on."""

    def __init__(
        self,
        client: Client,
        names: Sequence[str],
        policy: str,
        scorer: str | None,
        include: Sequence[ScoreInclude],
        ttl_s: int | None,
        patience_s: float,
    ) -> None:
        if not names:
            raise errors.ConfigurationError("a scorer needs the names of the scores that it can give")
        self.client = client
        self.heartbeats = WorkHeartbeats(client, policy, ttl_s)
        self._ask = functools.partial(
            client.lease_scores, names, policy=policy, scorer=scorer, ttl_s=ttl_s, include=include
        )
        self._patience_s = patience_s
        self._is_closed = False
        # A dictionary, because threads add to it while another one lists it.
        self._polls: dict[Cancellation, None] = {}
        # Scorers and items hold this. When none is used any more, nothing extends the leases.
        weakref.finalize(self, self.heartbeats.stop)

    def lease(self, wait_s: float | None) -> Held | None:
        """Leases the next item. None after `wait_s`, or if the scorer is closed."""
        end = None if wait_s is None else time.monotonic() + wait_s
        while not self._is_closed:
            left_s = POLL_S if end is None else min(POLL_S, max(0.0, end - time.monotonic()))
            for descriptor in self._poll(int(left_s * 1_000)):
                held = Held(self, descriptor)
                if self._is_closed:
                    # Its lease was perhaps added after the others had been removed.
                    self.heartbeats.stop()
                    return None
                return held
            if end is not None and time.monotonic() >= end:
                return None
        return None

    def patiently(self, call: Callable[[], T]) -> T:
        """Repeats a call, beyond the client's own repeats, while the service cannot be reached."""
        with self._cancellable():
            return patiently(call, self._patience_s, self._pause)

    def close(self) -> None:
        self._is_closed = True
        for poll in list(self._polls):
            poll.cancel()
        self.heartbeats.stop()

    def _poll(self, wait_ms: int) -> list[ScoreItem]:
        """One long poll, which ends without an item if the scorer is closed meanwhile."""
        # The repeats of this request have the same id.
        ask = functools.partial(self._ask, wait_ms=wait_ms, request_id=uuid7())
        with self._cancellable() as poll:
            self._polls[poll] = None
            try:
                return [] if self._is_closed else patiently(ask, self._patience_s, self._pause)
            except errors.Cancelled:
                if not self._is_closed:
                    raise
                return []
            finally:
                self._polls.pop(poll, None)

    @contextlib.contextmanager
    def _cancellable(self) -> Generator[Cancellation]:
        """The calls and pauses in the block end together: with the client, or with the task that waits for them."""
        with self.client.cancellable() as cancellation, cancellable(cancellation):
            yield cancellation

    def _pause(self, seconds: float) -> None:
        with self.client.cancellable() as cancellation:
            cancellation.pause(seconds)


class Held:
    """The lease of an item, and the calls that end it."""

    def __init__(self, work: Work, descriptor: ScoreItem) -> None:
        # It is held, so that the lease is extended while the item is used.
        self._work = work
        self._lease = work.heartbeats.add(descriptor)
        self.descriptor = descriptor
        self.what = self._lease.what
        self.ended: Ended | None = None
        # Nobody can settle an item that nothing refers to, so that its lease must end.
        weakref.finalize(self, work.heartbeats.remove, descriptor.lease).atexit = False

    def is_lost(self) -> bool:
        return self.ended == "lost" or (self.ended is None and self._lease.is_lost)

    def score(self, value: Scores, rationale: Rationales | None) -> list[ScoreReceipt]:
        """Scores the item. The lease is extended until the answer arrives."""
        requests = self._requests(value, rationale)
        receipts: list[ScoreReceipt] = []
        try:
            # A group with more scores than one post may have is settled by the last part.
            for start in range(0, len(requests), SCORES_AT_ONCE):
                receipts += self._post(requests[start : start + SCORES_AT_ONCE])
        except (errors.LeaseLost, errors.NotFound):
            self._end("lost")
            raise
        self._end("scored")
        return receipts

    def fail(self, reason: str) -> None:
        """Gives the item back."""
        # Whatever becomes of the call, the work is not done here.
        self._work.heartbeats.remove(self.descriptor.lease)
        request = ScoreRequest(
            policy=self.descriptor.policy,
            rollout_id=self.descriptor.rollouts[0].rollout_id,
            name=self.descriptor.name,
            failed=cut(reason, REASON_BYTES_MAX, "failed"),
            lease=self.descriptor.lease,
        )
        try:
            self._post([request])
        except (errors.LeaseLost, errors.NotFound) as error:
            # A repeat after a lost answer is refused as well. In each case the item is not held here any more.
            log.info("%s is given back already: %s", self.what, error)
        self._end(self.ended or "failed")

    def settle(self, outcome: Scores | Exception | None) -> None:
        """Scores the item with what a function returned, or gives it back because of what it raised."""
        if isinstance(outcome, Exception):
            log.warning("%s is given back", self.what, exc_info=outcome)
            self.fail(f"{type(outcome).__name__}: {outcome}")
        elif outcome is not None:
            try:
                self.score(outcome, None)
            except (errors.LeaseLost, errors.NotFound) as error:
                log.warning("%s was scored in vain: %s", self.what, error)
            except (errors.ConfigurationError, errors.NotEncodableError) as error:
                self.settle(error)
        elif self.ended is None:
            self.settle(errors.ConfigurationError("the function has neither returned a score nor settled the item"))

    def _requests(self, value: Scores, rationale: Rationales | None) -> list[ScoreRequest]:
        """The scores of the rollouts that lack one."""
        item = self.descriptor
        is_group = item.per == "group"
        for kind, given in (("score", value), ("rationale", rationale)):
            if isinstance(given, Mapping) != is_group and (kind == "score" or given is not None):
                about, form = (
                    ("a whole group", "a mapping by rollout_id") if is_group else ("one rollout", "no mapping")
                )
                raise errors.ConfigurationError(f"{self.what} is about {about}, so its {kind} is {form}")
        ids = [rollout.rollout_id for rollout in item.rollouts]
        if is_group:
            values, why = cast("Mapping[str, float]", value), cast("Mapping[str, str]", rationale or {})
        else:
            values, why = dict.fromkeys(ids, cast("float", value)), dict.fromkeys(ids, cast("str", rationale))
        known = set(ids)
        if unknown := [rollout_id for rollout_id in (*values, *why) if rollout_id not in known]:
            raise errors.ConfigurationError(f"{self.what} is not about {_some(unknown)}")
        needed = [rollout.rollout_id for rollout in item.rollouts if item.name in rollout.scoring]
        if lacking := [rollout_id for rollout_id in needed if rollout_id not in values]:
            raise errors.ConfigurationError(f"the scores of {self.what} lack that of {_some(lacking)}")
        return [
            ScoreRequest(
                policy=item.policy,
                rollout_id=rollout_id,
                name=item.name,
                value=_number(values[rollout_id]),
                lease=item.lease,
                rationale=why.get(rollout_id),
            )
            for rollout_id in needed
        ]

    def _post(self, requests: Sequence[ScoreRequest]) -> list[ScoreReceipt]:
        return self._work.patiently(functools.partial(self._work.client.score_all, requests))

    def _end(self, how: Ended) -> None:
        self._work.heartbeats.remove(self.descriptor.lease)
        self.ended = how


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise errors.ConfigurationError(f"a score is a number, not {value!r}") from None


def _check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise errors.ConfigurationError(f"jobs must be at least 1, is {jobs}")


def _some(rollout_ids: Sequence[str]) -> str:
    """Some of the rollouts, for an error."""
    more = len(rollout_ids) - NAMED_MAX
    return ", ".join(rollout_ids[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
