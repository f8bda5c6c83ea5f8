"""The order of a run: the service, rules, models and their warm start, engines, trainers, and then the agents."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .._retry import Retry
from ..client import Client
from ..errors import ForebayError
from . import held_out, picture, programs
from .held_out import HeldOut
from .output import Output
from .processes import Process, RunFailed, Supervisor
from .program import load_world
from .progress import Judged, Progress, read_steps
from .settings import Policy, Settings, Tiny
from .warm import WarmStart

READY_S = 60.0
"""How long a service, an engine or a trainer may take until it is ready."""

HELD_OUT_S = 300.0
"""How long the held-out suite may take."""

TICK_S = 0.2

TICK_ELSEWHERE_S = 1.0
"""Time between two looks at trainers that something else has started. Their files are read each time."""

TRAINER_STEPS = 1000
"""Steps of a trainer whose configuration does not say how many."""

SHOW_S = 10.0
"""Time between two lines for each policy."""

STOPPED_IN_ORDER = ("agent", "trainer", "engine", "service")
"""Agents first, so that what they have begun is still trained."""

FINISHED = {"name": "finished", "scope": "rollout", "when": "true", "action": "drop"}
"""The filter of a policy whose trainer has done all its steps. Its backlog would become full, and agents would wait."""


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Kills a process of a kind every few seconds."""

    kind: str
    every_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    name: str
    seed: int
    passed: bool
    ended: str
    minutes: float
    steps: dict[str, int]
    restarts: dict[str, int]
    kills: dict[str, int]
    memory_mb: int | None
    """The most memory that the processes had at once, as seen every few seconds; None if the system does not tell."""
    judged: list[Judged]
    held_out: list[HeldOut]
    """What a held-out suite says of the last weights; empty if the run cannot play one."""


