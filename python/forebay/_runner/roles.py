"""One part of a run, where something else than the runner starts the processes: `--only prepare`, `agent` or `watch`.

Compose, Kubernetes and Slurm start the service, the engines and the trainers by their own commands. What only the
runner knows is here. Addresses come from the environment: `FOREBAY_URL` of the service, and `FOREBAY_ENGINES`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..client import Client
from ..errors import ConfigurationError
from . import programs
from .output import IDENTITY, Output
from .processes import RunFailed
from .program import addresses
from .settings import Settings
from .stages import Result, Runner, answers

ROLES = ("prepare", "agent", "watch")

REACH_S = 300.0
"""How long a service that something else starts may take until it answers."""

ENGINE_S = 1800.0
"""How long an engine may take. It loads a model, or waits for the first version of the policies that it follows."""

POLL_S = 0.5


def prepare(found: Settings, output: Output, say: Callable[[str], None]) -> None:
    """Does all that comes before the engines and trainers: rules, models, warm starts, and configurations of trainers.

    Afterwards the folder of the run has `trainers/POLICY.toml` for each trainer, and `models/start/POLICY`, a link to
    the model of each policy before its training. What an earlier call has done is not repeated.
    """
    url = service_url(found)
    _wait_for(f"{url}/healthz", REACH_S)
    use_engines(found)
    with Client(url) as client:
        models = Runner(found, output, say).prepare(client)
    for policy in found.policies:
        _link(output.start(policy.name), models[policy.name])
        if policy.train is not None:
            programs.trainer(found, policy, output, models, url)
    say(f"{output.folder} is prepared")


def agent(found: Settings, output: Output, profile: str | None) -> NoReturn:
    """Becomes the program, with the environment that it expects, when the engines are ready. It does not return."""
    url = service_url(found)
    use_engines(found)
    pairs = [(engine.name, each) for engine in found.engines for each in engine.urls]
    for _, each in pairs:
        _wait_for(f"{each}/health", ENGINE_S)
    process = programs.agent(found, number(), output, url, {}, profile)
    given = {**os.environ, **process.environment}
    given["FOREBAY_ENGINES"] = " ".join(f"{name}={each}" for name, each in pairs)
    sys.stdout.flush()
    os.execve(process.command[0], [*process.command], given)


def watch(found: Settings, output: Output, say: Callable[[str], None]) -> Result:
    """Prints how training goes until the criteria hold, all steps are trained or the time is over, and judges it."""
    url = service_url(found)
    _wait_for(f"{url}/healthz", REACH_S)
    with Client(url) as client:
        return Runner(found, output, say).watch(client)


def opened(folder: Path, identity: dict[str, Any], only: str) -> Output:
    """The folder of the run. Only `prepare` makes it and locks it."""
    is_prepared = (folder / IDENTITY).exists()
    if only == "prepare":
        return Output(folder, identity, resume=is_prepared)
    if not is_prepared:
        raise ConfigurationError(f"there is no run in {folder}: `--only prepare` makes it")
    return Output.shared(folder)


def service_url(found: Settings) -> str:
    """The address of the service, which this process does not start."""
    url = os.environ.get("FOREBAY_URL") or found.url
    if not url:
        raise ConfigurationError("--only uses a service that runs: name its address in FOREBAY_URL")
    return url


def use_engines(found: Settings) -> None:
    """Replaces the addresses of engines by those of the environment."""
    urls = addresses()
    for engine in found.engines:
        if engine.name in urls:
            engine.urls[:] = urls[engine.name]


def number() -> int:
    """The number of this process of the program: `FOREBAY_AGENT`, or one that follows from the name of the machine.

    Replicas of a container have the same environment, and names of their own.
    """
    given = os.environ.get("FOREBAY_AGENT")
    if given:
        return int(given)
    return int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big")


def _link(link: Path, folder: Path) -> None:
    """Lets a link name a folder, whatever it named before."""
    link.parent.mkdir(parents=True, exist_ok=True)
    made = link.with_name(f"{link.name}.new")
    made.unlink(missing_ok=True)
    made.symlink_to(folder.absolute(), target_is_directory=True)
    made.replace(link)


def _wait_for(url: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not answers(url):
        if time.monotonic() > end:
            raise RunFailed(f"{url} did not answer within {timeout_s:.0f} s")
        time.sleep(POLL_S)
