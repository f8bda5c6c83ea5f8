"""What docs/connect.md says about vLLM, checked with vLLM itself."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from agents import AGENTS, TOOLS, Answer
from conftest import PARSES_NOTHING, PROCESSED, Stack
from engine import CONTEXT, WAIT_S, Exchange

from forebay.errors import UpstreamNotReady
from forebay.types import Retry

TURNS = ["city rain", "rain sun wind", "list file"]
STOP_TEXTS = [" rain", " sun", " wind", " city", " number"]
STOP_TEXTS_OBSERVE = 4
"""vLLM's chat endpoint takes no more."""
AT_ONCE = 4

only_processed = pytest.mark.parametrize("stack", [PROCESSED], indirect=True, ids=str)


@pytest.mark.subject("probe")
def test_the_probe_finds_out_what_is_recorded(stack: Stack) -> None:
    for name in [*(f"probe{n}" for n in range(10)), *stack.flags.modes]:
        stack.session(stack.policy(name), 1.0).abort("only opened")
        if stack.flags.is_processed:
            stack.session(stack.policy(name), 0.7).abort("only opened")
        else:
            with pytest.raises(UpstreamNotReady, match="processed_logprobs"):
                stack.session(stack.policy(name), 0.7, retry=Retry.none())


@pytest.mark.subject("refusal of the mode exact")
def test_the_mode_exact_needs_the_endpoints_for_ids(stack: Stack) -> None:
    if stack.flags.takes_ids:
        pytest.skip("the engine has them")
    with pytest.raises(UpstreamNotReady, match="start vLLM with --enable-scale-out"):
        stack.session(stack.policy("exact"), retry=Retry.none())


@pytest.mark.subject("three dialects")
@pytest.mark.parametrize("mode", ["observe", "exact"])
@pytest.mark.parametrize("stream", [False, True], ids=["answer", "events"])
@pytest.mark.parametrize("dialect", AGENTS)
def test_a_conversation_is_recorded_as_the_engine_sampled_it(
    stack: Stack, dialect: str, stream: bool, mode: str
) -> None:
    if mode not in stack.flags.modes:
        pytest.skip("the engine takes no ids")
    with_tools = {"tools": TOOLS} if stack.flags.calls_tools else {}
    without_thoughts: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    variants = [with_tools] * 3 + [without_thoughts if stack.flags.thinks else {}]

    def play(extra: dict[str, Any]) -> list[Answer]:
        policy = stack.policy(mode)
        with stack.session(policy) as session:
            received = AGENTS[dialect](session, TURNS, stream, **extra)
            calls, rows = stack.rollout(session, policy)
        stack.checker.answers(received, calls)
        if mode == "exact":
            assert len(rows) == 1, "the conversation is one segment"
        return received

    with ThreadPoolExecutor(AT_ONCE) as pool:
        received = [answer for answers in pool.map(play, variants) for answer in answers]
    assert any(answer.reasoning for answer in received) == stack.flags.thinks


@pytest.mark.subject("tools")
@pytest.mark.parametrize("mode", ["observe", "exact"])
def test_a_tool_call_reaches_the_agent(stack: Stack, mode: str) -> None:
    if not stack.flags.calls_tools:
        pytest.skip("the engine has no parser of tool calls")
    # The model calls a tool often, but not in each answer.
    for _ in range(40):
        policy = stack.policy(mode)
        with stack.session(policy) as session:
            (answer,) = AGENTS["chat"](session, TURNS[:1], False, tools=TOOLS)
            calls, _ = stack.rollout(session, policy)
        stack.checker.answers([answer], calls)
        if answer.calls:
            return
    pytest.fail("no answer had a tool call")


@pytest.mark.subject("pieces of an answer")
@pytest.mark.parametrize("parses", [True, False], ids=["tools", "plain"])
def test_an_answer_arrives_while_it_is_sampled(stack: Stack, parses: bool) -> None:
    if not stack.flags.takes_ids or (parses and not stack.flags.calls_tools):
        pytest.skip("the engine takes no ids" if parses else "the engine has no parser of tool calls")
    options: dict[str, Any] = {"tools": TOOLS} if parses else {}
    policy = stack.policy("exact")
    pieces: list[int] = []
    of_calls: list[int] = []
    with stack.session(policy) as session:
        with openai.OpenAI(base_url=session.base_url, api_key=session.key) as client:
            for turn in range(12):
                question: Any = [{"role": "user", "content": f"{TURNS[0]} {turn}"}]
                chunks = client.chat.completions.create(
                    model="m", messages=question, max_tokens=100, stream=True, **options
                )
                deltas = [chunk.choices[0].delta for chunk in chunks]
                said = [delta for delta in deltas if delta.content or getattr(delta, "reasoning", None)]
                pieces.append(len(said))
                of_calls.append(sum(bool(delta.tool_calls) for delta in deltas))
        stack.rollout(session, policy)
    assert max(pieces) > 3, "no answer came in pieces"
    assert not parses or max(of_calls) > 1, "no tool call came in pieces"


