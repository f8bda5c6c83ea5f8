"""Two peers, each a policy, answer a question in three rounds. From the second round on, each sees what both have
answered before.

All rounds of a peer have the reward of its answer in round 3, so an early answer is worth what it leads to. If round
3 fails, the rounds before it are aborted, because they have no outcome. A round of a peer is a group over the chains
of a question.

Source: slime^n, examples/multi_policy_shared_state/agent_system.py. What a round's own answer was worth is kept in
`reward_components.round1` to `round3` (there `direct_raw_reward`).

    python -m forebay.run examples/shared_state_peers.toml
"""

import forebay

CHAINS, ROUNDS = 4, 3

PEERS = ("peer_a", "peer_b")


def chain(run, llm, b, q, place, chains):
    """One chain: three rounds of both peers."""
    state, said = "", {peer: [] for peer in PEERS}
    for number in range(1, ROUNDS + 1):
        of = {"group_id": f"{q.id}.r{number}", "group_size": chains, "metadata": {"chain": place, "state": number - 1}}
        rounds = [b.rollout(peer, **of) for peer in PEERS]
        answers = run.each(
            len(PEERS), lambda n, rounds=rounds, seen=state: run.ask(rounds[n], llm, "share", q=q, state=seen)
        )
        for peer, rollout, answer in zip(PEERS, rounds, answers, strict=True):
            said[peer].append((rollout, answer))
        state += "".join(answer or "" for answer in answers)
    for rounds in said.values():
        final = rounds[-1][1]
        for number, (rollout, answer) in enumerate(rounds, 1):
            if final is None:
                rollout.abort("round 3 failed")
            elif answer is not None:
                rollout.reward = q.grade(final)
                rollout.reward_components = {"gold": rollout.reward, f"round{number}": q.grade(answer)}


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
