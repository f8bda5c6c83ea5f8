"""Training with TRL on the CPU, from the service to the weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Difference
from datasets import Dataset
from faults import wait_for
from transformers import TrainerCallback

import forebay
import forebay.torch
import forebay.trl
from forebay import errors


def trainer(fb: forebay.Client, policy: str, folder: Path, steps: int, **options: Any) -> forebay.trl.GRPOTrainer:
    given = options.pop("config", {})
    return forebay.trl.GRPOTrainer(
        tiny.model(), tiny.config(folder, steps, **given), policy=policy, client=fb,
        processing_class=tiny.tokenizer(), **options,
    )  # fmt: skip


def expected_loss(model: Any, batch: forebay.Batch, epsilon: float = 0.2) -> torch.Tensor:
    """The weighted sum of the contract, row by row, without anything of TRL."""
    total = torch.zeros(())
    for row in forebay.torch.rows(batch):
        tokens, length = row.tokens.long(), row.response_length
        logits = model(tokens[None]).logits[0, -length - 1 : -1].float()
        logp = logits.log_softmax(1).gather(1, tokens[-length:, None]).squeeze(1)
        trained = row.loss_mask.bool()
        assert row.logprobs is not None
        ratio = (logp[trained] - row.logprobs[trained]).exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        advantage = row.advantage if row.advantages is None else row.advantages[trained]
        total = total - row.loss_weight * torch.min(ratio * advantage, clipped * advantage).sum()
    return total


class Compare(TrainerCallback):
    """Compares the gradients of each step with those of the expected loss, at the weights of this moment."""

    def __init__(self) -> None:
        self.trainer: forebay.trl.GRPOTrainer | None = None
        self.apart: list[float] = []
        self.expected: list[float] = []
        self.states: list[str] = []
        self._batch: forebay.Batch | None = None

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        self._batch = self.trainer.batch

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert self._batch is not None
        self.states.append(self._batch.ended or "leased")
        found = {name: one.grad.clone() for name, one in model.named_parameters()}
        copy = tiny.model()
        copy.load_state_dict(model.state_dict())
        loss = expected_loss(copy, self._batch)
        loss.backward()
        self.expected.append(loss.item())
        for name, one in copy.named_parameters():
            assert one.grad is not None and found[name].abs().max() > 0
            self.apart.append(float((found[name] - one.grad).abs().max()))


@pytest.mark.parametrize("weighting", ["turn_mean", "rollout_mean", "token_mean"])
@pytest.mark.parametrize("rows_at_once", [2, 100])
@pytest.mark.parametrize("advantage", ["grpo", {"kind": "turn_return", "gamma": 0.9}], ids=["row", "token"])
def test_gradients_are_those_of_the_weighted_sum_at_every_step(
    fb: forebay.Client, policy: str, tmp_path: Path, weighting: str, rows_at_once: int, advantage: Any,
    difference: Difference,
) -> None:  # fmt: skip
    tiny.post(fb, policy, 6, weighting, advantage=advantage)
    compare = Compare()
    run = trainer(
        fb, policy, tmp_path, 3, callbacks=[compare],
        config={"max_grad_norm": 0.0, "per_device_train_batch_size": rows_at_once},
    )  # fmt: skip
    compare.trainer = run
    run.train()
    assert compare.states == ["acked"] * 3
    difference("gradients", max(compare.apart), 2e-6)
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    difference("logged loss", max(abs(a - b) for a, b in zip(logged, compare.expected, strict=True)), 2e-6)
    assert [(batch.state, batch.step) for batch in fb.list_batches(policy)] == [
        ("checkpointed", 1), ("checkpointed", 2), ("checkpointed", 3),
    ]  # fmt: skip
    rewards = [entry["reward"] for entry in run.state.log_history if "loss" in entry]
    assert rewards == [batch.metrics["reward/trained"] for batch in fb.list_batches(policy)]


def process(*arguments: object, **environment: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(forebay.__file__).parents[1]), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, str(Path(tiny.__file__)), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **environment},
    )


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / f"checkpoint-{step}" / "model.safetensors")


def trained(fb: forebay.Client, policy: str) -> list[tuple[int | None, str]]:
    return sorted((story.step, story.rollout_id) for story in fb.list_trajectories(policy, state="checkpointed"))


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_kill_between_ack_and_update_changes_nothing(
    server: forebay.Server, fb: forebay.Client, policy: str, tmp_path: Path, difference: Difference
) -> None:
    outcome: dict[str, tuple[dict[str, torch.Tensor], Any]] = {}
    for name, kills in (("calm", []), ("killed", [4, 5])):
        tiny.post(fb, f"{policy}-{name}", 12)
        for kill_at in kills:
            assert process(server.url, f"{policy}-{name}", tmp_path / name, 6, kill_at).wait() == -signal.SIGKILL
            # The step was acked, and the last checkpoint does not have it.
            last = list(fb.list_batches(f"{policy}-{name}"))[-1]
            assert (last.state, last.step) == ("trained", kill_at)
        assert process(server.url, f"{policy}-{name}", tmp_path / name, 6).wait() == 0
        outcome[name] = weights(tmp_path / name, 6), trained(fb, f"{policy}-{name}")
    assert outcome["calm"][1] == outcome["killed"][1] and len(outcome["calm"][1]) == 24
    difference("weights after two kills", apart(outcome["calm"][0], outcome["killed"][0]), 1e-6)
    assert apart(outcome["calm"][0], weights(tmp_path / "calm", 2)) > 1e-3, "it learns"
    statuses = [fb.get_policy(f"{policy}-{name}") for name in outcome]
    assert [(status.version, status.checkpoint_step) for status in statuses if status] == [(6, 6)] * 2
    published = sorted(path.name for path in (tmp_path / "killed/versions").iterdir())
    assert published == ["step-00000004", "step-00000005", "step-00000006"]
    assert statuses[1] and statuses[1].version_uri == (tmp_path / "killed/versions/step-00000006").as_uri()


def test_two_ranks_train_as_one_does(
    server: forebay.Server, fb: forebay.Client, policy: str, tmp_path: Path, difference: Difference
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for world in (1, 2):
        name = f"{policy}-{world}"
        tiny.post(fb, name, 4)
        port = 27_400 + os.getpid() % 1_000
        ranks = [
            process(
                server.url, name, tmp_path / name, 2,
                **({} if world == 1 else {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
                }),
            )
            for rank in range(world)
        ]  # fmt: skip
        assert [rank.wait() for rank in ranks] == [0] * world
        found.append(weights(tmp_path / name, 2))
        assert [(batch.step, batch.attempt) for batch in fb.list_batches(name)] == [(1, 1), (2, 1)]
    difference("weights of 2 ranks and of 1", apart(*found), 1e-5)


def test_a_lost_lease_ends_the_training_and_leaves_the_weights(fb: forebay.Client, policy: str, tmp_path: Path) -> None:
    tiny.post(fb, policy, 4)

    class GiveBack(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                assert run.batch is not None and run.batch.descriptor.lease is not None
                fb.nack(run.batch.batch_id, lease=run.batch.descriptor.lease)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            before.update({name: one.clone() for name, one in run.model.state_dict().items()})

    before: dict[str, torch.Tensor] = {}
    run = trainer(fb, policy, tmp_path, 2, callbacks=[GiveBack()])
    with pytest.raises(errors.LeaseLost):
        run.train()
    assert apart(before, run.model.state_dict()) == 0.0
    assert [batch.state for batch in fb.list_batches(policy)] == ["trained", "returned"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss_type": "grpo"}, "loss_type"), ({"loss_type": "dr_grpo"}, "loss_type"),
        ({"loss_type": "bnpo"}, "loss_type"), ({"loss_type": "sapo"}, "loss_type"),
        ({"loss_type": "luspo"}, "loss_type"), ({"num_iterations": 2}, "num_iterations"),
        ({"steps_per_generation": 4}, "steps_per_generation"), ({"beta": 0.1}, "beta"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions"), ({"max_steps": -1}, "max_steps"),
        ({"use_vllm": True}, "use_vllm"),
    ],
)  # fmt: skip
def test_settings_that_change_the_loss_or_have_no_effect_are_refused(
    fb: forebay.Client, policy: str, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(errors.ConfigurationError, match=f"^{named}"):
        trainer(fb, policy, tmp_path, settings.pop("max_steps", 2), config=settings)


def test_a_dataset_is_refused(fb: forebay.Client, policy: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigurationError, match="train_dataset"):
        trainer(fb, policy, tmp_path, 2, train_dataset=[])


@pytest.mark.parametrize("settings", [{"loss_type": "vespo"}, {"off_policy_mask_threshold": 0.5}])
def test_losses_of_sequences_do_not_take_advantages_of_tokens(
    fb: forebay.Client, policy: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    tiny.post(fb, policy, 2, advantage={"kind": "turn_return"})
    with pytest.raises(errors.ConfigurationError, match="by the sign of its advantage"):
        trainer(fb, policy, tmp_path, 1, config=settings).train()
    assert [batch.state for batch in fb.list_batches(policy)] != ["trained"]


@pytest.mark.parametrize("loss_type", ["cispo", "vespo"])
def test_other_sums_are_proportional_to_the_weights(
    fb: forebay.Client, policy: str, tmp_path: Path, loss_type: str, difference: Difference
) -> None:
    """If all weights are halved, so is the gradient; only weights differ between the two policies."""
    gradients: list[torch.Tensor] = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]).clone())

    for constant in (100, 200):
        name = f"{policy}-{constant}"
        tiny.post(fb, name, 2, "constant", loss_constant=constant)
        trainer(
            fb, name, tmp_path / name, 1, callbacks=[Keep()], config={"max_grad_norm": 0.0, "loss_type": loss_type}
        ).train()
    assert gradients[0].abs().max() > 0
    difference("gradients of other sums", float((gradients[0] - 2 * gradients[1]).abs().max()), 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sampling": {"temperature": 0.7}}, "temperatures"), ({"logprobs": None}, '"require"')],
)
def test_rows_that_trl_cannot_learn_from_are_refused(
    fb: forebay.Client, policy: str, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    fb.put_policy(policy, {})
    segment = {"tokens": [2, 3, 4], "loss_mask": [1, 1], "logprobs": change.pop("logprobs", [-1.0, -1.0])}
    fb.post({"policy": policy, "rollout_id": "a", "reward": 1.0, "segments": [segment], **change})
    with pytest.raises(errors.ConfigurationError, match=message):
        trainer(fb, policy, tmp_path, 1).train()


def test_the_last_complete_checkpoint_is_used(tmp_path: Path) -> None:
    assert forebay.trl.last_checkpoint(tmp_path) is None
    for step, state in ((9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (11, '{"global_st'), (12, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert forebay.trl.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def sdpa(query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, **options: Any) -> torch.Tensor:
    """What the kernel of TRL's tree attention computes, which needs a GPU: each part of `query` attends to its part of
    `key`, and both end together."""
    found = []
    for segment in range(len(starts_q) - 1):
        one = query[starts_q[segment] : starts_q[segment + 1]].transpose(0, 1)
        keys, values = (
            x[starts_k[segment] : starts_k[segment + 1]].transpose(0, 1).repeat_interleave(len(one) // x.shape[1], 0)
            for x in (key, value)
        )
        mask = torch.ones(one.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - one.shape[1])
        scale = options["softmax_scale"]
        attended = torch.nn.functional.scaled_dot_product_attention(one, keys, values, mask, scale=scale)
        found.append(attended.transpose(0, 1))
    return torch.cat(found)


class NoTransfer:
    """Weights stay in the process."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def test_the_worker_feeds_the_asynchronous_trainer(
    fb: forebay.Client, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the contract of an experimental interface, with two parts of TRL replaced that need a GPU."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    monkeypatch.setattr(
        packing, "_flash_attn", lambda: type("Kernel", (), {"flash_attn_varlen_func": staticmethod(sdpa)})
    )
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    tiny.post(fb, policy, 12, settle="ack")
    start = tiny.model()
    start.save_pretrained(tmp_path / "start")
    tiny.tokenizer().save_pretrained(tmp_path / "start")
    worker = forebay.trl.RolloutWorker(policy, client=fb)
    run = AsyncGRPOTrainer(
        str(tmp_path / "start"), reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_dict({"prompt": [""]}), processing_class=tiny.tokenizer(), rollout_worker=worker,
        weight_transfer=NoTransfer(),
        args=AsyncGRPOConfig(
            str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=1,
            token_budget=64, max_staleness=10**9, report_to="none", use_cpu=True, bf16=False, dtype="float32",
            learning_rate=1e-2, save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    run.train()
    assert run.state.global_step == 3
    assert apart(start.state_dict(), run.model.state_dict()) > 1e-3
    states = [batch.state for batch in fb.list_batches(policy)]
    assert states and set(states) == {"checkpointed"}
    assert any("forebay/reward/trained" in entry for entry in run.state.log_history)


def test_what_ends_the_worker_ends_the_training(fb: forebay.Client, policy: str) -> None:
    worker = forebay.trl.RolloutWorker(policy, client=fb)
    worker.start()
    worker.check_health(1.0)
    fb.resume(policy, step=None)
    wait_for(lambda: worker._failure is not None, "the refusal of a lease")
    with pytest.raises(RuntimeError, match="can be leased"):
        worker.check_health(1.0)
    worker.stop()
