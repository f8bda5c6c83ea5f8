"""Batches as tensors, and the trainer of all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Difference

import forebay
import forebay.torch
from forebay import errors

WORKED = {
    "equal": ({"a": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], "b": [[10.0, 11.0, 12.0]]},
              {"rollout_mean": 8.0, "turn_mean": 8.0, "sample_mean": 6.5, "token_mean": 6.5}),
    "unequal": ({"a": [[1.0], [2.0, 3.0, 4.0]], "b": [[5.0, 6.0]]},
                {"rollout_mean": 4.0, "turn_mean": 3.75, "sample_mean": 19 / 6, "token_mean": 3.5, "constant": 1.05}),
}  # fmt: skip
"""The worked numbers of docs/semantics.md: losses of the trained tokens of each segment, and the loss of the batch."""


def segment(losses: list[float]) -> forebay.Segment:
    """A segment whose trained tokens have the given losses, as their values, with tokens between them that are not
    trained."""
    tokens = [len(losses), 7, 7, *(token for index in range(len(losses)) for token in (10 + index, 99))]
    spread = [value for loss in losses for value in (loss, -1e30)]
    return forebay.Segment(
        tokens=tokens, loss_mask=[1, 0] * len(losses), logprobs=[-0.5, -9999.0] * len(losses), values=spread
    )


def leased(fb: forebay.Client, policy: str, rollouts: dict[str, list[list[float]]], weighting: str) -> forebay.Batch:
    fb.put_policy(policy, {
        "group": {"size": len(rollouts)}, "loss_weighting": weighting,
        **({"loss_constant": 10} if weighting == "constant" else {}),
    })  # fmt: skip
    for reward, (name, segments) in enumerate(rollouts.items()):
        fb.post({
            "policy": policy, "rollout_id": name, "group_id": "g", "reward": reward,
            "segments": [segment(losses) for losses in segments],
        })  # fmt: skip
    run = forebay.Trainer(policy, client=fb)
    batch = run.lease()
    assert batch is not None
    return batch


def loss(micro_batches: Any) -> float:
    """The loss of a batch whose values are the losses of its tokens."""
    return sum(float((mb.loss_weight * mb.loss_mask * mb.values).sum(dtype=torch.float64)) for mb in micro_batches)


@pytest.mark.parametrize("case", WORKED)
def test_packed_padded_and_sharded_losses_are_the_worked_numbers(
    fb: forebay.Client, policy: str, case: str, difference: Difference
) -> None:
    rollouts, expected = WORKED[case]
    for weighting, number in expected.items():
        batch = leased(fb, f"{policy}-{weighting}", rollouts, weighting)
        largest = 0.0
        for form in ("arrow", "json"):
            found = forebay.torch.rows(batch, form=form)
            # Budgets for one row in a micro-batch, for two, and for all.
            for max_tokens in (1, 20, 1_000):
                for cut in (forebay.torch.pack, forebay.torch.pad):
                    largest = max(largest, abs(loss(cut(found, max_tokens)) - number))
        for count in (1, 2, 3):
            shards = [
                loss(forebay.torch.pack(batch, 20, shard=(index, count), micro_batches=4)) for index in range(count)
            ]
            largest = max(largest, abs(sum(shards) - number))
        difference("loss of the worked numbers", largest, 1e-6)
        batch.nack()


def test_arrow_becomes_tensors_without_a_copy(fb: forebay.Client, policy: str) -> None:
    batch = leased(fb, policy, WORKED["unequal"][0], "rollout_mean")
    table = batch.arrow()
    starts: dict[str, int] = {}
    for name, bytes_each in (("tokens", 4), ("loss_mask", 1), ("logprobs", 4)):
        (chunk,) = table[name].chunks
        starts[name] = chunk.values.buffers()[1].address
        assert len(chunk.values) * bytes_each <= chunk.values.buffers()[1].size
    answers: list[Any] = []
    batch.arrow = lambda *_, **__: answers.append(table) or table  # type: ignore[method-assign]
    rows = forebay.torch.rows(batch, form="arrow")
    assert answers, "the rows are made of this table"
    for name, start in starts.items():
        offset = start
        for row in rows:
            tensor = getattr(row, name)
            assert tensor.data_ptr() == offset
            offset += tensor.numel() * tensor.element_size()


def test_advantages_of_tokens_are_at_their_positions(fb: forebay.Client, policy: str) -> None:
    fb.put_policy(policy, {"advantage": "posted", "batch": {"groups": 2}})
    for mask, advantages in (([1, 0, 1], [0.5, None, -2.0]), ([1], [0.25])):
        segment = {"tokens": [7] * (len(mask) + 1), "loss_mask": mask, "advantages": advantages}
        fb.post({"policy": policy, "reward": 1.0, "segments": [segment]})
    batch = fb.lease(policy, wait_ms=10_000)
    assert batch is not None
    rows = forebay.torch.rows(forebay.Batch(fb, batch))
    assert [row.advantage for row in rows] == [None, None]
    (packed,) = forebay.torch.pack(rows, 100, shard=(0, 1))
    assert packed.advantage.tolist() == [0, 0.5, 0, -2, 0, 0.25]
    assert packed.loss_mask.tolist() == [0, 1, 0, 1, 0, 1]


def test_values_are_at_the_positions_of_their_tokens(fb: forebay.Client, policy: str) -> None:
    batch = leased(fb, policy, {"a": [[1.0, 2.0]], "b": [[3.0]]}, "token_mean")
    (packed,) = forebay.torch.pack(batch, 100)
    assert packed.tokens.tolist() == [2, 7, 7, 10, 99, 11, 99, 1, 7, 7, 10, 99]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    assert packed.cu_seqlens is not None and packed.cu_seqlens.tolist() == [0, 7, 12]
    assert (packed.cu_seqlens.dtype, packed.max_seqlen) == (torch.int32, 7)
    assert packed.loss_mask.tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0]
    assert packed.values is not None and packed.values.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 3, 0]
    # What is recorded for tokens that are not trained would make ratios infinite.
    assert packed.logprobs is not None and packed.logprobs.tolist() == [0, 0, 0, -0.5, 0, -0.5, 0, 0, 0, 0, -0.5, 0]
    assert packed.teacher_logprobs is None
    (padded,) = forebay.torch.pad(batch, 100, pad_id=3)
    assert padded.tokens.tolist() == [[2, 7, 7, 10, 99, 11, 99], [1, 7, 7, 10, 99, 3, 3]]
    assert padded.attention_mask is not None and padded.attention_mask.tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert padded.loss_mask.tolist() == [[0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0]]


def test_token_logprobs_are_those_of_the_softmax_at_the_row_s_temperature(
    fb: forebay.Client, policy: str, difference: Difference
) -> None:
    fb.put_policy(policy, {"batch": {"groups": 2}})
    for name, temperature in (("a", 1.0), ("b", 0.5)):
        fb.post({
            "policy": policy, "rollout_id": name, "reward": 1, "sampling": {"temperature": temperature},
            "segments": [{"tokens": [1, 2, 3, 4], "loss_mask": [1, 0, 1], "logprobs": [-1, -1, -1]}],
        })  # fmt: skip
    batch = forebay.Trainer(policy, client=fb).lease()
    assert batch is not None
    torch.manual_seed(7)
    for cut in (forebay.torch.pack, forebay.torch.pad):
        (micro_batch,) = cut(batch, 100)
        logits = torch.randn(*micro_batch.tokens.shape, 6, requires_grad=True)
        found = forebay.torch.token_logprobs(logits, micro_batch)
        expected = torch.zeros(2, 4)
        for index, temperature in enumerate((1.0, 0.5)):
            for place in (1, 3):
                predicting = logits.reshape(2, 4, 6)[index, place - 1] / temperature
                expected[index, place] = predicting.log_softmax(0)[place + 1]
        difference("log-probability", float((found.reshape(2, 4) - expected).abs().max()), 1e-6)
        found.sum().backward()
        assert logits.grad is not None and bool((logits.grad.reshape(2, 4, 6)[:, 1] == 0).all())


def test_rows_without_a_trained_token_are_left_out_and_every_rank_has_a_micro_batch(
    fb: forebay.Client, policy: str
) -> None:
    fb.put_policy(policy, {"batch": {"groups": 2}, "require": []})
    fb.post({"policy": policy, "rollout_id": "a", "reward": 1, "messages": [{"role": "user", "content": "text only"}]})
    fb.post({"policy": policy, "rollout_id": "b", "reward": 1, "segments": [{"tokens": [1, 2], "loss_mask": [1]}]})
    batch = forebay.Trainer(policy, client=fb).lease()
    assert batch is not None
    assert [(row.rollout_id, len(row.tokens), row.logprobs) for row in forebay.torch.rows(batch)] == [
        ("a", 0, None), ("b", 2, None),
    ]  # fmt: skip
    held = [
        (len(mb.tokens), [row.rollout_id for row in mb.rows], float(mb.loss_mask.sum()))
        for index in range(3)
        for mb in forebay.torch.pack(batch, 10, shard=(index, 3), micro_batches=2)
    ]
    assert sorted(held) == [(2, [], 0.0)] * 5 + [(2, ["b"], 1.0)]


def test_an_empty_micro_batch_has_a_gradient_of_zero(fb: forebay.Client, policy: str) -> None:
    model = torch.nn.Embedding(10, 10)
    (empty,) = forebay.torch.pack([], 10)
    forebay.torch.token_logprobs(model(empty.tokens), empty).sum().backward()
    assert model.weight.grad is not None and not model.weight.grad.any()


def test_shards_without_their_number_of_micro_batches_are_refused(fb: forebay.Client, policy: str) -> None:
    batch = leased(fb, policy, {"a": [[1.0]], "b": [[1.0]]}, "rollout_mean")
    with pytest.raises(errors.ConfigurationError, match="torch.distributed"):
        list(forebay.torch.pack(batch, 10, shard=(0, 2)))
    with pytest.raises(errors.ConfigurationError, match="need 2 micro-batches"):
        list(forebay.torch.pack(batch, 1, micro_batches=1))
    with pytest.raises(errors.ConfigurationError, match="shard 2 of 2"):
        list(forebay.torch.pack(batch, 10, shard=(2, 2)))


RANK = """
import json, os, sys
import torch, torch.distributed as dist
import forebay, forebay.torch
from forebay import errors

