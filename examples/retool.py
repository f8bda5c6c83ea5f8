"""An agent writes an expression, reads its value from an interpreter, and answers.

A message that begins with `=` is the answer. Any other message is code, and its value comes back as a message of the
tool. The reward is 1 for the right answer, and else min(-0.6, -1 + 0.1 (calls - 2) / 2), so an agent that uses the
interpreter loses less.

Each rollout is a session: the agent has an address and a key, and the service records its calls. Each call continues the
one before, so they become one segment. What the tool says is context: its tokens are not trained.

Source: slime, examples/retool/generate_with_retool.py. It allows 16 calls. This program allows 4, because an
expression of two digits needs one.

    python -m forebay.run examples/retool.toml
"""

import forebay
import world

ROLLOUTS, CALLS = 16, 4


def reward(gold, calls):
    """The reward of an answer after so many calls."""
    return 1.0 if gold else min(-0.6, -1.0 + 0.1 * (calls - 2) / 2)


def answer(run, llm, q):
    """Has code executed, and answers. Returns the last message, and the number of calls of the interpreter."""
    messages, calls = [{"role": "user", "content": run.prompt("ask", q=q)}], 0
    while not (said := run.chat(llm, "coder", messages)).startswith("=") and calls < CALLS:
        messages.append({"role": "tool", "content": world.calculate(said), "tool_call_id": "code"})
        calls += 1
    return said, calls


def play(run, fb, llm, q, count):
    """One rollout, in a session. If a call fails, the session is aborted."""
    with fb.session("coder", group_id=q.id, group_size=count) as s:
        said, calls = answer(run, llm.with_options(base_url=s.base_url, api_key=s.key), q)
        gold = q.grade(run.answer(said).removeprefix("=")) if said.startswith("=") else 0.0
        s.reward = reward(gold, calls)
        s.reward_components = {"gold": gold, "calls": float(calls)}
    return s


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, each of which is stored when it ends."""
    return run.each(count, lambda n: play(run, fb, llm, q, count))


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
