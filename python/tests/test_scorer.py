"""The scorer's side against the real service."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults import LossyProxy, wait_for

import forebay
from forebay import _heartbeat, errors
from forebay.scorer import AsyncItem, Item, Scores

WAIT_MS = 10_000
"""How long the tests wait for work that comes back when a lease of a second ends."""


def rules(fb: forebay.Client, policy: str, size: int = 1, **work: Any) -> None:
    """Lets scorers lease the score `judge`, which is the reward."""
    scores = {"required": ["judge"], "reward": "scores.judge", "work": {"judge": work}}
    fb.put_policy(policy, {"group": {"size": size}, "scores": scores})


def post(fb: forebay.Client, policy: str, names: str, **fields: Any) -> None:
    """Posts a rollout for each name."""
    segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1])
    fb.post(
        [forebay.Trajectory(policy=policy, rollout_id=name, segments=[segment], **fields) for name in names.split()]
    )


@pytest.fixture
def judged(fb: forebay.Client, policy: str) -> str:
    """A policy whose rollouts are leased one by one."""
    rules(fb, policy)
    return policy


@pytest.fixture
def scorer(fb: forebay.Client, judged: str) -> Iterator[forebay.Scorer]:
    with forebay.Scorer("judge", policy=judged, client=fb, scorer="a") as scorer:
        yield scorer


@pytest.fixture
def own(own_server: forebay.Server) -> Iterator[forebay.Client]:
    """A client of a service at which no requests of other tests wait; scorers lease from its policy `default`."""
    with own_server.client() as own:
        rules(own, "default")
        yield own


def waiters(fb: forebay.Client) -> int:
    """How many requests wait at the service."""
    (line,) = (line for line in fb.metrics().splitlines() if line.startswith("forebay_waiters "))
    return int(line.split()[1])


def leased(scorer: forebay.Scorer) -> Item:
    """The item that is there, or comes back within seconds."""
    item = scorer.lease(WAIT_MS / 1_000)
    assert item is not None
    return item


def heartbeats(before: set[threading.Thread]) -> list[threading.Thread]:
    """The threads of heartbeats that have begun since."""
    return [one for one in threading.enumerate() if one.name == "forebay-heartbeat" and one not in before]


def given(fb: forebay.Client, policy: str, rollout_id: str) -> list[tuple[float, str | None, int | None]]:
    """The scores of a rollout, with who gave them and with which attempt."""
    found = fb.scores(rollout_id, policy=policy).scores
    return [(score.value, score.scorer, score.attempt) for score in found if score.name == "judge"]


def test_a_score_settles_the_item(fb: forebay.Client, judged: str) -> None:
    post(fb, judged, "a b", messages=[{"role": "user", "content": "hi"}], metadata={"task": 7})
    scorer = forebay.Scorer("judge", policy=judged, client=fb, scorer="gpt", include=["messages", "metadata"])
    seen: list[str] = []
    for item in scorer:
        assert (item.name, item.policy, item.per, item.attempt, item.max_attempts) == ("judge", judged, "rollout", 1, 5)
        assert (item.group_id, item.rollouts) == (item.rollout.rollout_id, [item.rollout])
        assert item.rollout.messages == [{"role": "user", "content": "hi"}] and item.rollout.metadata == {"task": 7}
        assert item.rollout.segments is None, "they were not asked for"
        receipt = item.score(0.25, rationale="terse")
        assert (item.ended, item.is_lost(), receipt.scoring, receipt.group.state) == ("scored", False, [], "ready")
        seen.append(item.rollout.rollout_id)
        if len(seen) == 2:
            break
    assert seen == ["a", "b"] and scorer.lease(wait_s=0) is None
    assert given(fb, judged, "a") == [(0.25, "gpt", 1)]
    assert [score.rationale for score in fb.scores("b", policy=judged).scores] == ["terse"]
    batch = fb.lease(judged)
    assert batch is not None and [row.reward for row in fb.samples(batch.batch_id)] == [0.25]


def test_the_scores_of_a_group_are_one_commit(fb: forebay.Client, policy: str) -> None:
    rules(fb, policy, 3, per="group")
    post(fb, policy, "a b", group_id="g")
    # It has its score already, so that its own value is left out.
    post(fb, policy, "c", group_id="g", reward_components={"judge": 0.5})
    with forebay.Scorer("judge", policy=policy, client=fb) as scorer:
        item = leased(scorer)
        assert (item.per, item.group_id) == ("group", "g")
        assert {rollout.rollout_id: rollout.scoring for rollout in item.rollouts} == {
            "a": ["judge"],
            "b": ["judge"],
            "c": [],
        }
        with pytest.raises(errors.ConfigurationError, match="judge of g is about a whole group"):
            _ = item.rollout
        receipts = item.score({"a": 1.0, "b": 0.0, "c": 0.75}, {"b": "worse than a"})
    # In a commit of its own, the first score would have left the group open.
    assert [(receipt.rollout_id, receipt.group.state) for receipt in receipts] == [("a", "ready"), ("b", "ready")]
    assert given(fb, policy, "a") == [(1.0, "anonymous", 1)] and given(fb, policy, "c") == [(0.5, None, None)]
    assert [score.rationale for score in fb.scores("b", policy=policy).scores] == ["worse than a"]


def test_a_group_with_more_scores_than_a_post_may_have_is_settled(fb: forebay.Client, policy: str) -> None:
    names = [f"r{number}" for number in range(300)]
    rules(fb, policy, len(names), per="group")
    post(fb, policy, " ".join(names), group_id="g")
    with forebay.Scorer("judge", policy=policy, client=fb) as scorer:
        receipts = leased(scorer).score(dict.fromkeys(names, 0.5))
        assert [receipt.rollout_id for receipt in receipts] == names
        assert [receipt.group.state for receipt in (receipts[0], receipts[-1])] == ["open", "ready"]
        assert scorer.lease(wait_s=0) is None


@pytest.mark.parametrize(
    ("value", "rationale", "message"),
    [
        (0.5, None, "judge of g is about a whole group, so its score is a mapping by rollout_id"),
        ({"a": 0.5}, None, "lack that of b"),
        ({"a": 0.5, "b": 0.5, "x": 0.5}, None, "is not about x"),
        ({"a": 0.5, "b": "good"}, None, "is a number, not 'good'"),
        ({"a": 0.5, "b": None}, None, "is a number, not None"),
        ({"a": 0.5, "b": float("nan")}, None, "/1/value: is nan"),
        ({"a": 0.5, "b": 0.5}, "why", "its rationale is a mapping"),
        ({"a": 0.5, "b": 0.5}, {"x": "why"}, "is not about x"),
    ],
)
def test_wrong_scores_of_a_group_are_refused_before_they_are_sent(
    fb: forebay.Client, policy: str, value: Any, rationale: Any, message: str
) -> None:
    rules(fb, policy, 2, per="group")
    post(fb, policy, "a b", group_id="g")
    with forebay.Scorer("judge", policy=policy, client=fb) as scorer:
        item = leased(scorer)
        with pytest.raises(ValueError, match=message):
            item.score(value, rationale)
        assert given(fb, policy, "a") == [] and item.ended is None
        assert len(item.score({"a": 0.5, "b": 0.5})) == 2


@pytest.mark.parametrize(
    ("value", "rationale", "message"),
    [
        ({"a": 0.5}, None, "judge of a is about one rollout, so its score is no mapping"),
        (0.5, {"a": "why"}, "its rationale is no mapping"),
        (None, None, "is a number, not None"),
        (float("inf"), None, "is inf"),
    ],
)
def test_wrong_scores_of_a_rollout_are_refused_before_they_are_sent(
    fb: forebay.Client, scorer: forebay.Scorer, value: Any, rationale: Any, message: str
) -> None:
    post(fb, scorer.policy, "a")
    item = leased(scorer)
    with pytest.raises(ValueError, match=message):
        item.score(value, rationale)
    assert item.score(True).scoring == [] and given(fb, scorer.policy, "a") == [(1.0, "a", 1)]


def test_what_fails_comes_back_until_its_attempts_are_used_up(fb: forebay.Client, policy: str) -> None:
    rules(fb, policy, max_attempts=3)
    post(fb, policy, "a")
    with forebay.Scorer("judge", policy=policy, client=fb) as scorer:
        # The service refuses a reason that is empty or too long, or that UTF-8 has no form for.
        for attempt, reason in enumerate(("", "\u00e9" * 1_000, "half \ud83d\n"), start=1):
            item = leased(scorer)
            assert item.attempt == attempt
            item.fail(reason)
            assert (item.ended, item.is_lost()) == ("failed", False)
            with pytest.raises(errors.LeaseLost):
                item.score(1.0)
        assert scorer.lease(wait_s=0) is None
        assert (fb.retry_scores("judge", policy=policy), fb.retry_scores("judge", policy=policy)) == (1, 0)
        item = leased(scorer)
        assert item.attempt == 1
        item.score(1.0)
    assert given(fb, policy, "a") == [(1.0, "anonymous", 1)]


def test_the_item_of_a_dead_scorer_comes_back_and_its_late_score_is_refused(
    fb: forebay.Client, scorer: forebay.Scorer
) -> None:
    post(fb, scorer.policy, "a")
    dead = forebay.Scorer("judge", policy=scorer.policy, client=fb, ttl_s=1)
    late = leased(dead)
    dead.close()
    assert not late.is_lost()
    item = leased(scorer)
    assert (item.rollout.rollout_id, item.attempt) == ("a", 2)
    assert late.is_lost(), "its time is over"
    with pytest.raises(errors.LeaseLost):
        late.score(0.0)
    assert late.ended == "lost" and late.is_lost()
    late.fail("too late for that, too")
    assert late.ended == "lost"
    item.score(1.0)
    assert given(fb, scorer.policy, "a") == [(1.0, "a", 2)]


def test_a_score_with_a_lease_of_the_client_settles_its_work(fb: forebay.Client, judged: str) -> None:
    post(fb, judged, "a b")
    (item,) = fb.lease_scores(["judge"], policy=judged, ttl_s=1)
    extended = fb.extend_scores([item.lease, "other"], policy=judged, ttl_s=500)
    assert (extended.held, extended.lost) == ([item.lease], ["other"])
    assert 400_000 < extended.expires_in_ms <= 500_000
    receipt = fb.score("a", "judge", 0.5, policy=judged, lease=item.lease)
    assert not receipt.duplicate and given(fb, judged, "a") == [(0.5, "anonymous", 1)]
    with pytest.raises(errors.LeaseLost):
        fb.score("a", "judge", 0.25, policy=judged, lease=item.lease)
    again = [fb.lease_scores(["judge"], policy=judged, max=9, request_id="r", scorer="s") for _ in range(2)]
    assert [[one.rollouts[0].rollout_id for one in items] for items in again] == [["b"], ["b"]]
    assert again[0][0].lease == again[1][0].lease


def test_heartbeats_keep_all_leases_with_one_call(
    fb: forebay.Client, judged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    extend = forebay.Client.extend_scores

    def counted(self: forebay.Client, leases: Any, **options: Any) -> Any:
        calls.append(sorted(leases))
        return extend(self, leases, **options)

    monkeypatch.setattr(forebay.Client, "extend_scores", counted)
    post(fb, judged, "a b c")
    with forebay.Scorer("judge", policy=judged, client=fb, ttl_s=1) as scorer:
        items = [leased(scorer) for _ in range(3)]
        assert fb.lease_scores(["judge"], policy=judged, wait_ms=2_500) == [], "they would have expired twice"
        assert calls[-1] == sorted(item.descriptor.lease for item in items)
        for item in items:
            assert not item.is_lost()
            item.score(1.0)
    assert [given(fb, judged, name) for name in "abc"] == [[(1.0, "anonymous", 1)]] * 3


def test_a_heartbeat_has_no_more_leases_than_the_service_takes(
    fb: forebay.Client, judged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_heartbeat.WorkHeartbeats, "at_once", 2)
    sizes: list[int] = []
    extend = forebay.Client.extend_scores

    def counted(self: forebay.Client, leases: Any, **options: Any) -> Any:
        sizes.append(len(leases))
        return extend(self, leases, **options)

    monkeypatch.setattr(forebay.Client, "extend_scores", counted)
    post(fb, judged, "a b c d e")
    with forebay.Scorer("judge", policy=judged, client=fb, ttl_s=1) as scorer:
        items = [leased(scorer) for _ in range(5)]
        assert fb.lease_scores(["judge"], policy=judged, wait_ms=1_500) == []
        assert max(sizes) == 2 and not any(item.is_lost() for item in items)


def test_a_lease_that_its_score_ends_is_not_reported_as_lost(
    fb: forebay.Client, judged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, scored = threading.Event(), threading.Event()
    extend = forebay.Client.extend_scores
    lost: list[str] = []

    def late(self: forebay.Client, leases: Any, **options: Any) -> Any:
        begun.set()
        scored.wait(20)
        answer = extend(self, leases, **options)
        lost.extend(answer.lost)
        return answer

    monkeypatch.setattr(forebay.Client, "extend_scores", late)
    post(fb, judged, "a")
    before = set(threading.enumerate())
    with forebay.Scorer("judge", policy=judged, client=fb, ttl_s=5) as scorer:
        item = leased(scorer)
        (thread,) = heartbeats(before)
        assert begun.wait(20)
        item.score(1.0)
        scored.set()
        wait_for(lambda: lost == [item.descriptor.lease], "the answer to the heartbeat")
    thread.join(20)
    assert "is lost" not in caplog.text and not item.is_lost()


def test_a_lease_that_others_end_is_noticed(fb: forebay.Client, judged: str, caplog: pytest.LogCaptureFixture) -> None:
    post(fb, judged, "a b")
    with forebay.Scorer("judge", policy=judged, client=fb, ttl_s=1) as scorer:
        first, second = leased(scorer), leased(scorer)
        fb.score("a", "judge", 0.5, policy=judged, scorer="somebody else")
        wait_for(first.is_lost, "the heartbeat that says so")
        wait_for(lambda: "the lease of judge of a is lost" in caplog.text, "the message about it")
        with pytest.raises(errors.LeaseLost):
            first.score(1.0)
        assert first.ended == "lost" and not second.is_lost()
        second.score(1.0)
    assert given(fb, judged, "a") == [(0.5, "somebody else", None)]
    assert "judge of b is lost" not in caplog.text


def test_the_rollouts_of_a_policy_that_was_reset_cannot_be_scored(fb: forebay.Client, scorer: forebay.Scorer) -> None:
    post(fb, scorer.policy, "a b")
    scored, failed = leased(scorer), leased(scorer)
    fb.reset(scorer.policy)
    with pytest.raises(errors.NotFound):
        scored.score(1.0)
    failed.fail("no answer")
    assert (scored.ended, failed.ended) == ("lost", "failed")
    assert (scored.is_lost(), failed.is_lost()) == (True, False)


def test_an_item_is_held_until_nothing_refers_to_it(fb: forebay.Client, judged: str) -> None:
    post(fb, judged, "a")
    with (
        forebay.Scorer("judge", policy=judged, client=fb, ttl_s=1) as scorer,
        forebay.Scorer("judge", policy=judged, client=fb, scorer="other") as other,
    ):
        items = iter(scorer)
        item = next(items)
        assert other.lease(wait_s=2) is None, "another thread may work on it"
        del item
        assert leased(other).attempt == 2


def test_leases_end_with_the_objects_that_use_them(fb: forebay.Client, judged: str) -> None:
    post(fb, judged, "a")
    before = set(threading.enumerate())
    scorer = forebay.Scorer("judge", policy=judged, client=fb)
    item = leased(scorer)
    (thread,) = heartbeats(before)
    del scorer
    gc.collect()
    assert thread.is_alive(), "the item still holds the scorer"
    item.score(1.0)
    del item
    gc.collect()
    wait_for(lambda: not thread.is_alive(), "the end of the thread")


def test_a_forked_process_scores_and_extends_only_its_own_leases(fb: forebay.Client, scorer: forebay.Scorer) -> None:
    post(fb, scorer.policy, "a b c")
    first, second = leased(scorer), leased(scorer)
    child = os.fork()
    if child == 0:
        second.score(0.5)
        is_right = second.ended == "scored" and threading.active_count() == 1
        own = scorer.lease()
        is_right &= own is not None and own.rollout.rollout_id == "c" and threading.active_count() == 2
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    first.score(0.5)
    assert given(fb, scorer.policy, "b") == [(0.5, "a", 1)]


def test_threads_that_iterate_one_scorer_get_different_items(fb: forebay.Client, scorer: forebay.Scorer) -> None:
    post(fb, scorer.policy, "a b c d")
    # Both have an item before either is scored.
    both = threading.Barrier(2, timeout=30)
    seen: dict[str, list[str]] = {"one": [], "two": []}

    def work(mine: list[str]) -> None:
        for item in scorer:
            both.wait()
            mine.append(item.rollout.rollout_id)
            item.score(0.5)
            if len(mine) == 2:
                return

    threads = [threading.Thread(target=work, args=[mine], daemon=True) for mine in seen.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(mine) for mine in seen.values()] == [2, 2]
    assert sorted(seen["one"] + seen["two"]) == ["a", "b", "c", "d"]


def test_the_end_of_a_scorer_ends_the_loops_that_wait(own: forebay.Client) -> None:
    scorer = forebay.Scorer("judge", client=own)
    seen: list[Item] = []
    loop = threading.Thread(target=lambda: seen.extend(scorer), daemon=True)
    loop.start()
    wait_for(lambda: waiters(own) == 1, "the long poll")
    scorer.close()
    loop.join(20)
    assert not loop.is_alive()
    wait_for(lambda: waiters(own) == 0, "the service forgets it")
    post(own, "default", "a")
    assert seen == [] and list(scorer) == [], "it gets nothing any more"


def test_the_end_of_a_client_ends_its_scorers_with_an_error(own_server: forebay.Server, own: forebay.Client) -> None:
    client = own_server.client()
    ends: list[BaseException] = []

    def loop() -> None:
        try:
            list(forebay.Scorer("judge", client=client))
        except errors.ForebayError as error:
            ends.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    wait_for(lambda: waiters(own) == 1, "the long poll")
    client.close()
    thread.join(20)
    assert [type(error) for error in ends] == [errors.Cancelled]


def test_run_scores_what_a_function_returns_and_gives_back_what_it_raises(
    own: forebay.Client, caplog: pytest.LogCaptureFixture
) -> None:
    rules(own, "default", max_attempts=1)
    post(own, "default", "good text none nan raises own")
    together = threading.Barrier(2, timeout=30)

    def judge(item: Item) -> Any:
        rollout_id = item.rollout.rollout_id
        together.wait()
        if rollout_id == "raises":
            raise RuntimeError("no answer")
        if rollout_id == "own":
            item.score(0.75, "by itself")
        return {"good": 0.5, "text": "good", "nan": float("nan")}.get(rollout_id)

    with forebay.Scorer("judge", client=own) as scorer:
        run = threading.Thread(target=scorer.run, args=[judge], kwargs={"jobs": 2}, daemon=True)
        run.start()
        wait_for(lambda: waiters(own) == 2, "both threads wait for more")
        scorer.close()
        run.join(20)
        assert not run.is_alive()
    assert [given(own, "default", name) for name in ("good", "own")] == [
        [(0.5, "anonymous", 1)],
        [(0.75, "anonymous", 1)],
    ]
    assert [given(own, "default", name) for name in ("text", "none", "nan", "raises")] == [[]] * 4
    assert own.retry_scores("judge") == 4, "their only attempt has failed"
    for text in ("judge of raises is given back", "RuntimeError: no answer", "neither returned a score nor settled"):
        assert text in caplog.text
    assert "judge of own is given back" not in caplog.text


def test_run_goes_on_after_a_lost_lease_and_ends_with_other_errors(fb: forebay.Client, scorer: forebay.Scorer) -> None:
    post(fb, scorer.policy, "a b c")
    seen: list[str] = []

    def judge(item: Item) -> Scores:
        seen.append(item.rollout.rollout_id)
        if item.rollout.rollout_id == "a":
            fb.score("a", "judge", 0.0, policy=item.policy, scorer="somebody else")
        if item.rollout.rollout_id == "c":
            # So that the service refuses the score for another reason.
            item.descriptor.lease = ""
        return 1.0

    def run() -> None:
        with pytest.raises(errors.Invalid, match="/0/lease"):
            # One of the threads waits for more.
            scorer.run(judge, jobs=2)
        seen.append("it has ended")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert sorted(seen) == ["a", "b", "c", "it has ended"]
    assert [len(given(fb, scorer.policy, name)) for name in "abc"] == [1, 1, 0]
    assert scorer.lease(wait_s=0) is None, "it is closed"


# Lost answers.


@contextmanager
def behind_a_proxy(server: forebay.Server, policy: str) -> Iterator[tuple[LossyProxy, forebay.Scorer]]:
    with (
        LossyProxy(server.url) as proxy,
        forebay.Client(proxy.url) as client,
        forebay.Scorer("judge", policy=policy, client=client) as scorer,
    ):
        yield proxy, scorer


def test_a_lease_whose_answer_was_lost_is_repeated_and_gets_the_same_item(
    server: forebay.Server, fb: forebay.Client, judged: str
) -> None:
    post(fb, judged, "a b")
    with behind_a_proxy(server, judged) as (proxy, scorer):
        proxy.lose("POST", "/scores/leases", 2)
        item = leased(scorer)
        assert proxy.lost == 2 and (item.rollout.rollout_id, item.attempt) == ("a", 1)
        following = fb.lease_scores(["judge"], policy=judged, max=9)
        assert [one.rollouts[0].rollout_id for one in following] == ["b"], "only one item was leased"
        item.score(0.5)


def test_a_score_whose_answer_was_lost_is_given_once(server: forebay.Server, fb: forebay.Client, policy: str) -> None:
    rules(fb, policy, 2, per="group")
    post(fb, policy, "a b", group_id="g")
    with behind_a_proxy(server, policy) as (proxy, scorer):
        item = leased(scorer)
        proxy.lose("POST", "/scores", 2)
        receipts = item.score({"a": 0.5, "b": 0.25})
        assert proxy.lost == 2 and [receipt.duplicate for receipt in receipts] == [True, True]
        assert item.ended == "scored"
    assert given(fb, policy, "a") == [(0.5, "anonymous", 1)] and given(fb, policy, "b") == [(0.25, "anonymous", 1)]


def test_a_failure_whose_answer_was_lost_counts_once(server: forebay.Server, fb: forebay.Client, judged: str) -> None:
    post(fb, judged, "a")
    with behind_a_proxy(server, judged) as (proxy, scorer):
        item = leased(scorer)
        proxy.lose("POST", "/scores", 2)
        item.fail("no answer")
        assert proxy.lost == 2 and item.ended == "failed"
        assert leased(scorer).attempt == 2


def test_patience_outlasts_a_restart_of_the_service(tmp_path: Path) -> None:
    database = f"sqlite:{tmp_path / 'forebay.db'}"
    first = forebay.Server(database=database).start()
    port = first.url.rsplit(":", 1)[1]
    with forebay.Client(first.url, retry=forebay.types.Retry.none()) as client:
        rules(client, "default")
        post(client, "default", "a b")
        with forebay.Scorer("judge", client=client) as scorer:
            item = leased(scorer)
            first.kill()
            second = forebay.Server(database=database, listen=f"127.0.0.1:{port}")
            restart = threading.Thread(target=second.start)
            restart.start()
            item.score(0.5)
            restart.join()
            assert leased(scorer).rollout.rollout_id == "b"
        second.stop()
        # Nobody is there any more, and the patience is over at once.
        with (
            forebay.Scorer("judge", client=client, patience_s=0) as hasty,
            pytest.raises(errors.Unreachable),
        ):
            hasty.lease()


@pytest.mark.parametrize("who", ["client", "scorer"])
def test_patience_ends_with_the_client_and_with_the_scorer(who: str, caplog: pytest.LogCaptureFixture) -> None:
    server = forebay.Server().start()
    client = forebay.Client(server.url, retry=forebay.types.Retry.none())
    scorer = forebay.Scorer("judge", client=client)
    server.kill()
    ends: list[object] = []

    def loop() -> None:
        try:
            ends.append(scorer.lease())
        except errors.ForebayError as error:
            ends.append(type(error))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    wait_for(lambda: "the call is repeated" in caplog.text, "the first pause")
    {"client": client, "scorer": scorer}[who].close()
    thread.join(20)
    assert ends == [{"client": errors.Cancelled, "scorer": None}[who]]


# What cannot be.


def test_a_scorer_needs_names_that_the_rules_make_work_of(fb: forebay.Client, judged: str) -> None:
    for make in (forebay.Scorer, forebay.AsyncScorer):
        with pytest.raises(errors.ConfigurationError, match="names of the scores"):
            make(policy=judged)
    with pytest.raises(errors.NotFound, match="no work for the score `jugde`"):
        next(iter(forebay.Scorer("judge", "jugde", policy=judged, client=fb)))
    with pytest.raises(errors.UnknownPolicy):
        forebay.Scorer("judge", policy=f"no-{judged}", client=fb).lease()
    with pytest.raises(errors.Invalid, match="ttl_s"):
        forebay.Scorer("judge", policy=judged, client=fb, ttl_s=0).lease()
    for run in (
        lambda: forebay.Scorer("judge", client=fb).run(lambda _: 1.0, jobs=0),
        lambda: asyncio.run(forebay.AsyncScorer("judge").run(_judged, jobs=0)),
    ):
        with pytest.raises(errors.ConfigurationError, match="jobs"):
            run()


async def _judged(_: AsyncItem) -> float:
    return 1.0


# asyncio.


def asynchronously(
    server: forebay.Server, test: Callable[[forebay.AsyncScorer], Any], policy: str = "default", **options: Any
) -> None:
    async def main() -> None:
        async with (
            forebay.AsyncClient(server.url) as client,
            forebay.AsyncScorer("judge", policy=policy, client=client, **options) as scorer,
        ):
            await test(scorer)

    asyncio.run(main())


async def waiting(scorer: forebay.AsyncScorer, count: int) -> None:
    """Returns when so many requests wait at the service."""
    while await scorer.client.run(lambda: waiters(scorer.client.sync)) != count:
        await asyncio.sleep(0.01)


def test_items_are_scored_asynchronously(server: forebay.Server, fb: forebay.Client, judged: str) -> None:
    post(fb, judged, "a b")

    async def test(scorer: forebay.AsyncScorer) -> None:
        attempts: list[tuple[str, int]] = []
        async for item in scorer:
            attempts.append((item.rollout.rollout_id, item.attempt))
            if len(attempts) == 1:
                await item.fail("no answer")
                with pytest.raises(errors.LeaseLost):
                    await item.score(0.0)
                continue
            receipt = await item.score(0.5, "why")
            assert receipt.group.state == "ready" and item.ended == "scored"
            if len(attempts) == 3:
                break
        assert attempts == [("a", 1), ("a", 2), ("b", 1)]
        assert await scorer.lease(wait_s=0) is None

    asynchronously(server, test, judged)
    assert given(fb, judged, "a") == [(0.5, "anonymous", 2)] and given(fb, judged, "b") == [(0.5, "anonymous", 1)]


def test_groups_are_scored_asynchronously(server: forebay.Server, fb: forebay.Client, policy: str) -> None:
    rules(fb, policy, 2, per="group")
    post(fb, policy, "a b", group_id="g")

    async def test(scorer: forebay.AsyncScorer) -> None:
        item = await scorer.lease()
        assert item is not None
        receipts = await item.score({"a": 1.0, "b": 0.0})
        assert [receipt.group.state for receipt in receipts] == ["ready", "ready"]

    asynchronously(server, test, policy)


def test_tasks_run_a_function_until_the_scorer_is_closed(
    server: forebay.Server, fb: forebay.Client, judged: str
) -> None:
    post(fb, judged, "a b c d")

    async def test(scorer: forebay.AsyncScorer) -> None:
        both = asyncio.Event()
        begun, scored = set[str](), set[str]()

        async def judge(item: AsyncItem) -> float:
            begun.add(item.rollout.rollout_id)
            if len(begun) == 2:
                both.set()
            await both.wait()
            if item.rollout.rollout_id == "b" and item.attempt == 1:
                raise RuntimeError("no answer")
            scored.add(item.rollout.rollout_id)
            if len(scored) == 4:
                await scorer.close()
            return 0.5

        await scorer.run(judge, jobs=2)

    asynchronously(server, test, judged)
    assert [given(fb, judged, name) for name in "abcd"] == [[(0.5, "anonymous", 1 + (name == "b"))] for name in "abcd"]


def test_an_error_of_a_call_ends_the_run(server: forebay.Server, fb: forebay.Client, judged: str) -> None:
    post(fb, judged, "a")

    async def judge(item: AsyncItem) -> float:
        item.descriptor.lease = ""
        return 0.5

    async def test(scorer: forebay.AsyncScorer) -> None:
        with pytest.raises(errors.Invalid, match="/0/lease"):
            # One of the tasks waits for more.
            await asyncio.wait_for(scorer.run(judge, jobs=2), 20)
        assert await scorer.lease() is None, "it is closed"

    asynchronously(server, test, judged)


def test_a_loop_of_a_task_does_not_hold_an_item_that_nothing_refers_to(
    server: forebay.Server, fb: forebay.Client, judged: str
) -> None:
    post(fb, judged, "a")

    async def test(scorer: forebay.AsyncScorer) -> None:
        items = scorer.__aiter__()
        item = await anext(items)
        assert item.attempt == 1
        del item
        # The loop waits for the next item, which is this one.
        back = await asyncio.wait_for(anext(items), 20)
        assert back.attempt == 2

    asynchronously(server, test, judged, ttl_s=1)


def test_a_task_that_is_cancelled_while_it_waits_leases_nothing(
    own_server: forebay.Server, own: forebay.Client
) -> None:
    async def test(scorer: forebay.AsyncScorer) -> None:
        waits = asyncio.ensure_future(scorer.lease())
        await waiting(scorer, 1)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await waiting(scorer, 0)
        post(own, "default", "a")
        item = await scorer.lease(wait_s=0)
        assert item is not None and item.attempt == 1

    asynchronously(own_server, test)


def test_the_item_of_a_task_that_is_cancelled_when_it_is_leased_comes_back(
    server: forebay.Server, fb: forebay.Client, judged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(fb, judged, "a")
    answered = threading.Event()
    lease = forebay.Client.lease_scores

    def tell(self: forebay.Client, names: Any, **options: Any) -> Any:
        items = lease(self, names, **options)
        answered.set()
        return items

    async def test(scorer: forebay.AsyncScorer) -> None:
        waits = asyncio.ensure_future(scorer.lease())
        # The answer arrives while the loop is busy, so that the task does not get it.
        asyncio.get_running_loop().call_soon(answered.wait, 20)
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        del waits
        gc.collect()
        assert answered.is_set()
        item = await scorer.lease(wait_s=10)
        assert item is not None and item.attempt == 2

    monkeypatch.setattr(forebay.Client, "lease_scores", tell)
    asynchronously(server, test, judged, ttl_s=1)


def test_the_end_of_an_asynchronous_scorer_ends_its_loops(own_server: forebay.Server, own: forebay.Client) -> None:
    async def test(scorer: forebay.AsyncScorer) -> None:
        async def loop() -> list[AsyncItem]:
            return [item async for item in scorer]

        waits = asyncio.ensure_future(loop())
        await waiting(scorer, 1)
        await scorer.close()
        assert await asyncio.wait_for(waits, 20) == []

    asynchronously(own_server, test)
