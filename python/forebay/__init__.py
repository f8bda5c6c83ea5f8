"""Forebay: a durable buffer between LLM agents and the trainers that learn from them.

`Client` and `AsyncClient` have a method for each call of the API. `docs/python.md` of the repository is the guide.
"""

from __future__ import annotations

from . import errors as errors
from ._retry import Retry as Retry
from ._version import __version__ as __version__
from ._wire import Segment as Segment
from ._wire import Trajectory as Trajectory
from ._wire import Turn as Turn
from .aio import AsyncClient as AsyncClient
from .client import Client as Client
from .server import Server as Server
