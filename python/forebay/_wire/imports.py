"""What became of imported documents."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ImportVerdicts:
    """Numbers of rollouts by verdict."""

    kept: int
    """Number of kept rollouts."""
    masked: int
    """Number of masked rollouts."""
    dropped: int
    """Number of dropped rollouts."""
    late: int
    """Number of rollouts whose group was already decided."""


@dataclass(slots=True, kw_only=True)
class ImportRefusal:
    """Why a document or a rollout was refused."""

    line: int
    """Line on which the document begins, counted from 1."""
    rollout_id: str | None = None
    """Id of the rollout, if the document could be read."""
    type: str
    """`invalid-document` if the document could not be read, otherwise the type of the problem with which the service
    refused the rollout, e.g. `rollout-conflict`."""
    pointer: str
    """JSON pointer: into the document if it could not be read, otherwise into the trajectory that was made of it."""
    detail: str
    """Description of the error."""


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """What became of the documents of one source."""

    file: str | None = None
    """The file; absent if the source was a body."""
    format: str
    """Name of the format."""
    documents: int
    """Number of documents that were read."""
    rollouts: int
    """Number of rollouts in them, without those of refused documents."""
    stored: int
    """Number of rollouts that were stored now."""
    duplicates: int
    """Number of rollouts that had been stored before and are the same."""
    verdicts: ImportVerdicts
    """The rollouts that were stored now, by verdict."""
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    """The rollouts that were stored now and are not kept, by reason."""
    notes: dict[str, int] = field(default_factory=dict[str, int])
    """What was left out of documents that were not refused, by a stable name."""
    refused: int
    """Number of documents that could not be read, and of rollouts that the service did not store."""
    refusals: list[ImportRefusal] = field(default_factory=list[ImportRefusal])
    """What was wrong, at most 100 entries."""
