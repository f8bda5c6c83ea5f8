"""Whole runs beyond one machine, with processes in the place of containers and steps, and the files of
examples/cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_support import VARIABLES, checked, read, replaced
from support import REPOSITORY
from test_run import PROGRAM, RUN, WORLD

from forebay._runner import command, compose, settings
from forebay._runner.programs import free_address
from forebay._runner.tables import load

EXAMPLES = REPOSITORY / "examples"

CLUSTER = EXAMPLES / "cluster"


# Compose.


TRACE = """
import json, os
from pathlib import Path
names = ("FOREBAY_AGENT", "FOREBAY_KEY", "FOREBAY_ENGINE_KEY", "FOREBAY_ENGINES", "JUDGE")
traced = {name: os.environ.get(name) for name in names}
Path(os.environ["FOREBAY_OUTPUT"], f"traced-{traced['FOREBAY_AGENT']}.json").write_text(json.dumps(traced))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("world.py", WORLD), ("program.py", TRACE + PROGRAM), ("run.toml", RUN)):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def programs(folder: Path) -> Path:
    """A folder with the program of the service, and one in the place of the trainer."""
    programs = folder / "target" / "release"
    programs.mkdir(parents=True)
    (programs / "forebay").symlink_to(os.environ["FOREBAY_BIN"])
    fake = Path(__file__).with_name("fake_trainer.py")
    (programs / "forebay-trainer").write_text(f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n')
    for name in ("python", "python3"):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for path in programs.iterdir():
        if not path.is_symlink():
            path.chmod(0o755)
    return programs


class Played:
    """A compose file with processes instead of containers, in the order of `depends_on`."""

    def __init__(self, text: str, folder: Path, programs: Path, keys: dict[str, str]) -> None:
        (folder / "data").mkdir(exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        address, engine = free_address(), free_address()
        for old, new in (
            *((f"{host}:8080", address) for host in ("0.0.0.0", "forebay")),
            *((f"{host}:30000", engine) for host in ("0.0.0.0", "127.0.0.1", "engine-local")),
            ("/runs", str(folder / "runs")),
            ("sqlite:/data", f"sqlite:{folder}/data"),
        ):
            text = text.replace(old, new)
        self.services = replaced(read(text), keys)["services"]
        self.folder = folder
        self.path = f"{programs}:{os.environ['PATH']}"
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, service: str) -> dict[str, str]:
        given = self.services[service]["environment"]
        return {"PATH": self.path, "PYTHONPATH": str(REPOSITORY / "python"), "HOME": str(self.folder), **given}

    def command(self, service: str) -> list[str]:
        image, arguments = self.services[service]["image"], self.services[service]["command"]
        # The image of the service has the program as its entry point.
        return ["forebay", *arguments] if image == "forebay" else arguments

    def keys(self) -> dict[str, str]:
        """Creates the keys of the service, as the head of the file does."""
        made = {}
        for role in ("admin", "train", "produce"):
            create = ["forebay", "keys", "create", "--name", role, "--role", role]
            out = subprocess.run(create, env=self.environment("forebay"), capture_output=True, text=True, check=True)
            made[f"FOREBAY_{role.upper()}_KEY"] = out.stdout.strip()
        return made

    def up(self) -> None:
        while len(self.started) < len(self.services):
            for name, service in self.services.items():
                after = service.get("depends_on", {})
                if name not in self.started and set(after) <= set(self.started):
                    for other, condition in after.items():
                        self.wait_for(other, condition["condition"])
                    self.start(name)

    def start(self, name: str) -> None:
        with (self.folder / "logs" / name).open("ab") as log:
            self.started[name] = subprocess.Popen(
                self.command(name), env=self.environment(name), cwd=self.folder, stdout=log, stderr=log
            )

    def wait_for(self, name: str, condition: str) -> None:
        process = self.started[name]
        if condition == "service_completed_successfully":
            assert process.wait(60) == 0, self.log(name)
        if condition == "service_healthy":
            test = self.services[name]["healthcheck"]["test"]
            assert test[0] == "CMD"
            until(lambda: subprocess.run(test[1:], env=self.environment(name), capture_output=True).returncode == 0)

    def log(self, name: str) -> str:
        return (self.folder / "logs" / name).read_text()

    def down(self) -> None:
        for process in reversed(self.started.values()):
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


def test_the_commands_of_a_compose_file_are_a_whole_run_that_another_start_continues(
    folder: Path, programs: Path
) -> None:
    (folder / "run.toml").write_text(RUN + '[[agent]]\ncount = 3\nenv = { JUDGE = "$me" }\n')
    found = settings.read(folder / "run.toml")
    text = compose.written(found, profile=None, here=folder, base=folder)
    checked(text)
    before = Played(text, folder, programs, VARIABLES)
    played = Played(text, folder, programs, {**VARIABLES, **before.keys()})
    try:
        played.up()
        assert played.started["watch"].wait(60) == 0, played.log("watch")
        # A trainer that is done ends, and is not started again.
        assert played.started["trainer-solver"].wait(60) == 0, played.log("trainer-solver")
    finally:
        played.down()
    assert played.started["agents"].returncode == 0, played.log("agents")
    out = folder / "runs" / "tiny-1"
    result = json.loads((out / "result.json").read_text())
    assert (result["passed"], result["steps"], result["ended"]) == (True, {"solver": 8}, "all steps are trained")
    assert "solver.warm: 2 steps of 4 demonstrations" in played.log("prepare")
    (traced,) = (json.loads(path.read_text()) for path in out.glob("traced-*.json"))
    assert int(traced["FOREBAY_AGENT"]) > 3
    assert traced["JUDGE"] == "$me"
    assert traced["FOREBAY_ENGINE_KEY"] == "the-engine-key"
    assert traced["FOREBAY_KEY"] == played.services["agents"]["environment"]["FOREBAY_KEY"]
    assert traced["FOREBAY_ENGINES"] == played.services["agents"]["environment"]["FOREBAY_ENGINES"]
    start = out / "models" / "start" / "solver"
    assert start.resolve() == (out / "trainers" / "solver.warm").resolve()
    # The next start: the warm start is done, and so are all steps.
    again = Played(text, folder, programs, {**VARIABLES, **key_of(played)})
    (folder / "logs" / "prepare").unlink()
    try:
        again.up()
        assert again.started["watch"].wait(60) == 0, again.log("watch")
    finally:
        again.down()
    assert "demonstrations" not in again.log("prepare")
    assert json.loads((out / "result.json").read_text())["steps"] == {"solver": 8}


def key_of(played: Played) -> dict[str, str]:
    of = {"prepare": "FOREBAY_ADMIN_KEY", "trainer-solver": "FOREBAY_TRAIN_KEY", "agents": "FOREBAY_PRODUCE_KEY"}
    return {name: played.services[service]["environment"]["FOREBAY_KEY"] for service, name in of.items()}


# Slurm.


SBATCH = CLUSTER / "generator_verifier.sbatch"

OPTIONS = {
    "job-name": r"\w+",
    "output": r"\S+%j\S*",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "mem-per-cpu": r"\d+[KMGT]",
    "time": r"\d\d:\d\d:\d\d",
    "requeue": None,
}
"""Options of sbatch that the file uses, with the form of their values."""

SRUN = """
import json, os, subprocess, sys
known = {"--export", "--exact", "--kill-on-bad-exit", "--nodes", "--ntasks", "--relative"}
arguments = sys.argv[1:]
options = {}
while arguments[0].startswith("--"):
    name, _, value = arguments.pop(0).partition("=")
    assert name in known, name
    options[name] = value
assert options["--nodes"] == "1" and "--exact" in options
with open(os.environ["STEPS"], "a") as steps:
    print(json.dumps([options["--relative"], options["--ntasks"], arguments]), file=steps)
environments = [{**os.environ, "SLURM_PROCID": str(task)} for task in range(int(options["--ntasks"]))]
tasks = [subprocess.Popen(arguments, env=environment) for environment in environments]
sys.exit(max(task.wait() for task in tasks))
"""


def directives(text: str) -> dict[str, str]:
    """The options of sbatch, which stand before the first command."""
    head = text[: text.index("\nset -euo pipefail\n")]
    assert all(line.startswith("#") for line in head.splitlines() if line)
    assert "#SBATCH" not in text[len(head) :]
    lines = [line.removeprefix("#SBATCH --") for line in head.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_job_of_slurm_is_a_script_whose_options_and_tasks_are_right() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    text = SBATCH.read_text()
    assert text.startswith("#!/bin/bash\n")
    found = directives(text)
    for name, value in found.items():
        form = OPTIONS[name]
        assert value == "" if form is None else re.fullmatch(form, value), (name, value)
    assert set(found) == set(OPTIONS)
    # A step waits for ever if the steps that run leave no task on its node.
    policies = len(settings.read(EXAMPLES / "generator_verifier.toml").policies)
    # The service, the engine, and `prepare` or `watch`.
    assert policies + 3 <= int(found["ntasks-per-node"])
    agents = re.search(r"agents=\$\{FOREBAY_AGENTS:-(\d+)\}", text)
    assert agents is not None and int(agents[1]) <= int(found["ntasks-per-node"])
    assert int(found["nodes"]) == 2


def test_the_job_of_slurm_is_a_whole_run_that_a_queued_one_continues(folder: Path, programs: Path) -> None:
    examples = folder / "examples"
    examples.mkdir()
    two = RUN.replace('[[policy]]\nname = "solver"', '[[policy]]\nname = "generator"\n[[policy]]\nname = "verifier"')
    two = two.replace('name = "tiny"', 'name = "generator_verifier"')
    (examples / "generator_verifier.toml").write_text(two.split("[profile.other]")[0])
    (examples / "world.py").write_text(WORLD)
    both = PROGRAM.replace("for place in range(2):", "for place, name in enumerate(2 * ['generator', 'verifier']):")
    both = both.replace('"solver"', "name").replace("place == 0", "place < 2")
    (examples / "program.py").write_text(TRACE + both)
    (folder / "python").symlink_to(REPOSITORY / "python")
    for name, text in (
        ("srun", f"#!{sys.executable}\n{SRUN}"),
        ("scontrol", "#!/bin/sh\nprintf '127.0.0.1\\nother\\n'\n"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    ports = [free_address().rpartition(":")[2] for _ in range(2)]
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "FOREBAY_PORT": ports[0],
        "FOREBAY_ENGINE_PORT": ports[1],
        "STEPS": str(folder / "steps"),
    }
    out = folder / "data" / "runs" / "generator_verifier-1"
    for start in range(2):
        with (folder / "job.log").open("wb") as log:
            job = subprocess.Popen(
                ["bash", str(SBATCH)], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            status = job.wait(120)
        finally:
            # What Slurm does when the script has ended.
            os.killpg(job.pid, signal.SIGKILL)
        text = (folder / "job.log").read_text()
        assert status == 0, text
        assert ("demonstrations" in text) == (start == 0)
        result = json.loads((out / "result.json").read_text())
        assert (result["passed"], result["steps"]) == (True, {"generator": 8, "verifier": 8})
        assert sorted(path.name for path in out.glob("traced-*")) == [f"traced-{number}.json" for number in range(4)]
    # Its steps are the services of the compose file, with other addresses and another folder.
    steps = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
    commands = [words[4:] if words[0] == "bash" else words for _, _, words in steps]
    assert [(relative, tasks) for relative, tasks, words in steps if words[0] == "bash"] == 2 * [("1", "4")]
    text = compose.written(settings.read(examples / "generator_verifier.toml"), profile=None, here=folder, base=folder)
    swaps = {
        "http://forebay:8080": f"http://127.0.0.1:{ports[0]}",
        "0.0.0.0:30000": f"0.0.0.0:{ports[1]}",
        "/runs/generator_verifier-1": str(out),
    }
    services = checked(swapped(text, swaps))["services"]
    services.pop("forebay")
    for name, service in services.items():
        words = [{"python": "python3"}.get(word, word) for word in without_minutes(service["command"])]
        assert words in map(without_minutes, commands), name
    assert len(steps) == 2 * (len(services) + 1)
    state = out.with_name(out.name + ".service")
    assert {path.stat().st_mode & 0o777 for path in state.glob("*.key")} == {0o600}


# Kubernetes.


MANIFEST = CLUSTER / "generator_verifier.yaml"

JOBSET_FIELDS = {"failurePolicy", "managedBy", "network", "replicatedJobs", "startupPolicy", "successPolicy", "suspend",
                 "coordinator", "ttlSecondsAfterFinished", "volumeClaimPolicies"}  # fmt: skip

REPLICATED_FIELDS = {"name", "groupName", "template", "replicas", "dependsOn"}

JOB_FIELDS = {"activeDeadlineSeconds", "backoffLimit", "backoffLimitPerIndex", "completionMode", "completions",
              "manualSelector", "maxFailedIndexes", "parallelism", "podFailurePolicy", "podReplacementPolicy",
              "selector", "successPolicy", "suspend", "template", "ttlSecondsAfterFinished"}  # fmt: skip

LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"


def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    found = documents()
    yield "forebay", found["Deployment"]["spec"]["template"]["spec"]
    for job in found["JobSet"]["spec"]["replicatedJobs"]:
        yield job["name"], job["template"]["spec"]["template"]["spec"]


def test_the_manifest_is_a_jobset_of_v1alpha2() -> None:
    found = documents()
    assert {kind: document["apiVersion"] for kind, document in found.items()} == {
        "Service": "v1",
        "Deployment": "apps/v1",
        "PersistentVolumeClaim": "v1",
        "JobSet": "jobset.x-k8s.io/v1alpha2",
    }
    assert all(re.fullmatch(LABEL, document["metadata"]["name"]) for document in found.values())
    spec = found["JobSet"]["spec"]
    assert set(spec) <= JOBSET_FIELDS
    earlier: list[str] = []
    for job in spec["replicatedJobs"]:
        assert set(job) <= REPLICATED_FIELDS
        assert set(job["template"]["spec"]) <= JOB_FIELDS
        # The name of a pod is that of the JobSet, of the job and two numbers.
        assert re.fullmatch(LABEL, f"{found['JobSet']['metadata']['name']}-{job['name']}-0-0")
        for after in job.get("dependsOn", []):
            assert after["name"] in earlier and after["status"] in ("Ready", "Complete")
        assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] in ("OnFailure", "Never")
        earlier.append(job["name"])
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["watch"]}
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["targetReplicatedJobs"]) == ("FailJobSet", ["watch"])
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    (watch,) = (job for job in spec["replicatedJobs"] if job["name"] == "watch")
    # A policy of failures of pods needs pods that are never started again.
    assert watch["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_pods_mount_and_read_only_what_there_is() -> None:
    found = documents()
    head = MANIFEST.read_text().split("\napiVersion")[0]
    claim = found["PersistentVolumeClaim"]["metadata"]["name"]
    secrets = set(re.findall(r"--from-\w+=(\w+)=", head))
    for _, pod in pods():
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
        for volume in pod.get("volumes", []):
            assert volume["persistentVolumeClaim"]["claimName"] == claim
        for variable in container["env"]:
            assert ("value" in variable) != ("valueFrom" in variable)
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            assert reference is None or (reference["name"] == "forebay" and reference["key"] in secrets)
            assert "KEY" not in variable["name"] or reference is not None
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == found["Deployment"]["spec"]["selector"]["matchLabels"] == labels


def test_the_manifest_has_the_commands_of_the_compose_file() -> None:
    found = settings.read(EXAMPLES / "generator_verifier.toml")
    services = checked(compose.written(found, profile=None, here=EXAMPLES, base=EXAMPLES))["services"]
    wanted = {name: without_minutes(service["command"]) for name, service in services.items()}
    image = {str(EXAMPLES): "/forebay/examples"}
    names = {"engine": "engine-local"}
    for name, pod in pods():
        (container,) = pod["containers"]
        given = without_minutes(container.get("command", container.get("args")))
        expected = wanted.pop(names.get(name, name))
        assert given == [swapped(each, image) for each in expected], name
        # The same variables, too, apart from what Kubernetes does otherwise.
        variables = {each["name"]: each for each in container["env"]}
        other = services[names.get(name, name)]["environment"]
        assert set(variables) - {"FOREBAY_AGENT"} >= set(other) - {"FOREBAY_ENGINE_KEY", "FOREBAY_AGENT"}, name
        assert "FOREBAY_URL" not in variables or variables["FOREBAY_URL"]["value"] == other["FOREBAY_URL"]
    assert wanted == {}
    spec = documents()["JobSet"]
    host = f"{spec['metadata']['name']}-engine-0-0.{spec['metadata']['name']}"
    assert f"value: local=http://{host}:30000\n" in MANIFEST.read_text()


def without_minutes(words: list[str]) -> list[str]:
    """The time limit is that of another machine."""
    return [word for word in words if not word.startswith("--minutes=")]


def swapped(text: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        text = text.replace(old, new)
    return text


# The document, and the image.


def test_the_commands_of_the_documents_are_those_of_the_runner() -> None:
    texts = {path: path.read_text() for path in (REPOSITORY / "docs/clusters.md", EXAMPLES / "README.md")}
    found = [line for text in texts.values() for line in re.findall(r"python -m forebay\.run ([^`\n]*)", text)]
    assert len(found) >= 6
    for line in found:
        # The columns of a block, and what stands for a name.
        words = shlex.split(re.split(r" {3,}", line)[0].replace("NAME", "name"))
        assert command.command_line().parse_args(words).file is not None
    for variable in set(re.findall(r"FOREBAY_[A-Z_]+", texts[REPOSITORY / "docs/clusters.md"])):
        sources = [*(REPOSITORY / "python/forebay").rglob("*.py"), *(REPOSITORY / "trainer/src").rglob("*.rs")]
        assert any(variable in source.read_text() for source in sources), variable


def test_the_image_of_a_run_is_built_with_the_versions_of_the_repository() -> None:
    text = (CLUSTER / "Containerfile").read_text()
    channel = load(REPOSITORY / "rust-toolchain.toml")["toolchain"]["channel"]
    assert f"FROM docker.io/library/rust:{channel}-slim-" in text
    assert f"ENV RUSTUP_TOOLCHAIN={channel}\n" in text
    libtorch = re.search(r"^version=(\S+)$", (REPOSITORY / "scripts/libtorch").read_text(), re.MULTILINE)
    assert libtorch is not None and text.count(f"target/libtorch/{libtorch[1]}-Linux-x86_64/lib") == 2
    # The same address as in the compose file, and the same paths as in the manifest.
    assert f"VOLUME {compose.OUTPUTS}\n" in text
    for line in text.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in shlex.split(line)[1:-1]:
                assert (REPOSITORY / source).exists(), source