class Runner:
    """One run of a run file."""

    def __init__(
        self,
        settings: Settings,
        output: Output,
        say: Callable[[str], None],
        *,
        profile: str | None = None,
        chaos: Chaos | None = None,
    ) -> None:
        self._settings = settings
        self._output = output
        self._say = say
        self._profile = profile
        self._chaos = chaos
        self._supervisor = Supervisor(say)
        self._engines: dict[str, str] = {}
        self._started = time.monotonic()
        self._memory = 0
        self._agent: Process | None = None

    def run(self, judged: Callable[[Result], None] = lambda _: None, *, keep_serving: bool = False) -> Result:
        """Runs until the criteria hold, all trainers are done, or the time is over. Everything is stopped then, but the
        service goes on with `keep_serving` until a KeyboardInterrupt. `judged` is called with the result before."""
        try:
            client = self._start_service()
            with client:
                self._start(client)
                result = self._judge(client, self._done, TICK_S, self._agent)
                judged(result)
                if keep_serving:
                    self._supervisor.stop(STOPPED_IN_ORDER[:-1])
                    self._say(f"the page of the service is at {client.url} until Ctrl-C")
                    with contextlib.suppress(KeyboardInterrupt):
                        threading.Event().wait()
                return result
        finally:
            self._supervisor.stop(STOPPED_IN_ORDER)

    def prepare(self, client: Client) -> dict[str, Path]:
        """Puts the rules, makes the models and their warm start, and returns the models before training."""
        settings = self._settings
        world = load_world(settings.task.world)
        for policy in settings.policies:
            if policy.train is not None:
                client.put_policy(policy.name, policy.rules)
        warm = WarmStart(settings, self._output, client, self._say)
        try:
            return warm.run(self._supervisor, world, self._models(world.ALPHABET), 60 * settings.minutes)
        except BaseException:
            self._supervisor.stop(STOPPED_IN_ORDER)
            raise

    def watch(self, client: Client) -> Result:
        """Waits for the end of a run whose processes something else has started, and judges it."""
        return self._judge(client, self._done_elsewhere, TICK_ELSEWHERE_S)

    def _judge(
        self, client: Client, done: Callable[[], set[str]], tick_s: float, agent: Process | None = None
    ) -> Result:
        # A service that was killed is started again between two calls, so no call may wait for it.
        patient, client = client, client.with_options(retry=Retry.none())
        progress = Progress(
            self._settings, {policy.name: self._output.trainer(policy.name) for policy in self._trained()}, client
        )
        ended = self._watch(progress, client, done, tick_s)
        self._look_at_memory()
        self._supervisor.stop(STOPPED_IN_ORDER[:2])
        with contextlib.suppress(RunFailed):
            self._supervisor.wait(client.is_ready, "the start of the service", READY_S)
        progress.refresh(now=True)
        held = [] if agent is None else self._held_out(patient, agent)
        return self._result(progress, ended, held)

    def _held_out(self, client: Client, agent: Process) -> list[HeldOut]:
        """Plays a held-out suite with the last weights, which the engines still serve."""
        trained, passes = self._trained(), self._settings.passes
        if not passes:
            return []
        before = held_out.ids(client, trained)
        for policy in trained:
            client.put_suite(policy.name, held_out.SUITE, tasks=held_out.TASKS)
        process = programs.evaluation(agent, self._output, held_out.SUITE, held_out.TASKS)
        self._say(f"the last weights play {held_out.TASKS} held-out questions")
        try:
            self._supervisor.start(process)
            self._supervisor.wait(lambda: process.is_done, "the end of the held-out suite", HELD_OUT_S)
        except RunFailed as error:
            self._say(str(error))
        self._supervisor.stop(STOPPED_IN_ORDER[:1])
        return held_out.judge(client, passes, trained, before)

    def _trained(self) -> list[Policy]:
        return [policy for policy in self._settings.policies if policy.train is not None]

    def _done(self) -> set[str]:
        """The policies whose trainers have ended."""
        trainers = self._supervisor.of_kind("trainer")
        return {
            policy.name
            for policy in self._trained()
            for trainer in trainers
            if trainer.is_done and trainer.name == f"trainer-{policy.name}"
        }

    def _done_elsewhere(self) -> set[str]:
        """The policies whose trainers have reported their last step."""
        return {
            policy.name
            for policy in self._trained()
            if self._reported(policy.name) >= (policy.train or {}).get("steps", TRAINER_STEPS)
        }

    def _reported(self, policy: str) -> int:
        steps = read_steps(self._output.trainer(policy) / "metrics.jsonl")
        return steps[-1]["step"] if steps else 0

    def _start_service(self) -> Client:
        addresses = {engine.name: programs.free_address() for engine in self._settings.engines if engine.is_started}
        self._engines = {name: f"http://{address}" for name, address in addresses.items()}
        if self._settings.url is not None:
            return Client(self._settings.url)
        # A service that is started again has the same address, which agents and trainers know.
        address = programs.free_address()
        # They are made before, because the service shows tokens as text with their tokenizers.
        models = self._models(load_world(self._settings.task.world).ALPHABET)
        service = programs.service(self._settings, self._output, address, self._engines, models)
        (self._output.folder / "address").unlink(missing_ok=True)
        self._supervisor.start(service)
        client = Client(f"http://{address}")
        self._supervisor.wait((self._output.folder / "address").exists, "the start of the service", READY_S)
        self._say(f"service at {client.url}, logs in {self._output.folder / 'logs'}")
        return client

    def _start(self, client: Client) -> None:
        settings, output, supervisor = self._settings, self._output, self._supervisor
        models = self.prepare(client)
        for engine in settings.engines:
            if engine.is_started:
                address = self._engines[engine.name].removeprefix("http://")
                supervisor.start(programs.engine(settings, engine, output, address, client.url, models))
        trained = self._trained()
        for policy in trained:
            supervisor.start(programs.trainer(settings, policy, output, models, client.url))
        supervisor.wait(
            lambda: all(_has_version(client, policy.name) for policy in trained), "the first version", READY_S
        )
        # An engine is healthy when it has loaded the first version of what it follows.
        urls = [*self._engines.values()]
        supervisor.wait(lambda: all(answers(f"{url}/health") for url in urls), "the start of the engines", READY_S)
        engines = {**{engine.name: engine.urls[0] for engine in settings.engines if engine.urls}, **self._engines}
        for number in range(settings.agents.count):
            self._agent = supervisor.start(programs.agent(settings, number, output, client.url, engines, self._profile))

    def _models(self, alphabet: str) -> dict[str, Path]:
        """The models before a warm start. Policies with equal settings have the same."""
        models: dict[str, Path] = {}
        for policy in self._settings.policies:
            if isinstance(policy.model, Path):
                models[policy.name] = policy.model
                continue
            model: Tiny = policy.model
            folder = self._output.model(programs.name_of(model))
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not folder.exists():
                command = programs.init(model, folder, model.alphabet or alphabet)
                made = subprocess.run(command, capture_output=True, text=True, check=False)
                if made.returncode != 0:
                    raise RunFailed(f"forebay-trainer init ended with status {made.returncode}: {made.stderr}")
            models[policy.name] = folder
        return models

    def _watch(self, progress: Progress, client: Client, done: Callable[[], set[str]], tick_s: float) -> str:
        """Keeps everything alive until the run ends, and returns why it ended."""
        begun = time.monotonic()
        shown, killed = begun, begun
        choose = random.Random(self._settings.seed)
        closed: set[str] = set()
        while True:
            self._supervisor.check()
            now = time.monotonic()
            finished = done()
            self._close(client, finished, closed)
            if now - shown >= SHOW_S:
                shown = now
                self._look_at_memory()
                progress.refresh()
                self._show(progress, client)
                if progress.is_passed() and self._is_passed_now(progress):
                    return "the criteria hold"
                if (lost := progress.lost()) is not None:
                    return lost
            if finished and len(finished) == len(self._trained()):
                return "all steps are trained"
            if self._chaos is not None and now - killed >= self._chaos.every_s:
                killed = now
                process = self._supervisor.kill(self._chaos.kind, choose)
                self._say(f"chaos: killed {process.name}" if process else f"chaos: no {self._chaos.kind} runs")
            if now - self._started > 60 * self._settings.minutes:
                return f"{self._settings.minutes:g} minutes are over"
            time.sleep(tick_s)

    def _look_at_memory(self) -> None:
        self._memory = max(self._memory, self._supervisor.memory() or 0)

    def _is_passed_now(self, progress: Progress) -> bool:
        """Whether the criteria hold with what has arrived since the last export, too."""
        progress.refresh(now=True)
        return progress.is_passed()

    def _close(self, client: Client, finished: set[str], closed: set[str]) -> None:
        """Lets nothing wait for trainers that are done."""
        for name in finished - closed:
            try:
                client.patch_policy(name, {"filter": [FINISHED]})
            except ForebayError:
                continue
            closed.add(name)

    def _show(self, progress: Progress, client: Client) -> None:
        for name in progress.curves:
            try:
                status = client.get_policy(name)
            except ForebayError:
                status = None
            waiting = f"ready {status.waiting.ready_groups}/{status.waiting.needed_groups}" if status else "no service"
            self._say(progress.line(name, waiting))

    def _result(self, progress: Progress, ended: str, held: list[HeldOut]) -> Result:
        judged = progress.judged()
        processes: list[Process] = self._supervisor.processes
        result = Result(
            name=self._settings.name,
            seed=self._settings.seed,
            passed=all(each.is_passed for each in [*judged, *held]),
            ended=ended,
            minutes=round((time.monotonic() - self._started) / 60, 2),
            steps={name: len(curve.steps) for name, curve in progress.curves.items()},
            restarts={process.name: process.restarts for process in processes if process.restarts},
            kills={process.name: process.kills for process in processes if process.kills},
            memory_mb=self._memory // 1_000_000 or None,
            judged=judged,
            held_out=held,
        )
        self._output.write("result.json", json.dumps(asdict(result), indent=2) + "\n")
        title = f"{self._settings.name}, seed {self._settings.seed}"
        drawn = self._output.write("curves.svg", picture.draw(title, progress.curves, self._settings.passes))
        self._say(f"{ended}; curves in {drawn}")
        return result


def answers(url: str) -> bool:
    """Whether a server answers a request with success."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _has_version(client: Client, policy: str) -> bool:
    try:
        status = client.get_policy(policy)
    except ForebayError:
        return False
    return status is not None and status.version > 0
