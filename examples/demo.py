"""A small model learns to add from random weights. In the profile `lookup`, it learns to call a tool and to say its result.

From random weights a whole answer is hardly ever right, so the reward is the share of the right text that comes before
the first mistake. The component `gold` is 1 if all is right. A question of `lookup` has two turns: the call `?3` is
worth 0.6, and the result of the tool, said again, is worth 0.4. What the tool says has mask 0, so it is not trained.

In the profile `sessions` the program is openai_agent.py, which records nothing itself.

    python -m forebay.run examples/demo.toml
"""

import forebay
import world

ROLLOUTS = 16


def say(run, llm, rollout, messages, right):
    """Asks for the next message, and returns the share of the right one before the first mistake."""
    said = rollout.chat(llm, messages, **run.options)
    is_whole = said.finish_reason == "stop"
    messages.append({"role": "assistant", "content": str(said)})
    rollout.status = "completed" if is_whole else "truncated"
    return world.share_right(run.answer(said), is_whole, right)


def add(run, llm, rollout, messages, q):
    return say(run, llm, rollout, messages, q.gold)


def look_up(run, llm, rollout, messages, q):
    called = say(run, llm, rollout, messages, f"?{q.text}")
    if called < 1:
        return 0.6 * called
    messages.append({"role": "tool", "content": q.gold, "tool_call_id": "lookup"})
    return 0.6 + 0.4 * say(run, llm, rollout, messages, q.gold)


TASKS = {"small_sums": add, "lookups": look_up}


def play(run, llm, rollout, q):
    """One rollout."""
    messages = [{"role": "user", "content": run.prompt("ask", q=q)}]
    rollout.reward = TASKS[run.task.kind](run, llm, rollout, messages, q)
    rollout.reward_components = {"gold": float(rollout.reward == 1)}


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, posted as one bundle."""
    with fb.bundle() as b:
        rollouts = [b.rollout("default", group_id=q.id, group_size=count) for _ in range(count)]
        run.each(count, lambda place: play(run, llm, rollouts[place], q))
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
