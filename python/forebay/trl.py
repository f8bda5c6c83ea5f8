"""TRL's `GRPOTrainer` on the batches of a buffer: it leases where TRL would generate.

The loss is that of the batch, `sum_i loss_weight_i * sum_t loss_mask_it * l_it`, with any `loss_weighting`. The losses
of TRL are proportional to the advantage, so each weight is multiplied into the advantages of its row, and TRL
is asked for a plain sum. Tested with TRL 1.16.0.
"""

# TRL and transformers have incomplete types, and their methods are overridden with the types that are used here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false, reportUntypedBaseClass=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false

from __future__ import annotations

import json
import logging
import math
import os
import queue
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from . import errors, trainer as leasing
from ._early import check_advantages, one_advantage
from .batch import Batch
from .client import Client
from .torch import Row, Trainer, rows

log = logging.getLogger("forebay")

Publish = Callable[["GRPOTrainer", int], "str | None"]
"""Hands the weights after a step to inference. Called on all ranks; the result of rank 0 is the URI of the version."""

SAMPLES_MAX = 4_096
"""How many samples wait for `AsyncGRPOTrainer`."""

STOP_S = 1.0
"""How long a rollout worker may take to notice that it is stopped."""

SUMS = ("dapo", "cispo", "vespo")
"""Loss types that divide by the number of items of the batch, which is given, and by nothing else."""


