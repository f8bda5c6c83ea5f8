"""A student learns from a teacher on what the student itself says: on-policy distillation with a frozen teacher in
the trainer.

The trainer gives each sampled token the advantage -(logp_student - logp_teacher) (`opd_coef = 1`). The reward does
not count (`advantage = "none"`), so each rollout is a group of its own. The component `gold` shows what the student
learns.

Source: slime^n, examples/multi_policy_opd_megatron. The student knows only the form of answers at the start, which is
enough, because every token has a signal.

    python -m forebay.run examples/opd_trainer.toml
"""

import forebay

ROLLOUTS = 8


def execute(run, fb, llm, q, count=ROLLOUTS):
    """Some answers to a question, posted as one bundle."""
    with fb.bundle() as b:
        rollouts = [b.rollout("student") for _ in range(count)]
        answers = run.each(count, lambda n: run.ask(rollouts[n], llm, "answer", q=q))
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
