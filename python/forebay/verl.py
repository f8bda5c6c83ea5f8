"""verl trains on the batches of a policy through classes that its configuration names, without a change of verl.

`Sampler` leases a batch and acks it in place of verl's replay buffer, `NoAgentLoop` generates nothing, `NoPrompts` is
the data set of the prompts that nobody reads, `Checkpoints` reports checkpoints, and the advantage estimator `forebay`
uses the advantages and weights of the batch. `docs/python-verl.md` of the repository has the command.

All of them live in the driver process of verl's trainer.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from . import errors
from ._early import (
    MAX_ATTEMPTS,
    client_of,
    demand,
    is_trained,
    masked,
    policy_of,
    response_mask,
    take,
)
from ._wire import Sample
from .batch import Batch
from .trainer import Trainer

log = logging.getLogger("forebay")

ESTIMATOR = "forebay"
"""The name of the advantage estimator."""

LOSS_MODES = ("vanilla", "cispo", "gspo", "gpg")
"""Losses of verl that are proportional to the advantage, so that the weight of a row can be part of it."""

PROMPTS = 1_000_000
"""Length of the data set. verl divides it by the batch size to count the steps of an epoch."""


class Sampler:
    """The `trainer.v1.sampler.custom_sampler`: each call of `sample` leases a batch, acks it, and returns its rows."""

    def __init__(
        self,
        trainer_mode: str = "sync",
        trainer_config: Any = None,
        max_off_policy_threshold: int | None = None,
        max_off_policy_strategy: str = "drop",
        sampler_kwargs: Mapping[str, Any] | None = None,
        refill_fn: Any = None,
        **_: Any,
    ) -> None:
        given = dict(sampler_kwargs or {})
        self._policy = policy_of(given.pop("forebay_policy", None))
        self._client = client_of(given.pop("forebay_url", None), given.pop("forebay_key_file", None))
        self._consumer: str | None = given.pop("forebay_consumer", None)
        self._max_attempts = int(given.pop("forebay_max_attempts", MAX_ATTEMPTS))
        self._publish = bool(given.pop("forebay_publish", True))
        if given:
            raise errors.ConfigurationError(
                f"trainer.v1.sampler.sampler_kwargs has the unknown key {sorted(given)[0]}; the keys are forebay_url, "
                "forebay_policy, forebay_key_file, forebay_consumer, forebay_max_attempts and forebay_publish"
            )
        # verl gives samplers no configuration, but a method of the trainer that has it.
        trainer: Any = getattr(refill_fn, "__self__", None)
        self._config: Any = getattr(trainer, "config", None)
        self._trainer: Trainer | None = None
        self._published_step: int | None = None
        self._unconfirmed: int | None = None
        register()
        _check_config(self._config)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """Returns the rows of the next batch as the keys under which they are in the TransferQueue, and its metrics.

        `batch_size` is not used: the rules of the policy say how many groups a batch has.
        """
        if partition_id != "train":
            raise errors.ConfigurationError(
                "forebay.verl.Sampler has no data for validation: set trainer.val_before_train=False and "
                "trainer.test_freq=-1"
            )
        run = self._trainer or self._resume(global_steps - 1)
        if self._publish and global_steps > 1 and global_steps - 1 > (self._published_step or 0):
            # verl pushes the weights of a step to its replicas at the end of the step.
            run.publish(global_steps - 1, uri=f"verl:global_steps={global_steps - 1}")
            self._published_step = global_steps - 1

        def build(batch: Batch, rows: list[Sample]) -> tuple[Batch, list[Sample]]:
            trained = [row for row in rows if is_trained(row)]
            _check_rows(self._config, trained)
            return batch, trained

        while True:
            batch, rows = take(run, global_steps, build)
            if rows:
                break
            log.warning("batch %s has no trained token, so the next one is leased", batch.batch_id)
        metrics = {f"forebay/{name}": value for name, value in batch.metrics.items()}
        metrics["forebay/rollouts"] = float(batch.rollouts)
        return _put(batch, rows, global_steps, partition_id), metrics

    def saved(self, step: int, *, is_complete: bool) -> None:
        """Reports a checkpoint. While one is still being written, the one before is reported."""
        if self._trainer is None:
            raise errors.ConfigurationError(f"step {step} was saved before a batch was sampled")
        if is_complete:
            self._trainer.saved(step)
            self._unconfirmed = None
            return
        if self._unconfirmed is not None:
            self._trainer.saved(self._unconfirmed)
        self._unconfirmed = step

    def _resume(self, saved: int) -> Trainer:
        """verl counts from step 1, and has no hook for a start: the first call tells which checkpoint it loaded."""
        self._trainer = Trainer(
            self._policy,
            last_saved=saved if saved > 0 else None,
            client=self._client,
            consumer=self._consumer,
            max_attempts=self._max_attempts,
        )
        status = self._trainer.status()
        self._published_step = status.version_step
        # A queue that verl has restored holds rows of batches that the resume brings back.
        queue = _queue()
        held: dict[str, dict[str, Any]] = queue.kv_list("train") or {}
        left = list(held.get("train", {}))
        if left:
            queue.kv_clear(keys=left, partition_id="train")
        return self._trainer


class NoAgentLoop:
    """The `agent_loop_manager_class`: takes the prompts that verl hands out, and generates nothing."""

    @classmethod
    def create(cls, *_: Any, **__: Any) -> NoAgentLoop:
        return cls()

    def generate_sequences(self, prompts: Any) -> None:
        """Forgets the prompts, which verl has registered in the TransferQueue."""
        keys = [str(uid) for uid in prompts["uid"]]
        _queue().kv_clear(keys=keys, partition_id="train")


class Checkpoints:
    """The `trainer.checkpoint_callback_class`: reports each checkpoint to the service."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        """Reports the checkpoint, or, while it is still being written, the one before."""
        sampler = trainer.replay_buffer
        if not isinstance(sampler, Sampler):
            raise errors.ConfigurationError(
                "forebay.verl.Checkpoints needs forebay.verl.Sampler: set trainer.v1.sampler.custom_sampler.path="
                "pkg://forebay.verl and trainer.v1.sampler.custom_sampler.name=Sampler"
            )
        sampler.saved(global_step, is_complete=not async_save)


def register() -> None:
    """Makes the advantage estimator known to verl. A repeat changes nothing."""
    algorithms: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    algorithms.register_adv_est(ESTIMATOR)(advantages)


def advantages(token_level_rewards: Any, response_mask: Any, **_: Any) -> tuple[Any, Any]:
    """The advantage estimator: the reward of a token is its advantage, which `Sampler` has multiplied by the weight of
    its row."""
    found = token_level_rewards * response_mask
    return found, found


def __getattr__(name: str) -> Any:
    """Makes `NoPrompts` when it is asked for. Its base class is in torch, which only the driver needs here."""
    if name != "NoPrompts":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    torch_data: Any = importlib.import_module("torch.utils.data")

    def length(self: Any) -> int:
        return PROMPTS

    def item(self: Any, index: int) -> dict[str, Any]:
        return {"raw_prompt": [{"role": "user", "content": ""}], "index": index}

    def init(self: Any, **_: Any) -> None:
        """verl gives files and a tokenizer."""

    members = {"__doc__": "The `data.custom_cls`: prompts that nobody reads, because agents have their own."}
    made = type(
        "NoPrompts", (torch_data.Dataset,), {**members, "__init__": init, "__len__": length, "__getitem__": item}
    )
    globals()[name] = made
    return made


def fields_of(row: Sample, key: tuple[str, int]) -> dict[str, Any]:
    """What verl's own agent loops store for a row. `key` is the uid of the group and the number of the rollout."""
    torch: Any = importlib.import_module("torch")
    tokens, mask = row.tokens or [], response_mask(row)
    prompt = len(tokens) - len(mask)
    ids = torch.tensor(tokens, dtype=torch.int64)
    loss_mask = torch.tensor(mask, dtype=torch.int64)
    # verl sums the losses of all tokens, so the weight of the row is part of its advantages.
    advantages = [row.advantage or 0.0] * len(mask) if row.advantages is None else row.advantages
    scores = torch.tensor(masked(advantages, mask), dtype=torch.float32) * row.loss_weight
    fields = {
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "response_mask": loss_mask,
        "loss_mask": loss_mask.clone(),
        "input_ids": ids,
        "position_ids": torch.arange(len(tokens), dtype=torch.int64),
        "rm_scores": scores,
        "num_turns": row.segments,
        "uid": key[0],
        "session_id": key[1],
        "data_source": row.environment or "forebay",
        "multi_modal_inputs": {},
        "extra_fields": {"rollout_id": row.rollout_id, "group_id": row.group_id, "reward": row.reward},
    }
    if row.logprobs is not None:
        fields["rollout_log_probs"] = torch.tensor(masked(row.logprobs, mask), dtype=torch.float32)
    return fields


