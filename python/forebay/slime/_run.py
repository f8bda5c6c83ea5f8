"""One policy in the hands of slime's rollout manager."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import errors
from .._early import MAX_ATTEMPTS, check_advantages, client_of, policy_of, take
from .._wire import Sample
from ..batch import Batch
from ..trainer import Trainer
from ._checks import check_rows, check_settings
from ._convert import KEY
from ._framework import Framework
from ._samples import empty_fields, fields_of

log = logging.getLogger("forebay")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `--custom-config-path` or the environment says. slime's own tests call with `args=None`."""

    url: str | None
    key_file: str | None
    policy: str
    consumer: str | None
    max_attempts: int
    publish: bool

    @staticmethod
    def of(args: Any) -> Settings:
        return Settings(
            url=getattr(args, "forebay_url", None) or os.environ.get("FOREBAY_URL"),
            key_file=getattr(args, "forebay_key_file", None),
            policy=policy_of(getattr(args, "forebay_policy", None)),
            consumer=getattr(args, "forebay_consumer", None),
            max_attempts=int(getattr(args, "forebay_max_attempts", MAX_ATTEMPTS)),
            publish=bool(getattr(args, "forebay_publish", True)),
        )


class Run:
    """One policy in the hands of slime's rollout manager."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._trainer: Trainer | None = None
        self._first = 0
        """The first step of this process."""
        self._published_step: int | None = None
        self._unconfirmed: int | None = None
        """A checkpoint that may still be being written (`--async-save`)."""
        self._index = 0
        """Numbers the samples of this process."""
        self._group_index = 0
        self._last: list[Any] = []

    def resume(self, args: Any, saved: int | None) -> Trainer:
        check_settings(args)
        last_saved = None if saved is None or saved < 0 else saved
        self._first = 0 if last_saved is None else last_saved + 1
        self._trainer = Trainer(
            self._settings.policy,
            last_saved=last_saved,
            client=client_of(self._settings.url, self._settings.key_file),
            consumer=self._settings.consumer,
            max_attempts=self._settings.max_attempts,
        )
        status = self._trainer.status()
        check_advantages(status, "slime")
        if _is_async(args) and status.rules.staleness.max == 0:
            raise errors.ConfigurationError(
                f"train_async.py asks for a batch while the one before is trained, so its rollouts are at least one "
                f"version behind: set `staleness.max` of the policy {self._settings.policy} to 1 or more"
            )
        self._published_step = status.version_step
        self._unconfirmed = None
        return self._trainer

    def generate(self, args: Any, step: int, framework: Framework) -> Any:
        trainer = self._trainer
        if trainer is None:
            # slime loads no data source with --disable-rollout-global-dataset.
            log.warning("the data source was not loaded, so the policy is resumed from step %d", step - 1)
            trainer = self.resume(args, step - 1)
        self._publish(trainer, args, step, framework)
        groups: list[list[list[Any]]] = []
        metrics: dict[str, float] = {"forebay/rollouts": 0}
        for place in range(_steps_of(args)):

            def build(batch: Batch, rows: list[Sample], place: int = place) -> tuple[Batch, list[list[list[Any]]]]:
                check_rows(args, rows)
                return batch, self._samples(batch, rows, place, framework)

            batch, of_batch = take(trainer, step, build)
            groups += of_batch
            metrics.update({f"forebay/{name}": value for name, value in batch.metrics.items()})
            metrics["forebay/rollouts"] += batch.rollouts
        self._last = [sample for group in groups for rollout in group for sample in rollout]
        flat = all(len(rollout) == 1 for group in groups for rollout in group)
        samples = [[rollout[0] for rollout in group] for group in groups] if flat else groups
        return framework.train_output(samples=samples, metrics=metrics)

    def save(self, args: Any, step: int) -> None:
        trainer = self._trainer
        if trainer is None:
            raise errors.ConfigurationError(f"step {step} was saved before the policy was resumed")
        is_last = step + 1 == getattr(args, "num_rollout", None) or getattr(args, "release_train", False)
        if not getattr(args, "async_save", False) or is_last:
            trainer.saved(step)
            self._unconfirmed = None
            return
        # The save before is complete when the next one begins, and this one is still being written.
        if self._unconfirmed is not None:
            trainer.saved(self._unconfirmed)
        self._unconfirmed = step

    def evaluation(self, framework: Framework) -> Any:
        if not self._last:
            log.warning("nothing was leased yet, so there is nothing to evaluate: name an --eval-function-path")
            return framework.eval_output(data={})
        first = [sample for sample in self._last if sample.metadata[KEY]["segment"] == 0] or self._last
        truncated = framework.sample.Status.TRUNCATED
        data = {
            "rewards": [sample.reward for sample in first],
            "truncated": [sample.status == truncated for sample in first],
            "samples": first,
        }
        return framework.eval_output(data={"forebay-last-batch": data})

    def _publish(self, trainer: Trainer, args: Any, step: int, framework: Framework) -> None:
        """Publishes the weights that slime's engines have now. No hook of slime follows the push of weights."""
        if not self._settings.publish:
            return
        pushes, live = _live(args, self._first, step)
        if live is None or (self._published_step is not None and live <= self._published_step):
            return
        number = pushes + int(getattr(args, "update_weight_start_version", None) or 0)
        trainer.publish(live, uri=f"{framework.name}:weight_version={number}")
        self._published_step = live

    def _samples(self, batch: Batch, rows: Sequence[Sample], place: int, framework: Framework) -> list[list[list[Any]]]:
        """The samples of a batch by group and rollout. Rows without a response are left out: they train nothing."""
        groups: dict[str, dict[str, list[Any]]] = {}
        metadata: dict[str, Mapping[str, Any]] = {}
        for row in rows:
            metadata.setdefault(row.rollout_id, row.metadata or {})
            if not row.response_length:
                continue
            if row.group_id not in groups:
                groups[row.group_id] = {}
                self._group_index += 1
            sample = framework.new_sample(
                fields_of(row, batch.batch_id, metadata[row.rollout_id], place),
                status=row.status,
                index=self._index,
                group_index=self._group_index,
            )
            self._index += 1
            groups[row.group_id].setdefault(row.rollout_id, []).append(sample)
        if not groups:
            log.warning("batch %s has no tokens at all: its step trains nothing", batch.batch_id)
            return [[[framework.new_sample(empty_fields(batch.batch_id, place), status="failed", index=0)]]]
        return [list(rollouts.values()) for rollouts in groups.values()]


def _steps_of(args: Any) -> int:
    """How many optimizer steps slime makes of one call of the rollout function: one batch for each."""
    size = getattr(args, "global_batch_size", None)
    prompts = getattr(args, "rollout_batch_size", None)
    if not size or not prompts:
        return 1
    return max(1, int(prompts) * int(getattr(args, "n_samples_per_prompt", None) or 1) // int(size))


def _is_async(args: Any) -> bool:
    return bool(getattr(args, "forebay_async", False))


def _live(args: Any, first: int, step: int) -> tuple[int, int | None]:
    """How often slime has pushed weights when it asks for the batch of `step`, and the step of those weights.

    slime pushes once when it starts. train.py then pushes after every step. train_async.py pushes after every
    `--update-weights-interval` steps, and asks for a batch while the one before is trained.
    """
    last = step - 1
    interval = 1
    if _is_async(args):
        last = step - 2
        if not getattr(args, "release_train", False):
            interval = int(getattr(args, "update_weights_interval", None) or 1)
    pushes = max(0, (last + 1) // interval - first // interval)
    live = (last + 1) // interval * interval - 1 if pushes else first - 1
    return 1 + pushes, live if live >= 0 else None
