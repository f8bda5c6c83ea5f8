"""Recorded rollouts: from an agent's calls to a scripted engine to the rows that a trainer leases."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import forebay
from forebay import testing
from forebay._record import Turns
from forebay.errors import Invalid, NotEncodableError, RecorderFull, RecordError, UnknownPolicy
from forebay.testing import Answer, Engine

ASK_VLLM: dict[str, Any] = {"model": "policy", "logprobs": True, "extra_body": {"return_token_ids": True}}
ASK_SGLANG_STREAM: dict[str, Any] = {
    "model": "policy",
    "logprobs": True,
    "stream": True,
    "extra_body": {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
}


@pytest.fixture
def trained(fb: forebay.Client, policy: str) -> str:
    """A policy of groups of one whose rows need tokens and log-probabilities."""
    fb.put_policy(policy, {"require": ["tokens", "logprobs", "policy_version"]})
    return policy


def client(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=engine.base_url, api_key="none", max_retries=0)


def rows(fb: forebay.Client, policy: str) -> list[Any]:
    batch = fb.lease(policy, wait_ms=10_000)
    assert batch is not None
    return fb.samples(batch.batch_id)


def check_against_contexts(row: Any) -> int:
    """Recomputes the log-probability of every trained token from the ids before it. Returns how many there are."""
    prompt = len(row.tokens) - row.response_length
    trained = [place for place, mask in enumerate(row.loss_mask) if mask]
    for place in trained:
        at = prompt + place
        assert row.logprobs[place] == pytest.approx(testing.logprob(row.tokens[:at], row.tokens[at]), abs=1e-6)
    return len(trained)


def play(r: forebay.Rollout, llm: openai.OpenAI, turns: int) -> None:
    messages: list[Any] = [{"role": "user", "content": "question"}]
    for _ in range(turns):
        reply = llm.chat.completions.create(messages=messages, **ASK_VLLM)
        r.record(reply)
        messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": "1", "content": "result"}]


def kept_messages(fb: forebay.Client, r: forebay.Rollout) -> list[Any] | None:
    content = fb.get_content(r.policy, r.rollout_id)
    assert content is not None
    return None if content.messages is None else [item.message for item in content.messages.items]


def test_the_conversation_of_the_last_call_is_kept_with_the_rollout(fb: forebay.Client, trained: str) -> None:
    with Engine([Answer("let me see", tool_calls=[("add", {"a": 1})]), "three"]) as engine:
        llm = client(engine)
        messages: list[Any] = [{"role": "user", "content": "question"}]
        with fb.rollout(trained) as r:
            answer = llm.chat.completions.create(messages=messages, **ASK_VLLM)
            r.record(answer, messages=messages)
            # The agent goes on with the same list, and with an object that the package `openai` made.
            messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": "1", "content": "3"}]
            assert r.chat(llm, messages) == "three"
            messages.append({"role": "user", "content": "not sent"})
            r.reward = 1.0
        kept = kept_messages(fb, r)
        assert kept is not None
        assert [message["role"] for message in kept] == ["user", "assistant", "tool", "assistant"]
        assert kept[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert kept[3]["content"] == "three"


def test_messages_that_cannot_be_kept_do_not_fail_the_post(
    fb: forebay.Client, trained: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"role": "user", "content": "question"}
    with Engine(["a", "b", "c", "d"]) as engine:
        answer = client(engine).chat.completions.create(messages=[said], **ASK_VLLM)
        sent: list[tuple[Any, dict[str, Any]]] = [
            ({"role": "user", "content": b"bytes"}, {}),
            ({"role": "user", "content": "x" * (9 << 20)}, {}),
            (said, {"keep_messages": False}),
        ]
        for message, options in sent:
            with fb.rollout(trained, **options) as r:
                r.record(answer, messages=[message])
                r.reward = 1.0
            assert r.receipt.verdict == "kept"
            assert kept_messages(fb, r) is None
    assert ["are no JSON" in record.message for record in caplog.records] == [True, False]


def test_a_conversation_becomes_one_segment_with_its_tools_masked(fb: forebay.Client, trained: str) -> None:
    script = [Answer("let me see", tool_calls=[("add", {"a": 1, "b": 2})]), "three", "done"]
    with Engine(script) as engine:
        with fb.rollout(trained) as r:
            play(r, client(engine), 3)
            r.reward = 1.0
        assert (r.receipt.verdict, r.receipt.group.state) == ("kept", "ready")
        assert r.receipt.assembly is not None
        assert (r.receipt.assembly.calls, r.receipt.assembly.segments) == (3, 1)
        (row,) = rows(fb, trained)
        assert check_against_contexts(row) == sum(len(turn.tokens) for turn in r.turns)
        assert row.tokens[: len(engine.requests[2].prompt_tokens)] == engine.requests[2].prompt_tokens
        result = testing.encode("result")
        place = next(at for at in range(len(row.tokens)) if row.tokens[at : at + len(result)] == result)
        prompt = len(row.tokens) - row.response_length
        assert set(row.loss_mask[place - prompt : place - prompt + len(result)]) == {0}


def test_a_history_that_drifts_becomes_two_segments(fb: forebay.Client, trained: str) -> None:
    with Engine([Answer("one", drift=True), "two"]) as engine:
        with fb.rollout(trained) as r:
            play(r, client(engine), 2)
            r.reward = 1.0
        assert r.receipt.assembly is not None and r.receipt.assembly.segments == 2
        assert sum(check_against_contexts(row) for row in rows(fb, trained)) == sum(len(t.tokens) for t in r.turns)


def test_turns_name_the_call_that_they_continue_so_that_a_body_grows_with_the_conversation() -> None:
    with Engine(lambda request: "x" * 200) as engine, forebay.Server() as server, server.client() as fb:
        fb.put_policy("p", {})
        with fb.rollout("p") as r:
            play(r, client(engine), 20)
            r.reward = 1.0
        assert [turn.after for turn in r.turns] == [None, *(f"c{place}" for place in range(1, 20))]
        assert sum(len(turn.prompt_tokens) for turn in r.turns[1:]) == 19 * len([testing.TOOL, *b"result", 0, 0])


@pytest.mark.parametrize(("kind", "ask"), [("vllm", {**ASK_VLLM, "stream": True}), ("sglang", ASK_SGLANG_STREAM)])
def test_streamed_answers_are_recorded(fb: forebay.Client, trained: str, kind: Any, ask: dict[str, Any]) -> None:
    with Engine(["a streamed answer"], kind=kind) as engine, fb.rollout(trained) as r:
        stream = client(engine).chat.completions.create(messages=[{"role": "user", "content": "q"}], **ask)
        text = "".join(c.choices[0].delta.content or "" for c in r.stream(stream) if c.choices)
        r.reward = 1.0
    assert text == "a streamed answer"
    (row,) = rows(fb, trained)
    assert check_against_contexts(row) == len("a streamed answer") + 1


def test_a_stream_that_is_not_read_to_its_end_is_not_recorded(fb: forebay.Client, trained: str) -> None:
    with Engine(["a streamed answer"]) as engine, fb.rollout(trained) as r:
        ask = {**ASK_VLLM, "stream": True}
        stream = client(engine).chat.completions.create(messages=[{"role": "user", "content": "q"}], **ask)
        chunks = r.stream(stream)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
        assert r.turns == []
        r.abort("the agent stopped")
    assert r.receipt.reason == "no-reward"


def test_answers_of_generate_are_recorded(fb: forebay.Client, trained: str) -> None:
    with Engine(["seven"], kind="sglang", weight_version="default") as engine, fb.rollout(trained) as r:
        body = {"input_ids": [1, 2, 3], "return_logprob": True, "sampling_params": {"max_new_tokens": 3}}
        request = urllib.request.Request(f"{engine.url}/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request) as answer:
            turn = r.record(json.load(answer), prompt_tokens=[1, 2, 3])
        assert (list(turn.tokens), turn.finish_reason) == (testing.encode("sev"), "length")
        r.reward = 1.0
    (row,) = rows(fb, trained)
    assert check_against_contexts(row) == 3


def test_the_versions_that_sglang_reports_reach_the_trainer(fb: forebay.Client, trained: str) -> None:
    fb.publish(trained, 5)
    with Engine([Answer("abcd", versions=[(5, 2), (6, 0)])], kind="sglang") as engine, fb.rollout(trained) as r:
        r.chat(client(engine), "q")
        r.reward = 1.0
    (row,) = rows(fb, trained)
    assert (row.versions, row.policy_version) == ([[5, 0, 2], [6, 2, 3]], 5)


def test_the_version_is_that_of_the_start_of_the_rollout(fb: forebay.Client, trained: str) -> None:
    fb.publish(trained, 5)
    with Engine(["a", "b"]) as engine, fb.rollout(trained) as r:
        llm = client(engine)
        r.chat(llm, "q")
        fb.publish(trained, 6)
        r.record(llm.chat.completions.create(messages=[{"role": "user", "content": "other"}], **ASK_VLLM), version=6)
        r.reward = 1.0
    first, second = rows(fb, trained)
    assert (r.policy_version, first.versions, second.versions) == (5, [[5, 0, 2]], [[6, 0, 2]])


def test_chat_sends_the_sampling_of_the_rollout_and_repeats_calls_that_the_engine_aborts(
    fb: forebay.Client, trained: str
) -> None:
    script = [Answer("lo", finish_reason="abort"), Answer("lost", finish_reason="abort"), "found"]
    with Engine(script, kind="sglang") as engine:
        with fb.rollout(trained, sampling={"temperature": 0.7}, model="solver") as r:
            reply = r.chat(client(engine), "q", max_tokens=50)
            r.reward = 1.0
        assert (reply, reply.finish_reason, reply.message["role"]) == ("found", "stop", "assistant")
        bodies = [request.body for request in engine.requests]
    assert len(bodies) == 3 and len(r.turns) == 1
    assert {(body["model"], body["temperature"], body["top_k"], body["max_tokens"]) for body in bodies} == {
        ("solver", 0.7, -1, 50)
    }
    (row,) = rows(fb, trained)
    assert row.temperature == pytest.approx(0.7)


def test_a_reply_has_the_tool_calls_and_the_message_for_the_next_call(fb: forebay.Client, policy: str) -> None:
    with Engine([Answer("", tool_calls=[("add", {"a": 1})]), "2"]) as engine, fb.rollout(policy) as r:
        reply = r.chat(client(engine), "q")
        assert reply == "" and reply.tool_calls[0].function.name == "add"
        tool = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "2"}
        r.chat(client(engine), [{"role": "user", "content": "q"}, reply.message, tool])
        assert r.turns[1].after == "c1"
        r.reward = 1.0


@pytest.mark.parametrize("option", ["stream", "n", "seed", "logprobs"])
def test_chat_refuses_options_that_would_spoil_the_recording(fb: forebay.Client, policy: str, option: str) -> None:
    r = fb.rollout(policy)
    with pytest.raises(RecordError, match=option):
        r.chat(None, "q", **{option: 2})


def test_an_exception_posts_the_rollout_as_aborted_and_goes_on(fb: forebay.Client, trained: str) -> None:
    with Engine(["a"]) as engine, pytest.raises(ZeroDivisionError), fb.rollout(trained, group_id="g") as r:
        r.chat(client(engine), "q")
        r.reward = 1.0
        _ = 1 / 0
    assert (r.receipt.verdict, r.receipt.reason) == ("dropped", "no-reward")
    story = fb.get_trajectory(trained, r.rollout_id)
    assert story is not None and story.segments == 0


def test_the_exception_of_the_agent_goes_on_even_if_the_service_is_gone(own_server: forebay.Server) -> None:
    fb = forebay.Client(own_server.url, retry=forebay.types.Retry.none())
    with fb, pytest.raises(ZeroDivisionError), fb.rollout() as r:
        own_server.kill()
        _ = 1 / 0
    with pytest.raises(RecordError, match="has not been posted"):
        _ = r.receipt


def test_an_interrupted_program_posts_the_rollout_as_aborted(fb: forebay.Client, policy: str) -> None:
    with pytest.raises(KeyboardInterrupt), fb.rollout(policy) as r:
        raise KeyboardInterrupt
    assert r.receipt.reason == "no-reward"


def test_a_failed_policy_is_posted_with_its_turns(fb: forebay.Client, trained: str) -> None:
    with Engine(["a"]) as engine, fb.rollout(trained) as r:
        r.chat(client(engine), "q")
        r.status, r.reward = "failed", 0.0
    (row,) = rows(fb, trained)
    assert (row.status, row.reward) == ("failed", 0.0)


def test_a_rollout_without_calls_is_refused_here(fb: forebay.Client, policy: str) -> None:
    with pytest.raises(RecordError, match="no call was recorded"), fb.rollout(policy) as r:
        r.reward = 1.0
    assert fb.get_trajectory(policy, r.rollout_id) is None


def test_nan_is_refused_with_its_place(fb: forebay.Client, policy: str) -> None:
    with Engine(["a"]) as engine, pytest.raises(NotEncodableError) as refused, fb.rollout(policy) as r:
        r.chat(client(engine), "q")
        r.reward = 1.0
        r.reward_components["tests"] = math.nan
    assert [violation.pointer for violation in refused.value.violations] == ["/reward_components/tests"]
    r.reward_components["tests"] = 0.5
    assert r.post().verdict == "kept"


def test_what_the_service_refuses_can_be_corrected_and_posted_again(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, {"group": {"size": 2}})
    with Engine(["a"]) as engine, pytest.raises(Invalid, match="group_id"), fb.rollout(policy) as r:
        r.chat(client(engine), "q")
        r.reward = 1.0
    r.group_id = "g"
    assert r.post().group.size == 2
    assert r.post() is r.receipt


def test_the_number_of_the_pass_is_a_part_of_the_ids(fb: forebay.Client, policy: str) -> None:
    r = fb.rollout(policy, group_id="gsm8k-17", rollout_id="gsm8k-17-0", data_pass=3)
    assert (r.group_id, r.rollout_id) == ("gsm8k-17.pass3", "gsm8k-17-0.pass3")


def test_an_argument_that_does_not_exist_is_refused(
    fb: forebay.Client, asynchronous: forebay.AsyncClient, policy: str
) -> None:
    methods: list[Any] = [fb.rollout, fb.bundle().rollout, fb.session]
    methods += [asynchronous.rollout, asynchronous.bundle().rollout, asynchronous.session]
    for begin in methods:
        with pytest.raises(TypeError, match="no argument epoch: it takes .*data_pass"):
            begin(policy, epoch=3)


@pytest.mark.parametrize("options", [forebay.types.RolloutOptions, forebay.types.SessionOptions])
def test_help_has_a_line_for_each_argument(options: Any) -> None:
    listed = [line.split("`")[1] for line in inspect.getdoc(options).splitlines() if line.startswith("- `")]
    assert sorted(listed) == sorted(options.__optional_keys__) and len(listed) > 5


@pytest.mark.parametrize("in_bundle", [False, True])
def test_a_missing_reward_is_told_when_the_rollout_is_posted_and_not_when_it_is_kept(
    fb: forebay.Client,
    asynchronous: forebay.AsyncClient,
    policy: str,
    caplog: pytest.LogCaptureFixture,
    in_bundle: bool,
) -> None:
    bundle = fb.bundle() if in_bundle else None
    r = (bundle or fb).rollout(policy)
    r.record(answer([1], [2]))
    assert (r.trajectory() if bundle is None else bundle.trajectories()[0]).reward is None
    assert caplog.records == []
    (bundle or r).post()
    assert "has no reward, so the service dropped it" in caplog.text

    async def main() -> None:
        bundle = asynchronous.bundle() if in_bundle else None
        r = await (bundle or asynchronous).rollout(policy)
        r.record(answer([1], [2]))
        r.trajectory()
        assert caplog.records == []
        await (bundle or r).post()

    caplog.clear()
    asyncio.run(main())
    assert "has no reward, so the service dropped it" in caplog.text


@pytest.mark.parametrize("in_bundle", [False, True])
def test_a_rollout_whose_reward_scores_make_later_is_not_warned_of(
    fb: forebay.Client, policy: str, caplog: pytest.LogCaptureFixture, in_bundle: bool
) -> None:
    fb.put_policy(policy, {"scores": {"required": ["reward"]}})
    with fb.bundle() if in_bundle else contextlib.nullcontext(fb) as owner, owner.rollout(policy) as r:
        r.record(answer([1], [2]))
    assert (r.receipt.verdict, r.receipt.scoring) == ("kept", ["reward"])
    assert caplog.records == []
    assert fb.score(r.rollout_id, "reward", 0.5, policy=policy).group.state == "ready"
    assert [row.reward for row in rows(fb, policy)] == [0.5]


def test_an_admission_brings_the_version(fb: forebay.Client, policy: str) -> None:
    fb.publish(policy, 3)
    admission = fb.admit(policy, rollouts=1)
    fb.publish(policy, 4)
    with fb.rollout(policy, admission=admission) as r:
        r.abort()
    assert (r.policy_version, r.trajectory().admission_id) == (3, admission.admission_id)


def test_an_unknown_policy_is_refused_before_the_work(fb: forebay.Client) -> None:
    with pytest.raises(UnknownPolicy, match="does not exist"):
        fb.rollout("nobody")


def test_threads_may_record_into_one_rollout(fb: forebay.Client, trained: str) -> None:
    with Engine(lambda request: f"answer to {request.text}") as engine, fb.rollout(trained) as r:
        llm = client(engine)
        with ThreadPoolExecutor(8) as threads:
            replies = list(threads.map(lambda number: r.chat(llm, f"question {number}", agent=f"a{number}"), range(32)))
        assert replies[31] == "answer to question 31"
        r.reward = 1.0
    assert r.receipt.assembly is not None and r.receipt.assembly.segments == 32
    assert len({turn.id for turn in r.turns}) == 32


def answer(prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
    content = [{"logprob": -0.5}] * len(tokens)
    choice = {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "stop"}
    return {"prompt_token_ids": prompt, "choices": [choice]}


def test_a_full_recorder_refuses_calls_and_the_rollout_counts_as_truncated(fb: forebay.Client, trained: str) -> None:
    with fb.rollout(trained) as r:
        r._turns = Turns(turns_max=2)  # pyright: ignore[reportPrivateUsage]
        r.record(answer([1], [2]))
        r.record(answer([1, 2, 3], [4]))
        with pytest.raises(RecorderFull, match="2 calls already"):
            r.record(answer([1, 2, 3, 4, 5], [6]))
        r.reward = 0.0
    (row,) = rows(fb, trained)
    assert (row.status, row.tokens) == ("truncated", [1, 2, 3, 4])


def test_the_bound_of_tokens_counts_what_is_posted(fb: forebay.Client, policy: str) -> None:
    r = fb.rollout(policy)
    r._turns = Turns(tokens_max=6)  # pyright: ignore[reportPrivateUsage]
    r.record(answer([1], [2]))
    r.record(answer([1, 2, 3], [4]))
    with pytest.raises(RecorderFull, match="7 tokens, and may have 6"):
        r.record(answer([9, 9], [9]))
    r.record(answer([1, 2, 3, 4, 5], [6]))
    assert [list(turn.prompt_tokens) for turn in r.turns] == [[1], [3], [5]]


def test_a_prompt_that_begins_with_several_calls_names_the_longest(fb: forebay.Client, policy: str) -> None:
    r = fb.rollout(policy)
    for prompt, tokens in ([[1], [2]], [[1], [3]], [[1, 2, 4], [5]], [[1, 2, 6], [7]], [[1, 2, 4, 5], []]):
        r.record(answer(prompt, tokens))
    r.record(answer([1, 2, 4, 5, 8], [9]))
    assert [turn.after for turn in r.turns] == [None, None, "c1", "c1", "c3", "c3"]


def test_a_bundle_is_stored_as_one_execution(fb: forebay.Client, policy: str) -> None:
    other = f"{policy}-verifier"
    for name in (policy, other):
        fb.put_policy(name, {"group": {"size": 2}})
    with Engine(lambda request: f"{request.model}: {request.text}") as engine:
        llm = client(engine)
        with fb.bundle() as b:
            for _ in range(2):
                solver = b.rollout(policy, group_id="q", model="solver")
                verifier = b.rollout(other, group_id="q", model="verifier")
                critique = verifier.chat(llm, solver.chat(llm, "1 + 1?"))
                solver.reward = verifier.reward = float("solver" in critique)
    assert [receipt.group.state for receipt in b.receipts] == ["open", "open", "ready", "ready"]
    assert len({receipt.execution_id for receipt in b.receipts}) == 1
    assert solver.receipt is b.receipts[2]
    assert {row.reward for row in rows(fb, other)} == {1.0}


def test_an_exception_aborts_all_rollouts_of_a_bundle(fb: forebay.Client, policy: str) -> None:
    with Engine(["a"]) as engine, pytest.raises(ZeroDivisionError), fb.bundle() as b:
        first, second = b.rollout(policy), b.rollout(policy)
        first.chat(client(engine), "q")
        first.reward = 1 / 0
    assert [receipt.reason for receipt in b.receipts] == ["no-reward", "no-reward"]
    assert second.receipt.rollout_id == second.rollout_id


def test_one_role_may_fail_while_the_others_count(fb: forebay.Client, policy: str) -> None:
    with Engine(["a"]) as engine, fb.bundle() as b:
        first, second = b.rollout(policy), b.rollout(policy)
        first.chat(client(engine), "q")
        first.reward = 1.0
        second.abort("the sandbox did not start")
    assert [receipt.verdict for receipt in b.receipts] == ["kept", "dropped"]


def test_a_rollout_of_a_bundle_is_not_posted_alone(fb: forebay.Client, policy: str) -> None:
    b = fb.bundle()
    with b.rollout(policy) as r:
        r.abort()
    with pytest.raises(RecordError, match="belongs to a bundle"):
        r.post()
    assert [receipt.verdict for receipt in b.post()] == ["dropped"]
    with pytest.raises(RecordError, match="posted already"):
        b.rollout(policy)


@pytest.fixture
def asynchronous(server: forebay.Server) -> Iterator[forebay.AsyncClient]:
    client = forebay.AsyncClient(server.url)
    yield client
    asyncio.run(client.close())


def test_rollouts_are_recorded_asynchronously(
    fb: forebay.Client, asynchronous: forebay.AsyncClient, trained: str
) -> None:
    async def one(llm: openai.AsyncOpenAI, number: int) -> str:
        async with asynchronous.rollout(trained) as r:
            await r.chat(llm, f"question {number}")
            ask: Any = {**ASK_VLLM, "stream": True}
            stream = await llm.chat.completions.create(messages=[{"role": "user", "content": "streamed"}], **ask)
            async for _ in r.stream(stream):
                pass
            with pytest.raises(RecordError, match="async for"):
                r.record(stream)
            r.reward = 1.0
        return r.receipt.verdict

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as llm:
            return await asyncio.gather(*(one(llm, number) for number in range(4)))

    with Engine(lambda request: f"answer to {request.text}") as engine:
        assert asyncio.run(main()) == ["kept"] * 4
    assert [check_against_contexts(row) for row in rows(fb, trained)] == [21, 19]


def test_exceptions_and_cancellations_abort_asynchronous_rollouts(
    fb: forebay.Client, asynchronous: forebay.AsyncClient, policy: str
) -> None:
    async def failing() -> forebay.Receipt:
        with pytest.raises(ZeroDivisionError):
            async with asynchronous.rollout(policy) as r:
                _ = 1 / 0
        return r.receipt

    async def cancelled() -> str:
        begun = asyncio.Event()
        names: list[str] = []

        async def work() -> None:
            async with asynchronous.rollout(policy) as r:
                names.append(r.rollout_id)
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return names[0]

    assert asyncio.run(failing()).reason == "no-reward"
    story = fb.get_trajectory(policy, asyncio.run(cancelled()))
    assert story is not None and story.reason == "no-reward"


def test_bundles_are_recorded_asynchronously(asynchronous: forebay.AsyncClient, policy: str) -> None:
    async def main() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as llm:
            async with asynchronous.bundle() as b:
                first, second = await b.rollout(policy), await b.rollout(policy)
                await asyncio.gather(first.chat(llm, "one"), second.chat(llm, "two"))
                first.reward = second.reward = 1.0
            with pytest.raises(ZeroDivisionError):
                async with asynchronous.bundle() as failed:
                    await failed.rollout(policy)
                    failed.rollout(policy)
                    _ = 1 / 0
        return [receipt.verdict for receipt in b.receipts], [receipt.verdict for receipt in failed.receipts]

    with Engine(lambda request: request.text) as engine:
        kept, aborted = asyncio.run(main())
    assert (kept, aborted) == (["kept", "kept"], ["dropped"])
