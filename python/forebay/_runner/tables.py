"""Reads TOML with errors that name the key, and writes it.

Reading a table notes which keys were asked for, so that a key which nothing reads is an error and not ignored.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigurationError

_MISSING: Any = object()


def load(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None
    return parsed(text, path)


def parsed(text: str, path: Path) -> dict[str, Any]:
    """The content of a text in TOML. Errors name the path."""
    toml = _parser()
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None


def _parser() -> Any:
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigurationError("run files need Python 3.11 or newer, or the package tomli")


def within(values: dict[str, Any], key: str) -> Any:
    """The value of a key, such as `a.b`, in tables inside of each other; None if it is not there."""
    found: Any = values
    for name in key.split("."):
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found


def nested(key: str, value: Any) -> dict[str, Any]:
    """Tables inside of each other with the value of a key, such as `a.b`."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def merged(below: Any, above: Any) -> Any:
    """One value laid over another: tables are merged, and so are lists of tables with names, by name."""
    if isinstance(below, dict) and isinstance(above, dict):
        result = dict(cast("dict[str, Any]", below))
        for key, value in cast("dict[str, Any]", above).items():
            result[key] = merged(result[key], value) if key in result else value
        return result
    if _are_named(below) and _are_named(above):
        tables: dict[str, Any] = {table["name"]: table for table in cast("list[dict[str, Any]]", below)}
        for table in above:
            tables[table["name"]] = merged(tables.get(table["name"], {}), table)
        return list(tables.values())
    return above


def _are_named(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    tables = cast("list[Any]", value)
    names = [cast("dict[str, Any]", table).get("name") for table in tables if isinstance(table, dict)]
    return len(names) == len(tables) and None not in names


class Table:
    """A table of a run file, and its place there for errors."""

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self.values = values
        self.place = place
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there, and not `false`, which stands for nothing."""
        self._read.add(key)
        return key in self.values and self.values[key] is not False

    def text(self, key: str, default: str | None = _MISSING) -> str:
        """A text."""
        return cast("str", self._value(key, (str,), "a text", default))

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        """true or false."""
        return self._value(key, (bool,), "true or false", default)

    def integer(self, key: str, default: int = _MISSING, *, least: int = 0) -> int:
        """A whole number that is not below `least`."""
        value = self._value(key, (int,), "a whole number", default)
        if value < least:
            raise self.error(key, f"must be at least {least}, and is {value}")
        return value

    def number(self, key: str, default: float | None = _MISSING, *, least: float = -math.inf) -> float:
        """A finite number that is not below `least`."""
        value = self._value(key, (int, float), "a number", default)
        if value is None:
            return cast("float", value)
        if not math.isfinite(value) or value < least:
            raise self.error(key, f"must be a number of at least {least}, and is {value}")
        return float(value)

    def choice(self, key: str, choices: Sequence[str], default: str = _MISSING) -> str:
        """One of several texts."""
        value = self.text(key, default)
        if value not in choices:
            raise self.error(key, f"must be one of {', '.join(choices)}, and is {value}")
        return value

    def texts(self, key: str, default: Sequence[str] = ()) -> list[str]:
        """A list of texts."""
        value: Any = self._value(key, (list,), "a list of texts", list(default))
        if not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of texts")
        return value

    def raw(self, key: str) -> dict[str, Any]:
        """A table that others check, such as the service."""
        return self._value(key, (dict,), "a table", {})

    def words(self, key: str) -> dict[str, str]:
        """A table of texts."""
        value = self.raw(key)
        for name, item in value.items():
            if not isinstance(item, str):
                raise self.error(f"{key}.{name}", f"must be a text, and is {item!r}")
        return value

    def table(self, key: str) -> Table:
        """A table whose keys are checked here."""
        return Table(self.raw(key), self.at(key))

    def tables(self, key: str) -> list[Table]:
        """A list of tables."""
        value: Any = self._value(key, (list,), "a list of tables", [])
        if not all(isinstance(item, dict) for item in value):
            raise self.error(key, f"must be a list of tables, each below a line [[{self.at(key)}]]")
        return [Table(item, f"{self.at(key)}[{place}]") for place, item in enumerate(value)]

    def end(self) -> None:
        """Refuses keys that nothing has read."""
        unknown = sorted(self.values.keys() - self._read)
        if unknown:
            known = ", ".join(sorted(self._read))
            raise self.error(unknown[0], f"is not a key of a run file; known here are {known}")

    def at(self, key: str) -> str:
        """The place of a key."""
        return f"{self.place}.{key}" if self.place else key

    def error(self, key: str, what: str) -> ConfigurationError:
        """An error that names a key."""
        return ConfigurationError(f"`{self.at(key)}` {what}")

    def _value(self, key: str, types: tuple[type, ...], expected: str, default: Any) -> Any:
        self._read.add(key)
        if key not in self.values:
            if default is _MISSING:
                raise self.error(key, "is missing")
            return default
        value = self.values[key]
        # In Python, true is a whole number.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.error(key, f"must be {expected}, and is {value!r}")
        return value


def dump(values: Mapping[str, Any]) -> str:
    """A table as TOML, with one key a line. Tables inside of it are written on one line each."""
    return "".join(f"{_key(key)} = {_inline(value)}\n" for key, value in values.items() if value is not None)


def _inline(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in items if item is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in cast("list[Any]", value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return _text(str(value))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _text(value: str) -> str:
    # The escapes of JSON are those of TOML, apart from pairs of surrogates, and U+007F has to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
