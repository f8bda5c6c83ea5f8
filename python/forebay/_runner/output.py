"""The folder of a run. One runner at a time uses it, and a run that was interrupted goes on in it.

run.json      what the run is, to recognise it again       logs/       a file for each process
forebay.db    the service's database                       models/     models before and after the warm start
trainers/     checkpoints, versions and metrics            result.json, curves.svg
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from .. import _durable
from ..errors import ConfigurationError

IDENTITY = "run.json"


class Output:
    """The folder, locked."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, resume: bool) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        # The lock is beside the folder's content, which a new run removes.
        self._lock = _durable.lock(self.folder.with_name(self.folder.name + ".lock"))
        if self._lock is None:
            raise ConfigurationError(f"a run uses {self.folder} already")
        try:
            self._prepare(identity, resume)
        except BaseException:
            self.close()
            raise

    def _prepare(self, identity: dict[str, Any], resume: bool) -> None:
        earlier = self.folder / IDENTITY
        if resume:
            if not earlier.exists():
                raise ConfigurationError(f"there is no run in {self.folder} to go on with")
            found = json.loads(earlier.read_text())
            changed = [key for key, value in identity.items() if found.get(key) != value]
            if changed:
                key = changed[0]
                raise ConfigurationError(
                    f"the run in {self.folder} has the {key} {found.get(key)}, and not {identity[key]}"
                )
            self.is_resumed = True
            return
        if any(self.folder.iterdir()):
            # Only files of an earlier run are removed.
            if not earlier.exists():
                raise ConfigurationError(f"{self.folder} has files that are not from an earlier run")
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        _durable.replace(earlier, json.dumps(identity).encode())
        self.is_resumed = False

    @classmethod
    def shared(cls, folder: Path) -> Output:
        """The folder of a run whose processes are started one by one, by something else. It is not locked."""
        output = cls.__new__(cls)
        output.folder, output.is_resumed, output._lock = folder.resolve(), True, None
        return output

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.folder / "logs" / f"{name}.log"

    def trainer(self, policy: str) -> Path:
        """The folder of a trainer."""
        return self.folder / "trainers" / policy

    def model(self, name: str) -> Path:
        """The folder of a model."""
        return self.folder / "models" / name

    def start(self, policy: str) -> Path:
        """A link to the model of a policy before its training, if `--only prepare` made the folder."""
        return self.folder / "models" / "start" / policy

    def write(self, name: str, text: str) -> Path:
        """Writes a file whole or not at all."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _durable.replace(path, text.encode())
        return path

    def close(self) -> None:
        """Lets another run use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
