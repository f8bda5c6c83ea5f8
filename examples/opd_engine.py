"""A student learns from a teacher on what the student itself says: on-policy distillation with a teacher on an engine.

Each rollout is a session. When it is finished, the service has the teacher's engine score the tokens that the student
sampled, behind the same ids and at the same temperature, and stores the scores as `teacher_logprobs`. The trainer gives
each token the advantage -(logp_student - logp_teacher) (`opd_coef = 1`): a token of -1 at the student and -0.2 at the
teacher has the advantage 0.8. The reward does not count (`advantage = "none"`), so each rollout is a group of its own.
The component `gold` shows what the student learns. opd_trainer.py is the same with the teacher in the trainer.

Source: slime^n, examples/multi_policy_opd_sglang. There, the teacher scores at temperature 0 whatever the rollout's is.
The student knows only the form of answers at the start, which is enough, because every token has a signal.

    python -m forebay.run examples/opd_engine.toml
"""

import forebay

ROLLOUTS = 8


def play(run, fb, llm, q):
    """One answer to a question. If the call fails, the session is aborted."""
    with fb.session("student") as s:
        asked = [{"role": "user", "content": run.prompt("answer", q=q)}]
        student = llm.with_options(base_url=s.base_url, api_key=s.key)
        s.reward = q.grade(run.answer(run.chat(student, "student", asked)))
        s.reward_components = {"gold": s.reward}
    return s


def execute(run, fb, llm, q, count=ROLLOUTS):
    """Some answers to a question."""
    return run.each(count, lambda n: play(run, fb, llm, q))


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
