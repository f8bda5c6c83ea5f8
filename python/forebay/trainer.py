"""The trainer's side: resume, leases that are kept alive, acks, checkpoints and versions.

The rule that makes it safe to kill a trainer is in the guide for trainers (`docs/trainers.md`): weights never contain
data that is not acked, and a checkpoint is announced only after it is on disk.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from . import errors
from ._heartbeat import BatchHeartbeats
from ._patience import PATIENCE_S, POLL_S, patiently
from ._uuid import uuid7
from ._wire import BatchDescriptor, PolicyStatus, ResumeResponse
from .batch import Batch, Ended, Owner
from .client import Client

T = TypeVar("T")

log = logging.getLogger("forebay")

WAITING_LOG_S = 60.0
"""How often the log says what a trainer waits for."""


class Trainer:
    """Leases batches of one policy for a training loop, from one process.

    ```python
    run = forebay.Trainer("math.solver", last_saved=step)
    for batch in run:
        ...                                    # gradients of the rows of the batch
        batch.ack(step := step + 1)            # an exception leaves the weights as they are
        opt.step()
        if step % 50 == 0:
            save(model, opt, step)
            run.saved(step)
        run.publish(step, uri=export(model, step))
    ```

    `last_saved` is the step of the checkpoint that the weights come from, or None for a start from nothing. Every batch
    that these weights have not learned from is delivered again, first. With it a new epoch begins: a trainer that ran
    before can neither lease nor ack nor publish any more.

    While the service cannot be reached, calls are repeated for `patience_s`. A thread extends leases three times in
    each `lease_ttl_s`; by default, this is the time that the policy grants.
    """

    def __init__(
        self,
        policy: str = "default",
        *,
        last_saved: int | None = None,
        client: Client | None = None,
        consumer: str | None = None,
        lease_ttl_s: float | None = None,
        max_attempts: int | None = None,
        patience_s: float = PATIENCE_S,
        force: bool = False,
    ) -> None:
        """`max_attempts` gives batches back that were delivered more often, until the policy's rules quarantine them.
        Every delivery counts, also those after a resume. Without it only the rules decide (`lease.max_deliveries` and
        `lease.max_resumes`). `force` resumes even if batches were settled or purged that should come back."""
        if max_attempts is not None and max_attempts < 1:
            raise errors.ConfigurationError("max_attempts must be at least 1")
        self.policy = policy
        """The policy that is trained."""
        self.client = client or Client()
        """The client that the calls are made with."""
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}"
        """Who leases, as the descriptors of batches say."""
        self._lease_ttl_s = lease_ttl_s
        self._max_attempts = max_attempts
        self._patience_s = patience_s
        self._requests = uuid7()
        self._leased = 0
        self.resumed: ResumeResponse = self._patiently(
            lambda: self.client.resume(policy, step=last_saved, force=force or None)
        )
        """The answer to the resume, with the number of batches that came back."""
        self.epoch = self.resumed.epoch
        """The epoch of this trainer, which all its calls carry."""
        self.version = self.resumed.version
        """The version that was published last."""
        self._heartbeats = BatchHeartbeats(self.client)
        # Batches hold the trainer. When neither is used any more, nothing extends the leases.
        weakref.finalize(self, self._heartbeats.stop)
        log.info(
            "epoch %d of policy %s begins after step %s; %d batches came back",
            self.epoch,
            policy,
            last_saved,
            self.resumed.returned_batches,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yields one batch after the other and never ends. Each must be acked or given back before the next one; a
        batch for which neither happened is given back here. For several batches in one step use `lease`."""
        while True:
            batch = self.lease()
            assert batch is not None
            yield batch
            if batch.ended is None:
                self._give_back(batch, "the trainer went on without an ack")

    def lease(self, wait_s: float | None = None) -> Batch | None:
        """Leases the next batch, and waits until there is one. After `wait_s`, if given, the answer is None.

        If an answer is lost, the repeated request gets the same batch and lease.
        """
        end = None if wait_s is None else time.monotonic() + wait_s
        told = time.monotonic()
        while True:
            left_s = POLL_S if end is None else min(POLL_S, max(0.0, end - time.monotonic()))
            descriptor = self._patiently(functools.partial(self._ask, int(left_s * 1_000)))
            if descriptor is not None:
                self._leased += 1
                batch = Batch(self.client, descriptor, _Lease(self, self._heartbeats, self._patiently))
                self._heartbeats.add(descriptor, self.epoch, self._lease_ttl_s)
                if self._max_attempts is None or batch.attempt <= self._max_attempts:
                    return batch
                log.warning(
                    "batch %s is delivered for the %d. time, so it is given back (max_attempts = %d)",
                    batch.batch_id,
                    batch.attempt,
                    self._max_attempts,
                )
                self._give_back(batch, f"delivered {batch.attempt} times")
            elif end is not None and time.monotonic() >= end:
                return None
            elif time.monotonic() - told >= WAITING_LOG_S:
                told = time.monotonic()
                self._tell_waiting()

    def saved(self, step: int) -> None:
        """Says that the weights of `step` are on disk: no resume brings back what was acked at or before it.

        If older checkpoints are kept to return to them, name the oldest one.
        """
        self._patiently(lambda: self.client.checkpoint(self.policy, step=step, epoch=self.epoch))

    def publish(self, step: int, *, uri: str | None = None, version: int | None = None) -> int:
        """Publishes the weights after `step`, which agents then use, and returns their version: the next number, unless
        a greater one is given. Write the weights to `uri` before."""
        number = self.version + 1 if version is None else version
        self._patiently(lambda: self.client.publish(self.policy, number, step=step, uri=uri, epoch=self.epoch))
        self.version = number
        return number

    def status(self) -> PolicyStatus:
        """Returns the policy: its rules, its version, and what the next batch waits for."""
        status = self._patiently(lambda: self.client.get_policy(self.policy))
        if status is None:
            raise errors.ConfigurationError(f"the policy {self.policy} does not exist any more")
        return status

    def close(self) -> None:
        """Stops extending leases. A batch that is not acked is delivered again, to the next trainer."""
        self._heartbeats.stop()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Trainer of {self.policy}: epoch {self.epoch}, version {self.version}>"

    def _ask(self, wait_ms: int) -> BatchDescriptor | None:
        return self.client.lease(
            self.policy,
            consumer=self.consumer,
            request_id=f"{self._requests}-{self._leased}",
            wait_ms=wait_ms,
            epoch=self.epoch,
        )

    def _give_back(self, batch: Batch, reason: str) -> None:
        """Gives a batch back. If the service cannot be reached, it goes back when its lease time is over."""
        try:
            batch.nack(reason)
        except (errors.LeaseLost, errors.Unreachable, errors.Unavailable) as error:
            log.info("batch %s goes back by itself: %s", batch.batch_id, error)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeats a call, beyond the client's own repeats, while the service cannot be reached."""
        return patiently(call, self._patience_s)

    def _tell_waiting(self) -> None:
        try:
            status = self.client.get_policy(self.policy)
        except errors.ForebayError:
            return
        if status is not None:
            waiting = status.waiting
            log.info(
                "waiting for a batch of %s: %d of %d groups are ready, %d are open; the last post was at %s",
                self.policy,
                waiting.ready_groups,
                waiting.needed_groups,
                waiting.open_groups,
                waiting.last_post_at,
            )