@pytest.mark.subject("one request for an answer that nothing parses")
@pytest.mark.parametrize("stack", [PARSES_NOTHING], indirect=True, ids=str)
def test_an_engine_without_parsers_is_asked_once_for_an_answer(stack: Stack) -> None:
    policy = stack.policy("exact")
    before = len(stack.proxy.exchanges)
    with stack.session(policy) as session:
        received = AGENTS["chat"](session, TURNS, False)
        exchanges = stack.proxy.exchanges[before:]
        calls, _ = stack.rollout(session, policy)
    derendered = [exchange for exchange in exchanges if exchange.path.endswith("/derender")]
    # The service asks now and then whether this is still so.
    assert not any(exchange.request.get("chat_request") for exchange in derendered)
    for answer, call in zip(received, calls, strict=True):
        spoken = call.tokens[:-1] if call.tokens[-1] in stack.checker.stops else call.tokens
        choice = {"index": 0, "token_ids": spoken, "finish_reason": "stop"}
        body = {"model": "qwen", "generate_response": {"request_id": "r", "choices": [choice]}}
        parsed = stack.engine.post("/v1/chat/completions/derender", body)
        assert answer.text == (parsed["choices"][0]["message"]["content"] or "")


@pytest.mark.subject("stop texts")
@pytest.mark.parametrize("mode", ["observe", "exact"])
@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_stop_text_ends_an_answer_and_is_cut(stack: Stack, dialect: str, mode: str) -> None:
    if mode not in stack.flags.modes:
        pytest.skip("the engine takes no ids")

    texts = STOP_TEXTS if mode == "exact" else STOP_TEXTS[:STOP_TEXTS_OBSERVE]

    def play(_: int) -> Answer:
        policy = stack.policy(mode)
        with stack.session(policy) as session:
            names = {"chat": "stop", "messages": "stop_sequences"}
            (answer,) = AGENTS[dialect](session, TURNS[:1], False, **{names[dialect]: texts})
            stack.rollout(session, policy)
        assert not any(text in answer.text + answer.reasoning for text in texts)
        return answer

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(play, range(12)))
    if dialect == "messages":
        named = {answer.stopped_by for answer in answers}
        assert named <= {None, *texts} and named != {None}


@pytest.mark.subject("counting tokens")
def test_tokens_are_counted_as_the_engine_counts_them(stack: Stack) -> None:
    if not stack.flags.takes_ids:
        pytest.skip("the number is exact only in the mode exact")
    policy = stack.policy("exact")
    with stack.session(policy) as session:
        with anthropic.Anthropic(base_url=session.anthropic_url, api_key=session.key) as client:
            counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": TURNS[0]}])
        AGENTS["messages"](session, TURNS[:1], False)
        (call,), _ = stack.rollout(session, policy)
    assert counted.input_tokens == len(call.prompt)


@pytest.mark.subject("prompts that are too long")
@pytest.mark.parametrize("mode", ["observe", "exact"])
def test_a_prompt_beyond_the_context_is_refused_with_the_code_that_agents_know(stack: Stack, mode: str) -> None:
    if mode not in stack.flags.modes:
        pytest.skip("the engine takes no ids")
    session = stack.session(stack.policy(mode))
    with pytest.raises(openai.BadRequestError) as refused:
        AGENTS["chat"](session, ["rain " * CONTEXT], False)
    assert refused.value.code == "context_length_exceeded"
    session.abort("only refused")


