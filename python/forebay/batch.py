"""A batch: what it holds, its rows and columns, and the calls that keep or end its lease."""

from __future__ import annotations

import array
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from . import _arrow, errors
from ._wire import BatchDescriptor, Sample, ShardBalance, VersionRange
from .columns import UploadedColumn, of_arrow

if TYPE_CHECKING:
    from .client import Client

Shard = tuple[int, int]
"""Which shard of how many, e.g. `(0, 8)`. Shards have about equal numbers of tokens; together they are the batch."""

Form = Literal["auto", "arrow", "json"]
"""How columns are transferred. `auto` is Arrow if pyarrow can be imported; its newer versions refuse NumPy 1."""

Ended = Literal["acked", "given back", "lost"]
"""How the lease of a batch ended."""

LIST_COLUMNS = ("tokens", "loss_mask", "logprobs", "teacher_logprobs", "values", "advantages")

_TYPE_CODES = {"tokens": "i", "loss_mask": "B"} | dict.fromkeys(LIST_COLUMNS[2:], "f")


class Owner(Protocol):
    """What holds the lease of a batch."""

    def ack(self, batch: Batch, step: int) -> None: ...
    def nack(self, batch: Batch, reason: str | None, groups: Sequence[str] | None) -> None: ...
    def is_lost(self, batch: Batch) -> bool: ...


@dataclass(slots=True)
class ListColumn:
    """A column with a list in each row."""

    values: Any
    """The values of all rows, end to end: a pyarrow array, or an `array.array`. They must not be written to."""
    lengths: list[int | None]
    """How many of them each row has. None where the row has no list."""


@dataclass(slots=True, kw_only=True)
class Page:
    """Consecutive rows of a batch, column by column."""

    rows: int
    tokens: ListColumn
    """Ids of prompt and response, 32 bits each."""
    loss_mask: ListColumn
    """0 or 1 for each response token, a byte each."""
    logprobs: ListColumn
    """Of the response tokens, 32-bit floats."""
    teacher_logprobs: ListColumn
    values: ListColumn
    advantages: ListColumn
    """0 where the mask is 0. A row has them, or an advantage of the rollout."""
    uploaded: dict[str, UploadedColumn]
    """The columns that were asked for by name."""
    scalars: dict[str, list[Any]]
    """The other columns that a loss may need, by name."""


SCALAR_COLUMNS = (
    "rollout_id",
    "group_id",
    "segment",
    "segments",
    "kind",
    "environment",
    "verdict",
    "status",
    "response_length",
    "temperature",
    "top_p",
    "top_k",
    "reward",
    "advantage",
    "loss_weight",
    "policy_version",
)


