"""Eight agents, each a policy of its own, answer the same questions. Each is rewarded for its own answers, for how
well all of them do compared with before, and for its place among the others.

    R     = clip(0.5 self + 0.3 swarm + 0.2 peer, -5, 5)
    self  = (score - mean of the agent's K scores) / (their population standard deviation + 1e-6)
    peer  = (N + 1 - 2 rank) / (N - 1), the best agent has rank 1, equal ones their average rank
    swarm = clip((g - mean) / sqrt(var), -3, 3), 0 for the first 20 questions; g is the mean of all scores

The running `mean` begins with 0 and `var` with 1. After each question they become mean' = 0.95 mean + 0.05 g and var'
= 0.95 var + 0.05 (g - mean')^2. They are kept in a `forebay.State`, which changes exactly once with the post of each
question, also if the program is killed in between. R itself is the advantage (`advantage = "reward"`).

Source: slime^n, examples/multi_policy_exam_swarm/agent_system.py. There batches are filled up with copies of other
samples; here a batch has only what was sampled.

    python -m forebay.run examples/exam_swarm.toml
"""

import statistics

import forebay

ROLLOUTS = 8

SILENT = 20

START = {"calls": 0, "mean": 0.0, "var": 1.0}


def clip(value, bound):
    return max(-bound, min(bound, value))


def ranks(means):
    """The rank of each agent, 1 for the best. Equal ones have the average of their ranks."""
    return [sum(1 for other in means if other > mean) + (1 + means.count(mean)) / 2 for mean in means]


def swarm(ema, g):
    """How much better the swarm is than before."""
    return 0.0 if ema["calls"] < SILENT else clip((g - ema["mean"]) / ema["var"] ** 0.5, 3.0)


def after(ema, g):
    """The running mean and variance after a question."""
    mean = 0.95 * ema["mean"] + 0.05 * g
    return {"calls": ema["calls"] + 1, "mean": mean, "var": 0.95 * ema["var"] + 0.05 * (g - mean) ** 2}


def rewards(scores, bonus):
    """The rewards of each agent's rollouts, from their scores and from what the swarm has won."""
    means = [statistics.fmean(each) for each in scores]
    count = len(scores)
    made = []
    for each, mean, rank in zip(scores, means, ranks(means), strict=True):
        spread = statistics.pstdev(each) + 1e-6
        peer = (count + 1 - 2 * rank) / (count - 1) if count > 1 else 0.0
        made.append([clip(0.5 * (score - mean) / spread + 0.3 * bonus + 0.2 * peer, 5.0) for score in each])
    return made


def execute(run, fb, llm, state, q, names, count=ROLLOUTS):
    """All answers to a question, posted as one bundle together with the state."""
    with fb.bundle(state=state) as b:
        asked = [[b.rollout(name, group_id=q.id, group_size=count) for _ in range(count)] for name in names]
        flat = [rollout for rollouts in asked for rollout in rollouts]
        answers = run.each(len(flat), lambda n: run.ask(flat[n], llm, "answer", q=q))
        given = {id(rollout): answer for rollout, answer in zip(flat, answers, strict=True) if answer is not None}
        # A call that failed is no answer, and an agent without answers has no place among the others.
        asked = [kept for rollouts in asked if (kept := [each for each in rollouts if id(each) in given])]
        scores = [[q.grade(given[id(rollout)]) for rollout in rollouts] for rollouts in asked]
        if scores:
            g = statistics.fmean(score for each in scores for score in each)
            made = rewards(scores, swarm(state.value, g))
            state.value = after(state.value, g)
            for rollouts, own, composed in zip(asked, scores, made, strict=True):
                for rollout, score, reward in zip(rollouts, own, composed, strict=True):
                    rollout.reward, rollout.reward_components = reward, {"gold": score}
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    names = [policy.name for policy in run.settings.policies]
    with forebay.State(run.output / f"swarm-{run.agent}.json", START) as state:
        state.recover(fb)
        run.play(lambda q: execute(run, fb, llm, state, q, names))


if __name__ == "__main__":
    main()
