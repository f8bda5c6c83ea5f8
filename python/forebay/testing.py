"""An inference engine for tests of agents: it answers what a script says, with token ids and log-probabilities.

    with forebay.testing.Engine(["7", "The answer is 7"]) as engine:
        llm = openai.OpenAI(base_url=engine.base_url, api_key="none")

It speaks the chat endpoint of vLLM or SGLang, streamed or not, SGLang's /generate, which also scores given ids for a
teacher, and /v1/models, on a port of its own.
Ids and log-probabilities are only in an answer if the request asks for them, as with a real engine. The text of a
message is one id for each byte, and the chat template only ever appends, so an agent that appends to its messages gets
one segment. The log-probability of a sampled id is a function of the ids before it (`logprob`), so a test can check
every trained token against its true context.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, cast

__all__ = [
    "ASSISTANT",
    "CALL",
    "END",
    "SYSTEM",
    "TOOL",
    "USER",
    "Answer",
    "Engine",
    "Request",
    "decode",
    "encode",
    "logprob",
    "render",
]

SYSTEM, USER, ASSISTANT, TOOL, CALL, END = range(256, 262)
"""Ids that open the messages of the roles and a tool call, and the one that ends a message. Ids below are bytes."""

OTHER_SPELLING = 512
"""Ids from here on are the same bytes again. No text is encoded as them; see `Answer.drift`."""

BODY_BYTES_MAX = 64 * 2**20

PROBE = "forebay-probe"
"""The session of calls with which a service finds out whether the engine's answers can be recorded. They are answered
outside of the script."""

_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


@dataclass(frozen=True)
class Answer:
    """What one call is answered with."""

    text: str = ""
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """Names and arguments of tools."""
    drift: bool = False
    """Samples the text as other ids than it has in a later prompt, as tokenizers of real models sometimes do."""
    versions: Sequence[tuple[int | str, int]] = ()
    """Labels of weights, each with the number of ids that they sampled, for SGLang; the last ones sample the rest."""
    finish_reason: str | None = None
    """Replaces the reason why the answer ended."""
    without: Sequence[str] = ()
    """Fields that are left out of the answer: prompt_token_ids, token_ids, logprobs, finish_reason."""
    status: int = 200
    """Another status is answered with an error and `text` as its message."""
    logprobs: Sequence[float | None] | None = None
    """Replaces the log-probabilities, right or wrong: those of the sampled ids, or of the ids that are scored."""
    before: Callable[[], None] | None = None
    """Is called before the answer is sent, for example to wait until a test allows it."""


@dataclass(frozen=True)
class Request:
    """A call that the engine received."""

    path: str
    body: Mapping[str, Any]
    prompt_tokens: Sequence[int]
    """The ids that it samples behind."""
    place: int
    """The number of calls that the engine received before."""

    @property
    def model(self) -> str:
        """The model that the agent asked for."""
        return str(self.body.get("model") or "")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the agent."""
        return self.body.get("messages") or []

    @property
    def text(self) -> str:
        """The text of the last message, or of the prompt."""
        return _text(self.messages[-1].get("content")) if self.messages else decode(self.prompt_tokens)


Script = Sequence[Answer | str] | Callable[[Request], Answer | str]


def encode(text: str) -> list[int]:
    """The ids of a text: its bytes."""
    return list(text.encode())


def decode(ids: Iterable[int]) -> str:
    """The text of ids, without those that open and end messages."""
    kept = (token - OTHER_SPELLING if token >= OTHER_SPELLING else token for token in ids)
    return bytes(token for token in kept if token < 256).decode(errors="replace")


