"""The spool: what an agent has finished is posted once, whenever the service, the agent or both are killed."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._retry import ASKED_MAX_S
from forebay._spool import ENDING, LOCK, SERVICE, Spool, SpooledReceipt
from forebay._wire import Problem
from forebay.types import Retry

PATIENCE_S = 60.0
"""How long something may take that should happen at once."""

PACKAGE = str(Path(__file__).resolve().parents[1])


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that are closed do not try for long to reach a service that the test has killed."""
    monkeypatch.setattr("forebay._spool.CLOSE_S", 0.2)


class Service:
    """A service on a port and a database of its own, which a test kills and starts again."""

    def __init__(self, folder: Path) -> None:
        self.database = f"sqlite:{folder / 'forebay.db'}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: forebay.Server | None = None

    def start(self) -> None:
        self._server = forebay.Server(database=self.database, listen=f"127.0.0.1:{self.port}").start()

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None

    def elsewhere(self) -> forebay.Server:
        """The same database at another address, so that no spool posts to it."""
        return forebay.Server(database=self.database)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    service.start()
    yield service
    service.kill()


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def agent(service: Service, spool: Path) -> Iterator[forebay.Client]:
    """A client with a spool that gives up after the first attempt."""
    client = forebay.Client(service.url, spool=spool, retry=Retry.none())
    client.put_policy("p", {"require": ["tokens"]})
    client.get_policy("p")
    yield client
    client.close()


def trajectory(rollout_id: str, **fields: Any) -> forebay.Trajectory:
    segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1], logprobs=[-0.5, -0.25])
    given = {"policy": "p", "reward": 1.0, "segments": [segment], **fields}
    return forebay.Trajectory(rollout_id=rollout_id, **given)


def bodies(spool: Path) -> list[Any]:
    """What is in the spool, oldest first."""
    files = sorted(spool.glob("*/*.json.gz"), key=lambda file: file.name)
    return [json.loads(gzip.decompress(file.read_bytes())) for file in files if file.parent.name != "rejected"]


def spool_of(client: forebay.Client) -> Spool:
    assert client.spool is not None
    return client.spool


def test_a_post_survives_an_outage(service: Service, agent: forebay.Client, spool: Path) -> None:
    agent.publish("p", 3)
    agent.get_policy("p")
    service.kill()
    receipt = agent.post(trajectory("r1", group_id="g"))
    assert isinstance(receipt, SpooledReceipt) and receipt.spooled
    assert (receipt.rollout_id, receipt.verdict, receipt.group.state) == ("r1", "spooled", "spooled")
    (body,) = bodies(spool)
    assert (body["rollout_id"], body["policy_version"], body["group_size"]) == ("r1", 3, 1)
    with service.elsewhere() as server, server.client() as fb:
        fb.publish("p", 4)
    service.start()
    assert spool_of(agent).flush(PATIENCE_S)
    story = agent.get_trajectory("p", "r1")
    assert story is not None and (story.verdict, story.policy_version) == ("kept", 3)
    assert not story.policy_version_assumed
    assert (spool_of(agent).counts.spooled, spool_of(agent).counts.delivered) == (1, 1)
    agent.close()
    assert list(spool.iterdir()) == []


def test_a_post_that_is_not_spooled_has_the_version_too(agent: forebay.Client) -> None:
    agent.publish("p", 3)
    assert not agent.post(trajectory("r1")).spooled
    story = agent.get_trajectory("p", "r1")
    assert story is not None and (story.policy_version, story.policy_version_assumed) == (3, False)


def test_posts_arrive_in_the_order_in_which_they_were_made(service: Service, agent: forebay.Client) -> None:
    service.kill()
    names = [f"r{number}" for number in range(5)]
    for name in names:
        agent.post(trajectory(name))
    bundle = agent.post([trajectory("b1"), trajectory("b2")])
    assert [receipt.spooled for receipt in bundle] == [True, True]
    service.start()
    assert spool_of(agent).flush(PATIENCE_S)
    stories = list(agent.list_trajectories("p"))
    assert [story.rollout_id for story in stories] == [*names, "b1", "b2"]
    assert stories[-1].execution_id == stories[-2].execution_id


