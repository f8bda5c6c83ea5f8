"""Sends calls: a pool of connections which is rebuilt after a fork, one attempt after the other, and cancellation."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import logging
import os
import socket
import ssl
import threading
import urllib.parse
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import urllib3
from urllib3.connection import HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.ssl_match_hostname import CertificateError

from . import _codec, errors
from ._retry import Attempts, Effect, Retry, effect, retry_after_s
from ._uuid import uuid7
from ._version import __version__, mismatch
from ._wire import Health, Problem

log = logging.getLogger("forebay")

JSON = "application/json"
NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
PROBLEM = "application/problem+json"

CONNECT_TIMEOUT_S = 10.0
"""Long enough to survive a few lost packets, short enough to try another replica soon."""

SILENCE_TIMEOUT_S = 120.0
"""How long a connection may be silent before it counts as broken: twice the longest long poll of the API."""

VERSION_TIMEOUT_S = 5.0
"""How long the question for the version of the service may take."""

CONNECTIONS_MAX = 64
"""Connections that are kept open for the next call. More are opened if more threads call at once."""

NOT_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST")
"""OpenSSL's names for an answer that is not TLS."""

CERTIFICATE_ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR")
"""What OpenSSL's names for alerts about certificates contain; the last one means that a signature does not fit."""

TLS_ALERT = "\x15\x03"
"""How a service with TLS begins its answer to a request that is not encrypted."""

CAUSES_MAX = 8
"""How far the causes of an error are followed. urllib3 wraps an error of TLS up to three times."""

STREAM_BYTES = 1 << 16
"""How much of a body that is read while it arrives is read at once."""

EXCERPT_CHARS = 256
"""How much of an unexpected body an error quotes: enough to see which server sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a client is made of. It is all that a pickle of a client has."""

    url: str
    key: str | None = field(default=None, repr=False)
    ca: str | None = None
    identity: str | None = None
    timeout_s: float = SILENCE_TIMEOUT_S
    retry: Retry = field(default_factory=Retry)
    compression: Literal["auto", "zstd", "gzip", "none"] = "auto"
    check_version: bool = True
    spool: str | None = None
    spool_bytes_max: int = 0


@dataclass(slots=True, kw_only=True)
class Call:
    """A request that can be sent any number of times."""

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict[str, Any])
    repeat: bool
    """Whether the call may be sent again when its outcome is unknown."""
    body: bytes | None = None
    media: str = JSON
    encoding: str | None = None
    accept: str = JSON
    accept_encoding: str = "identity"

    def target(self) -> str:
        given = {name: _text(value) for name, value in self.query.items() if value is not None}
        return self.path + ("?" + urllib.parse.urlencode(given, quote_via=urllib.parse.quote) if given else "")


@dataclass(slots=True)
class Answer:
    """An answer whose status is a success, with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Cancellation:
    """Ends a call from another thread. Its connection is closed, so that the service forgets a request that waits."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._connection: Any = None
        self._then: Callable[[], object] | None = None

    def cancel(self) -> None:
        self._event.set()
        if self._then is not None:
            self._then()
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            # It may be closed already. The method is that of plain sockets: that of TLS sockets must not run while
            # another thread reads.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    @property
    def is_cancelled(self) -> bool:
        return self._event.is_set()

    def pause(self, seconds: float) -> bool:
        """Waits, and returns whether the call was cancelled meanwhile."""
        return self._event.wait(seconds)

    def uses(self, connection: Any) -> None:
        """Names the connection that is closed."""
        self._connection = connection

    def then(self, act: Callable[[], object]) -> None:
        """Names what else is done when the call is cancelled."""
        self._then = act


class _Current(threading.local):
    """The cancellation of the calls that this thread makes."""

    scope: Cancellation | None = None
    """That of the code that makes the calls, if it is cancellable."""
    cancellation: Cancellation | None = None
    """That of the call that is being sent."""


_current = _Current()


