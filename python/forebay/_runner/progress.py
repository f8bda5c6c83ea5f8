"""How training goes: the steps of each trainer with their rewards and components, and whether the run has passed.

A trainer's own file has the rewards. Components are only in the rollouts, so those of the newest versions are exported
from the service now and then, also the ones that were dropped because nothing could be learned from them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..client import Client
from ..errors import ForebayError
from .settings import Pass, Settings

REFRESH_S = 10.0
"""Time between two exports, if they are fast."""

REFRESH_SHARE = 0.05
"""The share of the time that exports may take: the machine has other work."""

LATE_VERSIONS = 6
"""For how many versions after its own rollouts of a version may still arrive."""


Points = list[tuple[int, float]]
"""Steps that have a value, with it."""


@dataclass
class Curve:
    """The steps of one policy."""

    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    versions: dict[int, dict[str, tuple[float, int]]] = field(default_factory=dict[int, "dict[str, tuple[float, int]]"])
    """Sum and count of each component, by the version of the weights."""

    def series(self, name: str) -> Points:
        """The steps that have a value of a series, with it: the mean reward of all rollouts, or a component's mean
        over the rollouts of the version that the step began with."""
        points: Points = []
        for step in self.steps:
            if name == "reward":
                value = step.get("reward_all")
            else:
                total, count = self.versions.get(step["version"], {}).get(name, (0.0, 0))
                value = total / count if count else None
            if value is not None:
                points.append((step["step"], value))
        return points

    def components(self) -> list[str]:
        """The names of all components."""
        return sorted({name for version in self.versions.values() for name in version})


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps in a trainer's file, each once. The last line may be incomplete while it is written."""
    steps: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            report: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        steps[report["step"]] = report
    return [steps[step] for step in sorted(steps)]


def mean(values: Iterable[float]) -> float:
    """The mean, NaN of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else math.nan


class Ends(NamedTuple):
    """The means of the first and of the last steps of a series, and how many steps have a value."""

    first: float
    last: float
    steps: int

    @staticmethod
    def of(points: Points, window: int) -> Ends:
        """The means of so many steps."""
        values = [value for _, value in points]
        return Ends(mean(values[:window]), mean(values[-window:]), len(values))

    @staticmethod
    def mean(several: Iterable[Ends]) -> Ends:
        """The mean of several policies, with the steps of the one that has the fewest."""
        firsts, lasts, steps = zip(*several, strict=True)
        return Ends(mean(firsts), mean(lasts), min(steps))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A criterion for one policy, or for the mean of several."""

    series: str
    policy: str
    first: float
    last: float
    reward_first: float
    reward_last: float
    """The mean reward of the same steps. It shows whether the reward changes in the same way as the series."""
    steps: int
    wanted: str
    is_passed: bool


class Progress:
    """The curves of all trained policies."""

    def __init__(self, settings: Settings, folders: dict[str, Path], client: Client) -> None:
        self.curves = {name: Curve() for name in folders}
        self._settings = settings
        self._folders = folders
        self._client = client
        self._refresh_at = 0.0

    def refresh(self, *, now: bool = False) -> None:
        """Reads what is new. Components are read only now and then, unless `now` is set."""
        for name, folder in self._folders.items():
            self.curves[name].steps = read_steps(folder / "metrics.jsonl")
        started = time.monotonic()
        if not now and started < self._refresh_at:
            return
        for name, curve in self.curves.items():
            # A service that is being started again has the same rollouts a little later.
            try:
                self._read_components(name, curve)
            except ForebayError:
                continue
        took_s = time.monotonic() - started
        self._refresh_at = time.monotonic() + max(REFRESH_S, took_s / REFRESH_SHARE)

    def _read_components(self, name: str, curve: Curve) -> None:
        since = max([0, *(version - LATE_VERSIONS for version in curve.versions)])
        found: dict[int, dict[str, tuple[float, int]]] = {}
        for rollout in self._client.export(name, where=f"policy_version >= {since}"):
            version = found.setdefault(rollout.result.policy_version, {})
            for key, value in (rollout.trajectory.reward_components or {}).items():
                total, count = version.get(key, (0.0, 0))
                version[key] = (total + value, count + 1)
        curve.versions.update(found)

    def judged(self) -> list[Judged]:
        """The criteria, as they stand."""
        return [each for criterion in self._settings.passes for each in self._judge(criterion)]

    def is_passed(self) -> bool:
        """Whether there are criteria and all of them hold."""
        judged = self.judged()
        return bool(judged) and all(each.is_passed for each in judged)

    def lost(self) -> str | None:
        """Why a criterion can no longer hold, or None: what the first steps had does not change any more."""
        for criterion in self._settings.passes:
            if criterion.first_below is None:
                continue
            for each in self._judge(criterion):
                if each.steps >= criterion.window + LATE_VERSIONS and each.first >= criterion.first_below:
                    return (
                        f"{each.policy} cannot pass any more: {each.series} of its first {criterion.window} steps was "
                        f"{each.first:.3f}, and the criterion wants less than {criterion.first_below:g}. The task was "
                        "too easy for the model that training began with: make it harder, or leave `first_below` out"
                    )
        return None

    def _ends(self, name: str, criterion: Pass) -> tuple[Ends, Ends]:
        """The ends of the series that is judged, and those of the reward at the same steps."""
        points = self.curves[name].series(criterion.series)
        rewards = dict(self.curves[name].series("reward"))
        same = [(step, rewards[step]) for step, _ in points if step in rewards]
        return Ends.of(points, criterion.window), Ends.of(same, criterion.window)

    def _judge(self, criterion: Pass) -> list[Judged]:
        ends = [
            (name, *self._ends(name, criterion))
            for name in criterion.matches(self._settings.policies)
            if name in self.curves
        ]
        if criterion.of == "mean" and ends:
            ends = [(criterion.policy, Ends.mean(each for _, each, _ in ends), Ends.mean(each for *_, each in ends))]
        below = math.inf if criterion.first_below is None else criterion.first_below
        least, most, wanted = criterion.least, criterion.most, criterion.wanted
        if criterion.first_below is not None:
            wanted = f"from < {below:g} to {wanted}"
        return [
            Judged(
                series=criterion.series,
                policy=name,
                first=found.first,
                last=found.last,
                reward_first=reward.first,
                reward_last=reward.last,
                steps=found.steps,
                wanted=wanted,
                # The two windows must not be the same steps.
                is_passed=found.steps >= 2 * criterion.window and least <= found.last < most and found.first < below,
            )
            for name, found, reward in ends
        ]

    def line(self, name: str, waiting: str) -> str:
        """What a policy is at, for people."""
        curve = self.curves[name]
        if not curve.steps:
            return f"{name:<12} no step yet  {waiting}"
        last = curve.steps[-1]
        parts = [f"{name:<12} step {last['step']:5}"]
        for series in ("reward", *curve.components()):
            recent = mean(value for _, value in curve.series(series)[-10:])
            if not math.isnan(recent):
                parts.append(f"{series} {recent:.3f}")
        parts.append(f"staleness {last['staleness_mean']:.1f}")
        parts.append(f"waiting {100 * last['waiting_share']:.0f}%")
        return "  ".join([*parts, waiting])


def table(judged: list[Judged]) -> str:
    """The criteria, for people."""
    rows = [("series", "policy", "first", "last", "steps", "wanted", "")]
    for each in judged:
        mark = "passed" if each.is_passed else "not passed"
        rows.append(
            (each.series, each.policy, f"{each.first:.3f}", f"{each.last:.3f}", str(each.steps), each.wanted, mark)
        )
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows whose cells stand below each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
