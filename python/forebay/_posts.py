"""Trajectories as they are posted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ._uuid import uuid7
from ._wire import Trajectory

Posted = Trajectory | Mapping[str, Any]
"""A trajectory, as a dataclass or as the JSON object of the API."""


def identified(trajectory: Posted) -> Posted:
    """The trajectory with a `rollout_id`, by which the service recognises a repeat."""
    if isinstance(trajectory, Trajectory):
        return trajectory if trajectory.rollout_id is not None else replace(trajectory, rollout_id=uuid7())
    return trajectory if trajectory.get("rollout_id") is not None else {**trajectory, "rollout_id": uuid7()}
