"""Calls against the real service."""

from __future__ import annotations

import forebay


def trajectory(policy: str, **fields: object) -> forebay.Trajectory:
    given = {"reward": 1.0, "segments": [forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1])], **fields}
    return forebay.Trajectory(policy=policy, **given)  # type: ignore[arg-type]


def test_a_posted_rollout_is_leased_read_and_acked(fb: forebay.Client, policy: str) -> None:
    receipt = fb.post(trajectory(policy))
    assert (receipt.verdict, receipt.group.state, receipt.duplicate) == ("kept", "ready", False)
    batch = fb.lease(policy, request_id="step-1", wait_ms=10_000)
    assert batch is not None and batch.lease is not None
    (row,) = fb.samples(batch.batch_id)
    assert (row.rollout_id, row.tokens, row.loss_mask) == (receipt.rollout_id, [1, 2, 3], [1, 1])
    assert fb.ack(batch.batch_id, lease=batch.lease, step=1).state == "trained"
    story = fb.get_trajectory(policy, receipt.rollout_id)
    assert story is not None and (story.state, story.step) == ("trained", 1)
