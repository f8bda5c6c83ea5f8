"""The complete programs of the guides, run as they are printed, each against a service of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forebay

REPOSITORY = Path(__file__).resolve().parents[3]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(document: str, folder: Path) -> Path:
    (block,) = BLOCK.findall((REPOSITORY / document).read_text())
    script = folder / "program.py"
    script.write_text(block)
    return script


def start(script: Path, url: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "FOREBAY_URL": url, "PYTHONPATH": str(REPOSITORY / "python")}
    return subprocess.Popen(
        [sys.executable, str(script)], cwd=script.parent, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_the_trainer_in_pytorch_learns_and_may_be_killed(own_server: forebay.Server, tmp_path: Path) -> None:
    script = program("docs/python-trainers.md", tmp_path)
    killed, lines = start(script, own_server.url), list[str]()
    assert killed.stdout is not None
    for line in killed.stdout:
        lines.append(line)
        if line.startswith("step 25:"):
            os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    output, _ = (again := start(script, own_server.url)).communicate(timeout=120)
    assert again.returncode == 0
    # It continues from its checkpoint, with the batches that the checkpoint has not learned from.
    learned = [line.split(":")[0] for line in output.splitlines()]
    assert learned == [f"step {step}" for step in range(21, 41)]
    assert output.splitlines()[:5] == [line.rstrip() for line in lines[20:25]]
    rewards = [float(line.rsplit(" ", 1)[1]) for line in [*lines[:20], *output.splitlines()]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
    with own_server.client() as fb:
        status = fb.get_policy("repeat")
        assert status is not None and (status.version, status.checkpoint_step) == (40, 40)


def test_the_training_with_trl_learns(own_server: forebay.Server, tmp_path: Path) -> None:
    script = program("docs/python-trl.md", tmp_path)
    output, _ = (run := start(script, own_server.url)).communicate(timeout=300)
    assert run.returncode == 0
    found = re.search(r"^reward (\S+) -> (\S+)$", output, re.MULTILINE)
    assert found is not None
    assert float(found[2]) > float(found[1]) + 0.1, found[0]
    with own_server.client() as fb:
        status = fb.get_policy("repeat-trl")
        assert status is not None and (status.version, status.checkpoint_step) == (40, 40)
