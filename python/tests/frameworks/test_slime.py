"""slime's own contract tests and functions on the hooks of `forebay.slime`, with the real service.

They need the sources of slime in the folder that SLIME_SRC names, because slime is on no package index.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import contract
import pytest
from conftest import Difference
from contract import Rows

import forebay
import forebay.slime
from forebay import errors
from forebay.slime import _framework, _run
from forebay.slime._samples import fields_of

SOURCE = os.environ.get("SLIME_SRC")

pytestmark = pytest.mark.skipif(SOURCE is None, reason="SLIME_SRC does not name a checkout of slime: NOT TESTED")

PYTHON = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def slime() -> Any:
    """slime's schedule and reducer. Megatron, which they import, is a stub of one rank."""
    assert SOURCE is not None
    sys.path.insert(0, SOURCE)
    megatron, core, mpu = (types.ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.mpu"))
    mpu.get_context_parallel_world_size = lambda: 1  # type: ignore[attr-defined]
    core.mpu, megatron.core = mpu, core  # type: ignore[attr-defined]
    sys.modules.update({"megatron": megatron, "megatron.core": core, "megatron.core.mpu": mpu})
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
        from slime.utils.dp_schedule import build_dp_schedule
    from slime.observability.rollout_data_utils import (
        tensorize_rollout_data_for_training,
        validate_rollout_id_annotated,
    )
    from slime.rollout.base_types import call_rollout_fn
    from slime.utils.types import Sample

    return types.SimpleNamespace(
        Sample=Sample,
        build_dp_schedule=build_dp_schedule,
        call_rollout_fn=call_rollout_fn,
        get_sum_of_sample_mean=get_sum_of_sample_mean,
        tensorize=tensorize_rollout_data_for_training,
        validate=validate_rollout_id_annotated,
    )


def arguments(**given: Any) -> Namespace:
    """The arguments of slime that the hooks read, as the command of docs/python-slime.md sets them."""
    return Namespace(
        **{
            "advantage_estimator": "grpo",
            "global_batch_size": 4,
            "rollout_batch_size": 1,
            "n_samples_per_prompt": 4,
            "use_rollout_logprobs": True,
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 64,
            "micro_batch_size": 1,
            "balance_data": False,
            "balance_by_flops": False,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": 1,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
            "num_rollout": 1_000,
            "async_save": False,
            "custom_convert_samples_to_train_data_path": "forebay.slime.convert",
            "rollout_function_path": "forebay.slime.generate_rollout",
            **given,
        }
    )


# What slime computes.


def trained_loss(
    slime: Any, args: Namespace, data: dict[str, Any], losses: list[list[float]], dp_size: int
) -> list[float]:
    """The loss of each optimizer step: slime's schedule, its tensors and its reducer, on every rank.

    The factors of Megatron's pipeline (`num_microbatches`, `dp_size`) cancel out, so they are left out on both sides.
    """
    import torch

    torch.set_num_threads(1)
    parallel = {"dp_size": dp_size, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    lengths = [len(tokens) for tokens in data["tokens"]]
    partitions, microbatches, counts, sizes = slime.build_dp_schedule(
        args, parallel, lengths, global_batch_size=args.global_batch_size, rollout_indices=data["rollout_ids"]
    )
    assert sizes == [args.global_batch_size] * len(counts)
    steps = [0.0] * len(counts)
    seen: list[int] = []
    for rank in range(dp_size):
        mine = {key: [data[key][place] for place in partitions[rank]] for key in data}
        slime.tensorize(mine)
        of_rank = [torch.tensor(losses[place], dtype=torch.float32) for place in partitions[rank]]
        seen += partitions[rank]
        bounds = [step for step, count in enumerate(counts) for _ in range(count)]
        for step, places in zip(bounds, microbatches[rank], strict=True):
            reduce = slime.get_sum_of_sample_mean(
                [len(mine["tokens"][place]) for place in places],
                [mine["response_lengths"][place] for place in places],
                [mine["loss_masks"][place] for place in places],
                mine["rollout_mask_sums"][places],
            )
            steps[step] += float(reduce(torch.cat([of_rank[place] for place in places]))) / args.global_batch_size
    assert sorted(seen) == list(range(len(lengths))), "slime drops rows"
    return steps


def samples_of(slime: Any, batch: Rows, step: int = 0) -> list[Any]:
    framework = _framework.find()
    return [
        framework.new_sample(fields_of(row, "batch", {}, step), status=row.status, index=index)
        for index, row in enumerate(batch.rows)
    ]


def padded(data: dict[str, Any], batches: list[Rows]) -> list[list[float]]:
    """The losses in the order of the converted rows; rows that were added get losses, too, which must not count."""
    rows: dict[tuple[int, ...], list[list[float]]] = {}
    for batch in batches:
        for row, losses in zip(batch.rows, batch.losses, strict=True):
            rows.setdefault(tuple(row.tokens or ()), []).append(losses)
    return [
        rows[tuple(tokens)].pop(0) if rows.get(tuple(tokens)) else [7.0] * length
        for tokens, length in zip(data["tokens"], data["response_lengths"], strict=True)
    ]


@pytest.mark.parametrize("weighting", contract.WEIGHTINGS)
def test_the_loss_of_slime_is_that_of_the_batch(slime: Any, weighting: str, difference: Difference) -> None:
    dice = random.Random(f"slime {weighting}")
    worst, count = 0.0, 0
    for trial in range(300):
        dp_size = dice.choice([1, 2, 4])
        batches = [
            contract.random_rows(dice, weighting, groups=dice.randint(2, 4), size=4)
            for _ in range(dice.choice([1, 1, 2]))
        ]
        dynamic = dice.random() < 0.7
        args = arguments(
            global_batch_size=dice.choice([4, 8]),
            actor_num_gpus_per_node=dp_size,
            use_dynamic_batch_size=dynamic,
            micro_batch_size=1 if dynamic else dice.choice([1, 2, 3]),
            max_tokens_per_gpu=dice.choice([24, 48, 1000]),
        )
        samples = [sample for step, batch in enumerate(batches) for sample in samples_of(slime, batch, step)]
        data = forebay.slime.convert(args, samples)
        steps = trained_loss(slime, args, data, padded(data, batches), dp_size)
        assert len(steps) == len(batches), f"trial {trial}: one batch is one optimizer step"
        for got, batch in zip(steps, batches, strict=True):
            worst = max(worst, abs(got - batch.loss()) / max(batch.size(), 1e-30))
            count += 1
    assert count >= 300
    difference("loss", worst, 1e-6)


def test_fewer_samples_than_the_global_batch_size_are_padded(slime: Any) -> None:
    batch = contract.random_rows(random.Random(1), "token_mean", groups=1, size=4)
    args = arguments(global_batch_size=16, actor_num_gpus_per_node=4)
    data = forebay.slime.convert(args, samples_of(slime, batch))
    assert len(data["tokens"]) % 4 == 0 and len(set(data["rollout_ids"])) == 16
    added = data["loss_masks"][len(batch.rows) :]
    assert added and all(mask == [0] for mask in added)
    assert sum(data["raw_reward"]) / len(data["raw_reward"]) == pytest.approx(
        sum(row.reward or 0 for row in batch.rows) / len(batch.rows)
    )
    (loss,) = trained_loss(slime, args, data, padded(data, [batch]), 4)
    assert loss == pytest.approx(batch.loss(), rel=1e-6)


def test_a_weight_that_slime_would_clamp_is_refused_with_the_remedy(slime: Any) -> None:
    # One rollout with one trained token has weight 1, which is more than 1/4.
    batch = contract.random_rows(random.Random(1), "rollout_mean", groups=1, size=1)
    batch.rows = batch.rows[:1]
    batch.rows[0].loss_mask, batch.rows[0].loss_weight = [1] + [0] * (batch.rows[0].response_length - 1), 1.0
    with pytest.raises(errors.ConfigurationError, match=r"Set --global-batch-size to at most 1\b"):
        forebay.slime.convert(arguments(global_batch_size=4), samples_of(slime, batch))


def test_ppo_gets_the_rewards_and_grpo_the_advantages(slime: Any) -> None:
    batch = contract.random_rows(random.Random(2), "token_mean", groups=1, size=4)
    rewards = [row.reward for row in batch.rows]
    data = forebay.slime.convert(arguments(advantage_estimator="ppo"), samples_of(slime, batch))
    assert data["rewards"][: len(rewards)] == rewards
    data = forebay.slime.convert(arguments(), samples_of(slime, batch))
    assert data["rewards"][: len(rewards)] == [row.advantage for row in batch.rows]


def test_placeholders_of_tokens_that_are_not_trained_do_not_reach_slime(slime: Any) -> None:
    batch = contract.random_rows(random.Random(3), "token_mean", groups=1, size=4)
    for row in batch.rows:
        assert row.logprobs is not None and row.loss_mask is not None
        row.logprobs = [value if bit else -9999.0 for value, bit in zip(row.logprobs, row.loss_mask, strict=True)]
    data = forebay.slime.convert(arguments(), samples_of(slime, batch))
    assert min(min(values) for values in data["rollout_log_probs"]) >= -1.0


# The hooks, in the order in which train.py and train_async.py call them.


class Loop:
    """The part of slime's training loop that calls the hooks: `rollout_manager` of one process."""

    def __init__(self, slime: Any, args: Namespace) -> None:
        self.slime, self.args = slime, args
        _run_of_this_process().clear()
        self.data_source = forebay.slime.DataSource(args)

    def start(self, start_rollout_id: int) -> None:
        self.data_source.load(start_rollout_id - 1)

    def generate(self, rollout_id: int) -> list[Any]:
        """`RolloutManager._get_rollout_data`, without the flattening of samples that is not slime's own check."""
        output = self.slime.call_rollout_fn(
            forebay.slime.generate_rollout, self.args, rollout_id, self.data_source, evaluation=False
        )
        self.metrics = output.metrics
        self.slime.validate(output.samples)
        samples = output.samples
        while isinstance(samples[0], list):
            samples = [sample for group in samples for sample in group]
        self.data = forebay.slime.convert(self.args, samples)
        return samples


def _run_of_this_process() -> dict[Any, Any]:
    from forebay.slime import _hooks

    return _hooks._runs


@pytest.fixture
def grouped(fb: forebay.Client, policy: str) -> str:
    fb.put_policy(policy, {"require": ["tokens", "logprobs"], "group": {"size": 4}, "loss_weighting": "turn_mean"})
    return policy


def post_group(fb: forebay.Client, policy: str, name: str, **fields: Any) -> None:
    """Four rollouts, of which the last has two segments."""
    dice = random.Random(name)

    def segment() -> forebay.Segment:
        mask = [1] + [int(dice.random() < 0.7) for _ in range(dice.randint(0, 5))]
        return forebay.Segment(
            tokens=[dice.randrange(100) for _ in range(3 + len(mask))],
            loss_mask=mask,
            logprobs=[-dice.random() for _ in mask],
        )

    fb.post(
        [
            forebay.Trajectory(
                policy=policy,
                rollout_id=f"{name}-{place}",
                group_id=name,
                reward=float(place),
                segments=[segment()] * (2 if place == 3 else 1),
                **fields,
            )
            for place in range(4)
        ]
    )


def steps(fb: forebay.Client, policy: str) -> dict[str, int | None]:
    return {
        batch.batch_id: batch.step for batch in fb.list_batches(policy) if batch.state in ("trained", "checkpointed")
    }


def test_the_loss_of_posted_rollouts_is_that_of_their_rows(slime: Any, fb: forebay.Client, grouped: str) -> None:
    loop = Loop(slime, arguments(forebay_url=fb.url, forebay_policy=grouped))
    loop.start(0)
    post_group(fb, grouped, "task0")
    samples = loop.generate(0)
    (batch_id,) = steps(fb, grouped)
    rows = fb.samples(batch_id)
    dice = random.Random(0)
    batch = Rows(rows, [[dice.random() for _ in range(row.response_length)] for row in rows], 4)
    (loss,) = trained_loss(slime, loop.args, loop.data, padded(loop.data, [batch]), 1)
    assert loss == pytest.approx(batch.loss(), rel=1e-6)
    assert loop.data["rewards"][: len(rows)] == [row.advantage for row in rows]
    assert [sample.rollout_id for sample in samples] == [row.rollout_id for row in rows]
    assert loop.metrics["forebay/reward/trained"] == 1.5


def test_a_crash_brings_back_what_the_saved_weights_have_not_learned(
    slime: Any, fb: forebay.Client, grouped: str
) -> None:
    args = arguments(forebay_url=fb.url, forebay_policy=grouped)
    for task in range(5):
        post_group(fb, grouped, f"task{task}")
    loop = Loop(slime, args)
    loop.start(0)
    trained = [[sample.rollout_id for sample in loop.generate(step)] for step in range(2)]
    loop.data_source.save(1)
    trained += [[sample.rollout_id for sample in loop.generate(step)] for step in (2, 3)]
    # The process ends here, after the ack of step 3, and slime restarts from the checkpoint of step 1.
    loop = Loop(slime, args)
    loop.start(2)
    again = [[sample.rollout_id for sample in loop.generate(step)] for step in (2, 3)]
    assert again == trained[2:]
    loop.generate(4)
    assert sorted(step for step in steps(fb, grouped).values() if step is not None) == [0, 1, 2, 3, 4]
    stats = fb.stats().policies[grouped]
    assert stats.conserved


def test_a_batch_is_acked_before_slime_gets_it_and_none_is_leased_ahead(
    slime: Any, fb: forebay.Client, grouped: str
) -> None:
    for task in range(3):
        post_group(fb, grouped, f"task{task}")
    loop = Loop(slime, arguments(forebay_url=fb.url, forebay_policy=grouped))
    loop.start(0)
    for step in range(2):
        loop.generate(step)
        states = [batch.state for batch in fb.list_batches(grouped)]
        assert states == ["trained"] * (step + 1)


def test_rows_that_slime_would_train_wrongly_are_not_acked(slime: Any, fb: forebay.Client, grouped: str) -> None:
    post_group(fb, grouped, "hot", sampling=forebay_sampling(0.5))
    loop = Loop(slime, arguments(forebay_url=fb.url, forebay_policy=grouped))
    loop.start(0)
    with pytest.raises(errors.ConfigurationError, match=r"set --rollout-temperature"):
        loop.generate(0)
    assert [batch.state for batch in fb.list_batches(grouped)] == ["leased"]
    # After the restart with the right temperature the batch is there again.
    loop = Loop(slime, arguments(forebay_url=fb.url, forebay_policy=grouped, rollout_temperature=0.5))
    loop.start(0)
    assert len(loop.generate(0)) == 5


def forebay_sampling(temperature: float) -> Any:
    from forebay._wire import Sampling

    return Sampling(temperature=temperature)


def test_several_optimizer_steps_of_an_iteration_train_a_batch_each(
    slime: Any, fb: forebay.Client, grouped: str
) -> None:
    for task in range(2):
        post_group(fb, grouped, f"task{task}")
    loop = Loop(slime, arguments(forebay_url=fb.url, forebay_policy=grouped, rollout_batch_size=2))
    loop.start(0)
    loop.generate(0)
    assert list(steps(fb, grouped).values()) == [0, 0]
    batches = []
    for batch_id in steps(fb, grouped):
        rows = fb.samples(batch_id)
        batches.append(Rows(rows, [[1.0 + place] * row.response_length for place, row in enumerate(rows)], 4))
    losses = trained_loss(slime, loop.args, loop.data, padded(loop.data, batches), 1)
    assert losses == pytest.approx([batch.loss() for batch in batches], rel=1e-6)


def test_versions_are_published_when_slime_has_pushed_them(slime: Any, fb: forebay.Client, grouped: str) -> None:
    for task in range(8):
        post_group(fb, grouped, f"task{task}")
    args = arguments(forebay_url=fb.url, forebay_policy=grouped)
    loop = Loop(slime, args)
    loop.start(0)
    seen = []
    for step in range(3):
        loop.generate(step)
        status = fb.get_policy(grouped)
        assert status is not None
        seen.append((status.version, status.version_step, status.version_uri))
    # Before step 0 the engines have the weights that slime started with.
    assert seen == [(0, None, None), (1, 0, "slime:weight_version=2"), (2, 1, "slime:weight_version=3")]
    loop.data_source.save(2)
    loop = Loop(slime, args)
    loop.start(3)
    loop.generate(3)
    status = fb.get_policy(grouped)
    # The weights of step 2 were never published, and the engines count from 1 again.
    assert status is not None
    assert (status.version, status.version_step, status.version_uri) == (3, 2, "slime:weight_version=1")


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        # train_async.py asks for the batch of step k while step k - 1 is trained.
        (1, [(1, None), (1, None), (2, 0), (3, 1), (4, 2)]),
        (2, [(1, None), (1, None), (1, None), (2, 1), (2, 1), (3, 3)]),
    ],
)
def test_train_async_has_the_weights_of_two_steps_before(interval: int, expected: list[tuple[int, int | None]]) -> None:
    args = arguments(forebay_async=True, update_weights_interval=interval)
    assert [_run._live(args, 0, step) for step in range(len(expected))] == expected


