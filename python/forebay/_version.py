"""The version of the package, which is that of the service; a test compares it with Cargo.toml."""

from __future__ import annotations

__version__ = "0.1.0"


def mismatch(client: str, service: str) -> str | None:
    """Returns a warning if the versions are too far apart: the minor versions may differ by one."""
    mine, its = _numbers(client), _numbers(service)
    if mine is None or its is None or (mine[0] == its[0] and abs(mine[1] - its[1]) <= 1):
        return None
    return (
        f"this is version {client} of the Python package forebay, and the service is version {service}: install a "
        "package whose minor version is that of the service, or differs by one"
    )


def _numbers(version: str) -> tuple[int, int] | None:
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return None
