"""The recorder: what an agent's calls to an inference engine returned becomes the turns of one posted rollout.

The service assembles the turns into segments, so that there is one rule for what is trained, and it is the service's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from . import _answers
from ._answers import field
from ._options import RolloutOptions, as_evaluation, check_names, evaluation_of, numbered, sampling_of
from ._record import TOKENS_MAX, Turns
from ._retry import Retry
from ._uuid import uuid7
from ._wire import Receipt, Status, Trajectory, Turn
from .errors import EngineAborted, ForebayError, RecordError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .aio import AsyncClient
    from .client import Client

log = logging.getLogger("forebay")

REASON_CHARS_MAX = 1_000
"""How much of an exception's text becomes part of the metadata of an aborted rollout."""

CHAT_ATTEMPTS = 10
"""How often `chat` makes a call that the engine aborts. With the pauses between them that is about ten seconds."""

LAST_POST_TIMEOUT_S = 5.0
"""How long the post of an aborted rollout may take when the process is about to end."""

ENGINE_FIELDS = {"return_token_ids": True, "return_prompt_token_ids": True, "return_meta_info": True}
"""What `chat` asks an engine for: vLLM knows the first, SGLang all of them."""

MESSAGES_BYTES_MAX = 8 << 20
"""The most bytes of the messages that are kept with a rollout: nothing is trained on them, so they must not be what
makes a post too large."""

IN_BUNDLE = "the rollout belongs to a bundle, which posts all of its rollouts together"


class Reply(str):
    """The text of an answer, with the rest of the answer."""

    answer: Any
    """The engine's whole answer."""
    message: dict[str, Any]
    """The message, to be appended to the conversation."""
    tool_calls: list[Any]
    """The tool calls, as in the answer."""
    finish_reason: str | None

    @classmethod
    def of(cls, answer: Any) -> Reply:
        """The reply of a chat completion."""
        choice = field(answer, "choices")[0]
        message = field(choice, "message")
        reply = cls(field(message, "content") or "")
        reply.answer = answer
        reply.message = _plain(message)
        reply.tool_calls = list(field(message, "tool_calls") or ())
        reply.finish_reason = field(choice, "finish_reason")
        return reply


