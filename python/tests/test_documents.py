"""The blocks of Python in the documents of the package, run as they are printed against a service of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import REPOSITORY

import forebay

NOT_RUN = {
    "docs/python-agents.md": "test_agents_document.py, which has an engine",
    "docs/python-trainers.md": "frameworks/test_guides.py, which has PyTorch",
    "docs/python-slime.md": "frameworks/test_slime.py, which has slime",
    "docs/python-tinker.md": "frameworks/test_tinker.py, which has Tinker's types",
    "docs/python-trl.md": "frameworks/test_guides.py, which has TRL",
    "docs/python-verl.md": "frameworks/test_verl.py, which resolves its command",
}
"""Documents whose blocks need more than this test has, and what runs them instead."""

DOCUMENTS = ["python/README.md", *(f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("python*.md")))]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(text: str, url: str, folder: Path) -> str:
    script = folder / "block.py"
    script.write_text(text)
    found = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        env={**os.environ, "FOREBAY_URL": url, "PYTHONPATH": str(REPOSITORY / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, f"{text}\n{found.stdout}\n{found.stderr}"
    return found.stdout


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document not in NOT_RUN])
def test_blocks_run_as_printed(document: str, own_server: forebay.Server, tmp_path: Path) -> None:
    blocks = BLOCK.findall((REPOSITORY / document).read_text())
    assert blocks
    for block in blocks:
        run(block, own_server.url, tmp_path)


def test_the_first_block_can_be_run_again(own_server: forebay.Server, tmp_path: Path) -> None:
    block = BLOCK.findall((REPOSITORY / "python" / "README.md").read_text())[0]
    assert "kept ready" in run(block, own_server.url, tmp_path)
    assert len([line for line in block.splitlines() if line]) <= 15
    with own_server.client() as fb:
        before = fb.stats()
        run(block, own_server.url, tmp_path)
        assert fb.stats() == before


def test_the_extras_of_the_guide_are_those_of_the_package_and_allow_the_tested_versions() -> None:
    manifest = (REPOSITORY / "pyproject.toml").read_text()
    table = manifest.split("[project.optional-dependencies]")[1].split("\n\n")[0]
    extras = {name: json.loads(bounds) for name, bounds in re.findall(r"^(\w+) = (\[.*\])$", table, re.MULTILINE)}
    guide = (REPOSITORY / "docs/python.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| .* \|$", guide.split("| extra |")[1].split("\n\n")[0], re.MULTILINE) == list(
        extras
    )
    for document in DOCUMENTS:
        named = re.findall(r"'forebay\[(\w+)\]'", (REPOSITORY / document).read_text())
        assert set(named) <= set(extras), document
    # The environments of `make outside NAME=frameworks`; those of slime and verl extend that of TRL.
    pinned: dict[str, set[str]] = {}
    for environment in ("package", "trl", "verl", "tinker"):
        for line in (REPOSITORY / f"tests/python/{environment}.txt").read_text().splitlines():
            if (found := re.match(r"([\w.-]+)==([^;\s]+)", line)) is not None:
                pinned.setdefault(found[1].lower(), set()).add(found[2])
    for bounds in extras.values():
        for bound in map(Requirement, bounds):
            tested = pinned[bound.name.lower()]
            assert all(version in bound.specifier for version in tested), (bound, tested)