def test_a_recorded_rollout_is_spooled(service: Service, agent: forebay.Client) -> None:
    with agent.rollout("p") as r:
        choice = {"token_ids": [2], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}
        r.record({"prompt_token_ids": [1], "choices": [choice]})
        r.reward = 1.0
        service.kill()
    assert r.receipt.spooled
    service.start()
    assert spool_of(agent).flush(PATIENCE_S)
    story = agent.get_trajectory("p", r.rollout_id)
    assert story is not None and story.state == "ready"


def test_an_agent_goes_on_while_the_service_is_away(service: Service, agent: forebay.Client) -> None:
    with agent.rollout("p") as r:
        r.abort()
    service.kill()
    # A rollout that begins now has the version that was noted, which is the older one if there is another by now.
    with agent.rollout("p") as r:
        r.abort()
    assert r.policy_version == 0 and r.receipt.spooled
    with pytest.raises(errors.Unreachable), agent.rollout("of which nothing is known"):
        pass
    service.start()
    assert spool_of(agent).flush(PATIENCE_S)


def test_the_asynchronous_client_has_a_spool(service: Service, agent: forebay.Client, tmp_path: Path) -> None:
    async def main() -> bool:
        async with forebay.AsyncClient(service.url, spool=tmp_path / "other", retry=Retry.none()) as fb:
            service.kill()
            return (await fb.post(trajectory("r1", policy_version=0))).spooled

    assert asyncio.run(main())
    assert len(bodies(tmp_path / "other")) == 1


def test_an_unknown_version_is_not_made_up(service: Service, spool: Path) -> None:
    service.kill()
    with forebay.Client(service.url, spool=spool, retry=Retry.none()) as fb:
        with pytest.raises(errors.SpoolError, match="policy_version is not known") as refused:
            fb.post(trajectory("r1"))
        assert isinstance(refused.value.__cause__, errors.Unreachable)
        assert fb.post(trajectory("r1", policy_version=2)).spooled


def test_the_version_of_an_admission_is_kept(service: Service, agent: forebay.Client, spool: Path) -> None:
    agent.publish("p", 3)
    admission = agent.admit("p", rollouts=1)
    agent.publish("p", 4)
    agent.get_policy("p")
    service.kill()
    agent.post(trajectory("r1", admission_id=admission.admission_id))
    assert [body["policy_version"] for body in bodies(spool)] == [3]


def test_half_of_a_surrogate_pair_is_posted_and_spooled(service: Service, agent: forebay.Client, spool: Path) -> None:
    messages = [{"role": "tool", "content": "caf\udce9"}]
    receipt = agent.post(trajectory("r1", messages=messages))
    assert [warning.split(":")[0] for warning in receipt.warnings] == ["lone-surrogates"]
    service.kill()
    agent.post(trajectory("r2", messages=messages))
    (body,) = bodies(spool)
    assert body["messages"] == messages
    service.start()
    assert spool_of(agent).flush(PATIENCE_S)
    assert spool_of(agent).counts.delivered == 1
    # What is stored has a whole character in its place, and the same rollout is a duplicate.
    assert agent.post(trajectory("r2", messages=[{"role": "tool", "content": "caf\ufffd"}])).duplicate


def test_what_cannot_be_sent_is_not_spooled(service: Service, agent: forebay.Client, spool: Path) -> None:
    service.kill()
    with pytest.raises(errors.NotEncodableError) as refused:
        agent.post(trajectory("r1", reward=float("nan")))
    assert refused.value.violations[0].pointer == "/reward"
    assert bodies(spool) == []


def test_a_refusal_is_not_spooled(agent: forebay.Client, spool: Path) -> None:
    with pytest.raises(errors.Invalid):
        agent.post(trajectory("r1", segments=None))
    agent.post(trajectory("r1"))
    with pytest.raises(errors.RolloutConflict):
        agent.post(trajectory("r1", reward=0.0))
    assert list(spool.iterdir()) == []


def test_backpressure_is_not_spooled(agent: forebay.Client, spool: Path) -> None:
    agent.put_policy("p", {"backlog": {"max_ready_rollouts": 1}})
    agent.post(trajectory("r1"))
    with pytest.raises(errors.BacklogFull):
        agent.post(trajectory("r2"))
    assert list(spool.iterdir()) == []


