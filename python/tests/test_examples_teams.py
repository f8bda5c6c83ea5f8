"""Programs of examples/ whose rewards depend on the whole execution: rows compared with numbers worked out by hand.

Calls are made in threads, so scripts go by what a call says, and rows are compared as sets of an execution.
"""

from __future__ import annotations

import collections
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from examples_support import EXAMPLES, PRECISE, assert_group, client, in_turn, of_group, weights

import forebay
from forebay._runner import programs, settings, tables
from forebay._runner.output import Output
from forebay.errors import ConfigurationError
from forebay.testing import Answer, Engine, Request


def test_multi_agent_multiplies_the_rewards_of_an_execution_by_what_its_selector_has_picked(example: Any) -> None:
    system = example("multi_agent")
    system.policy("team", 3, 10)
    # Two executions, one after the other: five solvers each, and rewriters of which one and two are right.
    solve = iter("90900" + "90000")
    rewrite = iter("90000" + "99000")
    picks = iter([True, False])
    lock = threading.Lock()

    def script(request: Request) -> str:
        with lock:
            if request.text.startswith("s|"):
                return next(solve)
            if request.text.startswith("r|"):
                return next(rewrite)
            candidates = request.text.removeprefix("j|e|")
            wanted = next(picks)
            return next(a for a, b in zip(candidates[::2], candidates[1::2], strict=True) if (b == "9") is wanted)

    q = system.question("e", "9")
    with Engine(script) as engine, client(engine) as llm, system.fb.bundle() as b:
        for place in range(2):
            system.program.execution(system.run, llm, b, q, place, 2, 5)
    rows = system.rows("team")
    high, low, less = 1.6710168, -0.6076425, 0.9114637
    assert_group(of_group(rows, f"{q.id}.solve"), [(1.2, high)] * 2 + [(0.8, less)] + [(0.0, low)] * 7)
    assert_group(of_group(rows, f"{q.id}.select"), [(1.2, 0.7071059), (0.0, -0.7071059)])
    assert len(of_group(rows, f"{q.id}.rewrite")) == 10
    # Three groups, and two trained tokens in each rollout.
    assert weights(rows) == pytest.approx([1 / (22 * 2)], abs=1e-7)


