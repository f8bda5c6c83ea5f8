"""Agents that are killed again and again, and go on in their sessions."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.testing import Engine, Request, logprob

AGENTS, CALLS, KILLS = 8, 8, 3

AGENT = f"""
import json, os, sys, urllib.request
base_url, key, name = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], sys.argv[1]
messages = []
for turn in range({CALLS}):
    messages.append({{"role": "user", "content": f"{{name}} turn {{turn}}"}})
    body = json.dumps({{"model": "policy", "messages": messages}}).encode()
    headers = {{"authorization": f"Bearer {{key}}", "content-type": "application/json"}}
    request = urllib.request.Request(f"{{base_url}}/chat/completions", data=body, headers=headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    messages.append({{"role": "assistant", "content": answer}})
    print(answer, flush=True)
"""


@pytest.fixture
def engine() -> Iterator[Engine]:
    numbers = itertools.count()

    def answer(request: Request) -> str:
        # No two answers are equal, so an agent whose call was sampled anew cannot go on with what was recorded.
        return f"answer {next(numbers)} to {request.text}"

    with Engine(answer) as engine:
        yield engine


def play(fb: forebay.Client, policy: str, number: int, seed: int) -> tuple[int, list[str], forebay.types.SessionEnded]:
    """Kills an agent some times while it works, and starts it again. Returns how often, and what it was answered."""
    rng = random.Random(seed)
    kills = rng.randrange(KILLS + 1)
    for attempt in range(kills + 1):
        died = attempt < kills
        try:
            with fb.session(policy, rollout_id=f"agent-{number}", resume=True) as s:
                assert s.attempt == attempt + 1
                environment = {**os.environ, **s.environment}
                command = [sys.executable, "-c", AGENT, f"agent-{number}"]
                with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as agent:
                    assert agent.stdout is not None
                    # It is at its next call when it is killed.
                    answers = list(itertools.islice(agent.stdout, rng.randrange(CALLS) if died else None))
                    if died:
                        agent.kill()
                        raise InterruptedError
                assert agent.returncode == 0
                s.reward = 1.0
                ended = s.finish()
                return kills, [line.strip() for line in answers], ended
        except InterruptedError:
            pass
    raise AssertionError("the last attempt is not killed")


def test_what_killed_agents_have_done_is_not_generated_again(engine: Engine, tmp_path: Path) -> None:
    config = tmp_path / "forebay.toml"
    upstream = f'[[upstream]]\nname = "scripted"\nkind = "vllm"\nurls = ["{engine.url}"]\n'
    config.write_text(f'[sessions]\nlisten = "127.0.0.1:0"\naudit = 0.0\n{upstream}')
    with forebay.Server(config=config) as server, server.client() as fb:
        fb.put_policy("pool", {"batch": {"groups": AGENTS}})
        with concurrent.futures.ThreadPoolExecutor(AGENTS) as threads:
            played = list(threads.map(lambda number: play(fb, "pool", number, number), range(AGENTS)))
        kills = sum(killed for killed, _, _ in played)
        assert kills > 0
        # At most the call that was under way is asked again.
        assert AGENTS * CALLS <= len(engine.requests) <= AGENTS * CALLS + kills
        batch = fb.lease("pool", wait_ms=10_000)
        assert batch is not None
        rows = {row.rollout_id: row for row in fb.samples(batch.batch_id)}
        assert len(rows) == AGENTS
        for number, (killed, answers, ended) in enumerate(played):
            assert len(answers) == len(set(answers)) == CALLS
            assert (ended.assembly.segments, ended.assembly.breaks) == (1, 0)
            assert ended.assembly.calls - ended.assembly.dropped.abandoned == CALLS
            assert ended.assembly.dropped.abandoned <= killed
            row = rows[f"agent-{number}"]
            tokens, mask, logprobs = row.tokens, row.loss_mask, row.logprobs
            assert tokens is not None
            assert mask is not None
            assert logprobs is not None
            assert sum(mask) == ended.assembly.trained_tokens
            for place, (trained, found) in enumerate(zip(mask, logprobs, strict=True), len(tokens) - len(mask)):
                if trained:
                    assert found == pytest.approx(logprob(tokens[:place], tokens[place]))
