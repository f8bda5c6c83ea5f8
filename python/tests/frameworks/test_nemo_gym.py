"""Every file of rollouts in a checkout of NeMo Gym is imported. NEMO_GYM_SRC names the checkout."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay

SOURCE = os.environ.get("NEMO_GYM_SRC")

pytestmark = pytest.mark.skipif(SOURCE is None, reason="NEMO_GYM_SRC does not name a checkout of NeMo Gym: NOT TESTED")

NO_ROLLOUTS = ("inputs", "metrics", "reward_profiling")
"""Parts of the names of files that stand beside rollouts."""


def files() -> list[Path]:
    found = Path(SOURCE or os.devnull).glob("**/data/*rollouts*.jsonl")
    return sorted(path for path in found if not any(part in path.name for part in NO_ROLLOUTS))


def is_rollout(line: str) -> bool:
    """Whether a line has the form of a rollout. Some files have placeholders or inputs."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    output = (record.get("response") or {}).get("output")
    return isinstance(output, list) and all(isinstance(item, dict) for item in items_of(output))


def items_of(output: list[Any]) -> list[Any]:
    """The items of an output. Agents in environments have a list for each step, with all items up to then."""
    items: list[Any] = []
    for part in output:
        items += [item for item in part if item not in items] if isinstance(part, list) else [part]
    return items


def sampled(line: str) -> int:
    """The sampled ids of a rollout."""
    items = items_of(json.loads(line)["response"]["output"])
    return sum(len(item.get("generation_token_ids") or ()) for item in items)


@pytest.fixture
def fb(server: forebay.Server) -> Iterator[forebay.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def server() -> Iterator[forebay.Server]:
    with forebay.Server() as server:
        yield server


def test_every_rollout_is_imported_and_nothing_else_is_refused(fb: forebay.Client) -> None:
    paths = files()
    assert len(paths) > 100, f"{SOURCE} has {len(paths)} files of rollouts"
    rollouts = with_ids = 0
    for path in paths:
        policy = f"p-{uuid.uuid4().hex}"
        fb.put_policy(policy, {"require": []})
        lines = path.read_text().splitlines()
        report = fb.import_("nemo-gym", path.read_bytes(), policy=policy, group_size=1, prefix=f"{path}/"[-100:])
        expected = [number for number, line in enumerate(lines, 1) if line.strip() and not is_rollout(line)]
        assert sorted({refusal.line for refusal in report.refusals}) == expected, f"{path}: {report.refusals}"
        assert report.stored + report.duplicates == report.rollouts == sum(map(is_rollout, lines)), path
        rollouts += report.rollouts
        with_ids += sum(is_rollout(line) and sampled(line) > 0 for line in lines)
    assert rollouts > 500
    assert with_ids > 0, "some rollouts have token ids"


def test_the_ids_of_a_rollout_are_trained_once(fb: forebay.Client) -> None:
    policy = f"p-{uuid.uuid4().hex}"
    fb.put_policy(policy, {"batch": {"groups": 1}})
    expected: dict[str, int] = {}
    for path in files():
        for number, line in enumerate(path.read_text().splitlines()):
            if is_rollout(line) and sampled(line):
                rollout_id = f"{len(expected)}-{number}"
                record = {**json.loads(line), "_ng_rollout_id": rollout_id, "_ng_task_index": rollout_id}
                report = fb.import_("nemo-gym", [record], policy=policy, group_size=1)
                assert report.verdicts.kept == 1, report
                expected[rollout_id] = sampled(line)
    trained: dict[str, int] = {}
    while (batch := fb.lease(policy)) is not None:
        for sample in fb.samples(batch.batch_id):
            trained[sample.rollout_id] = trained.get(sample.rollout_id, 0) + sum(sample.loss_mask or ())
    assert trained == expected