def _put(batch: Batch, rows: Sequence[Sample], global_steps: int, partition_id: str) -> Any:
    """Stores the rows as verl's agent loops do: under `{uid}_{number of the rollout}_{number of the segment}`."""
    tensors: Any = importlib.import_module("verl.utils.tensordict_utils")
    queue = _queue()
    # Ids of groups and rollouts may have underscores, which verl splits keys at, so places stand for them.
    groups: dict[str, dict[str, int]] = {}
    keys: list[str] = []
    fields: list[dict[str, Any]] = []
    tags: list[dict[str, Any]] = []
    has_logprobs = all(row.logprobs is not None for row in rows)
    for row in rows:
        rollouts = groups.setdefault(row.group_id, {})
        uid = f"{batch.batch_id}-{list(groups).index(row.group_id)}"
        session = rollouts.setdefault(row.rollout_id, len(rollouts))
        keys.append(f"{uid}_{session}_{row.segment}")
        found = fields_of(row, (uid, session))
        if not has_logprobs:
            found.pop("rollout_log_probs", None)
        fields.append(found)
        tags.append(_tag(batch, row, global_steps))
    queue.kv_batch_put(
        keys=keys, partition_id=partition_id, fields=tensors.list_of_dict_to_tensordict(fields), tags=tags
    )
    return queue.KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags)


