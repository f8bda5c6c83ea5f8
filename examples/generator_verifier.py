"""A generator answers, a verifier criticises the answer, and the generator answers again.

Each question is answered in eight chains. The answers of a round are compared with each other: round 1 of the eight
chains is a group, and round 2 is another one. The verifier's reward is the reward of the answer that followed its
critique. Nothing rewards a critique that is right, so `verdict` is only watched.

    python -m forebay.run examples/generator_verifier.toml
"""

import forebay
import world

CHAINS = 8


def chain(run, llm, b, q, place, chains):
    """One chain: three calls of two policies, each a rollout."""
    of = {"group_size": chains, "metadata": {"chain": place}}
    g1 = b.rollout("generator", group_id=f"{q.id}.r1", **of)
    v = b.rollout("verifier", group_id=q.id, **of)
    g2 = b.rollout("generator", group_id=f"{q.id}.r2", **of)
    try:
        answer = run.answer(g1.chat(llm, run.prompt("answer", q=q), **run.options))
        g1.reward = q.grade(answer)
        critique = v.chat(llm, run.prompt("verify", q=q, a=answer), **run.options)
        revised = run.answer(g2.chat(llm, run.prompt("revise", q=q, a=answer, c=critique), **run.options))
    except Exception as error:
        # What did not happen is not judged. Its places in the groups are given up.
        for rollout in (g1, v, g2):
            if rollout.reward is None:
                rollout.abort(f"{type(error).__name__}: {error}")
    else:
        g2.reward = v.reward = q.grade(revised)
        v.reward_components = {"verdict": float(run.answer(critique) == world.verdict(q, answer))}
        g2.reward_components = {"gold": g2.reward, "round2": g2.reward}
    if g1.reward is not None:
        g1.reward_components = {"gold": g1.reward, "round1": g1.reward}


def execute(run, fb, llm, q, chains=CHAINS):
    """All chains of a question, posted as one bundle."""
    with fb.bundle() as b:
        run.each(chains, lambda place: chain(run, llm, b, q, place, chains))
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
