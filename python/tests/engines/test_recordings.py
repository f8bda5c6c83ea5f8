"""Records what the engine answers to `crates/gateway/tests/it/recorded.rs`, and compares it with what is stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PROCESSED, RAW, Stack
from engine import VERSION

REPOSITORY = Path(__file__).resolve().parents[3]
STORED = REPOSITORY / "crates/gateway/tests/recordings" / f"vllm-{VERSION}"


@pytest.mark.subject("recordings")
@pytest.mark.parametrize("stack", [PROCESSED, RAW], indirect=True, ids=str)
def test_the_engine_answers_with_the_fields_that_are_stored(stack: Stack, tmp_path: Path) -> None:
    scale = "PROCESSED" if stack.flags.is_processed else "RAW"
    names = {f"FOREBAY_ENGINE_{scale}": stack.engine.url, "FOREBAY_RECORDINGS": str(tmp_path)}
    cargo = [os.environ.get("CARGO", "cargo"), "test", "-p", "forebay-gateway", "--test", "it", "--", "recorded::"]
    subprocess.run(cargo, cwd=REPOSITORY, env={**os.environ, **names}, check=True)
    recorded = sorted(tmp_path.glob("*.jsonl"))
    assert recorded
    for file in recorded:
        if "FOREBAY_RECORD" in os.environ:
            shutil.copy(file, STORED)
        found, stored = fields(file), fields(STORED / file.name)
        # Whether an answer calls a tool is drawn.
        drawn = {field for field in stored if "/message/tool_calls" in field}
        assert found - stored == set(), file.name
        assert stored - drawn - found == set(), file.name


def fields(file: Path) -> set[str]:
    """The fields of all requests and answers of a recording."""
    exchanges = [json.loads(line) for line in file.read_text().splitlines()]
    return {f"{exchange['path']} {field}" for exchange in exchanges for field in places(exchange)}


def places(value: Any, above: str = "") -> Iterator[str]:
    yield above
    inner = (
        value.items() if isinstance(value, dict) else [("*", item) for item in value] if isinstance(value, list) else []
    )
    for name, item in inner:
        # Scores have the ids of tokens as names, and which ones depends on what was sampled.
        yield from places(item, f"{above}/{'*' if name.isdigit() else name}")
