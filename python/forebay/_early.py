"""Early acks, for frameworks that number their steps: a batch is leased and acked, and only then handed over.

The weights move after the answer to the ack, as the contract demands. A crash between the ack and the next checkpoint
is covered by the resume from that checkpoint, which brings the batch back. So no lease has to be kept alive while the
framework trains, and no token has to reach its other processes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from . import errors
from ._wire import Gigpo, PolicyStatus, Sample, TurnReturn
from .batch import Batch
from .client import Client
from .trainer import Trainer

T = TypeVar("T")

log = logging.getLogger("forebay")

MAX_ATTEMPTS = 20
"""Deliveries after which a batch is given back, until the policy's rules quarantine it. The service counts leases that
a resume ends (`lease.max_resumes`). A lease that was acked early has ended already, so a batch that makes every trainer
run out of memory has to be noticed here."""


def take(run: Trainer, step: int, build: Callable[[Batch, list[Sample]], T]) -> T:
    """Leases a batch, makes of its rows what the framework trains on, acks `step`, and returns what was made.

    What `build` refuses is not acked, so that the next resume brings the batch back. A batch that was lost before the
    ack, or that cannot be read, is replaced by the next one.
    """
    while True:
        batch = run.lease()
        assert batch is not None, "a lease without a time limit waits until there is a batch"
        try:
            made = build(batch, batch.rows())
            batch.ack(step)
        except (errors.LeaseLost, errors.Damaged) as error:
            log.warning("batch %s is not trained, and the next one is leased: %s", batch.batch_id, error)
            continue
        log.info("step %d trains batch %s: %d rollouts, %d rows", step, batch.batch_id, batch.rollouts, batch.samples)
        return made


def client_of(url: str | None, key_file: str | None) -> Client:
    """Returns a client. A key is in a file or in the environment, because frameworks log their settings."""
    if key_file is None:
        return Client(url)
    try:
        with open(key_file, encoding="utf-8") as file:
            key = file.read().strip()
    except OSError as error:
        raise errors.ConfigurationError(f"the key file {key_file} cannot be read: {error.strerror}") from None
    return Client(url, key)


def policy_of(given: str | None) -> str:
    """Returns the policy to train: as set in the framework, or `FOREBAY_POLICY`, or `default`."""
    return given or os.environ.get("FOREBAY_POLICY") or "default"


def response_mask(row: Sample) -> list[int]:
    """Returns the mask of a row's response, empty for a rollout without segments."""
    return row.loss_mask or []


def is_trained(row: Sample) -> bool:
    """Whether the row has a trained token."""
    return any(response_mask(row))


def check_advantages(policy: PolicyStatus | None, framework: str) -> None:
    """Refuses a policy whose tokens have advantages of their own."""
    if policy is not None and isinstance(advantage := policy.rules.advantage, TurnReturn | Gigpo):
        raise _several(framework, f'advantage = {{kind = "{advantage.kind}"}}')
    if policy is not None and policy.rules.advantage == "posted":
        raise _several(framework, 'advantage = "posted"')


def one_advantage(advantage: float | None, framework: str) -> float:
    """Returns the advantage of a row. There may be rows that were posted under other rules than the policy has now."""
    if advantage is None:
        raise _several(framework, "the rules of these rows")
    return advantage


def _several(framework: str, rule: str) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"{framework} takes one advantage for all tokens of a row, and with {rule} each token has its own: use "
        "forebay.torch, forebay.trl.GRPOTrainer, forebay.verl or forebay.tinker, or another advantage in the rules of "
        "the policy"
    )


def masked(values: Sequence[float] | None, mask: Sequence[int]) -> list[float]:
    """Returns values per token, and 0 where the mask is 0 or where there are none.

    Producers may send anything for tokens that are not trained. The exponential of such a placeholder may be infinite,
    and a mask cannot remove it: infinity times zero is not a number.
    """
    if values is None:
        return [0.0] * len(mask)
    return [value if bit else 0.0 for value, bit in zip(values, mask, strict=True)]


def demand(rows: Sequence[Sample], column: str, why: str) -> None:
    """Refuses trained rows that lack a column."""
    lacking = [row.rollout_id for row in rows if is_trained(row) and getattr(row, column) is None]
    if lacking:
        raise errors.ConfigurationError(
            f"{len(lacking)} trained rows have no {column}, e.g. that of rollout {lacking[0]}, and {why}: add "
            f'"{column}" to the `require` of the policy'
        )