url, policy, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(128, 8), torch.nn.Linear(8, 128))
wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
opt = torch.optim.SGD(model.parameters(), lr=0.5)
seen, refused = [], []
with forebay.torch.Trainer(policy, client=forebay.Client(url)) as run:
    for batch in run:
        step, count = len(seen) + 1, 0
        for mb in forebay.torch.pack(batch, max_tokens=24):
            count += 1
            logp = forebay.torch.token_logprobs(wrapped(mb.tokens), mb)
            ratio = (logp - mb.logprobs).exp()
            l = -torch.min(ratio * mb.advantage, ratio.clamp(0.8, 1.2) * mb.advantage)
            ((mb.loss_weight * mb.loss_mask * l).sum() * world).backward()
        if step == 2 and not refused:
            # Somebody else ends the lease, which only rank 0 knows.
            run.together(lambda: forebay.Client(url).nack(batch.batch_id, lease=batch.descriptor.lease) and None)
        try:
            batch.ack(step)
        except errors.LeaseLost as error:
            refused.append(type(error).__name__)
            opt.zero_grad()
            continue
        seen.append((batch.batch_id, count))
        opt.step()
        opt.zero_grad()
        run.saved(step)
        run.publish(step)
        if step == steps:
            break
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(json.dumps({"seen": seen, "refused": refused, "version": run.version, "weights": weights.double().tolist()}))
if world > 1:
    dist.destroy_process_group()
