"""Builds wheels of the Python package, and tries them in fresh environments."""

import base64
import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

from . import ROOT

# What a new user does first: a service, a post, a lease and an ack.
FIRST_STEPS = """
import forebay
with forebay.Server() as server, server.client() as fb:
    fb.post(forebay.Trajectory(reward=1.0, segments=[forebay.Segment(tokens=[1, 2], loss_mask=[1])]))
    batch = fb.lease(request_id="step-1", wait_ms=10_000)
    (row,) = fb.samples(batch.batch_id)
    assert row.tokens == [1, 2]
    assert fb.ack(batch.batch_id, lease=batch.lease, step=1).state == "trained"
    print(forebay.__version__, fb.health().version)
"""

# What verl does in each of its processes. It must not raise in an environment that has no verl.
PLUGINS = """
import importlib.metadata
(plugin,) = importlib.metadata.entry_points(group="verl.plugins")
plugin.load()
print(plugin.value)
"""


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, text=True, **options)


def output(*command, **options):
    return run(*command, capture_output=True, **options).stdout


def build(folder, *options, **variables):
    """Builds the wheel of a platform in an empty folder, and returns its path."""
    python = pathlib.Path(output(ROOT / "scripts" / "python-env", "wheel").strip())
    # maturin looks for zig in the path.
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    command = [python, "-m", "maturin", "build", "--release", "--out", folder, *options]
    run(*command, cwd=ROOT, env={**os.environ, **variables, "PATH": path})
    (wheel,) = folder.glob("*.whl")
    return wheel


def repacked(wheel, folder, tags, left_out=()):
    """Writes a wheel with other tags and without the files whose names begin with `left_out`; returns its path."""
    name, version, *_ = wheel.name.split("-")
    info = f"{name}-{version}.dist-info"
    is_pure = tags == ["any"]
    path = folder / f"{name}-{version}-py3-none-{'.'.join(tags)}.whl"
    head = [f"Root-Is-Purelib: {str(is_pure).lower()}", *(f"Tag: py3-none-{tag}" for tag in tags)]
    with zipfile.ZipFile(wheel) as source, Wheel(path, info) as target:
        for entry in source.infolist():
            if entry.filename.startswith((f"{info}/RECORD", *left_out)):
                continue
            data = source.read(entry)
            if entry.filename == f"{info}/WHEEL":
                lines = [line for line in data.decode().splitlines() if not line.startswith(("Root-Is-", "Tag:"))]
                data = "\n".join([*lines, *head, ""]).encode()
            target.add(entry, data)
    return path


class Wheel:
    """A wheel that is written: its files, and at the end the record of them."""

    def __init__(self, path, info):
        self.path, self._info, self._record = path, info, []

    def __enter__(self):
        self._zip = zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED)
        return self

    def add(self, entry, data):
        """Adds a file, whose name and mode `entry` says."""
        self._zip.writestr(entry, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self._record.append(f"{entry.filename},sha256={digest},{len(data)}")

    def __exit__(self, kind, error, trace):
        self._zip.writestr(f"{self._info}/RECORD", "\n".join([*self._record, f"{self._info}/RECORD,,", ""]))
        self._zip.close()


def without_program(wheel, folder):
    """Writes the same package without the program, for every platform, and returns its path."""
    name, version, *_ = wheel.name.split("-")
    # The list of Rust crates describes the program.
    return repacked(wheel, folder, ["any"], (f"{name}-{version}.data/", f"{name}-{version}.dist-info/sboms/"))


def environment(folder, *packages):
    """Makes a fresh environment with packages, and returns its folder of programs."""
    run(sys.executable, "-m", "venv", folder)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", *packages)
    run(*pip, "check", stdout=subprocess.DEVNULL)
    return folder / "bin"


def try_with_program(folder, packages, version, variables):
    programs = environment(folder, *packages)
    for command in ([programs / "forebay"], [programs / "python", "-m", "forebay"]):
        found = output(*command, "--version", env=variables).strip()
        assert found == f"forebay {version}", found
    found = output(programs / "python", "-c", FIRST_STEPS, cwd=folder, env=variables).strip()
    assert found == f"{version} {version}", found
    check_plugin(programs, variables)
    return programs / "forebay"


def try_without_program(folder, wheel, version, program, variables):
    programs = environment(folder, wheel)
    assert not (programs / "forebay").exists()
    missing = subprocess.run(
        [programs / "python", "-m", "forebay", "--version"], capture_output=True, text=True, env=variables
    )
    assert missing.returncode == 1 and "FOREBAY_BIN" in missing.stderr, missing
    # The client alone works.
    found = output(programs / "python", "-c", FIRST_STEPS, cwd=folder, env={**variables, "FOREBAY_BIN": str(program)})
    assert found.strip() == f"{version} {version}", found
    check_plugin(programs, variables)
    return missing.stderr.strip()


def check_plugin(programs, variables):
    found = output(programs / "python", "-W", "error", "-c", PLUGINS, env=variables).strip()
    assert found == "forebay._verl_plugin", found


def check_contents(wheel):
    """Every file of the package is in the wheel, and nothing else."""
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if name.startswith("forebay/")}
    tracked = output("git", "ls-files", "python/forebay", cwd=ROOT).split()
    expected = {name.removeprefix("python/") for name in tracked}
    assert names == expected, names ^ expected


def clean_variables():
    """The environment for a trial: what the caller has set for another service must not matter, nor a program on the
    path."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("FOREBAY_", "PYTHON"))}
    return {**variables, "PATH": os.defpath}


def mib(size):
    return f"{size / 2**20:.2f} MiB"