class GRPOTrainer(trl.GRPOTrainer):
    """A `trl.GRPOTrainer` that learns from the batches of a policy.

    `args` is a `trl.GRPOConfig` with `max_steps`. One batch is one optimizer step. Its rows are divided into
    `gradient_accumulation_steps` parts for each rank, and at most `per_device_train_batch_size` rows are computed at
    once. What TRL would generate with, and how it would normalise rewards and losses, does not matter; settings that
    would change the loss are refused.

    `train(resume_from_checkpoint=True)` starts from the last complete checkpoint, or without one from the beginning. In
    both cases the buffer delivers exactly the batches that these weights have not learned from. A batch is acked before
    each optimizer step: if that fails, the weights stay as they are and the error ends the training.

    `publish` is called every `publish_steps` steps, for example `forebay.trl.to_folder("/ckpt")`. `lease_options` are
    further arguments of `forebay.Trainer`. With `reward_funcs` and an `eval_dataset`, evaluation is that of TRL.
    """

    def __init__(
        self,
        model: Any,
        args: trl.GRPOConfig,
        *,
        policy: str = "default",
        client: Client | None = None,
        publish: Publish | None = None,
        publish_steps: int = 1,
        lease_options: Mapping[str, Any] | None = None,
        reward_funcs: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
        **options: Any,
    ) -> None:
        _check(args, publish_steps, options)
        # Its rows are never used; it only makes one round of the loop an optimizer step.
        places = Dataset.from_dict({"prompt": [""] * (args.generation_batch_size // args.num_generations)})
        super().__init__(
            model=model,
            reward_funcs=_no_reward if reward_funcs is None else reward_funcs,
            args=args,
            train_dataset=places,
            # Callbacks run in their order: a batch is acked before those of the user see the step.
            callbacks=[_Lineage(self), *callbacks],
            **options,
        )
        self.policy = policy
        self.client = client or Client()
        self.batch: Batch | None = None
        """The batch of the current step."""
        self._publish = publish
        self._publish_steps = publish_steps
        self._lease_options = dict(lease_options or {})
        self._run: Trainer | None = None

    @property
    def run(self) -> Trainer:
        """The lineage of this training: its epoch and versions."""
        if self._run is None:
            raise errors.ConfigurationError("the training has not begun")
        return self._run

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self.batch = batch = self.run.lease()
        assert batch is not None, "a lease without a time limit returns a batch"
        shard = (self.accelerator.process_index, self.accelerator.num_processes)
        # A row without a trained token adds nothing to the loss.
        held = [row for row in rows(batch, shard) if row.is_trained]
        _check_rows(held, self.temperature)
        _check_tokens(held, self.args)
        self._tell(batch, held)
        return self._tensors(held)

    def _tensors(self, held: list[Row]) -> dict[str, Tensor]:
        """The rows of this rank in the form that TRL gives its own completions."""
        device, pad = self.accelerator.device, self._tokenizer.pad_token_id
        trained = sum(int(row.loss_mask.sum()) for row in held)
        counts = self.accelerator.gather(torch.tensor([[len(held), trained]], device=device))
        # All ranks have the same number of rows, a multiple of the parts that TRL divides them into.
        parts = self.args.steps_per_generation
        count = max(math.ceil(int(counts[:, 0].max()) / parts), 1) * parts
        # Any number is right: it is multiplied into the advantages and divided by in the loss. The number of trained
        # tokens keeps them at their usual magnitude. It is at least 1 in every part of a part (`_compute_loss`).
        items = max(int(counts[:, 1].sum()), count)
        prompt = max((len(row.tokens) - row.response_length for row in held), default=1)
        completion = max((row.response_length for row in held), default=1)
        # TRL takes advantages of rows, and of tokens.
        by_token = any(row.advantages is not None for row in held)
        found = {
            "prompt_ids": torch.full((count, prompt), pad),
            "prompt_mask": torch.zeros((count, prompt), dtype=torch.long),
            "completion_ids": torch.full((count, completion), pad),
            "completion_mask": torch.zeros((count, completion), dtype=torch.long),
            "tool_mask": torch.zeros((count, completion), dtype=torch.long),
            "advantages": torch.zeros((count, completion) if by_token else count),
            "old_per_token_logps": torch.zeros((count, completion)),
        }
        # Rows that fill up are a prompt and a completion of one token that is not trained.
        found["prompt_mask"][len(held) :, -1] = 1
        found["completion_mask"][len(held) :, 0] = 1
        for index, row in enumerate(held):
            length = row.response_length
            first = len(row.tokens) - length
            found["prompt_ids"][index, prompt - first :] = row.tokens[:first]
            found["prompt_mask"][index, prompt - first :] = 1
            found["completion_ids"][index, :length] = row.tokens[first:]
            found["completion_mask"][index, :length] = 1
            found["tool_mask"][index, :length] = row.loss_mask
            of_tokens = row.advantage if row.advantages is None else row.advantages
            place = (index, slice(length)) if by_token else index
            found["advantages"][place] = of_tokens * (row.loss_weight * items)
            # What was recorded for tokens that are not trained may be anything.
            found["old_per_token_logps"][index, :length] = torch.where(row.loss_mask.bool(), row.logprobs, 0.0)
        moved = {name: tensor.to(device) for name, tensor in found.items()}
        return {**moved, "num_items_in_batch": torch.tensor(float(items), device=device)}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss of a part of the batch, computed in smaller parts if it has too many rows for one."""
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        count = math.ceil(len(inputs["advantages"]) / self.args.per_device_train_batch_size)
        if count <= 1:
            return super()._compute_loss(model, _trimmed(inputs))
        if self.is_deepspeed_enabled:
            raise errors.ConfigurationError(
                f"a part of batch {self.batch and self.batch.batch_id} has {len(inputs['advantages'])} rows for one "
                "rank, and with DeepSpeed they must be computed at once: raise gradient_accumulation_steps or "
                "per_device_train_batch_size"
            )
        steps, finished = self.current_gradient_accumulation_steps, torch.zeros((), device=self.accelerator.device)
        # TRL divides the loss by `num_items_in_batch * steps`, and terms of other kinds, which are means, by `steps`.
        self.current_gradient_accumulation_steps = steps * count
        inputs = {**inputs, "num_items_in_batch": inputs["num_items_in_batch"] / count}
        try:
            parts = [_trimmed(_part(inputs, index, count)) for index in range(count)]
            for part in parts[:-1]:
                with self.accelerator.no_sync(model):
                    loss = super()._compute_loss(model, part)
                    self.accelerator.backward(loss)
                finished += loss.detach()
            return super()._compute_loss(model, parts[-1]) + finished
        finally:
            self.current_gradient_accumulation_steps = steps

    def _tell(self, batch: Batch, held: list[Row]) -> None:
        """Adds what is known of a batch to TRL's log."""
        metrics = self._metrics["train"]
        if (reward := batch.metrics.get("reward/trained")) is not None:
            metrics["reward"].append(reward)
        for name, value in {**batch.metrics, "rollouts": batch.rollouts, "rows": batch.samples}.items():
            metrics[f"forebay/{name}"].append(float(value))
        lengths = [row.response_length for row in held]
        if lengths:
            metrics["completions/mean_length"].append(sum(lengths) / len(lengths))
            metrics["completions/max_length"].append(float(max(lengths)))
        self.state.num_input_tokens_seen += batch.tokens
        if self.log_completions:
            for row in held:
                first = len(row.tokens) - row.response_length
                self._logs["prompt"].append(self._tokenizer.decode(row.tokens[:first].tolist()))
                self._logs["completion"].append(self._tokenizer.decode(row.tokens[first:].tolist()))
                self._logs["rewards"]["reward"].append(row.reward)
                own = row.advantages
                self._logs["advantages"].append(
                    row.advantage if own is None else float(own[row.loss_mask.bool()].mean())
                )


class RolloutWorker:
    """A rollout worker of TRL's experimental `AsyncGRPOTrainer` which hands over the rows of batches. Experimental.

    Only advantages cross the interface of TRL, not loss weights. TRL spreads a batch over its own steps, so a batch is
    acked when it is handed over, and the policy should have `"settle": "ack"`. Give `AsyncGRPOConfig` a large
    `max_staleness`: TRL would drop samples that are acked. `lease_options` are further arguments of `forebay.Trainer`.
    """

    def __init__(self, policy: str = "default", *, client: Client | None = None, **lease_options: Any) -> None:
        self.policy = policy
        self.client = client or Client()
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(SAMPLES_MAX)
        self.metrics_queue: queue.Queue[Any] = queue.Queue(SAMPLES_MAX)
        self._lease_options = lease_options
        self._model_version = 0
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Resumes, and begins to hand over batches."""
        run = leasing.Trainer(self.policy, client=self.client, **self._lease_options)
        self._stopped.clear()
        self._thread = threading.Thread(target=self._feed, args=[run], name="forebay-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops leasing. A batch that is not yet handed over is delivered again."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """TRL counts its versions from 0. Staleness is the buffer's to decide, so samples have the newest version."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the worker. A buffer that has no batch yet is not a failure."""
        if self._failure is not None:
            raise RuntimeError(f"no batches of {self.policy} can be leased") from self._failure

    def _feed(self, run: leasing.Trainer) -> None:
        try:
            with run:
                status = run.status()
                check_advantages(status, "TRL's AsyncGRPOTrainer")
                step = status.checkpoint_step or 0
                while not self._stopped.is_set():
                    # TRL takes a sample before it needs it, so the next batch is not leased ahead of that as well.
                    batch = run.lease(wait_s=STOP_S) if self.rollout_buffer.empty() else None
                    if batch is None:
                        self._stopped.wait(0.02)
                        continue
                    held = [row for row in rows(batch) if row.is_trained]
                    for row in held:
                        self._check(row)
                    batch.ack(step := step + 1)
                    self._tell(batch)
                    for sample in map(self._sample, held):
                        self._hand_over(sample)
        except BaseException as error:
            log.warning("the rollout worker of %s ends: %s", self.policy, error)
            self._failure = error

    def _check(self, row: Row) -> None:
        """Refuses what TRL cannot use, before the batch is acked."""
        if row.logprobs is None:
            raise errors.ConfigurationError(f"rollout {row.rollout_id} has no log-probabilities")
        one_advantage(row.advantage, "TRL's AsyncGRPOTrainer")

    def _sample(self, row: Row) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        first = len(row.tokens) - row.response_length
        trained = row.loss_mask.bool()
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=row.tokens.long().numpy(),
            completion_mask=torch.cat([torch.zeros(first, dtype=torch.long), row.loss_mask.long()]).numpy(),
            old_log_probs=torch.cat([torch.zeros(first), torch.where(trained, row.logprobs, 0.0)]).numpy(),
            advantage=row.advantage,
            model_version=self._model_version,
            group_id=zlib.crc32(row.group_id.encode()),
            metrics={} if row.reward is None else {"reward": row.reward},
            enqueued_at=time.time(),
        )

    def _hand_over(self, sample: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self.rollout_buffer.put(sample, timeout=STOP_S)
            except queue.Full:
                continue

    def _tell(self, batch: Batch) -> None:
        try:
            self.metrics_queue.put_nowait({f"forebay/{name}": value for name, value in batch.metrics.items()})
        except queue.Full:
            log.debug("nobody reads the metrics of the rollout worker")


class _Lineage(TrainerCallback):
    """The places in the loop where the service is called."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        trainer._run = Trainer(
            trainer.policy, client=trainer.client, last_saved=state.global_step or None, **trainer._lease_options
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The gradients are there and the weights have not moved."""
        batch, self._trainer.batch = self._trainer.batch, None
        assert batch is not None, "a step has a batch"
        batch.ack(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, step = self._trainer, state.global_step
        if trainer._publish is not None and step % trainer._publish_steps == 0:
            uri = trainer._publish(trainer, step)
            trainer.run.publish(step, uri=uri)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        _sync(Path(args.output_dir, f"checkpoint-{state.global_step}"))
        # Every rank writes a part.
        trainer.accelerator.wait_for_everyone()
        trainer.run.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.run.close()


class _Folder:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def __call__(self, trainer: GRPOTrainer, step: int) -> str:
        target, partial = self._folder / f"step-{step:08}", self._folder / f".step-{step:08}"
        # All ranks have a part of weights that are sharded.
        trainer.save_model(str(partial), _internal_call=True)
        if trainer.accelerator.is_main_process:
            _sync(partial)
            if target.exists():
                # The step was published before a resume.
                shutil.rmtree(target)
            partial.rename(target)
            _sync_one(self._folder)
            for old in sorted(self._folder.glob("step-*"))[: -self._keep]:
                shutil.rmtree(old)
        return target.as_uri()


def to_folder(folder: str | os.PathLike[str], *, keep: int = 3) -> Publish:
    """Publishes each version as a folder of `save_pretrained`, with the tokenizer, and keeps the newest `keep` ones.

    A folder appears under its name when it is complete and on disk. Its URI is a `file://` URI.
    """
    if keep < 1:
        raise errors.ConfigurationError("keep must be at least 1")
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return _Folder(path, keep)


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the last checkpoint that was written completely, or None. The trainer's state is written last."""
    found: list[tuple[int, Path]] = []
    for state in Path(folder).glob("checkpoint-*/trainer_state.json"):
        try:
            found.append((json.loads(state.read_text())["global_step"], state.parent))
        except (ValueError, KeyError):
            log.warning("the checkpoint %s is not complete, so it is not used", state.parent)
    return str(max(found)[1]) if found else None


def _check(args: trl.GRPOConfig, publish_steps: int, options: Mapping[str, Any]) -> None:
    """Refuses what would give another loss than that of the batch, or have no effect."""
    faults = {
        f"loss_type must be one of {', '.join(SUMS)}: {args.loss_type!r} has a normalisation of its own, and the "
        "policy's `loss_weighting` already has one": args.loss_type not in SUMS,
        "num_iterations must be 1: a batch is learned from once": args.num_iterations != 1,
        "steps_per_generation must be gradient_accumulation_steps, its default: a batch is one optimizer step": (
            args.steps_per_generation != args.gradient_accumulation_steps
        ),
        "beta must be 0: TRL would compute reference log-probabilities where it generates": args.beta != 0.0,
        "use_adaptive_entropy is not supported: its controller averages over other parts of a batch": (
            args.use_adaptive_entropy
        ),
        "top_entropy_quantile must be 1: it depends on how a batch is divided": args.top_entropy_quantile != 1.0,
        "mask_truncated_completions has no effect here: write a filter that masks such rollouts": (
            args.mask_truncated_completions
        ),
        "use_vllm must be false: agents generate, and publish hands the weights to their engines": args.use_vllm,
        "max_steps must be above 0: a buffer has no epochs": args.max_steps <= 0,
        "publish_steps must be at least 1": publish_steps < 1,
    }
    faults.update({
        f"{name} must not be given: the rows come from the buffer": name in options
        for name in ("train_dataset", "rollout_func", "environment_factory", "tools")
    })  # fmt: skip
    if found := [fault for fault, is_one in faults.items() if is_one]:
        raise errors.ConfigurationError("; ".join(found))
    if args.entropy_coef != 0.0:
        log.warning("entropy_coef: TRL averages the entropy of each part of a batch, whatever the loss weights are")


def _check_rows(held: Sequence[Row], temperature: float) -> None:
    others = sorted({row.temperature for row in held if not math.isclose(row.temperature, temperature, rel_tol=1e-6)})
    if others:
        count = sum(row.temperature in others for row in held)
        raise errors.ConfigurationError(
            f"{count} of {len(held)} rows were sampled at the temperatures {others}, but TRL divides all logits by "
            f"args.temperature = {temperature}"
        )
    lacking = [row.rollout_id for row in held if row.logprobs is None]
    if lacking:
        raise errors.ConfigurationError(
            f"{len(lacking)} of {len(held)} rows have no log-probabilities, first that of rollout {lacking[0]}: write "
            '"require": ["tokens", "logprobs"] in the rules of the policy'
        )


def _check_tokens(held: Sequence[Row], args: trl.GRPOConfig) -> None:
    """Refuses advantages of tokens where TRL would judge a whole sequence by the sign of each."""
    faults = {"loss_type='vespo'": args.loss_type == "vespo"}
    faults["off_policy_mask_threshold"] = args.off_policy_mask_threshold is not None
    if any(row.advantages is not None for row in held) and (found := [name for name in faults if faults[name]]):
        raise errors.ConfigurationError(
            f"{' and '.join(found)}: this judges a sequence by the sign of its advantage, and here each token has its "
            "own"
        )


def _part(inputs: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """One of `count` parts of the rows, whose sizes differ by 1 at most."""
    total = len(inputs["advantages"])
    place = slice(total * index // count, total * (index + 1) // count)
    return {name: value[place] if value.dim() else value for name, value in inputs.items()}


def _trimmed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Leaves out columns that are padding in all rows: TRL pads to the longest row of the whole batch."""
    first = int(inputs["prompt_mask"].any(0).long().argmax())
    last = int(inputs["completion_mask"].any(0).sum())
    ends = ("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "advantages")
    return {
        **inputs,
        **{name: inputs[name][:, first:] for name in ("prompt_ids", "prompt_mask")},
        **{name: inputs[name][:, :last] for name in ends if inputs[name].dim() == 2},
    }


def _sync(folder: Path) -> None:
    """Waits until a folder and all that is in it is on disk."""
    if not folder.exists():
        return  # This rank has no part.
    for place in [folder, *folder.rglob("*")]:
        _sync_one(place)
    _sync_one(folder.parent)


def _sync_one(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """TRL wants a reward function. Rewards come from the buffer."""
    return [0.0] * len(completions)
