"""The runner: run files, processes that are kept alive, and whole runs with a trainer that trains nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support import REPOSITORY

import forebay
from forebay._runner import held_out, picture, processes, program, programs, settings, stages, tables
from forebay._runner.output import Output
from forebay._runner.processes import Process, RunFailed, Supervisor
from forebay._runner.program import Run
from forebay._runner.progress import Curve, Progress, read_steps, table
from forebay._runner.tiny import SPECIAL, Vocabulary
from forebay.errors import ConfigurationError
from forebay.testing import Engine

WORLD = """
ALPHABET = "01+="
class Question:
    id = ""
def questions(kind, seed):
    while True:
        yield Question()
def demos(name, right, numbers, prompt):
    while True:
        user, answer = prompt("ask", q="1+1"), numbers.choice("01")
        yield [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
"""

PROGRAM = """
import forebay
run, fb = forebay.run(), forebay.Client()
def execute(q):
    with fb.bundle() as b:
        for place in range(2):
            r = b.rollout("solver", group_id=q.id, group_size=2)
            # As if training helped: the later the version, the more is right.
            r.reward = float(place == 0 or r.policy_version > 2)
            r.reward_components = {"gold": r.reward}
            r.record({"choices": [{"index": 0, "message": {"content": "1"}, "finish_reason": "stop", "token_ids": [5],
                "logprobs": {"content": [{"token": "1", "logprob": -0.5}]}}], "prompt_token_ids": [5, 4, 6]})
run.play(execute)
"""

RUN = """
name = "tiny"
program = "program.py"
minutes = 1
[task]
prompts = { ask = "{q}=" }
[[engine]]
[defaults.policy]
model = { init = "tiny" }
warm = { demos = "any", right = 0.5, steps = 2, batch = 4 }
rules = { group = { size = 2 }, batch = { groups = 2 }, retention = { dropped_s = 60 } }
train = { steps = 8, schedule = { peak = 1e-3 } }
[[policy]]
name = "solver"
[[pass]]
series = "gold"
first_below = 0.9
last = 0.95
window = 2
[profile.other]
minutes = 2.5
policy = [{ name = "solver", warm = false, train = { schedule = { peak = 1e-6 } } }]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("world.py", WORLD), ("program.py", PROGRAM), ("run.toml", RUN)):
        (tmp_path / name).write_text(text)
    return tmp_path


def changed(folder: Path, old: str, new: str) -> Path:
    assert old in RUN
    (folder / "run.toml").write_text(RUN.replace(old, new))
    return folder / "run.toml"


def test_defaults_are_merged_into_each_policy_and_a_profile_over_all(folder: Path) -> None:
    found = settings.read(folder / "run.toml")
    (policy,) = found.policies
    assert (policy.name, policy.engine, policy.rules["group"]) == ("solver", "local", {"size": 2})
    assert policy.warm is not None and (policy.warm.steps, policy.warm.seed) == (2, 1)
    assert policy.train == {"steps": 8, "schedule": {"peak": 1e-3}}
    other = settings.read(folder / "run.toml", profile="other", seed=7)
    assert other.policies[0].train == {"steps": 8, "schedule": {"peak": 1e-6}}
    assert (other.policies[0].warm, other.minutes, other.seed) == (None, 2.5, 7)


def test_a_count_makes_policies_with_numbers(folder: Path) -> None:
    found = settings.read(
        changed(folder, 'name = "solver"\n[[pass]]', 'name = "solver"\ncount = 3\n[[pass]]\npolicy = "s*.2"')
    )
    assert [policy.name for policy in found.policies] == ["solver.0", "solver.1", "solver.2"]
    assert found.passes[0].matches(found.policies) == ["solver.2"]