def test_the_pushes_of_train_async_are_those_of_its_loop() -> None:
    """A model of train_async.py: pushes are counted as its loop makes them, from any first step."""
    for first in range(4):
        for interval in range(1, 4):
            args = arguments(forebay_async=True, update_weights_interval=interval)
            pushes, live = 1, first - 1 if first else None
            assert _run._live(args, first, first) == (pushes, live)
            for step in range(first, first + 9):
                # generate(step + 1) begins before step is trained.
                assert _run._live(args, first, step + 1) == (pushes, live), (first, interval, step)
                if (step + 1) % interval == 0:
                    pushes, live = pushes + 1, step


def test_train_async_with_a_staleness_of_zero_is_refused(slime: Any, fb: forebay.Client, grouped: str) -> None:
    fb.patch_policy(grouped, {"staleness": {"max": 0}})
    loop = Loop(slime, arguments(forebay_url=fb.url, forebay_policy=grouped, forebay_async=True))
    with pytest.raises(errors.ConfigurationError, match=r"staleness\.max"):
        loop.start(0)


def test_a_checkpoint_that_is_still_being_written_is_not_reported(slime: Any, fb: forebay.Client, grouped: str) -> None:
    for task in range(4):
        post_group(fb, grouped, f"task{task}")
    loop = Loop(slime, arguments(forebay_url=fb.url, forebay_policy=grouped, async_save=True, num_rollout=4))
    loop.start(0)
    reported = []
    for step in range(4):
        loop.generate(step)
        loop.data_source.save(step)
        status = fb.get_policy(grouped)
        assert status is not None
        reported.append(status.checkpoint_step)
    # slime waits for the write of its last checkpoint.
    assert reported == [None, 0, 1, 3]


