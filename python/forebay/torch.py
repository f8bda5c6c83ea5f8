"""Batches as tensors: rows without a copy, packed and padded micro-batches, shards, and a trainer for all ranks.

In every micro-batch a value of a response token is at the position of that token, so a log-probability at position t is
that of token t given the tokens before it. Prompt tokens and padding have a `loss_mask` of 0. So this is the loss of a
batch, on any number of micro-batches and ranks:

    sum over micro-batches of (loss_weight * loss_mask * l).sum()

Frameworks that average gradients over ranks, such as DDP, need it times the number of ranks.
"""

# The types of PyTorch itself are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from . import errors, trainer as _trainer
from ._wire import BatchDescriptor, ResumeResponse, ShardBalance
from .batch import Batch, Form, ListColumn, Owner, Page, Shard
from .client import Client
from .columns import UploadedColumn

T = TypeVar("T")

log = logging.getLogger("forebay")

PER_TOKEN = ("logprobs", "teacher_logprobs", "values")
"""Columns that a row may lack, with a value per response token."""


@dataclass(slots=True, kw_only=True)
class Ragged:
    """A list of numbers for each row of a column."""

    values: Tensor
    offsets: Tensor
    """int32. Row `i` has the values from `offsets[i]` to `offsets[i + 1]`."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One segment of a rollout. The tensors alias the answer of the service: do not write to them."""

    rollout_id: str
    group_id: str
    segment: int
    segments: int
    kind: str | None
    environment: str | None
    verdict: str
    status: str
    policy_version: int | None
    reward: float | None
    advantage: float | None
    """None if each token has its own."""
    loss_weight: float
    temperature: float
    top_p: float
    top_k: int
    response_length: int
    tokens: Tensor
    """Prompt and response, int32. Empty for a rollout without segments."""
    loss_mask: Tensor
    """One entry per response token, uint8."""
    logprobs: Tensor | None
    """One entry per response token, float32, like the three below."""
    teacher_logprobs: Tensor | None
    values: Tensor | None
    advantages: Tensor | None
    """0 where the mask is 0."""
    columns: dict[str, Tensor | Ragged]
    """Those of the columns that were asked for which it has: a tensor of rows in their shape, or lists of numbers."""

    @property
    def is_trained(self) -> bool:
        """Whether any token of the row is trained."""
        return bool(self.loss_mask.any())


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rows as tensors on one device: packed (end to end, one dimension) or padded (rows x length)."""

    tokens: Tensor
    """int64."""
    position_ids: Tensor
    """int64. They begin at 0 in each row."""
    loss_mask: Tensor
    """float32. 1 at the positions of trained tokens."""
    advantage: Tensor
    """float32, like everything below that is not an index."""
    loss_weight: Tensor
    temperature: Tensor
    """1 outside of the responses."""
    logprobs: Tensor | None
    """0 where the mask is 0, so that a ratio to it is finite. None if a row has none."""
    teacher_logprobs: Tensor | None
    values: Tensor | None
    attention_mask: Tensor | None = None
    """Padded only: int64, 0 at the padding."""
    cu_seqlens: Tensor | None = None
    """Packed only: int32, where each row begins, and the end."""
    max_seqlen: int = 0
    """The length of the longest row."""
    rows: list[Row]
    """The rows, in the order of their places. None of them is in an empty micro-batch."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """Returns the same micro-batch on another device."""
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def rows(
    batch: Batch,
    shard: Shard | None = None,
    *,
    form: Form = "auto",
    balance: ShardBalance | None = None,
    columns: Sequence[str] = (),
    inner: tuple[int, int] | None = None,
) -> list[Row]:
    """Returns the rows of a batch, or of a shard, as tensors that alias the answer. As Arrow nothing is copied.

    `columns` names columns of uploads, of which each row has what the rules declare; with `inner`, only this range of
    the first dimension of their rows is read, such as the layers of a rank.
    """
    pages = batch.columns(shard, form=form, balance=balance, columns=columns, inner=inner)
    return [row for page in pages for row in _rows_of(page)]


def pack(
    batch: Batch | Sequence[Row],
    max_tokens: int,
    *,
    shard: Shard | None = None,
    balance: ShardBalance | None = None,
    device: torch.device | str | None = None,
    group: Any = None,
    micro_batches: int | None = None,
) -> Iterator[MicroBatch]:
    """Yields packed micro-batches of at most `max_tokens` tokens, for attention of variable length.

    A row that is longer is alone in its micro-batch. Rows without a trained token are left out.

    `shard` is the shard of this process, of how many; by default, its rank and the number of ranks of
    `torch.distributed`. Then all ranks get the same number of micro-batches, because a rank without one would not take
    part in an all-reduce: their ranks must call this together (`group`, by default all ranks), unless `micro_batches`
    gives the number. What is missing is filled with micro-batches that have a weight of 0.

    Shards have about equal numbers of tokens, or with the `balance` `squared_tokens` about equal sums of the squared
    lengths of their rows, with which the time of attention grows. All ranks must ask for the same.
    """
    found, shard = _rows_for(batch, shard, balance)
    bins = _bins(found, lambda held, row: sum(len(one.tokens) for one in held) + len(row.tokens) <= max_tokens)
    for held in _level(bins, shard, group, micro_batches):
        yield _packed(held, device)


def pad(
    batch: Batch | Sequence[Row],
    max_tokens: int,
    *,
    max_rows: int | None = None,
    shard: Shard | None = None,
    balance: ShardBalance | None = None,
    device: torch.device | str | None = None,
    group: Any = None,
    micro_batches: int | None = None,
    pad_id: int = 0,
) -> Iterator[MicroBatch]:
    """Yields padded micro-batches of at most `max_tokens` positions, padding included, and `max_rows` rows.

    Rows are padded behind their end. Everything else is as in `pack`.
    """
    found, shard = _rows_for(batch, shard, balance)

    def fits(held: list[Row], row: Row) -> bool:
        longest = max(len(row.tokens), *(len(one.tokens) for one in held))
        return (len(held) + 1) * longest <= max_tokens and (max_rows is None or len(held) < max_rows)

    for held in _level(_bins(found, fits), shard, group, micro_batches):
        yield _padded(held, device, pad_id)


def token_logprobs(logits: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Returns the log-probability of each trained token, at its position and its temperature; 0 at other positions.

    `logits` are those of a model for `micro_batch.tokens`: at position t, of the token after it. They may have one more
    dimension in front, of size 1. Only those that predict a trained token are used.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    tokens = micro_batch.tokens.reshape(-1)
    trained = micro_batch.loss_mask.reshape(-1).nonzero().squeeze(1)
    # The first token of a row is a prompt token, so the position before a trained token belongs to the same row.
    predicting = logits[trained - 1].float() / micro_batch.temperature.reshape(-1)[trained, None]
    chosen = predicting.gather(1, tokens[trained, None]).squeeze(1) - predicting.logsumexp(1)
    found = torch.zeros(tokens.shape, dtype=chosen.dtype, device=chosen.device).index_put((trained,), chosen)
    # Without a trained token the gradient is 0, but there must be one: a backward pass runs on all ranks.
    return (found + 0.0 * logits.sum() if len(trained) == 0 else found).reshape(micro_batch.tokens.shape)


class Trainer:
    """`forebay.Trainer` for all ranks of a process group: rank 0 calls the service, and the others learn the outcome.

    All ranks make the same calls in the same order. An error of the service is raised on all of them, so no rank
    updates its weights alone. Without `torch.distributed` there is one rank. Every rank reads batches by itself:
    `forebay.torch.pack` and `pad` read the shard of the rank.

    The calls travel over a group of their own, with gloo, unless `group` is given.
    """

    def __init__(
        self, policy: str = "default", *, client: Client | None = None, group: Any = None, **options: Any
    ) -> None:
        self._group: Any = group if group is not None or _world() == 1 else dist.new_group(backend="gloo")
        self._is_first = _rank() == 0
        self._client = client or Client()
        self._run: _trainer.Trainer | None = None

        def begin() -> ResumeResponse:
            self._run = _trainer.Trainer(policy, client=self._client, **options)
            return self._run.resumed

        self.policy = policy
        self.resumed = self._together(begin)
        self.epoch = self.resumed.epoch
        self.version = self.resumed.version

    def __iter__(self) -> Iterator[Batch]:
        """Yields one batch after the other, the same on all ranks, as `forebay.Trainer` does."""
        while True:
            batch = self.lease()
            assert batch is not None
            yield batch
            if batch.ended is None:
                batch.nack("the trainer went on without an ack")

    def lease(self, wait_s: float | None = None) -> Batch | None:
        """Leases the next batch, the same on all ranks. After `wait_s`, if given, the answer is None."""
        left_s = wait_s
        while True:
            # Other ranks wait for rank 0 in a collective call, which must end before its time is up.
            turn_s = _trainer.POLL_S if left_s is None else min(left_s, _trainer.POLL_S)
            held: list[Batch | None] = [None]

            def turn(turn_s: float = turn_s, held: list[Batch | None] = held) -> BatchDescriptor | None:
                held[0] = self._first.lease(wait_s=turn_s)
                return held[0] and held[0].descriptor

            descriptor = self._together(turn)
            if descriptor is not None:
                return Batch(self._client, descriptor, _OfAllRanks(self, held[0]))
            if left_s is not None:
                left_s -= turn_s
                if left_s <= 0:
                    return None

    def saved(self, step: int) -> None:
        """Says that the weights of `step` are on disk. Call it when all ranks have written their part."""
        self._together(lambda: self._first.saved(step))

    def publish(self, step: int, *, uri: str | None = None, version: int | None = None) -> int:
        """Publishes the weights after `step`, and returns their version."""
        self.version = self._together(lambda: self._first.publish(step, uri=uri, version=version))
        return self.version

    def close(self) -> None:
        """Stops extending leases."""
        if self._run is not None:
            self._run.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _first(self) -> _trainer.Trainer:
        assert self._run is not None, "only rank 0 calls the service"
        return self._run

    def together(self, call: Callable[[], T]) -> T:
        """Runs a function on rank 0 and returns its result, or raises its error, on all ranks."""
        return self._together(call)

    def _together(self, call: Callable[[], T]) -> T:
        outcome: list[Any] = [None, None]
        failure: BaseException | None = None
        if self._is_first:
            try:
                outcome[0] = call()
            except errors.ForebayError as error:
                outcome[1] = failure = error
            except BaseException as error:
                # The other ranks must not wait for ever. Not every error can travel.
                failure, outcome[1] = error, RuntimeError(f"rank 0 failed: {type(error).__name__}: {error}")
        if _world() > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise outcome[1]
        return cast("T", outcome[0])


class _OfAllRanks(Owner):
    """What a batch may ask of the trainer of all ranks."""

    def __init__(self, trainer: Trainer, held: Batch | None) -> None:
        self._trainer = trainer
        self._held = held

    def ack(self, batch: Batch, step: int) -> None:
        self._end(batch, lambda held: held.ack(step))

    def nack(self, batch: Batch, reason: str | None, groups: Sequence[str] | None) -> None:
        self._end(batch, lambda held: held.nack(reason, groups=groups))

    def is_lost(self, batch: Batch) -> bool:
        return self._held is not None and self._held.lost

    def _end(self, batch: Batch, call: Callable[[Batch], None]) -> None:
        def of_first() -> str | None:
            assert self._held is not None, "rank 0 holds the lease"
            call(self._held)
            return self._held.ended

        try:
            batch.ended = cast("Any", self._trainer.together(of_first))
        except errors.LeaseLost:
            batch.ended = "lost"
            raise


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rows_of(page: Page) -> Iterator[Row]:
    lists: dict[str, list[Tensor | None]] = {
        name: _split(getattr(page, name), dtype)
        for name, dtype in (
            ("tokens", torch.int32),
            ("loss_mask", torch.uint8),
            *((name, torch.float32) for name in (*PER_TOKEN, "advantages")),
        )
    }
    uploaded = {name: _cells(column) for name, column in page.uploaded.items()}
    absent = {"tokens": torch.zeros(0, dtype=torch.int32), "loss_mask": torch.zeros(0, dtype=torch.uint8)}
    for index in range(page.rows):
        found: dict[str, Any] = {name: values[index] for name, values in page.scalars.items()}
        for name, tensors in lists.items():
            tensor = tensors[index]
            found[name] = absent.get(name) if tensor is None else tensor
        yield Row(**found, columns={name: cells[index] for name, cells in uploaded.items() if cells[index] is not None})


DTYPES = {
    "u8": torch.uint8,
    "u16": torch.uint16,
    "i32": torch.int32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
}


def _cells(column: UploadedColumn) -> list[Any]:
    """What each row has of a column of uploads."""
    values, cells, begin = _tensor(column.values, DTYPES[column.dtype]), list[Any](), 0
    offsets = None if column.offsets is None else _tensor(column.offsets, torch.int32)
    if offsets is None:
        values = values.reshape(-1, *column.shape)
    for length in column.lengths:
        if length is None:
            cells.append(None)
            continue
        end = begin + length
        if offsets is None:
            cells.append(values[begin:end])
        else:
            own = offsets[begin : end + 1]
            cells.append(Ragged(values=values[own[0] : own[-1]], offsets=own - own[0]))
        begin = end
    return cells


def _tensor(values: Any, dtype: torch.dtype) -> Tensor:
    # Unlike from_numpy, this takes memory that is not writable without a warning.
    return torch.from_dlpack(values).view(dtype) if len(values) else torch.zeros(0, dtype=dtype)


def _split(column: ListColumn, dtype: torch.dtype) -> list[Tensor | None]:
    """The list of each row as a part of one tensor."""
    lengths = [length or 0 for length in column.lengths]
    if sum(lengths) == 0:
        flat = torch.zeros(0, dtype=dtype)
    elif hasattr(column.values, "__dlpack__"):
        # Unlike from_numpy, this takes memory that is not writable without a warning.
        flat = torch.from_dlpack(column.values)
    else:
        flat = torch.frombuffer(column.values, dtype=dtype)
    parts = flat.split(lengths)
    return [None if length is None else part for length, part in zip(column.lengths, parts, strict=True)]


def _rows_for(
    batch: Batch | Sequence[Row], shard: Shard | None, balance: ShardBalance | None
) -> tuple[list[Row], Shard]:
    shard = shard or (_rank(), _world())
    if not 0 <= shard[0] < shard[1]:
        raise errors.ConfigurationError(f"shard {shard[0]} of {shard[1]} does not exist")
    if not isinstance(batch, Batch):
        found = batch
    elif shard[1] > 1:
        found = rows(batch, shard, balance=balance)
    else:
        found = rows(batch)
    return [row for row in found if row.is_trained], shard


def _bins(found: list[Row], fits: Callable[[list[Row], Row], bool]) -> list[list[Row]]:
    """Puts the longest rows first, each into the first bin that it fits into."""
    bins: list[list[Row]] = []
    for row in sorted(found, key=lambda row: -len(row.tokens)):
        for held in bins:
            if fits(held, row):
                held.append(row)
                break
        else:
            bins.append([row])
    return bins


def _level(bins: list[list[Row]], shard: Shard, group: Any, micro_batches: int | None) -> list[list[Row]]:
    """Adds empty bins, so that every rank has the same number, and at least one."""
    wanted = max(len(bins), 1)
    if micro_batches is not None:
        if wanted > micro_batches:
            raise errors.ConfigurationError(
                f"the rows need {wanted} micro-batches, but micro_batches is {micro_batches}"
            )
        wanted = micro_batches
    elif shard[1] > 1:
        if _world() == 1:
            raise errors.ConfigurationError(
                "the number of micro-batches of the other shards is not known: initialise torch.distributed, or give "
                "micro_batches"
            )
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        count = torch.tensor(wanted, device=device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        wanted = int(count)
    return bins + [[] for _ in range(wanted - len(bins))]


def _packed(held: list[Row], device: torch.device | str | None) -> MicroBatch:
    lengths = [len(row.tokens) for row in held] or [2]
    total = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    micro_batch = _empty((total,), held)
    micro_batch.position_ids = torch.cat([torch.arange(length) for length in lengths])
    micro_batch.cu_seqlens = ends.to(torch.int32)
    micro_batch.max_seqlen = max(lengths)
    for row, start, end in zip(held, ends[:-1].tolist(), ends[1:].tolist(), strict=False):
        _fill(micro_batch, row, (slice(start, end),), (slice(end - row.response_length, end),))
    return _placed(micro_batch, device)


def _padded(held: list[Row], device: torch.device | str | None, pad_id: int) -> MicroBatch:
    count, longest = max(len(held), 1), max((len(row.tokens) for row in held), default=2)
    micro_batch = _empty((count, longest), held)
    micro_batch.tokens.fill_(pad_id)
    micro_batch.position_ids = torch.arange(longest).repeat(count, 1)
    micro_batch.max_seqlen = longest
    micro_batch.attention_mask = torch.zeros((count, longest), dtype=torch.int64)
    micro_batch.attention_mask[len(held) :] = 1
    for index, row in enumerate(held):
        end = len(row.tokens)
        micro_batch.attention_mask[index, :end] = 1
        _fill(micro_batch, row, (index, slice(0, end)), (index, slice(end - row.response_length, end)))
    return _placed(micro_batch, device)


def _empty(shape: tuple[int, ...], held: list[Row]) -> MicroBatch:
    """A micro-batch of zeros. Without rows it is a row of two tokens that are not trained."""
    columns = {
        name: torch.zeros(shape) if all(getattr(row, name) is not None for row in held) else None for name in PER_TOKEN
    }
    return MicroBatch(
        tokens=torch.zeros(shape, dtype=torch.int64),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.zeros(shape),
        advantage=torch.zeros(shape),
        loss_weight=torch.zeros(shape),
        temperature=torch.ones(shape),
        **columns,
        rows=held,
    )


def _fill(micro_batch: MicroBatch, row: Row, place: tuple[Any, ...], response: tuple[Any, ...]) -> None:
    micro_batch.tokens[place] = row.tokens.long()
    mask = row.loss_mask.float()
    micro_batch.loss_mask[response] = mask
    micro_batch.advantage[response] = row.advantage if row.advantages is None else row.advantages
    micro_batch.loss_weight[response] = row.loss_weight
    micro_batch.temperature[response] = row.temperature
    for name in PER_TOKEN:
        column, given = getattr(micro_batch, name), getattr(row, name)
        if column is not None:
            # Values of tokens that are not trained may be anything, also what makes a ratio infinite.
            column[response] = torch.where(row.loss_mask.bool(), given, 0.0)


def _placed(micro_batch: MicroBatch, device: torch.device | str | None) -> MicroBatch:
    return micro_batch if device is None else micro_batch.to(device)
