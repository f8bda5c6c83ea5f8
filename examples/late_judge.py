"""A judge that is a process of its own gives the rewards, and is killed every 20 seconds.

The task is that of demo.py: the sum of two digits below 5, from random weights. The agent knows no reward. It posts its
rollouts without one, and they wait for the score `judge`, which the rules require. The judge leases a group as soon as
all of its rollouts are there, reads their conversations, and scores each with the share of the right text that comes
before the first mistake. Nobody tells it the sums: it adds the digits of the question itself.

A judge that is killed loses nothing. The groups that it was judging are leased by the next one when their leases have
ended, and are decided when they have all of their scores, as if nothing had happened.

    python -m forebay.run examples/late_judge.toml
"""

import contextlib
import os
import subprocess
import sys
import threading
import time

import forebay
import world

ROLLOUTS = 16

KILL_S = 20
"""How long a judge lives."""

LEASE_S = 3
"""How long the work of a judge that was killed waits for the next one, at most."""

JOBS, THINK_S = 16, 0.5
"""It judges so many groups at once, and takes so long for each, as one that asks a model would."""


def play(run, llm, rollout, q):
    """One rollout, without a reward. Its conversation is posted with it."""
    said = rollout.chat(llm, [{"role": "user", "content": run.prompt("ask", q=q)}], **run.options)
    rollout.status = "completed" if said.finish_reason == "stop" else "truncated"


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, posted as one bundle."""
    with fb.bundle() as b:
        rollouts = [b.rollout("default", group_id=q.id, group_size=count) for _ in range(count)]
        run.each(count, lambda place: play(run, llm, rollouts[place], q))
    return b


def grade(rollout):
    """What the judge thinks of a rollout."""
    asked, said = (message["content"] for message in rollout.messages)
    a, b = asked.removesuffix("=").split("+")
    return world.share_right(said, rollout.status == "completed", str(int(a) + int(b)))


def judged(item):
    """The scores of a group."""
    time.sleep(THINK_S)
    return {rollout.rollout_id: grade(rollout) for rollout in item.rollouts}


def judge():
    """Scores groups until it is killed, or until its input ends because the agent has ended."""
    threading.Thread(target=lambda: os._exit(len(sys.stdin.read())), daemon=True).start()
    forebay.Scorer("judge", include=["messages"], ttl_s=LEASE_S).run(judged, JOBS)


def keep_judging():
    """Starts a judge, kills it, and starts the next one."""
    while True:
        with subprocess.Popen([sys.executable, __file__, "judge"], stdin=subprocess.PIPE) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
            process.kill()


def main():
    run = forebay.run()
    threading.Thread(target=keep_judging, daemon=True).start()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))
    # The judge ends with this process.
    while run.held_out and any(fb.list_trajectories("default", purpose="eval", state="scoring")):
        time.sleep(THINK_S)


if __name__ == "__main__":
    judge() if sys.argv[1:] == ["judge"] else main()