"""


def test_two_ranks_train_as_one_does_and_only_rank_0_acks(
    server: forebay.Server, fb: forebay.Client, policy: str, difference: Difference
) -> None:
    outcomes: dict[int, list[dict[str, Any]]] = {}
    for world in (1, 2):
        name = f"{policy}-{world}"
        fb.put_policy(name, {"group": {"size": 2}, "batch": {"groups": 2}, "loss_weighting": "turn_mean"})
        for group in range(6):
            for place in range(2):
                segments = [
                    {
                        "tokens": [group, 1, *range(20, 20 + length)], "loss_mask": [1] * length,
                        "logprobs": [-4.5] * length,
                    }
                    for length in range(1, 2 + 3 * ((group + place) % 3), 2)
                ]  # fmt: skip
                fb.post({
                    "policy": name, "rollout_id": f"{group}-{place}", "group_id": str(group),
                    "reward": (group * 7 + place * 3) % 5, "segments": segments,
                })  # fmt: skip
        command = [sys.executable, "-c", RANK, server.url, name, "3"]
        environment = {**os.environ, "PYTHONPATH": str(Path(forebay.__file__).parents[1])}
        port = 29_400 + os.getpid() % 1_000
        ranks = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True,
                env=environment if world == 1 else {
                    **environment, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank in range(world)
        ]  # fmt: skip
        told = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world
        outcomes[world] = [json.loads(one) for one in told]
        batches = list(fb.list_batches(name))
        assert [(batch.state, batch.step, batch.attempt) for batch in batches] == [
            ("checkpointed", 1, 1), ("checkpointed", 2, 2), ("checkpointed", 3, 1),
        ]  # fmt: skip
    (alone,), (first, second) = outcomes[1], outcomes[2]
    # Both ranks saw the same batches with the same number of micro-batches, the refusal, and the version.
    assert {key: value for key, value in first.items() if key != "weights"} == {
        key: value for key, value in second.items() if key != "weights"
    }
    assert first["refused"] == alone["refused"] == ["LeaseLost"] and first["version"] == 3
    assert first["weights"] == second["weights"]
    apart = max(abs(one - other) for one, other in zip(alone["weights"], first["weights"], strict=True))
    start = torch.nn.Sequential(torch.nn.Embedding(128, 8), torch.nn.Linear(8, 128))
    assert sum(parameter.numel() for parameter in start.parameters()) == len(alone["weights"])
    difference("weights of 2 ranks and of 1", apart, 1e-5)


def test_an_error_of_rank_0_that_is_not_the_service_s_ends_all_ranks() -> None:
    program = """
