"""The programs of docs/python-agents.md, run as they are printed, with a scripted engine behind them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import REPOSITORY
from test_documents import BLOCK

import forebay
from forebay.testing import Answer, Engine, Request

DOCUMENT = "docs/python-agents.md"

BLOCKS = BLOCK.findall((REPOSITORY / DOCUMENT).read_text())


def calculate(request: Request) -> Answer | str:
    """Answers the questions of the document, with the tool if there is one."""
    a, b = map(int, re.findall(r"(\d+) \* (\d+)", request.messages[0]["content"])[0])
    if request.text.startswith("Is this right"):
        return "yes, it is"
    if request.body.get("tools") and request.messages[-1]["role"] == "user":
        return Answer("", tool_calls=[("multiply", {"a": a, "b": b})])
    return f"It is {a * b}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("document")
    with Engine(calculate) as engine:
        listener = '[sessions]\nlisten = "127.0.0.1:0"\n'
        upstream = f'[[upstream]]\nname = "scripted"\nkind = "vllm"\nurls = ["{engine.url}"]\n'
        (folder / "forebay.toml").write_text(listener + upstream)
        with forebay.Server(config=folder / "forebay.toml") as server:
            yield {
                **os.environ,
                "FOREBAY_URL": server.url,
                "OPENAI_BASE_URL": engine.base_url,
                "OPENAI_API_KEY": "none",
                "PYTHONPATH": str(REPOSITORY / "python"),
                "FOLDER": str(folder),
            }


def run(environment: dict[str, str], beginning: str) -> str:
    """Runs the block that contains a line with this beginning."""
    (block,) = [block for block in BLOCKS if beginning in block]
    folder = Path(environment["FOLDER"])
    (folder / "block.py").write_text(block)
    command = [sys.executable, "-W", "error", "block.py"]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{block}\n{found.stdout}\n{found.stderr}"
    return found.stdout


def test_the_agent_posts_groups_of_one_segment_each(environment: dict[str, str]) -> None:
    lines = run(environment, "Save it as agent.py").splitlines()
    assert lines == [
        f"{task}/{place}.pass0 kept {state} 1 segment"
        for task in ("17x23", "4x12")
        for place, state in enumerate(("open", "ready"))
    ]
    fb = forebay.Client(environment["FOREBAY_URL"])
    batch = fb.lease("calculator", wait_ms=10_000)
    assert batch is not None and {row.reward for row in fb.samples(batch.batch_id)} == {1.0}


@pytest.mark.parametrize(
    ("beginning", "output"),
    [
        ("r.stream(chunks)", "It is 6"),
        ("def chain(b, a, c)", f"{['kept'] * 8}\n"),
        ("async with fb.bundle", f"{['kept'] * 8}\n"),
        ('AGENT = """', "kept 1 calls\n"),
        ("fb.finish([solver, critic])", ""),
        ("fb.put_suite(", "True 1.0 [1.0, 1.0]\n"),
        ("0.75 * scores.tests", "kept ['judge']\n[] ready\n"),
        ("resume=True) as s", "the sandbox died\nattempt 2 with 1 call\n"),
        ("forebay.Scorer(", "a 1 kept\n"),
        ("forebay.State(", ""),
        ('Client(spool="spool")', "kept\n"),
        ("forebay.testing.Engine(script)", ""),
        ("forebay.testing.Engine(answer)", "kept\n"),
    ],
)
def test_a_program_runs_as_printed(environment: dict[str, str], beginning: str, output: str) -> None:
    assert run(environment, beginning) == output


def test_every_program_is_run() -> None:
    assert len(BLOCKS) == 14


def test_the_state_of_the_document_can_be_continued(environment: dict[str, str]) -> None:
    fb = forebay.Client(environment["FOREBAY_URL"])
    run(environment, "forebay.State(")
    before = fb.stats()
    run(environment, "forebay.State(")
    assert fb.stats() == before


def test_the_agent_and_the_trainer_of_the_first_page_run_as_printed(environment: dict[str, str]) -> None:
    agent, trainer = BLOCK.findall((REPOSITORY / "README.md").read_text())
    folder = Path(environment["FOLDER"])
    (folder / "agent.py").write_text(agent)
    (folder / "trainer.py").write_text(trainer)
    command = [sys.executable, "-W", "error"]
    subprocess.run([*command, "agent.py"], cwd=folder, env=environment, check=True)
    fb = forebay.Client(environment["FOREBAY_URL"])

    def played() -> list[tuple[float | None, str]]:
        stories = fb.list_trajectories("default")
        return [(story.reward, story.state) for story in stories if story.group.group_id.startswith("2*3 ")]

    # It asks for batches until it is killed.
    with subprocess.Popen([*command, "trainer.py"], cwd=folder, env=environment) as process:
        try:
            version = 0
            while any(state != "checkpointed" for _, state in played()):
                policy = fb.wait_version("default", above=version, wait_ms=60_000)
                assert policy is not None
                version = policy.version
        finally:
            process.kill()
    assert played() == [(1.0, "checkpointed")] * 8
