"""An agent decides which expert to ask. Experts that know more cost more.

The message `s`, `m` or `l` asks an expert of cost 1, 3 or 9, whose answer comes back as a message of the tool. Any
other message is the answer. The reward of a wrong answer is 0, and that of a right one is

    R = w1 minmax(correctness) + w2 minmax(-cost)
    minmax(x) = (x - min) / (max - min) over the group, 0 if all are equal

with the weights 0.7 and 0.3 in questions whose cost counts, and else 1 and 0. The rewards of a group are known when
all its rollouts have ended.

Source: slime-agentic, agentic/ToolOrchestra/rollout.py and reward.py. Its converter, which has the formula, is not
published, so the formula is from its documents. It has more preferences, such as latency, and allows 12 turns; this
program lets an agent ask twice. As there, groups whose rewards have a standard deviation under 0.1 are dropped.
Advantages are not clipped to 3 as there, because those of groups of 8 are always smaller.

    python -m forebay.run examples/tool_orchestra.toml
"""

import forebay
import world

ROLLOUTS, CALLS = 8, 2


def share(values):
    """Where each value is between the least and the greatest."""
    least, greatest = min(values), max(values)
    return [(value - least) / (greatest - least) if greatest > least else 0.0 for value in values]


def rewards(correct, costs, weights):
    """The rewards of a group."""
    cheap = share([-cost for cost in costs])
    parts = zip(correct, share(correct), cheap, strict=True)
    return [weights[0] * right + weights[1] * low if gold else 0.0 for gold, right, low in parts]


def play(run, llm, rollout, q):
    """One rollout. Returns whether the answer is right, and the cost; None if a call failed."""
    messages = [{"role": "user", "content": run.prompt("ask", q=q)}]
    cost = calls = 0
    while (said := run.talk(rollout, llm, messages)) is not None:
        if said not in world.EXPERTS or calls == CALLS:
            break
        messages.append({"role": "tool", "content": ":" + world.expert(said, q), "tool_call_id": "expert"})
        cost, calls = cost + world.EXPERTS[said], calls + 1
    if said is None:
        return None
    return q.grade(run.answer(said)), cost


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, posted as one bundle."""
    with fb.bundle() as b:
        sampling = {"temperature": run.options.get("temperature", 1.0)}
        rollouts = [b.rollout("orchestrator", group_id=q.id, group_size=count, sampling=sampling) for _ in range(count)]
        played = run.each(count, lambda n: play(run, llm, rollouts[n], q))
        ended = [(rollout, *result) for rollout, result in zip(rollouts, played, strict=True) if result is not None]
        if ended:
            counts = q.text.endswith("c")
            weights = (0.7, 0.3) if counts else (1.0, 0.0)
            least = world.EXPERTS[world.ABLE[q.text[0]][0]]
            made = rewards([gold for _, gold, _ in ended], [cost for _, _, cost in ended], weights)
            for (rollout, gold, cost), reward in zip(ended, made, strict=True):
                rollout.reward = reward
                rollout.reward_components = {"gold": gold, **({"cost": cost / least} if counts else {})}
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
