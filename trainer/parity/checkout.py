"""slime's own functions in place of `formulas.losses`, from a checkout of slime. Nothing of slime is kept here.

What slime imports and one process does not need is replaced: Megatron's parallel state says that there is one rank.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import types

# slime compiles its formulas, which takes longer than to run them here.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch

import formulas

# Where slime finds the corrections that its configuration names.
CORRECTIONS = "parity_corrections"

LEVELS = {"token": "token", "product": "sequence", "geometric": "geometric"}


class Slime:
    """The functions of one checkout."""

    def __init__(self, checkout):
        checkout = pathlib.Path(checkout)
        replace_what_it_imports(checkout)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1
        )
        sys.path[:0] = [str(checkout), str(checkout / "examples" / "train_infer_mismatch_helper")]
        import mis
        from slime.backends.megatron_utils import loss

        self.loss = loss
        corrections = types.SimpleNamespace(mis=mis.compute_mis_weights_with_cp, icepop=loss.icepop_function)
        sys.modules[CORRECTIONS] = corrections

    def losses(self, case, rows, logits, reference_logits=None, teacher_logits=None, values=None):
        """The same as `formulas.losses`."""
        args = arguments(case)
        batch = batch_of(case, rows)
        sampled = lambda given: [formulas.columns(one, row)[0].detach() for one, row in zip(given, rows)]
        if reference_logits:
            batch["ref_log_probs"] = sampled(reference_logits)
        if teacher_logits:
            batch["teacher_log_probs"] = sampled(teacher_logits)
        if not args.use_rollout_logprobs:
            batch["log_probs"] = sampled(logits)
        if values:
            batch["values"] = [value[row.prompt - 1 : -1].detach() for value, row in zip(values, rows)]
        reducer = self.loss.get_sum_of_sample_mean(
            batch["total_lengths"],
            batch["response_lengths"],
            batch["loss_masks"],
            batch["rollout_mask_sums"],
            args.calculate_per_token_loss,
        )
        share = 1 / batch["step_size"]
        packed = torch.cat(logits)[None]
        if case.objective.get("objective") == "sft":
            return self.loss.sft_loss_function(args, batch, packed, reducer)[0] * share, None
        self.loss.compute_advantages_and_returns(args, batch)
        policy_loss = self.loss.policy_loss_function(args, batch, packed, reducer)[0] * share
        if not values:
            return policy_loss, None
        packed = torch.cat(values)[None, :, None]
        return policy_loss, self.loss.value_loss_function(args, batch, packed, reducer)[0] * share


def replace_what_it_imports(checkout):
    one_rank = types.SimpleNamespace(
        is_pipeline_last_stage=lambda: True,
        get_context_parallel_rank=lambda: 0,
        get_context_parallel_world_size=lambda: 1,
        get_context_parallel_group=lambda: None,
        get_tensor_model_parallel_group=lambda: None,
        get_data_parallel_group=lambda **_: None,
    )
    given = {
        "megatron": {},
        "megatron.core": {"mpu": one_rank},
        "slime.utils.misc": {"load_function": lambda path: getattr(sys.modules[CORRECTIONS], path)},
        "slime.utils.types": {"RolloutBatch": dict},
    }
    for name, attributes in given.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    # Packages without their __init__, which imports everything.
    for name in ("slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(checkout.joinpath(*name.split(".")))]


def arguments(case):
    objective = case.objective
    kind = objective.get("objective", "grpo")
    given = objective.get("correction")
    low = objective.get("eps_low", 0.2)
    args = argparse.Namespace(
        advantage_estimator=kind,
        normalize_advantages=kind == "reinforce_plus_plus" or objective.get("whiten_advantages", False),
        use_rollout_logprobs=given is None and objective.get("old_logprobs") != "recompute",
        eps_clip=low,
        eps_clip_high=objective.get("eps_high", low),
        eps_clip_c=objective.get("clip_c"),
        entropy_coef=objective.get("entropy_coef", 0.0),
        use_kl_loss=objective.get("kl_loss_coef", 0.0) != 0.0,
        kl_loss_coef=objective.get("kl_loss_coef", 0.0),
        # The reward's penalty is k1 here, and never given beside the loss's.
        kl_loss_type="k1" if objective.get("kl_coef") else objective.get("kl_loss_type", "low_var_kl"),
        kl_coef=objective.get("kl_coef", 0.0),
        gamma=objective.get("gamma", 1.0),
        lambd=objective.get("lambda", 1.0),
        use_opd=objective.get("opd_coef", 0.0) != 0.0,
        opd_kl_coef=objective.get("opd_coef", 0.0),
        opd_type="sglang",
        value_clip=objective.get("value_clip", 0.2),
        rollout_temperature=case.temperature,
        rollout_top_p=1.0,
        calculate_per_token_loss=case.weighting == "token_mean",
        log_probs_chunk_size=-1,
        allgather_cp=False,
        custom_advantage_function_path=None,
        custom_tis_function_path=None,
        use_opsm=False,
        use_unbiased_kl=False,
        get_mismatch_metrics=False,
        use_tis=given is not None,
    )
    if given:
        vars(args).update(correction_arguments(given))
    return args


def correction_arguments(given):
    if given["kind"] == "tis":
        return {"tis_clip_low": given.get("low", 0.0), "tis_clip": given.get("high", 2.0)}
    if given["kind"] == "decoupled":
        return {"custom_tis_function_path": "icepop", "tis_clip_low": 0.0, "tis_clip": given.get("cap", 5.0)}
    rejects = given.get("outside", "clip") == "zero"
    veto = given.get("veto", 1e-4)
    return {
        "custom_tis_function_path": "mis",
        "tis_level": LEVELS[given.get("level", "token")],
        "tis_mode": "mask" if rejects else "clip",
        "tis_lower_bound": given.get("low", 0.5),
        "tis_upper_bound": given.get("high", 2.0),
        "tis_batch_normalize": False,
        # The veto is part of its rejection, whose bounds are out of reach here.
        "use_rs": veto > 0,
        "rs_level": "token",
        "rs_lower_bound": 0.0,
        "rs_upper_bound": float("inf"),
        "rs_veto_threshold": veto or None,
    }


def batch_of(case, rows):
    """The columns that slime's trainer gets, and the number that its step divides by."""
    scalars = formulas.group_advantages(rows, case.advantage)
    shaped = case.objective.get("objective") in ("ppo", "reinforce_plus_plus")
    masked, samples = {}, {}
    for row in rows:
        masked[row.rollout] = masked.get(row.rollout, 0) + row.mask.sum()
        samples[row.rollout] = samples.get(row.rollout, 0) + 1
    denominators = {
        "rollout_mean": lambda row: masked[row.rollout],
        "turn_mean": lambda row: row.mask.sum() * samples[row.rollout],
    }
    denominator = denominators.get(case.weighting, lambda row: row.mask.sum())
    sizes = {"token_mean": float(sum(row.mask.sum() for row in rows)), "sample_mean": len(rows)}
    return {
        "unconcat_tokens": [row.tokens for row in rows],
        "total_lengths": [len(row.tokens) for row in rows],
        "response_lengths": [len(row.mask) for row in rows],
        "loss_masks": [row.mask for row in rows],
        "rewards": [row.reward if shaped else scalars[row.rollout] for row in rows],
        "rollout_log_probs": [row.logprobs for row in rows],
        "teacher_log_probs": [row.teacher for row in rows],
        "rollout_mask_sums": [denominator(row) for row in rows],
        "step_size": sizes.get(case.weighting, len(masked)),
    }
