"""Advantages by component and by turn against implementations that compute in fractions, and those of tokens."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest

import forebay
from forebay import _early, tinker
from forebay.slime import _samples
from forebay.types import (
    BatchRules,
    FilterRule,
    Gdpo,
    Gigpo,
    GroupRules,
    PolicyRules,
    TurnReturn,
    TurnSpan,
)

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
        with pytest.raises(forebay.errors.ConfigurationError, match="one advantage for all tokens"):
            _samples.fields_of(rows[0], "batch", {}, 0)
        batch.ack(1)


def test_a_framework_refuses_at_its_start_what_it_cannot_use(fb: forebay.Client, policy: str) -> None:
    for advantage, named in (("posted", '"posted"'), (TurnReturn(), '"turn_return"'), (Gigpo(), '"gigpo"')):
        status = fb.put_policy(policy, PolicyRules(advantage=advantage))
        with pytest.raises(forebay.errors.ConfigurationError, match=f"slime takes one advantage .* {named}"):
            _early.check_advantages(status, "slime")
    _early.check_advantages(fb.put_policy(policy, PolicyRules(advantage=Gdpo(components=WEIGHTS))), "slime")


class Turn:
    """A turn, as the formulas see it."""

    def __init__(self, reward: float | None, state: str | None) -> None:
        self.reward, self.state = Fraction(reward or 0), state


def with_turns(policy: str, group_id: str, size: int, index: int, chance: random.Random) -> Any:
    """A rollout with turns of every kind, and what the formulas see of them, with the number of their trained tokens. A
    trained token of no turn is the number -1."""
    segments: list[forebay.Segment] = []
    turns: list[Turn] = []
    lengths: list[list[int]] = []
    for _ in range(chance.randint(1, 3)):
        spans: list[TurnSpan] = []
        mask: list[int] = []
        trained: list[int] = []
        named = chance.random() < 0.7
        for _ in range(chance.randint(1, 4)):
            # Named turns may touch each other, have masked tokens in them, and leave out trained ones.
            if named and chance.random() < 0.3:
                mask += [1]
                trained.append(-1)
            mask += [0] * chance.randint(0 if named else 1, 2)
            of_turn = chance.choice([[1], [1, 1, 1], [1, 0, 1] if named else [1, 1]])
            reward = chance.choice([None, 0.0, chance.gauss(0, 1), 100.0]) if named else None
            state = chance.choice([None, "a", "b", f"{chance.random()}"]) if named else None
            spans.append(TurnSpan(start=len(mask), length=len(of_turn), reward=reward, state_key=state))
            turns.append(Turn(reward, state))
            trained.append(sum(of_turn))
            mask += of_turn
        lengths.append(trained)
        tokens = [1] * (len(mask) + 1)
        segments.append(forebay.Segment(tokens=tokens, loss_mask=mask, turns=spans if named else None))
    voting = index == 0 or chance.random() < 0.9
    posted = forebay.Trajectory(
        policy=policy,
        group_id=group_id,
        group_size=size,
        reward=chance.choice([0.0, 1.0, chance.random()]) if voting else None,
        segments=segments,
    )
    return posted, turns, lengths


def returns(rollout: forebay.Trajectory, turns: list[Turn], gamma: Fraction, outcome: bool) -> list[Fraction]:
    """The sum of what followed, written as the definition has it and not as the recursion."""
    rewards = [turn.reward for turn in turns]
    if outcome:
        rewards[-1] += Fraction(rollout.reward or 0)
    return [
        sum((gamma ** (u - t) * reward for u, reward in enumerate(rewards) if u >= t), Fraction(0))
        for t in range(len(rewards))
    ]


def centred(values: list[Fraction]) -> list[Fraction]:
    mean = sum(values, Fraction(0)) / len(values)
    return [value - mean for value in values]


def by_turn(
    rule: TurnReturn | Gigpo, group: list[tuple[forebay.Trajectory, list[Turn]]]
) -> list[tuple[Fraction, list[Fraction]]]:
    """The advantages of rollouts that vote, and of their turns."""
    gamma = Fraction(rule.gamma)
    outcome = rule.outcome if isinstance(rule, TurnReturn) else True
    found = [(place, turn) for place, (_, turns) in enumerate(group) for turn in turns]
    values = [value for rollout, turns in group for value in returns(rollout, turns, gamma, outcome)]
    of_rollout = [Fraction(0)] * len(group)
    if isinstance(rule, TurnReturn):
        advantages = standardized(values)
    else:
        compare = standardized if rule.norm == "std" else centred
        of_rollout = compare([Fraction(rollout.reward or 0) for rollout, _ in group])
        advantages = [of_rollout[place] for place, _ in found]
        for state in {turn.state for _, turn in found if turn.state is not None}:
            places = [place for place, (_, turn) in enumerate(found) if turn.state == state]
            for place, value in zip(places, compare([values[place] for place in places]), strict=True):
                advantages[place] += Fraction(rule.omega) * value
    rest = iter(advantages)
    return [(whole, [next(rest) for _ in turns]) for whole, (_, turns) in zip(of_rollout, group, strict=True)]


@pytest.mark.parametrize(
    "rule",
    [
        TurnReturn(gamma=0.9),
        TurnReturn(outcome=False),
        Gigpo(gamma=0.95, omega=0.5),
        Gigpo(norm="none"),
    ],
    ids=lambda rule: f"{rule.kind}-{rule.gamma}",
)
def test_a_thousand_random_groups_have_the_advantages_of_their_turns(
    fb: forebay.Client, policy: str, rule: TurnReturn | Gigpo
) -> None:
    chance = random.Random(2505_10978)
    rules = PolicyRules(
        group=GroupRules(size=8),
        batch=BatchRules(groups=GROUPS_OF_BATCH),
        advantage=rule,
        filter=[FilterRule(name="no-vote", scope="rollout", when="reward == null", action="mask")],
    )
    fb.put_policy(policy, rules)
    groups = [
        [with_turns(policy, f"g{number}", size, index, chance) for index in range(size)]
        for number, size in enumerate(chance.choices(range(1, 9), k=GROUPS))
    ]
    seen = 0
    for start in range(0, GROUPS, GROUPS_OF_BATCH):
        of_batch = groups[start : start + GROUPS_OF_BATCH]
        expected: dict[tuple[str, int], list[float]] = {}
        for group in of_batch:
            ids = [receipt.rollout_id for receipt in fb.post([posted for posted, _, _ in group])]
            voters = [(posted, turns) for posted, turns, _ in group if posted.reward is not None]
            of_voters = iter(by_turn(rule, voters))
            for rollout_id, (posted, turns, lengths) in zip(ids, group, strict=True):
                nothing = Fraction(0), [Fraction(0)] * len(turns)
                whole, of_turns = nothing if posted.reward is None else next(of_voters)
                rest = iter(of_turns)
                for place, of_segment in enumerate(lengths):
                    expected[rollout_id, place] = [
                        float(advantage)
                        for length in of_segment
                        for advantage in ([whole] if length < 0 else [next(rest)] * length)
                    ]
        batch = fb.lease(policy, wait_ms=10_000)
        assert batch is not None and batch.lease is not None
        for row in fb.samples(batch.batch_id):
            assert row.advantage is None and row.advantages is not None and row.loss_mask is not None
            of_row = zip(row.advantages, row.loss_mask, strict=True)
            found = [advantage for advantage, bit in of_row if bit]
            of_tokens = expected.pop((row.rollout_id, row.segment))
            assert found == pytest.approx(of_tokens if found else [], abs=1e-6, rel=1e-6)
            assert all(advantage == 0 for advantage, bit in zip(row.advantages, row.loss_mask, strict=True) if not bit)
            seen += 1
        assert not expected
        fb.ack(batch.batch_id, lease=batch.lease, step=start)
    assert seen == sum(len(lengths) for group in groups for _, _, lengths in group)
