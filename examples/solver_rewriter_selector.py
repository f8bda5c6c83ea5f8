"""Solvers answer a question, rewriters see all answers and answer again, and selectors pick one rewritten answer.
Each role is a policy.

A solver and a rewriter are rewarded for their own answer, and a selector for the answer that it picks, with 0 for a
label that names none. All rewards of an execution are multiplied by 1.2 if the mean over the selectors that named one
is above 0.5, and else by 0.8; if no selector named one, they stay as they are. A group is a role of two executions,
because the same factor for all rollouts of a group would change nothing.

Source: slime^n, examples/multi_policy_solver_rewriter_selector/agent_system.py. It finds picks by text, so that the
first of equal candidates counts; here picks are labels, and `metadata.picked` is the rollout that was picked.

    python -m forebay.run examples/solver_rewriter_selector.toml
"""

import forebay
import world

EXECUTIONS, COUNT = 2, 3

BONUS, MALUS = 1.2, 0.8


def execution(run, llm, b, q, place, executions, count):
    """One execution: solvers, rewriters and selectors, as many of each."""

    def begin(role):
        of = {"group_id": q.id, "group_size": executions * count, "metadata": {"execution": place}}
        return [b.rollout(role, **of) for _ in range(count)]

    solvers, rewriters, selectors = begin("solver"), begin("rewriter"), begin("selector")
    first = run.each(count, lambda n: run.ask(solvers[n], llm, "answer", q=q))
    seen = "".join(answer for answer in first if answer)
    second = run.each(count, lambda n: run.ask(rewriters[n], llm, "rewrite", q=q, answers=seen))
    places = [n for n, answer in enumerate(second) if answer]
    candidates = [second[n] for n in places]

    def select(n):
        """The answer that a selector picks, "" if its label names none, and None if there is no label."""
        if not candidates:
            selectors[n].abort("no rewriter has answered")
            return None
        label = run.ask(selectors[n], llm, "select", q=q, candidates=world.labelled(candidates))
        at = None if label is None else world.picked(label, candidates)
        if at is None:
            return None if label is None else ""
        selectors[n].metadata["picked"] = rewriters[places[at]].rollout_id
        return candidates[at]

    third = run.each(count, select)
    parsed = [q.grade(answer) for answer in third if answer]
    factor = 1.0 if not parsed else BONUS if sum(parsed) / len(parsed) > 0.5 else MALUS
    for rollouts, answers in ((solvers, first), (rewriters, second), (selectors, third)):
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
