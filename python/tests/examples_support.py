"""What tests of the programs of examples/ share: a program with its run file, and the rows that a trainer leases."""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import openai
import pytest
from support import REPOSITORY

import forebay
from forebay._runner import settings
from forebay._runner.program import Run
from forebay.testing import Answer, Engine, Request

Script = Callable[[Request], Answer | str]

EXAMPLES = REPOSITORY / "examples"

PRECISE = 1e-6
"""Advantages are compared with numbers of seven digits."""


class Example:
    """An example's program, with policies of its own names at the shared service."""

    def __init__(
        self, name: str, fb: forebay.Client, monkeypatch: pytest.MonkeyPatch, profile: str | None = None
    ) -> None:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        self.found = settings.read(EXAMPLES / f"{name}.toml", profile=profile)
        self.run = Run(self.found)
        self.program = importlib.import_module(name)
        self.fb = fb
        self.id = uuid.uuid4().hex

    def policy(self, name: str, groups: int, size: int) -> None:
        """Puts the rules of a policy with another size of groups and batches, so that a few rollouts are a batch."""
        policy = self.found.policy(name)
        self.fb.put_policy(
            name, {**policy.rules, "group": {**policy.rules["group"], "size": size}, "batch": {"groups": groups}}
        )

    def question(self, text: str, gold: str) -> Any:
        return self.run.world.Question(text, gold, self.id)

    def rows(self, policy: str) -> dict[str, Any]:
        """The rows of the next batch, by rollout."""
        batch = self.fb.lease(policy, wait_ms=10_000)
        assert batch is not None
        return {row.rollout_id: row for row in self.fb.samples(batch.batch_id)}


def client(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=engine.base_url, api_key="none", max_retries=0)


def chains_of(b: Any) -> list[list[Any]]:
    """The rollouts of each chain in order. Chains run in threads, so the bundle has them mixed."""
    chains: dict[int, list[Any]] = {}
    for rollout in b.rollouts:
        chains.setdefault(rollout.metadata["chain"], []).append(rollout)
    return list(chains.values())


def weights(rows: dict[str, Any]) -> list[float]:
    """The weights in the loss of the tokens of rows, each once, in order."""
    return sorted({round(row.loss_weight, 7) for row in rows.values()})


def in_turn(**answers: Iterable[Answer | str]) -> Script:
    """A script that gives the answers of a list, by the policy, in the order of the calls."""
    lists, lock = {name: iter(given) for name, given in answers.items()}, threading.Lock()

    def script(request: Request) -> Answer | str:
        with lock:
            return next(lists[request.model])

    return script


def advantages(rows: dict[str, Any]) -> list[tuple[float, float]]:
    """The reward and the advantage of each rollout of a group."""
    return sorted((round(row.reward, 6), row.advantage) for row in rows.values())


def assert_group(rows: dict[str, Any], expected: Iterable[tuple[float, float]]) -> None:
    """Compares rewards and advantages of the rollouts of one group."""
    found, expected = advantages(rows), sorted(expected)
    assert [reward for reward, _ in found] == pytest.approx([reward for reward, _ in expected])
    assert [each for _, each in found] == pytest.approx([each for _, each in expected], abs=PRECISE)


def of_group(rows: dict[str, Any], group_id: str) -> dict[str, Any]:
    return {rollout_id: row for rollout_id, row in rows.items() if row.group_id == group_id}
