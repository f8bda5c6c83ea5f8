"""The trainer's side against the real service."""

from __future__ import annotations

import array
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import LossyProxy, wait_for

import forebay
from forebay import _arrow, errors


def post(fb: forebay.Client, policy: str, names: str, **fields: object) -> None:
    """Posts a rollout, and so a group and a batch, for each name."""
    for name in names.split():
        segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1], logprobs=[-0.5, -0.25])
        fb.post(forebay.Trajectory(policy=policy, rollout_id=name, reward=1.0, segments=[segment], **fields))  # type: ignore[arg-type]


def rollout(batch: forebay.Batch) -> str:
    (row,) = batch.rows()
    return row.rollout_id


@pytest.fixture
def short_leases(fb: forebay.Client, policy: str) -> str:
    """A policy whose leases last for one second."""
    fb.patch_policy(policy, {"lease": {"ttl_s": 1, "max_deliveries": 100}})
    return policy


def test_a_resumed_trainer_gets_back_what_its_checkpoint_has_not_learned(fb: forebay.Client, policy: str) -> None:
    post(fb, policy, "a b c d")
    step, seen = 0, []
    with forebay.Trainer(policy, client=fb) as run:
        for batch in run:
            seen.append(rollout(batch))
            batch.ack(step := step + 1)
            assert batch.ended == "acked"
            if step == 2:
                run.saved(step)
            if step == 3:
                break
    assert seen == ["a", "b", "c"]
    with forebay.Trainer(policy, client=fb, last_saved=2) as again:
        assert (again.epoch, again.resumed.returned_batches) == (run.epoch + 1, 1)
        back = again.lease()
        assert back is not None and (rollout(back), back.attempt, back.descriptor.step) == ("c", 2, 3)
        back.ack(3)
        following = again.lease()
        assert following is not None and (rollout(following), following.attempt) == ("d", 1)
        following.ack(4)
        assert again.lease(wait_s=0) is None


def test_versions_continue_from_the_checkpoint(fb: forebay.Client, policy: str) -> None:
    post(fb, policy, "a b")
    with forebay.Trainer(policy, client=fb) as run:
        for step in (1, 2):
            batch = run.lease()
            assert batch is not None
            batch.ack(step)
            assert run.publish(step, uri=f"file:///v{step}") == step
        run.saved(1)
    with forebay.Trainer(policy, client=fb, last_saved=1) as again:
        assert again.version == 1
        assert again.publish(2, uri="file:///v2") == 2
        assert again.status().version_uri == "file:///v2"


def test_a_trainer_that_was_replaced_can_do_nothing(fb: forebay.Client, policy: str) -> None:
    post(fb, policy, "a b")
    with forebay.Trainer(policy, client=fb) as run:
        batch = run.lease()
        assert batch is not None
        with forebay.Trainer(policy, client=fb):
            for call in (
                lambda: batch.ack(1),
                lambda: batch.nack(),
                lambda: run.lease(),
                lambda: run.saved(1),
                lambda: run.publish(1),
            ):
                with pytest.raises(errors.Superseded):
                    call()


def test_a_lease_whose_answer_was_lost_is_repeated_and_gets_the_same_batch(
    server: forebay.Server, fb: forebay.Client, policy: str
) -> None:
    post(fb, policy, "a b")
    with LossyProxy(server.url) as proxy, forebay.Client(proxy.url) as client:
        run = forebay.Trainer(policy, client=client)
        proxy.lose("POST", "/batches")
        batch = run.lease()
        assert batch is not None and proxy.lost == 1
        assert [one.state for one in fb.list_batches(policy)] == ["leased"]
        batch.ack(1)


def test_a_lease_that_failed_keeps_its_request(server: forebay.Server, fb: forebay.Client, policy: str) -> None:
    post(fb, policy, "a b")
    with LossyProxy(server.url) as proxy, forebay.Client(proxy.url, retry=forebay.types.Retry.none()) as client:
        run = forebay.Trainer(policy, client=client, patience_s=0)
        proxy.lose("POST", "/batches")
        with pytest.raises(errors.Unreachable):
            run.lease()
        batch = run.lease()
        assert batch is not None and rollout(batch) == "a"
        assert [one.state for one in fb.list_batches(policy)] == ["leased"]
        following = run.lease()
        assert following is not None and rollout(following) == "b"


def test_answers_to_acks_checkpoints_and_versions_may_be_lost(
    server: forebay.Server, fb: forebay.Client, policy: str
) -> None:
    post(fb, policy, "a")
    with LossyProxy(server.url) as proxy, forebay.Client(proxy.url) as client:
        proxy.lose("POST", "/resume")
        run = forebay.Trainer(policy, client=client)
        batch = run.lease()
        assert batch is not None
        for ending in ("/ack", "/checkpoints"):
            proxy.lose("POST", ending)
        proxy.lose("PUT", "/version")
        batch.ack(1)
        run.saved(1)
        run.publish(1)
        assert proxy.lost == 4
        assert (run.epoch, run.version) == (run.status().epoch, run.status().version)


