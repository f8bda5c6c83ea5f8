"""A Postgres server with default settings until a block ends, near or some milliseconds away."""

import contextlib
import os
import pathlib
import pwd
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time

from . import ROOT


class Proxy:
    """Passes bytes on by TCP, each after a delay. It ends with this program.

    It uses threads, because timers of asyncio are a millisecond late.
    """

    def __init__(self, port, delay_ms):
        self.target, self.delay = port, delay_ms / 1e3
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.start(self.accept)

    def start(self, work, *arguments):
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.target))
            for source, target in ((client, server), (server, client)):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pieces = queue.SimpleQueue()
                self.start(self.read, source, pieces)
                self.start(self.write, target, pieces)

    def read(self, source, pieces):
        piece = None
        while piece != b"":
            try:
                piece = source.recv(1 << 16)
            except OSError:
                piece = b""
            pieces.put((time.monotonic() + self.delay, piece))

    def write(self, target, pieces):
        while True:
            at, piece = pieces.get()
            time.sleep(max(at - time.monotonic(), 0))
            try:
                if not piece:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(piece)
            except OSError:
                return


def processor_s(process, ended_children=False):
    """Returns the seconds of processor time of a process, and of its children that ended if they count."""
    # The name of the program is in parentheses, and may contain spaces.
    fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = fields[11:15] if ended_children else fields[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def children(process):
    return map(int, pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split())


class Postgres:
    """A Postgres server with default settings and an empty database. Both are removed when the block ends."""

    def __init__(self, delay_ms=0, tls=False):
        self.delay_ms, self.tls = delay_ms, tls

    def __enter__(self):
        # The path of a Unix socket has at most 107 bytes.
        self.folder = tempfile.TemporaryDirectory(prefix="forebay-pg-", dir="/tmp")
        folder = self.folder.name
        # Postgres refuses to run as root.
        self.account = {}
        if os.geteuid() == 0:
            name = next(
                (name for name in ("postgres", "nobody") if name in {entry.pw_name for entry in pwd.getpwall()}), None
            )
            if name is None:
                sys.exit("Postgres does not run as root, and there is no user postgres or nobody")
            account = pwd.getpwnam(name)
            os.chown(folder, account.pw_uid, account.pw_gid)
            self.account = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        # A copy, because that user may not be able to read the installation.
        binaries = self.binaries = subprocess.run(
            [ROOT / "scripts" / "postgres-bin", "--copy-to", folder], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        self.control = [f"{binaries}/pg_ctl", f"--pgdata={folder}/data", f"--log={folder}/log", "--wait"]
        self.run(
            f"{binaries}/initdb",
            f"--pgdata={folder}/data",
            "--username=forebay",
            "--auth=trust",
            "--no-locale",
            "--encoding=UTF8",
        )
        if self.tls:
            new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            self.run(
                *new, "-subj", "/CN=bench", "-out", f"{folder}/data/server.crt", "-keyout", f"{folder}/data/server.key"
            )
            with open(f"{folder}/data/postgresql.conf", "a") as settings:
                settings.write("ssl = on\n")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.run(
            *self.control,
            "--options",
            f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder}",
            "start",
        )
        self.socket_url = f"postgres://forebay@localhost:{port}/postgres?host={folder}"
        if self.delay_ms:
            port = Proxy(port, self.delay_ms).port
        # As most services reach their database.
        self.url = f"postgres://forebay@127.0.0.1:{port}/postgres?sslmode={'require' if self.tls else 'disable'}"
        return self

    def run(self, *command):
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=self.folder.name,
            **self.account,
        )

    def ask(self, statement):
        """Returns the one value that a statement has."""
        command = [
            f"{self.binaries}/psql",
            "--no-psqlrc",
            "--tuples-only",
            "--no-align",
            "--command",
            statement,
            self.socket_url,
        ]
        return subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    def processor_s(self):
        """Returns the seconds of processor time that the server has used, with the connections that ended."""
        postmaster = int(pathlib.Path(self.folder.name, "data", "postmaster.pid").read_text().split()[0])
        used = processor_s(postmaster, ended_children=True)
        for process in children(postmaster):
            # One that has ended since is counted with its parent the next time.
            with contextlib.suppress(FileNotFoundError):
                used += processor_s(process)
        return used

    def __exit__(self, *_):
        self.run(*self.control, "--mode=fast", "stop")
        self.folder.cleanup()
