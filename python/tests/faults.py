"""Faults for tests: a proxy that loses answers, and waiting for a condition."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Returns when the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {seconds} s"
        time.sleep(0.01)


class LossyProxy:
    """Forwards calls to a service, and loses the answers that it is told to lose: the service has processed the call,
    and its caller sees a broken connection."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self.lost = 0
        """How many answers were lost."""
        self._losing: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_call(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with contextlib.closing(http.client.HTTPConnection(host, int(port))) as upstream:
                    upstream.request(self.command, self.path, body, dict(self.headers))
                    answer = upstream.getresponse()
                    content = answer.read()
                if proxy._loses(self.command, self.path):
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name in ("Content-Type", "Retry-After", "x-request-id"):
                    if value := answer.headers.get(name):
                        self.send_header(name, value)
                if answer.status != 204:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_call

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def lose(self, method: str, path_end: str, times: int = 1) -> None:
        """Loses the next answers to calls of a path that ends so."""
        self._losing += [(method, path_end)] * times

    def _loses(self, method: str, path: str) -> bool:
        for entry in self._losing:
            if method == entry[0] and path.endswith(entry[1]):
                self._losing.remove(entry)
                self.lost += 1
                return True
        return False

    def __enter__(self) -> LossyProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
