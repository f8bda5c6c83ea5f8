"""Writes YAML that every parser of YAML 1.1 and 1.2 reads alike.

A text is written without quotes only if no parser takes it for something else. All other texts are in double quotes,
with escapes for everything outside of printable ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

PLAIN = re.compile(r"(?:--?)?[A-Za-z_/][A-Za-z0-9_./=-]*")
"""Texts that need no quotes. They have no colon, no space and no bracket, and do not begin with a digit."""

WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
"""Texts that are not texts without quotes, in capital letters or not."""

ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def dump(values: Mapping[str, Any]) -> str:
    """A table as a document. Lists of scalars are on one line, and None is an empty value."""
    return "".join(line + "\n" for line in _table(values, ""))


def scalar(value: str | int) -> str:
    """A scalar."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return '"' + "".join(_character(each) for each in value) + '"'


def _table(values: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        name = f"{indent}{scalar(key)}:"
        if isinstance(value, dict) and value:
            lines += [name, *_table(cast("dict[str, Any]", value), indent + "  ")]
        elif isinstance(value, list) and any(isinstance(item, dict) for item in cast("list[Any]", value)):
            lines.append(name)
            for item in cast("list[dict[str, Any]]", value):
                first, *rest = _table(item, indent + "    ")
                lines += [f"{indent}  - {first.lstrip()}", *rest]
        else:
            lines.append(f"{name} {_inline(value)}".rstrip())
    return lines


def _inline(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return "[" + ", ".join(scalar(item) for item in cast("list[Any]", value)) + "]"
    return scalar(value)


def _character(character: str) -> str:
    if character in ESCAPES:
        return ESCAPES[character]
    if " " <= character <= "~":
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
