"""The run file: what is trained, by what, and when it has succeeded."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .tables import Table, load, merged, within

WINDOW = 20
"""Number of steps at the beginning and at the end whose mean is judged."""

POLICIES_MAX = 1_000
"""The most policies that one `count` may make: each is a process."""

NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
"""Names of policies, which the service allows, and of engines. They are parts of paths and of addresses."""

FROZEN = ("reference", "teacher", "critic.model")
"""Keys of a trainer's configuration whose value may be `{POLICY}`: the model of that policy before its training."""


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A small model of random weights that `forebay-trainer init` makes."""

    seed: int
    hidden: int
    layers: int
    heads: int
    alphabet: str | None
    """The characters it knows, or None for all of the world's."""


@dataclass(frozen=True, kw_only=True)
class Warm:
    """Demonstrations that a model learns before it is trained by reward."""

    demos: str
    right: float
    steps: int
    batch: int
    rate: float
    seed: int
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy of the service, its rules and its trainer."""

    name: str
    model: Tiny | Path
    engine: str
    rules: dict[str, Any]
    warm: Warm | None
    train: dict[str, Any] | None
    """Keys of the trainer's configuration, or None if the policy is not trained."""

    def frozen(self) -> dict[str, str]:
        """The policies whose models before their training this trainer uses, by key of its configuration."""
        given = {key: within(self.train or {}, key) for key in FROZEN}
        return {
            key: text[1:-1] for key, text in given.items() if isinstance(text, str) and text[:1] + text[-1:] == "{}"
        }


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An inference engine: one that is started, or the addresses of one that runs."""

    name: str
    kind: str
    threads: int
    models: dict[str, str]
    urls: list[str]
    args: list[str]
    """Arguments of the engine's own command line, where another tool starts it."""
    per_policy: bool = False
    """Whether it stands for several engines, one for each of its policies, with one of `urls` each."""

    @property
    def is_started(self) -> bool:
        """Whether the runner starts it."""
        return not self.urls


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Processes of the program."""

    count: int
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What a series of a policy has to reach."""

    series: str
    policy: str
    last: float | None
    last_below: float | None
    first_below: float | None
    of: str
    window: int

    @property
    def least(self) -> float:
        """What the series has to reach at the end."""
        return -math.inf if self.last is None else self.last

    @property
    def most(self) -> float:
        """What the series has to stay below at the end."""
        return math.inf if self.last_below is None else self.last_below

    @property
    def wanted(self) -> str:
        """Both bounds, for people."""
        bounds = ((f">= {self.least:g}", self.least), (f"< {self.most:g}", self.most))
        return " and ".join(text for text, bound in bounds if math.isfinite(bound))

    def matches(self, policies: Sequence[Policy]) -> list[str]:
        """The names of the policies that are judged."""
        return [policy.name for policy in policies if self.judges(policy.name)]

    def judges(self, policy: str) -> bool:
        """Whether a policy is judged, by itself or with others."""
        return fnmatchcase(policy, self.policy)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the program asks, and how."""

    kind: str
    world: Path
    data: Path | None
    """A file of questions, a JSON object on each line, instead of the questions of the world."""
    input_key: str
    label_key: str
    answer: str
    prompts: dict[str, str]
    in_flight: int
    sampling: dict[str, Any]


@dataclass(kw_only=True)
class Settings:
    """A run file with its profile."""

    file: Path
    included: Path | None
    name: str
    program: Path
    minutes: float
    seed: int
    url: str | None
    """A service that runs already; None if it is started."""
    database: str
    sessions: bool
    task: Task
    engines: list[Engine]
    policies: list[Policy]
    agents: Agents
    passes: list[Pass] = field(default_factory=list[Pass])

    def policy(self, name: str) -> Policy:
        """The policy of this name."""
        return next(policy for policy in self.policies if policy.name == name)


def read(file: Path, *, profile: str | None = None, seed: int | None = None) -> Settings:
    """Reads a run file, what it includes, and one of its profiles."""
    values = load(file)
    include = Table(values).text("include", "")
    included = file.parent / include if include else None
    if included is not None:
        values = merged(load(included), values)
    profiles = values.pop("profile", {})
    if profile is not None:
        if profile not in profiles:
            known = ", ".join(sorted(profiles)) or "none"
            raise ConfigurationError(f"{file}: there is no [profile.{profile}]; there are: {known}")
        values = merged(values, profiles[profile])
    try:
        return _settings(file, included, Table(values), seed)
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}") from None


def _settings(file: Path, included: Path | None, root: Table, seed: int | None) -> Settings:
    root.text("include", "")
    given = root.integer("seed", 1)
    seed = given if seed is None else seed
    service = root.table("service")
    engines = [_engine(table) for table in root.tables("engine")]
    defaults = root.table("defaults")
    below = defaults.raw("policy")
    defaults.end()
    policies = [
        policy
        for table in root.tables("policy")
        for policy in _policies(Table(merged(below, table.values), table.place), engines, seed)
    ]
    engines, policies = _apart(root, engines, policies)
    names = [policy.name for policy in policies]
    if not names:
        raise root.error("policy", "is missing: a run has at least one [[policy]]")
    if len(set(names)) < len(names):
        raise root.error("policy", "has the same name twice")
    for policy in policies:
        for key, named in policy.frozen().items():
            if named not in names:
                raise root.error("policy", f"{policy.name} has the {key} {{{named}}}, which is not a policy")
    agents = root.tables("agent")
    if len(agents) > 1:
        raise root.error("agent", "may be there once: all agents run one program")
    settings = Settings(
        file=file,
        included=included,
        name=root.text("name"),
        program=_file(root, "program", file),
        minutes=root.number("minutes", 10.0, least=0.0),
        seed=seed,
        url=service.text("url", None) or None,
        database=service.text("database", "sqlite:{output}/forebay.db"),
        sessions=service.flag("sessions", False),
        task=_task(root.table("task"), file),
        engines=engines,
        policies=policies,
        agents=_agents(agents[0] if agents else Table({}, "agent[0]")),
        passes=[_pass(table, policies) for table in root.tables("pass")],
    )
    service.end()
    root.end()
    return settings


def _file(table: Table, key: str, file: Path, default: str | None = None) -> Path:
    named = table.text(key) if default is None else table.text(key, default)
    path = (file.parent / named).resolve()
    if not path.is_file():
        raise table.error(key, f"is {named}, and there is no such file beside {file.name}")
    return path


def _task(table: Table, file: Path) -> Task:
    task = Task(
        kind=table.text("kind", ""),
        world=_file(table, "world", file, "world.py"),
        data=_file(table, "data", file) if table.has("data") else None,
        input_key=table.text("input_key", "question"),
        label_key=table.text("label_key", "answer"),
        answer=table.choice("answer", ("plain", "boxed"), "plain"),
        prompts=table.words("prompts"),
        in_flight=table.integer("in_flight", 1, least=1),
        sampling=table.raw("sampling"),
    )
    table.end()
    return task


def _engine(table: Table) -> Engine:
    kind = table.choice("kind", ("forebay", "sglang", "vllm"), "forebay")
    engine = Engine(
        name=_name(table, "local"),
        kind=kind,
        threads=table.integer("threads", 1, least=1),
        models=table.words("models"),
        urls=table.texts("urls"),
        args=table.texts("args"),
        per_policy=table.flag("per_policy", False),
    )
    table.end()
    if engine.per_policy and engine.is_started:
        raise table.error("per_policy", "shares out `urls`, which are missing")
    if kind != "forebay" and engine.is_started:
        raise table.error("urls", f"is missing: an engine of kind {kind} is used, and not started")
    return engine


def _apart(root: Table, engines: list[Engine], policies: list[Policy]) -> tuple[list[Engine], list[Policy]]:
    """Replaces an engine with `per_policy` by one engine for each of its policies, named `ENGINE.POLICY`.

    The policies that are returned have the names of these engines.
    """
    made: list[Engine] = []
    for engine in engines:
        if not engine.per_policy:
            made.append(engine)
            continue
        served = [policy for policy in policies if policy.engine == engine.name]
        if len(served) != len(engine.urls):
            raise root.error(
                "engine",
                f"{engine.name} has `per_policy` and {len(served)} policies, so it needs as many `urls`, and has "
                f"{len(engine.urls)}",
            )
        for policy, url in zip(served, engine.urls, strict=True):
            made.append(replace(engine, name=f"{engine.name}.{policy.name}", urls=[url], per_policy=False))
            policies = [replace(each, engine=made[-1].name) if each is policy else each for each in policies]
    return made, policies


def _name(table: Table, default: str | None = None) -> str:
    name = table.text("name") if default is None else table.text("name", default)
    if not NAME.fullmatch(name):
        raise table.error("name", f"must be at most 128 of A-Z a-z 0-9 . _ - and is {name!r}")
    return name


def _policies(table: Table, engines: list[Engine], seed: int) -> list[Policy]:
    name = _name(table)
    names = [engine.name for engine in engines]
    engine = table.text("engine", names[0] if names else "")
    if engine not in names:
        raise table.error("engine", f"is {engine or 'missing'}, and the engines are: {', '.join(names) or 'none'}")
    train = table.raw("train") if table.flag("trainable", True) else None
    if train is None:
        table.raw("train")
    warm = _warm(table.table("warm"), seed) if table.has("warm") else None
    values: dict[str, Any] = {
        "model": _model(table, seed),
        "engine": engine,
        "rules": table.raw("rules"),
        "warm": warm,
        "train": train,
    }
    count = table.integer("count", 0)
    table.end()
    if count > POLICIES_MAX:
        raise table.error("count", f"must be at most {POLICIES_MAX}, and is {count}")
    each = [f"{name}.{place}" for place in range(count)] if count else [name]
    return [Policy(name=each_name, **values) for each_name in each]


def _model(table: Table, seed: int) -> Tiny | Path:
    if isinstance(table.values.get("model"), str):
        return Path(table.text("model"))
    model = table.table("model")
    model.choice("init", ("tiny",), "tiny")
    tiny = Tiny(
        seed=model.integer("seed", seed),
        hidden=model.integer("hidden", 64, least=2),
        layers=model.integer("layers", 2, least=1),
        heads=model.integer("heads", 4, least=1),
        alphabet=model.text("alphabet", "") or None,
    )
    model.end()
    return tiny


def _warm(table: Table, seed: int) -> Warm:
    warm = Warm(
        demos=table.text("demos"),
        right=table.number("right", least=0.0),
        steps=table.integer("steps", least=1),
        batch=table.integer("batch", 128, least=1),
        rate=table.number("rate", 1e-3, least=0.0),
        seed=table.integer("seed", seed),
        shared=table.flag("shared", False),
    )
    if warm.right > 1.0:
        raise table.error("right", f"is a share, so it must be at most 1, and is {warm.right}")
    table.end()
    return warm


def _agents(table: Table) -> Agents:
    agents = Agents(count=table.integer("count", 1), env=table.words("env"))
    table.end()
    return agents


def _pass(table: Table, policies: list[Policy]) -> Pass:
    judged = Pass(
        series=table.text("series", "reward"),
        policy=table.text("policy", "*"),
        last=table.number("last", None),
        last_below=table.number("last_below", None),
        first_below=table.number("first_below", None),
        of=table.choice("of", ("mean", "each"), "each"),
        window=table.integer("window", WINDOW, least=1),
    )
    table.end()
    if judged.last is None and judged.last_below is None:
        raise table.error("last", "is missing: a criterion has `last`, `last_below` or both")
    if not judged.matches(policies):
        raise table.error("policy", f"is {judged.policy}, and no policy has such a name")
    return judged