def test_a_batch_that_ends_every_trainer_is_quarantined(slime: Any, fb: forebay.Client, grouped: str) -> None:
    fb.patch_policy(grouped, {"lease": {"max_deliveries": 2}})
    post_group(fb, grouped, "poison")
    post_group(fb, grouped, "good")
    args = arguments(forebay_url=fb.url, forebay_policy=grouped, forebay_max_attempts=3)
    first: list[str] = []
    for _ in range(4):
        loop = Loop(slime, args)
        loop.start(0)
        first.append(loop.generate(0)[0].metadata["forebay"]["group_id"])
    assert first == ["poison", "poison", "poison", "good"]
    assert [batch.state for batch in fb.list_batches(grouped)] == ["quarantined", "trained"]


def test_rollouts_without_tokens_train_nothing(slime: Any, fb: forebay.Client, grouped: str) -> None:
    fb.put_policy(
        grouped,
        {
            "group": {"size": 2},
            "filter": [{"name": "failed", "scope": "rollout", "when": 'status == "failed"', "action": "mask"}],
        },
    )
    failed = forebay.Trajectory(policy=grouped, group_id="g", status="failed")
    good = forebay.Trajectory(
        policy=grouped, group_id="g", reward=1.0, segments=[forebay.Segment(tokens=[1, 2], loss_mask=[1])]
    )
    fb.post([failed, good])
    loop = Loop(
        slime,
        arguments(
            forebay_url=fb.url,
            forebay_policy=grouped,
            global_batch_size=1,
            n_samples_per_prompt=1,
            use_rollout_logprobs=False,
        ),
    )
    loop.start(0)
    assert [sample.rollout_id for sample in loop.generate(0)] == [good.rollout_id]
    assert "rollout_log_probs" not in loop.data


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss"),
        ({"normalize_advantages": True}, "--normalize-advantages"),
        ({"log_passrate": True}, "--log-passrate"),
        ({"reward_key": "score"}, "--reward-key"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p"),
        ({"custom_convert_samples_to_train_data_path": None}, "forebay.slime.convert"),
        ({"object_store_backend": "mooncake"}, "mooncake"),
        ({"forebay_key_file": "/nowhere/key"}, "/nowhere/key"),
    ],
)
def test_settings_that_would_change_the_loss_are_refused(
    slime: Any, fb: forebay.Client, grouped: str, setting: dict[str, Any], message: str
) -> None:
    loop = Loop(slime, arguments(forebay_url=fb.url, forebay_policy=grouped, **setting))
    with pytest.raises(errors.ConfigurationError, match=re.escape(message)):
        loop.start(0)
    status = fb.get_policy(grouped)
    assert status is not None and status.epoch == 0, "a trainer with wrong settings has resumed the policy"