def test_an_included_file_is_below(folder: Path) -> None:
    (folder / "defaults.toml").write_text('minutes = 9\n[task]\nin_flight = 3\nanswer = "boxed"\n')
    found = settings.read(changed(folder, 'name = "tiny"', 'name = "tiny"\ninclude = "defaults.toml"'))
    assert (found.minutes, found.task.in_flight, found.task.answer) == (1, 3, "boxed")
    assert found.task.prompts == {"ask": "{q}="}


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('name = "tiny"\n', "", "`name` is missing"),
        ("program.py", "other.py", "`program` is other.py, and there is no such file"),
        ("minutes = 1", 'minutes = "1"', "`minutes` must be a number, and is '1'"),
        ("minutes = 1", "minuts = 1", "`minuts` is not a key of a run file; known here are agent, defaults"),
        (
            "[[engine]]",
            '[[engine]]\nname = "a b"',
            "`engine[0].name` must be at most 128 of A-Z a-z 0-9 . _ - and is 'a b'",
        ),
        ('name = "solver"', 'name = ".."', "`policy[0].name` must be at most 128 of"),
        ("[[engine]]", '[[engine]]\nkind = "trt"', "`engine[0].kind` must be one of forebay, sglang, vllm"),
        ("[[engine]]", '[[engine]]\nkind = "vllm"', "`engine[0].urls` is missing"),
        (
            "[defaults.policy]",
            '[defaults.policy]\nengine = "far"',
            "`policy[0].engine` is far, and the engines are: local",
        ),
        ("right = 0.5", "right = 1.5", "`policy[0].warm.right` is a share"),
        ("steps = 2,", "", "`policy[0].warm.steps` is missing"),
        ("steps = 2,", "steps = true,", "`policy[0].warm.steps` must be a whole number, and is True"),
        ("[[pass]]", '[[pass]]\npolicy = "x*"', "`pass[0].policy` is x*, and no policy has such a name"),
        ('[[policy]]\nname = "solver"\n', "", "`policy` is missing"),
        ('[[policy]]\nname = "solver"\n', '[[policy]]\nname = "a"\n[[policy]]\nname = "a"\n', "the same name twice"),
        ("[task]", "[task", "is not TOML"),
    ],
)
def test_errors_name_the_key(folder: Path, old: str, new: str, error: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        settings.read(changed(folder, old, new))
    assert error in str(raised.value)
    assert "run.toml" in str(raised.value)


def test_an_unknown_profile_is_refused_with_those_there_are(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="no \\[profile.qwen\\]; there are: other"):
        settings.read(folder / "run.toml", profile="qwen")


def test_written_toml_reads_alike(tmp_path: Path) -> None:
    values = {
        "a": 1,
        "b": 1e-06,
        "c": True,
        "d": 'x"\\\n\x7f😀',
        "e": [1, {"f": "g"}],
        "h": {"i-j": {"k l": 0.5}},
        "m": [],
    }
    (tmp_path / "written.toml").write_text(tables.dump({**values, "absent": None}))
    assert tables.load(tmp_path / "written.toml") == values
    (tmp_path / "written.toml").write_bytes(b'a = "\xff"')
    with pytest.raises(ConfigurationError, match="written.toml is not TOML: 'utf-8' codec"):
        tables.load(tmp_path / "written.toml")


def test_a_demonstration_trains_what_the_assistant_says_and_its_end() -> None:
    vocabulary = Vocabulary("0123")
    user, assistant, end = (vocabulary.ids[name] for name in ("<user>", "<assistant>", "<eos>"))
    messages = [("user", "1"), ("assistant", "23"), ("tool", "0"), ("assistant", "1")]
    tokens, mask = vocabulary.demonstration({"role": role, "content": text} for role, text in messages)
    zero = len(SPECIAL)
    assert tokens[:7] == [user, zero + 1, end, assistant, zero + 2, zero + 3, end]
    assert mask == [1, 1, 1, 0, 0, 0, 0, 1, 1]
    with pytest.raises(ConfigurationError, match="lacks 'x'"):
        vocabulary.encode("1x")


def test_answers_and_prompts_are_as_the_run_file_says(folder: Path) -> None:
    task = settings.read(folder / "run.toml").task
    assert program.prompt(task, "ask", q="1+0") == "1+0="
    with pytest.raises(ConfigurationError, match="`task.prompts.revise` is missing; there are: ask"):
        program.prompt(task, "revise")
    assert program.boxed("so \\boxed{1} or \\boxed{ {2}3 } it is") == "{2}3"
    assert [program.boxed(text) for text in ("none", "\\boxed{4")] == ["", ""]


# Processes.


@pytest.fixture
def said() -> list[str]:
    """What the supervisor says."""
    return []


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[Supervisor]:
    monkeypatch.setattr(processes, "PAUSES_S", (0.0,))
    supervisor = Supervisor(said.append)
    yield supervisor
    supervisor.stop(("agent", "trainer", "service"))


def python(folder: Path, name: str, code: str, **options: Any) -> Process:
    options = {"kind": "service", **options}
    return Process(name=name, command=[sys.executable, "-c", code], log=folder / f"{name}.log", **options)


def lines(process: Process) -> int:
    return len(process.log.read_text().splitlines())


def test_a_process_that_ends_is_started_again_until_it_ended_too_often(
    supervisor: Supervisor, said: list[str], tmp_path: Path
) -> None:
    process = supervisor.start(python(tmp_path, "weak", "print('began', flush=True); raise SystemExit(3)"))
    with pytest.raises(RunFailed, match="weak ended 6 times, the last time with status 3:\n(began\n)+"):
        supervisor.wait(lambda: False, "never", 60)
    assert lines(process) == 6
    assert said == [f"weak ended with status 3, and is started again in 0 s ({process.log})", "weak wrote: began"] * 5


def test_a_program_that_has_worked_may_end_however_often(supervisor: Supervisor, tmp_path: Path) -> None:
    process = supervisor.start(python(tmp_path, "agent", "raise SystemExit(1)", kind="agent", works_after_s=0.0))
    supervisor.wait(lambda: process.restarts > processes.RESTARTS_MAX + 1, "another start", 60)

    broken = supervisor.start(python(tmp_path, "broken", "import missing_package", kind="agent", works_after_s=60.0))
    with pytest.raises(RunFailed, match="broken ended 6 times(.|\n)*No module named 'missing_package'"):
        supervisor.wait(lambda: False, "never", 60)
    assert broken.restarts == processes.RESTARTS_MAX + 1


def test_the_last_line_of_a_process_is_not_that_of_an_earlier_start(
    supervisor: Supervisor, said: list[str], tmp_path: Path
) -> None:
    code = "import pathlib as p; m = p.Path({!r}); m.exists() or print('first'); m.touch(); raise SystemExit(1)"
    process = supervisor.start(python(tmp_path, "once", code.format(str(tmp_path / "mark"))))
    supervisor.wait(lambda: process.restarts == 2, "two starts", 60)
    assert [line for line in said if "wrote" in line] == ["once wrote: first"]


def test_a_process_that_is_done_is_not_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    process = supervisor.start(python(tmp_path, "trainer", "print('began')", kind="trainer", ends=True))
    supervisor.wait(lambda: process.is_done, "its end", 60)
    supervisor.check()
    assert (lines(process), process.restarts) == (1, 0)


def test_what_is_killed_on_purpose_is_started_again_and_not_counted(supervisor: Supervisor, tmp_path: Path) -> None:
    code = "import time; print('began', flush=True); time.sleep(600)"
    process = supervisor.start(python(tmp_path, "trainer", code, kind="trainer"))
    for began in range(1, 9):
        supervisor.wait(lambda began=began: process.is_running and lines(process) == began, "a start", 60)
        assert supervisor.kill("trainer", random.Random(1)) is process
        supervisor.wait(lambda: not process.is_running, "the kill", 60)
    assert (process.kills, process.restarts) == (8, 0)
    assert supervisor.kill("engine", random.Random(1)) is None


def test_agents_stop_before_the_service_and_with_what_they_started(supervisor: Supervisor, tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import signal, subprocess, sys, time\n"
        f"def stop(*_):\n    open({str(order)!r}, 'a').write(sys.argv[1] + '\\n')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    started = [python(tmp_path, kind, code, kind=kind) for kind in ("service", "agent")]
    for process in started:
        process.command = [*process.command, process.kind]
        supervisor.start(process)
    supervisor.wait(lambda: all(lines(process) for process in started), "the starts", 60)
    supervisor.stop(("agent", "service"))
    assert order.read_text() == "agent\nservice\n"
    for process in started:
        assert not is_alive(int(process.log.read_text()))


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended may still be a zombie here."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# Sessions.


def test_with_sessions_each_policy_has_an_upstream_of_its_name_at_its_engine(folder: Path) -> None:
    text = RUN.replace("[[engine]]", '[[engine]]\nmodels = { base = "models/base" }').replace(
        "[[pass]]",
        '[[policy]]\nname = "teacher"\ntrainable = false\nengine = "far"\n'
        '[[engine]]\nname = "far"\nkind = "vllm"\nurls = ["http://far:8000"]\n[[pass]]',
    )
    (folder / "run.toml").write_text(text)
    urls = {"local": ["http://127.0.0.1:5"], "far": ["http://far:8000"]}
    made = programs.sessions(settings.read(folder / "run.toml"), urls, {"listen": "127.0.0.1:6"}, {})
    config = tables.parsed(made, folder / "service.toml")
    assert config["sessions"] == {"listen": "127.0.0.1:6"}
    near, far = {"kind": "sglang", "urls": ["http://127.0.0.1:5"]}, {"kind": "vllm", "urls": ["http://far:8000"]}
    # Calls of models that are not trained are not recorded.
    assert config["upstream"] == [
        {"name": "solver", **near, "policies": ["solver"]},
        {"name": "base", **near, "models": ["base"]},
        {"name": "teacher", **far, "models": ["teacher"]},
    ]


# Questions of a file.


DATA = """{"question": "1+1", "answer": 2}

{"question": [{"role": "system", "content": "Calculate."}, {"role": "user", "content": "2+2"}], "answer": "4"}
{"question": "3+3", "answer": "6", "x": "a\u2028b"}
"""


def run_of(folder: Path, data: str, more: str = "") -> program.Run:
    world = WORLD.replace(
        '    id = ""', "    def __init__(self, text, gold):\n        self.text, self.gold = text, gold"
    )
    (folder / "world.py").write_text(world)
    (folder / "questions.jsonl").write_text(data)
    text = RUN.replace("[task]", f'[task]\ndata = "questions.jsonl"\n{more}')
    (folder / "run.toml").write_text(text)
    return program.Run(settings.read(folder / "run.toml"))


def test_questions_of_a_file_come_again_and_again_in_other_orders(folder: Path) -> None:
    asked = list(itertools.islice(run_of(folder, DATA).questions(), 30))
    rounds = [[(question.text, question.gold) for question in asked[start : start + 3]] for start in range(0, 30, 3)]
    assert all(sorted(each) == [("1+1", "2"), ("2+2", "4"), ("3+3", "6")] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert len({question.id for question in asked}) == 30
    assert asked[0].id.startswith("questions.1.0.")


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ("", "", "has no questions"),
        ('{"question": "1"', "", "line 1 is not JSON"),
        (
            '{"question": "1", "answer": "1"}\n{"question": "1"}',
            "",
            "line 2 has no text or number `answer` .task.label_key",
        ),
        ('{"question": "1", "answer": true}', "", "`answer`"),
        ('{"question": [{"role": "system", "content": "1"}], "answer": "1"}', "", "`question` .task.input_key"),
        ('["question", "answer"]', "", "`question`"),
        (DATA, 'input_key = "prompt"', "line 1 has no text or number `prompt`"),
    ],
)
def test_a_file_without_questions_is_refused_by_its_line(folder: Path, data: str, more: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        next(run_of(folder, data, more).questions())


def test_a_file_that_is_not_there_is_refused_before_anything_starts(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN.replace("[task]", '[task]\ndata = "nowhere.jsonl"'))
    with pytest.raises(ConfigurationError, match="nowhere.jsonl, and there is no such file"):
        settings.read(folder / "run.toml")


# Progress.


def progress_of(folder: Path, rewards: list[float], window: int, first_below: float | None) -> Progress:
    below = "" if first_below is None else f"first_below = {first_below}\n"
    text = RUN.replace('series = "gold"\nfirst_below = 0.9\n', below).replace("window = 2", f"window = {window}")
    (folder / "run.toml").write_text(text)
    found = settings.read(folder / "run.toml")
    progress = Progress(found, {"solver": folder}, forebay.Client("http://127.0.0.1:1"))
    progress.curves["solver"].steps = [
        {"step": step, "version": step // 2, "reward_all": reward} for step, reward in enumerate(rewards, 1)
    ]
    return progress


def test_the_first_and_last_steps_are_judged(folder: Path) -> None:
    (judged,) = progress_of(folder, [0.2, 0.4, 0.5, 0.9, 1.0], 2, 0.35).judged()
    assert (judged.first, judged.last, judged.is_passed) == (pytest.approx(0.3), pytest.approx(0.95), True)
    assert "0.300  0.950  5      from < 0.35 to >= 0.95  passed" in table([judged])
    # Too good at the beginning, too bad at the end, and too few steps.
    assert not progress_of(folder, [0.4, 0.4, 0.9, 1.0], 2, 0.35).is_passed()
    assert not progress_of(folder, [0.2, 0.4, 0.9, 0.9], 2, 0.35).is_passed()
    assert not progress_of(folder, [0.2, 0.95, 0.95], 2, None).is_passed()


def test_the_reward_of_the_steps_that_are_judged_is_reported(folder: Path) -> None:
    progress = progress_of(folder, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 2, None)
    progress._settings.passes = [  # pyright: ignore[reportPrivateUsage]
        dataclasses.replace(progress._settings.passes[0], series="gold")  # pyright: ignore[reportPrivateUsage]
    ]
    # The steps 1 and 6, which belong to the versions 0 and 3, have no component.
    progress.curves["solver"].versions = {1: {"gold": (1.0, 4)}, 2: {"gold": (3.0, 4)}}
    (judged,) = progress.judged()
    assert (judged.first, judged.last, judged.steps) == (0.25, 0.75, 4)
    assert (judged.reward_first, judged.reward_last) == (pytest.approx(0.25), pytest.approx(0.45))


def test_a_series_may_have_to_fall(folder: Path) -> None:
    progress = progress_of(folder, [1.8, 1.6, 1.2, 1.1], 2, None)
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("last = 0.95", "last_below = 1.2"))
    (criterion,) = settings.read(folder / "run.toml").passes
    assert (criterion.last, criterion.last_below) == (None, 1.2)
    progress._settings.passes = [criterion]  # pyright: ignore[reportPrivateUsage]
    (judged,) = progress.judged()
    assert (judged.wanted, judged.last, judged.is_passed) == ("< 1.2", pytest.approx(1.15), True)
    progress.curves["solver"].steps[-1]["reward_all"] = 1.2
    assert not progress.is_passed()
    (folder / "run.toml").write_text(text.replace("last = 0.95\n", ""))
    with pytest.raises(ConfigurationError, match="`last`, `last_below` or both"):
        settings.read(folder / "run.toml")


def test_a_components_mean_is_that_of_the_version_of_the_step() -> None:
    curve = Curve(
        steps=[{"step": 1, "version": 1}, {"step": 2, "version": 1}, {"step": 3, "version": 2}],
        versions={1: {"gold": (3.0, 4)}, 3: {"gold": (1.0, 1)}},
    )
    assert curve.series("gold") == [(1, 0.75), (2, 0.75)]
    assert "<svg" in picture.draw("a < b", {"solver": curve})
    assert "a &lt; b" in picture.draw("a < b", {"solver": Curve()})
    many = picture.draw("many", {f"agent.{place}": curve for place in range(102)})
    assert 'viewBox="0 0 3800 4864"' in many and many.count("translate(3040 0)") == 20


def test_the_picture_shows_criteria_and_the_mean_that_is_judged(folder: Path) -> None:
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace('series = "gold"', 'series = "gold"\npolicy = "sol*"\nof = "mean"'))
    (criterion,) = settings.read(folder / "run.toml").passes
    curves = {
        "solver": Curve(steps=[{"step": 1, "version": 1}, {"step": 2, "version": 2}], versions={1: {"gold": (1.0, 4)}}),
        "solver.2": Curve(steps=[{"step": 1, "version": 1}], versions={1: {"gold": (3.0, 4)}}),
        "critic": Curve(),
    }
    mean, *others = picture.panels_of(curves, [criterion])
    assert (mean.name, mean.series, mean.bounds) == (
        "sol*, the mean of 2", {"gold": [(1, 0.5)]}, {"gold": [0.95]},
    )  # fmt: skip
    assert [(panel.name, panel.bounds) for panel in others] == [("solver", {}), ("solver.2", {}), ("critic", {})]
    assert picture.draw("a", curves, [criterion]).count("stroke-dasharray") == 1
    (single,) = picture.panels_of({"solver": Curve()}, [dataclasses.replace(criterion, of="each", last_below=2.0)])
    assert single.bounds == {"gold": [0.95, 2.0]}


def test_a_criterion_that_can_no_longer_hold_is_said_as_soon_as_that_is_certain(folder: Path) -> None:
    with forebay.Client("http://127.0.0.1:9") as client:
        progress = Progress(settings.read(folder / "run.toml"), {"solver": folder}, client)
        curve = progress.curves["solver"]
        for step in range(1, 9):
            # Rollouts of an early version may still arrive.
            assert progress.lost() is None
            curve.steps.append({"step": step, "version": step})
            curve.versions[step] = {"gold": (4.0, 4)}
        lost = progress.lost()
        assert lost is not None and "gold of its first 2 steps was 1.000" in lost and "less than 0.9" in lost
        curve.versions[1] = {"gold": (0.0, 4)}
        assert progress.lost() is None


def test_axes_have_round_numbers() -> None:
    assert picture.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert picture.ticks(-1.1, 1) == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert picture.ticks(0, 41) == [0, 10, 20, 30, 40]
    assert picture.ticks(0, 300) == [0, 100, 200, 300]
    assert picture.ticks(0, 2.3) == [0, 0.5, 1.0, 1.5, 2.0]


def test_steps_are_read_once_and_without_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_steps(path) == []
    path.write_text('{"step": 1, "a": 1}\n{"step": 2}\n{"step": 1, "a": 2}\n{"st')
    assert read_steps(path) == [{"step": 1, "a": 2}, {"step": 2}]


@pytest.mark.parametrize(
    ("means", "last", "last_below", "expected"),
    [
        # The interval reaches the bound, though the mean does not.
        ([1.0, 0.6, 1.0, 0.8], 0.9, None, (0.85, ">= 0.9", True)),
        ([0.5, 0.6, 0.5, 0.6], 0.9, None, (0.55, ">= 0.9", False)),
        ([1.1, 1.2, 1.1, 1.2], None, 1.0, (1.15, "< 1", False)),
        ([0.8, 1.2, 0.8, 1.2], None, 1.0, (1.0, "< 1", True)),
        ([], 0.9, None, (pytest.approx(float("nan"), nan_ok=True), ">= 0.9", False)),
    ],
)
def test_the_interval_of_a_held_out_suite_reaches_what_is_wanted(
    means: list[float], last: float | None, last_below: float | None, expected: tuple[float, str, bool]
) -> None:
    criterion = settings.Pass(
        series="gold", policy="a*", last=last, last_below=last_below, first_below=None, of="mean", window=2
    )
    policies = [cast("settings.Policy", SimpleNamespace(name=name)) for name in ("a1", "a2", "b")]
    halves = {"a1": {"gold": means[:2]}, "a2": {"gold": means[2:]}, "b": {"gold": [0.0]}}
    (found,) = held_out.of_criterion(criterion, policies, halves)
    mean, wanted, is_passed = expected
    assert (found.mean, found.wanted, found.is_passed) == (
        mean if math.isnan(found.mean) else pytest.approx(mean),
        wanted,
        is_passed,
    )
    assert "a*" in held_out.table([found])


# Whole runs.


@pytest.fixture
def command(folder: Path) -> Callable[..., subprocess.Popen[str]]:
    # A shell ignores it for what it starts in the background, and processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = folder / "forebay-trainer"
    trainer.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_trainer.py")} "$@"\n')
    trainer.chmod(0o755)
    environment = {
        **os.environ,
        "FOREBAY_TRAINER_BIN": str(trainer),
        "PYTHONPATH": str(REPOSITORY / "python"),
    }

    def start(*arguments: str) -> subprocess.Popen[str]:
        full = [sys.executable, "-m", "forebay.run", "run.toml", "--out", "out", *arguments]
        return subprocess.Popen(
            full, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "result.json").read_text())


