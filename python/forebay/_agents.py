"""What the clients offer to agents on top of the calls of the API: rollouts, bundles and sessions in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ._answers import Labels
from ._wire import Admission, Sampling, SessionEnded, SessionModel
from .bundle import AsyncBundle, Bundle
from .rollout import AsyncRollout, Rollout, numbered
from .sessions import AsyncSession, Session, finish_together
from .state import State

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .client import Client


class AgentMethods:
    """The methods of `Client` for agents."""

    def rollout(
        self,
        policy: str = "default",
        *,
        rollout_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        epoch: int | None = None,
        environment: str | None = None,
        execution_id: str | None = None,
        policy_version: int | None = None,
        admission: Admission | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        version_labels: Labels | None = None,
        model: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Begins a rollout, which is recorded in a `with` block and posted at its end.

        The version of the policy is noted now, unless `policy_version` or an `admission` brings it. `epoch` is the
        number of the pass over the data set: it is appended to `group_id` and `rollout_id`, because every pass needs
        ids of its own. `version_labels` says what the labels of the engine's weights mean as versions, if they are not
        the numbers of the versions: a mapping, or a function that may return None. `model` is the name of the model in
        calls of `chat`, which is otherwise that of the policy.
        """
        return Rollout(
            cast("Client", self),
            policy,
            rollout_id=rollout_id,
            group_id=group_id,
            group_size=group_size,
            epoch=epoch,
            environment=environment,
            execution_id=execution_id,
            policy_version=policy_version,
            admission=admission,
            sampling=sampling,
            version_labels=version_labels,
            model=model,
            metadata=metadata,
        )

    def bundle(self, *, execution_id: str | None = None, state: State | None = None) -> Bundle:
        """Begins a bundle: the rollouts of one execution, which are posted together at the end of a `with` block.

        With a `state`, its value becomes durable together with the post.
        """
        return Bundle(cast("Client", self), execution_id=execution_id, state=state)

    def session(
        self,
        policy: str | None = None,
        *,
        models: Mapping[str, SessionModel | str | None] | None = None,
        rollout_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        epoch: int | None = None,
        environment: str | None = None,
        execution_id: str | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        ttl_s: int | None = None,
        idle_s: int | None = None,
        max_calls: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        """Opens a session, in which the service records an agent's calls. It ends with a `with` block.

        `models` says what the agent's model names stand for: the name of a policy, or None for a model that is not
        trained. `epoch` is appended to the ids as in `rollout`.
        """
        opened = cast("Client", self).open_session(
            policy,
            models=_models(models),
            rollout_id=numbered(rollout_id, epoch),
            group_id=numbered(group_id, epoch),
            group_size=group_size,
            environment=environment,
            execution_id=execution_id,
            sampling=_sampling(sampling),
            ttl_s=ttl_s,
            idle_s=idle_s,
            max_calls=max_calls,
            metadata=metadata,
        )
        return Session(cast("Client", self), opened)

    def finish(self, sessions: Sequence[Session]) -> list[SessionEnded]:
        """Ends several sessions with their rewards in one commit: all of them or none."""
        return finish_together(cast("Client", self), sessions)


class AsyncAgentMethods:
    """The methods of `AsyncClient` for agents."""

    def rollout(
        self,
        policy: str = "default",
        *,
        rollout_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        epoch: int | None = None,
        environment: str | None = None,
        execution_id: str | None = None,
        policy_version: int | None = None,
        admission: Admission | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        version_labels: Labels | None = None,
        model: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncRollout:
        """A rollout, which begins with an `async with` block and is posted at its end. See `Client.rollout`."""
        return AsyncRollout(
            cast("AsyncClient", self),
            policy,
            rollout_id=rollout_id,
            group_id=group_id,
            group_size=group_size,
            epoch=epoch,
            environment=environment,
            execution_id=execution_id,
            policy_version=policy_version,
            admission=admission,
            sampling=sampling,
            version_labels=version_labels,
            model=model,
            metadata=metadata,
        )

    def bundle(self, *, execution_id: str | None = None, state: State | None = None) -> AsyncBundle:
        """A bundle, whose rollouts are posted together at the end of an `async with` block. See `Client.bundle`."""
        return AsyncBundle(cast("AsyncClient", self), execution_id=execution_id, state=state)

    def session(
        self,
        policy: str | None = None,
        *,
        models: Mapping[str, SessionModel | str | None] | None = None,
        rollout_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        epoch: int | None = None,
        environment: str | None = None,
        execution_id: str | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        ttl_s: int | None = None,
        idle_s: int | None = None,
        max_calls: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncSession:
        """A session, which is opened and ended by an `async with` block. See `Client.session`."""
        arguments = {
            "policy": policy,
            "models": _models(models),
            "rollout_id": numbered(rollout_id, epoch),
            "group_id": numbered(group_id, epoch),
            "group_size": group_size,
            "environment": environment,
            "execution_id": execution_id,
            "sampling": _sampling(sampling),
            "ttl_s": ttl_s,
            "idle_s": idle_s,
            "max_calls": max_calls,
            "metadata": metadata,
        }
        return AsyncSession(cast("AsyncClient", self), arguments)

    async def finish(self, sessions: Sequence[AsyncSession]) -> list[SessionEnded]:
        """Ends several sessions with their rewards in one commit: all of them or none."""
        client = cast("AsyncClient", self)
        return await client.run(lambda: finish_together(client.sync, sessions))


def _models(models: Mapping[str, SessionModel | str | None] | None) -> dict[str, SessionModel] | None:
    if models is None:
        return None
    return {
        name: stands_for if isinstance(stands_for, SessionModel) else SessionModel(policy=stands_for)
        for name, stands_for in models.items()
    }


def _sampling(sampling: Sampling | Mapping[str, Any] | None) -> Sampling | None:
    return Sampling(**sampling) if isinstance(sampling, Mapping) else sampling