def test_the_data_source_has_no_prompts() -> None:
    source = forebay.slime.DataSource(arguments())
    with pytest.raises(errors.ConfigurationError, match=r"--rollout-function-path forebay\.slime\.generate_rollout"):
        source.get_samples(1)


# The other direction: a generate function inside slime posts what it made.


def test_samples_of_slime_become_rollouts(slime: Any, fb: forebay.Client, policy: str) -> None:
    def sample(**fields: Any) -> Any:
        given = {
            "index": 5,
            "group_index": 2,
            "tokens": [1, 2, 3, 4],
            "response_length": 2,
            "loss_mask": [1, 0],
            "rollout_log_probs": [-0.5, 0.0],
            "reward": 0.25,
            "weight_versions": ["4", "3"],
            "status": slime.Sample.Status.TRUNCATED,
            "metadata": {"task": "a"},
        }
        return slime.Sample(**{**given, **fields})

    receipt = forebay.slime.post_sample(sample(), client=fb, policy=policy, version_offset=-3)
    assert receipt.verdict == "kept"
    again = forebay.slime.post_sample(sample(), client=fb, policy=policy, version_offset=-3)
    assert again.duplicate and again.rollout_id == receipt.rollout_id
    two = [sample(index=6, rollout_id=6), sample(index=6, rollout_id=6, remove_sample=True, loss_mask=None)]
    forebay.slime.post_sample(two, client=fb, policy=policy, group_id="other", reward=1.0)
    rows = {}
    for request in ("1", "2"):
        batch = fb.lease(policy, request_id=request, wait_ms=10_000)
        assert batch is not None
        rows[request] = fb.samples(batch.batch_id)
    (row,) = rows["1"]
    assert (row.tokens, row.loss_mask, row.logprobs) == ([1, 2, 3, 4], [1, 0], [-0.5, 0.0])
    assert (row.status, row.reward, row.policy_version, row.metadata) == ("truncated", 0.25, 0, {"task": "a"})
    assert [(row.group_id, row.loss_mask, row.reward) for row in rows["2"]] == [
        ("other", [1, 0], 1.0),
        ("other", [0, 0], 1.0),
    ]


