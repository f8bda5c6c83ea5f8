"""verl's own trainer, padding, estimator and loss on the rows that `forebay.verl` hands over.

There are no workers and no Ray: the TransferQueue is one in memory, and the model is a formula.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import contract
import hydra
import pytest
import tomllib
import torch
import transfer_queue
import verl
import verl.trainer.ppo.padding_utils as padding_utils
import verl.trainer.ppo.v1.trainer_base as trainer_base
from conftest import Difference
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import create_rl_dataset, need_critic, need_reference_policy
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

import forebay
import forebay.verl
from forebay import errors
from forebay._wire import Sampling

REPOSITORY = Path(__file__).resolve().parents[3]


class Queue:
    """The TransferQueue's functions that are used here, in memory."""

    KVBatchMeta = transfer_queue.KVBatchMeta

    def __init__(self) -> None:
        self.partitions: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {}

    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> Any:
        partition = self.partitions.setdefault(partition_id, {})
        assert fields is None or list(fields.batch_size) == [len(keys)]
        for place, key in enumerate(keys):
            values, tag = partition.setdefault(key, ({}, {}))
            for name, value in () if fields is None else fields.items():
                values[name] = element(value, place)
            tag.update(tags[place] if tags else {})
        return self.KVBatchMeta(partition_id=partition_id, keys=keys, tags=[partition[key][1] for key in keys])

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        rows = [self.partitions[partition_id][key][0] for key in keys]
        names = [name for name in rows[0] if select_fields is None or name in select_fields]
        return list_of_dict_to_tensordict([{name: row[name] for name in names} for row in rows])

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        return {
            name: {key: tag for key, (_, tag) in partition.items()}
            for name, partition in self.partitions.items()
            if partition_id in (None, name)
        }

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.partitions.get(partition_id, {}).pop(key, None)


def element(column: Any, place: int) -> Any:
    """A row of a column of a TensorDict."""
    if isinstance(column, torch.Tensor):
        return column.unbind()[place] if column.is_nested else column[place]
    found = column[place]
    return found.data if isinstance(found, NonTensorData | NonTensorStack) else found


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)  # type: ignore[arg-type]
    monkeypatch.setattr(trainer_base, "tq", queue)
    monkeypatch.setattr(padding_utils, "tq", queue)
    return queue