def _tag(batch: Batch, row: Sample, global_steps: int) -> dict[str, Any]:
    """verl's versions are its steps, so a version is told by its distance from the current one."""
    versions = [int(version) for version, *_ in row.versions or ()] or [row.policy_version or 0]
    current = batch.policy_version.current

    def step_of(version: int) -> int:
        return global_steps - 1 - max(0, current - version)

    prompt = len(row.tokens or ()) - row.response_length
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": row.response_length,
        "seq_len": prompt + row.response_length,
        "global_steps": global_steps,
        "min_global_steps": step_of(min(versions)),
        "max_global_steps": step_of(max(versions)),
    }


def _queue() -> Any:
    return importlib.import_module("transfer_queue")


def _selected(config: Any, path: str, default: Any) -> Any:
    for name in path.split("."):
        if config is None:
            return default
        config = config.get(name, None)
    return default if config is None else config


def _check_config(config: Any) -> None:
    """Refuses settings under which verl's loss would not be that of the batch."""
    if config is None:
        log.warning("verl's configuration is not known here, so it is not checked: see docs/frameworks.md")
        return
    actor = "actor_rollout_ref.actor"
    wanted = {
        "algorithm.adv_estimator": (ESTIMATOR, "it uses the advantages and weights of the batch"),
        f"{actor}.loss_agg_mode": ("token-sum", "the weights of the rows are the whole normalisation"),
        f"{actor}.ppo_epochs": (1, "each batch is one optimizer step"),
        f"{actor}.use_kl_loss": (False, "its KL would be summed over tokens without their weights"),
        f"{actor}.entropy_coeff": (0, "the entropy would be summed over tokens without their weights"),
        "algorithm.use_kl_in_reward": (False, "it would change the advantages of the batch"),
        "trainer.critic_warmup": (0, "steps without an update would still be acked"),
    }
    for path, (value, why) in wanted.items():
        found = _selected(config, path, value)
        if found != value:
            raise errors.ConfigurationError(f"{path} is {found}, and forebay.verl needs {value}: {why}")
    mode = _selected(config, f"{actor}.policy_loss.loss_mode", "vanilla")
    if mode not in LOSS_MODES:
        raise errors.ConfigurationError(
            f"{actor}.policy_loss.loss_mode is {mode}, and the weights of rows can only be part of "
            f"{', '.join(LOSS_MODES)}: their losses are proportional to the advantage"
        )


def _check_rows(config: Any, rows: Sequence[Sample]) -> None:
    """Refuses rows that verl would train wrongly, before they are acked."""
    if config is None or not rows:
        return
    if _selected(config, "algorithm.rollout_correction.bypass_mode", False):
        demand(rows, "logprobs", "algorithm.rollout_correction.bypass_mode uses them")
    divisor = float(_selected(config, "actor_rollout_ref.rollout.temperature", 1.0))
    for row in rows:
        if abs(row.temperature - divisor) > 1e-6 * divisor:
            raise errors.ConfigurationError(
                f"rollout {row.rollout_id} was sampled at temperature {row.temperature:g}, and verl divides all logits "
                f"by {divisor:g}: set actor_rollout_ref.rollout.temperature to the temperature of the agents"
            )
    count = int(_selected(config, "actor_rollout_ref.rollout.n", 1))
    most = int(_selected(config, "actor_rollout_ref.actor.ppo_mini_batch_size", len(rows))) * count
    if len(rows) > most:
        raise errors.ConfigurationError(
            f"the batch has {len(rows)} rows with a trained token, and verl makes several optimizer steps of more than "
            f"actor_rollout_ref.actor.ppo_mini_batch_size * actor_rollout_ref.rollout.n = {most}: raise it to at "
            f"least {-(-len(rows) // count)}"
        )
