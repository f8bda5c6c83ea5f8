"""Programs of examples/ in which an agent plans: rows compared with numbers worked out by hand.

Calls are made in threads, so scripts go by what a call says.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
from examples_support import Example, Script, assert_group, client, of_group, weights

from forebay.testing import Answer, Engine, Request


def orchestra(*plans: str, failed: str = "", **joined: str) -> Script:
    """A script of plans in turn, of subagents that say what their table has, and of syntheses by the plan. The prompt
    `failed` fails."""
    in_order = iter(plans)

    def script(request: Request) -> Answer | str:
        if request.text == failed:
            return Answer("the engine has no room", status=400)
        if request.text == "ue":
            return next(in_order)
        return request.text[-1] if request.model == "subagent" else joined[request.text.split("|")[1]]

    return script


def asked_of_tables(system: Example) -> Any:
    q = system.question("ue", "9")
    q.chunks = ("x5", "y9", "z0")
    return q


def test_orchestrator_subagents_rewards_a_plan_with_the_synthesis_of_its_chain(example: Any) -> None:
    system = example("orchestrator_subagents")
    system.policy("orchestrator", 2, 2)
    system.policy("subagent", 1, 6)
    q = asked_of_tables(system)
    script = orchestra("yxy", "xzy", yxy="9", xzy="0")
    with Engine(script) as engine, client(engine) as llm, system.fb.bundle() as b:
        # One after the other, so that the first one has the first plan.
        for place in range(2):
            system.program.chain(system.run, llm, b, q, place, 2)
        assert {request.text for request in engine.requests} >= {"ue|yxy|959", "ue|xzy|509"}
    planned = [rollout.reward_components for rollout in b.rollouts if "planned" in rollout.reward_components]
    assert planned == [{"gold": 1.0, "planned": 2 / 3}, {"gold": 0.0, "planned": 1 / 3}]
    rows = system.rows("orchestrator")
    for group in ("plan", "synth"):
        assert_group(of_group(rows, f"{q.id}.{group}"), [(1.0, 0.7071058), (0.0, -0.7071058)])
    # Four rollouts. A plan has three letters and its end, and a synthesis a digit and its end.
    assert weights(rows) == pytest.approx([1 / (4 * 4), 1 / (4 * 2)], abs=1e-7)
    assert_group(system.rows("subagent"), [(1.0, 0.9128693)] * 3 + [(0.0, -0.9128693)] * 3)


def test_orchestrator_subagents_gives_places_without_a_table_the_fallback(example: Any) -> None:
    tables = example("orchestrator_subagents").program.tables
    assert tables("xyz") == ["x", "y", "z"]
    assert tables("y") == ["y", "z", "z"]
    assert tables("7y|xx") == ["z", "y", "z"]


@pytest.mark.parametrize(
    ("failed", "aborted"),
    [
        ("ue|x5", {"subagent": 2}),
        ("ue|yxy|959", {"orchestrator": 4}),
        ("ue", {"orchestrator": 4, "subagent": 6}),
    ],
)
def test_orchestrator_subagents_aborts_what_has_no_outcome(example: Any, failed: str, aborted: dict[str, int]) -> None:
    system = example("orchestrator_subagents")
    system.policy("orchestrator", 2, 2)
    system.policy("subagent", 1, 6)
    with Engine(orchestra("yxy", "yxy", failed=failed, yxy="9")) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, asked_of_tables(system), chains=2)
        seen = [request.text for request in engine.requests]
    assert aborted == collections.Counter(r.policy for r in b.rollouts if r.trajectory().status == "aborted")
    # The synthesis sees that an answer is missing.
    assert ("ue|yxy|9-9" in seen) == (failed == "ue|x5")


def test_orchestrator_subagents_joins_nothing_where_no_subagent_has_answered(example: Any) -> None:
    system = example("orchestrator_subagents")
    system.policy("orchestrator", 2, 2)
    system.policy("subagent", 1, 6)
    with Engine(orchestra("yyy", "yyy", failed="ue|y9")) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, asked_of_tables(system), chains=2)
    why = [rollout.trajectory().metadata["aborted"] for rollout in b.rollouts if rollout.policy == "orchestrator"]
    assert sorted(why) == ["no subagent has answered"] * 2 + ["the synthesis failed"] * 2
