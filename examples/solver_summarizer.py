"""Solvers answer a question, and summarizers see all answers and answer it, too. Each role is a policy.

All are rewarded for their own answer. The rewards of both roles in an execution are multiplied by 1.2 if the mean of
the summarizers is above 0.5, and else by 0.8. If no summarizer has answered, the rewards stay as they are; if no
solver has answered with any text, those of the solvers are multiplied by 0.8. A group is a role of four executions:
in a group of one execution the factor would change nothing, because all its rewards have it.

Source: slime^n, examples/multi_policy_solver_summarizer/agent_system.py.

    python -m forebay.run examples/solver_summarizer.toml
"""

import forebay

EXECUTIONS, COUNT = 4, 4

BONUS, MALUS = 1.2, 0.8


def factor(solved, summarized):
    """The factor of an execution, from the answers of its solvers and the grades of its summarizers."""
    if not any(solved):
        return MALUS
    if not summarized:
        return 1.0
    return BONUS if sum(summarized) / len(summarized) > 0.5 else MALUS


def execution(run, llm, b, q, place, executions, count):
    """One execution: solvers, and summarizers that see their answers."""
    of = {"group_id": q.id, "group_size": executions * count, "metadata": {"execution": place}}
    solvers = [b.rollout("solver", **of) for _ in range(count)]
    summarizers = [b.rollout("summarizer", **of) for _ in range(count)]
    solved = run.each(count, lambda n: run.ask(solvers[n], llm, "answer", q=q))
    seen = "".join(answer for answer in solved if answer)
    summarized = [None] * count
    if seen:
        summarized = run.each(count, lambda n: run.ask(summarizers[n], llm, "summarize", q=q, answers=seen))
    else:
        for summarizer in summarizers:
            summarizer.abort("no solver has answered")
    share = factor(solved, [q.grade(answer) for answer in summarized if answer is not None])
    for rollouts, answers in ((solvers, solved), (summarizers, summarized)):
        for rollout, answer in zip(rollouts, answers, strict=True):
            if answer is not None:
                gold = q.grade(answer)
                rollout.reward, rollout.reward_components = share * gold, {"gold": gold}


def execute(run, fb, llm, q, executions=EXECUTIONS, count=COUNT):
    """All executions of a question, posted as one bundle."""
    with fb.bundle() as b:
        run.each(executions, lambda place: execution(run, llm, b, q, place, executions, count))
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