@contextlib.contextmanager
def cancellable(cancellation: Cancellation) -> Generator[None]:
    """The calls that this thread makes in the block end when `cancellation` is cancelled."""
    before, _current.scope = _current.scope, cancellation
    try:
        yield
    finally:
        _current.scope = before


class _HttpPool(HTTPConnectionPool):
    def _get_conn(self, timeout: float | None = None) -> Any:
        connection = super()._get_conn(timeout)
        if _current.cancellation:
            _current.cancellation.uses(connection)
        return connection


class _HttpsConnection(HTTPSConnection):
    def send(self, data: Any) -> None:
        try:
            super().send(data)
        except (ConnectionResetError, ssl.SSLEOFError):
            # In TLS 1.3 a service refuses the certificate of a client when the client sends its request already. This
            # read raises the refusal, if it has arrived.
            self.sock.recv(1)
            raise


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls: Any = _HttpsConnection

    def _get_conn(self, timeout: float | None = None) -> Any:
        connection = super()._get_conn(timeout)
        if _current.cancellation:
            _current.cancellation.uses(connection)
        return connection


class Transport:
    """The connections to one service. Threads may share it; a process that was forked opens its own connections."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.base = _base(config.url)
        self._headers = {"User-Agent": f"forebay-python/{__version__}"}
        if config.key is not None:
            if not config.key.isascii() or not config.key.isprintable() or " " in config.key:
                raise errors.ConfigurationError("the key contains characters that are not allowed in a key")
            self._headers["Authorization"] = f"Bearer {config.key}"
        self._tls = _tls(config, self.base) if self.base.scheme == "https" else None
        # The pool and the process that it belongs to. Two threads may each make one, and then the later one stays.
        self._pool: tuple[int, HTTPConnectionPool] | None = None
        # A dictionary, because threads add to it while another one lists it.
        self._active: dict[Cancellation, None] = {}
        self._is_checked = not config.check_version

    def close(self) -> None:
        """Closes all connections, and ends the calls that still wait. The transport can be used again afterwards."""
        for cancellation in list(self._active):
            cancellation.cancel()
        pool, self._pool = self._pool, None
        if pool and pool[0] == os.getpid():
            pool[1].close()

    def send(self, call: Call, *, retry: Retry, timeout_s: float) -> Answer:
        """Sends a call, and repeats it as the rule allows."""
        request_id = uuid7()
        attempts = Attempts(retry)
        with self.cancellable() as cancellation:
            while True:
                response = self._answered(call, request_id, attempts, timeout_s, cancellation)
                try:
                    body = self._body(response, call, request_id, cancellation)
                    return Answer(response.status, response.headers, body)
                except _Failure as failure:
                    self._after(failure, call, request_id, attempts, cancellation)

    def _answered(
        self, call: Call, request_id: str, attempts: Attempts, timeout_s: float, cancellation: Cancellation
    ) -> Any:
        """Sends a call until it is answered with a success, whose body is still to be read."""
        while True:
            if cancellation.is_cancelled:
                raise self._cancelled(call, request_id)
            try:
                return self._attempt(call, request_id, timeout_s, cancellation)
            except _Failure as failure:
                self._after(failure, call, request_id, attempts, cancellation)

    def _after(
        self, failure: _Failure, call: Call, request_id: str, attempts: Attempts, cancellation: Cancellation
    ) -> None:
        """Pauses before a call is repeated, or raises the error if it is not."""
        if cancellation.is_cancelled:
            raise self._cancelled(call, request_id) from None
        pause_s = attempts.pause_s(
            failure.effect, repeat=call.repeat, status=failure.error.status, asked_s=failure.retry_after_s
        )
        if pause_s is None:
            raise failure.error from failure.__cause__
        if attempts.is_loud:
            waited_s = attempts.room.waited_s
            log.warning("%s %s waits for room, %.0f s so far: %s", call.method, call.path, waited_s, failure.error)
        else:
            log.debug("%s %s is repeated in %.2f s: %s", call.method, call.path, pause_s, failure.error)
        cancellation.pause(pause_s)

    def stream(self, call: Call, *, retry: Retry, timeout_s: float) -> Generator[bytes]:
        """Sends a call as `send` does, and yields its body as it arrives, which is then not requested again."""
        request_id = uuid7()
        with self.cancellable() as first:
            response = self._answered(call, request_id, Attempts(retry), timeout_s, first)
            try:
                # `read` would wait until all bytes that it may return have arrived.
                parts = response.stream(STREAM_BYTES, decode_content=False)
                while part := self._part(response, parts, call, request_id, first):
                    yield part
                response.release_conn()
            finally:
                response.close()

    def _part(
        self, response: Any, parts: Iterator[bytes], call: Call, request_id: str, first: Cancellation
    ) -> bytes | None:
        """The next part of a body, or None at its end."""
        # The task that reads this part may be another one than that which sent the call, and can be cancelled, too.
        cancellation = _current.scope or first
        cancellation.uses(response.connection)
        try:
            if first.is_cancelled:
                raise self._cancelled(call, request_id)
            return next(parts, None)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            if cancellation.is_cancelled or first.is_cancelled:
                raise self._cancelled(call, request_id) from None
            raise self._broken(error, call, request_id).error from error
        finally:
            cancellation.uses(None)

    def pause(self, call: Call, seconds: float) -> None:
        """Waits between two calls; the wait ends when the client is closed or the task is cancelled."""
        with self.cancellable() as cancellation:
            if cancellation.pause(seconds):
                raise self._cancelled(call, uuid7())

    def check_version(self) -> None:
        """Warns once if the versions of client and service are far apart. Errors are left to the other calls."""
        if self._is_checked:
            return
        self._is_checked = True
        with contextlib.suppress(errors.ForebayError, ValueError):
            call = Call(method="GET", path="/healthz", repeat=True)
            answer = self.send(call, retry=Retry.none(), timeout_s=VERSION_TIMEOUT_S)
            health = _codec.decode(Health, json.loads(answer.body))
            if text := mismatch(__version__, health.version):
                warnings.warn(text, errors.VersionWarning, stacklevel=4)

    @contextlib.contextmanager
    def cancellable(self) -> Generator[Cancellation]:
        """What is cancelled in the block when the client is closed or the task is cancelled."""
        cancellation = _current.scope or Cancellation()
        self._active[cancellation] = None
        try:
            yield cancellation
        finally:
            self._active.pop(cancellation, None)

    def _cancelled(self, call: Call, request_id: str) -> errors.Cancelled:
        return errors.Cancelled("the call was cancelled", method=call.method, path=call.path, request_id=request_id)

    def _attempt(self, call: Call, request_id: str, timeout_s: float, cancellation: Cancellation) -> Any:
        """Sends a call once. Returns an answer that is a success, with its body still to be read."""
        headers = {
            **self._headers,
            "Accept": call.accept,
            "Accept-Encoding": call.accept_encoding,
            "x-request-id": request_id,
        }
        if call.body is not None:
            headers["Content-Type"] = call.media
            if call.encoding:
                headers["Content-Encoding"] = call.encoding
        _current.cancellation = cancellation
        try:
            response = self._connections().urlopen(
                call.method,
                self.base.path + call.target(),
                body=call.body,
                headers=headers,
                retries=False,
                redirect=False,
                assert_same_host=False,
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=timeout_s),
                preload_content=False,
                decode_content=False,
                # Version 1 of urllib3 does not check the length otherwise.
                enforce_content_length=True,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            cancellation.uses(None)
            raise self._broken(error, call, request_id) from error
        finally:
            _current.cancellation = None
        answered = response.headers
        if not 200 <= response.status < 300:
            body = self._body(response, call, request_id, cancellation)
            raise self._refused(call, request_id, response.status, answered, body)
        if response.status != 204 and not _is_delimited(answered):
            response.close()
            raise _Failure(
                errors.UnexpectedAnswer(
                    "the answer has neither a content length nor chunks, so it may be incomplete",
                    method=call.method,
                    path=call.path,
                    status=response.status,
                    request_id=request_id,
                ),
                Effect.FINAL,
            )
        return response

    def _body(self, response: Any, call: Call, request_id: str, cancellation: Cancellation) -> bytes:
        """The whole body of an answer."""
        try:
            return response.read()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._broken(error, call, request_id) from error
        finally:
            response.release_conn()
            cancellation.uses(None)

    def _connections(self) -> HTTPConnectionPool:
        pool, process = self._pool, os.getpid()
        if pool is None or pool[0] != process:
            # The connections of the parent process are left alone: both would read the same answers.
            pool = (process, self._new_pool())
            self._pool = pool
        return pool[1]

    def _new_pool(self) -> HTTPConnectionPool:
        base = self.base
        if self._tls is None:
            return _HttpPool(base.host, base.port, maxsize=CONNECTIONS_MAX)
        return _HttpsPool(base.host, base.port, maxsize=CONNECTIONS_MAX, ssl_context=self._tls)

    def _broken(self, error: BaseException, call: Call, request_id: str) -> _Failure:
        place: dict[str, Any] = {"method": call.method, "path": call.path, "request_id": request_id}
        where = f"{self.base.host}:{self.base.port}"
        if why := _certificate(error):
            # The next handshake would fail in the same way.
            refused = errors.CertificateRefused(f"{where}: {why}", **place)
            refused.not_begun = True
            return _Failure(refused, Effect.FINAL)
        if why := _wrong_scheme(error):
            misdirected = errors.Unreachable(f"{where}: {why}", **place)
            misdirected.not_begun = True
            return _Failure(misdirected, Effect.FINAL)
        not_begun = isinstance(error, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError)
        if not_begun:
            reason = f"no connection to {where} could be opened: {_reason(error)}"
        else:
            reason = f"the connection to {where} broke before its answer was complete: {_reason(error)}"
        unreachable = errors.Unreachable(reason, **place)
        unreachable.not_begun = not_begun
        return _Failure(unreachable, Effect.NOT_BEGUN if not_begun else Effect.UNKNOWN)

    def _refused(self, call: Call, request_id: str, status: int, headers: Mapping[str, str], body: bytes) -> _Failure:
        request_id = headers.get("x-request-id", request_id)
        problem = _problem(headers, body)
        error: errors.ForebayError
        if problem:
            error = errors.of_problem(problem, call.method, call.path, request_id)
        else:
            text = body.decode("utf-8", "replace")[:EXCERPT_CHARS]
            error = errors.UnexpectedAnswer(
                f"status {status} without a problem document: {text}",
                method=call.method,
                path=call.path,
                status=status,
                request_id=request_id,
            )
        kind = effect(status, problem.type if problem else None)
        return _Failure(error, kind, retry_after_s(status, headers))


@dataclass(frozen=True, slots=True)
class Base:
    """The parts of a base URL."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def is_local(self) -> bool:
        """Whether the service is on this machine, as far as its name says."""
        return self.host == "localhost" if self.address is None else self.address.is_loopback

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host, if it is an address and not a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