def test_a_sample_that_is_not_finished_is_not_posted(slime: Any, fb: forebay.Client, policy: str) -> None:
    with pytest.raises(ValueError, match="pending"):
        forebay.slime.post_sample(slime.Sample(tokens=[1, 2], response_length=1), client=fb, policy=policy)


# slime's own contract tests, unmodified.


@pytest.fixture
def contract_tests(fb: forebay.Client, policy: str) -> Iterator[Callable[..., str]]:
    assert SOURCE is not None
    environment = {
        **os.environ,
        "PYTHONPATH": str(PYTHON),
        "FOREBAY_URL": fb.url,
        "FOREBAY_POLICY": policy,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }

    def run(file: str, *paths: str, path: Path | None = None) -> str:
        """Runs a file of slime's tests as its documents say, and returns the last line."""
        if path is not None:
            environment["PYTHONPATH"] += os.pathsep + str(path)
        ended = subprocess.run(
            [sys.executable, f"tests/plugin_contracts/{file}", *paths, "-p", "no:cacheprovider", "-q"],
            cwd=SOURCE, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.strip().splitlines()[-1]

    yield run


DOCUMENT = PYTHON.parent / "docs" / "python-slime.md"
FRAMEWORKS = PYTHON.parent / "docs" / "frameworks.md"


def documented() -> dict[str, str]:
    """The flags of the command in docs/python-slime.md."""
    (command,) = re.findall(r"^python train\.py (.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            flags[word] = "" if following.startswith("--") else following
    return flags


def test_the_documented_flags_are_those_of_slime() -> None:
    assert SOURCE is not None
    source = Path(SOURCE, "slime", "utils", "arguments.py").read_text()
    megatron = {"--save-interval"}
    assert [flag for flag in documented() if f'"{flag}"' not in source and flag not in megatron] == []


def test_the_documented_file_has_the_settings_that_are_read() -> None:
    (table,) = re.findall(r"^## Settings of slime and verl$(.*?)^## ", FRAMEWORKS.read_text(), re.MULTILINE | re.DOTALL)
    keys = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert set(re.findall(r"^(forebay_\w+): ", DOCUMENT.read_text(), re.MULTILINE)) <= keys
    folder = PYTHON / "forebay" / "slime"
    read = {key for file in folder.glob("*.py") for key in re.findall(r'"(forebay_\w+)"', file.read_text())}
    assert keys == read


def test_slimes_contract_of_rollout_functions(
    contract_tests: Callable[..., str], fb: forebay.Client, policy: str
) -> None:
    fb.put_policy(policy, {"group": {"size": 2}})
    segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1], logprobs=[-0.1, -0.2])
    fb.post(
        [forebay.Trajectory(policy=policy, group_id="g", reward=reward, segments=[segment]) for reward in (0.0, 1.0)]
    )
    line = contract_tests(
        "test_plugin_rollout_contracts.py", "--rollout-function-path", documented()["--rollout-function-path"]
    )
    assert re.search(r"\b6 passed", line), line
    assert list(steps(fb, policy).values()) == [2], "the tests ask for the batch of step 2"