def test_a_run_goes_from_the_warm_start_to_its_criteria(folder: Path, command: Callable[..., Any]) -> None:
    run = command()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    assert "solver.warm: 2 steps of 4 demonstrations, 50% of them right on purpose" in output
    assert result(folder)["memory_mb"] > 20
    (judged,) = result(folder)["judged"]
    # A group may begin before a version and end behind it.
    assert (judged["series"], judged["first"], judged["last"]) == ("gold", pytest.approx(0.5, abs=0.1), 1.0)
    # The last weights have played the suite, which nobody has trained.
    (held,) = result(folder)["held_out"]
    assert (held["series"], held["policy"], held["tasks"], held["is_passed"]) == ("gold", "solver", 32, True)
    assert held["low"] <= held["mean"] <= held["high"] == pytest.approx(1.0, abs=0.3)
    assert "held-out suite  policy  mean" in output
    assert result(folder)["ended"] == "all steps are trained"
    assert result(folder)["steps"] == {"solver": 8}
    assert "gold" in (folder / "out" / "curves.svg").read_text()
    # The folder is that of the same run file; others are not touched.
    (folder / "out" / "run.json").unlink()
    refused = command()
    assert "files that are not from an earlier run" in refused.communicate(timeout=60)[0]
    assert refused.returncode == 1


