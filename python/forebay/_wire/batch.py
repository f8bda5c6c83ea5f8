"""What trainers lease, read and ack, and the lineage of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .trajectory import Status, Verdict

BatchState = Literal["leased", "returned", "trained", "checkpointed", "quarantined", "split", "discarded"]
"""State of a batch."""

ShardBalance = Literal["tokens", "squared_tokens"]
"""What the shards of a batch have about equal amounts of: tokens, or the sum of the squared lengths of their rows, with
which the time of attention grows."""


@dataclass(slots=True, kw_only=True)
class BatchRequest:
    """A request for the next batch of a policy."""

    policy: str | None = None
    """Policy; `default` when absent."""
    consumer: str | None = None
    """Name of the consumer, the scope of `request_id`."""
    request_id: str | None = None
    """Makes the request safe to repeat: while the lease is alive, the same request returns the same batch and
    lease."""
    wait_ms: int | None = None
    """Milliseconds to wait for a batch, at most 60,000."""
    partial: bool | None = None
    """Return the groups that are ready after `wait_ms`, even if they are fewer than a full batch."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class BatchDescriptor:
    """An immutable list of whole ready groups of one policy: what one optimizer step consumes."""

    batch_id: str
    """Identity of the batch; the same at every delivery."""
    state: BatchState
    """State of the batch."""
    lease: str | None = None
    """Token that proves the lease; present only in the answer to `POST /batches`."""
    consumer: str | None = None
    """Consumer that held the last lease."""
    epoch: int
    """Epoch of the last lease."""
    policy: str
    """Policy of every rollout in the batch."""
    expires_at: str | None = None
    """When the lease expires; null when the batch is not leased."""
    expires_in_ms: int | None = None
    """Milliseconds until the lease expires; null when the batch is not leased."""
    attempt: int
    """Number of this delivery, counted from 1."""
    step: int | None = None
    """Optimizer step that consumed the batch, or that had consumed it before a resume brought it back."""
    reason: str | None = None
    """Why the batch was given back or quarantined."""
    groups: int
    """Number of groups; a batch holds whole groups."""
    rollouts: int
    """Number of kept and masked rollouts."""
    samples: int
    """Number of rows of `/samples`: one per segment, and one for a rollout without segments."""
    tokens: int
    """Number of prompt and response tokens."""
    policy_version: VersionRange
    """Weight versions at the time of the cut."""
    metrics: dict[str, float]
    """Statistics for the trainer's log: rewards, staleness, and drops since the previous batch."""
    samples_url: str
    """URL of the samples."""
    shards: list[ShardCount] | None = None
    """Contents of each shard, for `?shards=n`."""
    created_at: str
    """When the batch was cut."""
    acked_at: str | None = None
    """When the batch was acked; null unless it is trained or checkpointed."""
    waited_ms: int | None = None
    """Milliseconds for which the holder of the last lease had asked for a batch; null if an earlier version of the
    service granted the lease."""
    held_ms: int | None = None
    """Milliseconds from the beginning of the last lease until the ack, or until now; null unless the batch is leased,
    trained or checkpointed."""


@dataclass(slots=True, kw_only=True)
class VersionRange:
    """Weight versions at the time a batch is cut."""

    current: int
    """The policy's version when the batch was cut."""
    min: int | None = None
    """Oldest version of a trained token; null when nothing is trained."""
    max: int | None = None
    """Newest version of a trained token; null when nothing is trained."""


@dataclass(slots=True, kw_only=True)
class ShardCount:
    """Contents of one shard of a batch."""

    rollouts: int
    """Number of rollouts that have a row in the shard. The rows of a rollout may be in several shards."""
    samples: int
    """Number of rows."""
    tokens: int
    """Number of prompt and response tokens."""


