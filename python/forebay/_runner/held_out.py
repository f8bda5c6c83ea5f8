"""A held-out suite: the program plays it with the last weights, and the end of the run is judged by its results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from ..client import Client
from .progress import columns
from .settings import Pass, Policy

SUITE = "held-out"

TASKS = 32
"""Questions of the suite. Of each, the program plays as many rollouts as in training."""

Z = 1.96
"""Standard errors to both sides that make an interval of 95%."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What the suite says of a series."""

    series: str
    policy: str
    mean: float
    low: float
    high: float
    """The interval of 95% over tasks, as in `GET /policies/{p}/evals`."""
    tasks: int
    wanted: str
    is_passed: bool
    """Whether the interval reaches what the criterion wants."""


def ids(client: Client, policies: Iterable[Policy]) -> set[str | None]:
    """The rollouts that have evaluated policies so far, in an earlier part of the run."""
    return {
        rollout.trajectory.rollout_id for policy in policies for rollout in client.export(policy.name, purpose="eval")
    }


def judge(client: Client, passes: Sequence[Pass], policies: Sequence[Policy], before: set[str | None]) -> list[HeldOut]:
    """The criteria about the end of a run, judged by the rollouts of the suite that came after `before`."""
    found = {policy.name: _by_task(client, policy.name, before) for policy in policies}
    return [each for criterion in passes for each in of_criterion(criterion, policies, found)]


Series = dict[str, list[float]]
"""The means of tasks, by series."""


def _by_task(client: Client, policy: str, before: set[str | None]) -> Series:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rollout in client.export(policy, purpose="eval"):
        sent = rollout.trajectory
        if sent.suite != SUITE or sent.rollout_id in before or rollout.result.verdict != "kept":
            continue
        for series, value in {"reward": sent.reward, **(sent.reward_components or {})}.items():
            if value is not None:
                values[series][sent.task or ""].append(value)
    return {series: [mean(of_task) for of_task in tasks.values()] for series, tasks in values.items()}


def of_criterion(criterion: Pass, policies: Sequence[Policy], found: dict[str, Series]) -> list[HeldOut]:
    """What the suite says of a criterion, for each policy or for the mean of all."""
    if criterion.last is None and criterion.last_below is None:
        return []
    names = [name for name in criterion.matches(policies) if name in found]
    each = {name: found[name].get(criterion.series, []) for name in names}
    if criterion.of == "mean":
        each = {criterion.policy: [value for means in each.values() for value in means]}
    return [_judged(criterion, name, means) for name, means in each.items()]


def _judged(criterion: Pass, name: str, means: list[float]) -> HeldOut:
    middle = mean(means) if means else math.nan
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    low, high = middle - Z * error, middle + Z * error
    return HeldOut(
        series=criterion.series,
        policy=name,
        mean=middle,
        low=low,
        high=high,
        tasks=len(means),
        wanted=criterion.wanted,
        is_passed=high >= criterion.least and low < criterion.most,
    )


def table(held_out: Sequence[HeldOut]) -> str:
    """The results, for people."""
    rows = [("held-out suite", "policy", "mean", "interval of 95%", "tasks", "wanted", "")]
    for each in held_out:
        mark = "passed" if each.is_passed else "not passed"
        interval = f"{each.low:.3f} to {each.high:.3f}"
        rows.append((each.series, each.policy, f"{each.mean:.3f}", interval, str(each.tasks), each.wanted, mark))
    return columns(rows)