class _Lease(Owner):
    """The lease of a batch. It holds the trainer, so that the lease is extended while the batch is used."""

    def __init__(
        self, trainer: Trainer, heartbeats: BatchHeartbeats, patiently: Callable[[Callable[[], object]], object]
    ):
        self._trainer = trainer
        self._heartbeats = heartbeats
        self._patiently = patiently

    def ack(self, batch: Batch, step: int) -> None:
        lease, trainer = _token(batch), self._trainer
        try:
            # The lease is extended until the answer arrives.
            self._patiently(lambda: trainer.client.ack(batch.batch_id, lease=lease, step=step, epoch=trainer.epoch))
        except errors.LeaseLost:
            self._end(batch, "lost")
            raise
        except errors.AlreadyAcked:
            self._end(batch, "acked")
            raise
        self._end(batch, "acked")

    def nack(self, batch: Batch, reason: str | None, groups: Sequence[str] | None) -> None:
        lease, trainer = _token(batch), self._trainer
        # If the answer is lost, the batch goes back when its lease time is over.
        self._heartbeats.remove(batch.batch_id)
        try:
            trainer.client.nack(batch.batch_id, lease=lease, reason=reason, groups=groups, epoch=trainer.epoch)
        except errors.LeaseLost:
            self._end(batch, "lost")
            raise
        self._end(batch, "given back")

    def is_lost(self, batch: Batch) -> bool:
        return self._heartbeats.is_lost(batch.batch_id)

    def _end(self, batch: Batch, how: Ended) -> None:
        self._heartbeats.remove(batch.batch_id)
        batch.ended = how


def _token(batch: Batch) -> str:
    lease = batch.descriptor.lease
    assert lease is not None, "a batch that was leased has a token"
    return lease
