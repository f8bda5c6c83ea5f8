"""Forebay: a durable buffer between LLM agents and the trainers that learn from them.

`Client` and `AsyncClient` have a method for each call of the API. `docs/python.md` of the repository is the guide.
"""

from __future__ import annotations

from . import (
    columns,
    errors,
    types,
)
from ._runner.program import run
from ._version import __version__
from ._wire import (
    Segment,
    Trajectory,
)
from .aio import AsyncClient
from .batch import Batch
from .client import Client
from .rollout import Rollout
from .scorer import AsyncScorer, Scorer
from .server import Server
from .state import State
from .trainer import Trainer

__all__ = [
    "AsyncClient",
    "AsyncScorer",
    "Batch",
    "Client",
    "Rollout",
    "Scorer",
    "Segment",
    "Server",
    "State",
    "Trainer",
    "Trajectory",
    "__version__",
    "columns",
    "errors",
    "run",
    "types",
]