@pytest.mark.subject("teachers")
@pytest.mark.parametrize("mode", ["observe", "exact"])
def test_a_teacher_scores_what_was_sampled(stack: Stack, mode: str) -> None:
    if mode not in stack.flags.modes:
        pytest.skip("the engine takes no ids")
    policy = stack.policy(mode, require=["tokens", "logprobs", "teacher_logprobs"], sessions={"teacher": "teacher"})
    with stack.session(policy, 1.0) as session:
        AGENTS["chat"](session, TURNS, False)
        _, rows = stack.rollout(session, policy)
    for row in rows:
        tokens, mask, scores = row.tokens or [], row.loss_mask or [], row.teacher_logprobs or []
        start = len(tokens) - row.response_length
        places = [place for place, is_trained in enumerate(mask) if is_trained]
        stack.checker.compare(tokens, [start + place for place in places], [scores[place] for place in places], 1.0)


class Paused:
    """The engine is paused and keeps what it is asked. The calls are found by a question that no other test asks."""

    def __init__(self, stack: Stack) -> None:
        self.question = f"rain {uuid.uuid4().hex}"
        self._stack = stack

    def __enter__(self) -> Paused:
        self._stack.engine.post("/pause?mode=keep")
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._stack.engine.post("/resume")

    def asked(self) -> list[Exchange]:
        """The requests to sample an answer to the question."""
        return [exchange for exchange in list(self._stack.proxy.exchanges) if self.question in self._prompt(exchange)]

    def wait_for_calls(self, count: int) -> None:
        self._stack.proxy.wait_for(lambda _: len(self.asked()) >= count)

    def _prompt(self, exchange: Exchange) -> str:
        if exchange.path == "/inference/v1/generate":
            return self._stack.checker.tokenizer.decode(exchange.request["token_ids"])
        return str(exchange.request["messages"]) if exchange.path == "/v1/chat/completions" else ""


def in_background(work: Callable[[], list[Answer]]) -> Future[list[Answer]]:
    with_one = ThreadPoolExecutor(1)
    future = with_one.submit(work)
    with_one.shutdown(wait=False)
    return future


@only_processed
@pytest.mark.subject("disconnects")
@pytest.mark.parametrize("mode", ["observe", "exact"])
def test_a_call_whose_agent_leaves_is_cancelled_at_the_engine(stack: Stack, mode: str) -> None:
    policy = stack.policy(mode)
    with stack.session(policy) as session:
        with Paused(stack) as pause:

            async def leave() -> None:
                client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key)
                question: Any = [{"role": "user", "content": pause.question}]
                call = asyncio.create_task(client.chat.completions.create(model="m", messages=question))
                await asyncio.to_thread(pause.wait_for_calls, 1)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                await client.close()

            asyncio.run(leave())
            stack.proxy.wait_for(lambda _: all(exchange.is_over for exchange in pause.asked()))
            assert [exchange.answer for exchange in pause.asked()] == [None]
        assert stack.fb.list_session_turns(session.session_id).turns == []
        AGENTS["chat"](session, TURNS[:1], False)
        calls, _ = stack.rollout(session, policy)
    assert len(calls) == 1


@only_processed
@pytest.mark.subject("aborts, pauses and versions")
@pytest.mark.parametrize("mode", ["observe", "exact"])
def test_a_call_that_a_new_version_interrupts_is_sampled_again(stack: Stack, mode: str) -> None:
    policy = stack.policy(mode)
    with stack.session(policy) as session:
        with Paused(stack) as pause:
            stack.fb.publish(policy, 1)
            call = in_background(lambda: AGENTS["chat"](session, [pause.question], False))
            pause.wait_for_calls(1)
            stack.fb.publish(policy, 2)
            # The call may not have reached the engine yet.
            while not pause.asked()[0].is_over:
                stack.engine.post("/abort_requests", {})
            pause.wait_for_calls(2)
        received = call.result(WAIT_S)
        calls, (row,) = stack.rollout(session, policy)
    stack.checker.answers(received, calls)
    assert [version for version, _, _ in row.versions or []] == [2]


@only_processed
@pytest.mark.subject("kill -9 and restart")
@pytest.mark.parametrize("mode", ["observe", "exact"])
def test_a_call_outlives_the_engine(stack: Stack, mode: str) -> None:
    policy = stack.policy(mode)
    with stack.session(policy) as session:
        with Paused(stack) as pause:
            call = in_background(lambda: AGENTS["chat"](session, [pause.question, *TURNS], False))
            pause.wait_for_calls(1)
            stack.engine.kill()
            # The service asks again while the engine is gone.
            pause.wait_for_calls(2)
            stack.engine.start()
        received = call.result(WAIT_S)
        calls, _ = stack.rollout(session, policy)
    stack.checker.answers(received, calls)
    assert len(calls) == 1 + len(TURNS)