def test_solver_rewriter_selector_leaves_out_selectors_that_name_nothing(example: Any) -> None:
    system = example("solver_rewriter_selector")
    for policy in ("solver", "rewriter", "selector"):
        system.policy(policy, 1, 2)
    right: list[str] = []
    lock = threading.Lock()

    def select(request: Request) -> str:
        with lock:
            right.append("abcd"[request.text.index("9") // 2 - 1])
            return right[0] if len(right) == 1 else "?"

    given = in_turn(solver="90", rewriter="09")

    def script(request: Request) -> Answer | str:
        return select(request) if request.model == "selector" else given(request)

    q = system.question("e", "9")
    with Engine(script) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, q, executions=1, count=2)
    picked = [rollout.metadata.get("picked") for rollout in b.rollouts if rollout.policy == "selector"]
    rewriters = {rollout.rollout_id: rollout for rollout in b.rollouts if rollout.policy == "rewriter"}
    (chosen,) = [rewriters[rollout_id] for rollout_id in picked if rollout_id is not None]
    assert chosen.reward_components == {"gold": 1.0}
    for policy in ("solver", "rewriter", "selector"):
        rows = system.rows(policy)
        assert_group(rows, [(1.2, 0.7071059), (0.0, -0.7071059)])
        assert weights(rows) == [0.25]


def test_solver_summarizer_factors_span_executions(example: Any) -> None:
    system = example("solver_summarizer")
    system.policy("solver", 1, 4)
    system.policy("summarizer", 1, 4)
    q = system.question("e", "9")
    script = in_turn(solver="9090", summarizer="9909")
    with Engine(script) as engine, client(engine) as llm, system.fb.bundle() as b:
        for place in range(2):
            system.program.execution(system.run, llm, b, q, place, 2, 2)
    solvers = [(1.2, 1.1666647), (0.0, -0.8333319), (0.8, 0.4999992), (0.0, -0.8333319)]
    assert_group(system.rows("solver"), solvers)
    summarizers = [(1.2, 0.7071055), (1.2, 0.7071055), (0.0, -1.4142111), (0.8, 0.0)]
    assert_group(system.rows("summarizer"), summarizers)


def test_solver_summarizer_factors_change_nothing_in_a_group_of_one_execution(example: Any) -> None:
    system = example("solver_summarizer")
    system.policy("solver", 1, 2)
    system.policy("summarizer", 1, 2)
    q = system.question("e", "9")
    with Engine(in_turn(solver="90", summarizer="99")) as engine, client(engine) as llm:
        system.program.execute(system.run, system.fb, llm, q, executions=1, count=2)
    assert_group(system.rows("solver"), [(1.2, 0.7071059), (0.0, -0.7071059)])


def test_solver_summarizer_factors_of_answers_that_are_missing(example: Any) -> None:
    factor = example("solver_summarizer").program.factor
    assert factor([None, ""], []) == 0.8
    assert factor(["9", None], []) == 1.0
    assert factor(["9"], [1.0, 0.0]) == 0.8
    assert factor(["9"], [1.0, 1.0, 0.0]) == 1.2


def debate(example: Any, gold: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """One execution of the debate: first answers 7, 7, 3 and final ones 7, 3, 7, whatever is true."""
    system = example("consensus_debate")
    system.policy("generator", 1, 3)
    system.policy("critic", 1, 3)
    lock, critics = threading.Lock(), collections.deque("773" + "737")
    first = iter("773")

    def script(request: Request) -> str:
        with lock:
            return next(first) if request.model == "generator" else critics.popleft()

    with Engine(script) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, system.question("3+4", gold), executions=1)
    return system.rows("generator"), system.rows("critic"), b.rollouts


def rows_of(policy: str, system: Any) -> list[Any]:
    batch = system.fb.lease(policy, wait_ms=10_000)
    return list(system.fb.samples(batch.batch_id))


def test_consensus_debate_rewards_the_majority_and_not_the_truth(example: Any) -> None:
    for gold in ("7", "3", "0"):
        generators, critics, rollouts = debate(example, gold)
        assert_group(generators, [(1.0, 0.5773493)] * 2 + [(0.0, -1.1546985)])
        assert_group(critics, [(1.0, 0.5773493)] * 2 + [(0.0, -1.1546985)])
        assert weights(generators) == pytest.approx([1 / 6], abs=1e-7)
        assert weights(critics) == pytest.approx([1 / 12], abs=1e-7)
        majority = {rollout.reward_components["majority"] for rollout in rollouts}
        assert majority == {float(gold == "7")}
        right = sorted(rollout.reward_components["gold"] for rollout in rollouts)
        assert right == {"7": [0, 0, 1, 1, 1, 1], "3": [0, 0, 0, 0, 1, 1], "0": [0] * 6}[gold]


def test_consensus_debate_trains_both_rounds_of_a_critic(example: Any) -> None:
    system = example("consensus_debate")
    system.policy("generator", 1, 3)
    system.policy("critic", 1, 3)
    with Engine(in_turn(generator="773", critic="773737")) as engine, client(engine) as llm:
        system.program.execute(system.run, system.fb, llm, system.question("3+4", "7"), executions=1)
    batch = system.fb.lease("critic", wait_ms=10_000)
    rounds = collections.Counter(row.rollout_id for row in system.fb.samples(batch.batch_id))
    assert list(rounds.values()) == [2, 2, 2]


def test_consensus_debate_breaks_ties_among_the_most_frequent(example: Any) -> None:
    consensus = example("consensus_debate").program.consensus
    made = {consensus(["7", "3", "7", "3", "1", None, ""], random.Random(seed)) for seed in range(50)}
    assert made == {"7", "3"}
    assert consensus([None, ""], random.Random(1)) is None


def test_memagent_gives_each_call_the_same_share_of_its_rollout(example: Any) -> None:
    system = example("memagent")
    system.policy("memory", 1, 3)
    lock, last = threading.Lock(), iter("937")

    def script(request: Request) -> str:
        known = {"c|-|a3": "-", "c|-|c9": "9", "c|9|b1": ""}
        with lock:
            return known[request.text] if request.text in known else next(last)

    q = system.question("c", "9")
    q.chunks = ("a3", "c9", "b1")
    with Engine(script) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, q, count=3)
        asked = {request.text for request in engine.requests}
    # An empty memory is not written.
    assert asked == {"c|-|a3", "c|-|c9", "c|9|b1", "c|9"}
    rows = rows_of("memory", system)
    assert len(rows) == 12
    made = {rollout.rollout_id: rollout.reward for rollout in b.rollouts}
    for row in rows:
        expected = 1.1546985 if made[row.rollout_id] == 1.0 else -0.5773493
        assert row.advantage == pytest.approx(expected, abs=PRECISE)
    # Three rollouts of four calls. A call trains its answer and its end: two tokens, or only the end.
    assert {round(row.loss_weight * sum(row.loss_mask), 7) for row in rows} == {round(1 / 12, 7)}
    assert {round(row.loss_weight, 7) for row in rows} == {round(1 / 24, 7), round(1 / 12, 7)}


