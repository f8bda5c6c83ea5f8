"""The fields of slime's samples, made of the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._early import masked, one_advantage
from .._wire import Sample
from ._convert import KEY


def fields_of(row: Sample, batch_id: str, metadata: Mapping[str, Any], place: int) -> dict[str, Any]:
    mask = row.loss_mask or []
    versions = [str(version) for version, *_ in row.versions or ()]
    if not versions and row.policy_version is not None:
        versions = [str(row.policy_version)]
    return {
        "rollout_id": row.rollout_id,
        "tokens": row.tokens,
        "response_length": row.response_length,
        "loss_mask": mask,
        "rollout_log_probs": None if row.logprobs is None else masked(row.logprobs, mask),
        "teacher_log_probs": None if row.teacher_logprobs is None else masked(row.teacher_logprobs, mask),
        # A rollout that a filter masked may have no reward, and slime prints the mean.
        "reward": row.reward or 0.0,
        "weight_versions": versions,
        "metadata": {
            **metadata,
            KEY: {
                "batch_id": batch_id,
                "group_id": row.group_id,
                "segment": row.segment,
                "environment": row.environment,
            },
        },
        "train_metadata": {
            KEY: {
                "advantage": one_advantage(row.advantage, "slime"),
                "loss_weight": row.loss_weight,
                "step": place,
                "source": row.environment,
            }
        },
    }


def empty_fields(batch_id: str, place: int) -> dict[str, Any]:
    """A sample that trains nothing, for a batch whose rollouts all failed before their first token."""
    return {
        "rollout_id": f"empty-{batch_id}",
        "tokens": [0, 0],
        "response_length": 1,
        "loss_mask": [0],
        "rollout_log_probs": [0.0],
        "reward": 0.0,
        "metadata": {KEY: {"batch_id": batch_id, "group_id": None, "segment": 0, "environment": None}},
        "train_metadata": {KEY: {"advantage": 0.0, "loss_weight": 0.0, "step": place, "source": None}},
    }