def test_a_full_policy_does_not_stop_the_others(service: Service, agent: forebay.Client) -> None:
    agent.put_policy("full", {"backlog": {"max_ready_rollouts": 1}})
    agent.post(trajectory("r0", policy="full"))
    service.kill()
    agent.post(trajectory("r1", policy="full"))
    agent.post(trajectory("r2"))
    service.start()
    counts = wait_for(agent, lambda counts: counts.delivered == 1)
    assert (counts.delivered, counts.waiting, counts.rejected) == (1, 1, 0)
    assert agent.get_trajectory("p", "r2") is not None
    batch = agent.lease("full", wait_ms=10_000)
    assert batch is not None and batch.lease is not None
    agent.ack(batch.batch_id, lease=batch.lease, step=1)
    assert spool_of(agent).flush(PATIENCE_S)
    assert agent.get_trajectory("full", "r1") is not None


def test_a_post_that_fails_in_an_unexpected_way_does_not_stop_the_others(
    service: Service, agent: forebay.Client, spool: Path
) -> None:
    service.kill()
    agent.post(trajectory("absent", policy="absent", policy_version=0))
    agent.post(trajectory("r1"))
    (spool / "rejected").write_text("a file where the folder should be")
    service.start()
    counts = wait_for(agent, lambda counts: counts.delivered == 1)
    assert (counts.waiting, counts.rejected) == (1, 0)
    assert [body["rollout_id"] for body in bodies(spool)] == ["absent"]


@pytest.mark.parametrize(("status", "kind"), [(429, "backlog-full"), (503, "overloaded")])
def test_a_post_does_not_wait_for_centuries(
    service: Service, agent: forebay.Client, monkeypatch: pytest.MonkeyPatch, status: int, kind: str
) -> None:
    problem = Problem(type=kind, title="Full", status=status, retry_after_s=10**15)
    asked = threading.Event()

    def refuse(*_: Any, **__: Any) -> Any:
        asked.set()
        raise errors.of_problem(problem, "POST", "/trajectories", "")

    service.kill()
    monkeypatch.setattr(forebay.Client, "post_body", refuse)
    agent.post(trajectory("r1"))
    spool = spool_of(agent)
    if status == 429:
        wait_for(agent, lambda _: spool._deferred)  # pyright: ignore[reportPrivateUsage]
        assert spool._deferred[0][0] <= time.monotonic() + ASKED_MAX_S  # pyright: ignore[reportPrivateUsage]
    assert asked.wait(PATIENCE_S)
    with spool._changed:  # pyright: ignore[reportPrivateUsage]
        spool._deferred = [(0.0, entry) for _, entry in spool._deferred]  # pyright: ignore[reportPrivateUsage]
    monkeypatch.undo()
    service.start()
    assert spool.flush(PATIENCE_S), "the thread goes on"
    assert agent.get_trajectory("p", "r1") is not None


