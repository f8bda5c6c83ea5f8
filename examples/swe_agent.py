"""A foreign coding agent works in a folder of its own, and a test decides whether its diff is right.

The agent is a process. All that it gets is a folder, a task, and the address and the key of a session, so it can be any
program that reads OPENAI_BASE_URL and OPENAI_API_KEY: mini_agent.py, or openhands_agent.py in the profile `qwen`. The
diff of its folder is applied to a fresh copy, and a test that the agent has never seen runs there. The reward is 1 if
the test passes. The service makes the segments from the recorded calls, as for coding_agent.py.

The key opens only the calls of the model, so the agent cannot reward itself. If an agent fails, is killed, or needs too
long, its rollout is aborted and another one takes its place. The agent and the test run as this user, on this machine:
run this program in a container where that may do harm.

Source: slime's blog on coding agents, and slime, examples/coding_agent_rl. There, the folder is an image of SWE-bench.

    python -m forebay.run examples/swe_agent.toml
"""

import contextlib
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import forebay

ROLLOUTS, ATTEMPTS, AGENT_S, TEST_S = 8, 3, 120, 60

AGENT = pathlib.Path(__file__).with_name(os.environ.get("SWE_AGENT", "mini_agent.py"))

KEPT = ("HOME", "LANG", "PATH", "TMPDIR")
"""What an agent sees of this program's environment. The other variables may be keys and addresses."""


def git(folder, *arguments, given=None):
    """What git writes."""
    command = ["git", "-c", "user.name=forebay", "-c", "user.email=forebay@localhost", *arguments]
    return subprocess.run(command, cwd=folder, input=given, stdout=subprocess.PIPE, check=True).stdout


@contextlib.contextmanager
def repository(q):
    """A repository with the file of a question in its one commit."""
    with tempfile.TemporaryDirectory(prefix="forebay-swe-") as folder:
        origin = pathlib.Path(folder, "origin")
        origin.mkdir()
        (origin / "lines.txt").write_text("".join(line + "\n" for line in q.chunks))
        for arguments in ("init --quiet --template=", "add --all", "commit --quiet --message=before"):
            git(origin, *arguments.split())
        yield origin


def work(run, s, q, folder):
    """Lets the agent work in a folder, and returns whether it did not fail."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ} | s.environment
    command = [sys.executable, AGENT, run.prompt("ask", q=q)]
    try:
        status = subprocess.run(command, cwd=folder, env=environment, timeout=AGENT_S, check=False).returncode
        failure = f"the agent ended with status {status}" if status != 0 else None
    except subprocess.TimeoutExpired:
        failure = f"the agent did not end within {AGENT_S} s"
    if failure is not None:
        s.abort(failure)
        logging.warning("a rollout of %s was aborted: %s", q.id, failure)
    return failure is None


def diff_of(folder, fresh):
    """What differs from a fresh copy. Its repository is asked, because the agent may have changed the one in its folder."""
    trees = (f"--git-dir={fresh / '.git'}", f"--work-tree={folder}")
    git(folder, *trees, "add", "--all")
    return git(folder, *trees, "diff", "--cached", "--binary")


def passes(q, fresh, diff):
    """Whether the test passes in a fresh copy with a diff."""
    if diff:
        git(fresh, "apply", "-", given=diff)
    test = f"raise SystemExit(open('lines.txt').read() != {q.gold!r})"
    return subprocess.run([sys.executable, "-I", "-c", test], cwd=fresh, timeout=TEST_S, check=False).returncode == 0


def rollout(run, fb, q, origin, count):
    """One place of a group, played again if its agent fails."""
    for _ in range(ATTEMPTS):
        with fb.session("coder", group_id=q.id, group_size=count) as s:
            folder, fresh = (pathlib.Path(shutil.copytree(origin, f"{origin}-{s.rollout_id}-{n}")) for n in range(2))
            if work(run, s, q, folder):
                diff = diff_of(folder, fresh)
                s.reward = float(passes(q, fresh, diff))
                s.reward_components = {"gold": s.reward, "changed": float(bool(diff))}
                return s
    return None


def execute(run, fb, q, count=ROLLOUTS):
    """All rollouts of a question."""
    with repository(q) as origin:
        return run.each(count, lambda n: rollout(run, fb, q, origin, count))


def main():
    run = forebay.run()
    fb = forebay.Client()
    run.play(lambda q: execute(run, fb, q))


if __name__ == "__main__":
    main()
