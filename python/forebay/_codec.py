"""Writes dataclasses and arrays as JSON, and makes dataclasses of answers. It is separate from the types in `_wire`."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

T = TypeVar("T")

Convert = Callable[[Any], Any]

DEPTH_MAX = 200
"""How deeply a body may be nested before the search for a fault gives up. The service accepts much less."""


class NotEncodable(ValueError):
    """A value that JSON has no form for. `pointer` says where it is in the body."""

    def __init__(self, pointer: str, detail: str) -> None:
        super().__init__(f"{pointer or 'the body'} {detail}")
        self.pointer = pointer
        self.detail = detail


def encode(body: Any) -> bytes:
    """Writes a body as JSON in UTF-8. What is not JSON, such as NaN, is refused with its place.

    Half of a surrogate pair is written as an escape, because the service says what becomes of it."""
    try:
        text = json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=plain)
        return text.encode(errors="backslashreplace")
    except (TypeError, ValueError, RecursionError) as error:
        pointer, detail = _fault(body, "", 0) or ("", f"cannot be written as JSON: {error}")
        raise NotEncodable(pointer, detail) from None


def plain(value: Any) -> Any:
    """Returns the next simpler form of a value that is not JSON: of a dataclass, an array, a mapping or a sequence."""
    cls = cast("type[Any]", type(value))
    if dataclasses.is_dataclass(cls):
        return _fields_of(value, cls)
    if hasattr(cls, "tolist"):
        return _numbers(value.tolist())
    if issubclass(cls, Mapping):
        return dict(value)
    if issubclass(cls, Sequence) and not issubclass(cls, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"a value of type {cls.__name__}")


def decode(cls: type[T], value: Any) -> T:
    """Makes a dataclass of parsed JSON. Unknown fields are ignored; another form is a ValueError."""
    convert = _converter(cls)
    return cast("T", convert(value) if convert else value)


def _fields_of(value: Any, cls: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass under their names in JSON, without those that are None or have the default."""
    found: dict[str, Any] = {}
    for attribute, name, default, kind in _encoded_fields(cls):
        held = getattr(value, attribute)
        if held is None or (default is not None and held == default):
            continue
        if kind == "mask":
            held = _numbers(held)
        elif kind == "logprobs":
            held = _logprobs(held, value.loss_mask)
        found[name] = held
    return found


@cache
def _encoded_fields(cls: type[Any]) -> tuple[tuple[str, str, Any, str], ...]:
    """Attribute, name in JSON, default, and whether it is a mask, or log-probabilities that have one."""
    names = {field.name for field in dataclasses.fields(cls)}
    kinds = {"loss_mask": "mask"} if "loss_mask" in names else {}
    if kinds:
        kinds |= dict.fromkeys(("logprobs", "teacher_logprobs", "advantages"), "logprobs")
    return tuple(
        (
            field.name,
            field.metadata.get("name", field.name),
            # What is no argument has one value only, and says what the object is.
            None
            if not field.init
            else field.default
            if field.default is not dataclasses.MISSING
            else field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else None,
            kinds.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
    )


def _numbers(values: Any) -> Any:
    """Writes a mask of booleans as 0 and 1, which the API demands."""
    is_boolean = type(values) in (list, tuple) and values and type(values[0]) is bool
    return [int(value) for value in values] if is_boolean else values


def _logprobs(values: Any, mask: Any) -> Any:
    """Writes log-probabilities that are not finite as null where the mask is 0, because they are ignored there."""
    values = values.tolist() if hasattr(values, "tolist") else values
    mask = mask.tolist() if hasattr(mask, "tolist") else mask
    try:
        # A sum is much faster than a look at each value, and nearly all are finite.
        if math.isfinite(sum(values)):
            return values
    except (TypeError, OverflowError):
        pass
    try:
        return [
            value if bit or (value is not None and math.isfinite(value)) else None
            for value, bit in zip(values, mask, strict=True)
        ]
    except (TypeError, ValueError, OverflowError):
        # The search for a fault, or the service, says what is wrong.
        return values


def _fault(value: Any, pointer: str, depth: int) -> tuple[str, str] | None:
    """Finds the first value that cannot be written, as a JSON pointer and a reason."""
    if depth > DEPTH_MAX:
        return pointer, "is nested too deeply, or contains itself"
    if value is None or isinstance(value, bool | int | str):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else (pointer, f"is {value}, and only finite numbers can be sent")
    if isinstance(value, dict):
        for key, held in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                return pointer, f"has the key {key!r}, which is not a text"
            if fault := _fault(held, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}", depth + 1):
                return fault
        return None
    if isinstance(value, list | tuple):
        for index, held in enumerate(cast("Sequence[Any]", value)):
            if fault := _fault(held, f"{pointer}/{index}", depth + 1):
                return fault
        return None
    try:
        simpler = plain(value)
    except TypeError:
        return pointer, f"is a {type(value).__name__}, which cannot be written as JSON"
    return _fault(simpler, pointer, depth + 1)


@cache
def _decoder(cls: type[Any]) -> Convert:
    hints = typing.get_type_hints(cls)
    plan = tuple(
        (field.name, field.metadata.get("name", field.name), _converter(hints[field.name]))
        for field in dataclasses.fields(cls)
        if field.init
    )

    def decode_object(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{cls.__name__} is not an object")
        fields: dict[str, Any] = {}
        for attribute, name, convert in plan:
            held = cast("dict[str, Any]", value).get(name)
            if held is not None:
                fields[attribute] = convert(held) if convert else held
        try:
            return cls(**fields)
        except TypeError:
            missing = [name for attribute, name, _ in plan if attribute not in fields]
            raise ValueError(f"{cls.__name__} lacks some of {', '.join(missing)}") from None

    return decode_object


@cache
def _converter(hint: Any) -> Convert | None:
    """Returns how a value of a type is made of JSON, or None if JSON's own form is right."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _decoder(cast("type[Any]", hint))
    if origin in (types.UnionType, typing.Union):
        classes = [argument for argument in arguments if dataclasses.is_dataclass(argument)]
        if len(classes) > 1:
            return _of_kind({_kind_of(cast("type[Any]", cls)): _decoder(cast("type[Any]", cls)) for cls in classes})
        converters = [found for found in map(_converter, arguments) if found]
        plain_too = len(converters) + (type(None) in arguments) < len(arguments)
        return (_if_object(converters[0]) if plain_too else converters[0]) if converters else None
    if origin in (list, Sequence) and (item := _converter(arguments[0])):
        return _each(item)
    if origin in (dict, Mapping) and (item := _converter(arguments[1])):
        return _each_value(item)
    return None


def _kind_of(cls: type[Any]) -> Any:
    """What the objects of one of several classes have as their `kind`."""
    return next(field.default for field in dataclasses.fields(cls) if field.name == "kind")


def _of_kind(converters: Mapping[Any, Convert]) -> Convert:
    """Reads an object by its `kind`, and leaves what is no object."""

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        held = cast("dict[str, Any]", value)
        # A newer service may have further kinds, and an older client must still read the rest.
        known = converters.get(held.get("kind"))
        return known(held) if known else held

    return convert


def _if_object(convert: Convert) -> Convert:
    return lambda value: convert(value) if isinstance(value, dict) else value


def _each(item: Convert) -> Convert:
    def convert(values: Any) -> Any:
        if not isinstance(values, list):
            raise ValueError("a list is expected")
        return [item(value) for value in cast("list[Any]", values)]

    return convert


def _each_value(item: Convert) -> Convert:
    def convert(values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("an object is expected")
        return {key: item(value) for key, value in cast("dict[str, Any]", values).items()}

    return convert