@dataclass(slots=True, kw_only=True)
class BatchPage:
    """Batches in the order in which they were cut, or the newest first."""

    batches: list[BatchDescriptor]
    """Descriptors, without leases."""
    next: str | None = None
    """Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the
    last."""
    examined: int
    """Number of entries that were examined to find those of the page, at most 10,000 in a filtered list."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One row of `/samples`: one segment of a rollout. `loss = sum_i loss_weight_i * sum_t loss_mask_it * l_it` over
    the rows of a batch, however the rows are split into microbatches. `messages` and `metadata` belong to the rollout
    and are sent once, on its first row (`segment` 0). The other rows may be in other shards."""

    rollout_id: str
    """Rollout that the segment belongs to."""
    group_id: str
    """Group of the rollout."""
    segment: int
    """Position of the segment in its rollout, from 0."""
    segments: int
    """Number of segments of the rollout."""
    kind: str | None = None
    """Label of the segment."""
    environment: str | None = None
    """Label of the environment."""
    verdict: Verdict
    """`kept` or `masked`."""
    status: Status
    """How the execution ended."""
    tokens: list[int] | None = None
    """Prompt and response token ids; null for a rollout without segments."""
    response_length: int
    """Number of response tokens; they are the last of `tokens`."""
    loss_mask: list[int] | None = None
    """0 or 1 per response token; all 0 where the verdict is `masked`."""
    logprobs: list[float] | None = None
    """Behaviour log-probabilities per response token."""
    teacher_logprobs: list[float] | None = None
    """Teacher log-probabilities per response token."""
    values: list[float] | None = None
    """Critic values per response token."""
    temperature: float
    """Divisor of the logits at sampling."""
    top_p: float = 1.0
    """Nucleus mass at sampling; below 1, importance ratios are biased."""
    top_k: int = 0
    """Number of candidates at sampling, -1 for all; above 0, importance ratios are biased."""
    reward: float | None = None
    """Reward of the rollout."""
    advantage: float
    """Advantage of the rollout."""
    loss_weight: float
    """Weight of each trained token of this row in the loss."""
    policy_version: int | None = None
    """Weight version of the rollout: its oldest span with a trained token."""
    versions: list[list[int]] | None = None
    """Version spans as the producer sent them."""
    messages: list[dict[str, Any]] | None = None
    """Messages as the producer sent them, on the row of segment 0; null on the other rows of the rollout."""
    metadata: dict[str, Any] | None = None
    """Metadata as the producer sent it, on the row of segment 0; null on the other rows of the rollout."""


@dataclass(slots=True, kw_only=True)
class ExtendRequest:
    """Extends a lease (a heartbeat)."""

    lease: str
    """The lease."""
    ttl_s: int
    """Seconds from now until the lease expires, 1 to 86,400."""
    epoch: int | None = None
    """Epoch of the caller."""


@dataclass(slots=True, kw_only=True)
class AckRequest:
    """Reports that an optimizer step consumed the batch."""

    lease: str
    """The lease."""
    step: int
    """Optimizer step, 0 or above."""
    epoch: int | None = None
    """Epoch of the caller."""


@dataclass(slots=True, kw_only=True)
class NackRequest:
    """Gives a batch back."""

    lease: str
    """The lease."""
    reason: str | None = None
    """Reason, up to 1,024 bytes."""
    groups: Sequence[str] | None = None
    """Ids of the groups to quarantine; the batch is then split."""
    epoch: int | None = None
    """Epoch of the caller."""


@dataclass(slots=True, kw_only=True)
class CheckpointRequest:
    """Reports that the trainer has saved a step durably."""

    step: int
    """The saved step: the last acked step or an earlier one."""
    force: bool | None = None
    """Settle a step even if it is above the last acked one."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class CheckpointResponse:
    """Answer to a checkpoint."""

    checkpoint_step: int
    """Last settled step."""
    settled_batches: int
    """Number of batches settled by this call."""


@dataclass(slots=True, kw_only=True)
class ResumeRequest:
    """Reports that the trainer starts from its checkpoint of a step, or without a checkpoint."""

    step: int | None = None
    """Last saved step; null if the trainer starts without a checkpoint."""
    force: bool | None = None
    """Permits a resume below the last settled step, over purged batches (what can still be delivered comes back),
    or above the last acked step."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class ResumeResponse:
    """Answer to a resume."""

    epoch: int
    """The new epoch."""
    version: int
    """The current weight version: the newest version published at or before the step."""
    returned_batches: int
    """Number of batches that came back: those whose leases were revoked and those acked after the step."""
    quarantined_batches: int = 0
    """Number of batches that do not come back, because resumes have ended their leases `lease.max_resumes`
    times."""
    undeliverable_batches: int
    """Number of batches acked after the step whose payloads are purged; above 0 only with `force`. Those that were
    not settled are discarded with reason `lineage-gap`."""


@dataclass(slots=True, kw_only=True)
class ResetRequest:
    """Starts a new run of the policy under the same name."""

    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""


@dataclass(slots=True, kw_only=True)
class ResetResponse:
    """Answer to a reset."""

    run: int
    """Number of the new run."""
    epoch: int
    """The new epoch."""
    discarded_groups: int
    """Number of groups discarded with reason `reset`."""


@dataclass(slots=True, kw_only=True)
class VersionRequest:
    """Publishes a weight version."""

    version: int
    """Version; greater than the current version by at most 2^41, or an exact repeat of it."""
    step: int | None = None
    """Step after which the weights were saved; the last acked step when absent."""
    uri: str | None = None
    """URL of the weights, up to 2,048 bytes."""
    epoch: int | None = None
    """Epoch of the caller; the request is refused if the epoch is superseded."""
    force: bool | None = None
    """Also publishes a version that is greater by more."""
