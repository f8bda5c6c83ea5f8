"""Rollouts of one execution, posted together: all of them are stored, or none is."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

from ._wire import Receipt, Trajectory
from .errors import RecordError
from .rollout import AsyncRollout, Rollout, post_all_aborted, warn_without_reward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import BundledOptions
    from .aio import AsyncClient
    from .client import Client
    from .state import State

ROLLOUTS_MAX = 4096
"""The most trajectories of one bundle."""

NOT_POSTED = "the bundle has not been posted: that happens at the end of its block"


class Bundle:
    """The rollouts of one execution of several roles, in a `with` block. They are posted as one array at its end.

    If the block raises, all of them are posted with the status `aborted`. A single role that fails is `abort`ed by the
    program, and the others count. Rollouts may be added from several threads.
    """

    def __init__(self, client: Client, *, execution_id: str | None = None, state: State | None = None) -> None:
        self.execution_id = execution_id
        """The id of the execution. If it is None, the service makes one."""
        self.rollouts: list[Rollout] = []
        self._client = client
        self._state = state
        self._lock = threading.Lock()
        self._receipts: list[Receipt] | None = None

    def rollout(self, policy: str = "default", **options: Unpack[BundledOptions]) -> Rollout:
        """Begins a rollout of the bundle, with the arguments of `Client.rollout`."""
        rollout = Rollout(self._client, policy, bundle=self, execution_id=self.execution_id, **options)
        with self._lock:
            check_room(len(self.rollouts), self._receipts)
            self.rollouts.append(rollout)
        return rollout

    @property
    def receipts(self) -> list[Receipt]:
        """What the service decided about the rollouts, in the order in which they began; only after the post."""
        if self._receipts is None:
            raise RecordError(NOT_POSTED)
        return self._receipts

    def trajectories(self) -> list[Trajectory]:
        """The rollouts as they are posted."""
        return [rollout.trajectory() for rollout in self.rollouts]

    def post(self) -> list[Receipt]:
        """Posts the rollouts, if that has not happened. The end of the block does it."""
        with self._lock:
            if self._receipts is None:
                trajectories = self.trajectories()
                if not trajectories:
                    self._receipts = []
                elif self._state is not None:
                    self._receipts = self._state.post(self._client, trajectories)
                else:
                    self._receipts = self._client.post(trajectories)
                warn_without_reward(trajectories, self._receipts)
                hand_out(self.rollouts, self._receipts)
            return self._receipts

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.post()
            return
        trajectories = abort_all(self.rollouts, error)
        if self._state is not None:
            self._state.reload()
        if self._receipts is None and trajectories:
            self._receipts = post_all_aborted(self._client, error, trajectories)
            hand_out(self.rollouts, self._receipts or [])


class AsyncBundle:
    """`Bundle` for asyncio: `async with fb.bundle() as b`, and `r = await b.rollout(...)`."""

    def __init__(self, client: AsyncClient, *, execution_id: str | None = None, state: State | None = None) -> None:
        self.execution_id = execution_id
        """The id of the execution. If it is None, the service makes one."""
        self.rollouts: list[AsyncRollout] = []
        self._client = client
        self._state = state
        self._receipts: list[Receipt] | None = None

    def rollout(self, policy: str = "default", **options: Unpack[BundledOptions]) -> AsyncRollout:
        """Begins a rollout of the bundle when it is awaited, with the arguments of `AsyncClient.rollout`."""
        check_room(len(self.rollouts), self._receipts)
        rollout = AsyncRollout(self._client, policy, bundle=self, execution_id=self.execution_id, **options)
        self.rollouts.append(rollout)
        return rollout

    @property
    def receipts(self) -> list[Receipt]:
        """What the service decided about the rollouts, in the order in which they began; only after the post."""
        if self._receipts is None:
            raise RecordError(NOT_POSTED)
        return self._receipts

    def trajectories(self) -> list[Trajectory]:
        """The rollouts as they are posted."""
        return [rollout.trajectory() for rollout in self.rollouts]

    async def post(self) -> list[Receipt]:
        """Posts the rollouts, if that has not happened. The end of the block does it."""
        if self._receipts is None:
            trajectories = self.trajectories()
            state, sync = self._state, self._client.sync
            if not trajectories:
                self._receipts = []
            elif state is not None:
                self._receipts = await self._client.run(lambda: state.post(sync, trajectories))
            else:
                self._receipts = await self._client.run(lambda: sync.post(trajectories))
            warn_without_reward(trajectories, self._receipts)
            hand_out(self.rollouts, self._receipts)
        return self._receipts

    async def __aenter__(self) -> AsyncBundle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.post()
            return
        # A rollout that was never awaited has not begun, so it has no version, and nothing to be posted.
        self.rollouts = [rollout for rollout in self.rollouts if rollout.has_begun]
        trajectories = abort_all(self.rollouts, error)
        if self._state is not None:
            self._state.reload()
        if self._receipts is None and trajectories:
            sync = self._client.sync
            self._receipts = await self._client.run(lambda: post_all_aborted(sync, error, trajectories))
            hand_out(self.rollouts, self._receipts or [])


def check_room(count: int, receipts: list[Receipt] | None) -> None:
    """Refuses a further rollout of a bundle that is full or posted."""
    if receipts is not None:
        raise RecordError("the bundle has been posted already")
    if count >= ROLLOUTS_MAX:
        raise RecordError(f"a bundle has at most {ROLLOUTS_MAX} rollouts")


def hand_out(rollouts: list[Rollout] | list[AsyncRollout], receipts: list[Receipt]) -> None:
    """Gives each rollout its receipt."""
    for rollout, receipt in zip(rollouts, receipts, strict=False):
        rollout.posted(receipt)


def abort_all(rollouts: list[Rollout] | list[AsyncRollout], error: BaseException) -> list[Trajectory]:
    """Aborts the rollouts of a block that raised, and returns them as they are posted."""
    for rollout in rollouts:
        rollout.failed(error)
    return [rollout.trajectory() for rollout in rollouts]
