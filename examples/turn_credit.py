"""An agent is asked five questions in one conversation, and each answer is graded when it is given.

The digits of five letters, one after the other. The rollout passes, with the reward 1, if all five are right, which hardly
any does at first. Its conversation is one segment of five turns, and a turn has the reward 1 if its answer is right.
Later questions do not depend on earlier answers, so the rule compares what each turn earned by itself: `turn_return` with
`gamma` 0 and without the outcome. A right answer is learned from although the next one was wrong.

In the profile `outcome` only the outcome counts: the rule `grpo` compares the rollouts that passed with the others. The
same groups are let through, and nothing is learned from those in which nobody has passed.

Source: arXiv 2505.11821 (Zeng et al. 2025), which compares advantages by turn with those by trajectory, for agents that
search.

    python -m forebay.run examples/turn_credit.toml
"""

import forebay
import world

ROLLOUTS = 16


def play(run, llm, rollout, q):
    """One rollout. If a call fails, it is aborted."""
    messages, right = [], []
    for letter, digit in zip(q.text, q.gold, strict=True):
        messages.append({"role": "user", "content": run.prompt("ask", q=letter)})
        said = rollout.chat(llm, messages, **run.options)
        messages.append({"role": "assistant", "content": str(said)})
        right.append(float(run.answer(said) == digit))
        rollout.turns[-1].reward = right[-1]
    rollout.reward = float(all(right))
    rollout.reward_components = {"gold": sum(right) / len(right)}


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a series of questions, posted as one bundle."""
    with fb.bundle() as b:
        rollouts = [b.rollout("examinee", group_id=q.id, group_size=count) for _ in range(count)]
        run.each(count, lambda place: play(run, llm, rollouts[place], q))
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
