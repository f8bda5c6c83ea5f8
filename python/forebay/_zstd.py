"""Compresses with zstd, if any of the libraries that can is installed; the package depends on none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

LEVEL = 1
"""The fastest level: higher ones save little on token ids and nothing on log-probabilities."""


@cache
def compressor() -> Callable[[bytes], bytes] | None:
    """Returns the function that compresses, or None if there is no library."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            compress = importlib.import_module(name).compress
        except ImportError:
            continue
        return lambda data: compress(data, level=LEVEL)
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        pass
    else:
        return lambda data: zstandard.ZstdCompressor(level=LEVEL).compress(data)
    try:
        codec = importlib.import_module("pyarrow").Codec("zstd", compression_level=LEVEL)
    except (ImportError, ValueError):
        return None
    return lambda data: codec.compress(data, asbytes=True)