def test_several_seeds_run_one_after_the_other_in_folders_of_their_own(
    folder: Path, command: Callable[..., Any]
) -> None:
    changed(folder, "steps = 8", "steps = 4")
    run = command("--seeds", "3,4", "--engine", "http://127.0.0.1:1")
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    assert output.endswith("2 of 2 seeds passed\n")
    for seed in (3, 4):
        found = json.loads((folder / "out" / f"tiny-{seed}" / "result.json").read_text())
        assert (found["seed"], found["steps"]) == (seed, {"solver": 4})
    # An engine that runs elsewhere is not started.
    assert not list((folder / "out").glob("*/logs/engine*"))


TEAM = """
[[policy]]
name = "critic"
"""

APART = """[[engine]]
kind = "sglang"
urls = ["http://10.0.0.5:1", "http://10.0.0.5:2"]
per_policy = true
"""


def test_each_policy_of_an_engine_may_have_an_address_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_TRAINER_BIN", sys.executable)  # The command is read here, and never run.
    changed(folder, "[[engine]]\n", APART)
    (folder / "run.toml").write_text((folder / "run.toml").read_text() + TEAM)
    found = settings.read(folder / "run.toml")
    engines = [(engine.name, engine.kind, engine.urls) for engine in found.engines]
    assert engines == [
        ("local.solver", "sglang", ["http://10.0.0.5:1"]),
        ("local.critic", "sglang", ["http://10.0.0.5:2"]),
    ]
    assert [policy.engine for policy in found.policies] == ["local.solver", "local.critic"]
    # Each trainer publishes to the engine of its policy, and to no other.
    models = {policy.name: tmp_path for policy in found.policies}
    with contextlib.closing(Output(tmp_path / "out", {}, resume=False)) as output:
        for policy, engine in zip(found.policies, found.engines, strict=True):
            made = programs.trainer(found, policy, output, models, "http://127.0.0.1:1")
            assert [each["url"] for each in tables.load(Path(made.command[-1]))["publish"]["engine"]] == engine.urls


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        (APART, "`engine` local has `per_policy` and 1 policies, so it needs as many `urls`, and has 2"),
        ("[[engine]]\nper_policy = true\n", "`engine.*.per_policy` shares out `urls`, which are missing"),
    ],
)
def test_addresses_that_do_not_fit_policies_are_refused(folder: Path, engine: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        settings.read(changed(folder, "[[engine]]\n", engine))


def test_a_call_goes_to_the_engine_of_its_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(lambda _: "0") as solver, Engine(lambda _: "1") as critic:
        monkeypatch.setenv("FOREBAY_ENGINES", f"local.solver={solver.url} local.critic={critic.url}")
        changed(folder, "[[engine]]\n", APART)
        (folder / "run.toml").write_text((folder / "run.toml").read_text() + TEAM)
        run = Run(settings.read(folder / "run.toml"))
        with run.openai() as llm, run.openai("local.critic") as one:
            asked = [{"role": "user", "content": "0"}]
            said = [
                client.chat.completions.create(model=model, messages=asked).choices[0].message.content
                for client, model in ((llm, "solver"), (llm, "critic"), (one, "critic"))
            ]
            with llm.with_options(base_url="http://127.0.0.1:1/s", api_key="k") as session:
                assert str(session.base_url) == "http://127.0.0.1:1/s/"
            with pytest.raises(ConfigurationError, match="no policy 'judge'; there are: solver, critic"):
                llm.chat.completions.create(model="judge", messages=asked)
    assert said == ["0", "1", "1"]
    assert [request.model for request in critic.requests] == ["critic", "critic"]


def test_the_program_gets_the_address_of_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_RUN", str(folder / "run.toml"))
    monkeypatch.setenv("FOREBAY_SEED", "6")
    monkeypatch.setenv("FOREBAY_ENGINES", "local=http://127.0.0.1:5 other=http://127.0.0.1:6")
    before = signal.getsignal(signal.SIGTERM)
    try:
        run = forebay.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    with run.openai() as llm:
        assert str(llm.base_url) == "http://127.0.0.1:5/v1/"
    assert run.settings.seed == 6
    with pytest.raises(ConfigurationError, match="no engine 'far' with an address"):
        run.openai("far")
    asked = run.questions()
    ids = {next(asked).id for _ in range(3)}
    assert len(ids) == 3 and all(id.startswith(".6.0.") for id in ids)
    run.stop()
    assert next(asked, None) is None
    with pytest.raises(ValueError, match="third"):
        run.each(4, lambda place: int("third") if place == 2 else place)
    assert run.each(3, lambda place: 2 * place) == [0, 2, 4]


def test_agents_find_sessions_at_the_same_address_when_the_service_is_started_again(folder: Path) -> None:
    found = settings.read(changed(folder, "[task]", "[service]\nsessions = true\n[task]"))
    with contextlib.closing(Output(folder / "out", {}, resume=False)) as output:
        made = programs.service(found, output, "127.0.0.1:0", {"local": "http://127.0.0.1:5"}, {})
    config = tables.load(Path(made.command[-1]))
    host, _, port = config["sessions"]["listen"].partition(":")
    assert (host, [upstream["name"] for upstream in config["upstream"]]) == ("127.0.0.1", ["solver"])
    assert int(port) > 0


def test_criteria_that_do_not_hold_are_status_1(folder: Path, command: Callable[..., Any]) -> None:
    changed(folder, "last = 0.95", "last = 1.5")
    run = command()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1, output
    assert "not passed" in output


def test_the_page_of_the_service_stays_open_after_a_run(folder: Path, command: Callable[..., Any]) -> None:
    run = command("--keep-serving")
    said: list[str] = []
    for line in run.stdout:
        said.append(line)
        if found := re.search(r"the page of the service is at (\S+) until Ctrl-C", line):
            break
    else:
        pytest.fail("".join(said))
    assert any("passed" in line for line in said), "the result is printed before"
    with urllib.request.urlopen(found[1], timeout=60) as page:
        assert b"<title>" in page.read()
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    again = shlex.split(output.partition("to look at its page again: ")[2])
    config, database = Path(again[again.index("--config") + 1]), again[again.index("--database") + 1]
    assert (folder / config).exists() and (folder / database.removeprefix("sqlite:")).exists()


def test_a_run_that_was_stopped_goes_on(folder: Path, command: Callable[..., Any]) -> None:
    # No reward reaches this criterion, so the run does not end before it is stopped.
    (folder / "run.toml").write_text(RUN.replace("steps = 8", "steps = 100000").replace("last = 0.95", "last = 2.0"))
    run = command()
    metrics = folder / "out" / "trainers" / "solver" / "metrics.jsonl"
    wait_for(lambda: len(read_steps(metrics)) >= 4, run)
    in_use = command("--resume")
    assert "a run uses" in in_use.communicate(timeout=60)[0]
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130, output
    assert "stopped; --resume goes on" in output
    done = len(read_steps(metrics))
    changed(folder, "steps = 8", f"steps = {done + 6}")
    other = command("--resume", "--seed", "5")
    assert "has the seed 1, and not 5" in other.communicate(timeout=60)[0]
    again = command("--resume")
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0, output
    # The warm start is not repeated, and steps and components of the time before count.
    assert "demonstrations" not in output
    assert result(folder)["steps"] == {"solver": done + 6}
    assert result(folder)["judged"][0]["first"] == pytest.approx(0.5, abs=0.1)


def test_a_model_with_an_alphabet_of_its_own_has_a_folder_of_its_own(folder: Path, command: Callable[..., Any]) -> None:
    changed(folder, '[[policy]]\nname = "solver"\n', '[[policy]]\nname = "solver"\nmodel = { alphabet = "+=10" }\n')
    output, _ = command().communicate(timeout=60)
    (made,) = (folder / "out" / "models").glob("tiny-*")
    assert made.name == f"tiny-64-2-4-seed-1-alphabet-{zlib.crc32(b'+=10'):08x}", output
    assert (made / "alphabet").read_text() == "+=10"


@pytest.mark.parametrize(("kind", "name"), [("trainer", "trainer-solver"), ("service", "service")])
def test_a_run_survives_kills_and_leaves_nothing_behind(
    folder: Path, command: Callable[..., Any], kind: str, name: str
) -> None:
    changed(folder, "steps = 8", "steps = 100000")
    # Between two kills the process has time to start. The criteria are looked at every ten seconds.
    run = command("--chaos", f"{kind}:4")
    output, _ = run.communicate(timeout=90)
    assert run.returncode == 0, output
    assert result(folder)["kills"][name] >= 2
    assert "restarts" in result(folder) and result(folder)["restarts"] == {}


def test_the_runner_waits_for_no_answer_of_a_service_that_it_starts_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Unavailable(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path.partition('?')[0]}")
            self.send_response(200 if self.path == "/readyz" else 503)
            self.send_header("content-length", "0")
            self.end_headers()

        do_PATCH = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr(stages, "SHOW_S", 0.0)
    monkeypatch.setattr(stages, "READY_S", 0.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        threading.Thread(target=server.serve_forever).start()
        output = Output(tmp_path / "out", {}, resume=False)
        monkeypatch.setattr(stages.Runner, "_done_elsewhere", lambda _: {"solver"})
        try:
            with forebay.Client(f"http://127.0.0.1:{server.server_port}") as client:
                result = stages.Runner(settings.read(folder / "run.toml"), output, lambda _: None).watch(client)
        finally:
            output.close()
            server.shutdown()
    assert result.ended == "all steps are trained"
    # One attempt each: to let nothing wait for the trainer that is done, and to say how the policy is.
    assert asked.count("PATCH /policies/solver") == asked.count("GET /policies/solver") == 1


def test_processes_end_when_the_runner_is_killed(folder: Path, command: Callable[..., Any]) -> None:
    changed(folder, "steps = 8", "steps = 100000")
    run = command()
    wait_for(lambda: len(read_steps(folder / "out" / "trainers" / "solver" / "metrics.jsonl")) >= 1, run)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    assert len(children) >= 4
    run.kill()
    run.communicate(timeout=60)
    wait_for(lambda: not any(is_alive(int(pid)) for pid in children), None)


def test_the_command_line_refuses_what_it_cannot_do(folder: Path, command: Callable[..., Any]) -> None:
    run = command("--chaos", "disk:3")
    assert "must be KIND:SECONDS, with one of service, engine, trainer, agent" in run.communicate(timeout=60)[0]
    with pytest.raises(ImportError, match="forebay.run is a command"):
        __import__("forebay.run")
    assert callable(forebay.run)


def wait_for(condition: Callable[[], bool], run: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it took too long"
        assert run is None or run.poll() is None, run.communicate()[0]
        time.sleep(0.05)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    first = Output(tmp_path / "out", {"seed": 1}, resume=False)
    with pytest.raises(ConfigurationError, match="a run uses"):
        Output(tmp_path / "out", {"seed": 1}, resume=False)
    first.close()
    Output(tmp_path / "out", {"seed": 1}, resume=True).close()
    assert not stages.answers("http://127.0.0.1:1/health")