def documented_overrides() -> list[str]:
    """The settings of the command in docs/python-verl.md."""
    text = (REPOSITORY / "docs" / "python-verl.md").read_text()
    (command,) = re.findall(r"^python -m verl\.trainer\.main_ppo (.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return shlex.split(command.replace("\\\n", " "))


def test_the_documented_settings_are_those_that_are_read() -> None:
    text = (REPOSITORY / "docs" / "frameworks.md").read_text()
    (table,) = re.findall(r"^## Settings of slime and verl$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    keys = set(re.findall(r"^\| `(\w+)` \|[^|]*\|(?! only slime)[^|]*\|$", table, re.MULTILINE))
    assert keys == set(re.findall(r'"(forebay_\w+)"', (REPOSITORY / "python/forebay/verl.py").read_text()))


@pytest.fixture
def configure(fb: forebay.Client, policy: str) -> Callable[..., Any]:
    """verl's configuration, as the documented command and further settings make it."""

    def make(*more: str) -> Any:
        folder = str(Path(verl.__file__).parent / "trainer" / "config")
        here = [
            f"++trainer.v1.sampler.sampler_kwargs.forebay_url={fb.url}",
            f"++trainer.v1.sampler.sampler_kwargs.forebay_policy={policy}",
        ]
        with hydra.initialize_config_dir(folder, version_base=None):
            return hydra.compose("ppo_trainer", overrides=[*documented_overrides(), *here, *more])

    return make


class Workers:
    """The worker group of the actor: it computes verl's loss of a batch, with a formula in place of the model."""

    def __init__(self, config: Any, queue: Queue, dp_size: int) -> None:
        self._dispatch_info = {"actor": list(range(dp_size))}
        self._config, self._queue = config, queue
        self.losses: list[float] = []

    def update_actor(self, batch: Any) -> Any:
        actor = omega_conf_to_dataclass(self._config.actor_rollout_ref.actor)
        size = batch.extra_info["mini_batch_size"]
        assert len(batch.keys) == size and batch.extra_info["epochs"] == 1, "one batch is one optimizer step"
        fields = ["responses", "response_mask", "old_log_probs", "advantages"]
        loss = 0.0
        dp_size = len(self._dispatch_info["actor"])
        for rank in range(dp_size):
            keys = batch.keys[rank * size // dp_size : (rank + 1) * size // dp_size]
            data = self._queue.kv_batch_get(keys, batch.partition_id, fields).to_padded_tensor()
            actor.global_batch_info.update(dp_size=dp_size, batch_num_tokens=1, global_batch_size=size)
            of_rank, _ = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)(
                old_log_prob=data["old_log_probs"],
                log_prob=logprobs(data["responses"], data["old_log_probs"]),
                advantages=data["advantages"],
                response_mask=data["response_mask"].to(bool),
                loss_agg_mode=actor.loss_agg_mode,
                config=actor,
            )
            # FSDP and DDP average the gradients of the ranks.
            loss += float(of_rank) / dp_size
        self.losses.append(loss)
        return {"metrics": {"mfu": [0.0]}}


def logprobs(responses: Any, old: Any) -> Any:
    """The log-probabilities of the model: far enough from the old ones that the ratio is clipped for some tokens."""
    return old + 0.4 * torch.cos(responses.to(torch.float64)).to(old.dtype)


class Trainer(PPOTrainerSync):
    """verl's trainer without the parts that need GPUs."""

    def __init__(self, config: Any, queue: Queue, dp_size: int = 2) -> None:
        super().__init__(config)
        self.actor_rollout_wg = Workers(config, queue, dp_size)
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.tokenizer = SimpleNamespace(eos_token_id=0)
        self.agent_loop_manager = load_class_from_fqn(
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
        ).create(config=config)
        self.train_dataloader_it = None
        self.global_steps = 0

    def on_sample_end(self) -> None:
        """There are no replicas that could sleep."""

    def run_step(self) -> dict[str, Any]:
        self.global_steps += 1
        metrics: dict[str, Any] = {}
        batch = self._step_once(metrics, {}, self.config.data.train_batch_size)
        trainer_base.tq.kv_clear(keys=batch.keys, partition_id="train")
        return metrics


def expected_loss(rows: list[Any]) -> contract.Rows:
    """The clipped loss of each token as the service defines it."""
    losses = []
    for row in rows:
        old = torch.tensor(row.logprobs, dtype=torch.float64)
        ratio = (logprobs(torch.tensor(row.tokens[-row.response_length :]), old) - old).exp()
        advantage = row.advantage if row.advantages is None else torch.tensor(row.advantages, dtype=torch.float64)
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
        losses.append([float(one) if bit else 0.0 for one, bit in zip(loss, row.loss_mask, strict=True)])
    return contract.Rows(rows, losses, 0)


def post_groups(fb: forebay.Client, policy: str, count: int, *, first: int = 0, **fields: Any) -> None:
    """Groups of four rollouts with underscores in their ids, of which the last has two segments."""
    dice = random.Random(first)

    def segment() -> forebay.Segment:
        mask = [int(dice.random() < 0.7) for _ in range(dice.randint(1, 9))] + [1]
        return forebay.Segment(
            tokens=[dice.randrange(1, 100) for _ in range(dice.randint(1, 5) + len(mask))],
            loss_mask=mask,
            logprobs=[-dice.random() if bit else -9999.0 for bit in mask],
        )

    for task in range(first, first + count):
        fb.post(
            [
                forebay.Trajectory(
                    policy=policy,
                    rollout_id=f"task_{task}_{place}",
                    group_id=f"task_{task}",
                    reward=float(place % 3),
                    policy_version=0,
                    segments=[segment() for _ in range(2 if place == 3 else 1)],
                    **fields,
                )
                for place in range(4)
            ]
        )


RULES = {"require": ["tokens", "logprobs"], "group": {"size": 4}, "batch": {"groups": 2}}


@pytest.mark.parametrize("weighting", contract.WEIGHTINGS)
@pytest.mark.parametrize("advantage", ["grpo", {"kind": "turn_return", "gamma": 0.9}], ids=["row", "token"])
def test_the_loss_of_verl_is_that_of_the_batch(
    weighting: str,
    advantage: Any,
    queue: Queue,
    configure: Callable[..., Any],
    fb: forebay.Client,
    policy: str,
    difference: Difference,
) -> None:
    constant = {"loss_constant": contract.LOSS_CONSTANT} if weighting == "constant" else {}
    fb.put_policy(policy, {**RULES, "loss_weighting": weighting, "advantage": advantage, **constant})
    post_groups(fb, policy, 10)
    trainer = Trainer(configure("actor_rollout_ref.actor.ppo_mini_batch_size=16"), queue)
    worst = 0.0
    for step in range(1, 6):
        metrics = trainer.run_step()
        (batch,) = [batch for batch in fb.list_batches(policy) if batch.step == step]
        expected = expected_loss(fb.samples(batch.batch_id))
        worst = max(worst, abs(trainer.actor_rollout_wg.losses[-1] - expected.loss()) / expected.size())
        assert metrics["forebay/rollouts"] == 8
        assert metrics["forebay/reward/trained"] == pytest.approx(0.75)
    difference("loss", worst, 1e-6)
    assert queue.partitions["train"] == {}, "verl leaves rows in the queue"


def test_the_documented_command_is_a_configuration_of_verl(configure: Callable[..., Any], queue: Queue) -> None:
    config = configure()
    validate_config(config, need_reference_policy(config), need_critic(config))
    trainer = Trainer(config, queue)
    assert type(trainer.replay_buffer) is forebay.verl.Sampler
    assert type(trainer.checkpoint_callback) is forebay.verl.Checkpoints
    assert type(trainer.agent_loop_manager) is forebay.verl.NoAgentLoop
    assert core_algos.get_adv_estimator_fn(config.algorithm.adv_estimator) is forebay.verl.advantages
    dataset = create_rl_dataset(config.data.train_files, config.data, None, None)
    assert type(dataset) is forebay.verl.NoPrompts and len(dataset) // config.data.train_batch_size > 500


def test_prompts_are_taken_and_forgotten(configure: Callable[..., Any], queue: Queue) -> None:
    config = configure()
    trainer = Trainer(config, queue)
    dataset = create_rl_dataset(config.data.train_files, config.data, None, None)
    trainer.train_dataloader = torch.utils.data.DataLoader(
        dataset, batch_size=config.data.train_batch_size, collate_fn=trainer_base.collate_fn
    )
    trainer.prepare_step()
    assert queue.partitions["train"] == {}


def test_rows_are_stored_as_verls_agent_loops_store_them(
    configure: Callable[..., Any], queue: Queue, fb: forebay.Client, policy: str
) -> None:
    fb.put_policy(policy, RULES)
    post_groups(fb, policy, 2)
    trainer = Trainer(configure(), queue)
    # Five versions were published before; the rollouts are of the first.
    for version in range(1, 6):
        fb.publish(policy, version)
    meta, _ = trainer.replay_buffer.sample(global_steps=7, partition_id="train", batch_size=1)
    assert len(meta.keys) == len(set(meta.keys)) == 10
    sessions = {tuple(key.rsplit("_", 2)[:2]) for key in meta.keys}
    assert len(sessions) == 8 and all(key.count("_") == 2 for key in meta.keys)
    data = queue.kv_batch_get(meta.keys, "train")
    for place, tag in enumerate(meta.tags):
        row = {name: element(value, place) for name, value in data.items()}
        assert row["input_ids"].tolist() == row["prompts"].tolist() + row["responses"].tolist()
        assert row["position_ids"].tolist() == list(range(len(row["input_ids"])))
        assert (tag["prompt_len"], tag["response_len"]) == (len(row["prompts"]), len(row["responses"]))
        assert len(row["responses"]) == len(row["response_mask"]) == len(row["rollout_log_probs"])
        assert row["rollout_log_probs"].min() >= -1
        # Step 7 is trained with weights of step 6, and the rollout is behind by the published versions.
        status = fb.get_policy(policy)
        assert status is not None
        assert (tag["global_steps"], tag["min_global_steps"]) == (7, 6 - status.version)


def test_a_crash_brings_back_what_the_saved_weights_have_not_learned(
    configure: Callable[..., Any], queue: Queue, fb: forebay.Client, policy: str
) -> None:
    fb.put_policy(policy, RULES)
    post_groups(fb, policy, 10)
    trainer = Trainer(configure("actor_rollout_ref.actor.ppo_mini_batch_size=16"), queue)
    losses = []
    for _ in range(4):
        trainer.run_step()
        losses.append(trainer.actor_rollout_wg.losses[-1])
        if trainer.global_steps == 2:
            trainer.checkpoint_callback.on_save(trainer=trainer, global_step=2, checkpoint_dir="", async_save=False)
    # The driver ends here, with rows in the queue, and starts again from the checkpoint of step 2.
    queue.kv_batch_put(["left_0_0"], "train", tags=[{}])
    trainer = Trainer(configure("actor_rollout_ref.actor.ppo_mini_batch_size=16"), queue)
    trainer.global_steps = 2
    for _ in range(3):
        trainer.run_step()
    assert trainer.actor_rollout_wg.losses[:2] == pytest.approx(losses[2:])
    assert queue.partitions["train"] == {}
    assert sorted(batch.step or 0 for batch in fb.list_batches(policy)) == [1, 2, 3, 4, 5]
    status = fb.get_policy(policy)
    assert status is not None
    assert (status.checkpoint_step, status.version_step, status.version_uri) == (2, 4, "verl:global_steps=4")


def test_a_checkpoint_that_is_still_being_written_is_not_reported(
    configure: Callable[..., Any], queue: Queue, fb: forebay.Client, policy: str
) -> None:
    fb.put_policy(policy, RULES)
    post_groups(fb, policy, 6)
    trainer = Trainer(configure("actor_rollout_ref.actor.ppo_mini_batch_size=16"), queue)
    reported = []
    for step in range(1, 4):
        trainer.run_step()
        trainer.checkpoint_callback.on_save(trainer=trainer, global_step=step, checkpoint_dir="", async_save=True)
        status = fb.get_policy(policy)
        assert status is not None
        reported.append(status.checkpoint_step)
    assert reported == [None, 1, 2]


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "algorithm.use_kl_in_reward=True",
        "trainer.critic_warmup=5",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
        "+trainer.v1.sampler.sampler_kwargs.forebay_polcy=x",
    ],
)
def test_settings_that_would_change_the_loss_are_refused(
    setting: str, configure: Callable[..., Any], queue: Queue
) -> None:
    with pytest.raises(errors.ConfigurationError, match=re.escape(setting.split("=")[0].split(".")[-1])):
        Trainer(configure(setting), queue)


