"""Repeats calls of programs that run for days, beyond the client's own repeats, while the service cannot be reached."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from . import errors

T = TypeVar("T")

log = logging.getLogger("forebay")

POLL_S = 30.0
"""How long one request waits for a batch or for work. It is shorter than the silence that proxies allow."""

PATIENCE_S = 900.0
"""How long a call is repeated while the service cannot be reached, by default."""

PAUSE_MAX_S = 10.0


def patiently(call: Callable[[], T], patience_s: float, pause: Callable[[float], object] = time.sleep) -> T:
    """Makes a call, and repeats it for `patience_s` while the service cannot be reached."""
    end: float | None = None
    pause_s = 1.0
    while True:
        try:
            return call()
        except errors.ForebayError as error:
            now = time.monotonic()
            end = end or now + patience_s
            if not _may_pass(error) or now + pause_s > end:
                raise
            log.warning("the call is repeated: %s", error)
        pause(pause_s * random.random())
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _may_pass(error: errors.ForebayError) -> bool:
    """Whether the error may be over soon: the service is away, or something else answers in its place."""
    if isinstance(error, errors.CertificateRefused):
        return False
    if isinstance(error, errors.Unreachable | errors.Unavailable):
        return True
    return isinstance(error, errors.UnexpectedAnswer) and error.status is not None and error.status >= 500
