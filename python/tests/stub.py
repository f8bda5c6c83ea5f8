"""A server that gives the answers that a test wrote, and remembers the requests: for what a real service never does."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from typing import Any

HANG = "hang"
"""In place of an answer: none is given until the stub ends."""

BREAK = "break"
"""In place of an answer: the connection is closed."""


def answer(status: int, body: Any = None, *, media: str = "application/json", **headers: str) -> bytes:
    text = body.encode() if isinstance(body, str) else b"" if body is None else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Stub", f"Content-Type: {media}", f"Content-Length: {len(text)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + text


def problem(status: int, kind: str, **headers: str) -> bytes:
    body = {"type": kind, "title": kind.replace("-", " "), "status": status, "instance": "from-the-service"}
    return answer(status, body, media="application/problem+json", **headers)


class Stub:
    """Gives its answers one after the other, and the last one for ever. Connections stay open between requests."""

    def __init__(self, *answers: bytes | str) -> None:
        self.answers = list(answers)
        self.requests: list[str] = []
        self.connections = 0
        self.arrived: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.closed_by_client: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as reader:
            while request := self._read(reader):
                with self._lock:
                    self.requests.append(request)
                    given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                self.arrived.put(request)
                if given == BREAK:
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                if given == HANG:
                    # The next read returns when the client closes the connection.
                    reader.read(1)
                    self.closed_by_client.put(request)
                    return
                assert isinstance(given, bytes)
                connection.sendall(given)
                if b"Connection: close" in given:
                    connection.shutdown(socket.SHUT_RDWR)
                    return

    @staticmethod
    def _read(reader: Any) -> str:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = reader.readline()
            if not line:
                return ""
            head += line
        length = 0
        for line in head.decode().split("\r\n"):
            name, _, value = line.partition(":")
            if name.lower() == "content-length":
                length = int(value)
        return (head + reader.read(length)).decode("utf-8", "replace")
