#!/usr/bin/env python3
"""Lets an agent work on a repository several times, as one group of rollouts.

Each rollout has a copy of the repository and a session, which records the calls of the agent. The agent is any
command that reads OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, from its
environment. If it ends with status 0, or runs out of time, a test decides: the reward is 1 if the test passes and 0 if
it does not. If the agent fails, the rollout has no reward, and another one takes its place. With --resume, the agent is
started again in a fresh copy instead, and the calls that it makes again are answered with what was recorded; and a group
that was interrupted goes on if this program is started again with the same --group-id.

    group.py my-repository --task "In {folder}, the test fails. Repair it." --test "python3 test_calc.py" \\
        --protect test_calc.py -- python3 openhands_agent.py "{task}"

Nothing here knows the inference engine: its address is in the configuration of the service, in [[upstream]]. If the
service has keys, FOREBAY_KEY has one of the role `produce`.

The agent and the test run as this user, on this machine. Run this program where they may do so, for example in a
container.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

# How often a rollout is started again if its agent fails.
ATTEMPTS = 3


class Refused(RuntimeError):
    def __init__(self, why, kind):
        super().__init__(why)
        self.kind = kind


class Forebay:
    """The calls of a producer."""

    def __init__(self, url, key):
        self.url, self.headers, self.told = url, {"content-type": "application/json"}, None
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
                problem = error.read().decode(errors="replace")
                why = f"{path}: {error.code} {problem}"
                if error.code not in (408, 429, 502, 503, 504):
                    kind = json.loads(problem)["type"] if problem.startswith("{") else None
                    raise Refused(why, kind) from error
                pause = float(error.headers.get("retry-after", 1))
            except OSError as error:
                why, pause = f"{path}: {error}", 1
            if why != self.told:
                self.told = why
                print("waiting:", why, file=sys.stderr, flush=True)
            time.sleep(pause)


class Commands:
    """Commands that end together with this program, and with everything that they started."""

    def __init__(self):
        self.lock, self.groups, self.stopped = threading.Lock(), set(), False

    def run(self, command, folder, environment, log, seconds):
        """The exit status of a command, or None if it ran out of time."""
        with self.lock:
            if self.stopped:
                return -signal.SIGKILL
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )
            self.groups.add(process.pid)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with self.lock:
                self.groups.discard(process.pid)
                kill(process.pid)
            process.wait()

    def stop(self):
        with self.lock:
            self.stopped = True
            for group in self.groups:
                kill(group)


def kill(group):
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Group:
    def __init__(self, options, commands):
        self.options, self.commands = options, commands
        self.forebay = Forebay(options.server, os.environ.get("FOREBAY_KEY"))
        self.repository = options.repository.resolve()
        self.size = self.forebay.call(f"/policies/{options.policy}")["rules"]["group"]["size"]

    def rollout(self, place):
        """Plays one place of the group, and returns its reward, or None if its agent failed each time."""
        for attempt in range(ATTEMPTS):
            name = f"{self.options.group_id}-{place}" + (f"-retry{attempt}" if attempt else "")
            try:
                opened = self.open(name)
            except Refused as refused:
                if not self.options.resume or refused.kind not in ("rollout-conflict", "session-ended"):
                    raise
                # It ended when this program ran before.
                reward = self.reward(name)
                if reward is None:
                    continue
                return reward
            session = f"/sessions/{opened['session_id']}"
            finished = None
            try:
                reward, ended = self.play(name, opened)
                while reward is None and self.can_resume(opened):
                    opened = self.resume(opened)
                    reward, ended = self.play(name, opened)
                if reward is not None:
                    end = {"reward": reward, "status": ended, "attempt": opened["attempt"]}
                    finished = self.forebay.call(f"{session}/finish", end)
            finally:
                # A failure of the infrastructure has no reward, so that nothing is learned from it.
                if finished is None and not (self.options.resume and self.commands.stopped):
                    self.forebay.call(f"{session}/abort", {"reason": "agent-failed", "attempt": opened["attempt"]})
            if finished is not None:
                made = finished["assembly"]
                print(
                    f"{name}: reward {reward:.0f}, {ended}, attempt {opened['attempt']}, {made['calls']} calls, "
                    f"{made['segments']} segments, {made['trained_tokens']} trained tokens", flush=True,
                )
                return reward
            if self.commands.stopped:
                return None
        return None

    def open(self, name):
        """Opens the session of a rollout, or begins another attempt if it is open."""
        opened = self.forebay.call("/sessions", {
            "policy": self.options.policy, "rollout_id": name, "group_id": self.options.group_id,
            "group_size": self.size, "environment": self.repository.name,
        })
        # One whose last attempt this is goes on with it.
        return self.resume(opened) if opened["duplicate"] and self.can_resume(opened) else opened

    def resume(self, opened):
        """Begins the next attempt of a session."""
        session = f"/sessions/{opened['session_id']}"
        while True:
            try:
                return self.forebay.call(f"{session}/resume", {"attempt": opened["attempt"]})
            except Refused as refused:
                # The answer to this very request may have been lost.
                if refused.kind != "attempt-over":
                    raise
                opened = {**opened, "attempt": self.forebay.call(session)["attempt"]}

    def reward(self, name):
        query = urllib.parse.urlencode({"policy": self.options.policy, "rollout_id": name})
        try:
            return self.forebay.call(f"/trajectories?{query}")["reward"]
        except Refused as refused:
            if refused.kind != "not-found":
                raise
            return None

    def can_resume(self, opened):
        return self.options.resume and not self.commands.stopped and opened["attempt"] < opened["max_attempts"]

    def play(self, name, opened):
        """Runs the agent in a copy of the repository, and then the test. Returns the reward, and how the agent ended."""
        folder = (self.options.work / name).resolve()
        if self.options.resume:
            # The agent does again what it did, and finds what it found.
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.repository, folder, symlinks=True)
        # The agent gets a base URL and a key for its calls. It must not find the key that can finish sessions.
        environment = {name: value for name, value in os.environ.items() if name != "FOREBAY_KEY"}
        urls = opened["base_urls"]
        agent = environment | {
            "OPENAI_BASE_URL": urls["openai"], "OPENAI_API_KEY": opened["key"],
            "ANTHROPIC_BASE_URL": urls["anthropic"], "ANTHROPIC_API_KEY": opened["key"],
        }
        task = self.options.task.replace("{folder}", str(folder))
        command = [argument.replace("{task}", task) for argument in self.options.agent]
        with open(f"{folder}.log", "wb" if opened["attempt"] == 1 else "ab") as log:
            status = self.commands.run(command, folder, agent, log, 60 * self.options.minutes)
            if status not in (0, None):
                print(f"{name}: the agent failed with status {status}, see {folder}.log", file=sys.stderr, flush=True)
                return None, None
            for protected in self.options.protect:
                restore(self.repository / protected, folder / protected)
            passed = self.commands.run(self.options.test, folder, environment, log, 60 * self.options.test_minutes) == 0
            if self.commands.stopped:
                return None, None
        return float(passed), "truncated" if status is None else "completed"


def restore(original, copy):
    """Makes a file or a folder what it was before the agent worked."""
    if copy.is_dir() and not copy.is_symlink():
        shutil.rmtree(copy)
    else:
        copy.unlink(missing_ok=True)
    copy.parent.mkdir(parents=True, exist_ok=True)
    if original.is_dir():
        shutil.copytree(original, copy, symlinks=True)
    else:
        shutil.copy2(original, copy)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=pathlib.Path, help="folder that each rollout gets a copy of")
    parser.add_argument("agent", nargs="+", help="command of the agent; {task} stands for the task")
    parser.add_argument("--task", required=True, help="what the agent is told; {folder} stands for the copy's path")
    parser.add_argument("--test", required=True, help="command line of the test, which is run in the copy")
    parser.add_argument(
        "--protect", action="append", default=[], metavar="PATH",
        help="file or folder of the repository that the test gets as it was, whatever the agent did to it",
    )
    parser.add_argument(
        "--server", default=os.environ.get("FOREBAY_SERVER", "http://127.0.0.1:8080"),
        help="URL of the service (default: FOREBAY_SERVER, or http://127.0.0.1:8080)",
    )
    parser.add_argument("--policy", default="default", help="policy of the rollouts; its rules have the group's size")
    parser.add_argument("--group-id", help="default: the repository's name and the time")
    parser.add_argument(
        "--resume", action="store_true",
        help="start an agent that fails again in the same session, and go on with sessions that are there",
    )
    parser.add_argument("--work", type=pathlib.Path, default="rollouts", help="folder of copies and logs (default: rollouts)")
    parser.add_argument("--parallel", type=int, default=4, metavar="N", help="rollouts at the same time (default: 4)")
    parser.add_argument("--minutes", type=float, default=30, help="time of the agent (default: 30)")
    parser.add_argument("--test-minutes", type=float, default=5, help="time of the test (default: 5)")
    options = parser.parse_args()
    options.test = ["sh", "-c", options.test]
    options.group_id = options.group_id or f"{options.repository.resolve().name}.{int(time.time())}"
    for path in options.protect:
        if not (options.repository / path).exists():
            parser.error(f"--protect: {options.repository / path} does not exist")
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def main():
    options, commands = arguments(), Commands()
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as threads:
        try:
            group = Group(options, commands)
            rollouts = [threads.submit(group.rollout, place) for place in range(group.size)]
            rewards = [rollout.result() for rollout in concurrent.futures.as_completed(rollouts)]
        except (RuntimeError, OSError, KeyboardInterrupt) as error:
            commands.stop()
            threads.shutdown(wait=False, cancel_futures=True)
            sys.exit(f"group.py: {error or 'stopped'}")
    if None in rewards:
        sys.exit(f"group.py: {rewards.count(None)} rollouts of {options.group_id} failed")
    print(f"{options.group_id}: {len(rewards)} rollouts, mean reward {sum(rewards) / len(rewards):.2f}", flush=True)


if __name__ == "__main__":
    main()