def test_a_damaged_folder_stops_neither_clients_nor_the_other_folders(
    service: Service, agent: forebay.Client, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.kill()
    agent.post(trajectory("r1"))
    agent.close()
    garbled, odd, locked = (spool / name for name in ("0-garbled", "0-odd", "0-locked"))
    for folder in (garbled, odd, locked):
        folder.mkdir()
        (folder / f"x{ENDING}").write_bytes(b"no gzip")
    (garbled / SERVICE).write_bytes(b"\xff\xfe\x00")
    (odd / SERVICE).mkdir()
    (locked / LOCK).mkdir()
    service.start()
    with caplog.at_level(logging.WARNING, "forebay"), forebay.Client(service.url, spool=spool) as fb:
        assert spool_of(fb).flush(PATIENCE_S)
        assert fb.get_trajectory("p", "r1") is not None
    assert all(folder.name in caplog.text for folder in (garbled, odd, locked))
    # The posts are as they were.
    assert all((folder / f"x{ENDING}").exists() for folder in (garbled, odd, locked))


def test_a_post_that_cannot_be_read_does_not_stop_the_others(
    service: Service, agent: forebay.Client, spool: Path
) -> None:
    service.kill()
    agent.post(trajectory("r1"))
    agent.close()
    (folder,) = {file.parent for file in spool.glob(f"*/*{ENDING}")}
    (folder / f"0-damaged{ENDING}").write_bytes(b"no gzip")
    (folder / f"0-folder{ENDING}").mkdir()
    service.start()
    with forebay.Client(service.url, spool=spool) as fb:
        counts = wait_for(fb, lambda counts: counts.delivered == 1)
        assert (counts.rejected, counts.waiting) == (1, 1)
        assert fb.get_trajectory("p", "r1") is not None


def test_a_post_that_the_key_does_not_allow_waits_for_another_key(
    service: Service, agent: forebay.Client, spool: Path
) -> None:
    admin = agent.create_key("operator", "admin").key
    keyed = forebay.Client(service.url, admin, spool="")
    reader, producer = keyed.create_key("reader", "read").key, keyed.create_key("producer", "produce").key
    service.kill()
    agent.post(trajectory("r1"))
    agent.close()
    service.start()
    with forebay.Client(service.url, reader, spool=spool) as fb:
        wait_for(fb, lambda _: spool_of(fb)._deferred)  # pyright: ignore[reportPrivateUsage]
        assert (spool_of(fb).counts.waiting, spool_of(fb).counts.rejected) == (1, 0)
    with forebay.Client(service.url, producer, spool=spool) as fb:
        assert spool_of(fb).flush(PATIENCE_S)
    assert keyed.get_trajectory("p", "r1") is not None


def wait_for(client: forebay.Client, condition: Any) -> Any:
    spool = spool_of(client)
    with spool._changed:  # pyright: ignore[reportPrivateUsage]
        assert spool._changed.wait_for(lambda: condition(spool.counts), PATIENCE_S)  # pyright: ignore[reportPrivateUsage]
        return spool.counts


def test_late_rollouts_are_counted_and_logged(
    service: Service, agent: forebay.Client, caplog: pytest.LogCaptureFixture
) -> None:
    agent.post(trajectory("r1", group_id="g"))
    service.kill()
    agent.post(trajectory("r2", group_id="g"))
    service.start()
    with caplog.at_level(logging.WARNING, "forebay"):
        assert spool_of(agent).flush(PATIENCE_S)
    assert spool_of(agent).counts.late == 1
    assert "the rollout r2 of the spool was late for its group g" in caplog.text


def test_what_the_service_refuses_for_good_is_kept_with_its_problem(
    service: Service, agent: forebay.Client, spool: Path
) -> None:
    service.kill()
    agent.post(trajectory("conflict"))
    agent.post(trajectory("invalid", policy="strict", policy_version=0))
    agent.post(trajectory("absent", policy="absent", policy_version=0))
    agent.post(trajectory("fine"))
    with service.elsewhere() as server, server.client() as fb:
        fb.post(trajectory("conflict", reward=0.0))
        fb.put_policy("strict", {"require": ["values"]})
    service.start()
    assert spool_of(agent).flush(PATIENCE_S)
    counts = spool_of(agent).counts
    assert (counts.delivered, counts.rejected, counts.waiting) == (1, 3, 0)
    kept = sorted((spool / "rejected").glob("*.json.gz"))
    assert [json.loads(gzip.decompress(file.read_bytes()))["rollout_id"] for file in kept] == [
        "conflict",
        "invalid",
        "absent",
    ]
    problems = [json.loads((file.parent / file.name.replace(".json.gz", ".problem.json")).read_text()) for file in kept]
    assert [problem["type"] for problem in problems] == ["rollout-conflict", "invalid", "unknown-policy"]
    assert "requires `values`" in problems[1]["errors"][0]["detail"]


def test_a_full_spool_raises_and_keeps_what_it_has(service: Service, tmp_path: Path) -> None:
    spool = tmp_path / "small"
    service.kill()
    with forebay.Client(service.url, spool=spool, spool_bytes_max=600, retry=Retry.none()) as fb:
        fb.post(trajectory("r1", policy_version=0))
        with pytest.raises(errors.SpoolFull, match="may have 600") as full:
            fb.post(trajectory("r2", policy_version=0, metadata={"random": os.urandom(400).hex()}))
        assert isinstance(full.value.__cause__, errors.Unreachable)
        assert [body["rollout_id"] for body in bodies(spool)] == ["r1"]


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ConfigurationError, match="cannot be a spool"):
        forebay.Client(spool=tmp_path / "file")


class Cutter:
    """Forwards one connection after the other, and while `cuts` is true drops the service's answers."""

    def __init__(self, port: int) -> None:
        self.cuts = True
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with near, socket.create_connection(("127.0.0.1", self._target)) as far:
                threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
                while data := far.recv(65536):
                    if self.cuts:
                        break
                    near.sendall(data)
                near.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _forward(near: socket.socket, far: socket.socket) -> None:
        try:
            while data := near.recv(65536):
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


