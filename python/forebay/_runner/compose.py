"""The run file as a compose file: the service, engines, a trainer for each policy and agents, as containers.

`compose` only makes text of settings. What it writes uses the programs' own commands, and `python -m forebay.run
--only` for what only the runner knows (`roles`). Every folder of this machine has the same path in the containers, so
that the paths in the run file stay right. Keys are not in the file: compose takes them from its environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigurationError
from . import programs, yaml
from .settings import FROZEN, Engine, Policy, Settings
from .tables import within

SERVICE = "forebay"
"""Name of the service, and so the host under which containers reach it."""

PORT = 8080

SESSIONS_PORT = 8081

ENGINE_PORT = 30000

OUTPUTS = PurePosixPath("/runs")
"""Where all containers have the volume with the folder of the run: models, weights, configurations, metrics."""

DATA = PurePosixPath("/data")
"""Where the service has the volume of its database."""

CONFIG = "/etc/forebay/service.toml"

ENGINE_KEY_FILE = "/run/secrets/engine-key"

LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}

IMAGE = "${FOREBAY_IMAGE:-forebay}"

RUN_IMAGE = "${FOREBAY_RUN_IMAGE:-forebay-run}"

ENGINE_IMAGES = {
    "forebay": RUN_IMAGE,
    "sglang": "${SGLANG_IMAGE:-docker.io/lmsysorg/sglang:v0.5.17}",
    "vllm": "${VLLM_IMAGE:-docker.io/vllm/vllm-openai:v0.24.0}",
}

ENGINE_KEY = "${FOREBAY_ENGINE_KEY:?choose a key for the engines}"

HEALTHY = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{ENGINE_PORT}/health', timeout=5)"

SLUG_MAX = 100
"""Characters of the name of a run in names of folders and of the project."""

TENSOR_PARALLEL = {"--tp", "-tp", "--tp-size", "--tensor-parallel-size"}
"""Arguments of engines that say on how many GPUs a model is."""

HEAD = """\
# Written by `python -m forebay.run FILE --as compose`, for Docker 25 and `docker compose` 2.23.1, or newer ones. Before
# the first start, build the images, choose a key for the engines, and create those of the service (docs/security.md):
#
#   docker build --tag forebay --file Containerfile .
#   docker build --tag forebay-run --file examples/cluster/Containerfile .
#   export FOREBAY_ENGINE_KEY=$(openssl rand -hex 16)
"""

HEAD_KEYS = """\
#   for role in admin train produce; do
#     docker compose run --rm -T forebay keys create --name $role --role $role > $role.key
#   done
"""

HEAD_END = """\
#   export FOREBAY_ADMIN_KEY=$(cat admin.key) FOREBAY_TRAIN_KEY=$(cat train.key) FOREBAY_PRODUCE_KEY=$(cat produce.key)
#   docker compose up --detach
#   docker compose logs --follow watch
#
# `watch` ends with status 0 when the run has passed. `docker compose wait --down-project watch` waits for it and stops
# all others; the volumes stay, and the next `up` goes on. Put `--file NAME` behind each `compose` if this file is not
# named compose.yaml.
"""


def written(found: Settings, *, profile: str | None, here: Path, base: Path) -> str:
    """The text of the compose file."""
    keys = "" if found.url is not None else HEAD_KEYS
    return HEAD + keys + HEAD_END + yaml.dump(compose(found, profile=profile, here=here, base=base))


def compose(found: Settings, *, profile: str | None, here: Path, base: Path) -> dict[str, Any]:
    """The content of the compose file.

    Relative folders of models are those of `here`, as where the runner is called. Folders of this machine are named
    relative to `base`, the folder that the compose file is in.
    """
    return _File(found, profile, here, base).content()


@dataclass(frozen=True, kw_only=True)
class Worker:
    """An engine that the file starts."""

    engine: Engine
    service: str

    @property
    def url(self) -> str:
        """Its address for the other containers."""
        return f"http://{self.service}:{ENGINE_PORT}"


class _File:
    def __init__(self, found: Settings, profile: str | None, here: Path, base: Path) -> None:
        self._found = found
        self._profile = profile
        self._here = here
        self._base = base
        self._output = OUTPUTS / f"{slug(found.name)}-{found.seed}"
        self._workers = _workers(found.engines)
        self._gpus = 0
        if found.url is not None and _is_of_this_machine(found.url, "service.url"):
            raise ConfigurationError(
                f"`service.url` is {found.url}, which containers cannot reach: remove it, or name another host"
            )
        self._url = found.url or f"http://{SERVICE}:{PORT}"

    def content(self) -> dict[str, Any]:
        found = self._found
        services: dict[str, Any] = {}
        if found.url is None:
            services[SERVICE] = self._service()
        services["prepare"] = self._prepare()
        for worker in self._workers:
            services[worker.service] = self._engine(worker)
        for policy in found.policies:
            if policy.train is not None:
                services[f"trainer-{policy.name}"] = self._trainer(policy)
        services["agents"] = self._agents(list(services))
        services["watch"] = self._watch()
        content: dict[str, Any] = {"name": self._output.name, "services": services}
        volumes: dict[str, Any] = {"runs": None}
        if found.url is None:
            volumes["buffer"] = None
        content["volumes"] = volumes
        if found.url is None and found.sessions:
            content["configs"] = {"service": {"content": literal(self._sessions())}}
            content["secrets"] = {"engine-key": {"environment": "FOREBAY_ENGINE_KEY"}}
        return content

    def _service(self) -> dict[str, Any]:
        found = self._found
        service: dict[str, Any] = {
            "image": IMAGE,
            "command": ["serve"],
            "environment": {"FOREBAY_LISTEN": f"0.0.0.0:{PORT}", "FOREBAY_DATABASE": _database(found.database)},
            "ports": [f"127.0.0.1:${{FOREBAY_PORT:-{PORT}}}:{PORT}"],
            "volumes": [{"type": "volume", "source": "buffer", "target": str(DATA)}],
            "restart": "unless-stopped",
            # Longer than limits.shutdown_s, so that requests can finish.
            "stop_grace_period": "40s",
        }
        if found.sessions:
            service["environment"]["FOREBAY_CONFIG"] = CONFIG
            service["configs"] = [{"source": "service", "target": CONFIG}]
            service["secrets"] = ["engine-key"]
        return service

    def _sessions(self) -> str:
        listener = {"listen": f"0.0.0.0:{SESSIONS_PORT}", "public_url": f"http://{SERVICE}:{SESSIONS_PORT}"}
        return programs.sessions(self._found, self._engines(), listener, {"key_file": ENGINE_KEY_FILE})

    def _prepare(self) -> dict[str, Any]:
        # It trains warm starts, so it reads models.
        service = self._role("prepare", "${FOREBAY_ADMIN_KEY:-}", self._files() | self._models())
        return {**service, **self._after({})}

    def _watch(self) -> dict[str, Any]:
        service = self._role("watch", "${FOREBAY_ADMIN_KEY:-}", self._files())
        service["command"].append(f"--minutes={self._found.minutes:g}")
        return {**service, **self._after({"prepare": "service_completed_successfully"})}

    def _agents(self, others: list[str]) -> dict[str, Any]:
        service = self._role("agent", "${FOREBAY_PRODUCE_KEY:-}", self._files())
        if self._found.agents.count == 1:
            # Several have numbers that follow from the names of their containers.
            service["environment"]["FOREBAY_AGENT"] = "0"
        workers = {worker.service for worker in self._workers}
        after = {name: "service_healthy" if name in workers else "service_started" for name in others}
        # Agents end before the trainers, so that what they have begun is still trained.
        return {
            **service,
            **self._after({**after, "prepare": "service_completed_successfully"}),
            "deploy": {"replicas": self._found.agents.count},
            "restart": "unless-stopped",
            "stop_grace_period": "30s",
        }

    def _trainer(self, policy: Policy) -> dict[str, Any]:
        config = self._output / "trainers" / f"{policy.name}.toml"
        command = ["forebay-trainer", "train", "--config", str(config)]
        service = self._process("${FOREBAY_TRAIN_KEY:-}", command, self._models())
        after = {"prepare": "service_completed_successfully"}
        after |= {
            worker.service: "service_healthy"
            for worker in self._workers
            # Others wait for the first version, which this trainer publishes.
            if worker.engine.name == policy.engine and worker.engine.kind != "forebay"
        }
        service |= {**self._after(after), "restart": "on-failure", "stop_grace_period": "60s"}
        engine = next(engine for engine in self._found.engines if engine.name == policy.engine)
        if engine.kind != "forebay":
            service["deploy"] = self._on_gpus(1)
        return service

    def _engine(self, worker: Worker) -> dict[str, Any]:
        engine = worker.engine
        start = {"start_period": "30m", "start_interval": "1s", "interval": "10s", "timeout": "10s", "retries": 12}
        common: dict[str, Any] = {
            **self._after({"prepare": "service_completed_successfully"}),
            "healthcheck": {"test": ["CMD", "python3", "-c", HEALTHY], **start},
            "restart": "unless-stopped",
        }
        if engine.kind == "forebay":
            command = self._forebay_engine(engine)
            return {**self._process("${FOREBAY_PRODUCE_KEY:-}", command, self._models()), **common}
        return {**self._foreign_engine(engine), **common}

    def _forebay_engine(self, engine: Engine) -> list[str]:
        command = ["forebay-trainer", "serve", "--listen", f"0.0.0.0:{ENGINE_PORT}", "--threads", str(engine.threads)]
        served = [policy for policy in self._found.policies if policy.engine == engine.name]
        for policy in served:
            if policy.train is not None:
                command += ["--follow", f"{policy.name}@{self._url}"]
        command += [f"{name}={folder}" for name, folder in engine.models.items()]
        return command + [f"{policy.name}={self._model(policy)}" for policy in served if policy.train is None]

    def _foreign_engine(self, engine: Engine) -> dict[str, Any]:
        policy = self._only_policy(engine)
        if any(arg.split("=")[0] == "--api-key" for arg in engine.args):
            raise ConfigurationError(
                f"`engine.{engine.name}.args` has --api-key: the key comes from FOREBAY_ENGINE_KEY"
            )
        model = ["--served-model-name", policy.name, "--host", "0.0.0.0", "--port", str(ENGINE_PORT), *engine.args]
        if engine.kind == "sglang":
            command = ["python3", "-m", "sglang.launch_server", "--model-path", self._model(policy), *model]
        else:
            # Log-probabilities have to be those at the temperature.
            command = ["vllm", "serve", self._model(policy), "--logprobs-mode", "processed_logprobs", *model]
        return {
            "image": ENGINE_IMAGES[engine.kind],
            # What the image starts otherwise.
            "entrypoint": [],
            "command": [*map(literal, command), "--api-key", ENGINE_KEY],
            **self._place(self._models()),
            # What the parts of an engine share.
            "shm_size": "16gb",
            "deploy": self._on_gpus(_tensor_parallel(engine.args)),
        }

    def _only_policy(self, engine: Engine) -> Policy:
        """The policy whose weights an engine has that serves one model."""
        served = [policy for policy in self._found.policies if policy.engine == engine.name]
        trained = [policy for policy in served if policy.train is not None]
        if len(trained) > 1:
            raise ConfigurationError(
                f"`engine.{engine.name}` of kind {engine.kind} serves one model, and is to serve several policies in "
                f"training: {', '.join(policy.name for policy in trained)}. Give each an engine of its own"
            )
        if trained and engine.kind == "vllm":
            raise ConfigurationError(
                f"`engine.{engine.name}` is of kind vllm, and the trainer of {trained[0].name} publishes only to "
                "engines of kind forebay and sglang"
            )
        if not served:
            raise ConfigurationError(
                f"`engine.{engine.name}` of kind {engine.kind} serves no policy, so it has no model"
            )
        return (trained or served)[0]

    def _model(self, policy: Policy) -> str:
        return str(self._output / "models" / "start" / policy.name)

    def _on_gpus(self, count: int) -> dict[str, Any]:
        """The next GPUs of the machine: each is for one container."""
        ids = [str(number) for number in range(self._gpus, self._gpus + count)]
        self._gpus += count
        device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        return {"resources": {"reservations": {"devices": [device]}}}

    def _role(self, role: str, key: str, folders: set[Path]) -> dict[str, Any]:
        """A part of the run that the runner is."""
        found = self._found
        command = ["python", "-m", "forebay.run", os.path.normpath(self._here / found.file)]
        if self._profile is not None:
            command.append(f"--profile={self._profile}")
        command += [f"--seed={found.seed}", f"--out={self._output}", f"--only={role}"]
        service = self._process(key, command, folders)
        service["environment"] |= {"FOREBAY_URL": literal(self._url), "FOREBAY_ENGINES": literal(self._addresses())}
        return service

    def _process(self, key: str, command: Iterable[str], folders: set[Path]) -> dict[str, Any]:
        """A process of the image that has the trainer and the package."""
        environment = {"FOREBAY_KEY": key, "FOREBAY_ENGINE_KEY": ENGINE_KEY}
        if all(engine.kind == "forebay" for engine in self._found.engines):
            # Small models are not faster with more threads, and the processes share the machine.
            environment["OMP_NUM_THREADS"] = "1"
        return {
            "image": RUN_IMAGE,
            "command": [literal(each) for each in command],
            "environment": environment,
            **self._place(folders),
            "init": True,
        }

    def _place(self, folders: set[Path]) -> dict[str, Any]:
        """The volume of the run, folders of this machine, and the folder that relative paths start from."""
        runs = {"type": "volume", "source": "runs", "target": str(OUTPUTS)}
        is_relative = any(not Path(model).is_absolute() for model in self._model_paths())
        place: dict[str, Any] = {"working_dir": literal(str(self._here))} if is_relative else {}
        return {**place, "volumes": [runs, *self._binds(folders)]}

    def _after(self, conditions: dict[str, str]) -> dict[str, Any]:
        """What has to be there first."""
        if self._found.url is None:
            conditions = {SERVICE: "service_started", **conditions}
        after = {name: {"condition": condition} for name, condition in conditions.items()}
        return {"depends_on": after} if after else {}

    def _engines(self) -> dict[str, list[str]]:
        """The addresses of all engines."""
        urls: dict[str, list[str]] = {}
        for engine in self._found.engines:
            started = [worker.url for worker in self._workers if worker.engine is engine]
            urls[engine.name] = started or engine.urls
        return urls

    def _addresses(self) -> str:
        return " ".join(f"{name}={url}" for name, urls in self._engines().items() for url in urls)

    def _binds(self, folders: set[Path]) -> list[dict[str, Any]]:
        """Folders of this machine, without those inside of others, to be read at the path that they have here."""
        outer = sorted(folder for folder in folders if not folders.intersection(folder.parents))
        for folder in outer:
            if OUTPUTS.is_relative_to(folder):
                raise ConfigurationError(f"containers have the folder of the run in {OUTPUTS}: move files of {folder}")
        return [
            {
                "type": "bind",
                "source": literal(_named(folder, self._base)),
                "target": literal(str(folder)),
                "read_only": True,
                "bind": {"create_host_path": False},
            }
            for folder in outer
        ]

    def _files(self) -> set[Path]:
        """The folders of the files that the runner and the program read."""
        found = self._found
        files = [found.file, found.included, found.program, found.task.world, found.task.data]
        folders = {Path(os.path.normpath(self._here / file)).parent for file in files if file is not None}
        # The file may be a link.
        return {*folders, (self._here / found.file).resolve().parent}

    def _models(self) -> set[Path]:
        return {Path(os.path.normpath(self._here / model)) for model in self._model_paths()}

    def _model_paths(self) -> list[str]:
        """The folders of models, as the run file names them."""
        paths: list[str] = [folder for engine in self._found.engines for folder in engine.models.values()]
        for policy in self._found.policies:
            train = policy.train or {}
            named = [policy.model, *(within(train, key) for key in FROZEN if key not in policy.frozen())]
            paths += [str(each) for each in named if isinstance(each, str | Path)]
        return paths


def literal(text: str) -> str:
    """A text in which compose replaces nothing."""
    return text.replace("$", "$$")


def slug(text: str) -> str:
    """A name of small letters, digits, - and _, which compose allows for projects."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower())[:SLUG_MAX].strip("-_") or "run"


