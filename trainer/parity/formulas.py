"""The losses of slime as PyTorch computes them, for the configurations that the trainer has as well.

Written from the formulas of slime (`slime/backends/megatron_utils/loss.py`, `slime/utils/ppo_utils.py`) and of its
example of masked importance sampling (`mis.py`). A row is one training sequence. Columns cover its whole response,
masked tokens included, because slime computes on them and multiplies by the mask at the end.
"""

import dataclasses

import torch

# mis.py bounds log-ratios by it before it takes their exponential.
LOG_RATIO_MAX = 20.0


@dataclasses.dataclass
class Row:
    """One training sequence with what its producer sent."""

    group: str
    rollout: str
    tokens: torch.Tensor
    mask: torch.Tensor
    reward: float
    temperature: float
    logprobs: torch.Tensor = None
    teacher: torch.Tensor = None
    # Where the producer posts them.
    advantages: torch.Tensor = None

    @property
    def prompt(self):
        return len(self.tokens) - len(self.mask)


@dataclasses.dataclass
class Columns:
    """What the models say of a row's response."""

    logp: torch.Tensor
    entropy: torch.Tensor
    reference: torch.Tensor = None
    teacher: torch.Tensor = None
    values: torch.Tensor = None


def columns(logits, row):
    """Log-probabilities of the response and entropies, from the logits of the whole sequence."""
    scaled = logits[row.prompt - 1 : -1] / row.temperature
    logp = torch.log_softmax(scaled, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, row.tokens[row.prompt :, None]).squeeze(-1), entropy


def group_advantages(rows, kind):
    """The advantage of each rollout, which has one vote in its group however many rows it has."""
    rewards = {}
    for row in rows:
        rewards.setdefault(row.group, {})[row.rollout] = row.reward
    found = {}
    for votes in rewards.values():
        each = torch.tensor(list(votes.values()), dtype=torch.float64)
        if kind == "reward":
            normalised = each
        else:
            normalised = each - each.mean()
        if kind == "grpo":
            normalised = normalised / (each.std() + 1e-6)
        found.update(zip(votes, normalised.tolist()))
    return found


def token_advantages(rows, rule):
    """The advantage of each token: as posted, or that of its turn. A turn is a run of ones in the mask of a row."""
    if rule == "posted":
        return [row.advantages for row in rows]
    turns = {}
    for index, row in enumerate(rows):
        begins = [t for t in range(len(row.mask)) if row.mask[t] and (t == 0 or not row.mask[t - 1])]
        turns.setdefault(row.group, {}).setdefault(row.rollout, []).extend((index, t) for t in begins)
    found = [torch.zeros_like(row.mask) for row in rows]
    for rollouts in turns.values():
        # Only the last turn has a reward, which is that of the rollout.
        returns = [
            rows[of[0][0]].reward * rule["gamma"] ** (len(of) - 1 - place)
            for of in rollouts.values()
            for place in range(len(of))
        ]
        each = torch.tensor(returns, dtype=torch.float64)
        each = iter(((each - each.mean()) / (each.std() + 1e-6)).tolist())
        for index, begin in (turn for of in rollouts.values() for turn in of):
            value = next(each)
            for t in range(begin, len(rows[index].mask)):
                if not rows[index].mask[t]:
                    break
                found[index][t] = value
    return found


def loss_weights(rows, kind):
    """The factor of each row's sum over its masked losses."""
    mask_sum = lambda row: float(row.mask.sum())
    per_rollout, turns = {}, {}
    for row in rows:
        per_rollout[row.rollout] = per_rollout.get(row.rollout, 0.0) + mask_sum(row)
        turns[row.rollout] = turns.get(row.rollout, 0) + (mask_sum(row) > 0)
    rollouts = len(per_rollout)
    if kind == "token_mean":
        return [1.0 / max(1.0, sum(map(mask_sum, rows)))] * len(rows)
    if kind == "sample_mean":
        return [1.0 / (sum(turns.values()) * max(1.0, mask_sum(row))) for row in rows]
    if kind == "turn_mean":
        return [1.0 / (rollouts * turns[row.rollout] * max(1.0, mask_sum(row))) for row in rows]
    return [1.0 / (rollouts * max(1.0, per_rollout[row.rollout])) for row in rows]


def advantages_and_returns(case, rows, found, old):
    """Columns of advantages, and of the critic's targets where there is a critic."""
    objective = case.objective
    kind = objective.get("objective", "grpo")
    returns = [None] * len(rows)
    if kind in ("reinforce_plus_plus", "ppo"):
        advantages = []
        for index, (row, column, logp_old) in enumerate(zip(rows, found, old)):
            rewards = torch.zeros_like(row.mask)
            if objective.get("kl_coef", 0.0):
                rewards = -objective["kl_coef"] * (logp_old - column.reference) * row.mask
            last = int(row.mask.nonzero()[-1]) if kind == "reinforce_plus_plus" else -1
            rewards[last] += row.reward
            if kind == "reinforce_plus_plus":
                advantages.append(discounted(rewards, objective.get("gamma", 1.0)))
            else:
                estimate = generalized(rewards, column.values.detach(), objective)
                advantages.append(estimate)
                returns[index] = estimate + column.values.detach()
    elif case.is_by_token:
        advantages = token_advantages(rows, case.advantage)
    else:
        scalars = group_advantages(rows, case.advantage)
        advantages = [torch.full_like(row.mask, scalars[row.rollout]) for row in rows]
    if objective.get("opd_coef", 0.0):
        gaps = [logp_old - column.teacher for logp_old, column in zip(old, found)]
        advantages = [advantage - objective["opd_coef"] * gap for advantage, gap in zip(advantages, gaps)]
    if kind == "reinforce_plus_plus" or objective.get("whiten_advantages"):
        advantages = whitened(advantages, [row.mask for row in rows])
    return advantages, returns