@pytest.mark.parametrize("profile", [None, "outcome"])
def test_turn_credit_rewards_the_turns_that_were_right(example: Any, profile: str | None) -> None:
    system = example("turn_credit", profile=profile)
    system.policy("examinee", 1, 3)
    q = system.question("ebajc", "93740")
    lock, flags = threading.Lock(), iter([True] * 4 + [False] * 11)

    def script(request: Request) -> str:
        with lock:
            digit = q.gold[q.text.index(request.text)]
            return digit if next(flags) else str((int(digit) + 1) % 10)

    with Engine(script) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, q, count=3)
    rows = system.rows("examinee")
    assert len(rows) == 3
    earned = {rollout.rollout_id: [turn.reward for turn in rollout.turns] for rollout in b.rollouts}
    # Nobody passes, and the parts of the reward are the shares of right answers.
    assert {row.reward for row in rows.values()} == {0.0}
    assert sorted(r.reward_components["gold"] for r in b.rollouts) == sorted(sum(of) / 5 for of in earned.values())
    for row in rows.values():
        # A turn is a digit and its end, and a question of four tokens is between two turns.
        assert row.loss_mask == ([1, 1, 0, 0, 0, 0] * 5)[:-4]
        if profile is not None:
            assert row.advantages is None
            continue
        # Four of 15 turns are right: the mean is 4/15, and the deviation 0.4577377.
        expected = [1.6020785 if reward else -0.5825740 for reward in earned[row.rollout_id]]
        assert row.advantages[::6] == pytest.approx(expected, abs=PRECISE)
        assert row.advantages[1::6] == row.advantages[::6]


def test_late_judge_scores_what_the_agent_posted_without_a_reward(example: Any) -> None:
    system = example("late_judge")
    system.policy("default", 1, 3)
    q = system.question("3+4", "7")
    answers = iter(["7", "1", Answer("7", finish_reason="length")])
    with Engine(lambda request: next(answers)) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, q, count=3)
    assert [receipt.scoring for receipt in b.receipts] == [["judge"]] * 3
    with forebay.Scorer("judge", include=["messages"], client=system.fb) as scorer:
        item = next(iter(scorer))
        item.score(system.program.judged(item))
    rows = system.rows("default")
    # The whole answer is right, nothing of it, and its digit without its end.
    assert sorted(row.reward for row in rows.values()) == [0.0, 0.5, 1.0]
    assert sorted(row.advantage for row in rows.values()) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


def test_shared_state_peers_give_every_round_the_reward_of_round_3(example: Any) -> None:
    system = example("shared_state_peers")
    system.policy("peer_a", 3, 3)
    system.policy("peer_b", 3, 3)
    q = system.question("e", "9")
    # Peer a is right in round 1 where it is wrong in round 3. Chains are played one after the other.
    script = in_turn(peer_a=["0", "0", "9", "9", "9", "0", "0", "0", "9"], peer_b=["9"] * 6 + ["1"] * 3)
    with Engine(script) as engine, client(engine) as llm, system.fb.bundle() as b:
        for place in range(3):
            system.program.chain(system.run, llm, b, q, place, 3)
        seen = [request.text for request in engine.requests if request.model == "peer_a"]
    assert seen[:3] == ["e|", "e|09", "e|0909"]
    rows = system.rows("peer_a")
    for number in (1, 2, 3):
        group = of_group(rows, f"{q.id}.r{number}")
        assert_group(group, [(1.0, 0.5773493), (0.0, -1.1546985), (1.0, 0.5773493)])
    components = [r.reward_components for r in b.rollouts if r.policy == "peer_a"]
    assert components[3] == {"gold": 0.0, "round1": 1.0}
    assert components[2] == {"gold": 1.0, "round3": 1.0}
    assert weights(rows) == pytest.approx([1 / 18], abs=1e-7)


def test_shared_state_peers_abort_the_rounds_of_a_peer_whose_round_3_failed(example: Any) -> None:
    system = example("shared_state_peers")
    q = system.question("e", "9")
    failure = Answer("the engine has no room", status=400)
    script = in_turn(peer_a=["9", "9", failure, "9", "9", "9"], peer_b="999999")
    for policy in ("peer_a", "peer_b"):
        system.policy(policy, 3, 2)
    with Engine(script) as engine, client(engine) as llm, system.fb.bundle() as b:
        for place in range(2):
            system.program.chain(system.run, llm, b, q, place, 2)
    aborted = [(r.policy, r.metadata["chain"]) for r in b.rollouts if r.trajectory().status == "aborted"]
    assert aborted == [("peer_a", 0)] * 3


