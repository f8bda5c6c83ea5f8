"""Files that survive a crash, and locks that end with their process. The spool and the state of a program use them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None

TEMPORARY = ".tmp"
"""The ending of a file that is not complete yet."""


def replace(path: Path, data: bytes) -> None:
    """Writes a file so that after a crash it has either its earlier content or this one, and this one from now on."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def remove_leftover(path: Path) -> None:
    """Removes what a process left that was killed while it wrote the file."""
    path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path, *, create: bool = True) -> int | None:
    """Locks a file until the descriptor is closed or the process ends. None if another process has the lock."""
    if fcntl is None:
        raise ConfigurationError("files can only be locked on systems with flock, such as Linux and macOS")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed the file before this one locked it.
        if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
