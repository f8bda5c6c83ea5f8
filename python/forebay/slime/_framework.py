"""The classes of slime, or of a package with the same hooks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import errors

FRAMEWORKS = ("slime", "miles", "vime")
"""The packages that have these hooks. The one that is loaded is used."""


@dataclass(frozen=True, slots=True)
class Framework:
    """The classes of slime, or of a package with the same hooks."""

    name: str
    sample: Any
    train_output: Any
    eval_output: Any

    def new_sample(self, fields: Mapping[str, Any], *, status: str, index: int, group_index: int = 0) -> Any:
        """Makes a sample. Fields that the package does not have are left out."""
        given = {**fields, "status": self.sample.Status(status), "index": index, "group_index": group_index}
        known = self.sample.__dataclass_fields__
        return self.sample(**{name: value for name, value in given.items() if name in known})


def find() -> Framework:
    """Returns the package that has loaded this module's hooks."""
    loaded = [name for name in FRAMEWORKS if f"{name}.utils.types" in sys.modules]
    for name in loaded or FRAMEWORKS:
        try:
            types = importlib.import_module(f"{name}.utils.types")
            outputs = importlib.import_module(f"{name}.rollout.base_types")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != name:
                raise  # A package that the framework needs.
            continue
        return Framework(name, types.Sample, outputs.RolloutFnTrainOutput, outputs.RolloutFnEvalOutput)
    raise errors.ConfigurationError("forebay.slime is called by slime or miles, and neither is installed here")
