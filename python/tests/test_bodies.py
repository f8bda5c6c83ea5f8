"""When posts are compressed, and with what."""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

import forebay
from forebay import _arrow, _bodies, _http, _wire, _zstd, errors

ZSTD_LIBRARIES = ("compression.zstd", "backports.zstd", "zstandard", "pyarrow")

ELSEWHERE = "buffer.example"


def is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forebay.Server]:
    """A service that has a name as a service on another machine has one."""
    config = tmp_path_factory.mktemp("remote") / "forebay.toml"
    config.write_text(f'[access]\nhosts = ["{ELSEWHERE}"]\n')
    with forebay.Server(config=config) as server:
        yield server


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[_http.Call]:
    """Resolves the name of the service, and notes the posts that are sent."""
    resolve, send, posts = socket.getaddrinfo, _http.Transport.send, list[_http.Call]()

    def resolved(host: Any, *more: Any, **how: Any) -> Any:
        return resolve("127.0.0.1" if host == ELSEWHERE else host, *more, **how)

    def noted(self: _http.Transport, call: _http.Call, **how: Any) -> _http.Answer:
        if call.path == _bodies.PLACE:
            posts.append(call)
        return send(self, call, **how)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(_http.Transport, "send", noted)
    return posts


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes only the given libraries importable."""

    def only(*names: str) -> None:
        for library in set(ZSTD_LIBRARIES) - set(names):
            monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]
        forget()

    def forget() -> None:
        _zstd.compressor.cache_clear()
        _arrow.pyarrow.cache_clear()

    yield only
    monkeypatch.undo()
    forget()


def rollout(tokens: int) -> dict[str, Any]:
    return {"reward": 1.0, "segments": [{"tokens": list(range(tokens)), "loss_mask": [1] * (tokens - 1)}]}


def post_and_read(fb: forebay.Client, given: dict[str, Any]) -> None:
    """Posts a rollout, and checks that the service delivers what was given."""
    fb.post(given)
    batch = fb.lease(wait_ms=10_000)
    assert batch is not None and batch.lease is not None
    (row,) = fb.samples(batch.batch_id)
    assert row.tokens == given["segments"][0]["tokens"]
    fb.ack(batch.batch_id, lease=batch.lease, step=1)
    fb.reset("default")


@pytest.mark.parametrize("library", list(filter(is_installed, ZSTD_LIBRARIES)))
@pytest.mark.parametrize("form", [_http.JSON, _http.ARROW])
def test_large_posts_to_another_machine_are_compressed_with_what_is_installed(
    remote: forebay.Server, bodies: list[_http.Call], installed: Any, library: str, form: str
) -> None:
    installed(library, *(["pyarrow"] if form == _http.ARROW else []))
    # Both are large enough to be compressed, and one is large enough for Arrow.
    tokens = _bodies.ARROW_TOKENS_MIN * 2 if form == _http.ARROW else _bodies.ARROW_TOKENS_MIN - 1
    with forebay.Client(remote.url.replace("127.0.0.1", ELSEWHERE)) as fb:
        post_and_read(fb, rollout(tokens))
        post_and_read(fb, rollout(10))
    large, small = bodies
    assert (large.media, large.encoding, small.encoding) == (form, "zstd", None)
    assert large.body is not None and large.body.startswith(b"\x28\xb5\x2f\xfd"), "the mark of zstd"


def test_posts_on_the_same_machine_are_not_compressed(remote: forebay.Server, bodies: list[_http.Call]) -> None:
    for host in ("127.0.0.1", "localhost", "127.1.2.3"):
        url = remote.url.replace("127.0.0.1", host)
        with forebay.Client(url, retry=forebay.types.Retry.none()) as fb:
            if host == "127.1.2.3":
                # Nothing listens there.
                with pytest.raises(errors.Unreachable):
                    fb.post(rollout(100_000))
            else:
                post_and_read(fb, rollout(100_000))
    assert [call.encoding for call in bodies] == [None] * 3


def test_without_a_library_posts_are_sent_as_they_are_unless_zstd_is_demanded(
    remote: forebay.Server, bodies: list[_http.Call], installed: Any
) -> None:
    installed()
    url = remote.url.replace("127.0.0.1", ELSEWHERE)
    with forebay.Client(url) as fb:
        post_and_read(fb, rollout(100_000))
    assert [(call.media, call.encoding) for call in bodies] == [(_http.JSON, None)]
    with pytest.raises(errors.ConfigurationError, match="'zstd', but no library.*zstandard"):
        forebay.Client(url, compression="zstd")
    with forebay.Client(url, compression="gzip") as fb:
        post_and_read(fb, rollout(100_000))
    assert bodies[1].encoding == "gzip"


def test_a_compression_that_is_not_known_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="'lz4', but must be one of auto, zstd, gzip, none"):
        forebay.Client(compression="lz4")  # type: ignore[arg-type]


def test_every_field_of_a_trajectory_has_a_column() -> None:
    """A large post with a field that has no column goes as JSON, which takes longer, and nothing else tells."""
    of_wire = {field.name for cls in (_wire.Trajectory, _wire.Segment, _wire.Sampling) for field in fields(cls)}
    columns = {*_arrow.ROLLOUT, *_arrow.SAMPLING, *_arrow.DOCUMENTS, *_arrow.UPLOADS, "versions"}
    columns |= {*_arrow.SEGMENT, *_arrow.TOKENS}
    # A row is a segment, and has the fields of `sampling` as columns. Trajectories with turns go as JSON.
    assert columns == of_wire - {"segments", "sampling", "turns"}
