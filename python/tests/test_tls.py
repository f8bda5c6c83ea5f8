"""TLS and mutual TLS against a real service, with certificates that the tests make as docs/security.md does."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import NO_PAUSES

import forebay
from forebay import _http, errors

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]


class Authority:
    """A certificate authority, and what it signs."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        folder.mkdir()
        self._openssl("req", "-x509", *KEY, "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", f"/CN={name}")

    def sign(self, name: str, extension: str) -> tuple[Path, Path]:
        """Returns the files of a certificate and of its key."""
        (self.folder / "extensions").write_text(f"{extension}\nbasicConstraints=CA:FALSE\n")
        self._openssl("req", *KEY, "-nodes", "-keyout", f"{name}.key", "-out", "request", "-subj", f"/CN={name}")
        signed = ["-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
        self._openssl("x509", *signed, "-days", "2", "-extfile", "extensions", "-out", f"{name}.pem")
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def identity(self, name: str) -> Path:
        """Returns a file with a client's certificate and its key."""
        certificate, key = self.sign(name, "extendedKeyUsage=clientAuth")
        both = self.folder / f"{name}-identity.pem"
        both.write_text(certificate.read_text() + key.read_text())
        return both

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that the services and their clients have."""
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module", params=["other", "authority"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that no service and no client knows; also one with the same name and another key."""
    return Authority(tmp_path_factory.mktemp("tls") / "other", request.param)


def serve(authority: Authority, folder: Path, *more: str, name: str = "IP:127.0.0.1") -> forebay.Server:
    certificate, key = authority.sign("server", f"subjectAltName={name}")
    config = folder / "tls.toml"
    config.write_text("\n".join(["[tls]", f"certificate = '{certificate}'", f"key = '{key}'", *more, ""]))
    return forebay.Server(config=config)


@pytest.fixture(scope="module")
def encrypted(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[forebay.Server]:
    """A service with a certificate."""
    with serve(authority, tmp_path_factory.mktemp("encrypted")) as server:
        yield server


@pytest.fixture(scope="module")
def mutual(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[forebay.Server]:
    """A service that serves only clients with a certificate of the authority."""
    with serve(authority, tmp_path_factory.mktemp("mutual"), f"client_ca = '{authority.ca}'") as server:
        yield server


def client(server: forebay.Server, **options: Any) -> forebay.Client:
    return server.client(check_version=False, retry=NO_PAUSES, **options)


def rollout(**fields: Any) -> forebay.Trajectory:
    segments = [forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1])]
    return forebay.Trajectory(reward=1.0, segments=segments, **fields)


def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes the path of each attempt of a call."""
    paths: list[str] = []
    attempt = _http.Transport._attempt  # pyright: ignore[reportPrivateUsage]

    def noted(self: _http.Transport, call: _http.Call, *how: Any) -> _http.Answer:
        paths.append(call.path)
        return attempt(self, call, *how)

    monkeypatch.setattr(_http.Transport, "_attempt", noted)
    return paths


def make_all_calls(fb: forebay.Client) -> None:
    assert fb.post(rollout()).verdict == "kept"
    batch = fb.lease(wait_ms=10_000)
    assert batch is not None and batch.lease is not None
    (row,) = fb.samples(batch.batch_id)
    assert row.tokens == [1, 2, 3]
    assert fb.ack(batch.batch_id, lease=batch.lease, step=1).state == "trained"
    fb.reset("default")


def test_a_client_that_trusts_the_authority_is_served(encrypted: forebay.Server, authority: Authority) -> None:
    assert encrypted.url.startswith("https://127.0.0.1:")
    with client(encrypted, ca=authority.ca) as fb:
        make_all_calls(fb)
        # Another process gets the paths of the files.
        make_all_calls(pickle.loads(pickle.dumps(fb)))


def test_the_services_own_certificate_may_be_named_in_place_of_its_authority(
    encrypted: forebay.Server, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_CA", str(authority.folder / "server.pem"))
    with client(encrypted) as fb:
        assert fb.health().status == "ok"


def test_a_service_of_another_authority_is_refused_at_once(
    encrypted: forebay.Server, other: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = attempts(monkeypatch)
    for options in ({"ca": other.ca}, {}):
        fb = client(encrypted, **options)
        with pytest.raises(errors.CertificateRefused, match="certificate is not accepted: ") as no:
            fb.post(rollout())
        assert no.value.not_begun and no.value.path == "/trajectories"
        assert encrypted.url.removeprefix("https://") in str(no.value)
    assert tried == ["/trajectories"] * 2, "it would fail again"


def test_a_certificate_for_another_name_is_refused(authority: Authority, tmp_path: Path) -> None:
    with (
        serve(authority, tmp_path, name="DNS:forebay.example") as server,
        pytest.raises(errors.CertificateRefused, match="certificate is not accepted: .*(IP address|127.0.0.1)"),
    ):
        client(server, ca=authority.ca).stats()


def test_a_client_with_a_certificate_is_served(
    mutual: forebay.Server, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = authority.identity("trainer")
    with client(mutual, ca=authority.ca, identity=identity) as fb:
        make_all_calls(fb)
    monkeypatch.setenv("FOREBAY_CA", str(authority.ca))
    monkeypatch.setenv("FOREBAY_IDENTITY", str(identity))
    with client(mutual) as fb:
        make_all_calls(fb)


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_clients_without_the_right_certificate_are_refused_at_once(
    mutual: forebay.Server, authority: Authority, other: Authority, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    tried = attempts(monkeypatch)
    for identity in (None, other.identity("trainer")):
        # With TLS 1.3 the refusal arrives while the client already sends its request.
        for _ in range(10):
            tried.clear()
            with (
                client(mutual, ca=authority.ca, identity=identity) as fb,
                pytest.raises(errors.CertificateRefused, match="does not accept this client's certificate") as no,
            ):
                fb.post(rollout(metadata={"text": "x" * size}))
            assert no.value.not_begun
            assert tried == ["/trajectories"], "it would fail again"


def test_the_asynchronous_client_does_the_same(
    mutual: forebay.Server, authority: Authority, other: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with forebay.AsyncClient(mutual.url, ca=authority.ca, identity=authority.identity("agent")) as fb:
            receipts = await asyncio.gather(*(fb.post(rollout()) for _ in range(16)))
            assert {receipt.verdict for receipt in receipts} == {"kept"}
            batch = await fb.lease(wait_ms=10_000)
            assert batch is not None and len(await fb.samples(batch.batch_id)) == 1
            await fb.reset("default")
        for ca, identity in ((authority.ca, None), (other.ca, authority.identity("agent"))):
            async with forebay.AsyncClient(mutual.url, ca=ca, identity=identity) as fb:
                with pytest.raises(errors.CertificateRefused):
                    await fb.post(rollout())

    asyncio.run(main())


def test_a_call_that_waits_over_tls_is_cancelled(encrypted: forebay.Server, authority: Authority) -> None:
    async def main() -> None:
        async with forebay.AsyncClient(encrypted.url, ca=authority.ca) as fb:
            waits = asyncio.create_task(fb.lease("waiting", wait_ms=60_000))
            while "forebay_waiters 1" not in await fb.metrics():
                await asyncio.sleep(0.01)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            while "forebay_waiters 0" not in await fb.metrics():
                await asyncio.sleep(0.01)

    with encrypted.client(ca=authority.ca) as fb:
        fb.put_policy("waiting", {})
    asyncio.run(main())


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    (certificate, key), empty = authority.sign("agent", "extendedKeyUsage=clientAuth"), tmp_path / "empty.pem"
    empty.write_text("")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:secret"]
    encrypted_key = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    locked.write_text(certificate.read_text() + encrypted_key)
    for options, why in [
        ({"ca": tmp_path / "missing.pem"}, "`ca` or FOREBAY_CA, .*missing.pem, .*No such file"),
        ({"ca": empty}, "`ca` or FOREBAY_CA, .*empty.pem"),
        ({"identity": tmp_path / "missing.pem"}, "`identity` or FOREBAY_IDENTITY, .*missing.pem, .*No such file"),
        ({"identity": certificate}, "`identity` or FOREBAY_IDENTITY, .*agent.pem"),
        ({"identity": locked}, "locked.pem, .*private key is encrypted"),
    ]:
        with pytest.raises(errors.ConfigurationError, match=why):
            forebay.Client("https://127.0.0.1:1", **options)


def test_an_address_with_the_wrong_scheme_is_pointed_out(
    server: forebay.Server, encrypted: forebay.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = attempts(monkeypatch)
    for url, right in ((server.url, "http://"), (encrypted.url, "https://")):
        tried.clear()
        wrong = url.replace(right, "https://" if right == "http://" else "http://")
        with pytest.raises(errors.Unreachable, match=f"address .* begin with {right}") as failed:
            forebay.Client(wrong, check_version=False, retry=NO_PAUSES).stats()
        assert failed.value.not_begun
        assert tried == ["/stats"], "it would fail again"


def test_a_connection_that_breaks_in_the_handshake_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    tried = attempts(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(errors.Unreachable, match="broke before its answer"):
            forebay.Client(url, check_version=False, retry=NO_PAUSES).stats()
        listener.shutdown(socket.SHUT_RDWR)
    assert tried == ["/stats"] * NO_PAUSES.attempts_max
