"""The client: one method per call of the API, for agents, trainers and operators."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from . import _bodies, _codec, errors, versions
from ._agents import AgentMethods
from ._bodies import Compression
from ._http import ARROW, NDJSON, SILENCE_TIMEOUT_S, Answer, Call, Cancellation, Config, Transport, json_body, path
from ._options import as_evaluation, evaluation_of
from ._patience import POLL_S
from ._posts import Posted, identified
from ._retry import ASKED_MAX_S, Retry, RoomWait, retry_after_s
from ._spool import BYTES_MAX, Spool
from ._uuid import uuid7
from ._wire import (
    AbortRequest,
    AckRequest,
    Admission,
    AdmissionRequest,
    BatchDescriptor,
    BatchPage,
    BatchRequest,
    BatchState,
    BulkLine,
    CheckpointRequest,
    CheckpointResponse,
    CloseRequest,
    ColumnUpload,
    DiscardRequest,
    EvalList,
    EvalTask,
    EvalTaskList,
    EvalVersion,
    ExportedRollout,
    ExtendRequest,
    FilterNames,
    FilterRule,
    FinishRequest,
    GroupInfo,
    GroupPage,
    GroupState,
    Health,
    IdWhy,
    ImportReport,
    JournalEntry,
    JournalPage,
    KeyCreated,
    KeyInfo,
    KeyPage,
    KeyRequest,
    ListOrder,
    NackRequest,
    Overview,
    OverviewPolicy,
    PolicyList,
    PolicyRules,
    PolicySeries,
    PolicyStatus,
    PolicySteps,
    PolicyWhy,
    Purpose,
    Receipt,
    ResetRequest,
    ResetResponse,
    ResumeRequest,
    ResumeResponse,
    Role,
    RolloutState,
    Sample,
    Sampling,
    SavedState,
    ScoreExtended,
    ScoreExtendRequest,
    ScoreInclude,
    ScoreItem,
    ScoreLeaseRequest,
    ScoreLeases,
    ScoreList,
    ScoreReceipt,
    ScoreRequest,
    ScoreRetried,
    ScoreRetryRequest,
    SessionEnded,
    SessionFinish,
    SessionInfo,
    SessionModel,
    SessionOpened,
    SessionPage,
    SessionRequest,
    SessionResume,
    SessionState,
    SessionTurns,
    ShardBalance,
    Stats,
    Status,
    StepBucket,
    StepInfo,
    SuiteInfo,
    SuiteRequest,
    TrajectoryContent,
    TrajectoryPage,
    TrajectoryStory,
    TryRequest,
    TryResult,
    Upload,
    Verdict,
    VersionRequest,
    WhoAmI,
)
from .versions import Version

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("forebay")

T = TypeVar("T")

URL = "http://127.0.0.1:8080"

ADMISSION_PAUSE_S = 5.0
"""Time between two requests for room, if the service names none."""

PAGE = 1_000
"""Entries that are asked for at once; the API allows no more."""

OVERVIEW_PAGE = 200
"""The same for the overview, of which the API allows fewer."""

TASKS_PAGE = 500
"""The same for the tasks of a suite."""

BULK_LINES = 512
"""Trajectories of one request of `post_many`: the service takes up to 16,384 and up to 64 MiB."""


class Client(AgentMethods):
    """A client of one Forebay service.

    The address and the key are those of the arguments, or of `FOREBAY_URL` and `FOREBAY_KEY`; certificates to trust
    (`ca`) and an own certificate with its key (`identity`) are PEM files, or in `FOREBAY_CA` and `FOREBAY_IDENTITY`.
    Proxies in the environment are not used.

    With a `spool`, a folder (or `FOREBAY_SPOOL`; an empty text for none), posts are kept there while the service cannot
    be reached; see `docs/python-agents.md`.

    Threads may share a client. It may be pickled, as its configuration; and after a fork both processes may use it.

    A call is repeated only where that is safe: always if the service certainly did not begin it, and if the outcome is
    unknown only if the service recognises the repeat. If no attempt succeeds, the last error is raised
    (`forebay.errors`).
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        ca: str | os.PathLike[str] | None = None,
        identity: str | os.PathLike[str] | None = None,
        timeout_s: float = SILENCE_TIMEOUT_S,
        retry: Retry | None = None,
        compression: Compression = "auto",
        check_version: bool = True,
        spool: str | os.PathLike[str] | None = None,
        spool_bytes_max: int = BYTES_MAX,
    ) -> None:
        self._start(
            Config(
                url=url or os.environ.get("FOREBAY_URL") or URL,
                key=key or os.environ.get("FOREBAY_KEY") or None,
                ca=_file(ca, "FOREBAY_CA"),
                identity=_file(identity, "FOREBAY_IDENTITY"),
                timeout_s=timeout_s,
                retry=retry or Retry(),
                compression=compression,
                check_version=check_version,
                spool=_file(spool, "FOREBAY_SPOOL") or None,
                spool_bytes_max=spool_bytes_max,
            )
        )

    def _start(self, config: Config, transport: Transport | None = None, spool: Spool | None = None) -> None:
        _bodies.check(config.compression)
        self._config = config
        self._transport = transport or Transport(config)
        self._spool = spool
        if config.spool is not None and spool is None:
            self._spool = Spool(config.spool, self, bytes_max=config.spool_bytes_max)
            self._spool.adopt()

    def with_options(self, *, timeout_s: float | None = None, retry: Retry | None = None) -> Client:
        """Returns a client with other timeouts or another rule of repeats, which shares the connections."""
        other = type(self).__new__(type(self))
        config = replace(
            self._config,
            timeout_s=self._config.timeout_s if timeout_s is None else timeout_s,
            retry=self._config.retry if retry is None else retry,
        )
        other._start(config, self._transport, self._spool)
        return other

    def copy(self) -> Client:
        """Returns a client with the same configuration and connections of its own, and without a spool."""
        other = type(self).__new__(type(self))
        other._start(replace(self._config, spool=None))
        return other

    def cancellable(self) -> contextlib.AbstractContextManager[Cancellation]:
        """For waits between calls: what is cancelled in the block when this client is closed."""
        return self._transport.cancellable()

    @property
    def config(self) -> Config:
        """What the client was made of, and what a pickle of it has."""
        return self._config

    @property
    def spool(self) -> Spool | None:
        """The posts that wait on disk for the service, if the client has a spool."""
        return self._spool

    @property
    def url(self) -> str:
        """The address of the service."""
        return self._config.url

    def close(self) -> None:
        """Closes the connections. Calls that still wait in other threads end with `errors.Cancelled`."""
        if self._spool is not None:
            self._spool.close()
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        key = "with a key" if self._config.key else "without a key"
        return f"<{type(self).__name__} of {self._config.url} {key}>"

    def __getstate__(self) -> Config:
        return self._config

    def __setstate__(self, config: Config) -> None:
        self._start(config)

    # Agents: hand in finished rollouts, and look up what became of them.

    @overload
    def post(self, trajectory: Posted) -> Receipt: ...
    @overload
    def post(self, trajectory: Sequence[Posted]) -> list[Receipt]: ...
    def post(self, trajectory: Posted | Sequence[Posted]) -> Receipt | list[Receipt]:
        """Posts one trajectory, or several in one commit: either all are stored or none.

        If this returns, they are stored durably. The post is safe to repeat: a trajectory without `rollout_id` gets one
        before it is sent, and the service recognises the repeat by it.
        """
        if isinstance(trajectory, Sequence):
            bundle = [identified(item) for item in trajectory]
            return _answered_each(self._post(bundle, is_bundle=True), len(bundle))
        (receipt,) = _answered_each(self._post(identified(trajectory), is_bundle=False), 1)
        return receipt

    def post_body(self, body: bytes, *, encoding: str | None = None) -> list[Receipt]:
        """Posts the JSON of one or several trajectories, which have ids, as it is. It is never spooled."""
        return _receipts(
            self._send(Call(method="POST", path=path("trajectories"), repeat=True, body=body, encoding=encoding))
        )

    def post_many(self, trajectories: Iterable[Posted]) -> Iterator[BulkLine]:
        """Posts trajectories independently of each other, many in one request, and yields an answer for each, in order.

        `receipt` is the receipt of a trajectory that was stored, and `problem` says why it was refused; the caller has
        to repeat those that were refused with status 429 or 503. Trajectories are read as the answers are.
        """
        remaining = iter(trajectories)
        count = 0
        while chunk := [identified(item) for item in islice(remaining, BULK_LINES)]:
            body = b"".join(json_body(item, "POST", path("trajectories")) + b"\n" for item in chunk)
            answer = self._send(
                Call(method="POST", path=path("trajectories"), repeat=True, body=body, media=NDJSON, accept=NDJSON)
            )
            for line in _answered_each(_lines(answer, BulkLine, "POST", path("trajectories")), len(chunk)):
                yield replace(line, line=line.line + count)
            count += len(chunk)

    def import_(
        self,
        format: str,
        documents: bytes | Iterable[Mapping[str, Any]],
        *,
        policy: str | None = None,
        environment: str | None = None,
        group_size: int | None = None,
        policy_version: int | None = None,
        prefix: str | None = None,
        reward_at: str | None = None,
        group_at: str | None = None,
        rollout_at: str | None = None,
        allow_late: bool | None = None,
    ) -> ImportReport:
        """Imports recorded rollouts of another project: the bytes of a file, or its documents.

        `format` is `atif`, `chat`, `nemo-gym` or `verifiers`. The other arguments hold for all rollouts and take
        precedence over what the documents say; those that end in `_at` are JSON pointers into each record. The report
        says what was refused, and where. A repeated import stores nothing twice. Documents with more rollouts of a
        group than `group_size` are refused together, unless `allow_late` is true. For files that are larger than a body
        may be, use the command `forebay import`.
        """
        place = path("imports", format)
        body = documents
        if not isinstance(body, bytes):
            body = b"".join(json_body(document, "POST", place) + b"\n" for document in body)
        labels = {
            "policy": policy,
            "environment": environment,
            "group_size": group_size,
            "policy_version": policy_version,
            "prefix": prefix,
            "reward_at": reward_at,
            "group_at": group_at,
            "rollout_at": rollout_at,
            "allow_late": allow_late,
        }
        query = {name: value for name, value in labels.items() if value is not None}
        answer = self._send(Call(method="POST", path=place, query=query, repeat=True, body=body, media=NDJSON))
        return _parsed(answer, ImportReport, "POST", place)

    def admit(
        self,
        policy: str = "default",
        *,
        rollouts: int,
        group_id: str | None = None,
        group_size: int | None = None,
        eval: str | None = None,
        task: str | None = None,
        environment: str | None = None,
        wait_s: float | None = None,
    ) -> Admission:
        """Reserves room for rollouts that are about to start, and waits until there is some.

        From 1 to `rollouts` are granted. `wait_s` bounds the wait: if there is no room by then, 0 are granted, and
        `reason` says why. With `wait_s=0` the service is asked once. Without it, the wait has no bound.

        Name the group if all of the rollouts belong to one: missing places of a group that has begun always get room.
        If the group takes no more rollouts, `GroupDecided` is raised. Name the environment if the policy gives
        environments a minimum share.

        With `eval`, the name of a suite, and perhaps its `task`, the rollouts evaluate the policy. They have room of
        their own (`admissions.eval` of the rules) and no group.
        """
        place = path("admissions")
        group = {"group_id": group_id, "group_size": group_size, "eval": eval, "task": task}
        group = as_evaluation(group)
        request = AdmissionRequest(
            policy=policy,
            rollouts=rollouts,
            group_id=group["group_id"],
            group_size=group["group_size"],
            environment=environment,
            **evaluation_of(group["eval"], group["task"], group["group_id"], group["group_size"]),
        )
        body = json_body(request, "POST", place)
        call = Call(method="POST", path=place, repeat=False, body=body)
        end = None if wait_s is None else time.monotonic() + wait_s
        room = RoomWait()
        while True:
            answer = self._send(call)
            admission = _parsed(answer, Admission, "POST", place)
            asked_s = retry_after_s(429, answer.headers)
            pause_s = ADMISSION_PAUSE_S if asked_s is None else min(asked_s, ASKED_MAX_S)
            left_s = math.inf if end is None else end - time.monotonic()
            if admission.granted > 0 or left_s <= 0:
                if self._spool is not None:
                    self._spool.note_admission(admission.admission_id, admission.policy_version)
                return admission
            # Many agents wait for the same room, so they do not all ask at the same time.
            pause_s = min(pause_s * random.uniform(0.5, 1.0), left_s)
            if room.add(pause_s):
                log.warning(
                    "%d rollouts of %s wait for room, %.0f s so far: %s",
                    rollouts,
                    policy,
                    room.waited_s,
                    admission.reason,
                )
            self._transport.pause(call, pause_s)

    def get_trajectory(self, policy: str, rollout_id: str) -> TrajectoryStory | None:
        """Returns what became of a rollout in the current run of its policy, or None if it is not known."""
        query = {"policy": policy, "rollout_id": rollout_id}
        return self._found(errors.NotFound, "GET", path("trajectories"), query=query, into=TrajectoryStory)

    def get_content(
        self,
        policy: str,
        rollout_id: str,
        *,
        segment: int | None = None,
        from_: int | None = None,
        limit: int | None = None,
        messages_from: int | None = None,
        messages_limit: int | None = None,
    ) -> TrajectoryContent | None:
        """Returns a window of the tokens of a rollout and a page of its messages, or None if it is not known."""
        query = {
            "policy": policy,
            "rollout_id": rollout_id,
            "segment": segment,
            "from": from_,
            "limit": limit,
            "messages_from": messages_from,
            "messages_limit": messages_limit,
        }
        place = path("trajectories", "content")
        return self._found(errors.NotFound, "GET", place, query=query, into=TrajectoryContent)

    def list_trajectories(
        self,
        policy: str | None = None,
        *,
        execution_id: str | None = None,
        group_id: str | None = None,
        verdict: Verdict | None = None,
        reason: str | None = None,
        state: RolloutState | None = None,
        step: int | None = None,
        environment: str | None = None,
        purpose: Purpose | None = None,
        order: ListOrder | None = None,
    ) -> Iterator[TrajectoryStory]:
        """Yields what became of rollouts, in the order in which they arrived or with `order="newest"` the newest first,
        and asks for pages as they are read.

        With `purpose="eval"` they are the rollouts that evaluate the policy; without it, those that are trained.
        """
        query = {
            "policy": policy,
            "execution_id": execution_id,
            "group_id": group_id,
            "verdict": verdict,
            "reason": reason,
            "state": state,
            "step": step,
            "environment": environment,
            "purpose": purpose,
            "order": order,
        }
        return self._pages(path("trajectories"), query, TrajectoryPage, lambda page: page.trajectories)

    def list_groups(
        self,
        policy: str = "default",
        *,
        group_id: str | None = None,
        batch_id: str | None = None,
        state: GroupState | None = None,
        reason: str | None = None,
        environment: str | None = None,
        order: ListOrder | None = None,
    ) -> Iterator[GroupInfo]:
        """Yields groups, in the order in which they were opened, or with `order="newest"` the newest first."""
        query = {
            "policy": policy,
            "group_id": group_id,
            "batch_id": batch_id,
            "state": state,
            "reason": reason,
            "environment": environment,
            "order": order,
        }
        return self._pages(path("groups"), query, GroupPage, lambda page: page.groups)

    def close_group(self, policy: str, group_id: str) -> GroupInfo:
        """Decides an open group now, as if it had timed out."""
        request = CloseRequest(policy=policy, group_id=group_id)
        return self._call("POST", path("groups", "close"), request, into=GroupInfo, repeat=False)

    def discard_group(self, policy: str, group_id: str, *, reason: str) -> GroupInfo:
        """Discards a group that is open, ready or quarantined."""
        request = DiscardRequest(policy=policy, group_id=group_id, reason=reason)
        return self._call("POST", path("groups", "discard"), request, into=GroupInfo, repeat=False)

    # Scores of rollouts, from whoever judges them, also after their post.

    def score(
        self,
        rollout_id: str,
        name: str,
        value: float,
        *,
        policy: str | None = None,
        turn: int | str | None = None,
        scorer: str | None = None,
        rationale: str | None = None,
        replace: bool = False,
        lease: str | None = None,
    ) -> ScoreReceipt:
        """Gives a rollout a score, which its policy may require (`scores.required`) before it judges the rollout.

        The same score again changes nothing. Another value by the same scorer raises `ScoreConflict`, unless `replace`
        is true. A score that comes after the decision about the rollout is stored, and changes nothing (`applied`).
        With a `lease` of `lease_scores` the score settles that work; if the lease has ended, `LeaseLost` is raised.

        With a `turn`, which is its number from 0 or the id of its call, the score named `reward` is that of the turn,
        for policies that compare turns.
        """
        request = ScoreRequest(
            policy=policy,
            rollout_id=rollout_id,
            name=name,
            turn=turn,
            value=value,
            scorer=scorer,
            rationale=rationale,
            replace=replace,
            lease=lease,
        )
        return self._call("POST", path("scores"), request, into=ScoreReceipt)

    def score_all(self, scores: Iterable[ScoreRequest | Mapping[str, Any]]) -> list[ScoreReceipt]:
        """Gives several scores in one commit, 256 at most: either all are stored or none."""
        requests = list(scores)
        receipts = self._call("POST", path("scores"), requests, into=list[ScoreReceipt])
        return _answered_each(receipts, len(requests))

    def scores(self, rollout_id: str, *, policy: str | None = None) -> ScoreList:
        """Returns the scores of a rollout in the current run of its policy, and which it still lacks."""
        query = {"policy": policy, "rollout_id": rollout_id}
        return self._call("GET", path("scores"), query=query, into=ScoreList)

    def lease_scores(
        self,
        names: Sequence[str],
        *,
        policy: str | None = None,
        max: int | None = None,
        wait_ms: int | None = None,
        scorer: str | None = None,
        request_id: str | None = None,
        ttl_s: int | None = None,
        include: Sequence[ScoreInclude] = (),
    ) -> list[ScoreItem]:
        """Leases work for a scorer: scores with these names that rollouts lack and that the rules let scorers lease
        (`scores.work`), the oldest first, `max` items at most. Without `max` it is one.

        Returns an empty list if there was no work within `wait_ms`, which is at most 60,000. The leases last for
        `ttl_s`, without it for `lease.ttl_s` of the rules. `include` names what of the rollouts to send along. With a
        `request_id` the call can be repeated safely, and is. `forebay.Scorer` makes these calls for a loop.
        """
        request = ScoreLeaseRequest(
            policy=policy,
            names=names,
            max=max,
            wait_ms=wait_ms,
            scorer=scorer,
            request_id=request_id,
            ttl_s=ttl_s,
            include=list(include),
        )
        place = path("scores", "leases")
        return self._call("POST", place, request, into=ScoreLeases, repeat=request_id is not None).items

    def extend_scores(
        self, leases: Sequence[str], *, policy: str | None = None, ttl_s: int | None = None
    ) -> ScoreExtended:
        """Extends leases of work, 256 at most: they expire `ttl_s` from now, without it `lease.ttl_s` of the rules.

        The answer says which are held and which are lost. A lost lease raises no error here.
        """
        request = ScoreExtendRequest(policy=policy, leases=leases, ttl_s=ttl_s)
        return self._call("POST", path("scores", "leases", "extend"), request, into=ScoreExtended)

    def retry_scores(self, name: str, *, policy: str | None = None) -> int:
        """Gives work whose attempts are used up all of them again. Returns how many items there were."""
        request = ScoreRetryRequest(policy=policy, name=name)
        return self._call("POST", path("scores", "retry"), request, into=ScoreRetried, repeat=False).retried

    # Evaluation: rollouts of suites, which are never trained, and what they say about each version.

    def put_suite(self, policy: str, suite: str, *, tasks: int, repeats: int = 1, threshold: float = 1.0) -> SuiteInfo:
        """Says when a suite is complete at a version: when `tasks` tasks have `repeats` rollouts each.

        `repeats` is also the largest k of pass@k. A rollout passes with a reward of at least `threshold`, which counts
        for rollouts that come later.
        """
        request = SuiteRequest(tasks=tasks, repeats=repeats, threshold=threshold)
        return self._call("PUT", path("policies", policy, "suites", suite), request, into=SuiteInfo)

    def evals(
        self, policy: str = "default", suite: str | None = None, *, before: int | None = None, limit: int | None = None
    ) -> EvalList:
        """Returns what each suite says about the versions of a policy, the newest first, or only what one suite says.

        For each suite there are `limit` versions, at most 100 and without it 20. If there are `more`, ask for those
        `before` the last one.
        """
        query = {"suite": suite, "before": before, "limit": limit}
        return self._call("GET", path("policies", policy, "evals"), query=query, into=EvalList)

    def wait_evals(self, policy: str, suite: str, version: int, *, wait_s: float | None = None) -> EvalVersion | None:
        """Waits until a suite is complete at a version, and returns what it says. `put_suite` says when it is complete.

        Returns None if that did not happen within `wait_s`. Without `wait_s`, the wait has no bound.
        """
        place = path("policies", policy, "evals")
        end = None if wait_s is None else time.monotonic() + wait_s
        while True:
            left_s = POLL_S if end is None else min(POLL_S, max(0.0, end - time.monotonic()))
            query = {"wait_complete": f"{suite}@{version}", "wait_ms": int(left_s * 1_000), "limit": 1}
            for found in self._call("GET", place, query=query, into=EvalList).suites:
                if found.versions and found.versions[0].version == version and found.versions[0].complete:
                    return found.versions[0]
            if end is not None and time.monotonic() >= end:
                return None

    def eval_tasks(self, policy: str, suite: str, version: int | None = None) -> Iterator[EvalTask]:
        """Yields the tasks of a suite by name: what their rollouts say at a version, and what they said at the version
        before. Without a `version` it is the newest one."""
        place = path("policies", policy, "suites", suite, "tasks")
        after: str | None = None
        while True:
            query = {"version": version, "after": after, "limit": TASKS_PAGE}
            page = self._call("GET", place, query=query, into=EvalTaskList)
            yield from page.tasks
            # A newer version may get its first results before the next page is read.
            version, after = page.version, page.next
            if after is None:
                return

    # Sessions, in which the service records the calls of agents.

    def open_session(
        self,
        policy: str | None = None,
        *,
        models: Mapping[str, SessionModel] | None = None,
        rollout_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        environment: str | None = None,
        execution_id: str | None = None,
        purpose: Purpose | None = None,
        suite: str | None = None,
        task: str | None = None,
        sampling: Sampling | None = None,
        ttl_s: int | None = None,
        idle_s: int | None = None,
        max_calls: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SessionOpened:
        """Opens a session, with a `rollout_id` that is made here if none is given, so that the call can be repeated."""
        request = SessionRequest(
            policy=policy,
            models=models,
            rollout_id=rollout_id or uuid7(),
            group_id=group_id,
            group_size=group_size,
            environment=environment,
            execution_id=execution_id,
            purpose=purpose,
            suite=suite,
            task=task,
            sampling=sampling,
            ttl_s=ttl_s,
            idle_s=idle_s,
            max_calls=max_calls,
            metadata=metadata,
        )
        return self._call("POST", path("sessions"), request, into=SessionOpened)

    def resume_session(self, session_id: str, *, attempt: int | None = None) -> SessionOpened:
        """Begins another attempt of a session, whose agent died. Its key is new, and the keys before permit nothing.

        With `attempt`, only the attempt that follows it is begun. If an answer is lost, the call is not repeated: a
        repeat would begin one attempt more.
        """
        request = SessionResume(attempt=attempt)
        place = path("sessions", session_id, "resume")
        return self._call("POST", place, request, into=SessionOpened, repeat=False)

    def upload(self, content: bytes, *, media_type: str = "application/octet-stream") -> Upload:
        """Stores an image, or another medium, once for all rollouts whose messages name it by the `url` of the answer.

        It is kept as long as the payload of a rollout that names it, and for a day after the last upload.
        """
        place = path("media")
        sent = Call(method="POST", path=place, repeat=True, body=content, media=media_type)
        return _parsed(self._send(sent), Upload, "POST", place)

    def put_media(self, digest: str, content: bytes, *, media_type: str = "application/octet-stream") -> Upload:
        """Does what `upload` does, for those who know the BLAKE3 digest: what is stored already is not stored again."""
        place = path("media", digest)
        sent = Call(method="PUT", path=place, repeat=True, body=content, media=media_type)
        return _parsed(self._send(sent), Upload, "PUT", place)

    def upload_column(self, content: Buffer) -> ColumnUpload:
        """Stores a column of a segment, and returns what names it in `Segment.columns`.

        The content is the bytes of its rows, or an array of numpy, row-major and little-endian; of lists of numbers,
        what `forebay.columns.ragged` returns. It is kept for a day, or for as long as the rules of the policy say from
        the post of the rollout on.
        """
        place, body = path("columns"), memoryview(content).tobytes()
        sent = Call(method="POST", path=place, repeat=True, body=body, media="application/octet-stream")
        uploaded = _parsed(self._send(sent), Upload, "POST", place)
        return ColumnUpload(digest=uploaded.digest, bytes=uploaded.bytes)

    def put_column(self, digest: str, content: Buffer) -> ColumnUpload:
        """Does what `upload_column` does, for those who know the BLAKE3 digest: what is stored already is not stored
        again, and the content may have 4 GiB."""
        place, body = path("columns", digest), memoryview(content).tobytes()
        sent = Call(method="PUT", path=place, repeat=True, body=body, media="application/octet-stream")
        uploaded = _parsed(self._send(sent), Upload, "PUT", place)
        return ColumnUpload(digest=uploaded.digest, bytes=uploaded.bytes)

    def get_media(self, digest: str) -> bytes:
        """Returns an upload, named by its digest or by the address in a message (`forebay:DIGEST`)."""
        return self._exchange("GET", path("media", digest.removeprefix("forebay:")), None, None, True).body

    def save_session_state(
        self, session_id: str, content: bytes, *, call: int | None = None, attempt: int | None = None
    ) -> SavedState:
        """Stores at most 1 MiB that an agent or its sandbox goes on from if it is started again.

        It takes the place of what was stored before. `call` is the number of the last call before it: that of the last
        recorded one if it is left out.
        """
        place = path("sessions", session_id, "state")
        query = {"call": call, "attempt": attempt}
        sent = Call(method="PUT", path=place, query=query, repeat=True, body=content, media="application/octet-stream")
        return _parsed(self._send(sent), SavedState, "PUT", place)

    def get_session_state(self, session_id: str) -> bytes | None:
        """Returns what was stored last with `save_session_state`, or None."""
        try:
            return self._exchange("GET", path("sessions", session_id, "state"), None, None, True).body
        except errors.NotFound:
            return None

    def get_session(self, session_id: str) -> SessionInfo | None:
        """Returns a session, or None if it is not known."""
        return self._found(errors.NotFound, "GET", path("sessions", session_id), into=SessionInfo)

    def list_sessions(
        self,
        policy: str = "default",
        *,
        rollout_id: str | None = None,
        state: SessionState | None = None,
        order: ListOrder | None = None,
    ) -> Iterator[SessionInfo]:
        """Yields sessions, in the order in which they were opened, or with `order="newest"` the newest first. With
        `rollout_id`, only the session that recorded this rollout of the current run."""
        query = {"policy": policy, "rollout_id": rollout_id, "state": state, "order": order}
        return self._pages(path("sessions"), query, SessionPage, lambda page: page.sessions)

    def list_session_turns(self, session_id: str) -> SessionTurns:
        """Returns the recorded calls of a session, and what becomes of each."""
        return self._call("GET", path("sessions", session_id, "turns"), into=SessionTurns)

    def finish_session(
        self,
        session_id: str,
        *,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        reward_components: Mapping[str, float] | None = None,
        turn_rewards: Mapping[str, float] | None = None,
        turn_state_keys: Mapping[str, str] | None = None,
        status: Status | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait_ms: int | None = None,
        attempt: int | None = None,
    ) -> SessionEnded:
        """Ends a session with its reward: the rollouts that its calls are assembled to are stored.

        `turn_rewards` are rewards of calls, by the ids of their answers or by their numbers in the session, and
        `turn_state_keys` the names of the states in which they were made. With `attempt`, it is refused if
        another attempt has begun.
        """
        request = FinishRequest(
            reward=reward,
            rewards=rewards,
            reward_components=reward_components,
            turn_rewards=turn_rewards,
            turn_state_keys=turn_state_keys,
            status=status,
            metadata=metadata,
            wait_ms=wait_ms,
            attempt=attempt,
        )
        return self._call("POST", path("sessions", session_id, "finish"), request, into=SessionEnded)

    def finish_sessions(self, sessions: Sequence[SessionFinish]) -> list[SessionEnded]:
        """Ends several sessions in one commit, all or none."""
        ended = self._call("POST", path("sessions", "finish"), list(sessions), into=list[SessionEnded])
        return _answered_each(ended, len(sessions))

    def abort_session(
        self, session_id: str, *, reason: str, keep: bool | None = None, attempt: int | None = None
    ) -> SessionEnded:
        """Ends a session without a reward. Its calls are kept as segments only if `keep` is true. With `attempt`, it is
        refused if another attempt has begun."""
        request = AbortRequest(reason=reason, keep=keep, attempt=attempt)
        return self._call("POST", path("sessions", session_id, "abort"), request, into=SessionEnded)

    # Trainers: lease and ack batches, and record the lineage of the weights.

    def lease(
        self,
        policy: str = "default",
        *,
        consumer: str | None = None,
        request_id: str | None = None,
        wait_ms: int | None = None,
        partial: bool | None = None,
        epoch: int | None = None,
    ) -> BatchDescriptor | None:
        """Leases the next batch. Returns None if no batch became ready within `wait_ms`, which is at most 60,000.

        With a `request_id` the call can be repeated safely, and is.
        """
        request = BatchRequest(
            policy=policy, consumer=consumer, request_id=request_id, wait_ms=wait_ms, partial=partial, epoch=epoch
        )
        return self._maybe("POST", path("batches"), request, into=BatchDescriptor, repeat=request_id is not None)

    def get_batch(
        self, batch_id: str, *, shards: int | None = None, balance: ShardBalance | None = None
    ) -> BatchDescriptor | None:
        """Returns a batch without its lease, or None if it is not known; with `shards`, also the size of each shard."""
        query = {"shards": shards, "balance": balance}
        return self._found(errors.NotFound, "GET", path("batches", batch_id), query=query, into=BatchDescriptor)

    def list_batches(
        self, policy: str = "default", *, state: BatchState | None = None, order: ListOrder | None = None
    ) -> Iterator[BatchDescriptor]:
        """Yields batches, in the order in which they were cut, or with `order="newest"` the newest first."""
        query = {"policy": policy, "state": state, "order": order}
        return self._pages(path("batches"), query, BatchPage, lambda page: page.batches)

    def samples(
        self,
        batch_id: str,
        *,
        shard: int | None = None,
        shards: int | None = None,
        balance: ShardBalance | None = None,
        messages: bool | None = None,
        columns: Sequence[str] = (),
    ) -> list[Sample]:
        """Returns the rows of a batch, or of one of its shards, in order. An answer that is incomplete is an error.

        With `messages=False` the rows come without their messages, which may be as long as their tokens. With `columns`
        they name their uploads of these columns.
        """
        place = path("batches", batch_id, "samples")
        query = {"shard": shard, "shards": shards, "balance": balance, "messages": messages}
        query["columns"] = ",".join(columns) or None
        answer = self._send(Call(method="GET", path=place, query=query, repeat=True, accept=NDJSON))
        return _lines(answer, Sample, "GET", place)

    def samples_arrow(
        self,
        batch_id: str,
        *,
        shard: int | None = None,
        shards: int | None = None,
        balance: ShardBalance | None = None,
        messages: bool | None = None,
        columns: Sequence[str] = (),
        inner: tuple[int, int] | None = None,
    ) -> bytes:
        """Returns the rows of a batch, or of one of its shards, as a complete Arrow IPC stream.

        With `messages=False` the column of messages is null. With `columns` it has a column `column.NAME` for each of
        these uploads, of each row only the entries of the range `inner` of its first dimension.
        """
        query = {"shard": shard, "shards": shards, "balance": balance, "messages": messages}
        query |= {"columns": ",".join(columns) or None, "inner": f"{inner[0]}:{inner[1]}" if inner else None}
        call = Call(method="GET", path=path("batches", batch_id, "samples"), query=query, repeat=True, accept=ARROW)
        return self._send(call).body

    def extend(self, batch_id: str, *, lease: str, ttl_s: int, epoch: int | None = None) -> BatchDescriptor:
        """Extends a lease: it expires `ttl_s` from now."""
        request = ExtendRequest(lease=lease, ttl_s=ttl_s, epoch=epoch)
        return self._call("POST", path("batches", batch_id, "extend"), request, into=BatchDescriptor)

    def ack(self, batch_id: str, *, lease: str, step: int, epoch: int | None = None) -> BatchDescriptor:
        """Says which optimizer step consumed the batch. Change the weights only after this has returned."""
        request = AckRequest(lease=lease, step=step, epoch=epoch)
        return self._call("POST", path("batches", batch_id, "ack"), request, into=BatchDescriptor)

    def nack(
        self,
        batch_id: str,
        *,
        lease: str,
        reason: str | None = None,
        groups: Sequence[str] | None = None,
        epoch: int | None = None,
    ) -> BatchDescriptor:
        """Gives a batch back. Groups that are named are quarantined."""
        request = NackRequest(lease=lease, reason=reason, groups=groups, epoch=epoch)
        return self._call("POST", path("batches", batch_id, "nack"), request, into=BatchDescriptor, repeat=False)

    def readmit(self, batch_id: str) -> BatchDescriptor:
        """Brings back a quarantined batch, or the quarantined groups of a split one."""
        return self._call("POST", path("batches", batch_id, "readmit"), into=BatchDescriptor, repeat=False)

    def checkpoint(
        self, policy: str, *, step: int, force: bool | None = None, epoch: int | None = None
    ) -> CheckpointResponse:
        """Says that the trainer has saved the weights of `step` durably."""
        request = CheckpointRequest(step=step, force=force, epoch=epoch)
        return self._call("POST", path("policies", policy, "checkpoints"), request, into=CheckpointResponse)

    def resume(
        self, policy: str, *, step: int | None, force: bool | None = None, epoch: int | None = None
    ) -> ResumeResponse:
        """Says that a trainer starts from its checkpoint of `step`; None: from nothing. Begins a new epoch."""
        request = ResumeRequest(step=step, force=force, epoch=epoch)
        place = path("policies", policy, "resume")
        return self._call("POST", place, request, into=ResumeResponse, repeat=epoch is None)

    def publish(
        self,
        policy: str,
        version: int,
        *,
        step: int | None = None,
        uri: str | None = None,
        epoch: int | None = None,
        force: bool | None = None,
    ) -> PolicyStatus:
        """Publishes a weight version, which agents then use. A version that rises by more than 2^41 needs `force`."""
        request = VersionRequest(version=version, step=step, uri=uri, epoch=epoch, force=force)
        return self._call("PUT", path("policies", policy, "version"), request, into=PolicyStatus)

    def reset(self, policy: str, *, epoch: int | None = None) -> ResetResponse:
        """Begins a new run of a policy: what is not trained is discarded, and step and version start over."""
        request = ResetRequest(epoch=epoch)
        return self._call("POST", path("policies", policy, "reset"), request, into=ResetResponse, repeat=False)

    # Policies, totals and keys.

    def get_policy(self, policy: str = "default") -> PolicyStatus | None:
        """Returns a policy: its rules, its version and what its buffer holds. None if it is not known."""
        status = self._found(errors.UnknownPolicy, "GET", path("policies", policy), into=PolicyStatus)
        if self._spool is not None and status is not None:
            self._spool.note(status)
        return status

    def wait_version(self, policy: str, *, above: int, wait_ms: int = 30_000) -> PolicyStatus | None:
        """Waits until the version is another one than `above`. Returns None if that did not happen in `wait_ms`."""
        query = {"wait_version_above": above, "wait_ms": wait_ms}
        return self._maybe("GET", path("policies", policy), query=query, into=PolicyStatus)

    def version(self, policy: str = "default") -> Version:
        """Returns the current weight version. If `versions` is followed in this process, that takes no call."""
        return versions.current(self, self._config, policy)

    def versions(self, policy: str = "default") -> Iterator[Version]:
        """Yields the newest weight version whenever it is another one, for ever; at first the current one.

        While no version has been published, nothing is yielded. A resume or a reset may lower the version. All
        followers of a policy in a process share one long poll, which goes on while the service cannot be reached.
        """
        return versions.follow(self, self._config, policy)

    def get_tokenizer(self, policy: str = "default") -> bytes | None:
        """Returns the tokenizer file of a policy, or None if none is configured."""
        try:
            return self._send(Call(method="GET", path=path("policies", policy, "tokenizer"), repeat=True)).body
        except errors.NotFound:
            return None

    def list_overview(self) -> Iterator[OverviewPolicy]:
        """Yields the policies that the key may access with their states, the worst first."""
        return self._pages(path("overview"), {}, Overview, lambda page: page.policies, OVERVIEW_PAGE)

    def get_why(self, policy: str = "default") -> PolicyWhy:
        """Returns why a policy is as it is: its state, causes with numbers, and what is not the reason."""
        return self._call("GET", path("policies", policy, "why"), into=PolicyWhy)

    def why(self, id: str, policy: str | None = None) -> IdWhy:
        """Returns what became of a rollout, group or batch, in one policy or in those that the key may access."""
        return self._call("GET", path("why"), query={"id": id, "policy": policy}, into=IdWhy)

    def get_series(
        self,
        policy: str = "default",
        *,
        metrics: Sequence[str],
        from_: str | None = None,
        to: str | None = None,
        step_s: int | None = None,
    ) -> PolicySeries:
        """Returns what happened to a policy over time, in buckets: in the last hour, or between RFC 3339 times."""
        query = {"from": from_, "to": to, "step_s": step_s, "metrics": ",".join(metrics)}
        return self._call("GET", path("policies", policy, "series"), query=query, into=PolicySeries)

    def list_steps(self, policy: str = "default", *, order: ListOrder | None = None) -> Iterator[StepInfo]:
        """Yields what the steps of the current run had. Steps that were undone are yielded, too."""
        place = path("policies", policy, "steps")
        return self._pages(place, {"order": order}, PolicySteps, lambda page: page.steps)

    def get_step_buckets(
        self, policy: str = "default", *, from_: int, to: int, points: int | None = None
    ) -> list[StepBucket]:
        """Returns what a range of steps had, several steps together in each of at most `points` buckets."""
        query = {"from": from_, "to": to, "points": points}
        return self._call("GET", path("policies", policy, "steps"), query=query, into=PolicySteps).buckets

    def list_journal(self, policy: str = "default", *, order: ListOrder | None = None) -> Iterator[JournalEntry]:
        """Yields what operators and time did to a policy."""
        place = path("policies", policy, "journal")
        return self._pages(place, {"order": order}, JournalPage, lambda page: page.entries)

    def list_policies(self) -> Iterator[PolicyStatus]:
        """Yields the policies that the key sees, in the order of their names."""
        return self._pages(path("policies"), {}, PolicyList, lambda page: page.policies)

    def put_policy(self, policy: str, rules: PolicyRules | Mapping[str, Any]) -> PolicyStatus:
        """Replaces the rules of a policy, and creates it if it does not exist. Rules left out take their defaults."""
        return self._call("PUT", path("policies", policy), rules, into=PolicyStatus)

    def patch_policy(self, policy: str, patch: Mapping[str, Any]) -> PolicyStatus:
        """Changes the rules that are named; None resets a rule to its default (a JSON merge patch)."""
        return self._call("PATCH", path("policies", policy), patch, into=PolicyStatus)

    def export(
        self,
        policy: str | None = None,
        *,
        run: int | None = None,
        state: Sequence[RolloutState] | None = None,
        verdict: Sequence[Verdict] | None = None,
        min_reward: float | None = None,
        where: str | None = None,
        purpose: Purpose | None = None,
    ) -> Iterator[ExportedRollout]:
        """Yields the stored rollouts of a run as they arrive, whole groups in the order in which they were opened.

        With `purpose="eval"` they are the rollouts that evaluate the policy; without it, those that are trained.
        Only a few rollouts are held in memory. The command `forebay export` writes data sets to files.
        """
        query = {
            "policy": policy,
            "run": run,
            "state": ",".join(state) if state else None,
            "verdict": ",".join(verdict) if verdict else None,
            "min_reward": min_reward,
            "where": where,
            "purpose": purpose,
        }
        call = Call(method="GET", path=path("exports"), query=query, repeat=True, accept=NDJSON)
        if self._config.check_version:
            self._transport.check_version()
        with contextlib.closing(
            self._transport.stream(call, retry=self._config.retry, timeout_s=self._config.timeout_s)
        ) as parts:
            yield from _values(parts, ExportedRollout, method=call.method, path=call.path, status=200)

    def filter_variables(self) -> FilterNames:
        """Returns the names that filters know."""
        return self._call("GET", path("filters", "variables"), into=FilterNames)

    def try_filters(
        self,
        policy: str,
        filter: Sequence[FilterRule],
        *,
        groups: int | None = None,
        environment: str | None = None,
        examples: int | None = None,
    ) -> TryResult:
        """Tries filters on the groups of a policy that were decided last. Nothing is changed."""
        request = TryRequest(filter=filter, groups=groups, environment=environment, examples=examples)
        return self._call("POST", path("policies", policy, "filters", "try"), request, into=TryResult)

    def whoami(self) -> WhoAmI:
        """Returns what the key of this client may do."""
        return self._call("GET", path("whoami"), into=WhoAmI)

    def stats(self) -> Stats:
        """Returns the totals of every policy, and whether they add up."""
        return self._call("GET", path("stats"), into=Stats)

    def create_key(
        self, name: str, role: Role, *, policies: Sequence[str] | None = None, expires_in_s: int | None = None
    ) -> KeyCreated:
        """Creates a key. Only this answer has the secret."""
        request = KeyRequest(name=name, role=role, policies=policies, expires_in_s=expires_in_s)
        return self._call("POST", path("keys"), request, into=KeyCreated, repeat=False)

    def list_keys(self) -> Iterator[KeyInfo]:
        """Yields the keys, in the order in which they were created."""
        return self._pages(path("keys"), {}, KeyPage, lambda page: page.keys)

    def revoke_key(self, key_id: str) -> KeyInfo | None:
        """Revokes a key. Returns None if it is not known."""
        return self._found(errors.NotFound, "DELETE", path("keys", key_id), into=KeyInfo)

    def health(self) -> Health:
        """Returns the version of the service. It answers while its process is alive."""
        return self._call("GET", path("healthz"), into=Health)

    def is_ready(self) -> bool:
        """Whether the service can be reached, and its database reads and writes."""
        call = Call(method="GET", path=path("readyz"), repeat=True)
        try:
            self._transport.send(call, retry=Retry.none(), timeout_s=min(self._config.timeout_s, 10.0))
        except (errors.Unreachable, errors.Unavailable):
            return False
        return True

    def metrics(self) -> str:
        """Returns the metrics of the service in the text format of Prometheus."""
        return self._send(Call(method="GET", path=path("metrics"), repeat=True, accept="*/*")).body.decode()

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document of the service."""
        return json.loads(self._send(Call(method="GET", path=path("openapi.json"), repeat=True)).body)

    # What the calls share.

    def _send(self, call: Call) -> Answer:
        answer = self._transport.send(call, retry=self._config.retry, timeout_s=self._config.timeout_s)
        if self._config.check_version:
            self._transport.check_version()
        return answer

    def _post(self, trajectory: Posted | Sequence[Posted], *, is_bundle: bool) -> list[Receipt]:
        if self._spool is None:
            return self._post_now(trajectory, is_bundle=is_bundle)
        items = cast("Sequence[Posted]", trajectory if is_bundle else [trajectory])

        def send(completed: Sequence[Posted], once: bool) -> list[Receipt]:
            client = self.with_options(retry=replace(self._config.retry, attempts_max=1)) if once else self
            return client._post_now(completed if is_bundle else completed[0], is_bundle=is_bundle)

        return self._spool.post(self, items, send, is_bundle=is_bundle)

    def _post_now(self, trajectory: Posted | Sequence[Posted], *, is_bundle: bool) -> list[Receipt]:
        how: dict[str, Any] = {"compression": self._config.compression, "is_local": self._transport.base.is_local}
        call = _bodies.call(trajectory, is_bundle=is_bundle, **how)
        try:
            answer = self._send(call)
        except errors.ServiceError as error:
            if call.media != ARROW or error.status not in (400, 415, 422):
                raise
            # Nothing is stored. The answer to JSON names the place of each violation.
            answer = self._send(_bodies.json_call(trajectory, **how))
        return _receipts(answer)

    def _call(
        self,
        method: str,
        place: str,
        body: Any = None,
        *,
        into: type[T],
        query: Mapping[str, Any] | None = None,
        repeat: bool = True,
    ) -> T:
        answer = self._exchange(method, place, body, query, repeat)
        return _parsed(answer, into, method, place)

    def _maybe(
        self,
        method: str,
        place: str,
        body: Any = None,
        *,
        into: type[T],
        query: Mapping[str, Any] | None = None,
        repeat: bool = True,
    ) -> T | None:
        """A call that may be answered with 204."""
        answer = self._exchange(method, place, body, query, repeat)
        return None if answer.status == 204 else _parsed(answer, into, method, place)

    def _found(
        self,
        absent: type[errors.ServiceError],
        method: str,
        place: str,
        *,
        into: type[T],
        query: Mapping[str, Any] | None = None,
    ) -> T | None:
        """A call about something that may not exist."""
        try:
            return self._call(method, place, into=into, query=query)
        except absent:
            return None

    def _exchange(self, method: str, place: str, body: Any, query: Mapping[str, Any] | None, repeat: bool) -> Answer:
        encoded = None if body is None else json_body(body, method, place)
        return self._send(Call(method=method, path=place, query=query or {}, repeat=repeat, body=encoded))

    def _pages(
        self,
        place: str,
        query: Mapping[str, Any],
        page: type[T],
        items: Callable[[T], Sequence[Any]],
        limit: int | None = None,
    ) -> Iterator[Any]:
        after: str | None = None
        while True:
            found = self._call("GET", place, into=page, query={**query, "limit": limit or PAGE, "after": after})
            yield from items(found)
            after = cast("Any", found).next
            if after is None:
                return


def _receipts(answer: Answer) -> list[Receipt]:
    if answer.body.lstrip().startswith(b"["):
        return _parsed(answer, list[Receipt], "POST", path("trajectories"))
    return [_parsed(answer, Receipt, "POST", path("trajectories"))]


def _parsed(answer: Answer, into: type[T], method: str, place: str) -> T:
    try:
        return _codec.decode(into, json.loads(answer.body))
    except ValueError as error:
        raise errors.UnexpectedAnswer(
            f"the answer does not have the documented form: {error}",
            method=method,
            path=place,
            status=answer.status,
            request_id=answer.headers.get("x-request-id"),
        ) from None


def _lines(answer: Answer, into: type[T], method: str, place: str) -> list[T]:
    """The values of an answer with one per line."""
    where = {"method": method, "path": place, "request_id": answer.headers.get("x-request-id")}
    return list(_values([answer.body], into, status=answer.status, **where))


def _values(parts: Iterable[bytes], into: type[T], **where: Any) -> Iterator[T]:
    """The values of an answer with one per line, whose parts may end anywhere."""
    number = 1
    partial: list[bytes] = []
    try:
        for part in parts:
            first, *lines = part.split(b"\n")
            partial.append(first)
            for following in lines:
                yield _codec.decode(into, json.loads(b"".join(partial)))
                number += 1
                partial = [following]
        if any(partial):
            raise ValueError("it ends in the middle of a line")
    except ValueError as error:
        raise errors.UnexpectedAnswer(
            f"line {number} of the answer does not have the documented form: {error}", **where
        ) from None


def _answered_each(answers: list[T], expected: int) -> list[T]:
    if len(answers) != expected:
        raise errors.UnexpectedAnswer(f"received {len(answers)} answers, but expected {expected}")
    return answers


def _file(given: str | os.PathLike[str] | None, variable: str) -> str | None:
    return os.fspath(given) if given is not None else os.environ.get(variable) or None
