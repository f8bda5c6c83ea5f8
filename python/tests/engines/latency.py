"""Measures what recording adds to a call: vLLM itself, the mode observe and the mode exact, in turn in one run.

With --stream it measures the time until the first words of an answer instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import requests
from conftest import PROCESSED, configuration
from engine import Engine

import forebay

TOKENS = 8
"""Of each answer. The model never ends one so early, so all calls take the same work."""
STREAMED = 64
"""The most tokens of an answer of which the first words are waited for."""
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="calls of each agent in each way [default: 100]")
    parser.add_argument("--agents", type=int, default=1, help="agents at once [default: 1]")
    parser.add_argument("--stream", action="store_true", help="wait for the first words of a stream")
    options = parser.parse_args()
    model = Path(os.environ["FOREBAY_ENGINE_MODELS"], PROCESSED.model)
    engine = Engine(model, PROCESSED.arguments)
    try:
        engine.start()
        with TemporaryDirectory() as folder:
            config = Path(folder, "forebay.toml")
            config.write_text(configuration(PROCESSED, engine.url, model))
            with forebay.Server(config=config) as server, server.client() as fb:
                report(measured(engine, fb, options), options)
    finally:
        engine.close()


def measured(engine: Engine, fb: forebay.Client, options: argparse.Namespace) -> dict[str, list[float]]:
    """The milliseconds of each call, by way. The ways take turns, so that what else the machine does meets all."""
    calls, agents = options.calls, options.agents
    sessions = {}
    for mode in ("observe", "exact"):
        fb.put_policy(f"{mode}-latency", {"require": ["tokens", "logprobs"]})
        sessions[mode] = [fb.session(f"{mode}-latency", max_calls=calls + WARM_UP) for _ in range(agents)]
    times: dict[str, list[float]] = {"engine": [], "observe": [], "exact": []}
    # Connections stay open, as those of agents do.
    connections = [requests.Session() for _ in range(agents)]

    def agent(place: int, way: str) -> float:
        session = sessions.get(way, [None] * agents)[place]
        url = session.base_url if session else f"{engine.url}/v1"
        key = session.key if session else "none"
        return (first_words if options.stream else call)(connections[place], url, key)

    with ThreadPoolExecutor(agents) as pool:
        for turn in range(calls + WARM_UP):
            for way, found in times.items():
                took = list(pool.map(agent, range(agents), [way] * agents))
                if turn >= WARM_UP:
                    found += took
    for opened in sessions.values():
        for session in opened:
            session.abort("only measured")
    return times


def asked(tokens: int, **more: object) -> dict[str, object]:
    """What the engine is asked for, which is what a session asks it for."""
    return {
        "model": "qwen",
        "messages": [{"role": "user", "content": "city rain"}],
        "max_tokens": tokens,
        "temperature": 1,
        "top_p": 1,
        "top_k": -1,
        "logprobs": True,
        "return_token_ids": True,
        **more,
    }


def call(connection: requests.Session, url: str, key: str) -> float:
    """The milliseconds of one call."""
    began = time.perf_counter()
    headers = {"authorization": f"Bearer {key}"}
    answer = connection.post(f"{url}/chat/completions", json=asked(TOKENS), headers=headers, timeout=600)
    took = time.perf_counter() - began
    assert answer.ok, answer.text
    return 1000 * took


def first_words(connection: requests.Session, url: str, key: str) -> float:
    """The milliseconds until an answer says something. The rest of it is read."""
    began = time.perf_counter()
    headers = {"authorization": f"Bearer {key}"}
    body = asked(STREAMED, stream=True)
    took = 0.0
    with connection.post(f"{url}/chat/completions", json=body, headers=headers, timeout=600, stream=True) as answer:
        assert answer.ok, answer.text
        for line in answer.iter_lines(chunk_size=1):
            if took == 0.0 and line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                delta = choices[0]["delta"] if choices else {}
                if (delta.get("reasoning") or delta.get("content") or "").strip():
                    took = time.perf_counter() - began
    # An answer may have no words.
    return 1000 * (took or time.perf_counter() - began)


def report(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    base = statistics.median(times["engine"])
    what = "until the first words" if options.stream else "of a call"
    print(f"{len(times['engine'])} calls in each way, {options.agents} agents at once; milliseconds {what}")
    print("| | p50 | p90 | added at p50 | ratio of medians |\n|---|---|---|---|---|")
    for way, found in times.items():
        median, high = statistics.median(found), statistics.quantiles(found, n=10)[-1]
        print(f"| {way} | {median:.1f} | {high:.1f} | {median - base:.1f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
