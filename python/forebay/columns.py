"""Columns of uploads: what belongs to tokens besides id, mask and log-probability, such as the experts of a model.

The rules of the policy declare them (`columns.NAME`), `Client.upload_column` stores one, and a segment names it.
"""

from __future__ import annotations

import array
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

CODES = {"u8": "B", "u16": "H", "i32": "i", "f32": "f"}
"""The types of numbers that `array` and `ragged` know, which are not half precision."""


def ragged(rows: Sequence[Sequence[int] | Sequence[float]], dtype: Literal["u8", "u16", "i32", "f32"] = "i32") -> bytes:
    """The bytes of a ragged column: the offsets of the rows, and then their numbers."""
    offsets, end = array.array("I", [0]), 0
    numbers = cast("Any", array.array(CODES[dtype]))
    for row in rows:
        end += len(row)
        offsets.append(end)
        numbers.extend(row)
    if sys.byteorder == "big":
        offsets.byteswap()
        numbers.byteswap()
    return offsets.tobytes() + numbers.tobytes()


@dataclass(slots=True, kw_only=True)
class UploadedColumn:
    """A column of consecutive rows of a batch. The arrays are parts of the answer: do not write to them."""

    dtype: str
    """`u8`, `u16`, `i32`, `f16`, `bf16` or `f32`."""
    shape: tuple[int, ...]
    """Of a row, with as much of its first dimension as was asked for."""
    lengths: list[int | None]
    """How many rows each segment has. None where it does not have the column."""
    values: Any
    """The bytes of all rows, end to end, as a pyarrow array of `uint8`."""
    offsets: Any = None
    """Of a ragged column, as a pyarrow array of `int32`: row `i` has the numbers from `offsets[i]` to
    `offsets[i + 1]`."""


def of_arrow(record_batch: Any) -> dict[str, UploadedColumn]:
    """The columns of a record batch that were uploaded."""
    pyarrow: Any = importlib.import_module("pyarrow")
    found: dict[str, UploadedColumn] = {}
    for field, column in zip(record_batch.schema, record_batch.columns, strict=True):
        if not field.name.startswith("column."):
            continue
        metadata = {key.decode(): value.decode() for key, value in field.metadata.items()}
        rows = column.flatten()
        offsets = None
        if hasattr(rows, "value_lengths"):
            offsets = rows.offsets
            rows = rows.values
        width = rows.type.byte_width
        found[field.name.removeprefix("column.")] = UploadedColumn(
            dtype=metadata["dtype"],
            shape=tuple(int(length) for length in metadata["shape"].strip("[]").split(",") if length),
            lengths=column.value_lengths().to_pylist(),
            # As bytes it can be given to other libraries, which do not know arrays of rows.
            values=pyarrow.Array.from_buffers(
                pyarrow.uint8(), width * len(rows), [None, rows.buffers()[1]], offset=width * rows.offset
            ),
            offsets=offsets,
        )
    return found
