"""Programs of examples/ whose agents make their calls in sessions: the service records a scripted engine, assembles the
calls, and the rows that a trainer leases are compared with numbers worked out by hand.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from examples_support import EXAMPLES, PRECISE, Example, client

import forebay
from forebay._runner import programs, settings
from forebay.testing import ASSISTANT, END, TOOL, USER, Answer, Engine, Request, decode, encode

Script = Callable[[Request], Answer | str]

LINES = ("b7", "a3", "c1")

GOLD = "b9\na3\nc1\n"

A = {"b9": "?b", "b|b7": "y", "!": "1", "b9|1": "19"}
"""What an agent says that finds the line, notes its number and edits it: 2, 5 and 3 tokens with the ends."""

B = {"b9": "b=9"}
"""What an agent says that edits at once, and wrong: 4 tokens."""


class Recorded(Example):
    """An example whose service has the upstreams of its run file, at a scripted engine."""

    def __init__(self, name: str, fb: forebay.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(name, fb, monkeypatch)
        self.engine = engine
        self.q = self.question("b9", GOLD)
        self.q.chunks = LINES

    def segments(self, policy: str) -> dict[str, list[Any]]:
        """The rows of the next batch, of each rollout in order."""
        batch = self.fb.lease(policy, wait_ms=10_000)
        assert batch is not None
        rows: dict[str, list[Any]] = {}
        for row in self.fb.samples(batch.batch_id):
            rows.setdefault(row.rollout_id, []).append(row)
        return rows


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, Script], Recorded]]:
    """Starts the service of an example with a script for its engine."""
    monkeypatch.delitem(sys.modules, "world", raising=False)
    with contextlib.ExitStack() as stack:

        def start(name: str, script: Script) -> Recorded:
            found = settings.read(EXAMPLES / f"{name}.toml")
            engine = stack.enter_context(Engine(script, kind="sglang", weight_version=0))
            config = tmp_path / f"{name}.toml"
            # An audit is a call of the engine, which the tests of other calls do not expect.
            table = {"listen": "127.0.0.1:0", "audit": 0.0}
            config.write_text(programs.sessions(found, {"local": [engine.url]}, table, {}))
            server = stack.enter_context(forebay.Server(config=config))
            return Recorded(name, stack.enter_context(server.client()), engine, monkeypatch)

        yield start
    sys.modules.pop("world", None)


def in_turn(*rollouts: dict[str, Any]) -> Script:
    """A script for rollouts that are played one after the other: each begins with the call `b9`."""
    left, lock = list(rollouts), threading.Lock()

    def script(request: Request) -> Answer | str:
        with lock:
            answer = left[0][request.text]
            # The last answer of the rollout.
            if isinstance(answer, Answer) or not (answer.startswith("?") or request.text in ("b|b7", "!")):
                left.pop(0)
            return answer

    return script


def assert_worked(segments: dict[str, list[Any]], a: str, b: str) -> None:
    """Compares the rows of the rollouts A and B with the worked numbers."""
    kinds = [[row.kind for row in segments[rollout]] for rollout in (a, b)]
    assert kinds == [["subagent", "compaction", "final"], ["final"]]
    assert [[sum(row.loss_mask) for row in segments[rollout]] for rollout in (a, b)] == [[2, 5, 3], [4]]
    assert [[row.reward for row in segments[rollout]] for rollout in (a, b)] == [[1.0] * 3, [0.0]]
    for rollout, advantage, weight in ((a, 0.7071058, 0.05), (b, -0.7071058, 0.125)):
        assert [row.advantage for row in segments[rollout]] == [pytest.approx(advantage, abs=PRECISE)] * len(
            segments[rollout]
        )
        assert [row.loss_weight for row in segments[rollout]] == [pytest.approx(weight)] * len(segments[rollout])


# A coding agent.


def test_coding_agent_gives_all_segments_of_a_rollout_its_reward_and_one_vote(recorded: Any) -> None:
    system = recorded("coding_agent", in_turn(A, B))
    system.policy("coder", 1, 2)
    with client(system.engine) as llm:
        made = [system.program.rollout(system.run, system.fb, llm, system.q, 2) for _ in range(2)]
    segments = system.segments("coder")
    assert_worked(segments, made[0].rollout_id, made[1].rollout_id)
    assert [session.reward_components for session in made] == [
        {"gold": 1.0, "asked": 1.0},
        {"gold": 0.0, "asked": 0.0},
    ]
    _, compaction, final = segments[made[0].rollout_id]
    # What the sub-agent returned and the request for the summary are context. The summary is trained.
    response = [*encode("?b"), END, TOOL, *encode("1"), END, USER, *encode("!"), END, ASSISTANT, *encode("1"), END]
    assert list(compaction.tokens) == [USER, *encode("b9"), END, ASSISTANT, *response]
    assert list(compaction.loss_mask) == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert list(final.tokens) == [USER, *encode("b9|1"), END, ASSISTANT, *encode("19"), END]


def test_coding_agent_aborts_a_rollout_whose_call_failed_and_plays_another_one(recorded: Any) -> None:
    failure = Answer("the engine has no room", status=400)
    system = recorded("coding_agent", in_turn({"b9": failure}, A, B))
    system.policy("coder", 1, 2)
    with client(system.engine) as llm:
        made = [system.program.rollout(system.run, system.fb, llm, system.q, 2) for _ in range(2)]
    # The rollout that failed has no part in the baseline: it is 0.5, and not 1/3.
    assert_worked(system.segments("coder"), made[0].rollout_id, made[1].rollout_id)
    (aborted,) = system.fb.list_trajectories("coder", verdict="dropped")
    assert (aborted.reason, aborted.group.group_id) == ("infra", system.q.id)


def test_coding_agent_gives_a_place_up_after_some_attempts(recorded: Any) -> None:
    system = recorded("coding_agent", lambda request: Answer("the engine has no room", status=400))
    system.policy("coder", 1, 2)
    with client(system.engine) as llm:
        assert system.program.rollout(system.run, system.fb, llm, system.q, 2) is None
    assert len(list(system.fb.list_trajectories("coder", verdict="dropped"))) == system.program.ATTEMPTS


def test_coding_agent_pages_until_the_sub_agent_has_found_a_line(recorded: Any) -> None:
    words = {"b9": "?c", "c|b7": "n", "a3": "n", "c1": "y", "!": "3", "b9|3": "?b"}
    system = recorded("coding_agent", lambda request: words[request.text])
    system.policy("coder", 1, 2)
    with client(system.engine) as llm, system.fb.session("coder", group_id="q", group_size=2) as s:
        llm = llm.with_options(base_url=s.base_url, api_key=s.key)
        # A second question is an edit that is not understood.
        assert system.program.work(system.run, llm, system.q) == ("b7\na3\nc1\n", 1)
        words |= {"c|b7": "n", "a3": "x", "c1": "n"}
        assert system.program.find(system.run, llm, "c", LINES) == "-"
        s.abort("enough")
    assert [system.run.world.edited(LINES, change) for change in ("19", "09", "49", "1", "1x", "199")] == [
        GOLD,
        *["b7\na3\nc1\n"] * 5,
    ]


def test_demonstrations_of_editors_that_are_right_solve_every_task(example: Any, monkeypatch: Any) -> None:
    system = example("coding_agent")
    world, words = system.run.world, {}

    def chat(llm: Any, model: str, messages: list[dict[str, Any]]) -> str:
        messages.append({"role": "assistant", "content": words[messages[-1]["content"]]})
        return messages[-1]["content"]

    monkeypatch.setattr(system.run, "chat", chat)
    questions = world.questions("edits", "1")
    with openai.OpenAI(base_url="http://127.0.0.1:1", api_key="none") as llm:
        for q in (next(questions) for _ in range(200)):
            words.clear()
            for messages in world.editor(q, 1.0, random.Random(1), system.run.prompt, 0):
                words.update((a["content"], b["content"]) for a, b in itertools.pairwise(messages))
            assert system.program.work(system.run, llm, q) == (q.gold, 1)
            assert q.grade(world.edited(q.chunks, "no edit")) == 0.0


# A foreign agent in a process of its own.


def played(system: Recorded, count: int) -> list[Any]:
    """Rollouts of swe_agent.py, one after the other."""
    system.policy("coder", 1, 2)
    with system.program.repository(system.q) as origin:
        return [system.program.rollout(system.run, system.fb, system.q, origin, 2) for _ in range(count)]


def test_swe_agent_rewards_the_diff_of_a_process_and_has_the_numbers_of_coding_agent(recorded: Any) -> None:
    system = recorded("swe_agent", in_turn(A, B))
    made = played(system, 2)
    assert_worked(system.segments("coder"), made[0].rollout_id, made[1].rollout_id)
    assert [session.reward_components for session in made] == [
        {"gold": 1.0, "changed": 1.0},
        {"gold": 0.0, "changed": 0.0},
    ]
    # The agent has prompts of its own. Demonstrations are made with those of the run file.
    prompt = system.run.prompt
    asked = [request.text for request in system.engine.requests[:4]]
    assert asked == [
        prompt("ask", q=system.q),
        prompt("find", letter="b", line="b7"),
        prompt("compact"),
        prompt("resume", q=system.q, summary="1"),
    ]


def test_an_agent_that_is_killed_is_aborted_and_another_one_takes_its_place(recorded: Any) -> None:
    killed: list[int] = []

    def kill() -> None:
        """Kills the agent that waits for an answer."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"mini_agent.py" in (folder / "cmdline").read_bytes() and parent(folder) == os.getpid():
                    killed.append(int(folder.name))
                    os.kill(killed[-1], signal.SIGKILL)

    system = recorded("swe_agent", in_turn({"b9": Answer("?b", before=kill)}, A, B))
    made = played(system, 2)
    assert len(killed) == 1
    # Two rollouts with their own rewards are in the group, and the one that was killed has no part in it.
    assert_worked(system.segments("coder"), made[0].rollout_id, made[1].rollout_id)
    (aborted,) = system.fb.list_trajectories("coder", verdict="dropped")
    assert aborted.reason == "infra"
    (session,) = system.fb.list_sessions("coder", rollout_id=aborted.rollout_id)
    assert (session.state, session.reason) == ("aborted", "the agent ended with status -9")
    (exported,) = [each for each in system.fb.export("coder") if each.trajectory.rollout_id == aborted.rollout_id]
    assert exported.trajectory.status == "aborted"


