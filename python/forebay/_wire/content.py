"""What one rollout consists of, for people who look at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .batch import BatchState
from .ledger import TrajectoryStory
from .trajectory import Sampling, Status


@dataclass(slots=True, kw_only=True)
class TrajectoryContent:
    """A part of the content of one rollout: a window of its tokens and a page of its messages."""

    story: TrajectoryStory
    """What happened to the rollout."""
    environment: str | None = None
    """Label of the environment."""
    status: Status
    """How the execution ended."""
    reward_components: dict[str, float]
    """Named parts of the reward."""
    sampling: Sampling
    """How tokens were sampled."""
    delivered: Delivered | None = None
    """The batch that contains the rollout; null if none does."""
    segments_total: int
    """Number of segments."""
    segments: list[SegmentSummary]
    """Segments in order, at most the first 4,096."""
    window: TokenWindow | None = None
    """A part of one segment; null for a rollout without segments."""
    map: TokenMap | None = None
    """The whole of the same segment, in at most 512 parts; null for a rollout without segments."""
    messages: MessagePage | None = None
    """A page of the chat messages; null if the producer sent none."""
    metadata: dict[str, Any] | None = None
    """Metadata as the producer sent it; null if it sent none, or more than 256 KiB."""
    metadata_bytes: int
    """Bytes of the metadata; 0 if the producer sent none."""
    at: str
    """The service's time."""


@dataclass(slots=True, kw_only=True)
class Delivered:
    """The batch that contains a rollout."""

    batch_id: str
    """Id of the batch."""
    state: BatchState
    """State of the batch."""
    attempt: int
    """Number of its last delivery."""
    step: int | None = None
    """Optimizer step that consumed it, or that had consumed it before a resume brought it back."""
    loss_weights: list[float]
    """Weight of each trained token in the loss, by segment; a rollout without segments has one."""


@dataclass(slots=True, kw_only=True)
class SegmentSummary:
    """One segment without its tokens."""

    kind: str | None = None
    """Label of the segment."""
    tokens: int
    """Number of prompt and response tokens."""
    response_length: int
    """Number of response tokens; they are the last of the tokens."""
    masked_in: int
    """Number of response tokens with mask 1, as sent."""
    trained: int
    """Number of response tokens that are trained: 0 unless the verdict is `kept`, and without stale tokens that the
    policy masks."""
    versions: SegmentVersions | None = None
    """The versions that generated it; null if the producer sent none by token."""
    has: list[str]
    """What it has for each response token: `logprobs`, `teacher_logprobs`, `values`."""


@dataclass(slots=True, kw_only=True)
class SegmentVersions:
    """The versions that generated a segment."""

    min: int
    """The oldest version."""
    max: int
    """The newest version."""
    spans: int
    """Number of spans."""


@dataclass(slots=True, kw_only=True)
class TokenWindow:
    """Tokens of one segment. All lists except `versions` have one entry for each token of the window; the entries of
    prompt tokens are null."""

    segment: int
    """Index of the segment, from 0."""
    from_: int = field(metadata={"name": "from"})
    """Index of the first token, from 0."""
    to: int
    """Index behind the last token."""
    prompt_tokens: int
    """Number of prompt tokens of the segment; the response begins behind them."""
    tokens: list[int]
    """Token ids."""
    loss_mask: list[int | None]
    """The mask as the producer sent it."""
    trained_mask: list[int | None]
    """The mask as it is delivered, or would be now."""
    logprobs: list[float | None] | None = None
    """Behaviour log-probabilities; null if the segment has none."""
    teacher_logprobs: list[float | None] | None = None
    """Teacher log-probabilities; null if the segment has none."""
    values: list[float | None] | None = None
    """Critic values; null if the segment has none."""
    versions: list[list[int]] | None = None
    """The version spans with a token in the window, as the producer sent them: `start` counts response tokens. Null if
    the producer sent none."""


@dataclass(slots=True, kw_only=True)
class TokenMap:
    """A whole segment in parts of equal size. All lists have one entry for each part; the last part may be smaller."""

    segment: int
    """Index of the segment, from 0."""
    tokens_per_bucket: int
    """Number of tokens of a part."""
    buckets: int
    """Number of parts, at most 512."""
    response: list[float]
    """Share of response tokens among the tokens of the part."""
    masked_in: list[float]
    """Share of tokens with mask 1, as sent."""
    trained: list[float]
    """Share of tokens that are trained."""
    logprob_mean: list[float | None]
    """Mean log-probability of the tokens with mask 1; null where there are none."""
    logprob_min: list[float | None]
    """Smallest log-probability of the tokens with mask 1; null where there are none."""
    value_mean: list[float | None] | None = None
    """Mean critic value of the response tokens; null if the segment has none."""
    version_min: list[int | None] | None = None
    """Oldest version of a response token; null if the producer sent no versions by token."""


@dataclass(slots=True, kw_only=True)
class MessagePage:
    """A page of chat messages."""

    count: int
    """Number of messages of the rollout."""
    from_: int = field(metadata={"name": "from"})
    """Index of the first message of the page."""
    items: list[ContentMessage]
    """Messages in order, together at most 1 MiB."""
    next: int | None = None
    """Index of the first message of the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class ContentMessage:
    """One chat message."""

    index: int
    """Its index, from 0."""
    bytes: int
    """Its length in bytes."""
    message: dict[str, Any] | None = None
    """The message as the producer sent it; null if it has more than 256 KiB and was not asked for alone."""
    role: str | None = None
    """The `role` of a message that is left out."""
