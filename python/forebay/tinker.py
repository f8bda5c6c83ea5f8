"""Batches for Tinker, and for the trainers that speak its protocol.

Their losses are sums over tokens, so the weight of a row is part of the advantage of each of its tokens:
`loss_weight * l(advantage) = l(loss_weight * advantage)` for the losses of `LOSSES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

from . import errors
from ._early import demand, is_trained, masked, response_mask
from ._wire import Sample
from .batch import Batch, Shard

Loss = Literal["ppo", "importance_sampling", "cispo", "cross_entropy"]
"""Losses of Tinker that are sums over tokens and proportional to the advantage. `cross_entropy` has no advantages."""

LOSSES = ("ppo", "importance_sampling", "cispo", "cross_entropy")


def data(batch: Batch, loss: Loss = "ppo", *, shard: Shard | None = None) -> list[Any]:
    """Makes a `tinker.Datum` of each row that has a trained token, for `forward_backward(data, loss)`.

    The sum that Tinker computes is then the loss of the batch. `loss` decides what a datum holds: log-probabilities and
    advantages, or for `cross_entropy` the weights of the tokens.

    Tinker knows no temperature, so rows that were sampled at another one than 1 are refused.
    """
    if loss not in LOSSES:
        raise errors.ConfigurationError(
            f"the loss {loss!r} is not proportional to the advantage, so the weights of rows cannot be part of it; "
            f"those that are: {', '.join(LOSSES)}"
        )
    rows = [row for row in batch.rows(shard) if is_trained(row)]
    _check(rows, loss)
    tinker: Any = importlib.import_module("tinker")
    return [
        tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        for tokens, inputs in (inputs_of(row, loss) for row in rows)
    ]


def inputs_of(row: Sample, loss: Loss) -> tuple[list[int], dict[str, Any]]:
    """Returns the tokens that the model reads, and a number per token that it predicts: each is the one behind the
    tokens before it, so the first token of the row is not predicted and the last one is not read."""
    tokens, mask = row.tokens or [], response_mask(row)
    prompt = len(tokens) - len(mask) - 1
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = [0.0] * prompt + [row.loss_weight * bit for bit in mask]
    else:
        inputs["logprobs"] = [0.0] * prompt + masked(row.logprobs, mask)
        advantages = [row.advantage or 0.0] * len(mask) if row.advantages is None else row.advantages
        weighted = [advantage * row.loss_weight * bit for advantage, bit in zip(advantages, mask, strict=True)]
        inputs["advantages"] = [0.0] * prompt + weighted
    return tokens[:-1], inputs


def _check(rows: Sequence[Sample], loss: Loss) -> None:
    if loss != "cross_entropy":
        demand(rows, "logprobs", f"the loss {loss!r} compares with them")
    for row in rows:
        if row.temperature != 1.0:
            raise errors.ConfigurationError(
                f"rollout {row.rollout_id} was sampled at temperature {row.temperature:g}, and Tinker computes "
                "log-probabilities at temperature 1: let the agents sample at 1"
            )