def parent(folder: Path) -> int:
    """The process that started a process, by its folder in /proc."""
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])


AGENT = """
import os, pathlib, shutil
pathlib.Path("lines.txt").write_text("b9\\na3\\nc1\\n")
pathlib.Path("seen.txt").write_text("\\n".join(sorted(os.environ)))
shutil.rmtree(".git")
"""


def test_an_agent_sees_a_folder_an_address_and_a_key(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_KEY", "fb_secret")
    system = recorded("swe_agent", lambda request: "?b")
    system.policy("coder", 1, 2)
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.setattr(system.program, "AGENT", tmp_path / "agent.py")
    program = system.program
    with program.repository(system.q) as origin, system.fb.session("coder", group_id="q", group_size=2) as s:
        folder, fresh = (Path(shutil.copytree(origin, tmp_path / name)) for name in ("folder", "fresh"))
        assert program.work(system.run, s, system.q, folder)
        # The diff does not depend on what the agent did to its repository.
        assert program.passes(system.q, fresh, program.diff_of(folder, fresh))
        assert not program.passes(system.q, origin, b"")
        seen = set((fresh / "seen.txt").read_text().splitlines())
        s.abort("enough")
    assert set(s.environment) <= seen
    assert seen - set(s.environment) <= {*program.KEPT, "LC_CTYPE"}


def test_an_agent_that_needs_too_long_is_aborted(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    system = recorded("swe_agent", lambda request: "?b")
    monkeypatch.setattr(system.program, "AGENT_S", 0)
    assert played(system, 1) == [None]
    aborted = list(system.fb.list_sessions("coder"))
    assert [session.reason for session in aborted] == ["the agent did not end within 0 s"] * 3


def test_the_key_of_an_agent_can_neither_post_nor_end_its_session(recorded: Any) -> None:
    system = recorded("swe_agent", lambda request: "?b")
    system.policy("coder", 1, 2)
    with system.fb.session("coder", group_id="q", group_size=2) as s:
        with openai.OpenAI(base_url=s.base_url, api_key=s.key, max_retries=0) as llm:
            llm.chat.completions.create(model="coder", messages=[{"role": "user", "content": "b9"}])
        cheat = {"policy": "coder", "rollout_id": s.rollout_id, "group_id": "q", "reward": 1.0, "status": "failed"}
        for path, body in (("trajectories", cheat), (f"sessions/{s.session_id}/finish", {"reward": 1.0})):
            assert refused(f"{system.fb.url}/{path}", s.key, body) == (401, "unauthorized")
        s.reward = 0.0
    assert [receipt.verdict for receipt in s.receipts] == ["kept"]


def refused(url: str, key: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the type of the problem that a post is answered with."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
    with raised.value as answer:
        return answer.code, json.loads(answer.read())["type"]


# Distillation with a teacher on an engine.


def test_opd_engine_has_the_teacher_score_what_the_student_sampled(recorded: Any) -> None:
    def script(request: Request) -> Answer | str:
        if request.model == "teacher":
            return Answer(logprobs=[-0.2, -0.9])
        return Answer("9", logprobs=[-1.0, -0.5])

    system = recorded("opd_engine", script)
    rules = system.found.policy("student").rules
    system.fb.put_policy("student", {**rules, "batch": {"groups": 2}})
    with client(system.engine) as llm:
        system.program.execute(system.run, system.fb, llm, system.question("e", "9"), count=2)
    rows = [row for rows in system.segments("student").values() for row in rows]
    assert len(rows) == len({row.group_id for row in rows}) == 2
    for row in rows:
        assert (row.advantage, row.reward, row.loss_weight) == (0.0, 1.0, 0.25)
        gap = [theirs - own for theirs, own in zip(row.teacher_logprobs, row.logprobs, strict=True)]
        # What the trainer adds to the advantage with opd_coef = 1.
        assert gap == pytest.approx([0.8, -0.4])
    asked = [request.body for request in system.engine.requests if request.model == "teacher"]
    prompt = [USER, *encode("e"), END, ASSISTANT]
    for body in asked:
        assert body["input_ids"] == [*prompt, *encode("9"), END]
        assert (body["logprob_start_len"], body["sampling_params"]["temperature"]) == (len(prompt) - 1, 1.0)


def test_opd_engine_stores_nothing_that_its_teacher_has_not_scored(recorded: Any) -> None:
    answers = iter([Answer("9"), Answer("the engine has no room", status=400), Answer(logprobs=[-0.2, -0.9])])
    system = recorded("opd_engine", lambda request: next(answers))
    system.fb.put_policy("student", {**system.found.policy("student").rules, "batch": {"groups": 1}})
    fb = forebay.Client(system.fb.url, retry=forebay.types.Retry.none())
    with fb, client(system.engine) as llm, pytest.raises(forebay.errors.TeacherFailed):
        system.program.play(system.run, fb, llm, system.question("e", "9"))
    (session,) = system.fb.list_sessions("student")
    assert session.state == "open"
    # The same finish may be repeated.
    system.fb.finish_session(session.session_id, reward=1.0)
    ((row,),) = system.segments("student").values()
    assert list(row.teacher_logprobs) == pytest.approx([-0.2, -0.9])


# A planner beside a frozen model.


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


def planned(system: Recorded, count: int) -> list[Any]:
    """Rollouts of agentflow.py, one after the other."""
    system.policy("planner", 1, 2)
    q = system.question("we", "5")
    with client(system.engine) as llm:
        return [system.program.play(system.run, system.fb, llm, q, 2) for _ in range(count)]


def test_agentflow_trains_the_planner_and_records_nothing_of_the_frozen_model(recorded: Any) -> None:
    system = recorded("agentflow", flow("wu", STEPS))
    first, second = planned(system, 2)
    rows = system.segments("planner")
    # What is trained of each row, its advantage and its weight: two rollouts, and a row for each call of the planner.
    expected = {
        first.rollout_id: [("w", 0.7071058, 1 / 12), ("xe", 0.7071058, 1 / 18), ("yh", 0.7071058, 1 / 18)],
        second.rollout_id: [("u", -0.7071058, 1 / 8), ("ye", -0.7071058, 1 / 12)],
    }
    assert rows.keys() == expected.keys()
    for rollout_id, made in rows.items():
        for row, (text, advantage, weight) in zip(made, expected[rollout_id], strict=True):
            assert decode(row.tokens[-row.response_length :]) == text
            assert list(row.loss_mask) == [1] * (len(text) + 1)
            assert row.advantage == pytest.approx(advantage, abs=PRECISE)
            assert row.loss_weight == pytest.approx(weight, abs=1e-7)
    # The frozen model was asked through the same sessions: twice and once whether to stop, to answer, and to judge.
    asked = collections.Counter(request.model for request in system.engine.requests)
    assert asked == {"planner": 5, "base": 6}
    turns = [system.fb.list_session_turns(session.session_id).turns for session in (first, second)]
    assert [[turn.policy for turn in each] for each in turns] == [["planner"] * 3, ["planner"] * 2]
    assert system.fb.get_policy("base") is None


def test_agentflow_rewards_what_the_judge_takes_for_right_and_posts_what_is(recorded: Any) -> None:
    system = recorded("agentflow", flow("uw", STEPS, judged="y"))
    wrong, right = planned(system, 2)
    assert (wrong.reward, wrong.reward_components) == (1.0, {"gold": 0.0, "steps": 1.0})
    assert (right.reward, right.reward_components) == (1.0, {"gold": 1.0, "steps": 2.0})
    # An answer that is exactly right is not judged.
    assert [request.text for request in system.engine.requests if request.text.startswith("j")] == ["j|9|5"]


def test_agentflow_ends_after_three_steps_that_lead_nowhere(recorded: Any) -> None:
    steps = {"we|w|": "ze", "we|w|ze=!": "?", "we|w|ze=!,?=!": "xe"}
    system = recorded("agentflow", flow("w", steps))
    (session,) = planned(system, 1)
    assert session.reward_components == {"gold": 0.0, "steps": 3.0}
    assert "f|we|ze=!,?=!,xe=h" in [request.text for request in system.engine.requests]


def test_agentflow_aborts_a_session_whose_call_failed(recorded: Any) -> None:
    system = recorded("agentflow", flow("wwu", {**STEPS, "we|u|": ""}))
    system.policy("planner", 1, 3)
    with client(system.engine) as llm, pytest.raises(openai.APIStatusError):
        system.program.execute(system.run, system.fb, llm, system.question("we", "5"), count=3)
    ended = collections.Counter(session.state for session in system.fb.list_sessions("planner"))
    assert ended == {"finished": 2, "aborted": 1}


# Tools.


def one_after_the_other(system: Recorded, policy: str, q: Any, count: int, size: int) -> list[Any]:
    """Rollouts of a program with a tool, in a group of this size."""
    system.policy(policy, 1, size)
    with client(system.engine) as llm:
        return [system.program.play(system.run, system.fb, llm, q, size) for _ in range(count)]


def test_search_r1_trains_what_the_agent_says_and_not_what_the_search_finds(recorded: Any) -> None:
    answers = iter(["?e", "?h", "6", "?e", "?h", "7", "?i", "4", "?e", "?h", "6"])
    system = recorded("search_r1", lambda request: next(answers))
    made = one_after_the_other(system, "searcher", system.question("e", "6"), 4, 4)
    segments = system.segments("searcher")
    # Each rollout is one segment, because each of its calls continues the one before.
    assert [len(rows) for rows in segments.values()] == [1] * 4
    rows = [segments[session.rollout_id][0] for session in made]
    call, tool = [1, 1, 1], [0, 0, 0, 0, 0]
    assert list(rows[0].loss_mask) == [*call, *tool, *call, *tool, 1, 1]
    # T e h E A: what a search finds, with the tokens of the template around it.
    found = [TOOL, *encode("eh"), END, ASSISTANT]
    assert list(rows[0].tokens[:12]) == [USER, *encode("e"), END, ASSISTANT, *encode("?e"), END, *found]
    assert all(logprob == 0.0 for logprob, m in zip(rows[0].logprobs, rows[0].loss_mask, strict=True) if not m)
    assert [sum(row.loss_mask) for row in rows] == [8, 8, 5, 8]
    assert [row.advantage for row in rows] == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=PRECISE)
    assert [row.loss_weight for row in rows] == pytest.approx([0.03125, 0.03125, 0.05, 0.03125])


def test_search_r1_ends_after_two_searches_and_hints_at_searches_it_does_not_understand(recorded: Any) -> None:
    answers = iter(["?7", "?a", "?g"])
    system = recorded("search_r1", lambda request: next(answers))
    (session,) = one_after_the_other(system, "searcher", system.question("e", "6"), 1, 2)
    said = [message["content"] for message in system.engine.requests[-1].messages if message["role"] == "tool"]
    assert said == ["!", "ag"]
    assert session.reward_components == {"gold": 0.0, "searches": 2.0}


def test_retool_rewards_attempts_of_wrong_answers(recorded: Any) -> None:
    answers = iter(["7*8", "=56", "7+8", "=15", "7+8", "7-8", "=-1", "x", "7", "8", "9", "=1"])
    system = recorded("retool", lambda request: next(answers))
    wrong = [system.program.reward(0.0, calls) for calls in (0, 1, 2, 4, 10, 12)]
    assert wrong == pytest.approx([-1.1, -1.05, -1.0, -0.9, -0.6, -0.6])
    q = system.question("78t", "56")
    made = one_after_the_other(system, "coder", q, 4, 4)
    assert [session.reward for session in made] == pytest.approx([1.0, -1.05, -1.0, -0.9])
    segments = system.segments("coder")
    assert [row.advantage for session in made for row in segments[session.rollout_id]] == pytest.approx(
        [1.4970414, -0.5661081, -0.5157874, -0.4151459], abs=PRECISE
    )
    assert q.grade(system.run.world.calculate("7*8")) == 1.0
    assert system.run.world.calculate("__import__('os')") == "!"


def test_agents_with_tools_abort_a_rollout_whose_call_failed_and_go_on_with_the_others(recorded: Any) -> None:
    failure = Answer("the engine has no room", status=400)
    for name, policy, said in (("search_r1", "searcher", "7"), ("retool", "coder", "=1")):
        answers = iter([failure, said, said])
        system = recorded(name, lambda request, answers=answers: next(answers))
        system.policy(policy, 1, 3)
        with client(system.engine) as llm, pytest.raises(openai.APIStatusError):
            system.program.execute(system.run, system.fb, llm, system.question("e", "7"), count=3)
        ended = collections.Counter(session.state for session in system.fb.list_sessions(policy))
        assert ended == {"finished": 2, "aborted": 1}