def _workers(engines: list[Engine]) -> list[Worker]:
    """The engines that the file starts: those that the runner starts, and those of this machine's own addresses, which
    containers cannot reach. The others run elsewhere and are used."""
    workers: list[Worker] = []
    for engine in engines:
        own = [url for url in engine.urls if _is_of_this_machine(url, f"engine.{engine.name}.urls")]
        if own and len(own) < len(engine.urls):
            raise ConfigurationError(
                f"`engine.{engine.name}.urls` has addresses of this machine, which containers cannot reach, and others"
            )
        for _ in own or ([] if engine.urls else [None]):
            # A host name: no underscore and no dot.
            host = "engine-" + (re.sub(r"[^a-z0-9]+", "-", engine.name.lower()).strip("-")[:40] or "0")
            taken = [worker.service for worker in workers]
            names = [host, *(f"{host}-{number}" for number in range(2, len(taken) + 2))]
            workers.append(Worker(engine=engine, service=next(name for name in names if name not in taken)))
    return workers


def _is_of_this_machine(url: str, key: str) -> bool:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigurationError(f"`{key}` has a password: keys come from the environment, and not from files")
    return parts.hostname is None or parts.hostname in LOOPBACK or parts.hostname.startswith("127.")


def _database(url: str) -> str:
    """The database of the service. A URL may have a password, so compose takes it from its environment."""
    if url.startswith("sqlite::memory:"):
        return literal(url)
    if url.startswith("sqlite:"):
        return literal(f"sqlite:{DATA / (PurePosixPath(url.removeprefix('sqlite:')).name or 'forebay.db')}")
    return "${FOREBAY_DATABASE:?set the database of the service, as in the run file}"


def _tensor_parallel(args: list[str]) -> int:
    """The number of GPUs that the arguments of an engine name."""
    following = [*args[1:], ""]
    pairs = [arg.split("=", 1) if "=" in arg else [arg, value] for arg, value in zip(args, following, strict=False)]
    found = [int(value) for name, value in pairs if name in TENSOR_PARALLEL and value.isdecimal()]
    return max(1, *found) if found else 1


def _named(folder: Path, base: Path) -> str:
    """A folder as compose names it: relative to its file where it is below."""
    return os.path.join(".", folder.relative_to(base)) if folder.is_relative_to(base) else str(folder)
