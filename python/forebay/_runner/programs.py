"""The programs that a run starts, and their command lines and configurations."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import zlib
from pathlib import Path
from typing import Any

from .._options import SUITE_VARIABLE
from ..errors import ConfigurationError
from ..server import find_binary
from .output import Output
from .processes import WORKS_AFTER_S, Process
from .program import TASKS_VARIABLE
from .settings import Engine, Policy, Settings, Tiny, Warm
from .tables import dump, merged, nested

GIVEN = ("server", "policy", "consumer", "model", "output")
"""Keys of a trainer's configuration that the runner gives."""

SERVICE_CONFIG = "service.toml"

TRAINER_DEFAULTS: dict[str, Any] = {
    # The next batch is leased only when the last one is done, so that batches do not become older while they wait.
    "data": {"ahead": 0},
}


def trainer_binary() -> str:
    """The path of `forebay-trainer`: that of `FOREBAY_TRAINER_BIN`, beside `forebay`, or of the `PATH`."""
    named = os.environ.get("FOREBAY_TRAINER_BIN")
    if named and not os.access(named, os.X_OK):
        raise ConfigurationError(f"FOREBAY_TRAINER_BIN is {named}, which is not a program")
    try:
        beside = str(Path(find_binary()).with_name("forebay-trainer"))
    except ConfigurationError:
        # The service runs on another machine.
        beside = None
    for candidate in (named, beside, shutil.which("forebay-trainer")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ConfigurationError(
        "forebay-trainer is neither beside forebay nor in the PATH: build it with "
        "`cargo build --release -p forebay-trainer`, or name it in FOREBAY_TRAINER_BIN"
    )


def free_address() -> str:
    """An address of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def service(
    settings: Settings, output: Output, listen: str, engines: dict[str, str], models: dict[str, Path]
) -> Process:
    """The service. With sessions, it forwards the calls of agents to the engines. Its page shows text where the models
    have tokenizers."""
    command = [find_binary(), "serve", "--listen", listen, "--port-file", str(output.folder / "address")]
    command += ["--database", _database(settings, output)]
    files = {name: (folder / "tokenizer.json").absolute() for name, folder in models.items()}
    config = dump({"console": {"tokenizers": {name: str(file) for name, file in files.items() if file.exists()}}})
    if settings.sessions:
        urls = {engine.name: engine.urls or [engines[engine.name]] for engine in settings.engines}
        # The address stays the same when the service is started again, because the agents of open sessions know it.
        config += sessions(settings, urls, {"listen": free_address()}, {})
    command += ["--config", str(output.write(SERVICE_CONFIG, config))]
    return Process(name="service", kind="service", command=command, log=output.log("service"))


def serve_again(settings: Settings, output: Output) -> str:
    """The command that opens the service of a run again, to look at what it has stored."""
    config = str(output.folder / SERVICE_CONFIG)
    return shlex.join([find_binary(), "serve", "--config", config, "--database", _database(settings, output)])


def _database(settings: Settings, output: Output) -> str:
    return settings.database.replace("{output}", str(output.folder))


def sessions(settings: Settings, urls: dict[str, list[str]], table: dict[str, Any], upstream: dict[str, str]) -> str:
    """The service's configuration of sessions: its own table, and an upstream for each policy and each frozen model.

    An upstream asks its engine for one model, and has the name of it. The calls of a policy that is not trained are not
    recorded; it may be the teacher of another one (`rules.sessions.teacher`).
    """
    values = ["[sessions]\n" + dump(table)]
    for engine in settings.engines:
        # The engine that comes along answers as SGLang does.
        kind = "sglang" if engine.kind == "forebay" else engine.kind
        served = [policy for policy in settings.policies if policy.engine == engine.name]
        names = [(policy.name, "policies" if policy.train is not None else "models") for policy in served]
        names += [(name, "models") for name in engine.models]
        for name, key in names:
            one = {"name": name, "kind": kind, "urls": urls[engine.name], key: [name], **upstream}
            values.append("[[upstream]]\n" + dump(one))
    return "\n".join(values)


def name_of(model: Tiny) -> str:
    """A name for the folder of a tiny model that another one does not have."""
    name = f"tiny-{model.hidden}-{model.layers}-{model.heads}-seed-{model.seed}"
    if model.alphabet is not None:
        name += f"-alphabet-{zlib.crc32(model.alphabet.encode()):08x}"
    return name


def init(model: Tiny, folder: Path, alphabet: str) -> list[str]:
    """The command that makes a tiny model of the characters of `alphabet`."""
    options = {"seed": model.seed, "hidden": model.hidden, "layers": model.layers, "heads": model.heads}
    command = [trainer_binary(), "init", str(folder), f"--alphabet={alphabet}", "--chat"]
    return command + [text for name, value in options.items() for text in (f"--{name}", str(value))]


def engine(
    settings: Settings, engine: Engine, output: Output, address: str, url: str, models: dict[str, Path]
) -> Process:
    """An engine that follows every policy of its name, with frozen models beside them."""
    command = [trainer_binary(), "serve", "--listen", address, "--threads", str(engine.threads)]
    served = [policy for policy in settings.policies if policy.engine == engine.name]
    for policy in served:
        if policy.train is not None:
            command += ["--follow", f"{policy.name}@{url}"]
    frozen = {policy.name: str(models[policy.name]) for policy in served if policy.train is None}
    command += [f"{name}={folder}" for name, folder in {**engine.models, **frozen}.items()]
    return Process(
        name=f"engine-{engine.name}", kind="engine", command=command, log=output.log(f"engine-{engine.name}")
    )


def trainer(settings: Settings, policy: Policy, output: Output, models: dict[str, Path], url: str) -> Process:
    """The trainer of a policy. `models` are those of all policies before their training."""
    train = dict(policy.train or {})
    for key, name in policy.frozen().items():
        train = merged(train, nested(key, str(models[name])))
    for key in GIVEN:
        if key in train:
            raise ConfigurationError(f"`policy.train.{key}` of {policy.name} is given by the runner: remove it")
    given = {
        "server": url,
        "policy": policy.name,
        "consumer": f"{policy.name}-trainer",
        "model": str(models[policy.name]),
        "output": str(output.trainer(policy.name)),
    }
    engine = next(engine for engine in settings.engines if engine.name == policy.engine)
    if engine.kind != "forebay":
        # The trainer reads the key of the engine from the environment, as programs do.
        key = {"key_env": "FOREBAY_ENGINE_KEY"} if os.environ.get("FOREBAY_ENGINE_KEY") else {}
        loads = [{"kind": engine.kind, "url": each, **key} for each in engine.urls]
        train = merged({"publish": {"engine": loads}}, train)
    return _trainer(policy.name, merged(TRAINER_DEFAULTS, {**train, **given}), output)


def warm_trainer(name: str, warm: Warm, output: Output, model: Path, url: str) -> Process:
    """The trainer that learns demonstrations."""
    config: dict[str, Any] = {
        "server": url,
        "policy": name,
        "consumer": f"{name}-trainer",
        "model": str(model),
        "output": str(output.trainer(name)),
        "steps": warm.steps,
        "objective": {"objective": "sft"},
        "schedule": {"peak": warm.rate},
        # Only the last version is used.
        "publish": {"every": warm.steps, "keep": 1},
        "checkpoint": {"every": max(1, warm.steps // 4)},
    }
    return _trainer(name, config, output)


def _trainer(name: str, config: dict[str, Any], output: Output) -> Process:
    path = output.write(f"trainers/{name}.toml", dump(config))
    return Process(
        name=f"trainer-{name}",
        kind="trainer",
        command=[trainer_binary(), "train", "--config", str(path)],
        log=output.log(f"trainer-{name}"),
        ends=True,
    )


def agent(
    settings: Settings, number: int, output: Output, url: str, engines: dict[str, str], profile: str | None
) -> Process:
    """A process of the program. It finds the run in its environment."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "FOREBAY_URL": url,
        "FOREBAY_RUN": str(settings.file.resolve()),
        "FOREBAY_PROFILE": profile or "",
        "FOREBAY_SEED": str(settings.seed),
        "FOREBAY_OUTPUT": str(output.folder.resolve()),
        "FOREBAY_AGENT": str(number),
        "FOREBAY_ENGINES": " ".join(f"{name}={address}" for name, address in engines.items()),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **settings.agents.env,
    }
    return Process(
        name=f"agent-{number}",
        kind="agent",
        command=[sys.executable, str(settings.program)],
        log=output.log(f"agent-{number}"),
        environment=environment,
        # All that a program does may be done again, so one that works is started again however often it ends.
        works_after_s=WORKS_AFTER_S,
    )


def evaluation(agent: Process, output: Output, suite: str, tasks: int) -> Process:
    """A process of the program that plays a held-out suite, and ends."""
    return Process(
        name=suite,
        kind="agent",
        command=agent.command,
        log=output.log(suite),
        environment={**agent.environment, SUITE_VARIABLE: suite, TASKS_VARIABLE: str(tasks)},
        ends=True,
    )
