"""What the agents' program sees of a run: questions, prompts, and the addresses of engines.

The runner names the run file in the environment of the program, so the program has no address, no prompt and no name
of a model of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar, cast

from ..errors import ConfigurationError
from . import settings
from .settings import Settings, Task

T = TypeVar("T")

log = logging.getLogger("forebay")

FAILED_PAUSE_S = 1.0
"""Time between an execution that failed and the next one: the engine or the service may be starting."""

FIELD = re.compile(r"\{(\w+)\}")

TASKS_VARIABLE = "FOREBAY_EVAL_TASKS"
"""The environment variable that has the number of questions of a held-out suite. `FOREBAY_EVAL` has its name."""

ENGINE_RETRIES = 5
"""How often a call to an engine that does not answer is repeated."""


def run() -> Run:
    """The run that started this program. Its file is in the environment variable `FOREBAY_RUN`."""
    file = os.environ.get("FOREBAY_RUN")
    if not file:
        raise ConfigurationError(
            "FOREBAY_RUN does not name a run file: start the program with `python -m forebay.run FILE`"
        )
    seed = os.environ.get("FOREBAY_SEED")
    found = settings.read(
        Path(file), profile=os.environ.get("FOREBAY_PROFILE") or None, seed=int(seed) if seed else None
    )
    begun = Run(found, agent=int(os.environ.get("FOREBAY_AGENT", "0")))

    def stop(number: int, frame: FrameType | None) -> None:
        begun.stop()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    return begun


class Run:
    """A run, for one process of its program. SIGTERM ends `questions` and `play` after what has begun."""

    def __init__(self, found: Settings, *, agent: int = 0) -> None:
        self.settings = found
        self.task = found.task
        self.agent = agent
        """The number of this process, from 0."""
        self.world = load_world(found.task.world)
        """The module that has the task's questions."""
        self.output = Path(os.environ.get("FOREBAY_OUTPUT", "."))
        """The folder of the run, for files of the program."""
        tasks = os.environ.get(TASKS_VARIABLE)
        self.held_out = int(tasks) if tasks else None
        """How many questions there are, if the program plays a held-out suite: all of them are results of it."""
        self.options: dict[str, Any] = dict(found.task.sampling)
        """Arguments of every call of an engine, such as `max_tokens`."""
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="forebay-run")

    def openai(self, engine: str | None = None) -> Any:
        """A client of the package `openai` for an engine of the run file.

        Without a name, it calls the engine of the policy that a call names as its `model`.
        """
        engines = self.settings.engines
        of_policies = {policy.name: policy.engine for policy in self.settings.policies}
        if engine is not None or len({*of_policies.values()}) < 2:
            return self._openai(engine or (engines[0].name if engines else ""))
        clients = {name: self._openai(name) for name in dict.fromkeys(of_policies.values())}
        return Engines({policy: clients[name] for policy, name in of_policies.items()})

    def _openai(self, name: str) -> Any:
        # An optional package, so it is imported only here.
        openai: Any = importlib.import_module("openai")
        urls = addresses()
        for each in self.settings.engines:
            # The program was started by something else than the runner.
            urls.setdefault(each.name, each.urls)
        if not urls.get(name):
            raise ConfigurationError(f"the run has no engine {name!r} with an address")
        # Processes of the program share the workers of an engine.
        url = urls[name][self.agent % len(urls[name])]
        return openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=os.environ.get("FOREBAY_ENGINE_KEY", "none"),
            max_retries=ENGINE_RETRIES,
        )

    def prompt(self, name: str, **fields: object) -> str:
        """The prompt of this name in the run file, with fields put in."""
        return prompt(self.task, name, **fields)

    def answer(self, text: str) -> str:
        """The answer in a reply: the whole text, or what is in the last `\\boxed{}`, as the run file says."""
        return boxed(text) if self.task.answer == "boxed" else text.strip()

    def ask(self, rollout: Any, llm: Any, name: str, *, agent: str | None = None, **fields: object) -> str | None:
        """Asks a policy with the prompt of this name, as a call of its rollout, and returns the answer.

        Two calls of a rollout with the same prompt are a call and its repeat, unless they have different names in
        `agent`. If the call fails, the rollout is aborted, and the answer is None. The other rollouts of the execution
        go on.
        """
        said = self.talk(rollout, llm, [{"role": "user", "content": self.prompt(name, **fields)}], agent=agent)
        return None if said is None else self.answer(said)

    def talk(self, rollout: Any, llm: Any, messages: list[dict[str, Any]], *, agent: str | None = None) -> str | None:
        """Asks a policy to continue a conversation, as a call of its rollout, and appends what it says.

        If the call fails, the rollout is aborted, and there is None.
        """
        try:
            said = rollout.chat(llm, messages, agent=agent, **self.options)
        except Exception as error:
            log.warning("a call of %s failed: %s", rollout.policy, error)
            rollout.abort(f"{type(error).__name__}: {error}")
            return None
        messages.append({"role": "assistant", "content": str(said)})
        return str(said)

    def chat(self, llm: Any, model: str, messages: list[dict[str, Any]]) -> str:
        """Asks a model to continue a conversation, and appends what it says. A call that fails raises.

        It records nothing. With the address and the key of a session, the service does.
        """
        said = llm.chat.completions.create(model=model, messages=messages, **self.options)
        messages.append({"role": "assistant", "content": said.choices[0].message.content or ""})
        return messages[-1]["content"]

    def questions(self) -> Iterator[Any]:
        """Yields questions until the program is stopped. Every start of a program asks others, with other ids."""
        if self.held_out is not None:
            yield from self._held_out(self.held_out)
            return
        # A program that is started again must not add to groups of the time before.
        start = time.time_ns()
        kind, seed = self.task.kind, f"{self.settings.seed}.{self.agent}.{start}"
        asked = self.world.questions(kind, seed) if self.task.data is None else self._questions_of_file(seed)
        name = kind or (self.task.data.stem if self.task.data is not None else "")
        for number, question in enumerate(asked):
            if self._stopped.is_set():
                return
            question.id = f"{name}.{self.settings.seed}.{self.agent}.{start // 1_000_000}.{number}"
            yield question

    def _held_out(self, count: int) -> Iterator[Any]:
        """The same questions for each version, which no seed of a training has asked in this order."""
        kind, seed = self.task.kind, "held-out"
        asked = self.world.questions(kind, seed) if self.task.data is None else self._questions_of_file(seed)
        for number, question in enumerate(itertools.islice(asked, count)):
            if self._stopped.is_set():
                return
            question.id = f"held-out.{number}"
            yield question

    def _questions_of_file(self, seed: str) -> Iterator[Any]:
        """The questions of the task's file again and again, each time in another order."""
        rows, order = read_data(self.task), random.Random(seed)
        while True:
            order.shuffle(rows)
            for text, gold in rows:
                yield self.world.Question(text, gold)

    def play(self, execute: Callable[[Any], object]) -> None:
        """Executes a function for one question after the other, `in_flight` of them at once.

        An execution that raises is logged, and the next one begins.
        """
        questions, lock = self.questions(), threading.Lock()

        def worker() -> None:
            while True:
                with lock:
                    question = next(questions, None)
                if question is None:
                    return
                try:
                    execute(question)
                except Exception:
                    log.exception("the execution of %s failed", question.id)
                    self._stopped.wait(FAILED_PAUSE_S)

        workers = [threading.Thread(target=worker, name=f"execution-{n}") for n in range(self.task.in_flight)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()

    def each(self, count: int, function: Callable[[int], T]) -> list[T]:
        """Calls a function with 0 to `count` - 1 in threads, and returns what it returned, in this order.

        If calls raise, the others are waited for, and the first exception goes on.
        """
        futures = [self._threads.submit(function, place) for place in range(count)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def stop(self) -> None:
        """Ends `questions` and `play` after what has begun."""
        self._stopped.set()


class Engines:
    """Clients of the package `openai`, of which each call goes to that of the policy in its `model`."""

    def __init__(self, clients: Mapping[str, Any]) -> None:
        self._clients = clients
        self.chat = self.completions = self

    def create(self, *, model: str, **arguments: Any) -> Any:
        """A chat completion of a policy."""
        if model not in self._clients:
            raise ConfigurationError(f"the run has no policy {model!r}; there are: {', '.join(self._clients)}")
        return self._clients[model].chat.completions.create(model=model, **arguments)

    def with_options(self, **options: Any) -> Any:
        """A client with another address and key, such as those of a session."""
        return next(iter(self._clients.values())).with_options(**options)

    def close(self) -> None:
        """Closes all connections."""
        for client in self._clients.values():
            client.close()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def addresses() -> dict[str, list[str]]:
    """The addresses of engines in `FOREBAY_ENGINES`: NAME=URL, separated by spaces, once for each address."""
    urls: dict[str, list[str]] = {}
    for pair in os.environ.get("FOREBAY_ENGINES", "").split():
        name, _, url = pair.partition("=")
        urls.setdefault(name, []).append(url)
    return urls


def read_data(task: Task) -> list[tuple[str, str]]:
    """The questions of a task's file, with their right answers. All of them are in memory."""
    assert task.data is not None, "the task has a file"
    try:
        # Not splitlines: a text in JSON may contain other characters that it takes for the end of a line.
        lines = task.data.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {task.data}: {error}") from None
    rows = [
        _row(task, line, f"{task.data}, line {number}")
        for number, line in enumerate(lines, 1)
        if line and not line.isspace()
    ]
    if not rows:
        raise ConfigurationError(f"{task.data} has no questions")
    return rows


def _row(task: Task, line: str, place: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{place} is not JSON: {error}") from None
    found: list[str] = []
    for key, setting in ((task.input_key, "input_key"), (task.label_key, "label_key")):
        value: Any = cast("dict[str, Any]", row).get(key) if isinstance(row, dict) else None
        if isinstance(value, list):
            # A conversation: the question is what the user says last.
            messages = [cast("dict[str, Any]", each) for each in cast("list[Any]", value) if isinstance(each, dict)]
            asked = [message.get("content") for message in messages if message.get("role") == "user"]
            value = asked[-1] if asked else None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigurationError(f"{place} has no text or number `{key}` (task.{setting})")
        found.append(str(value))
    return found[0], found[1]


def prompt(task: Task, name: str, **fields: object) -> str:
    """The prompt of a task."""
    if name not in task.prompts:
        known = ", ".join(sorted(task.prompts)) or "none"
        raise ConfigurationError(f"`task.prompts.{name}` is missing; there are: {known}")
    # Other text in braces stays, such as \\boxed{ANSWER}.
    return FIELD.sub(lambda found: str(fields.get(found[1], found[0])), task.prompts[name])


def boxed(text: str) -> str:
    """What is in the last `\\boxed{}` of a text; an empty text if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return ""
    depth = 0
    inner = itertools.islice(text, start + len("\\boxed{"), None)
    kept: list[str] = []
    for character in inner:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return "".join(kept).strip()
        kept.append(character)
    return ""


def load_world(path: Path) -> ModuleType:
    """Loads the module that has the questions and demonstrations of a task."""
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where the program imports it by name, it gets the same module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
