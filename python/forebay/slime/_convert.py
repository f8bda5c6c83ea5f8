"""Makes slime's training data of samples, so that slime's loss is that of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._early import masked
from ._checks import refuse_clamp

KEY = "forebay"
"""Where `convert` finds the numbers of a row in the `train_metadata` of its sample."""

FROM_REWARDS = ("ppo", "reinforce_plus_plus")
"""Estimators that make advantages of rewards themselves. The others take what they get as the advantage."""


def convert(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The `--custom-convert-samples-to-train-data-path`: makes slime's loss that of the batch.

    slime computes `1/G * sum_i sum_t mask_it * l_it / rollout_mask_sums_i` over the samples of a step, where G is
    `--global-batch-size`. With `rollout_mask_sums_i = 1 / (G * loss_weight_i)` this is the weighted sum that the
    service defines. slime takes G different `rollout_ids` for a step, so the samples of each batch are numbered up to G
    in turn, and samples without a trained token are added where there are fewer.

    Samples that are not from this package keep their own mask sum and their reward.
    """
    size = int(getattr(args, "global_batch_size", None) or len(samples))
    multiple = _multiple(args)
    given = [_Row.of(sample) for sample in samples]
    rows: list[_Row] = []
    for step in sorted({row.step for row in given}):
        of_step = [row for row in given if row.step == step]
        count = -(-max(len(of_step), size) // multiple) * multiple
        of_step += [_padding(of_step)] * (count - len(of_step))
        rows += [replace(row, label=step * size + place % size) for place, row in enumerate(of_step)]
    weights = [row.weight for row in rows if row.weight and any(row.mask)]
    if weights:
        refuse_clamp(max(weights), size)
    from_rewards = getattr(args, "advantage_estimator", None) in FROM_REWARDS
    data: dict[str, Any] = {
        "tokens": [row.tokens for row in rows],
        "response_lengths": [len(row.mask) for row in rows],
        "rewards": [row.reward if from_rewards else row.advantage for row in rows],
        "raw_reward": [row.reward for row in rows],
        "truncated": [int(row.truncated) for row in rows],
        "sample_indices": [row.index for row in rows],
        "rollout_ids": [row.label for row in rows],
        "loss_masks": [row.mask for row in rows],
        "rollout_mask_sums": [row.denominator(size) for row in rows],
        "source_names": [row.source for row in rows],
    }
    # A column is there for all rows or for none. `generate_rollout` has refused trained rows that lack a needed one.
    logprobs = [(row.logprobs, row.mask) for row in rows]
    teacher_logprobs = [(row.teacher_logprobs, row.mask) for row in rows]
    for column, pairs in (("rollout_log_probs", logprobs), ("teacher_log_probs", teacher_logprobs)):
        trained = [values is not None for values, mask in pairs if any(mask)]
        if trained and all(trained):
            data[column] = [masked(values, mask) for values, mask in pairs]
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of slime's training data."""

    tokens: list[int]
    mask: list[int]
    logprobs: Sequence[float] | None
    teacher_logprobs: Sequence[float] | None
    advantage: float
    reward: float
    weight: float | None
    """None for a sample that is not from this package."""
    truncated: bool
    index: int | None
    step: int
    """Which optimizer step of the iteration trains it, from 0."""
    source: str
    label: int = 0

    @staticmethod
    def of(sample: Any) -> _Row:
        metadata: dict[str, Any] = sample.train_metadata or {}
        numbers: Any = metadata.get(KEY)
        reward = float(sample.reward)
        return _Row(
            tokens=sample.tokens,
            mask=mask_of(sample),
            logprobs=sample.rollout_log_probs,
            teacher_logprobs=sample.teacher_log_probs,
            advantage=reward if numbers is None else numbers["advantage"],
            reward=reward,
            weight=None if numbers is None else numbers["loss_weight"],
            truncated=sample.status.value == "truncated",
            index=sample.index,
            step=0 if numbers is None else numbers["step"],
            source=(None if numbers is None else numbers["source"]) or "unknown",
        )

    def denominator(self, size: int) -> float:
        """What slime divides the sum of this row by, before it divides by `size`."""
        if self.weight is None:
            return float(sum(self.mask))
        # The sum of a row without trained tokens is 0, whatever it is divided by.
        return 1.0 / (size * self.weight) if any(self.mask) else 1.0


def mask_of(sample: Any) -> list[int]:
    """The mask of a sample of slime, where None stands for ones, and `remove_sample` for zeros."""
    length: int = sample.response_length
    mask: list[int] = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if len(mask) != length:
        raise ValueError(f"the mask has {len(mask)} entries, and the response {length} tokens")
    return [0] * length if sample.remove_sample else mask


def _padding(rows: Sequence[_Row]) -> _Row:
    """Two tokens of which none is trained. Its reward is the mean, so that the mean that slime prints stays."""
    token = rows[0].tokens[0]
    return replace(
        rows[0],
        tokens=[token, token],
        mask=[0],
        logprobs=[0.0],
        teacher_logprobs=[0.0],
        advantage=0.0,
        reward=sum(row.reward for row in rows) / len(rows),
        weight=0.0,
        truncated=False,
        source="padding",
    )


def _multiple(args: Any) -> int:
    """A step needs this many samples, or a multiple of it, so that every rank has as many microbatches."""

    def number(name: str) -> int:
        return int(getattr(args, name, None) or 1)

    pipeline = number("pipeline_model_parallel_size")
    ranks = number("actor_num_nodes") * number("actor_num_gpus_per_node")
    ranks //= number("tensor_model_parallel_size") * pipeline * number("context_parallel_size")
    interleaved = number("virtual_pipeline_model_parallel_size") > 1
    group = int(getattr(args, "microbatch_group_size_per_vp_stage", None) or pipeline) if interleaved else 1
    fixed = 1 if getattr(args, "use_dynamic_batch_size", True) else number("micro_batch_size")
    return max(1, ranks) * group * fixed
