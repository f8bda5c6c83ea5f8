"""Refuses settings of slime and rows under which its loss would not be that of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import errors
from .._early import demand, is_trained
from .._wire import Sample

_NOT_EXACT = {
    "calculate_per_token_loss": "--calculate-per-token-loss divides by the number of tokens",
    "log_passrate": "--log-passrate expects the same number of samples for each prompt",
    "reward_key": "--reward-key expects rewards with names",
    "log_reward_category": "--log-reward-category expects rewards with names",
    "use_dynamic_global_batch_size": "--use-dynamic-global-batch-size changes the divisor",
    "use_rollout_routing_replay": "--use-rollout-routing-replay needs the experts of each token, which rollouts lack",
}
"""Settings that contradict the loss weights, or that the rows cannot serve."""


def check_settings(args: Any) -> None:
    """Refuses settings under which slime's loss would not be that of the batch."""
    if args is None:
        return
    for name, why in _NOT_EXACT.items():
        if getattr(args, name, None):
            raise errors.ConfigurationError(f"forebay.slime cannot be used with this setting: {why}")
    if float(getattr(args, "rollout_top_p", None) or 1.0) != 1.0:
        raise errors.ConfigurationError(
            "--rollout-top-p below 1 needs the sampled vocabulary of each token, which rollouts lack: set it to 1"
        )
    estimator = getattr(args, "advantage_estimator", None)
    if getattr(args, "normalize_advantages", False) and estimator in ("grpo", "gspo", "cispo"):
        raise errors.ConfigurationError(
            "--normalize-advantages would change the advantages that the service has computed: leave it out"
        )
    path = "custom_convert_samples_to_train_data_path"
    if hasattr(args, path) and getattr(args, path) is None:
        raise errors.ConfigurationError(
            "slime would compute advantages and weights of its own: "
            "set --custom-convert-samples-to-train-data-path forebay.slime.convert"
        )
    if "mooncake" in str(getattr(args, "object_store_backend", "")).lower():
        raise errors.ConfigurationError(
            "--object-store-backend mooncake rounds the weights of the rows to integers: use the object store of Ray"
        )


def check_rows(args: Any, rows: Sequence[Sample]) -> None:
    """Refuses rows that slime would train wrongly, before they are acked."""
    if args is None:
        return
    if getattr(args, "use_rollout_logprobs", False) or getattr(args, "use_tis", False):
        demand(rows, "logprobs", "--use-rollout-logprobs or --use-tis needs them")
    if any(is_trained(row) and row.teacher_logprobs is not None for row in rows):
        demand(rows, "teacher_logprobs", "other rows of the batch have them")
    divisor = float(getattr(args, "rollout_temperature", None) or 1.0)
    for row in rows:
        if is_trained(row) and abs(row.temperature - divisor) > 1e-6 * divisor:
            raise errors.ConfigurationError(
                f"rollout {row.rollout_id} was sampled at temperature {row.temperature:g}, and slime divides all "
                f"logits by {divisor:g}: set --rollout-temperature to the temperature of the agents"
            )
    size = getattr(args, "global_batch_size", None)
    if size:
        heaviest = max((row for row in rows if is_trained(row)), key=lambda row: row.loss_weight, default=None)
        if heaviest is not None:
            refuse_clamp(heaviest.loss_weight, int(size), len({row.rollout_id for row in rows}))


def refuse_clamp(weight: float, size: int, rollouts: int | None = None) -> None:
    """Refuses weights above 1/G: slime divides by at least 1, so that their rows would count for too little."""
    if weight * size <= 1.0 + 1e-9:
        return
    have = f"The batch has {rollouts} rollouts. " if rollouts else ""
    raise errors.ConfigurationError(
        f"a row has the loss weight {weight:.3g}, and slime can train at most 1/{size} with --global-batch-size "
        f"{size}. {have}Set --global-batch-size to at most {int(1.0 / weight + 1e-9)}, or near the number of rollouts "
        f"of a batch (`batch.groups` times `group.size` of the policy)"
    )
