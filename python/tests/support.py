"""What several files of tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stub import Stub

import forebay

REPOSITORY = Path(__file__).resolve().parents[2]

NO_PAUSES = forebay.types.Retry(first_pause_s=0.0, pause_max_s=0.0)
"""The usual number of attempts, without waiting between them."""


def client_of(stub: Stub, **options: Any) -> forebay.Client:
    """A client that makes no call of its own accord."""
    return forebay.Client(stub.url, check_version=False, **{"retry": NO_PAUSES, **options})
