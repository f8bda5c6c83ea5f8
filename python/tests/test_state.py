"""The durable state of a program: it changes once for each post, at whatever point the program is killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.types import Retry

PACKAGE = str(Path(__file__).resolve().parents[1])

PATIENCE_S = 60.0


def trajectory(policy: str, rollout_id: str, **fields: Any) -> forebay.Trajectory:
    segment = forebay.Segment(tokens=[1, 2], loss_mask=[1], logprobs=[-0.5])
    given = {"policy": policy, "reward": 1.0, "segments": [segment], **fields}
    return forebay.Trajectory(rollout_id=rollout_id, **given)


def test_a_value_becomes_durable_with_its_post(fb: forebay.Client, policy: str, tmp_path: Path) -> None:
    with forebay.State(tmp_path / "runs" / "state.json", {"mean": 0.0}) as state:
        state.value["mean"] = 0.5
        (receipt,) = state.post(fb, [trajectory(policy, "r1")])
        assert receipt.verdict == "kept"
        state.value["mean"] = 0.75
        state.reload()
        assert state.value == {"mean": 0.5}
    with forebay.State(tmp_path / "runs" / "state.json", {"mean": 9.0}) as state:
        assert (state.value, state.is_pending, state.recover(fb)) == ({"mean": 0.5}, False, None)


def test_a_bundle_posts_with_a_state(fb: forebay.Client, policy: str, tmp_path: Path) -> None:
    choice = {"token_ids": [2], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}
    with forebay.State(tmp_path / "state.json", 0) as state:
        with fb.bundle(state=state) as b:
            r = b.rollout(policy)
            r.record({"prompt_token_ids": [1], "choices": [choice]})
            r.reward = 1.0
            state.value += 1
        assert (r.receipt.verdict, state.value) == ("kept", 1)
        with pytest.raises(ZeroDivisionError), fb.bundle(state=state) as b:
            b.rollout(policy)
            state.value += 1
            _ = 1 / 0
        assert (b.receipts[0].reason, state.value) == ("no-reward", 1)
    assert json.loads((tmp_path / "state.json").read_text())["value"] == 1


def test_a_refused_post_leaves_the_value_from_before(fb: forebay.Client, policy: str, tmp_path: Path) -> None:
    with forebay.State(tmp_path / "state.json", 0) as state:
        state.value = 1
        with pytest.raises(errors.Invalid):
            state.post(fb, [trajectory(policy, "r1", segments=[{"tokens": [], "loss_mask": [1]}])])
        assert (state.value, state.is_pending) == (0, False)
        state.value = 1
        with pytest.raises(errors.NotEncodableError):
            state.post(fb, [trajectory(policy, "r1", reward=math.nan)])
        state.value = math.nan
        with pytest.raises(errors.StateError, match="cannot be written"):
            state.post(fb, [trajectory(policy, "r1")])
        assert not state.is_pending
        state.reload()
        assert state.value == 0
    assert fb.get_trajectory(policy, "r1") is None


def test_a_post_that_did_not_reach_the_service_is_made_later(
    own_server: forebay.Server, fb: forebay.Client, policy: str, tmp_path: Path
) -> None:
    gone = forebay.Client(own_server.url, retry=Retry.none())
    own_server.kill()
    with forebay.State(tmp_path / "state.json", 0) as state:
        state.value = 1
        with pytest.raises(errors.Unreachable):
            state.post(gone, [trajectory(policy, "r1")])
        assert state.is_pending
        state.value = 2
        state.post(fb, [trajectory(policy, "r2")])
        assert (state.value, state.is_pending) == (2, False)
    assert [story.rollout_id for story in fb.list_trajectories(policy)] == ["r1", "r2"]


def test_a_state_has_one_program_at_a_time(tmp_path: Path) -> None:
    with forebay.State(tmp_path / "state.json") as state:
        with pytest.raises(errors.StateError, match="one program at a time"):
            forebay.State(tmp_path / "state.json")
        state.close()
        forebay.State(tmp_path / "state.json").close()
        with pytest.raises(errors.StateError, match="is closed"):
            state.post(forebay.Client(), [{"policy": "p"}])


@pytest.mark.parametrize("content", ["", "[]", '{"value": 1}', '{"format": 9, "value": 1, "pending": null}'])
def test_another_file_is_not_taken_for_a_state(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(errors.StateError, match=r"not the file|reads 1"):
        forebay.State(tmp_path / "state.json")
    assert (tmp_path / "state.json").read_text() == content


PROGRAM = """
import os, signal, sys
import forebay
from forebay import _durable

url, policy, path, point = sys.argv[1:]
fb = forebay.Client(url)
posts, writes = 0, 0

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def counted(replace):
    def count(path, data):
        global writes
        writes += 1
        if point == f"before write {writes}":
            kill()
        replace(path, data)
        if point == f"after write {writes}":
            kill()
    return count

_durable.replace = counted(_durable.replace)
with forebay.State(path, {"sum": 0, "next": 0}) as state:
    state.recover(fb)
    while state.value["next"] < 4:
        number = state.value["next"]
        with fb.bundle(state=state) as b:
            r = b.rollout(policy, rollout_id=f"r{number}")
            choice = {"token_ids": [2], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}
            r.record({"prompt_token_ids": [1], "choices": [choice]})
            state.value = {"sum": state.value["sum"] + number, "next": number + 1}
            r.reward = float(state.value["sum"])
"""


# The second execution writes its post with write 3 and removes it with write 4, and the last one with 7 and 8.
@pytest.mark.parametrize(
    "point", ["before write 3", "after write 3", "before write 4", "after write 4", "after write 7", "nowhere"]
)
def test_a_program_that_is_killed_ends_as_if_it_had_not_been(
    server: forebay.Server, fb: forebay.Client, policy: str, tmp_path: Path, point: str
) -> None:
    path = tmp_path / "state.json"

    def run(point: str) -> int:
        command = [sys.executable, "-c", PROGRAM, server.url, policy, str(path), point]
        environment = {**os.environ, "PYTHONPATH": PACKAGE}
        return subprocess.run(command, env=environment, timeout=PATIENCE_S, check=False).returncode

    if point != "nowhere":
        assert run(point) == -signal.SIGKILL
    assert run("nowhere") == 0
    assert json.loads(path.read_text())["value"] == {"sum": 6, "next": 4}
    stories = list(fb.list_trajectories(policy))
    assert [(story.rollout_id, story.reward) for story in stories] == [
        ("r0", 0.0),
        ("r1", 1.0),
        ("r2", 3.0),
        ("r3", 6.0),
    ]