@pytest.mark.parametrize(
    ("setting", "fields", "message"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", {}, "raise it to at least 10"),
        ("actor_rollout_ref.rollout.temperature=0.5", {}, "temperature 1"),
        ("actor_rollout_ref.rollout.n=1", {"sampling": Sampling(temperature=0.7)}, "temperature 0.7"),
    ],
)
def test_rows_that_verl_would_train_wrongly_are_not_acked(
    setting: str,
    fields: dict[str, Any],
    message: str,
    configure: Callable[..., Any],
    queue: Queue,
    fb: forebay.Client,
    policy: str,
) -> None:
    fb.put_policy(policy, RULES)
    post_groups(fb, policy, 2, **fields)
    trainer = Trainer(configure(setting), queue)
    with pytest.raises(errors.ConfigurationError, match=message):
        trainer.run_step()
    assert [batch.state for batch in fb.list_batches(policy)] == ["leased"]


def test_validation_is_refused(configure: Callable[..., Any], queue: Queue, fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, RULES)
    post_groups(fb, policy, 2)
    sampler = Trainer(configure(), queue).replay_buffer
    with pytest.raises(errors.ConfigurationError, match=r"trainer\.test_freq=-1"):
        sampler.sample(global_steps=1, partition_id="val", batch_size=1)


