"""The programs and the commands of docs/start.md, run as printed: the agent is trained, and can be looked at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from support import REPOSITORY
from test_documents import BLOCK

import forebay

TEXT = (REPOSITORY / "docs/start.md").read_text()


def test_the_agent_is_trained_as_printed(own_server: forebay.Server, tmp_path: Path) -> None:
    agent, trainer = BLOCK.findall(TEXT)
    (tmp_path / "agent.py").write_text(agent)
    (tmp_path / "trainer.py").write_text(trainer)
    environment = {**os.environ, "FOREBAY_URL": own_server.url, "PYTHONPATH": str(REPOSITORY / "python")}
    command = [sys.executable, "-W", "error"]

    def train(until: int) -> list[float]:
        """Runs the trainer until it prints this step, and returns the rewards that it prints."""
        rewards: list[float] = []
        with subprocess.Popen(
            [*command, "trainer.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                step, reward = re.findall(r"^step (\d+): reward (.*)$", line)[0]
                rewards.append(float(reward))
                if int(step) == until and until < 30:
                    process.kill()
        return rewards

    with subprocess.Popen([*command, "agent.py"], cwd=tmp_path, env=environment) as playing:
        try:
            with own_server.client() as fb:
                while fb.get_policy("digit") is None:  # the agent creates it when it starts
                    time.sleep(0.05)
            # It is killed once, and goes on where it was.
            first = train(until=10)
            rewards = first + train(until=30)
        finally:
            playing.kill()
    assert len(first) >= 10 and 30 <= len(rewards) <= 32
    assert sum(rewards[:3]) / 3 < 0.6 and sum(rewards[-3:]) / 3 > 0.8

    (commands,) = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "forebay").symlink_to(os.environ["FOREBAY_BIN"])
    shown = subprocess.run(
        ["bash", "-eu", "-c", commands.replace("http://127.0.0.1:8080", own_server.url)],
        env={**environment, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # The agent was stopped within a group or between two of them.
    assert shown.startswith("≈ digit  flat\n") and re.search("of digit: (open|ready)", shown), shown