def test_a_post_whose_answer_was_lost_is_stored_once(service: Service, spool: Path) -> None:
    with forebay.Client(service.url, spool="") as plain:
        plain.put_policy("p", {})
        cutter = Cutter(service.port)
        fb = forebay.Client(f"http://127.0.0.1:{cutter.port}", spool=spool, retry=Retry.none(), check_version=False)
        assert fb.post(trajectory("r1", policy_version=0)).spooled
        cutter.cuts = False
        assert spool_of(fb).flush(PATIENCE_S)
        assert (spool_of(fb).counts.delivered, spool_of(fb).counts.duplicates) == (1, 1)
        assert [story.rollout_id for story in plain.list_trajectories("p")] == ["r1"]
        fb.close()
        cutter.close()


SPOOLING = """
import os, signal, sys
from pathlib import Path
import forebay
from forebay import _durable, _spool

_spool.CLOSE_S = 0.2

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

point = sys.argv[1]
names = {"before the rename": (os, "replace"), "after the rename": (_durable, "sync_folder")}
fb = forebay.Client(os.environ["URL"], spool=os.environ["SPOOL"], retry=forebay.types.Retry.none())
def rollout(name):
    segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1], logprobs=[-0.5, -0.25])
    return forebay.Trajectory(policy="p", rollout_id=name, policy_version=0, reward=1.0, segments=[segment])
fb.post(rollout("r1"))
if point == "while it writes":
    class Cut:
        def __init__(self, file): self.file = file
        def __enter__(self): return self
        def __exit__(self, *_): pass
        def write(self, data):
            self.file.write(data[: len(data) // 2]); self.file.flush(); kill()
    _durable.open = lambda *given: Cut(open(*given))
elif point == "after the post":
    Path.unlink = kill
else:
    setattr(*names[point], kill)
fb.post(rollout("r2"))
print("posted", flush=True)
if point == "after the post":
    sys.stdin.read()
"""


def spooling(service: Service, spool: Path, point: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "URL": service.url, "SPOOL": str(spool), "PYTHONPATH": PACKAGE}
    command = [sys.executable, "-c", SPOOLING, point]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("point", "survive"),
    [("while it writes", ["r1"]), ("before the rename", ["r1"]), ("after the rename", ["r1", "r2"])],
)
def test_an_agent_that_is_killed_while_it_spools_loses_only_what_was_not_promised(
    service: Service, agent: forebay.Client, spool: Path, point: str, survive: list[str]
) -> None:
    service.kill()
    process = spooling(service, spool, point)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (-signal.SIGKILL, "")
    service.start()
    with forebay.Client(service.url, spool=spool) as fb:
        assert spool_of(fb).flush(PATIENCE_S)
        assert [story.rollout_id for story in fb.list_trajectories("p")] == survive
        assert spool_of(fb).counts.delivered == len(survive)
        assert list(spool.iterdir()) == []


def test_an_agent_that_is_killed_after_a_post_was_taken_posts_it_twice_and_it_is_stored_once(
    service: Service, agent: forebay.Client, spool: Path
) -> None:
    service.kill()
    process = spooling(service, spool, "after the post")
    assert process.stdout is not None and process.stdout.readline() == "posted\n"
    service.start()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL
    with forebay.Client(service.url, spool=spool) as fb:
        assert spool_of(fb).flush(PATIENCE_S)
        assert (spool_of(fb).counts.delivered, spool_of(fb).counts.duplicates) == (2, 1)
        assert [story.rollout_id for story in fb.list_trajectories("p")] == ["r1", "r2"]


def test_a_process_that_ends_leaves_its_posts_to_the_next(service: Service, agent: forebay.Client, spool: Path) -> None:
    service.kill()
    process = spooling(service, spool, "after the post")
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert [body["rollout_id"] for body in bodies(spool)] == ["r1", "r2"]
    service.start()
    with forebay.Client(service.url, spool=spool) as fb:
        assert spool_of(fb).flush(PATIENCE_S)
        assert [story.rollout_id for story in fb.list_trajectories("p")] == ["r1", "r2"]


def test_the_folder_of_a_process_that_runs_is_left_alone(service: Service, agent: forebay.Client, spool: Path) -> None:
    service.kill()
    agent.post(trajectory("r1"))
    with forebay.Client(service.url, spool=spool, retry=Retry.none()) as other:
        assert spool_of(other).counts.waiting == 0
    agent.close()
    with forebay.Client(service.url, spool=spool, retry=Retry.none()) as other:
        assert spool_of(other).counts.waiting == 1


