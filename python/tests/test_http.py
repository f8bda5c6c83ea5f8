"""Repeats, connections, forks and cancellation, against a server that does what a real one rarely does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from stub import BREAK, HANG, Stub, answer, problem
from support import NO_PAUSES, client_of

import forebay
from forebay import _http, _retry, aio, errors
from forebay._retry import Effect
from forebay.types import Retry

Stubs = Callable[..., Stub]

HEALTH = answer(200, {"status": "ok", "version": "0.1.0"})
STATS = answer(200, {"policies": {}, "conserved": True})
RECEIPT = answer(
    201,
    {
        "policy": "p",
        "rollout_id": "r",
        "group_id": "g",
        "execution_id": "x",
        "verdict": "kept",
        "duplicate": False,
        "warnings": [],
        "group": {"state": "open", "arrived": 1, "size": 2},
    },
)
ADMISSION = {"admission_id": "a", "granted": 8, "policy_version": 0, "expires_in_ms": 1}


# The rule: the cases are those of the Rust client's tests.


def test_back_off_doubles_up_to_its_bound() -> None:
    longest = [round(Retry().pause_s(attempts, None, 1.0) * 1000) for attempts in (1, 2, 3, 6, 7, 1_000)]
    assert longest == [100, 200, 400, 3_200, 5_000, 5_000]


def test_pauses_are_random_from_zero_up_and_never_shorter_than_the_service_asked_for() -> None:
    assert Retry().pause_s(3, None, 0.0) == 0.0
    assert Retry().pause_s(3, None, 0.5) == 0.2
    assert Retry().pause_s(1, 7.0, 0.0) == 7.0
    assert Retry().pause_s(1, 7.0, 0.9) > 7.0


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (429, "backlog-full", Effect.NOT_BEGUN),
        (429, None, Effect.NOT_BEGUN),
        (503, "overloaded", Effect.NOT_BEGUN),
        (503, "too-many-waiters", Effect.NOT_BEGUN),
        (503, "stopping", Effect.NOT_BEGUN),
        (503, "store-unavailable", Effect.UNKNOWN),
        (503, None, Effect.UNKNOWN),
        (502, None, Effect.UNKNOWN),
        (504, None, Effect.UNKNOWN),
        (500, "internal", Effect.FINAL),
        (409, "lease-lost", Effect.FINAL),
        (408, "body-timeout", Effect.NOT_BEGUN),
    ],
)
def test_what_an_answer_says_about_the_call(status: int, kind: str | None, expected: Effect) -> None:
    assert _retry.effect(status, kind) is expected


def test_retry_after_is_in_seconds_or_a_date_of_the_services_clock() -> None:
    date = {"Retry-After": "Sun, 22 Nov 2026 10:00:07 GMT", "Date": "Sun, 22 Nov 2026 10:00:00 GMT"}
    assert _retry.retry_after_s(503, {"Retry-After": "5"}) == 5.0
    assert _retry.retry_after_s(429, date) == 7.0
    assert _retry.retry_after_s(429, {"Retry-After": "Sun, 22 Nov 2020 10:00:00 GMT"}) == 0.0
    assert _retry.retry_after_s(429, {"Retry-After": "soon"}) is None
    assert _retry.retry_after_s(500, {"Retry-After": "5"}) is None


@pytest.mark.parametrize(
    "asked",
    ["\u00b2", "\u0667", "1.5", "-1", "", "Mon, 99999999999999999999 Nov 2026 10:00:00 GMT", "1 Jan 99999 0:0:0"],
)
def test_a_retry_after_that_is_neither_a_number_nor_a_date_is_ignored(asked: str) -> None:
    assert _retry.retry_after_s(503, {"Retry-After": asked}) is None


@pytest.mark.parametrize("asked", ["9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT", "Fri, 31 Dec 9999 23:59:59 -1200"])
def test_a_wait_of_centuries_is_not_obeyed(stub: Stubs, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    server = stub(problem(503, "overloaded", Retry_After=asked))
    assert count(server, client_of(server).stats) == 1
    none = answer(200, {**ADMISSION, "granted": 0}, Retry_After=asked)
    agent = client_of(stub(none, answer(201, ADMISSION)))
    pauses: list[float] = []
    monkeypatch.setattr(agent._transport, "pause", lambda _call, seconds: pauses.append(seconds))  # pyright: ignore[reportPrivateUsage]
    assert agent.admit("p", rollouts=8).granted == 8
    assert len(pauses) == 1 and pauses[0] <= _retry.ASKED_MAX_S


def count(stub: Stub, call: Callable[[], Any]) -> int:
    """The number of requests that a call makes before it ends."""
    with contextlib.suppress(errors.ForebayError):
        call()
    return len(stub.requests)


UNKNOWN = [BREAK, problem(503, "store-unavailable"), answer(502, "bad gateway", media="text/html"), answer(504)]
CERTAIN = [problem(503, "overloaded"), problem(503, "stopping"), problem(429, "backlog-full")]
FINAL = [problem(409, "lease-lost"), problem(500, "internal"), answer(200, "not json"), answer(200, {"x": 1})]


@pytest.mark.parametrize("failure", [*UNKNOWN, *CERTAIN])
def test_calls_that_may_be_repeated_are_until_they_succeed(stub: Stubs, failure: Any) -> None:
    for call in (
        lambda fb: fb.stats(),
        lambda fb: fb.lease("p", request_id="r"),
        lambda fb: fb.ack("b", lease="k", step=1),
        lambda fb: fb.post({"reward": 1.0}),
        lambda fb: fb.score("r", "judge", 1.0),
        lambda fb: fb.score_all([{"rollout_id": "r", "name": "judge", "value": 1.0}]),
        lambda fb: fb.lease_scores(["judge"], request_id="r"),
        lambda fb: fb.extend_scores(["k"]),
        lambda fb: fb.put_suite("p", "s", tasks=2),
        lambda fb: fb.wait_evals("p", "s", 1),
    ):
        server = stub(failure, failure, problem(404, "not-found"))
        assert count(server, lambda call=call, server=server: call(client_of(server))) == 3


@pytest.mark.parametrize(("failure", "requests"), [*((case, 1) for case in UNKNOWN), *((case, 3) for case in CERTAIN)])
def test_other_calls_are_repeated_only_if_the_service_did_not_begin_them(
    stub: Stubs, failure: Any, requests: int
) -> None:
    for call in (
        lambda fb: fb.lease("p"),
        lambda fb: fb.nack("b", lease="k"),
        lambda fb: fb.admit("p", rollouts=1),
        lambda fb: fb.reset("p"),
        lambda fb: fb.resume("p", step=None, epoch=1),
        lambda fb: fb.create_key("n", "read"),
        lambda fb: fb.close_group("p", "g"),
        lambda fb: fb.discard_group("p", "g", reason="r"),
        lambda fb: fb.readmit("b"),
        lambda fb: fb.lease_scores(["judge"]),
        lambda fb: fb.retry_scores("judge"),
    ):
        server = stub(failure, failure, problem(404, "not-found"))
        assert count(server, lambda call=call, server=server: call(client_of(server))) == requests


@pytest.mark.parametrize("failure", FINAL)
def test_final_answers_are_not_asked_for_again(stub: Stubs, failure: Any) -> None:
    server = stub(failure)
    assert count(server, lambda: client_of(server).stats()) == 1


def test_attempts_are_bounded(stub: Stubs) -> None:
    server = stub(problem(503, "overloaded"))
    fb = client_of(server, retry=Retry(attempts_max=4, first_pause_s=0.0))
    assert count(server, fb.stats) == 4


def test_a_pause_that_would_be_too_long_is_not_waited_for(stub: Stubs) -> None:
    server = stub(problem(503, "overloaded", Retry_After="61"))
    assert count(server, lambda: client_of(server).stats()) == 1
    backlog = stub(problem(429, "backlog-full", Retry_After="601"))
    with pytest.raises(errors.BacklogFull):
        client_of(backlog).post({"reward": 1.0})
    assert len(backlog.requests) == 1


def test_a_finished_rollout_waits_for_the_backlog_longer_than_for_failures(stub: Stubs) -> None:
    server = stub(*[problem(429, "backlog-full")] * 30, RECEIPT)
    assert client_of(server, retry=Retry(attempts_max=2, first_pause_s=0.0)).post({"reward": 1.0}).verdict == "kept"
    assert len(server.requests) == 31


def test_an_admission_is_asked_for_until_there_is_room(stub: Stubs) -> None:
    none = answer(200, {**ADMISSION, "granted": 0}, Retry_After="0")
    assert client_of(stub(none, none, answer(201, ADMISSION))).admit("p", rollouts=8).granted == 8
    once = stub(none)
    assert client_of(once).admit("p", rollouts=8, wait_s=0).granted == 0
    assert len(once.requests) == 1


def test_a_wait_for_room_is_told_after_a_few_seconds_and_then_every_minute(
    stub: Stubs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    none = answer(200, {**ADMISSION, "granted": 0, "reason": "nobody trains"}, Retry_After="4")
    agent = client_of(stub(*[none] * 40, answer(201, ADMISSION)))
    monkeypatch.setattr(agent._transport, "pause", lambda _call, _seconds: None)  # pyright: ignore[reportPrivateUsage]
    assert agent.admit("p", rollouts=8).granted == 8
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    # 40 pauses of 2 to 4 s each.
    assert 2 <= len(told) <= 3
    assert all(text.startswith("8 rollouts of p wait for room, ") and "nobody trains" in text for text in told)
    caplog.clear()
    monkeypatch.setattr(_http.Cancellation, "pause", lambda _self, _seconds: False)
    client_of(stub(*[problem(429, "no-room", Retry_After="3")] * 5, RECEIPT)).post({"reward": 1.0})
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "waits for room" in told[0] and "no-room" in told[0]


def test_a_repeated_post_has_the_same_id(stub: Stubs) -> None:
    server = stub(BREAK, RECEIPT)
    client_of(server).post({"reward": 1.0})
    first, second = (json.loads(request.split("\r\n\r\n")[1]) for request in server.requests)
    assert first == second and first["rollout_id"]


def test_a_service_that_is_not_there_is_named(stub: Stubs) -> None:
    server = stub(STATS)
    server.close()
    with pytest.raises(errors.Unreachable, match="no connection to 127.0.0.1:.*refused") as failed:
        client_of(server).stats()
    assert failed.value.not_begun
    broken = client_of(stub(BREAK))
    with pytest.raises(errors.Unreachable, match="broke before its answer was complete") as failed:
        broken.stats()
    assert not failed.value.not_begun


# Answers that look whole and are not.


def test_an_answer_that_ends_early_is_no_answer(stub: Stubs) -> None:
    row = b'{"a":1}\n'
    short = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n" + row
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n8\r\n" + row + b"\r\n"
    for broken in (short, chunks):
        with pytest.raises(errors.Unreachable):
            client_of(stub(broken), retry=Retry.none()).samples("b")
    endless = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + row
    with pytest.raises(errors.UnexpectedAnswer, match="neither a content length nor chunks"):
        client_of(stub(endless)).samples("b")
    with pytest.raises(errors.UnexpectedAnswer, match="middle of a line"):
        client_of(stub(answer(200, '{"rollout_id"', media="application/x-ndjson"))).samples("b")
    with pytest.raises(errors.UnexpectedAnswer, match="line 1 .*Sample lacks"):
        client_of(stub(answer(200, "{}\n", media="application/x-ndjson"))).samples("b")
    with pytest.raises(errors.UnexpectedAnswer, match="1 answers, but expected 2"):
        client_of(stub(answer(200, "[" + RECEIPT.split(b"\r\n\r\n")[1].decode() + "]"))).post([{}, {}])


def test_an_answer_of_another_program_is_quoted(stub: Stubs) -> None:
    page = answer(403, "<h1>Forbidden by the proxy</h1>" + "x" * 1_000, media="text/html")
    with pytest.raises(errors.UnexpectedAnswer, match="status 403 .*Forbidden by the proxy") as failed:
        client_of(stub(page)).stats()
    assert len(str(failed.value)) < 500


# Requests.


def test_a_request_has_a_key_an_id_and_the_version_and_no_proxy_is_asked(
    stub: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, server = stub(STATS), stub(STATS)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    client_of(server, key="fb_k").stats()
    (request,) = server.requests
    assert not proxy.requests
    lines = request.lower().split("\r\n")
    assert "authorization: bearer fb_k" in lines
    assert f"user-agent: forebay-python/{forebay.__version__}" in lines
    assert any(line.startswith("x-request-id: ") for line in lines)


def test_connections_are_used_again_and_shared_by_clients_with_other_options(stub: Stubs) -> None:
    server = stub(STATS)
    fb = client_of(server)
    for client in (fb, fb, fb.with_options(timeout_s=1.0)):
        client.stats()
    assert (len(server.requests), server.connections) == (3, 1)


def test_a_body_does_not_wait_for_the_acknowledgement_of_its_head(stub: Stubs) -> None:
    # The head and the body of a request are written one after the other.
    fb = client_of(stub(STATS))
    fb.stats()
    connection: Any = fb._transport._connections()._get_conn()  # pyright: ignore[reportPrivateUsage]
    with contextlib.closing(connection):
        assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    encrypted: Any = _http._HttpsConnection("localhost")  # pyright: ignore[reportPrivateUsage]
    assert (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1) in encrypted.socket_options


def test_paths_and_queries_may_have_any_characters(stub: Stubs) -> None:
    server = stub(problem(404, "not-found"))
    fb = client_of(server)
    assert fb.get_batch("a/b?c#d é", shards=2) is None
    assert fb.get_trajectory("p", "x&y=z +") is None
    targets = [request.split(" ")[1] for request in server.requests]
    assert targets == [
        "/batches/a%2Fb%3Fc%23d%20%C3%A9?shards=2",
        "/trajectories?policy=p&rollout_id=x%26y%3Dz%20%2B",
    ]


def test_a_base_path_goes_before_every_path(stub: Stubs) -> None:
    server = stub(STATS)
    forebay.Client(server.url + "/base/", check_version=False).stats()
    assert server.requests[0].startswith("GET /base/stats ")


# Versions of client and service.


def test_a_service_of_another_version_is_warned_about_once(stub: Stubs) -> None:
    server = stub(STATS, answer(200, {"status": "ok", "version": "7.5.0"}), STATS)
    fb = forebay.Client(server.url, retry=NO_PAUSES)
    with pytest.warns(errors.VersionWarning, match=r"version 7\.5\.0"):
        fb.stats()
    fb.stats()
    assert [request.split(" ")[1] for request in server.requests] == ["/stats", "/healthz", "/stats"]


@pytest.mark.parametrize(
    ("client", "service", "is_warned"),
    [
        ("0.1.0", "0.2.9", False),
        ("0.3.0", "0.1.0", True),
        ("0.1.0", "0.3.0", True),
        ("1.0.0", "2.0.0", True),
        ("0.1.0", "0.1.0-dev", False),
        ("0.1.0", "unknown", False),
    ],
)
def test_minor_versions_may_differ_by_one(client: str, service: str, is_warned: bool) -> None:
    from forebay import _version

    assert (_version.mismatch(client, service) is not None) == is_warned


def test_a_service_that_does_not_tell_its_version_is_used_all_the_same(stub: Stubs) -> None:
    server = stub(STATS, answer(404, "no such page", media="text/html"), STATS)
    assert forebay.Client(server.url, retry=NO_PAUSES).stats().conserved


# Processes and threads.


def test_a_pickled_client_is_its_configuration(stub: Stubs) -> None:
    server = stub(STATS)
    fb = client_of(server, key="fb_k", compression="none")
    fb.stats()
    for again in (pickle.loads(pickle.dumps(fb)), pickle.loads(pickle.dumps(forebay.AsyncClient(server.url))).sync):
        assert again.stats().conserved
    assert pickle.loads(pickle.dumps(fb)).config == fb.config
    assert server.connections == 3


def test_a_forked_process_opens_its_own_connections(stub: Stubs) -> None:
    server = stub(STATS)
    fb = client_of(server)
    fb.stats()
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if fb.stats().conserved else 1))
    child.start()
    child.join()
    assert child.exitcode == 0
    fb.stats()
    assert (len(server.requests), server.connections) == (3, 2)


def test_a_forked_process_may_use_the_asynchronous_client_as_well(stub: Stubs) -> None:
    server = stub(STATS)
    fb = forebay.AsyncClient(server.url, check_version=False)
    asyncio.run(fb.stats())

    def child() -> None:
        os._exit(0 if asyncio.run(fb.stats()).conserved else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_threads_share_a_client(stub: Stubs) -> None:
    server = stub(STATS)
    fb = client_of(server)
    threads = [threading.Thread(target=lambda: [fb.stats() for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.requests) == 160
    assert server.connections <= 8


# Cancellation.


def test_a_client_that_is_closed_ends_the_calls_that_wait(stub: Stubs) -> None:
    server = stub(HANG)
    fb = client_of(server)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            fb.lease("p", wait_ms=60_000)
        except errors.ForebayError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    server.arrived.get(timeout=10)
    fb.close()
    thread.join(10)
    assert [type(error) for error in ended] == [errors.Cancelled]
    assert server.closed_by_client.get(timeout=10)


def test_a_cancelled_task_closes_its_connection_and_makes_no_further_attempt(stub: Stubs) -> None:
    server = stub(HANG)

    async def main() -> None:
        async with forebay.AsyncClient(server.url, check_version=False) as fb:
            task = asyncio.create_task(fb.lease("p", request_id="r", wait_ms=60_000))
            await asyncio.to_thread(server.arrived.get, timeout=10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(server.closed_by_client.get, timeout=10)

    asyncio.run(main())
    assert len(server.requests) == 1


EXPORTED = {
    "trajectory": {"policy": "p", "rollout_id": "r", "group_id": "g", "group_size": 1, "reward": 1.0},
    "result": {
        "run": 1,
        "verdict": "kept",
        "reason": None,
        "state": "ready",
        "advantage": None,
        "step": None,
        "policy_version": 0,
        "policy_version_assumed": True,
        "received_at": "2026-01-01T00:00:00Z",
    },
}


def chunks(*texts: str, **headers: str) -> bytes:
    """An answer in chunks, without its end."""
    head = answer(200, media="application/x-ndjson", **headers)
    head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return head + b"".join(f"{len(text):x}\r\n{text}\r\n".encode() for text in texts)


def test_an_export_is_yielded_while_it_arrives(stub: Stubs) -> None:
    line = json.dumps(EXPORTED) + "\n"
    # The end of the second line does not arrive.
    server = stub(chunks(line[:20], line[20:] + line[:-1]))
    fb = client_of(server)
    exported = fb.export()
    assert next(exported).trajectory.rollout_id == "r"
    fb.close()
    with pytest.raises(errors.Cancelled):
        next(exported)
    assert len(server.requests) == 1


def test_an_export_that_breaks_off_is_an_error_and_not_its_end(stub: Stubs) -> None:
    line = json.dumps(EXPORTED) + "\n"
    found = []
    with pytest.raises(errors.Unreachable):
        for rollout in client_of(stub(chunks(line, Connection="close"))).export():
            found.append(rollout)
    assert len(found) == 1
    cut = chunks(line, line[:-1]) + b"0\r\n\r\n"
    with pytest.raises(errors.UnexpectedAnswer, match="line 2"):
        list(client_of(stub(cut)).export())


def test_an_export_is_requested_again_until_its_answer_begins(stub: Stubs) -> None:
    line = json.dumps(EXPORTED) + "\n"
    server = stub(BREAK, problem(503, "overloaded"), chunks(line) + b"0\r\n\r\n")
    assert len(list(client_of(server).export())) == 1
    assert len(server.requests) == 3


def test_the_task_of_an_asynchronous_export_can_be_cancelled(stub: Stubs) -> None:
    line = json.dumps(EXPORTED) + "\n"
    server = stub(chunks(line * aio.ROLLOUTS_AT_ONCE))

    async def main() -> None:
        async with forebay.AsyncClient(server.url, check_version=False) as fb:
            arrived = asyncio.Event()

            async def read() -> None:
                async for _ in fb.export():
                    arrived.set()

            task = asyncio.create_task(read())
            await asyncio.wait_for(arrived.wait(), 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert len(server.requests) == 1


def test_a_pause_between_attempts_ends_with_the_task(stub: Stubs) -> None:
    server = stub(problem(503, "overloaded", Retry_After="50"))

    async def main() -> None:
        async with forebay.AsyncClient(server.url, check_version=False) as fb:
            task = asyncio.create_task(fb.stats())
            await asyncio.to_thread(server.arrived.get, timeout=10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(nothing_active(fb), 30)

    async def nothing_active(fb: forebay.AsyncClient) -> None:
        while fb.sync._transport._active:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert len(server.requests) == 1


def test_calls_at_the_same_time_do_not_wait_for_each_other(stub: Stubs) -> None:
    slow, fast = stub(HANG), stub(STATS)

    async def main() -> bool:
        waiting = forebay.AsyncClient(slow.url, check_version=False)
        polls = [asyncio.create_task(waiting.lease("p", wait_ms=60_000)) for _ in range(40)]
        for _ in polls:
            await asyncio.to_thread(slow.arrived.get, timeout=30)
        answered = (await forebay.AsyncClient(fast.url, check_version=False).stats()).conserved
        await waiting.close()
        assert {type(error) for error in await asyncio.gather(*polls, return_exceptions=True)} == {errors.Cancelled}
        return answered

    assert asyncio.run(main())
