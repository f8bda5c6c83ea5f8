"""Advantages by component against an implementation of their own, which computes in fractions, and those of tokens."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest

import forebay
from forebay import _early, tinker
from forebay.slime import _samples
from forebay.types import BatchRules, FilterRule, Gdpo, GroupRules, PolicyRules

GROUPS, GROUPS_OF_BATCH = 1_000, 125
WEIGHTS = {"acc": 1.0, "fmt": 0.5, "cost": -2.5}


def rollout(policy: str, group_id: str, size: int, index: int, chance: random.Random) -> forebay.Trajectory:
    """A rollout that may lack each component and, unless it is the first of its group, its vote."""
    parts = {"acc": chance.choice([0.0, 1.0]), "fmt": chance.random(), "cost": chance.gauss(0, 100), "other": 7.0}
    return forebay.Trajectory(
        policy=policy,
        group_id=group_id,
        group_size=size,
        reward=chance.random() if index == 0 or chance.random() < 0.9 else None,
        reward_components={name: value for name, value in parts.items() if chance.random() < 0.8},
        segments=[forebay.Segment(tokens=[1, 2], loss_mask=[1])],
    )


def standardized(values: list[Fraction]) -> list[Fraction]:
    if len(values) < 2:
        return [Fraction(0)] * len(values)
    mean = sum(values, Fraction(0)) / len(values)
    variance = sum(((value - mean) ** 2 for value in values), Fraction(0)) / (len(values) - 1)
    deviation = Fraction(float(variance) ** 0.5) + Fraction(1, 1_000_000)
    return [(value - mean) / deviation for value in values]


def by_component(voters: list[forebay.Trajectory]) -> list[Fraction]:
    """The sum over the components of weight * (value - mean) / deviation, each among those who have it."""
    sums = [Fraction(0)] * len(voters)
    for name, weight in WEIGHTS.items():
        having = [index for index, voter in enumerate(voters) if name in (voter.reward_components or {})]
        values = [Fraction((voters[index].reward_components or {})[name]) for index in having]
        for index, advantage in zip(having, standardized(values), strict=True):
            sums[index] += Fraction(weight) * advantage
    return sums


@pytest.mark.parametrize("whiten", ["none", "batch"])
def test_a_thousand_random_groups_have_the_advantages_of_the_formula(
    fb: forebay.Client, policy: str, whiten: Any
) -> None:
    chance = random.Random(2601_05242)
    rules = PolicyRules(
        group=GroupRules(size=8),
        batch=BatchRules(groups=GROUPS_OF_BATCH),
        advantage=Gdpo(components=WEIGHTS, whiten=whiten),
        filter=[FilterRule(name="no-vote", scope="rollout", when="reward == null", action="mask")],
    )
    fb.put_policy(policy, rules)
    sizes = chance.choices(range(1, 9), k=GROUPS)
    groups = [
        [rollout(policy, f"g{number}", size, index, chance) for index in range(size)]
        for number, size in enumerate(sizes)
    ]
    seen = 0
    for start in range(0, GROUPS, GROUPS_OF_BATCH):
        of_batch = groups[start : start + GROUPS_OF_BATCH]
        for group in of_batch:
            fb.post(group)
        voters = [[member for member in group if member.reward is not None] for group in of_batch]
        expected = [advantage for group in voters for advantage in by_component(group)]
        if whiten == "batch":
            expected = standardized(expected)
        voting = (member.rollout_id for group in voters for member in group)
        by_rollout = dict(zip(voting, expected, strict=True))
        batch = fb.lease(policy, wait_ms=10_000)
        assert batch is not None and batch.lease is not None
        for row in fb.samples(batch.batch_id):
            found = float(by_rollout.get(row.rollout_id, Fraction(0)))
            assert row.advantage == pytest.approx(found, abs=1e-6, rel=1e-6)
            seen += 1
        fb.ack(batch.batch_id, lease=batch.lease, step=start)
    assert seen == sum(sizes)


@pytest.mark.parametrize("form", ["json", "arrow"])
def test_each_token_has_the_advantage_that_was_posted(fb: forebay.Client, policy: str, form: Any) -> None:
    fb.put_policy(policy, PolicyRules(advantage="posted"))
    segments = [
        forebay.Segment(tokens=[1, 2, 3, 4], loss_mask=[1, 0, 1], advantages=[0.5, float("nan"), -2.0]),
        forebay.Segment(tokens=[5, 6], loss_mask=[1], advantages=[0.25]),
    ]
    fb.post(forebay.Trajectory(policy=policy, reward=1.0, segments=segments))
    with forebay.Trainer(policy, client=fb) as trainer:
        batch = trainer.lease(wait_s=10)
        assert batch is not None
        (page,) = batch.columns(form=form)
        assert page.scalars["advantage"] == [None, None]
        assert page.advantages.lengths == [3, 1]
        assert [float(value) for value in list(page.advantages.values)] == [0.5, 0.0, -2.0, 0.25]
        rows = list(batch.rows())
        assert [row.advantages for row in rows] == [[0.5, 0.0, -2.0], [0.25]]
        # Tinker sums over tokens, so each has its own.
        _, inputs = tinker.inputs_of(rows[1], "importance_sampling")
        assert inputs["advantages"] == [0.25 * rows[1].loss_weight]
        for framework in (slime_fields, verl_fields):
            with pytest.raises(forebay.errors.ConfigurationError, match="one advantage for all tokens"):
                framework(rows[0])
        batch.ack(1)


def slime_fields(row: Any) -> Any:
    return _samples.fields_of(row, "batch", {}, 0)


def verl_fields(row: Any) -> Any:
    return _early.one_advantage(row.advantage, "forebay.verl")


def test_a_framework_refuses_at_its_start_what_it_cannot_use(fb: forebay.Client, policy: str) -> None:
    status = fb.put_policy(policy, PolicyRules(advantage="posted"))
    with pytest.raises(forebay.errors.ConfigurationError, match="TRL takes one advantage"):
        _early.check_advantages(status, "TRL")
    _early.check_advantages(fb.put_policy(policy, {}), "TRL")
