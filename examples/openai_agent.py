#!/usr/bin/env python3
"""An agent with the `openai` package, whose rollouts are recorded by a session.

The agent knows nothing of tokens or log-probabilities: it sends messages to the session's URL, as to any
server with OpenAI's interface. What surrounds it opens a session for each rollout, and finishes the session
with the reward. Both tasks are those of `forebay-trainer rollout`. `make demo RUN="--profile sessions"` runs the whole
loop. It needs no other package, and no run file: the runner names the service in the environment.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import time
import urllib.error
import urllib.request

import openai


class Arithmetic:
    """The right answer to `4+3=` is `7`."""

    def __init__(self, numbers):
        self.first, self.second = numbers.randrange(5), numbers.randrange(5)

    def rollout(self, ask):
        """Asks the model, and returns the reward and how the rollout ended."""
        text, is_whole = ask([{"role": "user", "content": f"{self.first}+{self.second}="}])
        return share_right(text, is_whole, str(self.first + self.second)), status(is_whole)


class Lookup:
    """The right answer to `3>` is `?3`, which is a call of a tool, and then the digit that the tool answered."""

    def __init__(self, numbers):
        self.key, self.digit = numbers.randrange(10), numbers.randrange(10)

    def rollout(self, ask):
        messages = [{"role": "user", "content": f"{self.key}>"}]
        text, is_whole = ask(messages)
        call = share_right(text, is_whole, f"?{self.key}")
        if call < 1:
            return 0.6 * call, status(is_whole)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f":{self.digit}>"}]
        text, is_whole = ask(messages)
        return 0.6 + 0.4 * share_right(text, is_whole, str(self.digit)), status(is_whole)


TASKS = {"arithmetic": Arithmetic, "lookup": Lookup}


def status(is_whole):
    return "completed" if is_whole else "truncated"


def share_right(text, is_whole, expected):
    """The share of the expected text, with its end, that is right before the first mistake."""
    right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, expected)))
    return (right + (is_whole and text == expected)) / (len(expected) + 1)


class Forebay:
    """The calls of a producer: open a session, finish it."""

    def __init__(self, url, key):
        self.url, self.headers = url, {"content-type": "application/json"}
        if key:
            self.headers["authorization"] = f"Bearer {key}"

    def call(self, path, body=None):
        """Repeats a call until it is answered. Every call here may be repeated."""
        data = None if body is None else json.dumps(body).encode()
        while True:
            try:
                request = urllib.request.Request(self.url + path, data=data, headers=self.headers)
                with urllib.request.urlopen(request, timeout=90) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                if error.code not in (408, 429, 502, 503, 504):
                    raise SystemExit(f"{path}: {error.code} {error.read().decode()}") from error
                time.sleep(float(error.headers.get("retry-after", 1)))
            except OSError:
                time.sleep(1)

    def play(self, problem, agent, session):
        """Plays one rollout in a session of its own, and returns its reward."""
        opened = self.call("/sessions", session)
        # From here on, everything that the agent needs is a base URL and a key.
        client = agent.with_options(base_url=opened["base_urls"]["openai"], api_key=opened["key"])

        def ask(messages):
            # A model that learns from random weights gets no more tokens than a right answer has.
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
            choice = answer.choices[0]
            return choice.message.content or "", choice.finish_reason == "stop"

        try:
            reward, ended = problem.rollout(ask)
        except openai.OpenAIError as error:
            # A failure of the infrastructure has no reward, so that nothing is learned from it.
            print("a rollout failed:", error, flush=True)
            self.call(f"/sessions/{opened['session_id']}/abort", {"reason": "agent-error"})
            return None
        finish = {"reward": reward, "reward_components": {"gold": float(reward == 1)}, "status": ended}
        self.call(f"/sessions/{opened['session_id']}/finish", finish)
        return reward


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server", default=os.environ.get("FOREBAY_URL", "http://127.0.0.1:8080"),
        help="URL of the service (default: FOREBAY_URL, or http://127.0.0.1:8080)",
    )
    parser.add_argument("--policy", default="default")
    parser.add_argument("--task", choices=TASKS, default="arithmetic")
    worker = f"agent-{os.environ.get('FOREBAY_AGENT', 0)}"
    parser.add_argument("--worker-id", default=worker, help=f"group ids begin with it (default: {worker})")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("FOREBAY_SEED", 1)))
    return parser.parse_args()


def main():
    options = arguments()
    forebay = Forebay(options.server, os.environ.get("FOREBAY_KEY"))
    size = forebay.call(f"/policies/{options.policy}")["rules"]["group"]["size"]
    # One client for all sessions, because its connections are kept. The URL and the key are those of each session.
    agent = openai.OpenAI(base_url=options.server, api_key="none", max_retries=5)
    start = f"{options.worker_id}.{int(time.time())}"
    played, shown = [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        for number in itertools.count():
            problem = TASKS[options.task](random.Random(f"{options.worker_id} {options.seed} {number}"))
            group = f"{start}.{number}"
            sessions = [
                {
                    "policy": options.policy, "environment": options.task, "rollout_id": f"{group}.{place}",
                    "group_id": group, "group_size": size,
                }
                for place in range(size)
            ]
            rewards = threads.map(lambda session: forebay.play(problem, agent, session), sessions)
            played += [reward for reward in rewards if reward is not None]
            if time.monotonic() > shown + 10 and played:
                print(f"{len(played)} rollouts, mean reward {sum(played) / len(played):.3f}", flush=True)
                played, shown = [], time.monotonic()


if __name__ == "__main__":
    main()