def discounted(rewards, gamma):
    returns = rewards.clone()
    for t in reversed(range(len(rewards) - 1)):
        returns[t] += gamma * returns[t + 1]
    return returns


def generalized(rewards, values, objective):
    gamma, decay = objective.get("gamma", 1.0), objective.get("lambda", 1.0)
    advantages, later = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        later = rewards[t] + gamma * following - values[t] + gamma * decay * later
        advantages[t] = later
    return advantages


def whitened(columns, masks):
    trained = torch.cat(columns)[torch.cat(masks) == 1]
    scale = torch.rsqrt(trained.var() + 1e-8)
    return [(column - trained.mean()) * scale for column in columns]


def policy_term(objective, row, logp, old, advantage):
    """The loss per token before corrections."""
    kind = objective.get("objective", "grpo")
    if kind == "sft":
        return -logp
    low, high = objective.get("eps_low", 0.2), objective.get("eps_high", objective.get("eps_low", 0.2))
    log_ratio = logp - old
    if kind == "gspo":
        log_ratio = ((log_ratio * row.mask).sum() / row.mask.sum().clamp_min(1)).expand_as(logp)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - low, 1 + high)
    if kind == "cispo":
        return -bounded.detach() * advantage * logp
    loss = torch.maximum(-ratio * advantage, -bounded * advantage)
    if "clip_c" in objective:
        loss = torch.where(advantage < 0, torch.minimum(-objective["clip_c"] * advantage, loss), loss)
    return loss


def correction(given, row, old):
    """Detached factors of the policy term."""
    log_weight = (old - row.logprobs).detach()
    token = log_weight.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    if given["kind"] == "tis":
        return token.clamp(given.get("low", 0.0), given.get("high", 2.0))
    if given["kind"] == "decoupled":
        return torch.where(token > given.get("cap", 5.0), 0.0, token)
    level, low, high = given.get("level", "token"), given.get("low", 0.5), given.get("high", 2.0)
    total = (log_weight * row.mask).sum()
    if level == "geometric":
        total = total / row.mask.sum().clamp_min(1)
    sequence = log_weight if level == "token" else total.expand_as(log_weight)
    weight = sequence.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    if given.get("outside", "clip") == "clip":
        weight = weight.clamp(low, high)
    else:
        weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
    veto = given.get("veto", 1e-4)
    is_vetoed = veto > 0 and bool(((log_weight < torch.tensor(veto).log()) & (row.mask == 1)).any())
    return torch.zeros_like(weight) if is_vetoed else weight


def divergence(kind, logp, reference):
    difference = logp - reference
    if kind == "k2":
        return difference**2 / 2
    k3 = (-difference).exp() - 1 + difference
    return k3 if kind == "k3" else k3.clamp(-10, 10)


def old_logprobs(case, rows, found):
    """The denominator of the ratio."""
    objective = case.objective
    recomputes = objective.get("old_logprobs") == "recompute" or "correction" in objective
    return [column.logp.detach() if recomputes else row.logprobs for row, column in zip(rows, found)]


def losses(case, rows, logits, reference_logits=None, teacher_logits=None, values=None):
    """The loss of the policy over the rows of one batch, and that of the critic or None.

    `logits` and `values` are those of whole sequences and carry gradients.
    """
    objective = case.objective
    found = []
    for index, row in enumerate(rows):
        column = Columns(*columns(logits[index], row))
        if reference_logits:
            column.reference = columns(reference_logits[index], row)[0].detach()
        column.teacher = columns(teacher_logits[index], row)[0].detach() if teacher_logits else row.teacher
        if values:
            column.values = values[index][row.prompt - 1 : -1]
        found.append(column)
    old = old_logprobs(case, rows, found)
    advantages, returns = advantages_and_returns(case, rows, found, old)
    policy_loss = torch.zeros(())
    value_loss = torch.zeros(()) if values else None
    for index, (row, weight) in enumerate(zip(rows, loss_weights(rows, case.weighting))):
        column = found[index]
        per_token = policy_term(objective, row, column.logp, old[index], advantages[index])
        if "correction" in objective:
            per_token = per_token * correction(objective["correction"], row, old[index])
        per_token = per_token - objective.get("entropy_coef", 0.0) * column.entropy
        if objective.get("kl_loss_coef", 0.0):
            kind = objective.get("kl_loss_type", "low_var_kl")
            per_token = per_token + objective["kl_loss_coef"] * divergence(kind, column.logp, column.reference)
        policy_loss = policy_loss + weight * (per_token * row.mask).sum()
        if values:
            clip, before = objective.get("value_clip", 0.2), column.values.detach()
            kept = before + (column.values - before).clamp(-clip, clip)
            error = torch.maximum((kept - returns[index]) ** 2, (column.values - returns[index]) ** 2)
            value_loss = value_loss + weight * (error * row.mask).sum()
    return policy_loss, value_loss
