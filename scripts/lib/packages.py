"""Packages of other projects: environments of Python that have them, and what npm fetches."""

import base64
import hashlib
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

from . import FOREBAY, ROOT


def python_env(name, **variables):
    """Returns the Python of an environment (tests/python/NAME.txt), or None if it cannot be made."""
    command, variables = [ROOT / "scripts" / "python-env", name], {**os.environ, **variables}
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=variables)
    return made.stdout.strip() if made.returncode == 0 else None


def run_in(name):
    """Starts the program again with the Python of an environment and the package `forebay`, unless it runs there."""
    python = python_env(name) or sys.exit(1)
    if pathlib.Path(sys.prefix).resolve() != pathlib.Path(python).parents[1].resolve():
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "FOREBAY_BIN": str(FOREBAY)}
        os.execve(python, [python, *sys.argv], variables)


def npm_package(name, integrity):
    """Fetches a package with npm, and returns its files by their paths after its integrity has been checked."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", name]
        packed = subprocess.run(command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE)
        archive = pathlib.Path(folder, packed.stdout.strip())
        found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != integrity:
            sys.exit(f"{name} has the integrity {found}, not {integrity}")
        with tarfile.open(archive) as tar:
            files = [member for member in tar if member.isfile()]
            return {member.name.removeprefix("package/"): tar.extractfile(member).read() for member in files}
