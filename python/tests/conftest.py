"""A real service for the tests: one for all, and others that a test may start and kill."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stub import Stub
from support import REPOSITORY

import forebay


def pytest_configure() -> None:
    if "FOREBAY_BIN" not in os.environ:
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        os.environ["FOREBAY_BIN"] = str(target / "debug" / "forebay")
    binary = os.environ["FOREBAY_BIN"]
    if not os.access(binary, os.X_OK):
        raise pytest.UsageError(f"there is no binary at {binary}: run `cargo build -p forebay`, or set FOREBAY_BIN")
    for variable in ("FOREBAY_URL", "FOREBAY_KEY", "FOREBAY_CA", "FOREBAY_IDENTITY"):
        os.environ.pop(variable, None)


@pytest.fixture(scope="session")
def server() -> Iterator[forebay.Server]:
    """A service that all tests share, so a test uses policies of its own (`policy`)."""
    with forebay.Server() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[forebay.Server]:
    """A service of one test."""
    with forebay.Server() as server:
        yield server


@pytest.fixture
def fb(server: forebay.Server) -> Iterator[forebay.Client]:
    """A client of the shared service."""
    with server.client() as client:
        yield client


@pytest.fixture
def policy(fb: forebay.Client) -> str:
    """The name of a policy that no other test has; its rules are the defaults."""
    name = f"p-{uuid.uuid4().hex}"
    fb.put_policy(name, {})
    return name


@pytest.fixture
def stub() -> Iterator[Callable[..., Stub]]:
    """Starts servers that give the answers which the test wrote."""
    stubs: list[Stub] = []

    def start(*answers: bytes | str) -> Stub:
        stubs.append(Stub(*answers))
        return stubs[-1]

    yield start
    for started in stubs:
        started.close()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, own_server: forebay.Server) -> Iterator[Any]:
    """Loads programs of examples/, by name."""
    # It needs the package `openai`, which the environments of other tests lack.
    from examples_support import Example

    # The program imports its world by name.
    monkeypatch.delitem(sys.modules, "world", raising=False)
    with own_server.client() as fb:
        yield lambda name, profile=None: Example(name, fb, monkeypatch, profile)
    sys.modules.pop("world", None)
