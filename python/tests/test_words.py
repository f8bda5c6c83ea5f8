"""One thing has one name: the words that docs/api.md gives up are in no document, comment of the code or schema."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

from support import REPOSITORY

GLOSSARY = "docs/api.md"

CODE = re.compile(r"```.*?^\s*```|`[^`\n]*`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL)
"""Code and addresses in prose, where names are those of the code."""

NOT_USED = re.compile(r"^Words that are not used: (.*?)\. A test", re.MULTILINE | re.DOTALL)
"""The sentence of the glossary that names the words."""

COMMENT = re.compile(r"^\s*//[/!] ?(.*)$", re.MULTILINE)
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)


def given_up() -> list[str]:
    (sentence,) = NOT_USED.findall((REPOSITORY / GLOSSARY).read_text())
    return re.findall(r"(\w+)\s+\(", sentence)


def prose() -> Iterator[tuple[str, str]]:
    """Documents, the comments of Rust that document something, and the strings of Python that do."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        path = REPOSITORY / name
        if not path.is_file():
            continue
        if name.endswith(".md") and name != "CHANGELOG.md":
            yield name, NOT_USED.sub(" ", CODE.sub(" ", path.read_text()))
        elif name.endswith(".rs"):
            yield name, CODE.sub(" ", "\n".join(COMMENT.findall(path.read_text())))
        elif name.startswith("python/forebay/") and name.endswith(".py"):
            yield name, CODE.sub(" ", "\n".join(DOCSTRING.findall(path.read_text())))
    document = json.loads((REPOSITORY / "openapi" / "forebay.json").read_text())
    yield "the schemas", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", " ".join(document["components"]["schemas"]))


def test_one_thing_has_one_name() -> None:
    words = given_up()
    assert "asker" in words
    pattern = re.compile(rf"\b({'|'.join(words)})s?\b", re.IGNORECASE)
    found = [f"{name}: {word}" for name, text in prose() for word in pattern.findall(text)]
    assert found == [], f"{GLOSSARY}#terms has the names to use"
