"""Following the versions of a policy: one long poll per process, whoever follows."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub import HANG, Stub, answer, problem
from support import client_of

import forebay
from forebay import errors, versions
from forebay.types import Version


class Follower:
    """A thread that puts what it follows into a queue."""

    def __init__(self, fb: forebay.Client, policy: str) -> None:
        self.seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, args=(fb, policy))
        self._thread.start()

    def _follow(self, fb: forebay.Client, policy: str) -> None:
        try:
            for version in fb.versions(policy):
                self.seen.put((version.version, version.uri))
        except errors.ForebayError as error:
            self.seen.put(error)

    def next(self) -> Any:
        return self.seen.get(timeout=30)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def all_polls_end() -> Iterator[None]:
    yield
    assert not versions._watchers


def test_followers_see_every_publication_and_a_resume(fb: forebay.Client, policy: str) -> None:
    fb.publish(policy, 3, step=1, uri="file:///w3")
    own = fb.copy()
    follower = Follower(own, policy)
    assert follower.next() == (3, "file:///w3")
    fb.publish(policy, 4, step=2, uri="file:///w4")
    assert follower.next() == (4, "file:///w4")
    fb.resume(policy, step=1)
    assert follower.next() == (3, "file:///w3")
    fb.resume(policy, step=None, force=True)
    assert follower.next() == (0, None)
    own.close()
    assert isinstance(follower.next(), errors.Cancelled)
    follower.join()


def test_nothing_is_yielded_before_the_first_publication(fb: forebay.Client, policy: str) -> None:
    own = fb.copy()
    follower = Follower(own, policy)
    fb.publish(policy, 1)
    assert follower.next() == (1, None)
    own.close()
    follower.join()


def status(version: int, policy: str = "p") -> dict[str, Any]:
    empty: dict[str, Any] = {}
    waiting = {
        "ready_groups": 0, "needed_groups": 1, "returned_batches": 0, "open_groups": 0, "fullest": [],
        "dropped_last_hour": {}, "stale_last_hour": 0,
    }  # fmt: skip
    return {
        "policy": policy, "rules": {}, "run": 1, "epoch": 0, "version": version, "rollouts": empty, "groups": empty,
        "batches": empty, "waiting": waiting,
    }  # fmt: skip


def test_all_followers_of_a_process_share_one_poll(stub: Any) -> None:
    server: Stub = stub(answer(200, status(5)), HANG)
    fb = client_of(server)

    async def followed() -> list[int]:
        clients = [forebay.AsyncClient(server.url, check_version=False, retry=fb.config.retry) for _ in range(20)]

        async def first(client: forebay.AsyncClient) -> int:
            async for version in client.versions("p"):
                return version.version
            raise AssertionError

        found = await asyncio.gather(*(first(client) for client in clients))
        return found

    threads = [Follower(fb, "p") for _ in range(20)]
    assert [follower.next() for follower in threads] == [(5, None)] * 20
    assert asyncio.run(followed()) == [5] * 20
    assert fb.version("p") == Version(policy="p", version=5, step=None, uri=None)
    server.arrived.get(timeout=10)
    server.arrived.get(timeout=10)
    assert [request.split(" ")[1] for request in server.requests] == [
        "/policies/p",
        "/policies/p?wait_version_above=5&wait_ms=30000",
    ]
    fb.close()
    for follower in threads:
        assert isinstance(follower.next(), errors.Cancelled)
        follower.join()
    # The poll ends with the last follower.
    assert server.closed_by_client.get(timeout=10)


def test_a_policy_that_does_not_exist_ends_the_iteration(fb: forebay.Client) -> None:
    with pytest.raises(errors.UnknownPolicy):
        next(fb.versions("there-is-no-such-policy"))


def test_a_key_that_is_refused_ends_the_iteration(stub: Any) -> None:
    with pytest.raises(errors.Unauthorized):
        next(client_of(stub(problem(401, "unauthorized"))).versions("p"))


def test_following_goes_on_after_a_restart_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PAUSE_MAX_S", 0.05)
    database = f"sqlite:{tmp_path / 'forebay.db'}"
    with forebay.Server(database=database) as first:
        fb = forebay.Client(first.url, check_version=False, retry=forebay.types.Retry.none())
        fb.publish("default", 1)
        follower = Follower(fb, "default")
        assert follower.next() == (1, None)
        listen = first.url.removeprefix("http://")
        first.kill()
    with forebay.Server(database=database, listen=listen):
        fb.with_options(retry=forebay.types.Retry()).publish("default", 2)
        assert follower.next() == (2, None)
        # Before the service ends, so that the poll does not fail.
        fb.close()
        follower.join()


def test_an_asynchronous_follower_ends_with_its_task(server: forebay.Server, policy: str) -> None:
    async def main() -> None:
        async with forebay.AsyncClient(server.url) as fb:
            await fb.publish(policy, 1)
            seen: asyncio.Queue[int] = asyncio.Queue()

            async def follow() -> None:
                async for version in fb.versions(policy):
                    await seen.put(version.version)

            task = asyncio.create_task(follow())
            assert await asyncio.wait_for(seen.get(), 30) == 1
            await fb.publish(policy, 2)
            assert await asyncio.wait_for(seen.get(), 30) == 2
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_an_asynchronous_follower_ends_with_its_client(server: forebay.Server, policy: str) -> None:
    async def main() -> None:
        fb = forebay.AsyncClient(server.url)
        await fb.publish(policy, 1)
        iterator = fb.versions(policy)
        assert (await anext(iterator)).version == 1
        waiting = asyncio.ensure_future(anext(iterator))
        await asyncio.sleep(0)
        await fb.close()
        with pytest.raises(errors.Cancelled):
            await waiting

    asyncio.run(main())
