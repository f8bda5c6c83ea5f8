"""What the clients offer to agents on top of the calls of the API: rollouts, bundles and sessions in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ._options import session_request
from ._wire import SessionEnded
from .bundle import AsyncBundle, Bundle
from .rollout import AsyncRollout, Rollout
from .sessions import AsyncSession, Session, finish_together, opened_session
from .state import State

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import RolloutOptions, SessionOptions
    from .aio import AsyncClient
    from .client import Client


class AgentMethods:
    """The methods of `Client` for agents."""

    def rollout(self, policy: str = "default", **options: Unpack[RolloutOptions]) -> Rollout:
        """Begins a rollout, which is recorded in a `with` block and posted at its end.

        The version of the policy is noted now, unless `policy_version` or an `admission` brings it. Further arguments
        are `rollout_id`, `group_id`, `group_size`, `data_pass` (the number of the pass over the data set, which is
        appended to both ids), `eval` and `task` (the suite and the task of a rollout that evaluates the policy and is
        not trained), `environment`, `execution_id`, `sampling`, `version_labels`, `model`, `keep_messages` and
        `metadata`: `types.RolloutOptions` says what they are.
        """
        return Rollout(cast("Client", self), policy, **options)

    def bundle(self, *, execution_id: str | None = None, state: State | None = None) -> Bundle:
        """Begins a bundle: the rollouts of one execution, which are posted together at the end of a `with` block.

        With a `state`, its value becomes durable together with the post.
        """
        return Bundle(cast("Client", self), execution_id=execution_id, state=state)

    def session(self, policy: str | None = None, **options: Unpack[SessionOptions]) -> Session:
        """Opens a session, in which the service records an agent's calls. It ends with a `with` block.

        Arguments are `models` (what the agent's model names stand for), `rollout_id`, `group_id`, `group_size`,
        `data_pass`, `eval` and `task` (as in `rollout`), `environment`, `execution_id`, `sampling`, `ttl_s`, `idle_s`,
        `max_calls`, `resume` (whether to go on with the session of this rollout if it is there) and `metadata`:
        `types.SessionOptions` says what they are.
        """
        client, resume = cast("Client", self), bool(options.get("resume"))
        return Session(client, opened_session(client, session_request(policy, options), resume=resume), resume=resume)

    def finish(self, sessions: Sequence[Session]) -> list[SessionEnded]:
        """Ends several sessions with their rewards in one commit: all of them or none."""
        return finish_together(cast("Client", self), sessions)


class AsyncAgentMethods:
    """The methods of `AsyncClient` for agents."""

    def rollout(self, policy: str = "default", **options: Unpack[RolloutOptions]) -> AsyncRollout:
        """A rollout, which begins with an `async with` block and is posted at its end. See `Client.rollout`."""
        return AsyncRollout(cast("AsyncClient", self), policy, **options)

    def bundle(self, *, execution_id: str | None = None, state: State | None = None) -> AsyncBundle:
        """A bundle, whose rollouts are posted together at the end of an `async with` block. See `Client.bundle`."""
        return AsyncBundle(cast("AsyncClient", self), execution_id=execution_id, state=state)

    def session(self, policy: str | None = None, **options: Unpack[SessionOptions]) -> AsyncSession:
        """A session, which is opened and ended by an `async with` block. See `Client.session`."""
        arguments, resume = session_request(policy, options), bool(options.get("resume"))
        return AsyncSession(cast("AsyncClient", self), arguments, resume=resume)

    async def finish(self, sessions: Sequence[AsyncSession]) -> list[SessionEnded]:
        """Ends several sessions with their rewards in one commit: all of them or none."""
        client = cast("AsyncClient", self)
        return await client.run(lambda: finish_together(client.sync, sessions))
