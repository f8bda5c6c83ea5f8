"""Tests with frameworks. Each file needs packages that only the environment of its framework has."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable

import pytest

NEEDS = {
    "test_ddp.py": "torch",
    "test_exports.py": "trl",
    "test_guides.py": "trl",
    "test_readers.py": "fastparquet",
    "test_slime.py": "torch",
    "test_tinker.py": "tinker",
    "test_torch.py": "torch",
    "test_trl.py": "trl",
    "test_verl.py": "verl",
}
"""What the files import. Without it they are not collected: `make outside NAME=frameworks` runs them."""

collect_ignore = [name for name, package in NEEDS.items() if importlib.util.find_spec(package) is None]

Difference = Callable[[str, float, float], None]


@pytest.fixture
def difference() -> Difference:
    """Checks that a difference is within its bound, and reports it to `scripts/test-frameworks`."""

    def check(what: str, found: float, bound: float) -> None:
        if report := os.environ.get("FOREBAY_REPORT"):
            with open(report, "a") as file:
                file.write(json.dumps({"what": what, "difference": found}) + "\n")
        assert found <= bound, f"{what}: the difference is {found}, above {bound}"

    return check
