"""The compose file of a run file: its form, for every example, and for hostile names and values."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compose_support import VARIABLES, checked, is_mounted, read
from support import REPOSITORY
from test_run import PROGRAM, RUN, WORLD

from forebay._runner import command, compose, program, programs, roles, settings
from forebay._runner.output import Output
from forebay._runner.tables import dump, load
from forebay._runner.yaml import dump as dump_yaml
from forebay.errors import ConfigurationError

EXAMPLES = REPOSITORY / "examples"

RUN_FILES = sorted(path for path in EXAMPLES.glob("*.toml") if path.name != "defaults.toml")


def profiles_of(file: Path) -> list[str | None]:
    return [None, *load(file).get("profile", {})]


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The command has a handler of its own for SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# Every run file of examples/.


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_each_example_is_a_compose_file_with_a_trainer_for_each_policy(file: Path) -> None:
    for profile in profiles_of(file):
        found = settings.read(file, profile=profile)
        trained = [policy.name for policy in found.policies if policy.train is not None]
        text = compose.written(found, profile=profile, here=REPOSITORY, base=REPOSITORY)
        services = checked(text)["services"]
        assert [name for name in services if name.startswith("trainer-")] == [f"trainer-{name}" for name in trained]
        engines = [name for name in services if name.startswith("engine-")]
        assert len(engines) == len(found.engines)
        assert services["agents"]["deploy"]["replicas"] == found.agents.count
        one = ["forebay", "prepare", "agents", "watch"]
        assert set(services) == {*one, *engines, *(f"trainer-{name}" for name in trained)}
        for source in (volume["source"] for service in services.values() for volume in service["volumes"]):
            assert not source.startswith(".") or (REPOSITORY / source).is_dir()


def test_the_command_prints_the_file_or_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "memagent.toml")
    assert command.main([file, "--as", "compose", "--seed", "7", "--minutes", "2.5"]) == 0
    printed = capsys.readouterr().out
    watch = checked(printed)["services"]["watch"]["command"]
    assert watch[-4:] == ["--seed=7", "--out=/runs/memagent-7", "--only=watch", "--minutes=2.5"]
    assert command.main([file, "--as", "compose", "--seed", "7", "-o", str(tmp_path / "compose.yaml")]) == 0
    services = checked((tmp_path / "compose.yaml").read_text())["services"]
    # A folder that is not below the file has its whole path.
    assert str(EXAMPLES) in [volume["source"] for volume in services["agents"]["volumes"]]


@pytest.mark.parametrize(
    "options",
    [["--as", "compose", "--seeds", "1,2"], ["--as", "compose", "--resume"], ["--only", "watch", "--chaos", "agent:1"],
     ["-o", "compose.yaml"], ["--as", "swarm"], ["--only", "engine"]],
)  # fmt: skip
def test_options_without_a_meaning_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([str(EXAMPLES / "memagent.toml"), *options])
    assert ended.value.code == 2


def test_no_key_and_no_value_of_an_agent_is_in_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_KEY", *VARIABLES):
        monkeypatch.setenv(name, "secret-of-mine")
    given = RUN.replace("[[engine]]", '[service]\ndatabase = "postgres://me:secret-of-mine@host/x"\n[[engine]]')
    (folder / "run.toml").write_text(given + '[[agent]]\nenv = { JUDGE_KEY = "secret-of-mine" }\n')
    text = written(folder)
    assert "secret" not in text
    assert "FOREBAY_DATABASE:?" in read(text)["services"]["forebay"]["environment"]["FOREBAY_DATABASE"]


# Hostile names and values.


PIECES = [*"$'\" \\#:-{}[],&*!|>%@`aZ07~?=é😀\n\t\x07\x7f\x85\u2028\ufeff", "$$", "${HOME}"]

WHOLE = ["", " ", "- a", "a: b", "a #b", " a", "a ", "-", ": ", "true", "No", "null", "~", "1", "1e3", "0x1f", "1_000",
         ".inf", "---", "...", "{}", "[]", "<<", "=", "2001-01-01", "12:30:45", "y", "-1", "%T", "!s"]  # fmt: skip
"""Texts that are something else without quotes."""


def hostile(numbers: random.Random) -> str:
    if numbers.random() < 0.3:
        return numbers.choice(WHOLE)
    return "".join(numbers.choice(PIECES) for _ in range(numbers.randrange(1, 12)))


def test_what_is_written_reads_alike() -> None:
    numbers = random.Random(1)

    def value(depth: int) -> Any:
        kind = numbers.randrange(7 if depth < 3 else 4)
        if kind < 4:
            return [hostile(numbers), numbers.randrange(-5, 10**6), numbers.random() < 0.5, None][kind]
        if kind == 4:
            return [hostile(numbers) for _ in range(numbers.randrange(4))]
        table = {hostile(numbers): value(depth + 1) for _ in range(numbers.randrange(1, 4))}
        return table if kind == 5 else [table, {"name": hostile(numbers)}]

    for _ in range(500):
        written = {hostile(numbers): value(0) for _ in range(3)}
        assert read(dump_yaml(written)) == written
    for text in WHOLE:
        assert read(dump_yaml({text: [text]})) == {text: [text]}


def name_of_policy(numbers: random.Random) -> str:
    return "x" + "".join(numbers.choice("aZ0._-") for _ in range(numbers.randrange(12)))


def name_of_file(numbers: random.Random) -> str:
    return "x" + hostile(numbers).replace("/", "").replace("\0", "")


@pytest.mark.parametrize("seed", range(30))
def test_hostile_names_reach_the_processes_as_they_are(tmp_path: Path, seed: int) -> None:
    numbers = random.Random(seed)
    folder = tmp_path / name_of_file(numbers) / name_of_file(numbers)
    folder.mkdir(parents=True)
    named, data, world = (name_of_file(numbers) + end for end in (".py", ".jsonl", ".py"))
    other = tmp_path / name_of_file(numbers) / "world"
    other.mkdir(parents=True)
    (folder / named).write_text(PROGRAM)
    (folder / data).write_text('{"question": "1", "answer": "1"}\n')
    (other / world).write_text(WORLD)
    policies = list(dict.fromkeys(name_of_policy(numbers) for _ in range(4)))
    engines = list(dict.fromkeys(name_of_policy(numbers) for _ in range(2)))
    args = [hostile(numbers) for _ in range(3)]
    model = "/models/" + name_of_file(numbers)
    profile = hostile(numbers)
    values = {
        "name": hostile(numbers),
        "program": named,
        "task": {"data": data, "world": os.path.relpath(other / world, folder)},
        "engine": [
            {"name": engines[0], "models": {"base": model}},
            {"name": engines[-1] + "x", "kind": "sglang", "urls": ["http://127.0.0.1:30000"], "args": args},
        ],
        "policy": [{"name": name, "engine": engines[0]} for name in policies]
        + [{"name": "big", "engine": engines[-1] + "x", "model": model, "warm": False}],
        "agent": [{"count": numbers.randrange(5), "env": {"A": hostile(numbers)}}],
        "service": {"database": numbers.choice(["sqlite:" + hostile(numbers), "sqlite:{output}/forebay.db"])},
        "profile": {profile: {"minutes": 3}},
    }
    file = folder / (name_of_file(numbers) + ".toml")
    file.write_text(dump(values))
    found = settings.read(file, profile=profile)
    document = checked(compose.written(found, profile=profile, here=tmp_path, base=tmp_path))
    services = document["services"]
    options = command.command_line().parse_args(services["agents"]["command"][3:])
    assert (options.file, options.profile, options.only) == (file, profile, "agent")
    for path in (file, folder / data, found.program, found.task.world):
        assert is_mounted(path, services["agents"])
    sources = {volume["target"]: volume["source"] for volume in services["agents"]["volumes"]}
    assert os.path.normpath(tmp_path / sources[str(folder)]) == str(folder)
    (foreign,) = (service for service in services.values() if "sglang.launch_server" in service["command"])
    assert foreign["command"][-5:] == [*args, "--api-key", "the-engine-key"]
    assert is_mounted(Path(model), foreign)
    (own,) = (service for service in services.values() if service["command"][:2] == ["forebay-trainer", "serve"])
    followed = [each for option, each in itertools.pairwise(own["command"]) if option == "--follow"]
    assert followed == [f"{name}@http://forebay:8080" for name in policies]
    assert own["command"][-1] == f"base={model}"
    assert [name for name in services if name.startswith("trainer-")] == [
        f"trainer-{name}" for name in [*policies, "big"]
    ]
    # Containers find engines by these addresses, and the names of hosts have no underscore and no dot.
    given = services["agents"]["environment"]["FOREBAY_ENGINES"]
    hosts = [pair.partition("=http://")[2].removesuffix(":30000") for pair in given.split()]
    assert set(hosts) == {name for name in services if name.startswith("engine-")}
    assert all(re.fullmatch(r"[a-z0-9-]{1,63}", host) for host in hosts)


# What the file has where.


def written(folder: Path, profile: str | None = None, here: Path | None = None) -> str:
    found = settings.read(folder / "run.toml", profile=profile)
    return compose.written(found, profile=profile, here=here or folder, base=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("world.py", WORLD), ("program.py", PROGRAM), ("run.toml", RUN)):
        (tmp_path / name).write_text(text)
    return tmp_path


SGLANG = 'kind = "sglang"\nurls = ["http://127.0.0.1:30000", "http://localhost:30001"]\nargs = ["--tp", "2"]'


def changed(folder: Path, *pairs: tuple[str, str]) -> None:
    text = RUN
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    (folder / "run.toml").write_text(text)


def test_an_engine_with_addresses_of_this_machine_is_a_container_for_each_with_gpus_of_its_own(folder: Path) -> None:
    changed(folder, ("[[engine]]", f"[[engine]]\n{SGLANG}"), ('{ init = "tiny" }', '"models/big"'))
    services = checked(written(folder))["services"]
    reserved = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in services.items()
        if "resources" in service.get("deploy", {})
    }
    assert reserved == {"engine-local": ["0", "1"], "engine-local-2": ["2", "3"], "trainer-solver": ["4"]}
    engine, trainer = services["engine-local"], services["trainer-solver"]
    assert engine["command"][:7] == ["python3", "-m", "sglang.launch_server", "--model-path",
                                     "/runs/tiny-1/models/start/solver", "--served-model-name", "solver"]  # fmt: skip
    assert services["agents"]["environment"]["FOREBAY_ENGINES"] == (
        "local=http://engine-local:30000 local=http://engine-local-2:30000"
    )
    # The trainer publishes to the engine, so the engine has to be there. A relative folder is one of the caller's.
    assert trainer["depends_on"]["engine-local-2"]["condition"] == "service_healthy"
    for service in (engine, trainer, services["prepare"]):
        assert service["working_dir"] == str(folder)
        assert is_mounted(folder / "models/big", service)


def test_folders_are_mounted_once_and_not_over_that_of_the_run(folder: Path) -> None:
    changed(folder, ("[[engine]]", f'[[engine]]\nmodels = {{ a = "{folder}", b = "{folder}/b", c = "/c" }}'))
    volumes = checked(written(folder))["services"]["prepare"]["volumes"]
    assert [volume["target"] for volume in volumes] == ["/runs", "/c", str(folder)]
    for taken in ("/runs", "/"):
        changed(folder, ("[[engine]]", f'[[engine]]\nmodels = {{ a = "{taken}" }}'))
        with pytest.raises(ConfigurationError, match=f"have the folder of the run in /runs: move files of {taken}$"):
            written(folder)


def test_trainers_and_engines_read_each_model_that_the_run_file_names(folder: Path) -> None:
    train = 'reference = "/r/m", teacher = "{frozen}", critic = { model = "/c/m" },'
    frozen = '[[policy]]\nname = "frozen"\ntrainable = false\nmodel = "/f/m"\nwarm = false\n[[pass]]\npolicy = "solver"'
    changed(folder, ("train = {", f"train = {{ {train}"), ("[[pass]]", frozen))
    services = checked(written(folder))["services"]
    for name in ("trainer-solver", "engine-local", "prepare"):
        targets = [volume["target"] for volume in services[name]["volumes"]]
        assert targets[:4] == ["/runs", "/c/m", "/f/m", "/r/m"], name
    assert services["engine-local"]["command"][-1] == "frozen=/runs/tiny-1/models/start/frozen"
    assert "/r/m" not in str(services["agents"]["volumes"])


def test_a_long_name_is_cut_in_names_of_folders(folder: Path) -> None:
    changed(folder, ('name = "tiny"', f'name = "{"Ab$" * 100}"'))
    document = checked(written(folder))
    assert document["name"] == "ab-" * 33 + "a-1"
    assert f"--out=/runs/{document['name']}" in document["services"]["watch"]["command"]


def test_an_engine_and_a_service_that_run_elsewhere_are_used(folder: Path) -> None:
    changed(
        folder,
        (
            "[[engine]]",
            '[service]\nurl = "http://buffer:8080"\n[[engine]]\nkind = "sglang"\nurls = ["http://10.0.0.5:1"]',
        ),
    )
    document = checked(written(folder))
    services = document["services"]
    assert set(services) == {"prepare", "trainer-solver", "agents", "watch"}
    assert "buffer" not in document["volumes"]
    assert services["agents"]["environment"]["FOREBAY_ENGINES"] == "local=http://10.0.0.5:1"
    assert services["prepare"]["environment"]["FOREBAY_URL"] == "http://buffer:8080"
    assert "depends_on" not in services["prepare"]


def test_sessions_have_a_configuration_and_a_listener_that_agents_reach(folder: Path) -> None:
    far = '[[engine]]\nname = "far"\nkind = "sglang"\nurls = ["http://10.0.0.5/$x"]\nmodels = { judge = "/judge" }\n'
    changed(
        folder,
        ("[[engine]]", "[service]\nsessions = true\n[[engine]]"),
        ("[defaults.policy]", f"{far}[defaults.policy]"),
    )
    document = checked(written(folder))
    service = document["services"]["forebay"]
    (folder / "service.toml").write_text(document["configs"][service["configs"][0]["source"]]["content"])
    config = load(folder / "service.toml")
    assert config["sessions"] == {"listen": "0.0.0.0:8081", "public_url": "http://forebay:8081"}
    assert [upstream["urls"] for upstream in config["upstream"]] == [
        ["http://engine-local:30000"],
        ["http://10.0.0.5/$x"],
    ]
    assert config["upstream"][0]["key_file"] == f"/run/secrets/{service['secrets'][0]}"
    assert document["secrets"] == {service["secrets"][0]: {"environment": "FOREBAY_ENGINE_KEY"}}
    assert service["environment"]["FOREBAY_CONFIG"] == service["configs"][0]["target"]


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        (
            [
                ("[[engine]]", '[[engine]]\nkind = "sglang"\nurls = ["http://127.0.0.1:1"]'),
                ('name = "solver"\n', 'name = "solver"\ncount = 2\n'),
            ],
            "serves one model, .* solver.0, solver.1. Give each an engine of its own",
        ),
        ([("[[engine]]", '[service]\nurl = "http://localhost:8080"\n[[engine]]')], "`service.url` is .* cannot reach"),
        ([("[[engine]]", '[service]\nurl = "http://me:word@host"\n[[engine]]')], "`service.url` has a password"),
        (
            [("[[engine]]", '[[engine]]\nurls = ["http://127.1.2.3:1", "http://10.0.0.5:1"]')],
            "`engine.local.urls` has addresses of this machine, .* and others",
        ),
        (
            [("[[engine]]", f"[[engine]]\n{SGLANG}"), ('"--tp", "2"', '"--api-key=x"')],
            "`engine.local.args` has --api-key",
        ),
        (
            [("[[engine]]", f"[[engine]]\n{SGLANG}"), ("[[pass]]", 'count = 2\n[[pass]]\npolicy = "s*"')],
            "several policies in training: solver.0, solver.1",
        ),
        ([("[[engine]]", f"[[engine]]\n{SGLANG.replace('sglang', 'vllm')}")], "kind vllm, and the trainer of solver"),
        (
            [("[[engine]]", f'[[engine]]\n[[engine]]\nname = "far"\n{SGLANG}')],
            "`engine.far` of kind sglang serves no policy",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_in_containers_is_refused(folder: Path, pairs: list[tuple[str, str]], error: str) -> None:
    changed(folder, *pairs)
    with pytest.raises(ConfigurationError, match=error):
        written(folder)


def test_vllm_serves_a_model_that_is_not_trained(folder: Path) -> None:
    vllm = SGLANG.replace("sglang", "vllm")
    changed(folder, ("[[engine]]", f"[[engine]]\n{vllm}"), ("[[pass]]", "trainable = false\n[[pass]]"))
    services = checked(written(folder))["services"]
    assert services["engine-local"]["command"][:3] == ["vllm", "serve", "/runs/tiny-1/models/start/solver"]
    assert "trainer-solver" not in services


# One part of a run at a time.


def test_processes_of_the_program_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_AGENT", raising=False)
    numbers: list[int] = []
    for name in ("0a1b2c3d4e5f", "0a1b2c3d4e60", "0a1b2c3d4e5f"):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        numbers.append(roles.number())
    assert numbers[0] == numbers[2] != numbers[1]
    monkeypatch.setenv("FOREBAY_AGENT", "3")
    assert roles.number() == 3


def test_processes_of_the_program_share_the_workers_of_an_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ENGINES", "local=http://a:1 local=http://b:1")
    found = settings.read(folder / "run.toml")
    hosts = [program.Run(found, agent=agent).openai().base_url.host for agent in range(3)]
    assert hosts == ["a", "b", "a"]


def test_a_trainer_publishes_to_the_addresses_of_the_environment_with_the_key_of_the_engines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine with the trainer, and without the service.
    (folder / "forebay-trainer").symlink_to("/bin/true")
    monkeypatch.delenv("FOREBAY_BIN")
    monkeypatch.delenv("FOREBAY_TRAINER_BIN", raising=False)
    monkeypatch.setattr("forebay.server._script_folders", list)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("FOREBAY_ENGINES", "local=http://a:1 local=http://b:1")
    changed(folder, ("[[engine]]", f"[[engine]]\n{SGLANG}"))
    output = Output(folder / "out", {}, resume=False)
    keys = {}, {"key_env": "FOREBAY_ENGINE_KEY"}
    for key, given in zip(keys, ("", "the-key"), strict=True):
        monkeypatch.setenv("FOREBAY_ENGINE_KEY", given)
        found = settings.read(folder / "run.toml")
        roles.use_engines(found)
        process = programs.trainer(found, found.policies[0], output, {"solver": folder}, "http://forebay:8080")
        assert process.command[0] == str(folder / "forebay-trainer")
        config = load(output.folder / "trainers" / "solver.toml")
        engines = [{"kind": "sglang", "url": url, **key} for url in ("http://a:1", "http://b:1")]
        assert config["publish"]["engine"] == engines
    output.close()


def test_a_part_says_what_it_lacks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FOREBAY_URL", raising=False)
    arguments = [str(folder / "run.toml"), "--out", str(folder / "out")]
    assert command.main([*arguments, "--only", "watch"]) == 1
    assert "`--only prepare` makes it" in capsys.readouterr().err
    assert command.main([*arguments, "--only", "prepare"]) == 1
    assert "name its address in FOREBAY_URL" in capsys.readouterr().err
