"""An actor learns to add from random weights, with a critic that is smaller than itself.

The trainer reads the critic's value V before each trained token, and gives the token a generalised advantage estimate:

    A_t = d_t + gamma lambda A_(t+1)        d_t = r_t + gamma V_(t+1) - V_t

with gamma = lambda = 1, whitened over the batch. The last trained token has the reward of the rollout, and the others
have none. Tokens with mask 0 are not steps. The advantages of the service are not used (`advantage = "none"`), so each
rollout is a group of its own. The critic learns from the same batches, with a learning rate of its own.

The reward is the share of the sum, with its end, that is right before the first mistake, because from random weights
a whole sum is hardly ever right. The component `gold` is 1 if the whole sum is.

Source: slime^n, examples/multi_policy_ppo. There the critic is a policy of the configuration, and the reward belongs
to the last token of the answer, even if that is masked.

    python -m forebay.run examples/asymmetric_ppo.toml
"""

import forebay
import world


def execute(run, fb, llm, q):
    """One rollout: a sum, and what it is worth. No two rollouts are compared, so each has a question of its own."""
    with fb.rollout("actor") as rollout:
        said = rollout.chat(llm, run.prompt("answer", q=q), **run.options)
        is_whole = said.finish_reason == "stop"
        rollout.status = "completed" if is_whole else "truncated"
        rollout.reward = world.share_right(run.answer(said), is_whole, q.gold)
        rollout.reward_components = {"gold": float(rollout.reward == 1)}
    return rollout


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
