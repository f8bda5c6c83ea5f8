"""The configurations that are compared, in the trainer's words."""

import dataclasses


@dataclasses.dataclass
class Case:
    """One configuration of the trainer and of the policy's rules."""

    name: str
    objective: dict
    # The rule of the policy: a name, or an object.
    advantage: str | dict = "grpo"
    weighting: str = "rollout_mean"
    temperature: float = 1.0
    # Every response token is trained. slime's PPO takes masked tokens for steps in time, the trainer does not.
    is_unmasked: bool = False
    # A frozen model computes the teacher's log-probabilities, in place of the rows.
    has_teacher: bool = False
    memory: dict = dataclasses.field(default_factory=dict)
    batches_per_step: int = 1

    @property
    def is_by_token(self):
        """Whether each token has an advantage of its own, which slime has no place for."""
        return self.advantage == "posted" or isinstance(self.advantage, dict)

    @property
    def has_critic(self):
        return self.objective.get("objective") == "ppo"

    @property
    def has_reference(self):
        return "kl_coef" in self.objective or "kl_loss_coef" in self.objective


def grpo(name, objective=None, **others):
    return Case(f"grpo{name}", objective or {}, **others)


def mis(name, **bounds):
    return grpo(f", mis {name}", {"correction": {"kind": "mis", **bounds}})


def gspo(name, **added):
    objective = {"objective": "gspo", "eps_low": 3e-4, "eps_high": 4e-4, **added}
    return Case(f"gspo{name}", objective)


def cispo(name, **added):
    return Case(f"cispo{name}", {"objective": "cispo", **added})


def plus_plus(name, **added):
    return Case(f"reinforce_plus_plus{name}", {"objective": "reinforce_plus_plus", **added}, advantage="none")


def ppo(name, temperature=1.0, **added):
    objective = {"objective": "ppo", **added}
    return Case(f"ppo{name}", objective, advantage="none", is_unmasked=True, temperature=temperature)


CASES = [
    grpo(""),
    grpo(", advantages without deviation", advantage="grpo_mean"),
    grpo(", rewards as advantages", advantage="reward"),
    grpo(", posted advantages of tokens", advantage="posted"),
    grpo(", advantages of turns", advantage={"kind": "turn_return", "gamma": 0.9}),
    grpo(", eps_high 0.28", {"eps_high": 0.28}),
    grpo(", clip_c 1.5", {"clip_c": 1.5}),
    grpo(", recompute", {"old_logprobs": "recompute"}),
    grpo(", entropy_coef 0.05", {"entropy_coef": 0.05}),
    grpo(", kl k2", {"kl_loss_coef": 0.1, "kl_loss_type": "k2"}),
    grpo(", kl k3", {"kl_loss_coef": 0.1, "kl_loss_type": "k3"}),
    grpo(", low_var_kl", {"kl_loss_coef": 0.1}),
    grpo(", token_mean", weighting="token_mean"),
    grpo(", turn_mean", weighting="turn_mean"),
    grpo(", sample_mean", weighting="sample_mean"),
    grpo(", temperature 0.7", temperature=0.7),
    grpo(", microbatches of 24 tokens", memory={"microbatch_tokens": 24, "logits": 128}),
    grpo(", recomputed layers", memory={"recompute_layers": True}),
    grpo(", two batches a step", batches_per_step=2),
    grpo(", opd of rows", {"opd_coef": 0.5}),
    grpo(", opd of a frozen teacher", {"opd_coef": 0.5}, has_teacher=True),
    grpo(", tis", {"correction": {"kind": "tis"}}),
    grpo(", tis 0.8 to 1.2", {"correction": {"kind": "tis", "low": 0.8, "high": 1.2}}),
    grpo(", decoupled, cap 1.3", {"correction": {"kind": "decoupled", "cap": 1.3}}),
    mis("token, clip", low=0.8, high=1.2),
    mis("token, zero", low=0.8, high=1.2, outside="zero"),
    mis("product, clip", level="product"),
    mis("product, zero", level="product", outside="zero"),
    mis("geometric, zero", level="geometric", low=0.9, high=1.1, outside="zero"),
    mis("token, veto 0.6", veto=0.6),
    gspo(""),
    gspo(", clip_c 1.0003", clip_c=1.0003),
    gspo(", low_var_kl and entropy", kl_loss_coef=0.1, entropy_coef=0.05),
    gspo(", recompute, tis", correction={"kind": "tis"}),
    cispo(""),
    cispo(", upper bound alone", eps_low=1.0, eps_high=0.3),
    cispo(", low_var_kl, tis", kl_loss_coef=0.1, correction={"kind": "tis"}),
    plus_plus(""),
    plus_plus(", gamma 0.9, kl_coef 0.1", gamma=0.9, kl_coef=0.1),
    plus_plus(", opd", opd_coef=0.5),
    plus_plus(", recompute, kl_coef 0.1, clip_c 1.5", old_logprobs="recompute", kl_coef=0.1, clip_c=1.5),
    ppo(""),
    ppo(", gamma 0.95, lambda 0.9", gamma=0.95, **{"lambda": 0.9}),
    ppo(", whitened", whiten_advantages=True),
    ppo(", kl_coef 0.1, opd, whitened", kl_coef=0.1, opd_coef=0.5, whiten_advantages=True),
    ppo(", recompute, temperature 0.7", old_logprobs="recompute", temperature=0.7),
    Case("sft", {"objective": "sft"}),
]
