"""The hooks that slime calls in its rollout manager, and what they share."""

from __future__ import annotations

import threading
from typing import Any

from .. import errors
from ._framework import find
from ._run import Run, Settings


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The `--rollout-function-path`: leases the batches of a training step, acks them, and returns their samples.

    With `evaluation` it returns the rewards of the batch that was leased last, because nothing is generated here. Name
    another `--eval-function-path` to evaluate.
    """
    run = _run_of(args)
    framework = find()
    if evaluation:
        return run.evaluation(framework)
    return run.generate(args, rollout_id, framework)


class DataSource:
    """The `--data-source-path`: `load` resumes the policy, and `save` reports a checkpoint. It has no prompts."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def load(self, rollout_id: int | None = None) -> None:
        """Resumes from the checkpoint of `rollout_id`; -1 or None is a start from nothing."""
        _run_of(self.args).resume(self.args, rollout_id)

    def save(self, rollout_id: int) -> None:
        """Reports that the weights of `rollout_id` are saved."""
        _run_of(self.args).save(self.args, rollout_id)

    def get_samples(self, num_samples: int) -> list[Any]:
        """There are no prompts: agents have their own."""
        if getattr(self.args, "rollout_function_path", None) is not None:
            raise errors.ConfigurationError(
                "forebay.slime.DataSource has no prompts to generate from: "
                "set --rollout-function-path forebay.slime.generate_rollout"
            )
        return []

    def add_samples(self, samples: list[Any]) -> None:
        """Samples cannot be added: agents post rollouts to the service."""
        raise errors.ConfigurationError("forebay.slime.DataSource takes no samples: post them with post_sample")

    def __len__(self) -> int:
        return 0


_runs: dict[Settings, Run] = {}

_lock = threading.Lock()


def _run_of(args: Any) -> Run:
    """Returns the run of this process: slime makes the data source and calls the rollout function separately."""
    settings = Settings.of(args)
    with _lock:
        return _runs.setdefault(settings, Run(settings))
