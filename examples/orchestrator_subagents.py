"""An orchestrator plans which tables to ask, three subagents answer, and the orchestrator joins their answers.

Each question is played in four chains: a plan, which names a table for each subagent, the answers of the subagents,
and a synthesis, which sees them. A subagent and a synthesis are rewarded for their own answer, and a plan for the
answer of the synthesis that followed it. A place of the plan that names no table gets a fallback. If the synthesis
failed, the plan has no outcome and is aborted. Plans and syntheses of a question are two groups of one policy, and
all its subagents are a group of the other one.

Source: slime^n, examples/multi_policy_orchestrator_subagent/agent_system.py. There a plan is three approaches in
words, and each subagent follows one.

    python -m forebay.run examples/orchestrator_subagents.toml
"""

import forebay
import world

CHAINS, SUBAGENTS = 4, 3

FALLBACK = "z"
"""The table of a place that names none."""


def tables(plan):
    """The table that each subagent asks."""
    places = plan[:SUBAGENTS].ljust(SUBAGENTS)
    return [table if table in world.TABLES else FALLBACK for table in places]


def chain(run, llm, b, q, place, chains):
    """One chain: a plan, its subagents, and the synthesis."""
    of = {"group_size": chains, "metadata": {"chain": place}}
    plan = b.rollout("orchestrator", group_id=f"{q.id}.plan", **of)
    synthesis = b.rollout("orchestrator", group_id=f"{q.id}.synth", **of)
    of["group_size"] = chains * SUBAGENTS
    subagents = [b.rollout("subagent", group_id=q.id, **of) for _ in range(SUBAGENTS)]
    said = run.ask(plan, llm, "plan", q=q)
    if said is None:
        for rollout in (synthesis, *subagents):
            rollout.abort("there is no plan")
        return
    asked = tables(said)
    known = [q.chunks[world.TABLES.index(table)] for table in asked]
    found = run.each(SUBAGENTS, lambda n: run.ask(subagents[n], llm, "look", q=q, table=known[n]))
    for subagent, answer in zip(subagents, found, strict=True):
        if answer is not None:
            subagent.reward = q.grade(answer)
            subagent.reward_components = {"gold": subagent.reward}
    joined = None
    if any(found):
        seen = "".join(answer or world.NOTHING for answer in found)
        joined = run.ask(synthesis, llm, "join", q=q, tables="".join(asked), answers=seen)
    else:
        synthesis.abort("no subagent has answered")
    if joined is None:
        plan.abort("the synthesis failed")
        return
    plan.reward = synthesis.reward = q.grade(joined)
    planned = asked.count(world.ASKED[q.text[0]]) / SUBAGENTS
    plan.reward_components = {"gold": plan.reward, "planned": planned}
    synthesis.reward_components = {"gold": synthesis.reward, "synthesis": synthesis.reward}


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
