"""Data for Tinker: real types of its package, and its losses in numpy. There is no service of Tinker here."""

from __future__ import annotations

import json
import random
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import contract
import numpy
import pytest
import tinker
from conftest import Difference

import forebay
import forebay.tinker
from forebay import errors
from forebay.tinker import Loss

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "python-tinker.md"

EPS = 0.2


class Model:
    """A table of logits of the next token, given the previous one."""

    def __init__(self, seed: int, size: int = 1000) -> None:
        self.logits = numpy.random.default_rng(seed).normal(size=(size, size)) * 0.3

    def logprobs(self, read: Any, predicted: Any) -> Any:
        logits = self.logits[read]
        chosen = logits[numpy.arange(len(read)), predicted]
        return chosen - numpy.log(numpy.exp(logits).sum(axis=1))


def objective(loss: Loss, logprobs: Any, old: Any, factor: Any) -> Any:
    """The negative loss of each token; `factor` is its advantage, or its weight."""
    if loss == "cross_entropy":
        return logprobs * factor
    ratio = numpy.exp(logprobs - old)
    clipped = ratio.clip(1 - EPS, 1 + EPS)
    if loss == "importance_sampling":
        return ratio * factor
    if loss == "cispo":
        return clipped * factor * logprobs
    return numpy.minimum(ratio * factor, clipped * factor)


def tinkers_loss(loss: Loss, data: list[Any], model: Model) -> float:
    """What Tinker's service computes: the sum over all predicted tokens of all data."""
    total = 0.0
    for datum in data:
        inputs = {name: numpy.array(value.data) for name, value in datum.loss_fn_inputs.items()}
        logprobs = model.logprobs(numpy.array(datum.model_input.to_ints()), inputs["target_tokens"])
        factor = inputs["weights" if loss == "cross_entropy" else "advantages"]
        assert len(logprobs) == len(factor)
        total -= float(objective(loss, logprobs, inputs.get("logprobs"), factor).sum())
    return total


def losses_of(loss: Loss, rows: list[Any], model: Model) -> list[list[float]]:
    """The loss of each response token of each row, as the service defines it."""
    found = []
    for row in rows:
        tokens, length = numpy.array(row.tokens), row.response_length
        logprobs = model.logprobs(tokens[-length - 1 : -1], tokens[-length:])
        factor = 1.0 if loss == "cross_entropy" else row.advantage
        # The values of tokens that are not trained may be anything.
        with numpy.errstate(over="ignore", invalid="ignore"):
            per_token = -objective(loss, logprobs, numpy.array(row.logprobs), factor)
        found.append([float(one) if bit else 0.0 for one, bit in zip(per_token, row.loss_mask, strict=True)])
    return found


def batch_of(rows: list[Any]) -> Any:
    return SimpleNamespace(rows=lambda shard: rows)


@pytest.mark.parametrize("loss", forebay.tinker.LOSSES)
@pytest.mark.parametrize("weighting", contract.WEIGHTINGS)
def test_the_sum_of_tinker_is_the_loss_of_the_batch(loss: Loss, weighting: str, difference: Difference) -> None:
    dice, model = random.Random(f"{loss} {weighting}"), Model(1)
    worst = 0.0
    for _ in range(20):
        batch = contract.random_rows(dice, weighting, groups=2, size=4)
        for row in batch.rows:
            assert row.logprobs is not None and row.loss_mask is not None
            row.logprobs = [
                value - 5 if bit else -9999.0 for value, bit in zip(row.logprobs, row.loss_mask, strict=True)
            ]
        data = forebay.tinker.data(batch_of(batch.rows), loss)
        expected = contract.Rows(batch.rows, losses_of(loss, batch.rows, model), batch.rollouts)
        got = tinkers_loss(loss, data, model)
        worst = max(worst, abs(got - expected.loss()) / expected.size())
    difference(f"loss {loss}", worst, 1e-6)


def test_rows_that_train_nothing_become_no_data() -> None:
    batch = contract.random_rows(random.Random(0), "rollout_mean", groups=1, size=4)
    for row in batch.rows[1:]:
        row.loss_mask = [0] * row.response_length
    batch.rows[0].loss_mask = [1] * batch.rows[0].response_length
    assert len(forebay.tinker.data(batch_of(batch.rows))) == 1


