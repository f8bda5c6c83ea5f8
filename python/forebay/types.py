"""The types of requests and answers, for annotations and for those who prefer classes to dictionaries.

They have the names of the schemas of the OpenAPI document, and `Retry` is the rule of repeats.
"""

from __future__ import annotations

from ._options import RolloutOptions as RolloutOptions, SessionOptions as SessionOptions
from ._retry import Retry as Retry
from ._wire import *  # noqa: F403
from ._wire_base import Floats as Floats, Ints as Ints, ToList as ToList
from .versions import Version as Version
