"""The calls against a real service."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import _bodies, _http, errors
from forebay.types import BatchRules, Gdpo, GroupRules, PolicyRules, Retry, StalenessRules


def trajectory(policy: str, **fields: Any) -> forebay.Trajectory:
    """A rollout of two trained tokens, whose post completes its group."""
    given = {"reward": 1.0, "segments": [forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1])], **fields}
    return forebay.Trajectory(policy=policy, **given)


def leased(fb: forebay.Client, policy: str, **fields: Any) -> tuple[str, str]:
    batch = fb.lease(policy, wait_ms=10_000, **fields)
    assert batch is not None and batch.lease is not None
    return batch.batch_id, batch.lease


# Agents.


def test_advantages_by_component_are_whitened_over_the_batch(fb: forebay.Client, policy: str) -> None:
    gdpo = Gdpo(components={"acc": 1.0, "fmt": 0.5})
    status = fb.put_policy(policy, PolicyRules(group=GroupRules(size=2), batch=BatchRules(groups=2), advantage=gdpo))
    assert status.rules.advantage == gdpo
    for group_id in ("a", "b"):
        for acc in (0.0, 1.0):
            fb.post(trajectory(policy, group_id=group_id, reward=acc, reward_components={"acc": acc, "fmt": 1.0}))
    batch_id, _ = leased(fb, policy)
    # The standardized rewards of a group are 1/sqrt(2) and its negative, and those of four such numbers are 0.866.
    assert [row.advantage for row in fb.samples(batch_id)] == pytest.approx([-0.866024, 0.866024] * 2, abs=1e-6)


def test_a_posted_rollout_is_leased_read_and_acked(fb: forebay.Client, policy: str) -> None:
    receipt = fb.post(trajectory(policy))
    assert (receipt.verdict, receipt.group.state, receipt.duplicate) == ("kept", "ready", False)
    batch_id, lease = leased(fb, policy, request_id="step-1")
    (row,) = fb.samples(batch_id)
    assert (row.rollout_id, row.tokens, row.loss_mask) == (receipt.rollout_id, [1, 2, 3], [1, 1])
    assert fb.ack(batch_id, lease=lease, step=1).state == "trained"
    story = fb.get_trajectory(policy, receipt.rollout_id)
    assert story is not None and (story.state, story.step) == ("trained", 1)


def test_an_image_is_uploaded_once_and_named_by_messages(fb: forebay.Client, policy: str) -> None:
    image = random.Random(7).randbytes(3_000_000)
    upload = fb.upload(image, media_type="image/png")
    assert (upload.bytes, upload.stored, upload.url) == (len(image), len(image), f"forebay:{upload.digest}")
    assert upload.expires_at is not None
    assert fb.put_media(upload.digest, image, media_type="image/png").url == upload.url
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": upload.url}}]}]
    fb.post(trajectory(policy, messages=messages))
    assert fb.upload(image, media_type="image/png").expires_at is None
    batch_id, _ = leased(fb, policy)
    (row,) = fb.samples(batch_id)
    assert row.messages == messages
    assert fb.get_media(upload.url) == fb.get_media(upload.digest) == image
    with pytest.raises(errors.DigestMismatch):
        fb.put_media(upload.digest, image + b"x")
    with pytest.raises(errors.NotFound):
        fb.get_media("0" * 64)


def test_a_segment_names_columns_that_are_uploaded(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, {"columns": {"routing": {"dtype": "u8", "shape": [2], "retention": "ack", "required": True}}})
    column = fb.upload_column(bytes(range(4)))
    assert column.bytes == 4
    assert fb.put_column(column.digest, bytes(range(4))) == column
    with pytest.raises(errors.Invalid, match="routing"):
        fb.post(trajectory(policy))
    image = fb.upload(b"image" * 100)
    segment = forebay.Segment(
        tokens=[1, 2, 3], loss_mask=[1, 1], columns={"routing": column}, media=[[0, 1, image.digest, "image"]]
    )
    fb.post(trajectory(policy, segments=[segment]))
    batch_id, lease = leased(fb, policy)
    (row,) = fb.samples(batch_id, columns=["routing"])
    assert (row.columns, row.media) == ({"routing": column}, [[0, 1, image.digest, "image"]])
    assert fb.samples(batch_id)[0].columns == {}
    (page,) = forebay.Batch(fb, fb.get_batch(batch_id)).columns(columns=["routing"], inner=(1, 2))
    routing = page.uploaded["routing"]
    assert (routing.dtype, routing.shape, routing.lengths) == ("u8", (1,), [2])
    assert routing.values.to_pylist() == [1, 3]
    fb.ack(batch_id, lease=lease, step=1)


def test_a_bundle_is_stored_whole_or_not_at_all(fb: forebay.Client, policy: str) -> None:
    good, bad = trajectory(policy, group_size=2, group_id="g"), trajectory(policy, segments=[])
    with pytest.raises(errors.Invalid) as refused:
        fb.post([good, bad])
    assert all(violation.pointer.startswith("/1/") for violation in refused.value.violations)
    assert list(fb.list_trajectories(policy)) == []
    receipts = fb.post([good, trajectory(policy, group_size=2, group_id="g")])
    assert [receipt.group.state for receipt in receipts] == ["open", "ready"]
    assert receipts[0].execution_id == receipts[1].execution_id


def test_a_repeated_post_is_a_duplicate_and_another_one_with_its_id_a_conflict(fb: forebay.Client, policy: str) -> None:
    rollout = trajectory(policy)
    assert [fb.post(rollout).duplicate, fb.post(rollout).duplicate] == [False, True]
    rollout.reward = 2.0
    with pytest.raises(errors.RolloutConflict) as refused:
        fb.post(rollout)
    assert refused.value.verdict == "kept"


def test_many_posts_are_answered_one_by_one(fb: forebay.Client, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.client.BULK_LINES", 4)
    given = [trajectory(policy, rollout_id=f"r{number}") for number in range(10)]
    given[6].reward = None
    given[7].segments = [forebay.Segment(tokens=[1], loss_mask=[1, 1])]
    lines = list(fb.post_many(iter(given)))
    assert [line.line for line in lines] == list(range(1, 11))
    assert [line.status for line in lines] == [201] * 7 + [422] + [201] * 2
    assert lines[6].receipt is not None and lines[6].receipt.verdict == "dropped"
    problem = lines[7].problem
    assert problem is not None and problem.errors[0].pointer == "/segments/0/tokens"


def test_a_value_that_is_not_json_is_refused_before_anything_is_sent(fb: forebay.Client, policy: str) -> None:
    received = fb.stats().policies[policy].received
    broken = trajectory(policy, segments=[forebay.Segment(tokens=[1, 2], loss_mask=[1], logprobs=[float("nan")])])
    for post in (lambda: fb.post(broken), lambda: fb.post([trajectory(policy), broken])):
        with pytest.raises(errors.NotEncodableError, match="/segments/0/logprobs/0: is nan"):
            post()
    assert fb.stats().policies[policy].received == received


def test_lists_are_read_page_by_page(fb: forebay.Client, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.client.PAGE", 3)
    ids = [f"r{number}" for number in range(8)]
    list(fb.post_many(trajectory(policy, rollout_id=rollout, environment="e") for rollout in ids))
    assert [story.rollout_id for story in fb.list_trajectories(policy)] == ids
    assert [group.group_id for group in fb.list_groups(policy, state="ready")] == ids
    assert fb.get_trajectory(policy, "unknown") is None


def test_every_list_can_be_read(server: forebay.Server, fb: forebay.Client, policy: str) -> None:
    """The service refuses a page that is larger than it allows, and not every list allows the same."""
    names = [name for name in dir(fb) if name.startswith("list_") and name != "list_session_turns"]
    assert len(names) == 9
    read = {name: list(getattr(fb, name)()) for name in names}

    async def again() -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        async with forebay.AsyncClient(server.url) as client:
            for name in names:
                found[name] = [entry async for entry in getattr(client, name)()]
        return found

    for found in (read, asyncio.run(again())):
        assert "default" in {entry.policy for entry in found["list_overview"]}
        assert policy in {entry.policy for entry in found["list_policies"]}


def test_a_series_has_what_happened_to_a_policy(fb: forebay.Client, policy: str) -> None:
    fb.post(trajectory(policy))
    series = fb.get_series(policy, metrics=["kept", "ready_groups"])
    assert (set(series.metrics), series.step_s, len(series.at)) == ({"kept", "ready_groups"}, 60, 60)
    series = fb.get_series(
        policy, metrics=["kept"], from_="2026-01-01T00:00:00Z", to="2026-01-02T00:00:00Z", step_s=86_400
    )
    assert (series.step_s, len(series.at)) == (86_400, 1)


def test_groups_are_closed_and_discarded(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, PolicyRules(group=GroupRules(size=4, min_size=1)))
    for group in ("a", "b"):
        fb.post(trajectory(policy, group_id=group))
    assert fb.close_group(policy, "a").state == "ready"
    discarded = fb.discard_group(policy, "b", reason="not wanted")
    assert (discarded.state, discarded.reason) == ("discarded", "not wanted")
    with pytest.raises(errors.GroupDecided):
        fb.close_group(policy, "b")


def test_admissions_wait_for_room(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, PolicyRules(staleness=StalenessRules(max=0)))
    assert fb.admit(policy, rollouts=8).granted == 1
    assert fb.admit(policy, rollouts=8, wait_s=0).granted == 0
    fb.patch_policy(policy, {"staleness": None})
    assert fb.admit(policy, rollouts=8).granted == 8


def test_missing_places_of_a_group_get_room(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, PolicyRules(group=GroupRules(size=2), staleness=StalenessRules(max=0)))
    for _ in range(2):
        assert fb.admit(policy, rollouts=2, group_id="a").granted == 2
    refused = fb.admit(policy, rollouts=2, group_id="b", environment="math", wait_s=0)
    assert (refused.granted, "staleness.max" in (refused.reason or "")) == (0, True)


def test_a_rollout_waits_while_the_backlog_is_full(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, {"backlog": {"max_ready_rollouts": 1}})
    fb.post(trajectory(policy))
    with pytest.raises(errors.BacklogFull) as refused:
        fb.with_options(retry=Retry.none()).post(trajectory(policy))
    assert refused.value.retry_after_s is not None
    posted: list[Any] = []
    thread = threading.Thread(target=lambda: posted.append(fb.post(trajectory(policy))))
    thread.start()
    batch_id, lease = leased(fb, policy)
    fb.ack(batch_id, lease=lease, step=1)
    thread.join(60)
    assert posted[0].verdict == "kept"


# Trainers.


def test_a_lease_is_extended_given_back_and_delivered_again(fb: forebay.Client, policy: str) -> None:
    fb.post(trajectory(policy, group_id="g"))
    batch_id, lease = leased(fb, policy)
    assert (fb.extend(batch_id, lease=lease, ttl_s=5_000).expires_in_ms or 0) > 4_000_000
    assert fb.nack(batch_id, lease=lease, reason="out of memory").state == "returned"
    with pytest.raises(errors.LeaseLost):
        fb.ack(batch_id, lease=lease, step=1)
    again = fb.lease(policy)
    assert again is not None and (again.batch_id, again.attempt) == (batch_id, 2)
    assert again.lease is not None
    assert fb.nack(batch_id, lease=again.lease, groups=["g"]).state == "split"
    assert fb.readmit(batch_id).batch_id == batch_id
    assert [batch.state for batch in fb.list_batches(policy)] == ["split"]


def test_no_batch_is_no_error(fb: forebay.Client, policy: str) -> None:
    assert fb.lease(policy, wait_ms=1) is None
    assert fb.get_batch(str(uuid.uuid4())) is None


def test_the_lineage_of_the_weights(fb: forebay.Client, policy: str) -> None:
    epoch = fb.resume(policy, step=None).epoch
    fb.post(trajectory(policy))
    batch_id, lease = leased(fb, policy, epoch=epoch)
    fb.ack(batch_id, lease=lease, step=1, epoch=epoch)
    assert fb.publish(policy, 3, step=1, uri="file:///w3", epoch=epoch).version == 3
    assert fb.checkpoint(policy, step=1, epoch=epoch).settled_batches == 1
    assert fb.resume(policy, step=1).epoch == epoch + 1
    with pytest.raises(errors.Superseded):
        fb.publish(policy, 4, step=1, epoch=epoch)
    with pytest.raises(errors.StepUnknown):
        fb.resume(policy, step=7)
    with pytest.raises(errors.VersionConflict):
        fb.publish(policy, 2)
    assert fb.reset(policy).run == 2
    status = fb.get_policy(policy)
    assert status is not None and (status.version, status.run) == (0, 2)


def test_shards_are_the_batch(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, PolicyRules(batch=BatchRules(groups=5)))
    fb.post([trajectory(policy) for _ in range(5)])
    batch_id, _ = leased(fb, policy)
    rows = [row for shard in range(2) for row in fb.samples(batch_id, shard=shard, shards=2)]
    assert sorted(row.rollout_id for row in rows) == sorted(row.rollout_id for row in fb.samples(batch_id))
    batch = fb.get_batch(batch_id, shards=2)
    assert batch is not None and batch.shards is not None and sum(part.samples for part in batch.shards) == 5


@pytest.mark.parametrize("tokens", [3, 60_000])
def test_truth_values_float_masks_and_missing_log_probabilities_are_taken(
    fb: forebay.Client, policy: str, tokens: int
) -> None:
    mask: Any = [1.0] * (tokens - 2) + [0.0]
    logprobs = [-0.5] * (tokens - 2) + [None]
    segment = forebay.Segment(tokens=[1] * tokens, loss_mask=mask, logprobs=logprobs)
    assert fb.post(trajectory(policy, reward=True, segments=[segment])).verdict == "kept"
    (row,) = fb.samples(leased(fb, policy)[0])
    assert row.loss_mask is not None and row.logprobs is not None
    assert (row.reward, row.loss_mask[-2:], row.logprobs[-2:]) == (1.0, [1, 0], [-0.5, 0.0])


# Operators.


def test_rules_are_replaced_and_changed(fb: forebay.Client, policy: str) -> None:
    rules = PolicyRules(group=GroupRules(size=8, min_size=2), advantage="rloo")
    assert fb.put_policy(policy, rules).rules == rules
    assert fb.patch_policy(policy, {"group": {"size": 4}}).rules.group == GroupRules(size=4, min_size=2)
    assert policy in [found.policy for found in fb.list_policies()]
    assert fb.get_policy("unknown-" + policy) is None
    with pytest.raises(errors.UnknownPolicy):
        fb.version("unknown-" + policy)


def test_keys_are_created_used_and_revoked(own_server: forebay.Server) -> None:
    fb = own_server.client()
    admin = fb.create_key("operator", "admin")
    with pytest.raises(errors.Unauthorized):
        fb.stats()
    fb = own_server.client(admin.key)
    agent = fb.create_key("agent", "produce", policies=["default"], expires_in_s=60)
    with pytest.raises(errors.Forbidden):
        own_server.client(agent.key).lease()
    assert own_server.client(agent.key).post(trajectory("default")).verdict == "kept"
    assert [key.name for key in fb.list_keys()] == ["operator", "agent"]
    revoked = fb.revoke_key(agent.info.key_id)
    assert revoked is not None and revoked.revoked_at is not None
    assert fb.revoke_key(str(uuid.uuid4())) is None


def test_the_service_describes_itself(fb: forebay.Client) -> None:
    assert fb.health().version == forebay.__version__
    assert fb.is_ready()
    assert fb.stats().conserved
    assert "forebay_" in fb.metrics()
    assert fb.openapi()["info"]["version"] == forebay.__version__


def test_sessions_need_a_listener(fb: forebay.Client, policy: str) -> None:
    with pytest.raises(errors.NoUpstream):
        fb.with_options(retry=Retry.none()).open_session(policy)
    assert list(fb.list_sessions(policy)) == []
    assert fb.get_session(str(uuid.uuid4())) is None


# Large posts.


def large(policy: str, tokens: int = _bodies.ARROW_TOKENS_MIN) -> forebay.Trajectory:
    chance = random.Random(tokens)
    return trajectory(
        policy,
        rollout_id="large",
        group_id="g",
        environment="e",
        status="truncated",
        policy_version=0,
        reward_components={"a": 0.25},
        sampling=forebay.types.Sampling(temperature=0.7, top_k=50),
        metadata={"a": [1, {"b": "ü"}]},
        messages=[{"role": "user", "content": "hi"}],
        segments=[
            forebay.Segment(
                kind=kind,
                tokens=[chance.randrange(150_000) for _ in range(tokens)],
                loss_mask=[chance.randrange(2) for _ in range(tokens - 1)],
                logprobs=[-chance.random() * 9 for _ in range(tokens - 1)],
                versions=[[0, 0, tokens - 1]] if kind == "final" else None,
            )
            for kind in ("turn", "final")
        ],
    )


def sent(fb: forebay.Client, monkeypatch: pytest.MonkeyPatch) -> list[_http.Call]:
    """Notes the calls that the client sends."""
    calls: list[_http.Call] = []
    send = _http.Transport.send

    def noted(self: _http.Transport, call: _http.Call, **how: Any) -> _http.Answer:
        calls.append(call)
        return send(self, call, **how)

    monkeypatch.setattr(_http.Transport, "send", noted)
    return calls


@pytest.mark.parametrize("compression", ["none", "zstd", "gzip"])
def test_a_large_post_as_arrow_is_the_same_as_its_json(
    server: forebay.Server, policy: str, compression: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fb = forebay.Client(server.url, compression=compression, check_version=False)
    calls = sent(fb, monkeypatch)
    assert not fb.post(large(policy)).duplicate
    monkeypatch.setattr(_bodies, "ARROW_TOKENS_MIN", 10**9)
    assert fb.post(large(policy)).duplicate
    assert [call.media for call in calls] == [_http.ARROW, _http.JSON]
    assert {call.encoding for call in calls} == {None if compression == "none" else compression}
    batch_id, _ = leased(fb, policy)
    row = fb.samples(batch_id)[1]
    assert (row.tokens, row.versions, row.kind) == (large(policy).segments[1].tokens, [[0, 0, 49_999]], "final")


def test_a_large_bundle_is_sent_as_arrow(fb: forebay.Client, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = sent(fb, monkeypatch)
    bundle = [large(policy, 30_000), trajectory(policy), {"policy": policy, "status": "failed"}]
    receipts = fb.post(bundle)
    assert [receipt.verdict for receipt in receipts] == ["kept", "kept", "dropped"]
    assert [call.media for call in calls] == [_http.ARROW]


def test_a_large_post_that_is_refused_names_the_places_as_json_does(fb: forebay.Client, policy: str) -> None:
    wrong = large(policy)
    assert wrong.segments is not None
    wrong.segments[1].loss_mask[7] = 2
    wrong.segments[0].kind = ""
    with pytest.raises(errors.Invalid) as refused:
        fb.post(wrong)
    places = [violation.pointer for violation in refused.value.violations]
    assert places == ["/segments/0/kind", "/segments/1/loss_mask/7"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.segments[0].logprobs.__setitem__(3, float("nan")), errors.NotEncodableError),
        (lambda t: t.segments[0].tokens.__setitem__(3, 1.5), errors.Invalid),
        (lambda t: t.segments[0].tokens.__setitem__(3, 2**40), errors.Invalid),
        (lambda t: setattr(t, "metadata", {"a": {1}}), errors.NotEncodableError),
    ],
)
def test_what_arrow_cannot_say_is_refused_as_json(
    fb: forebay.Client, policy: str, change: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = sent(fb, monkeypatch)
    wrong = large(policy)
    change(wrong)
    with pytest.raises(expected) as refused:
        fb.post(wrong)
    assert refused.value.violations[0].pointer.startswith(("/segments/0/", "/metadata/a"))
    assert _http.ARROW not in [call.media for call in calls]


def test_two_rollouts_with_one_id_are_not_joined(fb: forebay.Client, policy: str) -> None:
    assert [receipt.duplicate for receipt in fb.post([large(policy), large(policy)])] == [False, True]
    batch_id, _ = leased(fb, policy)
    assert [row.segments for row in fb.samples(batch_id)] == [2, 2]


# Crashes.


def test_a_call_survives_a_restart_of_the_service(tmp_path: Path) -> None:
    database, listen = f"sqlite:{tmp_path / 'forebay.db'}", "127.0.0.1:0"
    with forebay.Server(database=database) as first:
        fb = forebay.Client(first.url, check_version=False)
        rollout = trajectory("default")
        fb.post(rollout)
        listen = first.url.removeprefix("http://")
        first.kill()
    posted: list[Any] = []
    thread = threading.Thread(target=lambda: posted.append(fb.post(rollout)))
    thread.start()
    with forebay.Server(database=database, listen=listen):
        thread.join(60)
        assert posted[0].duplicate
        batch = fb.lease(wait_ms=10_000)
        assert batch is not None and batch.rollouts == 1


def test_a_stopped_client_does_not_hold_a_batch_that_it_never_received(fb: forebay.Client, policy: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            fb.lease(policy, wait_ms=60_000)
        finally:
            os._exit(0)
    # The child waits for a batch when the service counts it.
    while waiting(fb) == 0:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while waiting(fb) > 0:
        time.sleep(0.01)
    fb.post(trajectory(policy))
    batch = fb.lease(policy, wait_ms=10_000)
    assert batch is not None and batch.attempt == 1


def waiting(fb: forebay.Client) -> int:
    """The number of requests that wait for a batch."""
    for line in fb.metrics().splitlines():
        if line.startswith("forebay_waiters "):
            return int(float(line.split()[-1]))
    raise AssertionError("the service does not count its waiters")


# The asynchronous client.


def test_the_asynchronous_client_makes_the_same_calls(server: forebay.Server, policy: str) -> None:
    async def main() -> None:
        async with forebay.AsyncClient(server.url) as fb:
            await fb.put_policy(policy, {"group": {"size": 2}})
            await fb.post([trajectory(policy, group_id="a"), trajectory(policy, group_id="a")])
            many = (trajectory(policy, group_id="b") for _ in range(2))
            assert [line.status async for line in fb.post_many(many)] == [201, 201]
            assert len([story async for story in fb.list_trajectories(policy)]) == 4
            exported = [exported.trajectory.group_id async for exported in fb.export(policy)]
            assert exported == ["a", "a", "b", "b"]
            assert [one.trajectory.group_id for one in fb.sync.export(policy)] == exported
            batch = await fb.lease(policy, wait_ms=10_000)
            assert batch is not None and batch.lease is not None
            assert len(await fb.samples(batch.batch_id)) == 2
            assert (await fb.ack(batch.batch_id, lease=batch.lease, step=1)).state == "trained"
            with pytest.raises(errors.UnknownPolicy):
                await fb.version("unknown-" + policy)

    asyncio.run(main())
