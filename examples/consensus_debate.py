"""Three agents answer a question and then criticise the answers of each other in two rounds. What the majority
answers is rewarded, whether it is right or not.

The consensus of an execution is the most frequent one of the final answers; a tie is decided at random. A generator
is rewarded if its answer is the consensus, and a critic, whose rollout has both of its rounds, if its final answer
is. If no critic has answered, all rewards are 0. The truth is only in `reward_components`: agents that agree on a
wrong answer have perfect rewards, so `gold` is what is judged. A group is a role of four executions.

Source: slime^n, examples/multi_policy_consensus_debate/agent_system.py. There a summary of the other answers is
written by the generator's engine; here an answer is one character, and a critic sees the answers themselves. There
each round of a critic is a sample of its own when rewards are normalised, so a group has 24 samples instead of 12.

    python -m forebay.run examples/consensus_debate.toml
"""

import collections
import random

import forebay

EXECUTIONS, AGENTS, ROUNDS = 4, 3, 2


def consensus(answers, numbers):
    """The most frequent answer, or None if there is none."""
    counts = collections.Counter(answer for answer in answers if answer)
    most = max(counts.values(), default=0)
    return numbers.choice(sorted(answer for answer in counts if counts[answer] == most)) if counts else None


def execution(run, llm, b, q, place, executions, agents):
    """One execution: a first answer of each agent, and rounds of criticism."""
    of = {"group_id": q.id, "group_size": executions * agents, "metadata": {"execution": place}}
    generators = [b.rollout("generator", **of) for _ in range(agents)]
    critics = [b.rollout("critic", **of) for _ in range(agents)]
    first = answers = run.each(agents, lambda n: run.ask(generators[n], llm, "answer", q=q))
    failed = set()
    for number in range(1, ROUNDS + 1):
        before = answers

        def criticise(n, before=before, failed=frozenset(failed), agent=f"round {number}"):
            if n in failed:
                return None
            others = "".join(answer or "" for m, answer in enumerate(before) if m != n)
            # Where nobody changes the answer, both rounds have the same prompt.
            return run.ask(critics[n], llm, "criticise", agent=agent, q=q, own=before[n] or "", others=others)

        answers = run.each(agents, criticise)
        failed |= {n for n, answer in enumerate(answers) if answer is None}
    agreed = consensus(answers, random.Random(f"{q.id} {place}"))
    majority = q.grade(agreed or "")
    for rollouts, final in ((generators, first), (critics, answers)):
        for rollout, answer in zip(rollouts, final, strict=True):
            if answer is not None:
                rollout.reward = float(agreed is not None and answer == agreed)
                rollout.reward_components = {"gold": q.grade(answer), "majority": majority}


def execute(run, fb, llm, q, executions=EXECUTIONS, agents=AGENTS):
    """All executions of a question, posted as one bundle."""
    with fb.bundle() as b:
        run.each(executions, lambda place: execution(run, llm, b, q, place, executions, agents))
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
