"""Episodes that verifiers writes are imported, and their branches are what verifiers says. VERIFIERS_SRC names a
checkout of it."""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import forebay

SOURCE = os.environ.get("VERIFIERS_SRC")

pytestmark = pytest.mark.skipif(SOURCE is None, reason="VERIFIERS_SRC does not name a checkout: NOT TESTED")


@pytest.fixture(scope="session")
def vf() -> Any:
    sys.path.insert(0, SOURCE or "")
    import verifiers.v1

    return verifiers.v1


@pytest.fixture(scope="session")
def fb() -> Iterator[forebay.Client]:
    with forebay.Server() as server, server.client() as client:
        yield client


def turn(
    vf: Any, trace: Any, chance: random.Random, history: list[Any], tokens: list[int]
) -> tuple[list[Any], list[int]]:
    """A call that continues a conversation. Returns the conversation after it, and its ids."""
    from verifiers.v1 import graph
    from verifiers.v1.types import TurnTokens

    said = vf.UserMessage(content=f"question {chance.random()}")
    scaffold = [chance.randrange(100) for _ in range(chance.randrange(1, 4))]
    prompt = [*tokens, *scaffold]
    sampled = [100 + chance.randrange(100) for _ in range(chance.randrange(1, 5))]
    answer = vf.AssistantMessage(content=f"answer {chance.random()}")
    spans: list[tuple[int, int] | None] = [None] * len(history)
    spans.append((len(tokens), len(prompt) - 1) if len(scaffold) > 1 else None)
    response = vf.Response(
        id="",
        created=0,
        model="test",
        message=answer,
        finish_reason="stop",
        tokens=TurnTokens(
            prompt_ids=prompt,
            completion_ids=sampled,
            completion_logprobs=[-chance.random() for _ in sampled],
            message_spans=spans,
        ),
    )
    graph.prepare_turn(trace, [*history, said]).commit(response)
    return [*history, said, answer], [*prompt, *sampled]


def random_trace(vf: Any, chance: random.Random) -> Any:
    """A trace whose calls continue any earlier state of the conversation, or begin a new one."""
    trace = vf.Trace(
        agent=vf.AgentInfo(config=vf.AgentConfig(), name="solver"),
        task=vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt="q"), key="task-1"),
    )
    states: list[tuple[list[Any], list[int]]] = [([], [])]
    for _ in range(chance.randrange(1, 8)):
        history, tokens = chance.choice(states)
        if history and chance.random() < 0.2:
            # The client renders the history to other ids, so the graph forks where they differ.
            place = chance.randrange(len(tokens))
            tokens = [*tokens[:place], 99, *tokens[place + 1 :]]
        states.append(turn(vf, trace, chance, history, tokens))
    trace.record_reward("right", chance.random(), weight=2.0)
    trace.ok = True
    trace.stop("done")
    return trace


def test_branches_are_segments_and_every_sampled_token_is_trained_once(vf: Any, fb: forebay.Client) -> None:
    policy = f"p-{uuid.uuid4().hex}"
    fb.put_policy(policy, {"batch": {"groups": 1}})
    chance = random.Random(7)
    traces = {}
    lines = []
    for number in range(200):
        trace = random_trace(vf, chance)
        traces[trace.id] = trace
        episode = vf.Episode(
            env=vf.EnvInfo(id="sums"), task=trace.task, group=vf.GroupInfo(id=f"g{number}"), traces=[trace]
        )
        lines.append(episode.model_dump_json(exclude_none=True).encode() + b"\n")
    report = fb.import_("verifiers", b"".join(lines), policy=policy, group_size=1)
    assert (report.stored, report.refused) == (len(traces), 0), report
    seen = forks = 0
    while (batch := fb.lease(policy, wait_ms=0)) is not None:
        samples: dict[str, list[Any]] = {}
        for sample in fb.samples(batch.batch_id):
            samples.setdefault(sample.rollout_id, []).append(sample)
        for rollout_id, segments in samples.items():
            check(traces[rollout_id], segments)
            forks += len(segments) > 1
            seen += 1
    assert seen == len(traces)
    assert forks > len(traces) / 4, "many traces have branches"


def check(trace: Any, segments: list[Any]) -> None:
    """Compares the delivered segments of a trace with its branches."""
    assert segments[0].reward == pytest.approx(trace.reward)
    left = {tuple(branch.token_ids): branch for branch in trace.branches}
    trained = 0
    for segment in segments:
        branch = left.pop(tuple(segment.tokens))
        prompt = len(segment.tokens) - segment.response_length
        sampled, logprobs = branch.sampled_mask[prompt:], branch.logprobs[prompt:]
        for bit, is_sampled, found, expected in zip(
            segment.loss_mask, sampled, segment.logprobs, logprobs, strict=True
        ):
            assert not bit or (is_sampled and found == pytest.approx(expected, rel=1e-6))
        trained += sum(segment.loss_mask)
    assert trained == sum(sum(node.mask) for node in trace.nodes), "every sampled token is trained once"
