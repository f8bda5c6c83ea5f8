"""A planner solves a question in steps with tools, and frozen models decide when to stop, answer and judge.

The planner says what kind of question it is, and then one step after the other: a tool, and the letter that it is
used with. After each step a frozen model says whether what is known is enough. It also answers from what is known,
and if that is not exactly right, it judges the answer. The reward is 1 if the answer is right or judged to be.

The calls go through a session: the agent has an address and a key, and the service records the calls of the planner.
Those of the frozen model are forwarded, and recorded nowhere. Each call of the planner is a segment of its own,
because no call continues an earlier one. With `loss_weighting = "turn_mean"` a token of a rollout with T segments has
the weight 1 / (G T M) in a batch of G rollouts, where M is the number of trained tokens in its segment.

Source: slime-agentic, agentic/agentflow/core/solver.py, rollout.py and custom_convert.py. It allows five steps, and a
frozen model writes the command of each; here the step is the command. It cuts batches to a multiple of their size in
segments, which divides rollouts; here rollouts are whole.

    python -m forebay.run examples/agentflow.toml
"""

import forebay
import world

ROLLOUTS, STEPS = 16, 3

MODELS = {"planner": "planner", "base": None}
"""What the names of models stand for: a policy, or None for a model that is not trained."""


def solve(ask, q):
    """Plans, uses tools, and answers. Returns the answer, and the number of steps."""
    plan, known = ask("planner", "plan", q=q), []
    while len(known) < STEPS:
        step = ask("planner", "step", q=q, plan=plan, known=",".join(known))
        known.append(f"{step}={world.use(step)}")
        if ask("base", "verify", q=q, known=",".join(known)) == world.RIGHT:
            break
    return ask("base", "answer", q=q, known=",".join(known)), len(known)


def play(run, fb, llm, q, count):
    """One rollout, in a session. If a call fails, the session is aborted."""
    with fb.session(models=MODELS, group_id=q.id, group_size=count) as session:
        agent = llm.with_options(base_url=session.base_url, api_key=session.key)

        def ask(model, name, **fields):
            return run.answer(run.chat(agent, model, [{"role": "user", "content": run.prompt(name, **fields)}]))

        answer, steps = solve(ask, q)
        gold = q.grade(answer)
        session.reward = gold or float(ask("base", "judge", a=answer, gold=q.gold) == world.RIGHT)
        session.reward_components = {"gold": gold, "steps": float(steps)}
    return session


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, each of which is stored when it ends."""
    return run.each(count, lambda place: play(run, fb, llm, q, count))


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
