"""Sessions: the service records the calls of an agent that only has an address and a key."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import forebay
from forebay.errors import (
    Absent,
    AttemptOver,
    ConfigurationError,
    EndConflict,
    NoAttemptsLeft,
    NoTurns,
    RecordError,
)
from forebay.testing import Engine, logprob


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(lambda request: f"{request.model} says {request.text}", kind="sglang") as engine:
        yield engine


@pytest.fixture(scope="module")
def recording(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[forebay.Server]:
    """A service that records the calls to a scripted engine."""
    config = tmp_path_factory.mktemp("sessions") / "forebay.toml"
    config.write_text(
        f"""
        [sessions]
        listen = "127.0.0.1:0"
        audit = 0.0
        [[upstream]]
        name = "scripted"
        kind = "sglang"
        urls = ["{engine.url}"]
        [[upstream]]
        name = "frozen"
        kind = "sglang"
        urls = ["{engine.url}"]
        models = ["judge"]
        """
    )
    with forebay.Server(config=config) as server:
        yield server


@pytest.fixture
def fb(recording: forebay.Server) -> Iterator[forebay.Client]:
    with recording.client() as client:
        yield client


def ask(session: forebay.sessions.Ending, text: str, model: str = "policy") -> str:
    llm = openai.OpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
    answer = llm.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


def test_a_session_is_finished_with_its_reward_at_the_end_of_the_block(fb: forebay.Client, policy: str) -> None:
    with fb.session(policy, group_id="g", data_pass=2, metadata={"task": 1}) as s:
        assert ask(s, "hi") == "scripted says hi"
        s.reward, s.reward_components["tests"] = 1.0, 0.5
        s.metadata["note"] = "fine"
    assert [(receipt.verdict, receipt.group_id) for receipt in s.receipts] == [("kept", "g.pass2")]
    assert s.ended.assembly.calls == 1
    batch = fb.lease(policy, wait_ms=10_000)
    assert batch is not None
    (row,) = fb.samples(batch.batch_id)
    assert (row.reward, row.metadata) == (1.0, {"task": 1, "note": "fine"})
    assert s.finish() is s.ended


def test_an_agent_in_another_process_needs_only_the_environment(fb: forebay.Client, policy: str) -> None:
    program = (
        "import openai\n"
        "answer = openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])\n"
        "print(answer.choices[0].message.content)\n"
    )
    with fb.session(policy) as s:
        run: Any = {"capture_output": True, "text": True, "check": True}
        done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **s.environment}, **run)
        s.reward = 1.0
    assert done.stdout == "scripted says hi\n"
    assert s.receipts[0].verdict == "kept"


def test_an_exception_aborts_the_session_and_goes_on(fb: forebay.Client, policy: str) -> None:
    with pytest.raises(ZeroDivisionError), fb.session(policy) as s:
        ask(s, "hi")
        _ = 1 / 0
    info = fb.get_session(s.session_id)
    assert info is not None and (info.state, info.reason) == ("aborted", "ZeroDivisionError: division by zero")


def test_a_refused_finish_leaves_the_session_open(fb: forebay.Client, policy: str) -> None:
    with pytest.raises(NoTurns), fb.session(policy) as s:
        s.reward = 1.0
    ask(s, "hi")
    assert s.finish().receipts[0].verdict == "kept"


def test_rewards_may_differ_by_policy_and_a_frozen_model_is_not_recorded(fb: forebay.Client, policy: str) -> None:
    other = f"{policy}-critic"
    fb.put_policy(other, {})
    with fb.session(models={"solver": policy, "critic": other, "judge": None}) as s:
        for model in ("solver", "critic", "judge"):
            ask(s, "hi", model)
        s.rewards = {policy: 1.0, other: 0.0}
    assert [(receipt.policy, receipt.verdict) for receipt in s.receipts] == [(policy, "kept"), (other, "kept")]
    assert s.ended.assembly.calls == 2


def test_several_sessions_end_in_one_commit(fb: forebay.Client, policy: str) -> None:
    with fb.session(policy) as first, fb.session(policy) as second:
        ask(first, "1")
        ask(second, "2")
        first.reward, second.reward = 1.0, 0.0
        ended = fb.finish([first, second])
    assert [end.session_id for end in ended] == [first.session_id, second.session_id]
    assert (first.ended, second.ended) == (ended[0], ended[1]) and not first.ended.duplicate
    assert first.receipts[0].execution_id == second.receipts[0].execution_id
    with pytest.raises(RecordError, match="has ended already"):
        fb.finish([first])
    assert fb.finish([]) == []


def test_one_session_that_cannot_end_keeps_the_others_open(fb: forebay.Client, policy: str) -> None:
    first, second = fb.session(policy), fb.session(policy)
    ask(first, "1")
    first.reward = second.reward = 1.0
    with pytest.raises(NoTurns):
        fb.finish([first, second])
    assert not first.has_ended
    second.status = "failed"
    assert [end.state for end in fb.finish([first, second])] == ["finished", "finished"]


def test_sessions_may_end_without_a_reward_that_scores_make_later(
    fb: forebay.Client, recording: forebay.Server, policy: str
) -> None:
    rules = {"required": ["tests", "judge"], "reward": "scores.tests + scores.judge"}
    fb.put_policy(policy, {"group": {"size": 3}, "scores": rules})

    async def asynchronous() -> str:
        async with forebay.AsyncClient(recording.url) as fb, fb.session(policy, group_id="g") as s:
            await asyncio.to_thread(ask, s, "3")
        assert s.receipts[0].scoring == ["tests", "judge"]
        return s.rollout_id

    with fb.session(policy, group_id="g") as first:
        ask(first, "1")
        first.reward_components["tests"] = 1.0
    assert (first.receipts[0].verdict, first.receipts[0].scoring) == ("kept", ["judge"])
    with fb.session(policy, group_id="g") as second:
        ask(second, "2")
        assert fb.finish([second])[0].receipts[0].scoring == ["tests", "judge"]
    third = asyncio.run(asynchronous())
    fb.score(first.rollout_id, "judge", 0.5, policy=policy)
    receipts = fb.score_all(
        {"policy": policy, "rollout_id": rollout_id, "name": name, "value": 0.0}
        for rollout_id in (second.rollout_id, third)
        for name in ("tests", "judge")
    )
    assert receipts[-1].group.state == "ready"
    batch = fb.lease(policy, wait_ms=10_000)
    assert batch is not None and [row.reward for row in fb.samples(batch.batch_id)] == [1.5, 0.0, 0.0]


def test_an_abort_may_keep_the_calls(fb: forebay.Client, policy: str) -> None:
    with fb.session(policy) as s:
        ask(s, "hi")
        s.abort("the sandbox\nwas lost " + "x" * 300, keep=True)
    assert s.ended.state == "aborted"
    info = fb.get_session(s.session_id)
    assert info is not None and info.reason is not None
    assert info.reason.startswith("the sandbox was lost x") and len(info.reason) == 256


def test_a_scripted_engine_can_be_the_teacher_of_a_session(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, {"require": ["tokens", "teacher_logprobs"], "sessions": {"teacher": "frozen"}})
    with fb.session(policy) as s:
        ask(s, "hi")
        s.reward = 1.0
    batch = fb.lease(policy, wait_ms=10_000)
    assert batch is not None
    (row,) = fb.samples(batch.batch_id)
    start = len(row.tokens) - row.response_length
    assert list(row.teacher_logprobs or ()) == [
        pytest.approx(logprob(row.tokens[:place], row.tokens[place])) for place in range(start, len(row.tokens))
    ]


def test_an_unknown_policy_is_refused_before_the_work(fb: forebay.Client) -> None:
    with pytest.raises(Absent, match="nobody"):
        fb.session("nobody")


def test_another_end_of_the_same_session_is_a_conflict(fb: forebay.Client, policy: str) -> None:
    s = fb.session(policy)
    ask(s, "hi")
    fb.finish_session(s.session_id, reward=0.0)
    s.reward = 1.0
    with pytest.raises(EndConflict):
        s.finish()


def test_a_block_that_died_goes_on_in_the_same_session(fb: forebay.Client, engine: Engine, policy: str) -> None:
    options: dict[str, Any] = {"rollout_id": f"{policy}-r", "resume": True}
    with pytest.raises(ZeroDivisionError), fb.session(policy, **options) as first:
        ask(first, "hi")
        first.save_state(b"half")
        _ = 1 / 0
    asked = len(engine.requests)
    with fb.session(policy, **options) as second:
        assert (second.attempt, second.session_id, second.saved_state()) == (2, first.session_id, b"half")
        assert ask(second, "hi") == "scripted says hi"
        assert len(engine.requests) == asked
        with pytest.raises(openai.ConflictError, match="attempt 2"):
            ask(first, "hi")
        with pytest.raises(AttemptOver):
            first.finish()
        with pytest.raises(AttemptOver):
            first.save_state(b"late")
        second.reward = 1.0
    assert (second.ended.assembly.calls, second.ended.assembly.dropped.abandoned) == (1, 0)


def test_the_last_attempt_is_aborted_by_an_exception(fb: forebay.Client, policy: str) -> None:
    fb.patch_policy(policy, {"sessions": {"max_attempts": 2}})
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), fb.session(policy, rollout_id="r", resume=True) as s:
            _ = 1 / 0
    assert fb.get_session(s.session_id).state == "aborted"  # type: ignore[union-attr]
    other = fb.session(policy, rollout_id="other")
    fb.resume_session(other.session_id, attempt=1)
    with pytest.raises(NoAttemptsLeft, match="max_attempts"):
        fb.resume_session(other.session_id)
    assert fb.get_session_state(other.session_id) is None
    with pytest.raises(ConfigurationError, match="rollout_id"):
        fb.session(policy, resume=True)


def test_sessions_are_recorded_asynchronously(recording: forebay.Server, policy: str) -> None:
    async def call(s: forebay.sessions.AsyncSession) -> None:
        async with openai.AsyncOpenAI(base_url=s.base_url, api_key=s.key, max_retries=0) as llm:
            await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        s.reward = 1.0

    async def main() -> list[str]:
        async with forebay.AsyncClient(recording.url) as fb:
            async with fb.session(policy) as alone:
                await call(alone)
            async with fb.session(policy) as first, fb.session(policy) as second:
                await asyncio.gather(call(first), call(second))
                await fb.finish([first, second])
            with pytest.raises(ZeroDivisionError):
                async with fb.session(policy) as failed:
                    _ = 1 / 0
            info = await fb.get_session(failed.session_id)
            assert info is not None
            async with fb.session(policy) as aborted:
                await aborted.abort("no reason")
            with pytest.raises(ZeroDivisionError):
                async with fb.session(policy, rollout_id="resumed", resume=True) as died:
                    await died.save_state(b"half")
                    _ = 1 / 0
            async with fb.session(policy, rollout_id="resumed", resume=True) as resumed:
                assert (resumed.attempt, await resumed.saved_state()) == (2, b"half")
                await call(resumed)
            return [alone.ended.state, first.ended.state, second.ended.state, info.state, aborted.ended.state]

    assert asyncio.run(main()) == ["finished", "finished", "finished", "aborted", "aborted"]
