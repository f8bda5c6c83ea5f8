"""Solvers answer a question, rewriters see the answers and answer again, and a selector picks one of them. All are
one policy.

Each role of a question is a group: E executions with 3 solvers, 3 rewriters and 1 selector are groups of 3E, 3E and E
rollouts. A solver and a rewriter are rewarded for their own answer, and the selector for the answer that it picks. If
the pick is right, all rewards of the execution are multiplied by 1.2, else by 0.8.

Source: slime, examples/multi_agent/agent_system.py. There the samples of an execution share one id, with different
rewards, and the whole batch is one group for the normaliser. Here each sample is a rollout of its own, so that each
is compared with those that had the same task.

    python -m forebay.run examples/multi_agent.toml
"""

import forebay
import world

EXECUTIONS, SOLVERS = 8, 3

BONUS, MALUS = 1.2, 0.8


def execution(run, llm, b, q, place, executions, solvers):
    """One execution: solvers, rewriters and the selector."""

    def begin(role, count):
        of = {"group_id": f"{q.id}.{role}", "group_size": executions * count, "metadata": {"execution": place}}
        return [b.rollout("team", **of) for _ in range(count)]

    def judge(role, rollout, answer, factor):
        if answer is not None:
            gold = q.grade(answer)
            rollout.reward = factor * gold
            rollout.reward_components = {"gold": gold, role: gold}

    solve, rewrite, (select,) = begin("solve", solvers), begin("rewrite", solvers), begin("select", 1)
    first = run.each(solvers, lambda n: run.ask(solve[n], llm, "answer", q=q))
    seen = "".join(answer for answer in first if answer)
    second = run.each(solvers, lambda n: run.ask(rewrite[n], llm, "rewrite", q=q, answers=seen))
    candidates = [answer for answer in second if answer]
    chosen = None
    if not candidates:
        select.abort("no rewriter has answered")
    elif (label := run.ask(select, llm, "select", q=q, candidates=world.labelled(candidates))) is not None:
        at = world.picked(label, candidates)
        # A label that names no candidate is a wrong answer.
        chosen = "" if at is None else candidates[at]
    factor = BONUS if chosen and q.grade(chosen) == 1 else MALUS
    for rollout, answer in zip(solve, first, strict=True):
        judge("solve", rollout, answer, factor)
    for rollout, answer in zip(rewrite, second, strict=True):
        judge("rewrite", rollout, answer, factor)
    judge("select", select, chosen, factor)


def execute(run, fb, llm, q, executions=EXECUTIONS, solvers=SOLVERS):
    """All executions of a question, posted as one bundle."""
    with fb.bundle() as b:
        run.each(executions, lambda place: execution(run, llm, b, q, place, executions, solvers))
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
