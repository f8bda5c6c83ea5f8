"""Posts samples of slime, for generate functions that run inside slime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from .._early import policy_of
from .._uuid import uuid7
from .._wire import Receipt, Sampling, Segment, Trajectory
from ..client import Client
from ._convert import KEY, mask_of

_process = uuid7()
"""Names the groups of this process: slime's counters begin again after a restart, and identities are used once."""


def post_sample(
    sample: Any | Sequence[Any],
    *,
    client: Client | None = None,
    policy: str | None = None,
    group_id: str | None = None,
    group_size: int | None = None,
    version_offset: int = 0,
    environment: str | None = None,
    sampling: Sampling | None = None,
    reward: float | None = None,
) -> Receipt:
    """Posts a finished sample of slime as a rollout, or a list of samples as the segments of one rollout.

    It is for functions of `--custom-generate-function-path`, and it waits for the answer: call it as
    `await asyncio.to_thread(post_sample, sample, ...)`. The samples of a prompt become a group: give its size
    (`--n-samples-per-prompt`), unless the policy's rules have it. slime counts its weight versions from the start of
    the process, so `version_offset` is added to them.
    """
    samples: list[Any] = list(cast("Sequence[Any]", sample)) if isinstance(sample, list | tuple) else [sample]
    trajectory = _trajectory(samples, reward=reward, version_offset=version_offset)
    trajectory.policy = policy_of(policy)
    trajectory.group_id = group_id or trajectory.group_id
    trajectory.group_size = group_size
    trajectory.environment = environment
    trajectory.sampling = sampling
    return (client or _client()).post(trajectory)


@cache
def _client() -> Client:
    return Client()


def _trajectory(samples: Sequence[Any], *, reward: float | None, version_offset: int) -> Trajectory:
    if not samples:
        raise ValueError("a rollout has at least one sample")
    first = samples[0]
    statuses = {sample.status.value for sample in samples}
    if "pending" in statuses:
        raise ValueError("the sample is still pending: set its status, and post it when it has its reward")
    worst = next((one for one in ("failed", "aborted", "truncated") if one in statuses), "completed")
    value: Any = first.reward if reward is None else reward
    if isinstance(value, Mapping):
        raise ValueError("the reward of the sample is a dictionary: give the one that counts as `reward`")
    numbers = [int(version) for sample in samples for version in sample.weight_versions if str(version).isdigit()]
    held: dict[str, Any] = first.metadata or {}
    metadata = {name: value for name, value in held.items() if name != KEY} or None
    place = first.rollout_id if first.rollout_id is not None else first.index
    sampled = [sample for sample in samples if sample.response_length > 0]
    if not sampled and first.tokens and worst in ("completed", "truncated"):
        # Nothing was sampled. The prompt alone is a rollout that counts in its group and trains nothing.
        sampled = [first]
    return Trajectory(
        # Without an index the rollout gets an id of its own.
        rollout_id=uuid7() if place is None else f"{_process}.{place}",
        group_id=None if first.group_index is None else f"{_process}.{first.group_index}",
        policy_version=min(numbers) + version_offset if numbers else None,
        status=cast("Any", worst),
        reward=None if value is None else float(value),
        segments=[_segment(sample) for sample in sampled] or None,
        metadata=metadata,
    )


def _segment(sample: Any) -> Segment:
    return Segment(
        tokens=sample.tokens,
        loss_mask=mask_of(sample),
        logprobs=sample.rollout_log_probs,
        teacher_logprobs=sample.teacher_log_probs,
    )
