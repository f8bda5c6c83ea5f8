"""The program of docs/recipes/ddp.md, run as it is printed on two ranks, and on one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Difference

import forebay

REPOSITORY = Path(__file__).resolve().parents[3]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def post(fb: forebay.Client, groups: range) -> None:
    """Posts groups of rollouts of different lengths. Every other one has the larger reward. A batch has two groups."""
    fb.put_policy("ddp", {"group": {"size": 4}, "batch": {"groups": 2}})
    for group in groups:
        fb.post([
            {
                "policy": "ddp", "rollout_id": f"{group}-{place}", "group_id": f"{group}", "reward": place % 2,
                "segments": [{
                    "tokens": [group % 8, *[8 + place] * (place + 1)],
                    "loss_mask": [1] * (place + 1), "logprobs": [-2.77] * (place + 1),
                }],
            }
            for place in range(4)
        ])  # fmt: skip


def start(folder: Path, url: str, ranks: int) -> subprocess.Popen[str]:
    (block,) = BLOCK.findall((REPOSITORY / "docs/recipes/ddp.md").read_text())
    (folder / "ddp.py").write_text(block)
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "ddp.py"],
        cwd=folder,
        env={**os.environ, "FOREBAY_URL": url, "PYTHONPATH": str(REPOSITORY / "python"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def ranks_of(launcher: int) -> list[int]:
    """The processes that `torchrun` has started."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == launcher:
                found.append(int(stat.parent.name))
    return found


def weights(folder: Path) -> torch.Tensor:
    return torch.load(folder / "weights" / "step-6.pt")["weight"]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("one")
    with forebay.Server() as server, server.client() as fb:
        post(fb, range(12))
        output, _ = (program := start(folder, server.url, 1)).communicate(timeout=180)
        assert program.returncode == 0, output
    return weights(folder)


def test_two_ranks_learn_what_one_learns_and_may_be_killed(
    own_server: forebay.Server, tmp_path: Path, of_one_rank: torch.Tensor, difference: Difference
) -> None:
    with own_server.client() as fb:
        post(fb, range(10))
        killed = start(tmp_path, own_server.url, 2)
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.startswith("step 5 "):
                # It waits for the sixth batch. When a rank is killed, `torchrun` ends the other one.
                ranks = ranks_of(killed.pid)
                assert len(ranks) == 2
                os.kill(ranks[0], signal.SIGKILL)
        assert killed.wait() != 0 and not any(Path("/proc", str(rank)).exists() for rank in ranks)
        learned = {batch.step: batch.batch_id for batch in fb.list_batches("ddp")}
        assert set(learned) == {1, 2, 3, 4, 5}

        post(fb, range(10, 12))
        output, _ = (again := start(tmp_path, own_server.url, 2)).communicate(timeout=180)
        assert again.returncode == 0
        # It goes on behind the checkpoint of step 4, with the batch that it had acked.
        assert output.splitlines() == ["step 5 is version 5", "step 6 is version 6"]
        steps = {batch.step: (batch.batch_id, batch.state) for batch in fb.list_batches("ddp")}
        assert [steps[step][1] for step in range(1, 7)] == ["checkpointed"] * 6
        assert all(steps[step][0] == batch_id for step, batch_id in learned.items())
        status = fb.get_policy("ddp")
        assert status is not None and (status.version, status.checkpoint_step) == (6, 6)
        assert status.version_uri == (tmp_path / "weights" / "step-6.pt").as_uri()
    difference("weights of two ranks and of one", float((weights(tmp_path) - of_one_rank).abs().max()), 1e-5)
    assert float(of_one_rank.abs().max()) > 0.1
