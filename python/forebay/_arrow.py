"""Writes trajectories as an Arrow stream, a row per segment, which takes less time than JSON for many tokens."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

from . import _codec

ROLLOUT = {
    "policy": "string",
    "rollout_id": "string",
    "group_id": "string",
    "group_size": "int32",
    "environment": "string",
    "execution_id": "string",
    "policy_version": "int64",
    "admission_id": "string",
    "purpose": "string",
    "suite": "string",
    "task": "string",
    "status": "string",
    "reward": "float64",
}
"""Columns that are the same on all rows of a rollout."""

SAMPLING = {"temperature": "float32", "top_p": "float32", "top_k": "int32"}

DOCUMENTS = ("reward_components", "messages", "metadata")
"""Columns that hold JSON."""

SEGMENT = {"kind": "string", "response_length": "int32"}

TOKENS = {
    "tokens": "int32",
    "loss_mask": "uint8",
    "logprobs": "float32",
    "teacher_logprobs": "float32",
    "values": "float32",
    "advantages": "float32",
}
"""Columns that are lists of numbers."""

UPLOADS = ("columns", "media")
"""Columns of segments that hold JSON."""

Row = dict[str, Any]


class Unsuitable(Exception):
    """The trajectories have something that JSON reports better, for example a wrong name or NaN."""


@cache
def pyarrow() -> Any | None:
    """Returns the library, or None if it is not installed."""
    try:
        importlib.import_module("pyarrow.compute")
        return importlib.import_module("pyarrow")
    except ImportError:
        return None


def tokens_of(trajectory: Any) -> int:
    """The number of tokens of a trajectory's segments, or 0 if it has none or an unusual form."""
    segments = _get(trajectory, "segments")
    if not isinstance(segments, list | tuple):
        return 0
    try:
        return sum(len(_get(segment, "tokens")) for segment in cast("Sequence[Any]", segments))
    except TypeError:
        return 0


def stream(pa: Any, trajectories: Sequence[Any]) -> bytes:
    """Writes trajectories as one bundle."""
    # Adjacent rows of the same rollout would be taken for its segments.
    if len({_get(trajectory, "rollout_id") for trajectory in trajectories}) != len(trajectories):
        raise Unsuitable("two trajectories have the same rollout_id")
    rows = [row for trajectory in trajectories for row in _rows(trajectory)]
    try:
        columns: dict[str, Any] = {}
        for names in (ROLLOUT, SAMPLING, SEGMENT):
            for name, kind in names.items():
                if any(row.get(name) is not None for row in rows):
                    columns[name] = pa.array([row.get(name) for row in rows], pa.type_for_alias(kind))
        for name in (*DOCUMENTS, *UPLOADS):
            if any(row.get(name) is not None for row in rows):
                columns[name] = pa.array([row.get(name) for row in rows], pa.string())
        for name, kind in TOKENS.items():
            if any(row.get(name) is not None for row in rows):
                columns[name] = _lists(pa, [row.get(name) for row in rows], pa.type_for_alias(kind))
        if any(row.get("versions") is not None for row in rows):
            columns["versions"] = _versions(pa, [row.get("versions") for row in rows])
        if any(row.get("turns") is not None for row in rows):
            columns["turns"] = _turns(pa, [row.get("turns") for row in rows])
        table = pa.table(columns)
    except (
        pa.ArrowInvalid,
        pa.ArrowTypeError,
        pa.ArrowNotImplementedError,
        TypeError,
        ValueError,
        OverflowError,
    ) as error:
        raise Unsuitable(str(error)) from None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _rows(trajectory: Any) -> Iterator[Row]:
    fields = _named(trajectory)
    segments = fields.pop("segments", None)
    sampling = fields.pop("sampling", None)
    shared: Row = {}
    if sampling is not None:
        sampling = _named(sampling)
        _only(sampling, SAMPLING)
        shared.update(sampling)
    _only(fields, (*ROLLOUT, *DOCUMENTS))
    for name in DOCUMENTS:
        if fields.get(name) is not None:
            fields[name] = _document(fields[name])
    shared.update(fields)
    if segments is None:
        yield shared
        return
    if not isinstance(segments, list | tuple) or not segments:
        raise Unsuitable("segments")
    for segment in cast("Sequence[Any]", segments):
        held = _named(segment)
        _only(held, (*SEGMENT, *TOKENS, *UPLOADS, "versions", "turns"))
        for name in UPLOADS:
            held[name] = _document(held[name]) if held.get(name) else None
        yield {**shared, **held}
        # These may be null after the first row.
        shared.pop("messages", None)
        shared.pop("metadata", None)


def _document(value: Any) -> str:
    try:
        return _codec.encode(value).decode()
    except _codec.NotEncodable as error:
        raise Unsuitable(str(error)) from None


def _lists(pa: Any, values: list[Any], kind: Any) -> Any:
    """One array of lists, made without an object for each number where the numbers are in an array already."""
    parts = [None if value is None else _numbers(pa, value, kind) for value in values]
    offsets: list[int | None] = []
    end = 0
    for part in parts:
        # A null offset makes a null list.
        offsets.append(None if part is None else end)
        end += 0 if part is None else len(part)
    offsets.append(end)
    flat = pa.concat_arrays([part for part in parts if part is not None])
    if flat.null_count or (pa.types.is_floating(kind) and not pa.compute.all(pa.compute.is_finite(flat)).as_py()):
        raise Unsuitable("a value is null or not finite")
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)


def _numbers(pa: Any, value: Any, kind: Any) -> Any:
    if not isinstance(value, list | tuple):
        value = _array(value)
    found = pa.array(value)
    if found.type.equals(pa.bool_()) or pa.types.is_integer(found.type) or pa.types.is_floating(found.type):
        if pa.types.is_floating(found.type) and not pa.types.is_floating(kind):
            raise Unsuitable("numbers that are not integers")
        return found.cast(kind, safe=not pa.types.is_floating(kind))
    if len(found) == 0:
        return pa.array([], kind)
    raise Unsuitable("not a list of numbers")


def _array(value: Any) -> Any:
    """An array of numpy if that is possible, which pyarrow reads at once, and a list otherwise."""
    try:
        array = importlib.import_module("numpy").asarray(value)
    except Exception:
        array = None
    if array is not None and array.ndim == 1 and array.dtype != object:
        return array
    return value.tolist()


def _versions(pa: Any, values: list[Any]) -> Any:
    span = pa.struct([("version", pa.int64()), ("start", pa.int64()), ("length", pa.int64())])
    spans = [
        None if value is None else [dict(zip(("version", "start", "length"), span, strict=True)) for span in value]
        for value in values
    ]
    return pa.array(spans, pa.list_(span))


def _turns(pa: Any, values: list[Any]) -> Any:
    turn = pa.struct(
        [("start", pa.int64()), ("length", pa.int64()), ("reward", pa.float64()), ("state_key", pa.string())]
    )
    rows = [None if value is None else [_named(one) for one in value] for value in values]
    for held in (held for row in rows for held in row or ()):
        _only(held, ("start", "length", "reward", "state_key"))
    return pa.array(rows, pa.list_(turn))


def _named(value: Any) -> Row:
    """The fields of a dataclass or of an object of the API."""
    fields: Any = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else _codec.plain(value)
    if not isinstance(fields, dict):
        raise Unsuitable("not an object")
    return cast("Row", fields)


def _only(fields: Row, known: Any) -> None:
    if unknown := set(fields) - set(known):
        raise Unsuitable(f"{unknown}")


def _get(value: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else getattr(value, name, None)