import os, torch.distributed as dist, forebay, forebay.torch
dist.init_process_group("gloo")
try:
    forebay.torch.Trainer("p", client=forebay.Client("http://127.0.0.1:9"), max_attempts="x")
except Exception as error:
    print(type(error).__name__)
dist.destroy_process_group()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(forebay.__file__).parents[1]), "WORLD_SIZE": "2"}
    port = 28_400 + os.getpid() % 1_000
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
            env={**environment, "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["TypeError\n", "RuntimeError\n"]


def test_columns_of_uploads_are_tensors_of_their_rows(fb: forebay.Client, policy: str) -> None:
    experts = [torch.randint(0, 255, (tokens, 6, 4), dtype=torch.uint8) for tokens in (4, 300_000)]
    entropy = torch.rand(2).to(torch.bfloat16)
    kept = [[1, 2], [70_000]]
    fb.put_policy(policy, {
        "group": {"size": 3}, "columns": {
            "experts": {"dtype": "u8", "shape": [6, 4], "rows": "sequence"},
            "entropy": {"dtype": "bf16"}, "kept": {"dtype": "i32", "ragged": True},
        },
    })  # fmt: skip
    uploads = [{"experts": fb.upload_column(rows.numpy())} for rows in experts]
    uploads[0]["entropy"] = fb.upload_column(entropy.view(torch.uint8).numpy())
    uploads.append({"kept": fb.upload_column(forebay.columns.ragged(kept))})
    for index, (tokens, response) in enumerate(((4, 2), (300_000, 1), (3, 2))):
        segment = forebay.Segment(tokens=[1] * tokens, loss_mask=[1] * response, columns=uploads[index])
        fb.post(forebay.Trajectory(policy=policy, group_id="g", reward=float(index), segments=[segment]))
    batch = forebay.Trainer(policy, client=fb).lease()
    assert batch is not None
    names = ["experts", "entropy", "kept"]
    rows = forebay.torch.rows(batch, columns=names)
    assert [sorted(row.columns) for row in rows] == [["entropy", "experts"], ["experts"], ["kept"]]
    for row, expected in zip(rows, experts, strict=False):
        assert torch.equal(row.columns["experts"], expected)
    assert torch.equal(rows[0].columns["entropy"], entropy)
    found = rows[2].columns["kept"]
    assert isinstance(found, forebay.torch.Ragged)
    assert [found.values[a:b].tolist() for a, b in zip(found.offsets, found.offsets[1:], strict=False)] == kept
    # A rank reads only its layers.
    rows = forebay.torch.rows(batch, columns=["experts"], inner=(2, 5))
    for row, expected in zip(rows, experts, strict=False):
        assert torch.equal(row.columns["experts"], expected[:, 2:5])
    assert all(row.columns == {} for row in forebay.torch.rows(batch))
    assert [sorted(row.columns) for row in fb.samples(batch.batch_id, columns=names)][2] == ["kept"]
    with pytest.raises(errors.Invalid, match="inner"):
        forebay.torch.rows(batch, columns=["kept"], inner=(0, 1))
