"""Programs of examples/ in which an agent plans: rows compared with numbers worked out by hand.

Calls are made in threads, so scripts go by what a call says.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from examples_support import EXAMPLES, PRECISE, Example, Script, assert_group, client, of_group, weights

import forebay
from forebay._runner import programs, settings, tables
from forebay._runner.output import Output
from forebay.testing import Answer, Engine, Request, decode


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


# Sessions.

Played = tuple[Example, openai.OpenAI, Engine]


@pytest.fixture
def in_sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, Script], Played]]:
    """Loads a program of examples/, with a service that the runner has configured for sessions."""
    # The program imports its world by name.
    monkeypatch.delitem(sys.modules, "world", raising=False)
    with contextlib.ExitStack() as stack:

        def begin(name: str, script: Script) -> Played:
            engine = stack.enter_context(Engine(script, kind="sglang"))
            output = Output(tmp_path / name, {}, resume=False)
            stack.callback(output.close)
            found = settings.read(EXAMPLES / f"{name}.toml")
            programs.service(found, output, "127.0.0.1:0", {"local": engine.url})
            server = stack.enter_context(forebay.Server(config=output.folder / "service.toml"))
            fb = stack.enter_context(server.client())
            return Example(name, fb, monkeypatch), stack.enter_context(client(engine)), engine

        yield begin
    sys.modules.pop("world", None)


def flow(plans: str, steps: dict[str, str], judged: str = "n") -> Script:
    """A script of plans in turn, of the step that follows a prompt, and of a frozen model that is right."""
    in_order = iter(plans)

    def script(request: Request) -> Answer | str:
        if request.model == "planner":
            step = next(in_order) if len(request.text) == 2 else steps[request.text]
            return step or Answer("the engine has no room", status=400)
        assert request.model == "base"
        role, *_, known = request.text.split("|")
        return {"v": "y" if known[-1].isdigit() else "n", "f": known[-1], "j": judged}[role]

    return script


STEPS = {"we|w|": "xe", "we|w|xe=h": "yh", "we|u|": "ye"}
"""What is right after the plan `w`, and wrong after the plan `u`: the digit of `e` is 9, and that of `h` is 5."""


def test_agentflow_trains_the_planner_and_records_nothing_of_the_frozen_model(in_sessions: Any) -> None:
    system, llm, engine = in_sessions("agentflow", flow("wu", STEPS))
    system.policy("planner", 1, 2)
    q = system.question("we", "5")
    first, second = (system.program.play(system.run, system.fb, llm, q, 2) for _ in range(2))
    batch = system.fb.lease("planner", wait_ms=10_000)
    assert batch is not None
    rows = {first.rollout_id: [], second.rollout_id: []}
    for row in system.fb.samples(batch.batch_id):
        rows[row.rollout_id].append(row)
    # What is trained of each row, its advantage and its weight: two rollouts, and a row for each call of the planner.
    expected = {
        first.rollout_id: [("w", 0.7071058, 1 / 12), ("xe", 0.7071058, 1 / 18), ("yh", 0.7071058, 1 / 18)],
        second.rollout_id: [("u", -0.7071058, 1 / 8), ("ye", -0.7071058, 1 / 12)],
    }
    for rollout_id, made in rows.items():
        for row, (text, advantage, weight) in zip(made, expected[rollout_id], strict=True):
            assert decode(row.tokens[-row.response_length :]) == text
            assert list(row.loss_mask) == [1] * (len(text) + 1)
            assert row.advantage == pytest.approx(advantage, abs=PRECISE)
            assert row.loss_weight == pytest.approx(weight, abs=1e-7)
    # The frozen model was asked through the same sessions: twice and once whether to stop, to answer, and to judge.
    asked = collections.Counter(request.model for request in engine.requests)
    assert asked == {"planner": 5, "base": 6}
    turns = [system.fb.list_session_turns(session.session_id).turns for session in (first, second)]
    assert [[turn.policy for turn in each] for each in turns] == [["planner"] * 3, ["planner"] * 2]
    assert system.fb.get_policy("base") is None


def test_agentflow_rewards_what_the_judge_takes_for_right_and_posts_what_is(in_sessions: Any) -> None:
    system, llm, engine = in_sessions("agentflow", flow("uw", STEPS, judged="y"))
    system.policy("planner", 1, 2)
    q = system.question("we", "5")
    wrong, right = (system.program.play(system.run, system.fb, llm, q, 2) for _ in range(2))
    assert (wrong.reward, wrong.reward_components) == (1.0, {"gold": 0.0, "steps": 1.0})
    assert (right.reward, right.reward_components) == (1.0, {"gold": 1.0, "steps": 2.0})
    # An answer that is exactly right is not judged.
    assert [request.text for request in engine.requests if request.text.startswith("j")] == ["j|9|5"]


def test_agentflow_ends_after_three_steps_that_lead_nowhere(in_sessions: Any) -> None:
    steps = {"we|w|": "ze", "we|w|ze=!": "?", "we|w|ze=!,?=!": "xe"}
    system, llm, engine = in_sessions("agentflow", flow("w", steps))
    system.policy("planner", 1, 2)
    session = system.program.play(system.run, system.fb, llm, system.question("we", "5"), 2)
    assert session.reward_components == {"gold": 0.0, "steps": 3.0}
    assert "f|we|ze=!,?=!,xe=h" in [request.text for request in engine.requests]


def test_agentflow_aborts_a_session_whose_call_failed(in_sessions: Any) -> None:
    system, llm, _ = in_sessions("agentflow", flow("wwu", {**STEPS, "we|u|": ""}))
    system.policy("planner", 1, 3)
    q = system.question("we", "5")
    with pytest.raises(openai.APIStatusError):
        system.program.execute(system.run, system.fb, llm, q, count=3)
    ended = collections.Counter(session.state for session in system.fb.list_sessions("planner"))
    assert ended == {"finished": 2, "aborted": 1}


# A critic.


def test_asymmetric_ppo_posts_groups_of_one_with_partial_credit_and_without_advantages(example: Any) -> None:
    system = example("asymmetric_ppo")
    rules = system.found.policy("actor").rules
    system.fb.put_policy("actor", {**rules, "batch": {"groups": 4}})
    answers = iter(["12", "15", "120", "7"])
    with Engine(lambda _: next(answers)) as engine, client(engine) as llm:
        q = system.question("7+5", "12")
        rollouts = [system.program.execute(system.run, system.fb, llm, q) for _ in range(4)]
        assert {request.text for request in engine.requests} == {"7+5="}
    found = system.rows("actor")
    rows = [found[rollout.rollout_id] for rollout in rollouts]
    assert [row.reward for row in rows] == pytest.approx([1, 1 / 3, 2 / 3, 0])
    assert [row.advantage for row in rows] == [0.0] * 4
    assert len({row.group_id for row in rows}) == 4
    # Two digits with their end, three digits without it, and one digit with its end.
    assert [row.loss_weight for row in rows] == pytest.approx([1 / 12, 1 / 12, 1 / 12, 1 / 8])
    assert [rollout.reward_components["gold"] for rollout in rollouts] == [1.0, 0.0, 0.0, 0.0]
    assert [rollout.status for rollout in rollouts] == ["completed", "completed", "truncated", "completed"]


def test_asymmetric_ppo_gives_credit_up_to_the_first_mistake(example: Any) -> None:
    share_right = example("asymmetric_ppo").run.world.share_right
    assert share_right("12", True, "12") == 1.0
    assert share_right("12", False, "12") == share_right("120", False, "12") == pytest.approx(2 / 3)
    assert share_right("1", True, "12") == pytest.approx(1 / 3)
    assert share_right("21", True, "12") == share_right("", True, "12") == 0.0
    assert (share_right("7", True, "7"), share_right("7", False, "7")) == (1.0, 0.5)


def test_asymmetric_ppo_starts_its_critic_from_a_smaller_model(example: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FOREBAY_TRAINER_BIN", sys.executable)  # The command is read here, and never run.
    found = example("asymmetric_ppo").found
    with contextlib.closing(Output(tmp_path / "run", {}, resume=False)) as output:
        models = {"actor": tmp_path / "actor", "critic": tmp_path / "critic"}
        made = programs.trainer(found, found.policy("actor"), output, models, "http://127.0.0.1:1")
    config = tables.load(Path(made.command[-1]))
    assert (config["model"], config["critic"]["model"]) == (str(models["actor"]), str(models["critic"]))
    rates = config["schedule"]["peak"], config["critic"]["schedule"]["peak"]
    assert rates == (1e-3, 3e-3)
    sizes = [(policy.model.hidden, policy.model.layers) for policy in found.policies]
    assert sizes == [(64, 2), (32, 1)]
    assert config["objective"]["objective"] == "ppo"
