"""Finds the `forebay` binary, and starts a service for tests and notebooks."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .client import Client
from .errors import ConfigurationError, ForebayError

READY_S = 60.0
"""How long a service may take to start, by default. It opens its database first."""

STOP_S = 15.0
"""How long a service may take to finish its requests when it is stopped, before it is killed."""

POLL_S = 0.02

HANDSHAKE_S = 5.0
"""How long a service that is ready may take to greet a connection."""


class ServerError(ForebayError):
    """The service did not start. The message has the end of its log."""


def find_binary() -> str:
    """Returns the path of the `forebay` binary: that of `FOREBAY_BIN`, of the installed package, or of the `PATH`."""
    named = os.environ.get("FOREBAY_BIN")
    if named:
        if not os.access(named, os.X_OK):
            raise ConfigurationError(f"FOREBAY_BIN is {named}, which is not a program")
        return named
    for folder in _script_folders():
        candidate = Path(folder) / "forebay"
        if os.access(candidate, os.X_OK) and not candidate.is_dir():
            return str(candidate)
    found = shutil.which("forebay")
    if found:
        return found
    raise ConfigurationError(
        "the forebay binary is not installed. The package for this platform has none "
        f"({sysconfig.get_platform()}): install it on Linux with glibc 2.34 or newer on x86-64, build it with "
        "`cargo build --release -p forebay`, or name a binary in FOREBAY_BIN. The client needs no binary: give the "
        "address of a service that runs elsewhere (FOREBAY_URL)"
    )


class Server:
    """A service on this machine, which is started with the `with` block and stopped at its end.

    ```python
    with forebay.Server() as server, server.client() as fb:
        fb.post(...)
    ```

    Without a `database` the data is in memory and gone at the end. It listens on a free port of 127.0.0.1.
    """

    def __init__(
        self,
        *,
        database: str = "sqlite::memory:",
        listen: str = "127.0.0.1:0",
        config: str | os.PathLike[str] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        binary: str | os.PathLike[str] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self._database = database
        self._listen = listen
        self._config = config
        self._arguments = arguments
        self._environment = environment or {}
        self._binary = binary
        self._ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._log: IO[bytes] | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """The address of the service, e.g. `http://127.0.0.1:43215`."""
        if self._url is None:
            raise ServerError("the server is not running: call start(), or use it in a `with` block")
        return self._url

    @property
    def pid(self) -> int:
        """The process of the service."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def client(self, key: str | None = None, **options: Any) -> Client:
        """Returns a client of this service. Options are those of `Client`, e.g. `ca` if the service has `[tls]`."""
        return Client(self.url, key, **options)

    def start(self) -> Server:
        """Starts the service, and returns when it accepts requests."""
        if self._process is not None:
            raise ServerError("the server is running already")
        binary = os.fspath(self._binary) if self._binary is not None else find_binary()
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-")
        folder = Path(self._folder.name)
        port_file = folder / "address"
        command = [
            binary,
            "serve",
            "--listen",
            self._listen,
            "--database",
            self._database,
            "--port-file",
            str(port_file),
        ]
        if self._config is not None:
            command += ["--config", os.fspath(self._config)]
        command += self._arguments
        # What the caller's environment says about another service must not change this one.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        self._log = (folder / "log").open("wb")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**inherited, **self._environment},
            )
            address = self._await_address(port_file)
            is_configured = self._config or self._arguments or self._environment
            self._url = f"{_scheme(address) if is_configured else 'http'}://{address}"
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stops the service, and waits until it has ended."""
        process, self._process, self._url = self._process, None, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """Ends the service as a crash would (SIGKILL). Its database stays as it is, unless it is temporary."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.stop()

    def log(self) -> str:
        """Returns what the service has logged."""
        if self._folder is None:
            return ""
        return (Path(self._folder.name) / "log").read_text("utf-8", "replace")

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await_address(self, port_file: Path) -> str:
        process = self._process
        assert process is not None
        end = time.monotonic() + self._ready_s
        while time.monotonic() < end:
            # The service renames the finished file into place when it accepts requests.
            if port_file.exists():
                return port_file.read_text().strip()
            if process.poll() is not None:
                raise ServerError(f"the service ended with status {process.returncode}:\n{self._tail()}")
            time.sleep(POLL_S)
        raise ServerError(f"the service was not ready after {self._ready_s:.0f} s:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-20:])


def _scheme(address: str) -> str:
    """Whether a service has `[tls]` in its configuration: it greets a connection in TLS, or closes it."""
    host, _, port = address.rpartition(":")
    # The certificate does not matter here. Clients check it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_S) as plain,
            context.wrap_socket(plain) as _,
        ):
            return "https"
    except OSError:
        return "http"


def _script_folders() -> Iterator[str]:
    """Where installers put the programs of a package, the most likely place first."""
    yield sysconfig.get_path("scripts")
    # `pip install --prefix` and `--target`: relative to this file.
    package = Path(__file__).resolve().parent
    yield str(package.parents[2] / "bin") if len(package.parents) > 2 else ""
    yield str(package.parent / "bin")
    user = sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))
    yield user
    yield str(Path(sys.prefix) / "bin")