def render(messages: Iterable[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
    """The ids of a conversation, up to the opener of the next answer."""
    ids: list[int] = []
    if tools:
        ids += [SYSTEM, *encode(json.dumps(tools)), END]
    for message in messages:
        ids += [_ROLES.get(str(message.get("role")), USER), *encode(_text(message.get("content")))]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            ids += [CALL, *encode(function["name"] + function["arguments"])]
        ids.append(END)
    return [*ids, ASSISTANT]


def logprob(context: Iterable[int], token: int) -> float:
    """The log-probability of a token behind a context, between -4 and 0."""
    return _value(_hash(token, _hash_all(context)))


def _hash(token: int, before: int) -> int:
    return zlib.crc32(struct.pack("<i", token), before)


def _hash_all(ids: Iterable[int]) -> int:
    value = 0
    for token in ids:
        value = _hash(token, value)
    return value


def _value(context: int) -> float:
    return -(context % 1024) / 256


@dataclass
class _Sampled:
    prompt: list[int]
    ids: list[int]
    logprobs: list[float | None]
    finish: str
    matched: int | str | None
    answer: Answer
    versions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    scores: list[list[Any]] | None = None
    """The log-probabilities of ids of the prompt, if the call asks only for them."""


class Engine:
    """A running engine. It is closed by `close`, or at the end of a `with` block.

    `script` is a list of answers, which are given in the order in which calls arrive, or a function from a request to
    an answer. A text is an answer. A call that the script has no answer for is refused with status 400.

    If the script raises, the call is answered with status 500 and the name of the exception, whose traceback goes to
    stderr. At the end of the `with` block the first such exception is raised, unless the block itself has raised.
    """

    def __init__(
        self,
        script: Script = (),
        *,
        kind: Literal["vllm", "sglang"] = "vllm",
        models: Sequence[str] = ("policy",),
        weight_version: int | str | None = None,
    ) -> None:
        self.kind = kind
        self.models = tuple(models)
        self.weight_version = weight_version
        """The label of the weights, which SGLang reports. It may be changed at any time."""
        self.requests: list[Request] = []
        """Every call that arrived."""
        self.error: BaseException | None = None
        """The first exception of the script."""
        self._script = script
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="engine", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the engine, for SGLang's /generate."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def base_url(self) -> str:
        """The address for clients of OpenAI's API."""
        return f"{self.url}/v1"

    def close(self) -> None:
        """Stops the engine."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None and self.error is not None:
            raise self.error

    def answer(
        self, path: str, body: Mapping[str, Any], *, is_probe: bool
    ) -> tuple[Mapping[str, Any], _Sampled | None]:
        """Finds and samples the answer to a call. The first value is an error's body if there is no second one."""
        if path == "/generate":
            sent = body.get("input_ids")
            prompt = list(cast("list[int]", sent)) if sent is not None else encode(str(body.get("text") or ""))
        else:
            prompt = render(body.get("messages") or (), body.get("tools") or ())
        if is_probe:
            return {}, self._sample(Request(path, body, prompt, 0), Answer("yes"))
        with self._lock:
            request = Request(path, body, prompt, len(self.requests))
            self.requests.append(request)
            if callable(self._script):
                given = None
            elif request.place < len(self._script):
                given = self._script[request.place]
            else:
                return _error(400, f"the script has no answer to call {request.place}"), None
        try:
            answer = _checked(self._script(request) if callable(self._script) else given)
            if answer.before is not None:
                answer.before()
            if answer.status != 200:
                return _error(answer.status, answer.text), None
            return {}, self._sample(request, answer)
        except BaseException as error:  # `pytest.fail` raises what is no Exception.
            traceback.print_exception(error)
            with self._lock:
                self.error = self.error or error
            return _error(500, "the script failed: " + "".join(traceback.format_exception_only(error)).strip()), None

    def _sample(self, request: Request, answer: Answer) -> _Sampled:
        prompt = list(request.prompt_tokens)
        start = _scored_from(request)
        if start is not None:
            return _Sampled(prompt, [], [], "length", None, answer, scores=_scores(prompt, start, answer.logprobs))
        text = encode(answer.text)
        ids = [token + OTHER_SPELLING for token in text] if answer.drift else text
        for name, arguments in answer.tool_calls:
            ids = [*ids, CALL, *encode(name + json.dumps(arguments))]
        ids = [*ids, END]
        finish, matched = "stop", cast("int | str | None", END)
        options = request.body.get("sampling_params") or request.body
        stops = options.get("stop") or ()
        for stop in [stops] if isinstance(stops, str) else stops:
            count = next((count for count in range(1, len(ids)) if stop in decode(ids[:count])), None)
            if count is not None:
                ids, matched = ids[:count], stop
        bound = options.get("max_tokens") or options.get("max_completion_tokens") or options.get("max_new_tokens")
        if bound is not None and len(ids) > bound:
            ids, finish, matched = ids[:bound], "length", None
        logprobs: list[float | None] = []
        context = _hash_all(prompt)
        for token in ids:
            context = _hash(token, context)
            logprobs.append(_value(context))
        if answer.logprobs is not None:
            logprobs = list(answer.logprobs)
        sampled = _Sampled(prompt, ids, logprobs, answer.finish_reason or finish, matched, answer)
        start = 0
        for place, (label, count) in enumerate(answer.versions):
            end = len(ids) if place == len(answer.versions) - 1 else min(start + count, len(ids))
            sampled.versions.append({"version": str(label), "start": start, "end": end})
            start = end
        return sampled

    def labels(self, sampled: _Sampled) -> dict[str, Any]:
        """What SGLang says about the weights."""
        if sampled.versions:
            return {"weight_version": sampled.versions[-1]["version"], "weight_versions": sampled.versions}
        return {} if self.weight_version is None else {"weight_version": str(self.weight_version)}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], engine: Engine) -> None:
        self.engine = engine
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that hang up are what some tests want.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # The head and the body are sent as one packet.
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def _engine(self) -> Engine:
        return cast(_Server, self.server).engine

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            data = [{"id": name, "object": "model", "owned_by": "forebay"} for name in self._engine.models]
            self._send(200, {"object": "list", "data": data})
        elif self.path == "/health":
            self._send(200, {})
        else:
            self._send(404, _error(404, f"there is no {self.path}"))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > BODY_BYTES_MAX:
            self.close_connection = True
            return self._send(413, _error(413, "the body is too large"))
        try:
            body = json.loads(self.rfile.read(length))
        except ValueError:
            return self._send(400, _error(400, "the body is not JSON"))
        if self.path == "/generate" or self.path == "/v1/chat/completions":
            refusal = self._refusal(body)
            if refusal is not None:
                return self._send(400, _error(400, refusal))
            is_probe = self.headers.get("x-session-id") == PROBE
            error, sampled = self._engine.answer(self.path, body, is_probe=is_probe)
            if sampled is None:
                return self._send(error["code"], {"error": error})
            if self.path == "/generate":
                return self._send(200, self._generated(body, sampled))
            if body.get("stream"):
                return self._stream(_chunks(self._engine, body, sampled))
            return self._send(200, _chat(self._engine, body, sampled))
        return self._send(404, _error(404, f"there is no {self.path}"))

    def _refusal(self, body: Mapping[str, Any]) -> str | None:
        flags = ("return_token_ids", "return_prompt_token_ids", "return_meta_info")
        if self._engine.kind == "sglang" and body.get("stream") and any(body.get(flag) for flag in flags):
            return "return_token_ids, return_prompt_token_ids and return_meta_info are not supported with stream=true"
        if self.path == "/generate" and body.get("stream"):
            return "this engine does not stream /generate"
        if self.path != "/generate" and not body.get("messages"):
            return "messages must not be empty"
        return None

    def _generated(self, body: Mapping[str, Any], sampled: _Sampled) -> dict[str, Any]:
        meta = _meta(self._engine, sampled)
        if not body.get("return_logprob"):
            del meta["output_token_logprobs"]
        answer = {"text": sampled.answer.text, "output_ids": sampled.ids, "meta_info": meta}
        if "token_ids" in sampled.answer.without:
            del answer["output_ids"]
        return answer

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        if "message" in body:
            body = {"error": body}
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)
        self.wfile.flush()

    def _stream(self, chunks: Iterator[Mapping[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self._part(f"data: {json.dumps(chunk)}\n\n")
        self._part("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _part(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def _checked(answer: object) -> Answer:
    """What a script returned, as an answer."""
    if isinstance(answer, str):
        return Answer(answer)
    if not isinstance(answer, Answer):
        raise TypeError(f"the answer of a script must be a text or an Answer, and is {answer!r}")
    return answer


def _scored_from(request: Request) -> int | None:
    """The place from which the ids of a call are scored. Such a call samples nothing."""
    options: Mapping[str, Any] = request.body.get("sampling_params") or {}
    if request.path != "/generate" or options.get("max_new_tokens") != 0 or not request.body.get("return_logprob"):
        return None
    return int(request.body.get("logprob_start_len") or 0)


def _scores(ids: Sequence[int], start: int, given: Sequence[float | None] | None) -> list[list[Any]]:
    """The entries of ids from a place on. The first one has no log-probability, as in SGLang."""
    values = given or [logprob(ids[:place], ids[place]) for place in range(start + 1, len(ids))]
    return [[value, token, None] for value, token in zip([None, *values], ids[start:], strict=False)]


def _error(status: int, message: str) -> dict[str, Any]:
    return {"message": message, "code": status, "type": "invalid_request_error" if status < 500 else "server_error"}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def _visible(sampled: _Sampled) -> str:
    """The text that the agent sees: without tool calls, and up to a stop text."""
    text = decode(sampled.ids[: len(sampled.answer.text.encode())])
    return text.split(sampled.matched)[0] if isinstance(sampled.matched, str) else text


def _message(sampled: _Sampled) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _visible(sampled)}
    if sampled.answer.tool_calls and sampled.finish != "length":
        message["tool_calls"] = [
            {
                "id": f"call_{len(sampled.prompt)}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for place, (name, arguments) in enumerate(sampled.answer.tool_calls)
        ]
    return message


def _finish(sampled: _Sampled) -> str | None:
    if "finish_reason" in sampled.answer.without:
        return None
    has_called = sampled.finish == "stop" and bool(sampled.answer.tool_calls)
    return "tool_calls" if has_called else sampled.finish


def _content(body: Mapping[str, Any], sampled: _Sampled) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for token, value in zip(sampled.ids, sampled.logprobs, strict=False):
        entry: dict[str, Any] = {"token": decode([token]), "logprob": value, "bytes": None, "top_logprobs": []}
        if value is not None and (body.get("top_logprobs") or 0) > 1:
            # The gap between two tokens shrinks with the temperature, by which a probe recognises scaled values.
            second = value - 1.0 / (body.get("temperature") or 1.0)
            entry["top_logprobs"] = [{"token": entry["token"], "logprob": value}, {"token": "?", "logprob": second}]
        entries.append(entry)
    return entries


def _meta(engine: Engine, sampled: _Sampled) -> dict[str, Any]:
    meta = {
        "id": f"call-{len(sampled.prompt)}",
        "finish_reason": {"type": sampled.finish, "matched": sampled.matched},
        "prompt_tokens": len(sampled.prompt),
        "completion_tokens": len(sampled.ids),
        "output_token_logprobs": [
            [value, token, None] for token, value in zip(sampled.ids, sampled.logprobs, strict=False)
        ],
        **engine.labels(sampled),
    }
    if "finish_reason" in sampled.answer.without:
        del meta["finish_reason"]
    if sampled.scores is not None:
        meta["input_token_logprobs"] = sampled.scores
    return meta


def _usage(sampled: _Sampled) -> dict[str, int]:
    prompt, completion = len(sampled.prompt), len(sampled.ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-scripted", "object": kind, "created": 0, "model": body.get("model") or "policy"}


def _chat(engine: Engine, body: Mapping[str, Any], sampled: _Sampled) -> dict[str, Any]:
    without = sampled.answer.without
    choice: dict[str, Any] = {"index": 0, "message": _message(sampled), "finish_reason": _finish(sampled)}
    answer = {**_head(body, "chat.completion"), "choices": [choice], "usage": _usage(sampled)}
    if body.get("logprobs") and "logprobs" not in without:
        choice["logprobs"] = {"content": _content(body, sampled)}
    if engine.kind == "vllm":
        choice["stop_reason"] = sampled.matched if isinstance(sampled.matched, str) else None
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = sampled.prompt
            choice["token_ids"] = sampled.ids
    else:
        choice["matched_stop"] = sampled.matched
        answer["metadata"] = engine.labels(sampled)
        if body.get("return_prompt_token_ids") or body.get("return_token_ids"):
            choice["prompt_token_ids"] = sampled.prompt
        if body.get("return_token_ids"):
            choice["response_token_ids"] = sampled.ids
        if body.get("return_meta_info"):
            choice["meta_info"] = _meta(engine, sampled)
            if "token_ids" in without or "logprobs" in without:
                del choice["meta_info"]["output_token_logprobs"]
        extension = _extension(body, sampled)
        if extension:
            answer["sglext"] = extension
    names = {"prompt_token_ids": ["prompt_token_ids"], "token_ids": ["token_ids", "response_token_ids"]}
    for name in (name for left_out in without for name in names.get(left_out, ())):
        answer.pop(name, None)
        choice.pop(name, None)
    return answer


def _extension(body: Mapping[str, Any], sampled: _Sampled) -> dict[str, Any]:
    extension: dict[str, Any] = {}
    if body.get("return_input_ids_in_sglext") and "prompt_token_ids" not in sampled.answer.without:
        extension["input_ids"] = sampled.prompt
    if body.get("return_output_ids_in_sglext") and "token_ids" not in sampled.answer.without:
        extension["output_ids"] = [sampled.ids]
    return extension


def _chunks(engine: Engine, body: Mapping[str, Any], sampled: _Sampled) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer, with three ids each."""
    head = _head(body, "chat.completion.chunk")
    without = sampled.answer.without
    with_ids = engine.kind == "vllm" and body.get("return_token_ids")
    message = _message(sampled)
    entries = _content(body, sampled)
    visible = len(message["content"].encode())
    first = {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    if with_ids and "prompt_token_ids" not in without:
        first["prompt_token_ids"] = sampled.prompt
    yield first
    for start in range(0, len(sampled.ids), 3):
        text = message["content"].encode()[start : min(start + 3, visible)].decode(errors="replace")
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        if body.get("logprobs") and "logprobs" not in without:
            choice["logprobs"] = {"content": entries[start : start + 3]}
        if with_ids and "token_ids" not in without:
            choice["token_ids"] = sampled.ids[start : start + 3]
        yield {**head, "choices": [choice]}
    calls: list[dict[str, Any]] = [
        {"index": place, **call} for place, call in enumerate(message.get("tool_calls") or ())
    ]
    last: dict[str, Any] = {
        "index": 0,
        "delta": {"tool_calls": calls} if calls else {},
        "finish_reason": _finish(sampled),
    }
    if engine.kind == "vllm":
        last["stop_reason"] = sampled.matched if isinstance(sampled.matched, str) else None
    else:
        last["matched_stop"] = sampled.matched
    yield {**head, "choices": [last]}
    extension = _extension(body, sampled) if engine.kind == "sglang" else {}
    if extension:
        yield {**head, "choices": [], "sglext": extension}
    options: Mapping[str, Any] = body.get("stream_options") or {}
    if options.get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(sampled)}