# The plugin, which verl imports in every process.


def python(code: str, folder: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY / 'python'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_verl_registers_the_estimator_by_the_entry_point_of_the_package(tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    information = tmp_path / "forebay-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: forebay\nVersion: 0.1.0\n")
    lines = [f"{name} = {target}" for name, target in project["entry-points"]["verl.plugins"].items()]
    (information / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines]))
    shown = (
        "import verl; from verl.trainer.ppo import core_algos; print('forebay' in core_algos.ADV_ESTIMATOR_REGISTRY)"
    )
    assert python(shown, tmp_path).splitlines()[-1] == "True"


@pytest.mark.parametrize("broken", ["", "raise RuntimeError('another version of verl')"])
def test_the_plugin_never_raises(broken: str, tmp_path: Path) -> None:
    folder = tmp_path / "verl" / "trainer" / "ppo"
    folder.mkdir(parents=True)
    for package in (tmp_path / "verl", tmp_path / "verl" / "trainer", folder):
        (package / "__init__.py").touch()
    (folder / "core_algos.py").write_text(broken)
    assert python("import forebay._verl_plugin; print('imported')", tmp_path) == "imported"


def test_the_plugin_imports_neither_torch_nor_the_client_of_others(tmp_path: Path) -> None:
    """In a process that does not use Forebay it should cost nothing but verl's own algorithms."""
    code = (
        "import sys, forebay.verl; print(sorted(set(sys.modules) & {'torch', 'tensordict', 'transfer_queue', 'verl'}))"
    )
    assert python(code, tmp_path) == "[]"