class _Failure(Exception):
    """A failed attempt."""

    def __init__(self, error: errors.ForebayError, effect: Effect, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.effect = effect
        self.retry_after_s = retry_after_s


def path(*parts: str) -> str:
    """Joins the parts of a path; each of them may have any characters."""
    return "/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)


def json_body(body: Any, method: str, path: str) -> bytes:
    """Writes a body, or says which of its values cannot be sent."""
    try:
        return _codec.encode(body)
    except _codec.NotEncodable as error:
        raise errors.NotEncodableError(
            "the request was not sent, because it cannot be written as JSON",
            method=method,
            path=path,
            violations=(errors.Violation(pointer=error.pointer, detail=error.detail),),
        ) from None


def _base(url: str) -> Base:
    def refuse(why: str) -> errors.ConfigurationError:
        return errors.ConfigurationError(f"`{url}` cannot be the address of the service: {why}")

    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise refuse(str(error)) from None
    if parts.username is not None or parts.password is not None:
        raise errors.ConfigurationError("the address of the service must not have a user or a password: use a key")
    if parts.scheme not in ("http", "https"):
        raise refuse("it must begin with http:// or https://")
    if not parts.hostname:
        raise refuse("it has no host")
    if parts.query or parts.fragment:
        raise refuse("it must end with the path")
    default = 443 if parts.scheme == "https" else 80
    return Base(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"))


def _tls(config: Config, base: Base) -> ssl.SSLContext:
    with _refused_file("ca", "FOREBAY_CA", config.ca):
        context = ssl.create_default_context(cafile=config.ca)
    if config.ca is not None:
        # The file may have the service's own certificate in place of an authority.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if config.identity is not None:
        with _refused_file("identity", "FOREBAY_IDENTITY", config.identity):
            context.load_cert_chain(config.identity, password=_no_password)
    if base.address is not None and cast("Any", urllib3).__version__.startswith("1."):
        # Version 1 does not tell Python's ssl the host if it is an address. It compares the certificate by itself.
        context.check_hostname = False
    return context


@contextlib.contextmanager
def _refused_file(argument: str, variable: str, file: str | None) -> Generator[None]:
    """Errors in the block are those of a file with certificates."""
    try:
        yield
    except (OSError, ValueError) as error:
        which = "certificates of the system" if file is None else f"file of `{argument}` or {variable}, {file},"
        raise errors.ConfigurationError(f"the {which} cannot be used for TLS: {error}") from None


def _no_password() -> str:
    # Otherwise OpenSSL would ask for one on the terminal.
    raise ValueError("its private key is encrypted; write the key without a password")


def _problem(headers: Mapping[str, str], body: bytes) -> Problem | None:
    if headers.get("Content-Type", "").split(";")[0].strip().lower() != PROBLEM:
        return None
    try:
        return _codec.decode(Problem, json.loads(body))
    except ValueError:
        return None


def _is_delimited(headers: Mapping[str, str]) -> bool:
    return "Content-Length" in headers or "Transfer-Encoding" in headers


def _certificate(error: BaseException) -> str | None:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the service's certificate is not accepted: {cause.verify_message}"
        if isinstance(cause, CertificateError):
            return f"the service's certificate is not accepted: {cause}"
        reason = _tls_reason(cause) if isinstance(cause, ssl.SSLError) else ""
        if "ALERT" in reason and any(word in reason for word in CERTIFICATE_ALERTS):
            return f"the service does not accept this client's certificate, or needs one: it sent {reason}"
    return None


def _wrong_scheme(error: BaseException) -> str | None:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLError) and _tls_reason(cause) in NOT_TLS:
            return "what listens there does not answer in TLS; its address may have to begin with http://"
        if isinstance(cause, http.client.BadStatusLine) and str(cause).startswith(TLS_ALERT):
            return "what listens there answers in TLS; its address has to begin with https://"
    return None


def _causes(error: BaseException) -> Generator[BaseException]:
    """An error and what it wraps."""
    cause: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if cause is None:
            return
        yield cause
        inner = cause.args[-1] if cause.args and isinstance(cause.args[-1], BaseException) else None
        cause = inner or cause.__cause__ or cause.__context__


def _tls_reason(error: ssl.SSLError) -> str:
    """OpenSSL's name of an error, which Python only has as a text if its table is older than OpenSSL."""
    return (error.reason or str(error)).upper().replace(" ", "_")


def _reason(error: BaseException) -> str:
    """The innermost reason, without the addresses of objects which urllib3 prints."""
    inner: Any = error
    while isinstance(inner, BaseException) and inner.args and isinstance(inner.args[-1], BaseException):
        inner = inner.args[-1]
    text = str(inner)
    return text.split(": ", 1)[-1] if "object at 0x" in text else text


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
