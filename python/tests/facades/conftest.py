"""Tests of the facades with the clients of other projects. `make outside NAME=facades` runs them with their sources."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay


class Service:
    """A service with a facade, which can be killed and started again."""

    def __init__(self, folder: Path, protocol: str, rules: str) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        """The address of the facade."""
        config = folder / "forebay.toml"
        config.write_text(f'[facades]\n{protocol} = "127.0.0.1:{port}"\n[policy_defaults]\n{rules}\n')
        self.options: dict[str, Any] = {"database": f"sqlite:{folder / 'forebay.db'}", "config": config}
        self.server = forebay.Server(**self.options)

    def start(self) -> None:
        self.server = forebay.Server(**self.options)
        self.server.start()


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    """The protocol and the rules are the parameters of the fixture."""
    service = Service(tmp_path, *request.param)
    service.start()
    with urllib.request.urlopen(service.url + "/health") as answer:
        assert answer.status == 200
    yield service
    service.server.stop()