class Batch:
    """A leased batch. Learn from its rows, then `ack` the step, and only then update the weights."""

    def __init__(self, client: Client, descriptor: BatchDescriptor, owner: Owner | None = None) -> None:
        self._client = client
        self._owner = owner
        self.descriptor = descriptor
        """Everything that the service says about the batch."""
        self.ended: Ended | None = None
        """How the lease ended; None while it lives, as far as is known."""

    @property
    def batch_id(self) -> str:
        """The identity of the batch, the same at every delivery."""
        return self.descriptor.batch_id

    @property
    def policy(self) -> str:
        """The policy whose rollouts it holds."""
        return self.descriptor.policy

    @property
    def attempt(self) -> int:
        """The number of this delivery, from 1."""
        return self.descriptor.attempt

    @property
    def rollouts(self) -> int:
        """How many rollouts it holds."""
        return self.descriptor.rollouts

    @property
    def samples(self) -> int:
        """How many rows it has."""
        return self.descriptor.samples

    @property
    def tokens(self) -> int:
        """How many tokens of prompts and responses it has."""
        return self.descriptor.tokens

    @property
    def policy_version(self) -> VersionRange:
        """The weight versions of its tokens, and the current one when it was cut."""
        return self.descriptor.policy_version

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers for the trainer's log, such as `reward/trained` and `staleness/mean`."""
        return self.descriptor.metrics

    @property
    def lost(self) -> bool:
        """Whether the lease is lost. Then stop working on the batch: its ack would be refused."""
        return self.ended == "lost" or (self._owner is not None and self._owner.is_lost(self))

    def rows(
        self, shard: Shard | None = None, *, balance: ShardBalance | None = None, messages: bool = True
    ) -> list[Sample]:
        """Returns the rows, or those of a shard, in order.

        With the `balance` `squared_tokens` the shards have about equal sums of the squared lengths of their rows,
        instead of about equal numbers of tokens. All ranks must ask for the same. With `messages=False` the rows come
        without their messages.
        """
        index, count = shard or (None, None)
        rows = self._client.samples(
            self.batch_id, shard=index, shards=count, balance=balance, messages=None if messages else False
        )
        self._check_count(len(rows), shard)
        return rows

    def arrow(
        self,
        shard: Shard | None = None,
        *,
        balance: ShardBalance | None = None,
        messages: bool = True,
        columns: Sequence[str] = (),
        inner: tuple[int, int] | None = None,
    ) -> Any:
        """Returns the rows, or those of a shard, as a `pyarrow.Table` on the bytes of the answer. Needs pyarrow.

        With `columns` it has a column `column.NAME` for each of these uploads, of each row only the entries of the
        range `inner` of its first dimension.
        """
        pyarrow: Any = importlib.import_module("pyarrow")
        index, count = shard or (None, None)
        body = self._client.samples_arrow(
            self.batch_id,
            shard=index,
            shards=count,
            balance=balance,
            messages=None if messages else False,
            columns=columns,
            inner=inner,
        )
        with pyarrow.ipc.open_stream(pyarrow.py_buffer(body)) as stream:
            table: Any = stream.read_all()
        self._check_count(table.num_rows, shard)
        return table

    def columns(
        self,
        shard: Shard | None = None,
        *,
        form: Form = "auto",
        balance: ShardBalance | None = None,
        columns: Sequence[str] = (),
        inner: tuple[int, int] | None = None,
    ) -> list[Page]:
        """Returns the columns that a loss needs, page by page: what `forebay.torch` makes tensors of.

        As Arrow the values are not copied: they are the bytes of the answer. `columns` names columns of uploads, which
        need Arrow; of each of their rows only the entries of the range `inner` of its first dimension are read.
        """
        if columns:
            table = self.arrow(shard, balance=balance, messages=False, columns=columns, inner=inner)
            return [_arrow_page(record_batch) for record_batch in table.to_batches()]
        if form == "json" or (form == "auto" and _arrow.pyarrow() is None):
            return [_json_page(self.rows(shard, balance=balance, messages=False))]
        table = self.arrow(shard, balance=balance, messages=False)
        return [_arrow_page(record_batch) for record_batch in table.to_batches()]

    def ack(self, step: int) -> None:
        """Says that optimizer step `step` consumes the batch. Update the weights only after this has returned.

        `errors.LeaseLost` means that the batch is no longer this trainer's: discard the gradients and go on.
        `errors.Superseded` means that another trainer has taken over the policy: stop.
        """
        self._held().ack(self, step)

    def nack(self, reason: str | None = None, *, groups: Sequence[str] | None = None) -> None:
        """Gives the batch back because its rows are wrong. The groups that are named are quarantined, and the others
        are delivered in another batch. Without `groups` the whole batch is delivered again, a limited number of
        times."""
        self._held().nack(self, reason, groups)

    def _held(self) -> Owner:
        if self._owner is None:
            raise errors.ConfigurationError(
                f"batch {self.batch_id} was not leased here, so its lease cannot be ended here"
            )
        return self._owner

    def _check_count(self, rows: int, shard: Shard | None) -> None:
        """A part of the rows must not be mistaken for all of them."""
        if shard is None and rows != self.samples:
            raise errors.UnexpectedAnswer(f"received {rows} rows of batch {self.batch_id}, which has {self.samples}")

    def __repr__(self) -> str:
        return f"<Batch {self.batch_id}: {self.rollouts} rollouts, {self.samples} rows, attempt {self.attempt}>"


def _arrow_page(record_batch: Any) -> Page:
    def lists(name: str) -> ListColumn:
        column: Any = record_batch.column(name)
        # `flatten` leaves out what is behind nulls, and copies nothing.
        return ListColumn(column.flatten(), column.value_lengths().to_pylist())

    return Page(
        rows=record_batch.num_rows,
        **{name: lists(name) for name in LIST_COLUMNS},
        uploaded=of_arrow(record_batch),
        scalars={name: record_batch.column(name).to_pylist() for name in SCALAR_COLUMNS},
    )


def _json_page(rows: list[Sample]) -> Page:
    def lists(name: str) -> ListColumn:
        lists_of_rows: list[list[Any] | None] = [getattr(row, name) for row in rows]
        values = cast("Any", array.array(_TYPE_CODES[name]))
        for values_of_row in lists_of_rows:
            values.extend(values_of_row or ())
        return ListColumn(values, [None if one is None else len(one) for one in lists_of_rows])

    return Page(
        rows=len(rows),
        **{name: lists(name) for name in LIST_COLUMNS},
        uploaded={},
        scalars={name: [getattr(row, name) for row in rows] for name in SCALAR_COLUMNS},
    )