def test_slimes_contract_of_data_sources(contract_tests: Callable[..., str]) -> None:
    path = documented()["--data-source-path"]
    line = contract_tests("test_plugin_path_loading_contracts.py", "--data-source-path", path)
    assert re.search(r"\b16 passed", line), line


def test_slimes_contract_of_converters(contract_tests: Callable[..., str]) -> None:
    flag = "--custom-convert-samples-to-train-data-path"
    line = contract_tests("test_plugin_runtime_hook_contracts.py", flag, documented()[flag])
    assert re.search(r"\b10 passed", line), line


GAME = """
async def play(args, sample, sampling_params):
    sample.tokens, sample.response, sample.response_length = [1, 2, 3], "two", 2
    sample.rollout_log_probs, sample.reward, sample.status = [-0.1, -0.2], 1.0, type(sample).Status.COMPLETED
    sample.group_index = 0
    return sample
"""


def test_slimes_contract_of_generate_functions(
    contract_tests: Callable[..., str], fb: forebay.Client, tmp_path: Path
) -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_agent.py").write_text(text)
    (tmp_path / "my_game.py").write_text(GAME)
    fb.put_policy("math", {"require": ["tokens", "logprobs"]})
    line = contract_tests(
        "test_plugin_generate_contracts.py", "--custom-generate-function-path", "my_agent.generate", path=tmp_path
    )
    assert re.search(r"\b4 passed", line), line
    (story,) = fb.list_trajectories("math")
    assert (story.verdict, story.reward, story.segments) == ("kept", 1.0, 1)
    (group,) = fb.list_groups("math")
    assert group.size == 2