def test_patience_outlasts_a_restart_of_the_service(tmp_path: Path) -> None:
    database = f"sqlite:{tmp_path / 'forebay.db'}"
    first = forebay.Server(database=database).start()
    port = first.url.rsplit(":", 1)[1]
    with forebay.Client(first.url, retry=forebay.types.Retry.none()) as client:
        post(client, "default", "a")
        run = forebay.Trainer(client=client)
        batch = run.lease()
        assert batch is not None
        first.kill()
        second = forebay.Server(database=database, listen=f"127.0.0.1:{port}")
        restart = threading.Thread(target=second.start)
        restart.start()
        batch.ack(1)
        restart.join()
        assert run.status().batches["trained"] == 1
        second.stop()


def test_heartbeats_keep_the_lease_of_a_slow_step(fb: forebay.Client, short_leases: str) -> None:
    post(fb, short_leases, "a")
    with forebay.Trainer(short_leases, client=fb) as run:
        batch = run.lease()
        assert batch is not None
        first_end = batch.descriptor.expires_at
        assert first_end is not None

        def is_extended_thrice() -> bool:
            now = fb.get_batch(batch.batch_id)
            assert now is not None and now.state == "leased" and now.expires_at is not None
            ends.add(now.expires_at)
            return len(ends) > 3

        ends = {first_end}
        wait_for(is_extended_thrice, "the third heartbeat")
        assert not batch.lost
        batch.ack(1)


def test_a_lease_of_the_policy_is_replaced_by_that_of_the_trainer(fb: forebay.Client, policy: str) -> None:
    fb.patch_policy(policy, {"lease": {"ttl_s": 5}})
    post(fb, policy, "a")
    with forebay.Trainer(policy, client=fb, lease_ttl_s=5_000) as run:
        batch = run.lease()
        assert batch is not None

        def is_long() -> bool:
            now = fb.get_batch(batch.batch_id)
            return now is not None and (now.expires_in_ms or 0) > 4_000_000

        wait_for(is_long, "the first heartbeat")


def test_a_lost_lease_is_noticed_and_its_ack_refused(
    fb: forebay.Client, short_leases: str, caplog: pytest.LogCaptureFixture
) -> None:
    post(fb, short_leases, "a")
    with forebay.Trainer(short_leases, client=fb) as run:
        batch = run.lease()
        assert batch is not None and not batch.lost
        # Somebody else ends the lease, with its token.
        fb.nack(batch.batch_id, lease=batch.descriptor.lease or "")
        wait_for(lambda: batch.lost, "the heartbeat that is refused")
        wait_for(lambda: "lease-lost" in caplog.text, "the message about it")
        with pytest.raises(errors.LeaseLost):
            batch.ack(1)
        assert batch.ended == "lost" and batch.lost
        again = run.lease()
        assert again is not None and again.batch_id == batch.batch_id
        again.ack(1)


STOPPED = """
import sys
import forebay
from forebay import _arrow, errors

run = forebay.Trainer(sys.argv[2], client=forebay.Client(sys.argv[1]))
batch = run.lease()
print("leased", batch.lost, flush=True)
sys.stdin.readline()
print("lost", batch.lost, flush=True)
try:
    batch.ack(1)
    print("acked", flush=True)
except errors.LeaseLost:
    print("refused", batch.ended, flush=True)
"""


