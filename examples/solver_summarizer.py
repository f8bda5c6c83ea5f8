"""Solvers answer a question, and summarizers see all answers and answer it, too. Each role is a policy.

All are rewarded for their own answer. The rewards of both roles in an execution are multiplied by 1.2 if the mean of the
summarizers is above 0.5, and else by 0.8. If no summarizer has answered, the rewards stay; if no solver has answered with
any text, those of the solvers are multiplied by 0.8. A group is a role of four executions: in a group of one execution
the factor would change nothing, because all its rewards have it.

Source: slime^n, examples/multi_policy_solver_summarizer/agent_system.py.

    python -m forebay.run examples/solver_summarizer.toml
"""

import forebay

EXECUTIONS, COUNT = 4, 4

BONUS, MALUS = 1.2, 0.8


def factors(solved, summarized):
    """The factors of solvers and of summarizers, from the answers of the first and the grades of the second."""
    if not any(solved):
        return MALUS, MALUS
    if not summarized:
        return 1.0, 1.0
    factor = BONUS if sum(summarized) / len(summarized) > 0.5 else MALUS
    return factor, factor


def execution(run, llm, b, q, place, executions, count):
    """One execution: solvers, and summarizers that see their answers."""
    of = {"group_id": q.id, "group_size": executions * count, "metadata": {"execution": place}}
    solvers = [b.rollout("solver", **of) for _ in range(count)]
    summarizers = [b.rollout("summarizer", **of) for _ in range(count)]
    solved = run.each(count, lambda n: run.ask(solvers[n], llm, "answer", q=q))
    seen = "".join(answer for answer in solved if answer)
    if seen:
        summarized = run.each(count, lambda n: run.ask(summarizers[n], llm, "summarize", q=q, answers=seen))
    else:
        summarized = [summarizer.abort("no solver has answered") for summarizer in summarizers]
    shares = factors(solved, [q.grade(answer) for answer in summarized if answer is not None])
    for rollouts, answers, factor in ((solvers, solved, shares[0]), (summarizers, summarized, shares[1])):
        for rollout, answer in zip(rollouts, answers, strict=True):
            if answer is not None:
                gold = q.grade(answer)
                rollout.reward, rollout.reward_components = factor * gold, {"gold": gold}


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
