"""The bodies of posts: as JSON, compressed if they are large, or as an Arrow stream, which is faster to write."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from . import _arrow, _zstd, errors
from ._http import ARROW, JSON, Call, json_body

Compression = Literal["auto", "zstd", "gzip", "none"]
"""How large posts are compressed. `auto`: with zstd, if a library has it and the service is on another machine."""

ARROW_TOKENS_MIN = 50_000
"""From this number of tokens on, a post is written as Arrow if pyarrow is installed: it takes a fourth of the time."""

COMPRESSED_BYTES_MIN = 256 << 10
"""Smaller bodies are sent as they are."""

GZIP_LEVEL = 1

PLACE = "/trajectories"


def check(compression: str) -> None:
    """Refuses a kind of compression that is not known, or that no installed library has."""
    known = get_args(Compression)
    if compression not in known:
        raise errors.ConfigurationError(f"`compression` is {compression!r}, but must be one of {', '.join(known)}")
    if compression == "zstd" and _zstd.compressor() is None:
        raise errors.ConfigurationError(
            "`compression` is 'zstd', but no library that has it is installed: install zstandard or pyarrow"
        )


def call(trajectory: Any, *, is_bundle: bool, compression: Compression, is_local: bool) -> Call:
    """The call that posts a trajectory, or a bundle of them."""
    trajectories: Sequence[Any] = trajectory if is_bundle else (trajectory,)
    pa = _arrow.pyarrow() if sum(map(_arrow.tokens_of, trajectories)) >= ARROW_TOKENS_MIN else None
    if pa is not None:
        try:
            body, media = _arrow.stream(pa, trajectories), ARROW
        except _arrow.Unsuitable:
            pass
        else:
            return _compressed(_post(body, media), compression, is_local)
    return json_call(trajectory, compression=compression, is_local=is_local)


def json_call(body: Any, *, compression: Compression, is_local: bool) -> Call:
    """The same as JSON."""
    return _compressed(_post(json_body(body, "POST", PLACE), JSON), compression, is_local)


def _post(body: bytes, media: str) -> Call:
    return Call(method="POST", path=PLACE, repeat=True, body=body, media=media)


def _compressed(call: Call, compression: Compression, is_local: bool) -> Call:
    body = call.body or b""
    if compression == "none" or len(body) < COMPRESSED_BYTES_MIN or (compression == "auto" and is_local):
        return call
    if compression == "gzip":
        return replace(call, body=gzip.compress(body, GZIP_LEVEL), encoding="gzip")
    compress = _zstd.compressor()
    return call if compress is None else replace(call, body=compress(body), encoding="zstd")
