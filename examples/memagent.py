"""An agent reads a long text part by part. It knows only its memory and the part, and writes a new memory. In the end
it answers from the memory.

Each call is a segment of its own, because no call continues an earlier one. All segments of a rollout have its
reward, which is 1 if the answer is right. With `loss_weighting = "turn_mean"` the segments of a rollout count alike:
in a batch of G rollouts, a token of a rollout with T segments has the weight 1 / (G T M), where M is the number of
trained tokens in its segment. If the agent writes an empty memory, the old one stays.

Source: slime-agentic, agentic/memagent/rollout.py. Its code trains the final answer and its README says that it does
not. This program follows the code (`ANSWER_TRAINED`).

    python -m forebay.run examples/memagent.toml
"""

import forebay
import world

ROLLOUTS = 16

ANSWER_TRAINED = True


def read(run, llm, rollout, q):
    """Reads all chunks and answers. Returns None if a call failed."""
    memory = world.NOTHING
    for chunk in q.chunks:
        written = run.ask(rollout, llm, "read", q=q, memory=memory, chunk=chunk)
        if written is None:
            return None
        memory = written or memory
    if ANSWER_TRAINED:
        return run.ask(rollout, llm, "recall", q=q, memory=memory)
    asked = [{"role": "user", "content": run.prompt("recall", q=q, memory=memory)}]
    said = llm.chat.completions.create(model=rollout.policy, messages=asked, **run.options)
    return run.answer(said.choices[0].message.content or "")


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, posted as one bundle."""
    with fb.bundle() as b:
        rollouts = [b.rollout("memory", group_id=q.id, group_size=count) for _ in range(count)]
        answers = run.each(count, lambda n: read(run, llm, rollouts[n], q))
        for rollout, answer in zip(rollouts, answers, strict=True):
            if answer is not None:
                rollout.reward = q.grade(answer)
                rollout.reward_components = {"gold": rollout.reward}
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
