"""Scores: numbers about rollouts that come after them, against a real service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.types import GroupRules, PolicyRules, ScoreRequest, ScoreRules


def trajectory(policy: str, rollout_id: str, **fields: Any) -> forebay.Trajectory:
    """A rollout of two trained tokens in the group `g`, without a reward."""
    segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1])
    return forebay.Trajectory(policy=policy, rollout_id=rollout_id, group_id="g", segments=[segment], **fields)


@pytest.fixture
def judged(fb: forebay.Client, policy: str) -> str:
    """A policy of groups of two, whose rollouts wait for two scores."""
    scores = ScoreRules(required=["tests", "judge"], reward="0.75 * scores.tests + 0.25 * scores.judge")
    fb.put_policy(policy, PolicyRules(group=GroupRules(size=2), scores=scores))
    return policy


def test_a_group_is_ready_with_the_last_score(fb: forebay.Client, judged: str) -> None:
    receipts = fb.post([trajectory(judged, "a", reward_components={"tests": 1.0}), trajectory(judged, "b")])
    assert [(receipt.verdict, receipt.scoring) for receipt in receipts] == [
        ("kept", ["judge"]),
        ("kept", ["tests", "judge"]),
    ]
    assert [story.rollout_id for story in fb.list_trajectories(judged, state="scoring")] == ["a", "b"]
    first = fb.score("a", "judge", 1.0, policy=judged)
    assert (first.duplicate, first.applied, first.scoring, first.group.state) == (False, True, [], "open")
    assert fb.score("b", "tests", 0.0, policy=judged).scoring == ["judge"]
    assert fb.lease(judged) is None
    last = fb.score("b", "judge", 1.0, policy=judged)
    assert (last.policy, last.rollout_id, last.name, last.verdict) == (judged, "b", "judge", "kept")
    assert (last.scoring, last.group.state) == ([], "ready")
    batch = fb.lease(judged)
    assert batch is not None and [row.reward for row in fb.samples(batch.batch_id)] == [1.0, 0.25]


def test_the_same_score_is_a_duplicate_and_another_one_a_conflict(fb: forebay.Client, judged: str) -> None:
    fb.post(trajectory(judged, "a"))
    given = [fb.score("a", "judge", 0.5, policy=judged) for _ in range(2)]
    assert [receipt.duplicate for receipt in given] == [False, True]
    with pytest.raises(errors.ScoreConflict, match="replace") as refused:
        fb.score("a", "judge", 0.75, policy=judged)
    assert [violation.pointer for violation in refused.value.violations] == ["/value"]
    assert fb.score("a", "judge", 0.25, policy=judged, scorer="another").applied
    replaced = fb.score("a", "judge", 0.75, policy=judged, replace=True)
    assert (replaced.duplicate, replaced.applied) == (False, True)
    # The mean of two scorers is the score.
    fb.score("a", "tests", 1.0, policy=judged)
    story = fb.get_trajectory(judged, "a")
    assert story is not None and story.reward == 0.75 + 0.25 * 0.5
    assert not fb.score("a", "judge", 0.0, policy=judged).applied, "the rollout is judged"


def test_several_scores_are_stored_together_or_not_at_all(fb: forebay.Client, judged: str) -> None:
    fb.post([trajectory(judged, "a"), trajectory(judged, "b")])
    fb.score("a", "judge", 0.5, policy=judged)
    tests = [{"policy": judged, "rollout_id": rollout_id, "name": "tests", "value": 1} for rollout_id in ("a", "b")]
    other = ScoreRequest(policy=judged, rollout_id="a", name="judge", value=0.0)
    with pytest.raises(errors.ScoreConflict) as refused:
        fb.score_all([*tests, other])
    assert [violation.pointer for violation in refused.value.violations] == ["/2/value"]
    assert fb.scores("a", policy=judged).scoring == ["tests"]
    receipts = fb.score_all([*tests, ScoreRequest(policy=judged, rollout_id="b", name="judge", value=0.0)])
    assert [(receipt.rollout_id, receipt.name) for receipt in receipts] == [
        ("a", "tests"),
        ("b", "tests"),
        ("b", "judge"),
    ]
    assert receipts[-1].group.state == "ready"
    assert [receipt.duplicate for receipt in fb.score_all(iter(tests))] == [True, True]
    assert fb.score_all([]) == []


def test_the_scores_of_a_rollout_are_listed(fb: forebay.Client, judged: str) -> None:
    fb.post(trajectory(judged, "a", reward_components={"tests": 1.0}))
    found = fb.scores("a", policy=judged)
    assert (found.policy, found.rollout_id, found.scoring) == (judged, "a", ["judge"])
    assert found.deadline_at is not None
    fb.score("a", "judge", 0.5, policy=judged, scorer="gpt", rationale="right, but terse")
    fb.score("a", "judge", 0.25, policy=judged, scorer="gpt")
    found = fb.scores("a", policy=judged)
    assert (found.scoring, found.deadline_at) == ([], None)
    assert [(score.name, score.scorer, score.value, score.rationale, score.applied) for score in found.scores] == [
        ("judge", "gpt", 0.25, None, False),
        ("judge", "gpt", 0.5, "right, but terse", True),
        ("tests", None, 1.0, None, True),
    ]


def test_what_does_not_exist_cannot_be_scored(fb: forebay.Client, judged: str) -> None:
    for call in (
        lambda: fb.score("nobody", "judge", 1.0, policy=judged),
        lambda: fb.scores("nobody", policy=judged),
    ):
        with pytest.raises(errors.NotFound):
            call()
    with pytest.raises(errors.UnknownPolicy):
        fb.score("a", "judge", 1.0, policy=f"no-{judged}")


def test_a_score_that_is_no_finite_number_is_refused_before_it_is_sent(fb: forebay.Client, judged: str) -> None:
    fb.post(trajectory(judged, "a"))
    with pytest.raises(errors.NotEncodableError, match="/value: is nan"):
        fb.score("a", "judge", float("nan"), policy=judged)
    with pytest.raises(errors.NotEncodableError, match="/1/value: is inf"):
        good = {"policy": judged, "rollout_id": "a", "name": "judge", "value": 1.0}
        fb.score_all([good, {**good, "name": "tests", "value": float("inf")}])
    assert fb.scores("a", policy=judged).scores == []


def test_a_judge_has_a_key_and_the_policy_is_default_if_none_is_named(own_server: forebay.Server) -> None:
    admin = own_server.client(own_server.client().create_key("operator", "admin").key)
    admin.put_policy("default", {"scores": {"required": ["reward"]}})
    admin.post(trajectory("default", "a"))
    key = admin.create_key("judge", "score", policies=["default"])
    judge = own_server.client(key.key)
    assert [story.rollout_id for story in judge.list_trajectories("default", state="scoring")] == ["a"]
    assert judge.get_content("default", "a") is not None
    receipt = judge.score("a", "reward", 1.0)
    assert (receipt.policy, receipt.scorer, receipt.group.state) == ("default", key.info.key_id, "ready")
    assert [score.scorer for score in judge.scores("a").scores] == [key.info.key_id]
    with pytest.raises(errors.Forbidden):
        judge.post(trajectory("default", "b"))


def test_scores_are_given_asynchronously(server: forebay.Server, judged: str) -> None:
    async def main() -> None:
        async with forebay.AsyncClient(server.url) as fb:
            await fb.post([trajectory(judged, "a", reward_components={"tests": 1.0}), trajectory(judged, "b")])
            given = [await fb.score("a", "judge", 0.5, policy=judged, rationale="why") for _ in range(2)]
            assert [receipt.duplicate for receipt in given] == [False, True]
            await fb.score("b", "judge", 0.5, policy=judged)
            with pytest.raises(errors.ScoreConflict):
                await fb.score("b", "judge", 0.0, policy=judged)
            assert (await fb.score("b", "judge", 0.0, policy=judged, replace=True)).applied
            assert (await fb.scores("b", policy=judged)).scoring == ["tests"]
            tests = {"policy": judged, "rollout_id": "b", "name": "tests", "value": 0.0}
            receipts = await fb.score_all([tests, {**tests, "name": "style"}])
            assert [(receipt.name, receipt.group.state) for receipt in receipts] == [
                ("tests", "ready"),
                ("style", "ready"),
            ]
            assert [score.rationale for score in (await fb.scores("a", policy=judged)).scores] == ["why", None]

    asyncio.run(main())