# miles, in a process of its own: the hooks take the package that is loaded.

MILES = """
import importlib.abc, importlib.machinery, sys
from unittest.mock import MagicMock

class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "sglang", "sglang_router"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Stubs())
import contract, forebay.slime
from argparse import Namespace
from forebay.slime import _framework
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.inference_rollout.compatibility import load_rollout_function
from miles.utils.dp_schedule import build_dp_schedule

args = Namespace(
    advantage_estimator="grpo", global_batch_size=4, rollout_batch_size=1, n_samples_per_prompt=4,
    use_dynamic_batch_size=True, max_tokens_per_gpu=64, balance_data=False, use_rollout_logprobs=True,
    actor_num_nodes=1, actor_num_gpus_per_node=2, forebay_policy=sys.argv[1],
)
source = forebay.slime.DataSource(args)
source.load(-1)
generate = load_rollout_function(RolloutFnConstructorInput(args, source), "forebay.slime.generate_rollout")
samples = [sample for group in generate(RolloutFnTrainInput(0)).samples for rollout in group for sample in rollout]
data = forebay.slime.convert(args, samples)
parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
partitions, microbatches, counts, sizes = build_dp_schedule(
    args, parallel, [len(tokens) for tokens in data["tokens"]], global_batch_size=4, rollout_indices=data["rollout_ids"]
)
assert sizes == [4] and sorted(sum(partitions, [])) == list(range(len(data["tokens"])))
for mask, sample, denominator in zip(data["loss_masks"], samples, data["rollout_mask_sums"]):
    if any(mask):
        weight = sample.train_metadata["forebay"]["loss_weight"]
        assert abs(1 / denominator / 4 - weight) < 1e-12 * weight
print(type(samples[0]).__module__, len(samples))
"""


@pytest.mark.skipif("MILES_SRC" not in os.environ, reason="MILES_SRC does not name a checkout of miles: NOT TESTED")
def test_miles_trains_on_the_batches_with_the_same_hooks(fb: forebay.Client, grouped: str) -> None:
    post_group(fb, grouped, "task0")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MILES, grouped],
        env={
            **os.environ,
            "FOREBAY_URL": fb.url,
            "PYTHONPATH": os.pathsep.join([os.environ["MILES_SRC"], str(PYTHON), str(Path(__file__).parent)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["miles.utils.types", "5"]
    assert list(steps(fb, grouped).values()) == [0]