def test_posts_for_another_service_are_left_alone(service: Service, agent: forebay.Client, spool: Path) -> None:
    service.kill()
    agent.post(trajectory("r1"))
    agent.close()
    with service.elsewhere() as server, forebay.Client(server.url, spool=spool) as fb:
        assert spool_of(fb).counts.waiting == 0
        assert flush_command(spool, server.url) == (0, "found 0, delivered 0 (0 rollouts were there, 0 late), ")
        moved = flush_command(spool, server.url, "--all")
        assert moved == (0, "found 1, delivered 1 (0 rollouts were there, 0 late), ")
        assert fb.get_trajectory("p", "r1") is not None


def flush_command(spool: Path, url: str, *options: str) -> tuple[int, str]:
    environment = {**os.environ, "FOREBAY_URL": url, "FOREBAY_SPOOL": str(spool), "PYTHONPATH": PACKAGE}
    command = [sys.executable, "-m", "forebay.spool", "flush", str(spool), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout.split("rejected")[0]


def test_the_command_says_what_is_left_and_what_was_refused(
    service: Service, agent: forebay.Client, spool: Path
) -> None:
    service.kill()
    agent.post(trajectory("r1"))
    agent.post(trajectory("r2", policy="absent", policy_version=0))
    agent.close()
    command = [sys.executable, "-m", "forebay.spool", "flush", str(spool), "--url", service.url, "--wait-s"]
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    run: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "timeout": PATIENCE_S}
    away = subprocess.run([*command, "0.2"], **run)
    assert (away.returncode, away.stdout) == (
        1,
        "found 2, delivered 0 (0 rollouts were there, 0 late), rejected 0, left 2\n",
    )
    service.start()
    there = subprocess.run([*command, "60"], **run)
    assert (there.returncode, there.stdout) == (
        1,
        "found 2, delivered 1 (0 rollouts were there, 0 late), rejected 1, left 0\n",
    )
    assert subprocess.run([*command[:-3], str(spool / "none")], **run).returncode == 2


def test_a_forked_process_has_a_folder_of_its_own(service: Service, agent: forebay.Client, spool: Path) -> None:
    service.kill()
    agent.post(trajectory("parent"))
    child = os.fork()
    if child == 0:
        # pytest must not run in the child.
        try:
            receipt = agent.post(trajectory("child"))
            os._exit(0 if receipt.spooled else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    folders = [path for path in spool.iterdir() if list(path.glob("*.json.gz"))]
    assert len(folders) == 2
    with forebay.Client(service.url, spool=spool, retry=Retry.none()) as other:
        # The child has ended, so its folder is free. That of the parent is not, although the child had its descriptor.
        assert spool_of(other).counts.waiting == 1


AGENT = """
import sys
import forebay
fb = forebay.Client(sys.argv[1], spool=sys.argv[2], retry=forebay.types.Retry.none())
fb.get_policy("p")
segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1], logprobs=[-0.5, -0.25])
for number in range(int(sys.argv[4])):
    name = f"{sys.argv[3]}-{number}"
    receipt = fb.post(forebay.Trajectory(policy="p", rollout_id=name, reward=1.0, segments=[segment]))
    print("spooled" if receipt.spooled else "stored", flush=True)
    sys.stdin.readline()
fb.spool.flush(60)
fb.close()
"""


def test_two_agents_lose_nothing_and_store_nothing_twice_while_the_service_is_killed(
    service: Service, agent: forebay.Client, spool: Path
) -> None:
    count = 12
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    pipe = subprocess.PIPE
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", AGENT, service.url, str(spool), name, str(count)],
            env=environment,
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        for name in ("a", "b")
    ]
    seen: list[str] = []
    for place in range(count):
        if place in (3, 8):
            service.kill()
        if place in (6, 10):
            service.start()
        for process in agents:
            assert process.stdout is not None and process.stdin is not None
            seen.append(process.stdout.readline().strip())
            process.stdin.write("\n")
            process.stdin.flush()
    for process in agents:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    assert seen.count("spooled") >= 8 and seen.count("stored") >= 8
    stories = [story.rollout_id for story in agent.list_trajectories("p")]
    assert sorted(stories) == sorted(f"{name}-{number}" for name in "ab" for number in range(count))
    assert list(spool.iterdir()) == []