# The swarm.


def test_exam_swarm_composes_rewards_as_in_the_worked_example(example: Any) -> None:
    program = example("exam_swarm").program
    scores = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    rewards = program.rewards(scores, program.swarm(program.START, 0.5))
    for made, expected in zip(rewards, [[0.499999, -0.499999], [0.2, 0.2], [-0.2, -0.2]], strict=True):
        assert made == pytest.approx(expected, abs=PRECISE)
    ema = program.after(program.START, 0.5)
    assert ema == {"calls": 1, "mean": pytest.approx(0.025), "var": pytest.approx(0.96128125)}
    for _ in range(19):
        ema = program.after(ema, 0.5)
    assert (ema["mean"], ema["var"]) == pytest.approx((0.320757, 0.4131047), abs=PRECISE)
    assert program.swarm({**ema, "calls": 19}, 0.75) == 0.0
    assert program.swarm(ema, 0.75) == pytest.approx(0.66784, abs=1e-5)
    rewards = program.rewards(scores, program.swarm(ema, 0.75))
    for made, expected in zip(rewards, [[0.7003510, -0.2996470], [0.4003520] * 2, [0.0003520] * 2], strict=True):
        assert made == pytest.approx(expected, abs=PRECISE)


def test_exam_swarm_ranks_equal_agents_alike(example: Any) -> None:
    program = example("exam_swarm").program
    assert program.ranks([0.5, 1.0, 0.0]) == [2, 1, 3]
    assert program.ranks([0.5, 0.5, 0.0, 1.0]) == [2.5, 2.5, 4, 1]
    assert program.ranks([0.3] * 8) == [4.5] * 8
    assert program.swarm({"calls": 20, "mean": 0.0, "var": 1e-4}, 1.0) == 3.0


def test_exam_swarm_rewards_are_advantages_and_the_state_changes_with_the_post(example: Any, tmp_path: Any) -> None:
    system = example("exam_swarm")
    names = [f"agent.{number}" for number in range(3)]
    for name in names:
        system.policy(name, 1, 2)
    script = in_turn(**{"agent.0": "90", "agent.1": "99", "agent.2": "00"})
    with (
        Engine(script) as engine,
        client(engine) as llm,
        forebay.State(tmp_path / "state.json", system.program.START) as state,
    ):
        q = system.question("e", "9")
        system.program.execute(system.run, system.fb, llm, state, q, names, count=2)
        assert not state.is_pending
    with forebay.State(tmp_path / "state.json") as state:
        assert state.value["mean"] == pytest.approx(0.025)
    expected = {"agent.0": [-0.499999, 0.499999], "agent.1": [0.2, 0.2], "agent.2": [-0.2, -0.2]}
    for name, rewards in expected.items():
        rows = system.rows(name)
        assert sorted(row.advantage for row in rows.values()) == pytest.approx(rewards, abs=PRECISE)
        assert weights(rows) == [0.25]


def test_exam_swarm_leaves_out_answers_and_agents_that_failed(example: Any, tmp_path: Any) -> None:
    system = example("exam_swarm")
    names = [f"agent.{number}" for number in range(3)]
    for name in names:
        system.policy(name, 1, 2)
    failure = Answer("the engine has no room", status=400)
    script = in_turn(**{"agent.0": "90", "agent.1": ["9", failure], "agent.2": [failure, failure]})
    with (
        Engine(script) as engine,
        client(engine) as llm,
        forebay.State(tmp_path / "state.json", system.program.START) as state,
    ):
        b = system.program.execute(system.run, system.fb, llm, state, system.question("e", "9"), names, count=2)
        assert state.value["mean"] == pytest.approx(0.05 * 2 / 3)
    aborted = collections.Counter(r.policy for r in b.rollouts if r.trajectory().status == "aborted")
    assert aborted == {"agent.1": 1, "agent.2": 2}
    # Two agents are left: the place is worth 0.2 and -0.2.
    assert [rollout.reward for rollout in b.rollouts if rollout.policy == "agent.1" and rollout.reward] == [0.2]


# Distillation.


