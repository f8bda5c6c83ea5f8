"""The exceptions of the package. Every one says which call failed; each problem type of the service has a class."""

from __future__ import annotations

from typing import ClassVar

from ._wire import Problem, Verdict, Violation


class ForebayError(Exception):
    """The base of all errors of a call. No error ever contains a key."""

    way_out: ClassVar[str] = ""
    """What to do about it in Python, where the service can only name its own fields."""

    def __init__(
        self,
        message: str,
        *,
        method: str | None = None,
        path: str | None = None,
        status: int | None = None,
        type: str | None = None,
        request_id: str | None = None,
        violations: tuple[Violation, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.method = method
        """The method of the call, e.g. `POST`; None if there was no call."""
        self.path = path
        """The path of the call, e.g. `/trajectories`."""
        self.status = status
        """The HTTP status, if the service answered."""
        self.type = type
        """The stable type of the problem, e.g. `lease-lost`, if the service answered with a problem document."""
        self.request_id = request_id
        """The id of the request, which the service's log has as well."""
        self.violations = violations
        """What is wrong in the request, each with a JSON pointer."""

    def __str__(self) -> str:
        call = f"{self.method} {self.path}: " if self.method else ""
        request = f" (request {self.request_id})" if self.request_id else ""
        return (
            call
            + self.message
            + request
            + (f"\n  {self.way_out}" if self.way_out else "")
            + "".join(f"\n  {violation.pointer or '/'}: {violation.detail}" for violation in self.violations)
        )


class VersionWarning(UserWarning):
    """The client and the service are of versions that are far apart."""


class ConfigurationError(ForebayError, ValueError):
    """The client cannot be used as it was configured."""


class NotEncodableError(ForebayError, ValueError):
    """The request cannot be written as JSON. Nothing was sent; `violations` names the place."""


class RecordError(ForebayError, ValueError):
    """A call of an agent cannot be recorded, or a recorder is used in a way that its state does not allow."""


class EngineAborted(RecordError):
    """The inference engine ended a call before its answer was complete. Repeat the call."""


class RecorderFull(RecordError):
    """The rollout has as many calls or tokens as a trajectory may have, so the call was not recorded."""


class SpoolError(ForebayError):
    """The service could not be reached, and the post could not be written to the spool either."""


class SpoolFull(SpoolError):
    """The spool has as many bytes as it may have. The post is neither stored nor on disk."""


class StateError(ForebayError):
    """The file of a `State` cannot be used."""


class Unreachable(ForebayError):
    """No connection could be opened, or it broke before the answer was complete.

    In the second case it is not known whether the service has processed the request.
    """

    not_begun: bool = False
    """Whether the service certainly did not receive the request."""


class CertificateRefused(Unreachable):
    """The client does not accept the service's certificate, or the service does not accept the client's."""


class Cancelled(ForebayError):
    """The call was cancelled, or the client was closed meanwhile."""


class UnexpectedAnswer(ForebayError):
    """An answer that the API does not give; it probably came from a proxy or from another service."""


class ServiceError(ForebayError):
    """The service refused the call with a problem document. Each problem type that this version knows has a class."""

    types: ClassVar[tuple[str, ...]] = ()
    """The problem types of this class."""

    problem: Problem
    """The whole document."""

    @property
    def title(self) -> str:
        return self.problem.title

    @property
    def detail(self) -> str | None:
        return self.problem.detail

    @property
    def verdict(self) -> Verdict | None:
        """With `rollout-conflict`: the verdict of the stored rollout."""
        return self.problem.verdict

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the call is worth repeating."""
        return self.problem.retry_after_s


class AccessDenied(ServiceError):
    """The key is missing, or does not allow the call (401, 403)."""


class Absent(ServiceError):
    """What the call names does not exist, or the key does not see it (404)."""


class Conflict(ServiceError):
    """The call contradicts the state of the service; nothing changed (409)."""


class Backlog(ServiceError):
    """The policy or the service has as much work as it may have; wait (429)."""


class Unavailable(ServiceError):
    """The service cannot answer now (503)."""


class Malformed(ServiceError):
    """The body is not JSON, not an Arrow stream, or does not decompress."""

    types = ("malformed",)


class IncompleteBody(ServiceError):
    """The body did not arrive whole."""

    types = ("incomplete-body",)


class TwoLengths(ServiceError):
    """The request has both `Content-Length` and `Transfer-Encoding`; the connection is closed."""

    types = ("two-lengths",)


class Unauthorized(AccessDenied):
    """No key, an unknown or revoked one, or one that has expired."""

    types = ("unauthorized",)


class Forbidden(AccessDenied):
    """The role of the key does not allow the call."""

    types = ("forbidden",)


class CrossOrigin(AccessDenied):
    """A web page of another origin tried to change something."""

    types = ("cross-origin",)


class NoSuchRoute(Absent):
    """The path does not exist."""

    types = ("no-such-route",)


class UnknownPolicy(Absent):
    """The policy does not exist, or the key does not see it."""

    types = ("unknown-policy",)
    way_out = (
        "put_policy(name, {}) of the client creates it, and so does a [[policy]] in the configuration of the service."
    )


class NotFound(Absent):
    """The rollout, group, batch or key does not exist."""

    types = ("not-found",)


class MethodNotAllowed(ServiceError):
    """The path does not support this method."""

    types = ("method-not-allowed",)


class NotAcceptable(ServiceError):
    """The service cannot write what `Accept` asks for."""

    types = ("not-acceptable",)


class BodyTimeout(ServiceError):
    """The body took longer than `limits.body_timeout_s`."""

    types = ("body-timeout",)


class RolloutConflict(Conflict):
    """Another rollout has this identity."""

    types = ("rollout-conflict",)


class GroupSizeConflict(Conflict):
    """The group has another size."""

    types = ("group-size-conflict",)


class GroupDecided(Conflict):
    """From `/groups/close` and `/groups/discard`: the group's state does not allow the call."""

    types = ("group-decided",)


class ScoreConflict(Conflict):
    """The scorer has given another value, and the score does not replace it."""

    types = ("score-conflict",)
    way_out = (
        "score(..., replace=True) changes the value until the rollout is judged. A score of another scorer does not "
        "replace it: the mean of both is the score."
    )


class BatchState(Conflict):
    """From `readmit`: nothing of the batch is quarantined."""

    types = ("batch-state",)


class LeaseLost(Conflict):
    """The lease of a batch or of a scorer's work expired, was revoked or used, or was never granted."""

    types = ("lease-lost",)


class AlreadyAcked(Conflict):
    """The batch was acked with another step."""

    types = ("already-acked",)


class StepSettled(Conflict):
    """The step is at or below the last checkpoint."""

    types = ("step-settled",)
    way_out = (
        "Go on with the numbers of the saved steps: Trainer(..., last_saved=STEP). To train from the beginning, "
        "call reset(policy) of the client before."
    )


class StepUnknown(Conflict):
    """The step is above the last acked one."""

    types = ("step-unknown",)


class Superseded(Conflict):
    """Another trainer has resumed, or the service was restored."""

    types = ("superseded",)
    way_out = (
        "Either another trainer has resumed this policy, or the service was restored from a backup; then "
        "get_policy(policy).restored is true. If no other trainer is to go on, start this one again: "
        "Trainer(..., last_saved=STEP) resumes from its last checkpoint."
    )


class LineageGap(Conflict):
    """A resume would skip settled or purged data."""

    types = ("lineage-gap",)
    way_out = (
        "Pass last_saved=STEP, the step that your weights were saved at. To train from the beginning, call "
        "reset(policy) of the client before; to go on without the data that is gone, pass force=True."
    )


class VersionConflict(Conflict):
    """The version is not above the current one."""

    types = ("version-conflict",)


class SessionEnded(Conflict):
    """The session has ended, or is being finished."""

    types = ("session-ended",)


class AttemptOver(Conflict):
    """Another attempt of the session has begun."""

    types = ("attempt-over",)


class NoAttemptsLeft(Conflict):
    """The session has had as many attempts as it may have."""

    types = ("no-attempts-left",)
    way_out = (
        "Finish or abort the session. The rule sessions.max_attempts of its policies, as it was at the opening, is the "
        "most attempts."
    )


class SessionConflict(Conflict):
    """Another request opened a session of the rollout."""

    types = ("session-conflict",)


class SessionReset(Conflict):
    """A policy of the session was reset."""

    types = ("session-reset",)


class EndConflict(Conflict):
    """Another finish or abort ended the session."""

    types = ("end-conflict",)


class TooManyKeys(Conflict):
    """1,000 keys exist that are not revoked, or the session has 64 keys."""

    types = ("too-many-keys",)


class TooManyPolicies(Conflict):
    """As many policies exist as `limits.policies` allows."""

    types = ("too-many-policies",)


class OverQuota(Conflict):
    """The policies of the team would be more, or have more backlog, than a quota of the service allows."""

    types = ("over-quota",)


class UploadGap(Conflict):
    """The bytes before these of the upload are not stored."""

    types = ("upload-gap",)


class FirstKey(Conflict):
    """The first key must be of role `admin` and see all policies."""

    types = ("first-key",)


class Purged(ServiceError):
    """The payloads are purged."""

    types = ("purged",)


class ColumnExpired(ServiceError):
    """A column was kept until an ack or a checkpoint, as the rules say."""

    types = ("column-expired",)


class TooLarge(ServiceError):
    """The body, or what it expands to, is too large."""

    types = ("too-large",)


class BundleOverBacklog(ServiceError):
    """The bundle alone is larger than the policy's backlog."""

    types = ("bundle-over-backlog",)


class LengthRequired(ServiceError):
    """Neither `Content-Length` nor `Content-Range` says how long the upload is."""

    types = ("length-required",)


class RangeNotSatisfiable(ServiceError):
    """The upload has no such bytes."""

    types = ("range-not-satisfiable",)


class UnsupportedMediaType(ServiceError):
    """The `Content-Type` or `Content-Encoding` is not accepted."""

    types = ("unsupported-media-type",)


class WrongHost(ServiceError):
    """The `Host` is not a name of this service."""

    types = ("wrong-host",)


class Invalid(ServiceError):
    """The request contradicts the contract or the rules; `errors` has the places."""

    types = ("invalid",)


class DigestMismatch(ServiceError):
    """The digest of the bytes is not the one that the upload is named by."""

    types = ("digest-mismatch",)


class NoTurns(ServiceError):
    """The session has no call, or the agent received none of its answers."""

    types = ("no-turns",)


class NoRoom(Backlog):
    """As many rollouts have been started as will be fresh."""

    types = ("no-room",)


class BacklogFull(Backlog):
    """The policy holds as much untrained work as it may."""

    types = ("backlog-full",)


class Busy(Backlog):
    """Another draft of filters is being tried at this replica."""

    types = ("busy",)


class Internal(ServiceError):
    """A bug, or a corrupt store; the log has the cause."""

    types = ("internal",)


class Damaged(ServiceError):
    """A stored payload is damaged; its group is quarantined."""

    types = ("damaged",)


class TransferCoding(ServiceError):
    """The `Transfer-Encoding` is something other than `chunked`; the connection is closed."""

    types = ("transfer-coding",)


class Overloaded(Unavailable):
    """Bodies and answers in memory have reached their limit."""

    types = ("overloaded",)


class StoreUnavailable(Unavailable):
    """The store cannot answer. Whether the request took effect is not known."""

    types = ("store-unavailable",)


class RulesChanging(Unavailable):
    """The rules or the weight version of the policy, or the scores of a rollout, changed several times while the
    filters of this post were evaluated. Nothing of the post is stored."""

    types = ("rules-changing",)


class TeacherFailed(Unavailable):
    """The teacher of a policy did not score the segments of a session; nothing changed."""

    types = ("teacher-failed",)


class SessionChanging(Unavailable):
    """Calls kept being recorded while the session was assembled."""

    types = ("session-changing",)


class NoUpstream(Unavailable):
    """From `POST /sessions`: the service has no listener for agents."""

    types = ("no-upstream",)


class UpstreamNotReady(Unavailable):
    """From `POST /sessions`: the answers of the inference engine cannot be recorded now."""

    types = ("upstream-not-ready",)


class TooManyUploads(Unavailable):
    """There is no room for more uploads that no rollout has named."""

    types = ("too-many-uploads",)


class TooManyWaiters(Unavailable):
    """The maximum number of requests is waiting already, in total or with this key."""

    types = ("too-many-waiters",)


class NotReady(Unavailable):
    """From `/readyz`: the database cannot read or write, or with `full=1`, the object store takes no payloads."""

    types = ("not-ready",)


class Stopping(Unavailable):
    """The service is stopping."""

    types = ("stopping",)


BY_STATUS: dict[int, type[ServiceError]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: Absent,
    409: Conflict,
    429: Backlog,
    503: Unavailable,
}
"""The class of problems of a type that this version does not know."""


def _all_below(cls: type[ServiceError]) -> list[type[ServiceError]]:
    return [cls, *(found for below in cls.__subclasses__() for found in _all_below(below))]


BY_TYPE: dict[str, type[ServiceError]] = {name: cls for cls in _all_below(ServiceError) for name in cls.types}
"""The class of each problem type."""


def of_problem(problem: Problem, method: str, path: str, request_id: str | None) -> ServiceError:
    """Makes the exception of a problem document."""
    cls = BY_TYPE.get(problem.type) or BY_STATUS.get(problem.status, ServiceError)
    detail = f": {problem.detail}" if problem.detail else ""
    error = cls(
        f"{problem.title} ({problem.type}, status {problem.status}){detail}",
        method=method,
        path=path,
        status=problem.status,
        type=problem.type,
        request_id=request_id or problem.instance,
        violations=tuple(problem.errors),
    )
    error.problem = problem
    return error