def test_a_datum_predicts_each_token_from_those_before_it() -> None:
    (row, *_) = contract.random_rows(random.Random(0), "rollout_mean", groups=1, size=1).rows
    row.tokens, row.response_length = [11, 12, 13, 14], 2
    row.loss_mask, row.logprobs, row.advantage, row.loss_weight = [0, 1], [-9.0, -0.5], 2.0, 0.25
    (datum,) = forebay.tinker.data(batch_of([row]))
    assert datum.model_input.to_ints() == [11, 12, 13]
    assert {name: value.data for name, value in datum.loss_fn_inputs.items()} == {
        "target_tokens": [12, 13, 14],
        "logprobs": [0.0, 0.0, -0.5],
        "advantages": [0.0, 0.0, 0.5],
    }


@pytest.mark.parametrize(
    ("loss", "fields", "message"),
    [
        ("gspo", {}, "not proportional"),
        ("ppo", {"temperature": 0.5}, "temperature 0.5"),
        ("ppo", {"logprobs": None}, '"logprobs"'),
    ],
)
def test_what_tinker_would_train_wrongly_is_refused(loss: Any, fields: dict[str, Any], message: str) -> None:
    batch = contract.random_rows(random.Random(0), "rollout_mean", groups=1, size=4)
    for name, value in fields.items():
        setattr(batch.rows[0], name, value)
    batch.rows[0].loss_mask = [1] * batch.rows[0].response_length
    with pytest.raises(errors.ConfigurationError, match=message):
        forebay.tinker.data(batch_of(batch.rows), loss)


class Done:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


class Service:
    """The calls of Tinker's service that the program of the document makes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_at: int | None = None

    def create_lora_training_client(self, *, base_model: str, rank: int) -> Done:
        self.calls.append(("create", base_model, rank))
        return Done(self)

    def create_training_client_from_state_with_optimizer(self, path: str) -> Done:
        self.calls.append(("load", path))
        return Done(self)

    def forward_backward(self, data: list[Any], loss_fn: str) -> Done:
        assert all(isinstance(datum, tinker.Datum) for datum in data)
        if self.fails_at == sum(name == "forward_backward" for name, *_ in self.calls):
            raise RuntimeError("the trainer is killed")
        self.calls.append(("forward_backward", loss_fn, [datum.model_input.to_ints() for datum in data]))
        return Done(None)

    def optim_step(self, params: Any) -> Done:
        assert isinstance(params, tinker.AdamParams)
        return Done(None)

    def save_state(self, name: str) -> Done:
        self.calls.append(("save", name))
        return Done(SimpleNamespace(path=f"tinker://run/weights/{name}"))

    def save_weights_for_sampler(self, name: str) -> Done:
        return Done(SimpleNamespace(path=f"tinker://run/sampler_weights/{name}"))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Service], None]:
    """The program of the document, as printed."""
    (text,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "tinker_trainer.py").write_text(text)
    monkeypatch.chdir(tmp_path)

    def run(service: Service) -> None:
        monkeypatch.setattr(tinker, "ServiceClient", lambda: service)
        runpy.run_path("tinker_trainer.py")

    return run


def test_the_program_of_the_document_trains_the_same_batches_after_a_crash(
    program: Callable[[Service], None], own_server: forebay.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_URL", own_server.url)
    monkeypatch.setenv("STEPS", "22")
    with own_server.client() as fb:
        fb.put_policy("math", {"group": {"size": 2}, "require": ["tokens", "logprobs"]})
        for task in range(22):
            fb.post(
                [
                    forebay.Trajectory(
                        policy="math",
                        group_id=str(task),
                        reward=reward,
                        segments=[forebay.Segment(tokens=[task, 1, 2], loss_mask=[1, 1], logprobs=[-1.0, -1.0])],
                    )
                    for reward in (0.0, 1.0)
                ]
            )
        first = Service()
        first.fails_at = 21
        with pytest.raises(RuntimeError, match="killed"):
            program(first)
        # The batch of step 22 was acked, and its gradients were never computed.
        assert json.loads(Path("checkpoint.json").read_text()) == {"step": 20, "path": "tinker://run/weights/step-20"}
        second = Service()
        program(second)
        assert second.calls[0] == ("load", "tinker://run/weights/step-20")
        trained = [
            [call[2][0][0] for call in service.calls if call[0] == "forward_backward"] for service in (first, second)
        ]
        assert trained == [list(range(21)), [20, 21]]
        status = fb.get_policy("math")
        assert status is not None
        assert (status.checkpoint_step, status.version_step) == (22, 22)
        assert status.version_uri == "tinker://run/sampler_weights/sampler-22"
        assert sorted(batch.step or 0 for batch in fb.list_batches("math")) == list(range(1, 23))