def test_opd_trainer_posts_groups_of_one_without_advantages(example: Any) -> None:
    system = example("opd_trainer")
    rules = system.found.policy("student").rules
    system.fb.put_policy("student", {**rules, "batch": {"groups": 4}})
    with Engine(in_turn(student="9009")) as engine, client(engine) as llm:
        system.program.execute(system.run, system.fb, llm, system.question("e", "9"), count=4)
    rows = system.rows("student")
    assert [row.advantage for row in rows.values()] == [0.0] * 4
    assert sorted(row.reward for row in rows.values()) == [0.0, 0.0, 1.0, 1.0]
    assert weights(rows) == [0.125]
    assert len({row.group_id for row in rows.values()}) == 4


def test_a_teacher_or_reference_may_be_the_model_of_a_policy(example: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FOREBAY_TRAINER_BIN", sys.executable)  # The command is read here, and never run.
    found = example("opd_trainer").found
    output = Output(tmp_path / "run", {}, resume=False)
    models = {"student": tmp_path / "student", "teacher": tmp_path / "teacher"}
    made = programs.trainer(found, found.policy("student"), output, models, "http://127.0.0.1:1")
    config = tables.load(Path(made.command[-1]))
    assert (config["teacher"], config["model"]) == (str(models["teacher"]), str(models["student"]))


def test_a_teacher_that_is_not_a_policy_is_refused_before_anything_starts(tmp_path: Any) -> None:
    text = (EXAMPLES / "opd_trainer.toml").read_text().replace('"{teacher}"', '"{nobody}"')
    for name in ("defaults.toml", "opd_trainer.py", "world.py"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    (tmp_path / "opd_trainer.toml").write_text(text)
    with pytest.raises(ConfigurationError, match="student has the teacher {nobody}, which is not a policy"):
        settings.read(tmp_path / "opd_trainer.toml")


def test_teams_abort_selectors_that_have_nothing_to_select(example: Any) -> None:
    failure = Answer("the engine has no room", status=400)
    for name, role, place in (("multi_agent", "team", -1), ("solver_rewriter_selector", "selector", 0)):
        system = example(name)
        for policy in system.found.policies:
            system.policy(policy.name, 1, 2)

        def script(request: Request) -> Answer | str:
            return failure if request.model == "rewriter" or request.text.startswith("r|") else "9"

        with Engine(script) as engine, client(engine) as llm, system.fb.bundle() as b:
            system.program.execution(system.run, llm, b, system.question("e", "9"), 0, 1, 2)
        selector = [rollout for rollout in b.rollouts if rollout.policy == role][place]
        assert selector.trajectory().metadata == {"execution": 0, "aborted": "no rewriter has answered"}


# Tools.


def test_tool_orchestra_weighs_correctness_and_cost_within_a_group(example: Any) -> None:
    system = example("tool_orchestra")
    rewards = system.program.rewards
    assert rewards([1, 1, 0, 1], [1, 3, 2, 5], (0.7, 0.3)) == pytest.approx([1, 0.85, 0, 0.7])
    assert rewards([1, 1], [3, 3], (0.7, 0.3)) == [0, 0]
    assert rewards([1, 0], [9, 1], (1.0, 0.0)) == [1, 0]
    world = system.run.world
    able = {level: [world.expert(name, world.Question(f"{level}3c", "7")) for name in "sml"] for level in "emh"}
    assert able == {"e": ["7", "7", "7"], "m": ["8", "7", "7"], "h": ["8", "8", "7"]}
    system.policy("orchestrator", 1, 4)
    q = system.question("e3c", "7")
    # An easy question is asked of s, m, nobody and l.
    answers = {"e3c": iter(["s", "m", "5", "l"])}
    with Engine(lambda request: said(request, answers)) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, q, count=4)
        assert all(request.body["temperature"] == 0.7 for request in engine.requests)
    # Costs 1, 3, 0 and 9.
    expected = {1.0: 0.7 + 0.3 * 8 / 9, 3.0: 0.7 + 0.3 * 6 / 9, 0.0: 0.0, 9.0: 0.7}
    for rollout in b.rollouts:
        assert rollout.reward == pytest.approx(expected[rollout.reward_components["cost"]])
    rows = system.rows("orchestrator")
    assert sorted(row.reward for row in rows.values()) == pytest.approx(sorted(expected.values()))
    assert {sum(row.loss_mask) for row in rows.values()} == {2, 4}


def said(request: Request, first: dict[str, Any]) -> str:
    """The first answer of a list, and then what the tool has said."""
    last = request.messages[-1]
    return last["content"].removeprefix(":") if last["role"] == "tool" else next(first[request.text])
