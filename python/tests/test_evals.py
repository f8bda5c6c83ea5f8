"""Evaluation: results of suites, which are never trained, against a real service."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import forebay
from forebay import _bodies, client as of_client, errors
from forebay.testing import Engine
from forebay.types import EvalVersion, PassAt, Retry, SuiteInfo

SUITE = "aime24"


def result(policy: str, task: str, reward: float | None, version: int = 1, **fields: Any) -> forebay.Trajectory:
    """A rollout of a task. A reward is enough: nothing of it is trained."""
    return forebay.Trajectory(
        policy=policy, purpose="eval", suite=SUITE, task=task, policy_version=version, reward=reward, **fields
    )


def results(policy: str, version: int = 1, **passed: int) -> list[forebay.Trajectory]:
    """Four rollouts of each task, of which as many pass as is said."""
    return [
        result(policy, task, float(place < number), version) for task, number in passed.items() for place in range(4)
    ]


@pytest.fixture
def evaluated(fb: forebay.Client, policy: str) -> str:
    """A policy with the versions 1 to 3 and a suite of two tasks, each of which is to be played four times."""
    for version in (1, 2, 3):
        fb.publish(policy, version, step=10 * version)
    fb.put_suite(policy, SUITE, tasks=2, repeats=4)
    return policy


def only(fb: forebay.Client, policy: str) -> EvalVersion:
    """What the only suite says about its newest version."""
    (suite,) = fb.evals(policy).suites
    return suite.versions[0]


def test_a_suite_says_how_good_a_version_is(fb: forebay.Client, evaluated: str) -> None:
    receipts = fb.post(results(evaluated, a=1, b=3))
    assert {(receipt.policy, receipt.verdict) for receipt in receipts} == {(evaluated, "kept")}
    assert {(receipt.group.state, receipt.group.reason) for receipt in receipts} == {("discarded", "evaluated")}
    (suite,) = fb.evals(evaluated, SUITE).suites
    assert (suite.suite, suite.tasks, suite.repeats, suite.threshold, suite.more) == (SUITE, 2, 4, 1.0, False)
    (found,) = suite.versions
    assert (found.version, found.step, found.complete, found.n, found.tasks) == (1, 10, True, 8, 2)
    # The means of the tasks are 1/4 and 3/4.
    assert found.mean == pytest.approx(0.5) and found.standard_error == pytest.approx(0.25)
    assert (found.mixed_versions, found.difference) == (0, None) and found.first_at <= found.last_at
    expected = [(0.25 + 0.75) / 2, ((1 - 3 / 6) + (1 - 0)) / 2, ((1 - 1 / 4) + 1) / 2, 1.0]
    assert [at.k for at in found.pass_at] == [1, 2, 3, 4] and {at.tasks for at in found.pass_at} == {2}
    assert [at.estimate for at in found.pass_at] == pytest.approx(expected)
    first = found.pass_at[0]
    assert isinstance(first, PassAt)
    assert (first.low, first.high) == (pytest.approx(0.5 - 1.96 * 0.25), pytest.approx(0.5 + 1.96 * 0.25))


def test_a_version_is_compared_with_the_one_before_it(fb: forebay.Client, evaluated: str) -> None:
    fb.post([*results(evaluated, 1, a=1, b=3), *results(evaluated, 3, a=4, b=2)])
    (suite,) = fb.evals(evaluated, SUITE).suites
    assert [found.version for found in suite.versions] == [3, 1]
    difference = suite.versions[0].difference
    assert difference is not None
    # By task, they are 3/4 and -1/4.
    assert (difference.version, difference.tasks, difference.won, difference.lost) == (1, 2, 1, 1)
    assert difference.mean == pytest.approx(0.25)
    assert difference.low == pytest.approx(0.25 - 1.96 * 0.5)
    assert difference.high == pytest.approx(0.25 + 1.96 * 0.5)
    # Pages of versions.
    (page,) = fb.evals(evaluated, SUITE, limit=1).suites
    assert [found.version for found in page.versions] == [3] and page.more
    (page,) = fb.evals(evaluated, SUITE, limit=1, before=3).suites
    assert [found.version for found in page.versions] == [1] and not page.more


def test_the_tasks_of_a_version_stand_beside_those_of_the_version_before(
    fb: forebay.Client, evaluated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fb.post([*results(evaluated, 1, a=1, b=3), *results(evaluated, 2, a=4, b=2), result(evaluated, "c", 1.0, 2)])
    for page in (1, 500):
        monkeypatch.setattr(of_client, "TASKS_PAGE", page)
        tasks = {task.task: task for task in fb.eval_tasks(evaluated, SUITE)}
        assert list(tasks) == ["a", "b", "c"]
        now, before = tasks["a"].now, tasks["a"].before
        assert now is not None and (now.n, now.passed, now.mean) == (4, 4, 1.0)
        assert before is not None and (before.n, before.passed, before.mean) == (4, 1, 0.25)
        assert [rollout.reward for rollout in before.rollouts].count(1.0) == 1
        story = fb.get_trajectory(evaluated, before.rollouts[0].rollout_id)
        assert story is not None and story.policy_version == 1
        assert tasks["c"].now is not None and tasks["c"].before is None
    assert [task.before for task in fb.eval_tasks(evaluated, SUITE, 1)] == [None, None]


def test_the_pages_of_tasks_are_about_one_version(
    fb: forebay.Client, evaluated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fb.post(results(evaluated, 1, a=1, b=3))
    monkeypatch.setattr(of_client, "TASKS_PAGE", 1)
    tasks = fb.eval_tasks(evaluated, SUITE)
    first = next(tasks)
    fb.post(results(evaluated, 2, a=4, b=4))
    (second,) = tasks
    assert first.now is not None and second.now is not None
    assert (first.now.passed, second.now.passed) == (1, 3)


def test_rules_of_a_suite_are_replaced(fb: forebay.Client, policy: str) -> None:
    assert fb.put_suite(policy, SUITE, tasks=30) == SuiteInfo(
        policy=policy, suite=SUITE, tasks=30, repeats=1, threshold=1.0
    )
    assert fb.put_suite(policy, SUITE, tasks=2, repeats=4, threshold=0.5) == SuiteInfo(
        policy=policy, suite=SUITE, tasks=2, repeats=4, threshold=0.5
    )
    fb.post([result(policy, "a", reward) for reward in (0.5, 0.25)])
    found = only(fb, policy)
    assert not found.complete and [(at.k, at.estimate) for at in found.pass_at] == [(1, 0.5), (2, 1.0)]
    with pytest.raises(errors.Invalid) as refused:
        fb.put_suite(policy, SUITE, tasks=0)
    assert [violation.pointer for violation in refused.value.violations] == ["/tasks"]
    with pytest.raises(errors.UnknownPolicy):
        fb.evals(f"no-{policy}")


def test_nothing_of_an_evaluation_is_trained(fb: forebay.Client, evaluated: str) -> None:
    before = fb.get_policy(evaluated)
    segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1])
    fb.post([result(evaluated, "a", 1.0, segments=[segment]), result(evaluated, "b", 0.0, segments=[segment])])
    assert fb.lease(evaluated, partial=True) is None
    after = fb.get_policy(evaluated)
    assert before is not None and after is not None
    assert (after.rollouts, after.groups, after.waiting.ready_groups) == (before.rollouts, before.groups, 0)
    assert list(fb.list_trajectories(evaluated)) == [] and list(fb.list_groups(evaluated)) == []
    assert list(fb.export(evaluated)) == []
    listed = list(fb.list_trajectories(evaluated, purpose="eval"))
    assert [(story.policy, story.reward) for story in listed] == [(evaluated, 1.0), (evaluated, 0.0)]
    exported = [found.trajectory for found in fb.export(evaluated, purpose="eval")]
    assert [(sent.policy, sent.purpose, sent.suite, sent.task) for sent in exported] == [
        (evaluated, "eval", SUITE, "a"),
        (evaluated, "eval", SUITE, "b"),
    ]
    # What is trained is found where it was.
    fb.post({"policy": evaluated, "rollout_id": "trained", "reward": 1.0, "segments": [segment]})
    assert [story.rollout_id for story in fb.list_trajectories(evaluated)] == ["trained"]
    assert [found.trajectory.rollout_id for found in fb.export(evaluated, purpose="train")] == ["trained"]


def test_a_trainer_waits_for_the_result_of_a_version(fb: forebay.Client, evaluated: str) -> None:
    assert fb.wait_evals(evaluated, SUITE, 2, wait_s=0) is None
    first, *rest = results(evaluated, 2, a=1, b=3)
    fb.post(first)
    assert fb.wait_evals(evaluated, SUITE, 2, wait_s=0.2) is None, "it is not complete"
    found: list[EvalVersion | None] = []
    waiting = threading.Thread(target=lambda: found.append(fb.wait_evals(evaluated, SUITE, 2, wait_s=60)))
    began = time.monotonic()
    waiting.start()
    fb.post(results(evaluated, 3, a=4, b=4))
    waiting.join(0.5)
    assert waiting.is_alive(), "another version is complete"
    fb.post(rest)
    waiting.join(60)
    (version,) = found
    assert version is not None and (version.version, version.complete, version.mean) == (2, True, 0.5)
    assert time.monotonic() - began < 30
    # What is complete is answered at once, also without a bound.
    assert fb.wait_evals(evaluated, SUITE, 3) == only(fb, evaluated)


def test_a_wait_is_made_of_several_polls(fb: forebay.Client, evaluated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_client, "POLL_S", 0.05)
    polls = itertools.count(1)
    call = forebay.Client._call

    def counted(self: forebay.Client, *args: Any, **kwargs: Any) -> Any:
        if next(polls) == 4:
            fb.post(results(evaluated, 2, a=1, b=3))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(forebay.Client, "_call", counted)
    found = fb.wait_evals(evaluated, SUITE, 2)
    assert found is not None and found.n == 8 and next(polls) >= 5


def test_a_client_that_is_closed_ends_the_wait(server: forebay.Server, evaluated: str) -> None:
    fb, ended = server.client(), threading.Event()

    def wait() -> None:
        with pytest.raises(errors.Cancelled):
            fb.wait_evals(evaluated, SUITE, 9)
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    fb.close()
    assert ended.wait(30)
    waiting.join()


def test_the_asynchronous_client_has_the_same_calls(server: forebay.Server, evaluated: str) -> None:
    async def main() -> None:
        async with forebay.AsyncClient(server.url) as fb:
            assert (await fb.put_suite(evaluated, SUITE, tasks=2, repeats=4)).tasks == 2
            waiting = asyncio.create_task(fb.wait_evals(evaluated, SUITE, 1, wait_s=60))
            for trajectory in results(evaluated, 1, a=1, b=3):
                async with fb.rollout(evaluated, eval=SUITE, task=trajectory.task, policy_version=1) as r:
                    r.messages, r.reward = [{"role": "user", "content": "hi"}], trajectory.reward
            found = await waiting
            assert found is not None and (found.n, found.mean) == (8, 0.5)
            (suite,) = (await fb.evals(evaluated)).suites
            assert suite.versions == [found]
            assert [task.task async for task in fb.eval_tasks(evaluated, SUITE)] == ["a", "b"]
            listed = [story async for story in fb.list_trajectories(evaluated, purpose="eval")]
            assert len(listed) == 8
            waiting = asyncio.create_task(fb.wait_evals(evaluated, SUITE, 9))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


def test_a_recorded_rollout_is_a_result(fb: forebay.Client, evaluated: str) -> None:
    with Engine(lambda request: "It is 4" if "2 + 2" in request.text else "I do not know") as engine:
        llm = openai.OpenAI(base_url=engine.base_url, api_key="none")
        with fb.rollout(evaluated, eval=SUITE, task="a", rollout_id="r", data_pass=2) as r:
            r.reward = float("4" in r.chat(llm, "What is 2 + 2?"))
        assert (r.rollout_id, r.receipt.verdict, r.receipt.group.reason) == ("r.pass2", "kept", "evaluated")
        # Without a task, each rollout is a task of its own.
        with fb.rollout(evaluated, eval=SUITE, rollout_id="alone") as r:
            r.reward = float("9" in r.chat(llm, "What is 3 * 3?"))
        with fb.bundle() as b:
            for task in ("a", "b"):
                r = b.rollout(evaluated, eval=SUITE, task=task, policy_version=1)
                r.reward = float("4" in r.chat(llm, "What is 2 + 2?"))
    assert {receipt.group.reason for receipt in b.receipts} == {"evaluated"}
    tasks = {task.task: task.now for task in fb.eval_tasks(evaluated, SUITE, 3)}
    assert {name: now and (now.n, now.mean) for name, now in tasks.items() if now} == {"a": (1, 1.0), "alone": (1, 0.0)}
    assert only(fb, evaluated).version == 3
    content = fb.get_content(evaluated, "r.pass2")
    assert content is not None and content.messages is not None and len(content.messages.items) == 2


def test_a_rollout_that_fails_does_not_count(fb: forebay.Client, evaluated: str) -> None:
    with pytest.raises(ZeroDivisionError), fb.rollout(evaluated, eval=SUITE, task="a") as r:
        raise ZeroDivisionError
    assert r.receipt.verdict == "dropped"
    fb.post(result(evaluated, "b", 1.0, 3))
    found = only(fb, evaluated)
    assert (found.n, found.tasks) == (1, 1)


def test_tokens_of_several_versions_do_not_count(fb: forebay.Client, evaluated: str) -> None:
    mixed = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1], versions=[[1, 0, 1], [2, 1, 1]])
    receipt = fb.post(result(evaluated, "a", 1.0, segments=[mixed]))
    assert [warning.partition(":")[0] for warning in receipt.warnings] == ["mixed-versions"]
    fb.post(result(evaluated, "b", 1.0))
    found = only(fb, evaluated)
    assert (found.n, found.tasks, found.mixed_versions) == (1, 1, 1)


def test_a_result_may_wait_for_scores(fb: forebay.Client, evaluated: str) -> None:
    fb.patch_policy(evaluated, {"scores": {"required": ["judge"], "reward": "scores.judge"}})
    receipt = fb.post(result(evaluated, "a", None, rollout_id="r"))
    assert receipt.scoring == ["judge"]
    assert [story.rollout_id for story in fb.list_trajectories(evaluated, state="scoring", purpose="eval")] == ["r"]
    fb.score("r", "judge", 0.5, policy=evaluated)
    assert [score.value for score in fb.scores("r", policy=evaluated).scores] == [0.5]
    found = only(fb, evaluated)
    assert (found.n, found.mean) == (1, 0.5)


def test_a_result_with_many_tokens_is_posted_as_arrow(
    fb: forebay.Client, evaluated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bodies, "json_call", lambda *_, **__: pytest.fail("it was sent as JSON"))
    segment = forebay.Segment(tokens=[1] * 60_001, loss_mask=[1] * 60_000)
    receipts = fb.post([result(evaluated, task, 1.0, segments=[segment, segment]) for task in ("a", "b")])
    assert {receipt.group.reason for receipt in receipts} == {"evaluated"}
    assert [task.task for task in fb.eval_tasks(evaluated, SUITE)] == ["a", "b"]


def test_evaluation_has_room_of_its_own(fb: forebay.Client, evaluated: str) -> None:
    fb.patch_policy(evaluated, {"admissions": {"eval": 2}, "backlog": {"max_ready_rollouts": 1}})
    segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1])
    fb.post({"policy": evaluated, "reward": 1.0, "segments": [segment]})
    assert fb.admit(evaluated, rollouts=1, wait_s=0).granted == 0
    admission = fb.admit(evaluated, rollouts=3, eval=SUITE, task="a", wait_s=0)
    assert admission.granted == 2
    with fb.rollout(evaluated, eval=SUITE, task="a", admission=admission) as r:
        r.messages, r.reward = [{"role": "user", "content": "hi"}], 1.0
    assert (r.receipt.group.reason, r.policy_version) == ("evaluated", 3)


def test_what_has_a_group_evaluates_nothing(fb: forebay.Client, server: forebay.Server, policy: str) -> None:
    asynchronous = forebay.AsyncClient(server.url)
    calls: list[Callable[..., Any]] = [fb.rollout, fb.bundle().rollout, fb.session]
    calls += [asynchronous.rollout, asynchronous.bundle().rollout, asynchronous.session]
    calls.append(lambda policy, **options: fb.admit(policy, rollouts=1, **options))
    for call in calls:
        for group in ({"group_id": "g"}, {"group_size": 4}):
            with pytest.raises(ValueError, match=f"has no group, so leave out `{next(iter(group))}`") as refused:
                call(policy, eval=SUITE, task="a", **group)
            assert isinstance(refused.value, errors.ConfigurationError)
        with pytest.raises(ValueError, match="name the suite: eval="):
            call(policy, task="a")
    with pytest.raises(errors.Invalid) as refused:
        fb.post(result(policy, "a", 1.0, group_id="g"))
    assert [violation.pointer for violation in refused.value.violations] == ["/group_id"]
    assert fb.evals(policy).suites == []


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forebay.Server]:
    """A service that records the calls to a scripted engine."""
    config = tmp_path_factory.mktemp("evals") / "forebay.toml"
    with Engine(lambda request: f"{request.text} is 4") as engine:
        config.write_text(
            '[sessions]\nlisten = "127.0.0.1:0"\naudit = 0.0\n'
            f'[[upstream]]\nname = "scripted"\nkind = "vllm"\nurls = ["{engine.url}"]\n'
        )
        with forebay.Server(config=config) as server:
            yield server


def test_a_session_is_a_result(recording: forebay.Server) -> None:
    def ask(session: forebay.sessions.Ending) -> str:
        with openai.OpenAI(base_url=session.base_url, api_key=session.key) as llm:
            answer = llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 2"}])
        return answer.choices[0].message.content or ""

    async def main() -> None:
        async with forebay.AsyncClient(recording.url) as fb, fb.session("math", eval=SUITE, task="b") as s:
            await asyncio.to_thread(ask, s)
            s.reward = 0.0

    with recording.client() as fb:
        fb.put_policy("math", {"group": {"size": 8}})
        fb.put_suite("math", SUITE, tasks=2)
        with fb.session("math", eval=SUITE, task="a", metadata={"seed": 1}) as s:
            s.reward = float("4" in ask(s))
        assert [receipt.group.reason for receipt in s.receipts] == ["evaluated"]
        asyncio.run(main())
        found = fb.wait_evals("math", SUITE, 0, wait_s=30)
        assert found is not None and (found.n, found.mean) == (2, 0.5)
        assert fb.lease("math", partial=True) is None


def test_a_result_waits_in_the_spool(tmp_path: Path) -> None:
    database = f"sqlite:{tmp_path / 'forebay.db'}"
    with forebay.Server(database=database) as first:
        listen = first.url.removeprefix("http://")
        fb = forebay.Client(first.url, spool=tmp_path / "spool", retry=Retry.none())
        fb.put_policy("math", {"group": {"size": 8}})
        fb.publish("math", 3)
        fb.get_policy("math")
        first.kill()
        with fb.rollout("math", eval=SUITE, task="a") as r:
            r.messages, r.reward = [{"role": "user", "content": "hi"}], 1.0
        assert r.receipt.spooled
    with forebay.Server(database=database, listen=listen):
        assert fb.spool is not None and fb.spool.flush(60.0)
        found = only(fb, "math")
        assert (found.version, found.n) == (3, 1) and list(fb.list_trajectories("math")) == []
        fb.close()


def test_a_program_that_trains_evaluates_if_its_environment_says_so(
    fb: forebay.Client, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_EVAL", "held-out")
    for _ in range(2):
        # The same ids a second time would be a repeat.
        with fb.bundle() as b:
            for place in range(2):
                with b.rollout(policy, group_id="sum-1", group_size=2, rollout_id=f"sum-1-{place}") as r:
                    r.messages, r.reward = [{"role": "user", "content": "?"}], float(place)
    admission = fb.admit(policy, rollouts=1, group_id="sum-1", wait_s=0)
    assert admission.granted == 1
    (suite,) = fb.evals(policy).suites
    (found,) = suite.versions
    assert (suite.suite, found.n, found.tasks, found.mean) == ("held-out", 4, 1, 0.5)
    (task,) = fb.eval_tasks(policy, "held-out")
    assert task.task == "sum-1"
    # What names a suite of its own is its result.
    with fb.rollout(policy, eval=SUITE, task="t") as r:
        r.messages, r.reward = [{"role": "user", "content": "?"}], 1.0
    assert {suite.suite for suite in fb.evals(policy).suites} == {"held-out", SUITE}
