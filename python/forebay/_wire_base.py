"""What the types in `_wire` have beyond the OpenAPI document, from which they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ToList(Protocol):
    """An array of numpy, a tensor of torch, or anything else with `tolist`."""

    def tolist(self) -> Any: ...


Ints = Sequence[int] | ToList
"""Token ids or a mask: a list, or anything with `tolist`."""

Floats = Sequence[float] | ToList
"""Numbers: a list, or anything with `tolist`."""

Logprobs = Sequence[float | None] | ToList
"""Log-probabilities, of which those are ignored whose mask is 0: they may be None, NaN or infinite."""


class MaybeSpooled:
    """A receipt is of the service, unless it says that the rollout is in a spool."""

    __slots__ = ()

    @property
    def spooled(self) -> bool:
        """Whether the rollout is only in the spool of this machine. Then `verdict` and `group.state` are `spooled`."""
        return False