class Recording:
    """What a rollout consists of so far, without the calls to the service."""

    def __init__(self, policy: str, options: RolloutOptions) -> None:
        check_names("rollout", options, RolloutOptions.__optional_keys__)
        options = cast("RolloutOptions", as_evaluation(options))
        data_pass, admission = options.get("data_pass"), options.get("admission")
        self.policy = policy
        self.rollout_id = numbered(options.get("rollout_id"), data_pass) or uuid7()
        self.group_id = numbered(options.get("group_id"), data_pass)
        self.group_size = options.get("group_size")
        self._evaluation = evaluation_of(options.get("eval"), options.get("task"), self.group_id, self.group_size)
        self.environment = options.get("environment")
        self.execution_id = options.get("execution_id")
        self.admission_id = None if admission is None else admission.admission_id
        self.sampling = sampling_of(options)
        self.model = options.get("model") or policy
        """The name of the model in calls that `chat` makes."""
        self.reward: float | None = None
        """The reward of the whole rollout. Set it before the end of the block, unless scores make it later."""
        self.reward_components: dict[str, float] = {}
        self.status: Status | None = None
        """How the execution ended. If it is not set: `completed`, or `truncated` if the recorder became full."""
        self.messages: Sequence[Mapping[str, Any]] | None = None
        """The conversation, to be kept with the rollout. Nothing is trained on it. If it is not set, it is the messages
        and the answer of the last call that was recorded with its messages."""
        self.metadata: dict[str, Any] = dict(options.get("metadata") or {})
        self._policy_version: int | None = (
            options.get("policy_version") if admission is None else admission.policy_version
        )
        self._labels = options.get("version_labels")
        self._keeps_messages = options.get("keep_messages") is not False
        self._conversation: list[Any] | None = None
        self._turns = Turns()
        self._aborted: str | None = None
        self._receipt: Receipt | None = None

    @property
    def policy_version(self) -> int:
        """The version of the policy that was current when the rollout began."""
        if self._policy_version is None:
            raise RecordError("the rollout has not begun: use it in a `with` block")
        return self._policy_version

    @property
    def turns(self) -> list[Turn]:
        """The recorded calls."""
        return list(self._turns)

    @property
    def receipt(self) -> Receipt:
        """What the service decided about the rollout; only after it was posted."""
        if self._receipt is None:
            raise RecordError("the rollout has not been posted: that happens at the end of its block")
        return self._receipt

    def record(
        self,
        answer: object,
        *,
        messages: Iterable[Any] | None = None,
        prompt_tokens: Sequence[int] | None = None,
        agent: str | None = None,
        delivered: bool = True,
        version: int | None = None,
    ) -> Turn:
        """Adds an answer of an inference engine, as a dictionary or as an object of the package `openai`.

        Answers of chat endpoints of vLLM and SGLang, of `/v1/completions`, of SGLang's `/generate`, and the list of the
        chunks of a streamed chat are taken. They must have the ids of the prompt, the sampled ids and their
        log-probabilities; the error names what the request has to ask for. Nothing is made up.

        `messages` are those of the request. The conversation of the last call is kept with the rollout, so that people,
        judges and exports can read it; not that of an answer in chunks.

        `prompt_tokens` are the ids that were sent, where the engine does not return them. `agent` names who made the
        call, if the execution has several agents. `version` is the version that was published when the call began, if
        it is known to be another one than at the start of the rollout; it counts where the engine does not say which
        weights it used.
        """
        if hasattr(answer, "__aiter__"):
            raise RecordError("the answer is an asynchronous stream: read it with `async for chunk in r.stream(...)`")
        call = _answers.read(answer, prompt_tokens)
        at_start = self.policy_version if version is None else version
        spans = _answers.versions(call, at_start, self._labels)
        if spans is None and at_start != self.policy_version and len(call.tokens) > 0:
            spans = [[at_start, 0, len(call.tokens)]]
        turn = self._turns.add(call, spans, agent, delivered)
        if messages is not None and self._keeps_messages and not isinstance(answer, list):
            # A copy, because agents append to the list that they sent.
            self._conversation = [*messages, _message_of(answer)]
        return turn

    def abort(self, reason: str = "aborted") -> None:
        """Makes this a rollout that failed for a reason that is not the policy's fault, such as a crashed sandbox.

        It is posted with the status `aborted`, without turns and reward, so that its place in the group is free again.
        """
        self._aborted = reason

    def trajectory(self) -> Trajectory:
        """The rollout as it is posted."""
        posted = Trajectory(
            policy=self.policy,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            group_size=self.group_size,
            environment=self.environment,
            execution_id=self.execution_id,
            policy_version=self.policy_version,
            admission_id=self.admission_id,
            sampling=self.sampling,
            metadata=self.metadata or None,
            **self._evaluation,
        )
        if self._aborted is not None:
            metadata = {**self.metadata, "aborted": self._aborted[:REASON_CHARS_MAX]}
            return replace(posted, status="aborted", metadata=metadata)
        if len(self._turns) == 0 and self.messages is None and self.status not in ("aborted", "failed"):
            raise RecordError(
                "no call was recorded in this rollout: pass the engine's answers to record(), or call abort()"
            )
        return replace(
            posted,
            status=self.status or ("truncated" if self._turns.is_full else None),
            reward=self.reward,
            reward_components=self.reward_components or None,
            turns=list(self._turns) or None,
            messages=self._kept_messages() if self.messages is None else self.messages,
        )

    def _kept_messages(self) -> list[dict[str, Any]] | None:
        """The conversation of the last call, unless it cannot be posted: a rollout is worth more than its messages."""
        if self._conversation is None:
            return None
        try:
            kept = json.dumps([_plain(message) for message in self._conversation], allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            log.warning("the messages of the rollout %s are no JSON and are not kept: %s", self.rollout_id, error)
            return None
        if len(kept) > MESSAGES_BYTES_MAX:
            log.warning(
                "the messages of the rollout %s take %d bytes and are not kept: %d are allowed",
                self.rollout_id,
                len(kept),
                MESSAGES_BYTES_MAX,
            )
            return None
        return json.loads(kept)

    @property
    def has_begun(self) -> bool:
        """Whether the version of the policy is noted."""
        return self._policy_version is not None

    def posted(self, receipt: Receipt) -> None:
        """Keeps the receipt of a rollout that its bundle posted."""
        self._receipt = receipt

    def failed(self, error: BaseException) -> None:
        """Aborts the rollout because of an exception, unless it is aborted already."""
        if self._aborted is None:
            self.abort(f"{type(error).__name__}: {error}")

    def _request(self, messages: str | Iterable[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call of chat completions."""
        for name in ("stream", "n", "seed", "logprobs"):
            if name in options:
                raise RecordError(
                    f"chat() does not take {name}: make the call yourself and pass its answer to record()"
                )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        request: dict[str, Any] = {"model": self.model, "messages": list(messages), "logprobs": True}
        extra: dict[str, Any] = dict(ENGINE_FIELDS)
        if self.sampling is not None:
            request["temperature"], request["top_p"] = self.sampling.temperature, self.sampling.top_p
            extra["top_k"] = self.sampling.top_k
        request.update(options)
        request["extra_body"] = {**extra, **(options.get("extra_body") or {})}
        return request

    def _collect(self, chunks: list[Any], chunk: Any) -> None:
        chunks.append(chunk)
        if len(chunks) > TOKENS_MAX:
            raise RecordError(f"the stream has more than {TOKENS_MAX} chunks")


class Rollout(Recording):
    """One rollout: its calls are recorded in a `with` block, and it is posted at the end of the block.

    If the block raises, the rollout is posted with the status `aborted`, without turns and reward, and the exception
    goes on. Several threads may record into one rollout.
    """

    def __init__(
        self, client: Client, policy: str, *, bundle: object | None = None, **options: Unpack[RolloutOptions]
    ) -> None:
        super().__init__(policy, options)
        self._client = client
        self._bundle = bundle
        self._lock = threading.Lock()
        if self._policy_version is None:
            self._policy_version = client.version(policy).version

    def chat(self, llm: Any, messages: str | Iterable[Any], *, agent: str | None = None, **options: Any) -> Reply:
        """Calls `llm.chat.completions.create` (of `openai.OpenAI` or the like) and records the answer.

        `messages` may be the text of one user message. The sampling of the rollout is sent with the call; `options` are
        further arguments, such as `max_tokens` and `tools`. If the engine aborts the call, as it does when its weights
        are replaced, the call is made again.
        """
        request = self._request(messages, options)
        for pause in _pauses():
            answer = llm.chat.completions.create(**request)
            try:
                self.record(answer, messages=request["messages"], agent=agent)
            except EngineAborted:
                if pause is None:
                    raise
                time.sleep(pause)
            else:
                return Reply.of(answer)
        raise AssertionError("the last attempt returns or raises")

    def stream(
        self,
        chunks: Iterable[Any],
        *,
        prompt_tokens: Sequence[int] | None = None,
        agent: str | None = None,
        version: int | None = None,
    ) -> Iterator[Any]:
        """Yields the chunks of a streamed chat answer, and records the answer at its end.

        An answer that is not read to its end is not recorded.
        """
        collected: list[Any] = []
        for chunk in chunks:
            self._collect(collected, chunk)
            yield chunk
        self.record(collected, prompt_tokens=prompt_tokens, agent=agent, version=version)

    def post(self) -> Receipt:
        """Posts the rollout, if that has not happened. The end of the block does it."""
        if self._bundle is not None:
            raise RecordError(IN_BUNDLE)
        with self._lock:
            if self._receipt is None:
                trajectory = self.trajectory()
                self._receipt = self._client.post(trajectory)
                warn_without_reward([trajectory], [self._receipt])
            return self._receipt

    def __enter__(self) -> Rollout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._bundle is None:
                self.post()
            return
        self.failed(error)
        if self._bundle is None and self._receipt is None:
            self._receipt = post_aborted(self._client, error, self.trajectory())


def warn_without_reward(trajectories: Sequence[Trajectory], receipts: Sequence[Receipt]) -> None:
    """Logs which rollouts of a post were dropped without a reward. Only the service knows that, because rules may mask
    such rollouts, or have them wait for scores."""
    for trajectory, receipt in zip(trajectories, receipts, strict=False):
        if receipt.reason == "no-reward" and trajectory.status not in ("aborted", "failed"):
            log.warning("the rollout %s has no reward, so the service dropped it", trajectory.rollout_id)


def post_aborted(client: Client, error: BaseException, trajectory: Trajectory) -> Receipt | None:
    """Posts a rollout that an exception aborted."""
    receipts = post_all_aborted(client, error, [trajectory])
    return receipts[0] if receipts else None


def post_all_aborted(client: Client, error: BaseException, trajectories: Sequence[Trajectory]) -> list[Receipt] | None:
    """Posts what an exception aborted. A failure is only logged, so that the exception of the agent goes on."""
    if not isinstance(error, Exception):
        # The process is about to end, for example by Ctrl-C.
        client = client.with_options(timeout_s=LAST_POST_TIMEOUT_S, retry=Retry.none())
    try:
        return client.post(trajectories)
    except ForebayError as problem:
        ids = ", ".join(str(trajectory.rollout_id) for trajectory in trajectories[:10])
        log.warning("%d aborted rollouts could not be posted (%s): %s", len(trajectories), ids, problem)
        return None


def _pauses() -> Iterator[float | None]:
    """The pause after each attempt of `chat`; None after the last one."""
    for attempt in range(CHAT_ATTEMPTS - 1):
        yield min(0.1 * 2.0**attempt, 2.0) * random.random()
    yield None


def _message_of(answer: Any) -> dict[str, Any]:
    """The message of an answer, which is the text if it is no chat completion."""
    choices = field(answer, "choices")
    choice = choices[0] if choices else answer
    message = field(choice, "message")
    return {"role": "assistant", "content": field(choice, "text") or ""} if message is None else _plain(message)


def _plain(message: Any) -> dict[str, Any]:
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    found = {name: value for name, value in cast("Mapping[str, Any]", message).items() if value is not None}
    # Engines refuse an empty list.
    return {name: value for name, value in found.items() if name != "tool_calls" or value}


class AsyncRollout(Recording):
    """`Rollout` for asyncio: `async with fb.rollout(...) as r`, or `r = await b.rollout(...)` of a bundle."""

    def __init__(
        self, client: AsyncClient, policy: str, *, bundle: object | None = None, **options: Unpack[RolloutOptions]
    ) -> None:
        super().__init__(policy, options)
        self._client = client
        self._bundle = bundle

    async def chat(self, llm: Any, messages: str | Iterable[Any], *, agent: str | None = None, **options: Any) -> Reply:
        """Calls `llm.chat.completions.create` (of `openai.AsyncOpenAI` or the like) and records the answer."""
        request = self._request(messages, options)
        for pause in _pauses():
            answer = await llm.chat.completions.create(**request)
            try:
                self.record(answer, messages=request["messages"], agent=agent)
            except EngineAborted:
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            else:
                return Reply.of(answer)
        raise AssertionError("the last attempt returns or raises")

    async def stream(
        self,
        chunks: AsyncIterable[Any],
        *,
        prompt_tokens: Sequence[int] | None = None,
        agent: str | None = None,
        version: int | None = None,
    ) -> AsyncIterator[Any]:
        """Yields the chunks of a streamed chat answer, and records the answer at its end."""
        collected: list[Any] = []
        async for chunk in chunks:
            self._collect(collected, chunk)
            yield chunk
        self.record(collected, prompt_tokens=prompt_tokens, agent=agent, version=version)

    async def post(self) -> Receipt:
        """Posts the rollout, if that has not happened. The end of the block does it."""
        if self._bundle is not None:
            raise RecordError(IN_BUNDLE)
        if self._receipt is None:
            trajectory = self.trajectory()
            self._receipt = await self._client.run(lambda: self._client.sync.post(trajectory))
            warn_without_reward([trajectory], [self._receipt])
        return self._receipt

    def __await__(self) -> Generator[Any, None, AsyncRollout]:
        return self._begin().__await__()

    async def _begin(self) -> AsyncRollout:
        if self._policy_version is None:
            self._policy_version = (await self._client.version(self.policy)).version
        return self

    async def __aenter__(self) -> AsyncRollout:
        return await self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._bundle is None:
                await self.post()
            return
        self.failed(error)
        if self._bundle is None and self._receipt is None:
            sync, trajectory = self._client.sync, self.trajectory()
            self._receipt = await self._client.run(lambda: post_aborted(sync, error, trajectory))
