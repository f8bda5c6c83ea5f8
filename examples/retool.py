"""An agent writes an expression, reads its value from an interpreter, and answers.

A message that begins with `=` is the answer. Any other message is code, and its value comes back as a message of the
tool, whose tokens are not trained. The reward is 1 for the right answer, and else min(-0.6, -1 + 0.1 (calls - 2) /
2), so an agent that uses the interpreter loses less.

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


def play(run, llm, rollout, q, calls=CALLS):
    """One rollout: code and an answer."""
    messages = [{"role": "user", "content": run.prompt("ask", q=q)}]
    made = 0
    while (said := run.talk(rollout, llm, messages)) is not None:
        if said.startswith("=") or made == calls:
            break
        messages.append({"role": "tool", "content": world.calculate(said), "tool_call_id": "code"})
        made += 1
    if said is None:
        return
    gold = q.grade(run.answer(said).removeprefix("=")) if said.startswith("=") else 0.0
    rollout.reward = reward(gold, made)
    rollout.reward_components = {"gold": gold, "calls": float(made)}


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, posted as one bundle."""
    with fb.bundle() as b:
        rollouts = [b.rollout("coder", group_id=q.id, group_size=count) for _ in range(count)]
        run.each(count, lambda n: play(run, llm, rollouts[n], q))
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
