"""The built service until a block ends, a client of it, and the load of `forebay bench`."""

import http.client
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from . import FOREBAY

# How long a service may take to start and to stop. Both depend on what is in its database.
READY_S = 60
STOP_S = 120
POLL_S = 0.005

# Seconds after which a client opens a new connection. The service closes connections that are silent for ten seconds.
IDLE_S = 5


def environment():
    """Returns the environment without what it says about another service."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}


class Service:
    """The service on a new SQLite file or another database. Its folder is removed when the block ends."""

    def __init__(self, *arguments, database=None, binary=FOREBAY):
        self.arguments, self.database, self.binary = arguments, database, binary

    def __enter__(self):
        if not os.access(self.binary, os.X_OK):
            sys.exit(f"{self.binary} does not exist: `cargo build --release --bins` builds it")
        self.temporary = tempfile.TemporaryDirectory(prefix="forebay-service-")
        self.folder = pathlib.Path(self.temporary.name)
        log, port_file = self.folder / "log", self.folder / "address"
        database = self.database or f"sqlite:{self.folder}/forebay.db"
        command = [self.binary, "serve", "--listen", "127.0.0.1:0", "--database", database, "--port-file", port_file]
        started = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *self.arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment()
            )
        try:
            # The service renames the finished file into place when it accepts requests.
            while not port_file.exists():
                if self.process.poll() is not None or time.monotonic() > started + READY_S:
                    sys.exit(f"the service did not start:\n{log.read_text(errors='replace')}")
                time.sleep(POLL_S)
            self.address = self.address_in("address")
            self.url = f"http://{self.address}"
            Client(self.address).call("GET", "/readyz")
        except BaseException:
            self.__exit__()
            raise
        self.started_in_s = time.monotonic() - started
        return self

    def address_in(self, port_file):
        """Returns the address in a port file. That of a facade is `address.` and its protocol."""
        return (self.folder / port_file).read_text().strip()

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            # What it left is not what a service leaves, so figures after this would say nothing.
            raise
        finally:
            self.temporary.cleanup()


class Client:
    """One connection, and the seconds spent in its calls."""

    def __init__(self, address):
        self.connection = http.client.HTTPConnection(address, timeout=90)
        self.seconds, self.used = 0.0, 0.0

    def send(self, method, path, body=None):
        """Returns the status and the text of an answer."""
        started = time.monotonic()
        if started - self.used > IDLE_S:
            self.connection.close()  # http.client reopens it on the next request
        headers = {"content-type": "application/json", "accept": "application/json"}
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self.connection.getresponse()
        text = response.read()
        self.used = time.monotonic()
        self.seconds += self.used - started
        return response.status, text

    def call(self, method, path, body=None, expect=(200, 201)):
        """Returns what an answer has in JSON, or None if it is empty."""
        status, text = self.send(method, path, body)
        if status not in expect:
            raise RuntimeError(f"{method} {path} answered {status}: {text.decode(errors='replace')}")
        return json.loads(text) if text else None


def load(*arguments):
    """Runs `forebay bench` and returns its report."""
    command = [FOREBAY, "bench", *map(str, arguments), "--json", "-"]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
    return json.loads(ended.stdout)