def test_a_process_that_was_stopped_learns_that_its_lease_is_lost(
    server: forebay.Server, fb: forebay.Client, short_leases: str
) -> None:
    post(fb, short_leases, "a")
    command = [sys.executable, "-c", STOPPED, server.url, short_leases]
    environment = {**os.environ, "PYTHONPATH": str(Path(forebay.__file__).parents[1])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as trainer:
        assert trainer.stdin and trainer.stdout
        assert trainer.stdout.readline() == "leased False\n"
        os.kill(trainer.pid, signal.SIGSTOP)
        (batch,) = fb.list_batches(short_leases)

        def is_returned() -> bool:
            now = fb.get_batch(batch.batch_id)
            return now is not None and now.state == "returned"

        wait_for(is_returned, "the end of the lease")
        # It asks before its heartbeat had time to.
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        os.kill(trainer.pid, signal.SIGCONT)
        assert trainer.stdout.read() == "lost True\nrefused lost\n"
    assert trainer.returncode == 0


def test_a_batch_without_an_ack_is_given_back(fb: forebay.Client, policy: str) -> None:
    post(fb, policy, "a b")
    with forebay.Trainer(policy, client=fb) as run:
        for batch, expected in zip(run, [("a", 1), ("a", 2), ("b", 1)], strict=False):
            assert (rollout(batch), batch.attempt) == expected
            if batch.attempt == 2:
                batch.ack(1)
            if expected == ("b", 1):
                break


def test_a_batch_that_was_delivered_too_often_is_given_back_until_it_is_quarantined(
    fb: forebay.Client, policy: str
) -> None:
    fb.patch_policy(policy, {"lease": {"max_deliveries": 3}})
    post(fb, policy, "a b")
    for _ in range(2):
        with forebay.Trainer(policy, client=fb, max_attempts=2) as run:
            batch = run.lease()
            assert batch is not None and rollout(batch) == "a"
    with forebay.Trainer(policy, client=fb, max_attempts=2) as run:
        following = run.lease()
        assert following is not None and rollout(following) == "b"
        states = {one.batch_id: (one.state, one.reason) for one in fb.list_batches(policy)}
        assert states[batch.batch_id][0] == "quarantined"


def test_wrong_groups_are_given_back_by_name(fb: forebay.Client, policy: str) -> None:
    fb.patch_policy(policy, {"batch": {"groups": 2}})
    post(fb, policy, "a b c")
    with forebay.Trainer(policy, client=fb) as run:
        batch = run.lease()
        assert batch is not None
        batch.nack("too long for the model", groups=["a"])
        assert batch.ended == "given back"
        following = run.lease()
        assert following is not None and [row.rollout_id for row in following.rows()] == ["b", "c"]


def test_leases_end_with_the_objects_that_use_them(fb: forebay.Client, policy: str) -> None:
    post(fb, policy, "a")
    run = forebay.Trainer(policy, client=fb)
    batch = run.lease()
    assert batch is not None
    threads = [thread for thread in threading.enumerate() if thread.name == "forebay-heartbeat" and thread.is_alive()]
    del run
    gc.collect()
    assert any(thread.is_alive() for thread in threads), "the batch still holds the trainer"
    del batch
    gc.collect()
    wait_for(lambda: not any(thread.is_alive() for thread in threads), "the end of the thread")


def test_a_forked_process_reads_rows_and_extends_only_its_own_leases(fb: forebay.Client, policy: str) -> None:
    post(fb, policy, "a b")
    with forebay.Trainer(policy, client=fb) as run:
        batch = run.lease()
        assert batch is not None
        child = os.fork()
        if child == 0:
            is_right = rollout(batch) == "a" and threading.active_count() == 1
            own = run.lease()
            is_right &= own is not None and threading.active_count() == 2
            os._exit(0 if is_right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        batch.ack(1)


@pytest.fixture
def varied(fb: forebay.Client, policy: str) -> Iterator[forebay.Batch]:
    """A batch with segments of several lengths, and a rollout without any."""
    fb.patch_policy(policy, {"batch": {"groups": 3}, "loss_weighting": "turn_mean", "require": []})
    segments = [
        forebay.Segment(
            tokens=[7, 8, 9, 10], loss_mask=[1, 0, 1], logprobs=[-0.5, 0.0, -0.125], values=[0.5, 0.25, 1.0]
        ),
        forebay.Segment(tokens=[1, 2**31 - 1], loss_mask=[1], kind="final"),
    ]
    fb.post(forebay.Trajectory(policy=policy, rollout_id="a", reward=0.1, segments=segments, metadata={"k": "v"}))
    fb.post(forebay.Trajectory(policy=policy, rollout_id="b", reward=-1.0, messages=[{"role": "user", "content": "x"}]))
    post(fb, policy, "c")
    run = forebay.Trainer(policy, client=fb)
    batch = run.lease()
    assert batch is not None
    yield batch
    run.close()


def test_columns_are_the_same_as_arrow_and_as_json(varied: forebay.Batch) -> None:
    def flat(form: str) -> dict[str, list[object]]:
        found: dict[str, list[object]] = {}
        for page in varied.columns(form=form):  # type: ignore[arg-type]
            for name in ("tokens", "loss_mask", "logprobs", "teacher_logprobs", "values"):
                column = getattr(page, name)
                found.setdefault(name, []).append((column.lengths, column.values.tolist()))
            for name, values in page.scalars.items():
                found.setdefault(name, []).extend(values)
        return found

    arrow, json = flat("arrow"), flat("json")
    assert arrow == json
    assert arrow["tokens"] == [([4, 2, None, 3], [7, 8, 9, 10, 1, 2**31 - 1, 1, 2, 3])]
    assert arrow["logprobs"] == [([3, None, None, 2], [-0.5, 0.0, -0.125, -0.5, -0.25])]
    assert arrow["loss_weight"] == [row.loss_weight for row in varied.rows()]


def test_columns_are_read_as_json_if_pyarrow_cannot_be_imported(
    varied: forebay.Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = varied.columns()
    # As a version of pyarrow does that refuses the installed numpy.
    monkeypatch.setitem(sys.modules, "pyarrow.compute", None)  # type: ignore[arg-type]
    _arrow.pyarrow.cache_clear()
    json = varied.columns()
    monkeypatch.undo()
    _arrow.pyarrow.cache_clear()
    assert isinstance(json[0].tokens.values, array.array) and not isinstance(arrow[0].tokens.values, array.array)


def test_shards_together_are_the_batch(varied: forebay.Batch) -> None:
    whole = [(row.rollout_id, row.segment) for row in varied.rows()]
    shards = [(row.rollout_id, row.segment) for index in range(3) for row in varied.rows((index, 3))]
    assert sorted(shards) == sorted(whole) and len(whole) == 4
