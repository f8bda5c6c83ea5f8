"""Programs of examples/ whose agents make their calls in sessions: the service records a scripted engine, assembles the
calls, and the rows that a trainer leases are compared with numbers worked out by hand.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from examples_support import EXAMPLES, PRECISE, Example, client

import forebay
from forebay._runner import programs, settings
from forebay.testing import ASSISTANT, END, TOOL, USER, Answer, Engine, Request, encode

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
            config.write_text(programs.sessions(found, {"local": [engine.url]}, {"listen": "127.0.0.1:0"}, {}))
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

    def say(run: Any, llm: Any, messages: list[dict[str, Any]]) -> str:
        messages.append({"role": "assistant", "content": words[messages[-1]["content"]]})
        return messages[-1]["content"]

    monkeypatch.setattr(system.program, "say", say)
    questions = world.questions("edits", "1")
    with openai.OpenAI(base_url="http://127.0.0.1:1", api_key="none") as llm:
        for q in (next(questions) for _ in range(200)):
            words.clear()
            for messages in world.editor(q, 1.0, random.Random(1), system.run.prompt, 0):
                words.update((a["content"], b["content"]) for a, b in itertools.pairwise(messages))
            assert system.program.work(system.run, llm, q) == (q.gold, 1)
            assert q.grade(world.edited(q.chunks, "no edit")) == 0.0
