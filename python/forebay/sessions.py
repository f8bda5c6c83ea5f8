"""Sessions: the service records the calls of an agent that is only given an address and a key."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._retry import Retry
from ._wire import Receipt, SavedState, SessionEnded, SessionFinish, SessionOpened, Status
from .errors import ForebayError, RecordError

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .client import Client

log = logging.getLogger("forebay")

REASON_BYTES_MAX = 256
"""The longest reason of an abort that the service takes."""

LAST_CALL_TIMEOUT_S = 5.0
"""How long the abort of a session may take when the process is about to end."""


class Ending:
    """An open session and how it is to end, without the calls to the service."""

    def __init__(self, *, resume: bool = False) -> None:
        self.reward: float | None = None
        """The reward of every policy that is not in `rewards`. Set it before the end of the block, unless scores
        make it later."""
        self.rewards: dict[str, float] = {}
        """Rewards by policy."""
        self.reward_components: dict[str, float] = {}
        self.turn_rewards: dict[str, float] = {}
        """Rewards of calls, by the ids of their answers or by their numbers in the session."""
        self.turn_state_keys: dict[str, str] = {}
        """Names of the states in which calls were made, in the same way."""
        self.status: Status | None = None
        """How the execution ended. If it is not set: `completed`, or `truncated` if the session became full."""
        self.metadata: dict[str, Any] = {}
        self._opened: SessionOpened | None = None
        self._ended: SessionEnded | None = None
        self._resume = resume

    @property
    def opened(self) -> SessionOpened:
        """The service's answer to the request that opened the session."""
        if self._opened is None:
            raise RecordError("the session is not open: use it in an `async with` block")
        return self._opened

    @property
    def session_id(self) -> str:
        """The id of the session."""
        return self.opened.session_id

    @property
    def rollout_id(self) -> str:
        """The id of the rollout of each policy."""
        return self.opened.rollout_id

    @property
    def key(self) -> str:
        """The key for the calls of the agent. It can be used for nothing else."""
        return self.opened.key

    @property
    def attempt(self) -> int:
        """The attempt, from 1: with `resume=True`, how often the agent was started."""
        return self.opened.attempt

    @property
    def fence(self) -> int | None:
        """The attempt, if there may be others: what ends the session must not end a later one."""
        return self.attempt if self._resume or self.attempt > 1 else None

    @property
    def can_be_resumed(self) -> bool:
        """Whether an exception leaves the session as it is, so that the same block can go on with it."""
        return self._resume and self.attempt < self.opened.max_attempts

    @property
    def base_url(self) -> str:
        """The address for clients of OpenAI's APIs."""
        return self.opened.base_urls.openai

    @property
    def anthropic_url(self) -> str:
        """The address for clients of Anthropic's API."""
        return self.opened.base_urls.anthropic

    @property
    def environment(self) -> dict[str, str]:
        """The variables that agents in other processes read their address and key from."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
        }

    @property
    def ended(self) -> SessionEnded:
        """What became of the session; only after its end."""
        if self._ended is None:
            raise RecordError("the session has not ended: that happens at the end of its block")
        return self._ended

    @property
    def has_ended(self) -> bool:
        """Whether the session was finished or aborted through this object."""
        return self._ended is not None

    @property
    def receipts(self) -> list[Receipt]:
        """What the service decided about the rollout of each policy; only after the end."""
        return self.ended.receipts

    def ending(self) -> SessionFinish:
        """The session as one of several that are finished together."""
        return SessionFinish(
            session_id=self.session_id,
            reward=self.reward,
            rewards=self.rewards or None,
            reward_components=self.reward_components or None,
            turn_rewards=self.turn_rewards or None,
            turn_state_keys=self.turn_state_keys or None,
            status=self.status,
            metadata=self.metadata or None,
            attempt=self.fence,
        )

    def finished(self, ended: SessionEnded) -> None:
        """Keeps what became of the session."""
        self._ended = ended


class Session(Ending):
    """An open session. At the end of its `with` block it is finished with its reward, or aborted by an exception.

    With `resume=True`, an exception leaves it as it is while it may have further attempts. The same block begins the
    next one, and the calls that its agent makes again are answered with what was recorded.
    """

    def __init__(self, client: Client, opened: SessionOpened, *, resume: bool = False) -> None:
        super().__init__(resume=resume)
        self._client = client
        self._opened = opened
        self._lock = threading.Lock()

    def finish(self) -> SessionEnded:
        """Ends the session with its reward, if it has not ended. The end of the block does it."""
        with self._lock:
            if self._ended is None:
                (self._ended,) = self._client.finish_sessions([self.ending()])
            return self._ended

    def abort(self, reason: str, *, keep: bool = False) -> SessionEnded:
        """Ends the session without a reward, if it has not ended. Its calls are kept only if `keep` is true."""
        with self._lock:
            if self._ended is None:
                self._ended = self._client.abort_session(
                    self.session_id, reason=cut(reason), keep=keep or None, attempt=self.fence
                )
            return self._ended

    def save_state(self, content: bytes) -> SavedState:
        """Stores at most 1 MiB that the next attempt goes on from, if there is one."""
        return self._client.save_session_state(self.session_id, content, attempt=self.attempt)

    def saved_state(self) -> bytes | None:
        """What was stored last with `save_state`, by this attempt or an earlier one."""
        return self._client.get_session_state(self.session_id)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._ended is None and not self.can_be_resumed:
            abort_quietly(self._client, self.session_id, self.fence, error)


class AsyncSession(Ending):
    """`Session` for asyncio: `async with fb.session(...) as s`."""

    def __init__(self, client: AsyncClient, arguments: Mapping[str, Any], *, resume: bool = False) -> None:
        super().__init__(resume=resume)
        self._client = client
        self._arguments = arguments

    async def finish(self) -> SessionEnded:
        """Ends the session with its reward, if it has not ended. The end of the block does it."""
        if self._ended is None:
            (self._ended,) = await self._client.finish_sessions([self.ending()])
        return self._ended

    async def abort(self, reason: str, *, keep: bool = False) -> SessionEnded:
        """Ends the session without a reward, if it has not ended. Its calls are kept only if `keep` is true."""
        if self._ended is None:
            self._ended = await self._client.abort_session(
                self.session_id, reason=cut(reason), keep=keep or None, attempt=self.fence
            )
        return self._ended

    async def save_state(self, content: bytes) -> SavedState:
        """Stores at most 1 MiB that the next attempt goes on from, if there is one."""
        return await self._client.save_session_state(self.session_id, content, attempt=self.attempt)

    async def saved_state(self) -> bytes | None:
        """What was stored last with `save_state`, by this attempt or an earlier one."""
        return await self._client.get_session_state(self.session_id)

    async def __aenter__(self) -> AsyncSession:
        sync, arguments, resume = self._client.sync, self._arguments, self._resume
        self._opened = await self._client.run(lambda: opened_session(sync, arguments, resume=resume))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.finish()
        elif self._ended is None and not self.can_be_resumed:
            sync, session_id, attempt = self._client.sync, self.session_id, self.fence
            await self._client.run(lambda: abort_quietly(sync, session_id, attempt, error))


def opened_session(client: Client, arguments: Mapping[str, Any], *, resume: bool) -> SessionOpened:
    """Opens a session. With `resume`, one that was opened before gets another attempt."""
    opened = client.open_session(**arguments)
    if not (resume and opened.duplicate):
        return opened
    return client.resume_session(opened.session_id, attempt=opened.attempt)


def finish_together(client: Client, sessions: Sequence[Ending]) -> list[SessionEnded]:
    """Ends several sessions in one commit."""
    for session in sessions:
        if session.has_ended:
            raise RecordError(f"the session {session.session_id} has ended already")
    ended = client.finish_sessions([session.ending() for session in sessions]) if sessions else []
    for session, end in zip(sessions, ended, strict=True):
        session.finished(end)
    return ended


def abort_quietly(client: Client, session_id: str, attempt: int | None, error: BaseException) -> None:
    """Aborts a session because of an exception. A failure is only logged, so that the exception goes on."""
    if not isinstance(error, Exception):
        # The process is about to end, for example by Ctrl-C.
        client = client.with_options(timeout_s=LAST_CALL_TIMEOUT_S, retry=Retry.none())
    try:
        client.abort_session(session_id, reason=cut(f"{type(error).__name__}: {error}"), attempt=attempt)
    except ForebayError as problem:
        log.warning("the session %s could not be aborted, so it ends when it expires: %s", session_id, problem)


def cut(reason: str, bytes_max: int = REASON_BYTES_MAX, absent: str = "aborted") -> str:
    """A reason as the service takes it: without control characters, not too long, and not empty."""
    plain = "".join(char if char.isprintable() else " " for char in reason)
    return plain.encode()[:bytes_max].decode(errors="ignore") or absent
