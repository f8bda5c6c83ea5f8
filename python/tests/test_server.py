"""Finding the binary, starting it, and `python -m forebay`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support import REPOSITORY

import forebay
from forebay import errors
from forebay.server import ServerError, find_binary


def test_the_version_is_that_of_the_service() -> None:
    manifest = (REPOSITORY / "Cargo.toml").read_text().split("[workspace.package]")[1]
    assert re.search(r'version = "(.*)"', manifest)[1] == forebay.__version__  # type: ignore[index]


def test_a_server_runs_within_its_block() -> None:
    server = forebay.Server()
    with pytest.raises(ServerError, match="not running"):
        _ = server.url
    with server:
        client = server.client()
        assert client.is_ready()
        assert "serving" in server.log()
        with pytest.raises(ServerError, match="running already"):
            server.start()
    assert not client.is_ready()
    with server:
        assert server.client().is_ready()


def test_the_environment_of_the_caller_does_not_change_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CONFIG", "/nowhere/forebay.toml")
    monkeypatch.setenv("FOREBAY_LISTEN", "nonsense")
    with forebay.Server() as server:
        assert server.client().is_ready()


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    config = tmp_path / "forebay.toml"
    config.write_text("listening = 1\n")
    with pytest.raises(ServerError, match="(?s)ended with status.*listening"):
        forebay.Server(config=config).start()


def test_a_database_outlives_its_server(tmp_path: Path) -> None:
    database = f"sqlite:{tmp_path / 'forebay.db'}"
    for is_duplicate in (False, True):
        with forebay.Server(database=database) as server, server.client() as fb:
            receipt = fb.post({"rollout_id": "r", "reward": 1.0, "segments": [{"tokens": [1, 2], "loss_mask": [1]}]})
            assert receipt.duplicate == is_duplicate
            if is_duplicate:
                server.kill()


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose only folders of programs are empty."""
    monkeypatch.delenv("FOREBAY_BIN")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path / "scripts"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    return tmp_path


def test_the_binary_is_that_of_the_variable_the_package_or_the_path(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(folder: Path) -> str:
        folder.mkdir(exist_ok=True)
        (folder / "forebay").touch(0o755)
        return str(folder / "forebay")

    with pytest.raises(errors.ConfigurationError, match="FOREBAY_BIN.*FOREBAY_URL"):
        find_binary()
    on_path = program(nothing_installed)
    assert find_binary() == on_path
    of_package = program(nothing_installed / "scripts")
    assert find_binary() == of_package
    named = program(nothing_installed / "named")
    monkeypatch.setenv("FOREBAY_BIN", named)
    assert find_binary() == named
    monkeypatch.setenv("FOREBAY_BIN", named + "-not")
    with pytest.raises(errors.ConfigurationError, match="not a program"):
        find_binary()


def module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_module_is_the_program() -> None:
    found = module("--version")
    assert (found.returncode, found.stdout) == (0, f"forebay {forebay.__version__}\n")
    assert module("no-such-command").returncode == 2


def test_the_module_says_what_to_do_without_a_program() -> None:
    found = module("--version", FOREBAY_BIN="/nowhere/forebay")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("forebay: ") and "FOREBAY_BIN" in found.stderr
