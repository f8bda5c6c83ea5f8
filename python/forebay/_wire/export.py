"""Stored rollouts as they were posted, with what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from .ledger import RolloutState
from .trajectory import Trajectory, Verdict


@dataclass(slots=True, kw_only=True)
class ExportedRollout:
    """One line of an export: a rollout, and what became of it."""

    trajectory: Trajectory
    """The rollout as it can be posted again. Segments stand in the place of turns."""
    result: ExportResult
    """What became of the rollout."""


@dataclass(slots=True, kw_only=True)
class ExportResult:
    """What became of an exported rollout, as it was when its row was read."""

    run: int
    """Run of the policy."""
    verdict: Verdict
    """The decision of ingest."""
    reason: str | None = None
    """Name of the filter that matched, or a built-in code."""
    state: RolloutState
    """State."""
    advantage: float | None = None
    """Advantage; null until the group is decided."""
    step: int | None = None
    """Optimizer step that consumed the rollout."""
    policy_version: int
    """Weight version of the rollout: its oldest span with a trained token."""
    policy_version_assumed: bool
    """Whether that version was assumed, because the producer sent none."""
    received_at: str
    """Time of arrival."""
