"""The warm start: a model learns demonstrations before it is trained by reward.

Demonstrations are posted to a policy of their own, and an ordinary trainer with the objective `sft` learns them. Its
last version is the model of the policy. A run that goes on does not repeat what is done.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from .. import Segment, Trajectory
from ..client import Client
from .output import Output
from .processes import Process, RunFailed, Supervisor
from .program import prompt
from .programs import warm_trainer
from .settings import Policy, Settings, Task, Tiny, Warm
from .tiny import Vocabulary

CHECKED_EVERY = 500
"""Demonstrations between two looks at the processes."""


def name_of(policy: Policy) -> str:
    """The policy that learns the demonstrations of a policy. Policies of one `count` may share it."""
    assert policy.warm is not None
    name = policy.name
    if policy.warm.shared:
        name = name.rpartition(".")[0] or name
    return f"{name}.warm"


def rules(warm: Warm) -> dict[str, Any]:
    """The rules of the policy that learns demonstrations: every demonstration is trained once, with equal weight."""
    return {
        "require": ["tokens"],
        "group": {"size": 1},
        "batch": {"groups": warm.batch},
        "advantage": "none",
        "loss_weighting": "token_mean",
        "settle": "ack",
        "backlog": {"max_ready_rollouts": warm.batch * (warm.steps + 1)},
        "retention": {"trained_s": 0, "settled_s": 0},
    }


def demonstrations(
    world: ModuleType, task: Task, vocabulary: Vocabulary, name: str, warm: Warm
) -> Iterator[Trajectory]:
    """The demonstrations of a warm start. Equal seeds give equal ones, with equal ids."""

    def put(prompt_name: str, **fields: object) -> str:
        return prompt(task, prompt_name, **fields)

    made: Iterator[list[dict[str, str]]] = world.demos(
        warm.demos, warm.right, random.Random(f"{warm.demos} {warm.seed}"), put
    )
    for number, messages in enumerate(itertools.islice(made, warm.batch * warm.steps)):
        tokens, mask = vocabulary.demonstration(messages)
        segment = Segment(tokens=tokens, loss_mask=mask)
        yield Trajectory(policy=name, rollout_id=f"demo-{number}", segments=[segment], reward=1.0)


class WarmStart:
    """The warm starts of all policies of a run, each done once."""

    def __init__(self, settings: Settings, output: Output, client: Client, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._output = output
        self._client = client
        self._say = say

    def run(
        self,
        supervisor: Supervisor,
        world: ModuleType,
        models: dict[str, Path],
        timeout_s: float,
    ) -> dict[str, Path]:
        """Returns the models of the policies after their warm start, given those before."""
        warms = {name_of(policy): policy for policy in self._settings.policies if policy.warm is not None}
        processes: list[Process] = []
        for name, policy in warms.items():
            warm = policy.warm
            assert warm is not None
            if self._model(name) is not None:
                continue
            self._client.put_policy(name, rules(warm))
            process = warm_trainer(name, warm, self._output, models[policy.name], self._client.url)
            processes.append(supervisor.start(process))
            self._say(
                f"{name}: {warm.steps} steps of {warm.batch} demonstrations, {warm.right:.0%} of them right on purpose"
            )
            alphabet = policy.model.alphabet if isinstance(policy.model, Tiny) else None
            vocabulary = Vocabulary(alphabet or world.ALPHABET)
            self._post(demonstrations(world, self._settings.task, vocabulary, name, warm), supervisor)
        supervisor.wait(lambda: all(process.is_done for process in processes), "the warm start", timeout_s)
        supervisor.drop(processes)
        return {
            policy.name: self._done(name_of(policy)) if policy.warm is not None else models[policy.name]
            for policy in self._settings.policies
        }

    def _post(self, trajectories: Iterator[Trajectory], supervisor: Supervisor) -> None:
        for line in self._client.post_many(trajectories):
            if line.problem is not None:
                raise RunFailed(f"a demonstration was refused: {line.problem}")
            if line.line % CHECKED_EVERY == 0:
                supervisor.check()

    def _model(self, name: str) -> Path | None:
        """The model of a warm start that is done."""
        marker = self._output.folder / "models" / f"{name}.json"
        return Path(json.loads(marker.read_text())["folder"]) if marker.exists() else None

    def _done(self, name: str) -> Path:
        """Notes that a warm start is done."""
        folder = self._model(name)
        if folder is not None:
            return folder
        status = self._client.get_policy(name)
        if status is None or status.version_uri is None:
            raise RunFailed(f"the trainer of {name} ended and published nothing")
        folder = Path(unquote(urlsplit(status.version_uri).path))
        self._output.write(f"models/{name}.json", json.dumps({"folder": str(folder)}))
        return folder
