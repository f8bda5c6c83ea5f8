"""Policies, totals, keys and the state of the service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .rules import PolicyRules
from .trajectory import GroupState

Role = Literal["produce", "train", "read", "admin"]
"""What a key permits. The service's `api::roles` lists the roles that each route accepts."""


@dataclass(slots=True, kw_only=True)
class PolicyStatus:
    """A policy: its rules, its weight versions and the contents of its buffer."""

    policy: str
    """Name of the policy."""
    rules: PolicyRules
    """Rules. Some apply to groups opened from now on, the others from the next request on."""
    warnings: list[str] = field(default_factory=list[str])
    """In the answer to `PUT /policies/{p}`: settings that changed although the request did not name them."""
    run: int
    """Number of the current run; it starts at 1 and grows with every reset."""
    epoch: int
    """Lineage of the weights; every resume starts a new epoch."""
    version: int
    """Current weight version."""
    version_step: int | None = None
    """Step at which the version was published."""
    version_uri: str | None = None
    """URL of the version's weights."""
    checkpoint_step: int | None = None
    """Last settled step."""
    restored: bool = False
    """True after the service was restored from a backup, until a trainer resumes. A trainer that is refused as
    `superseded` in this time was not replaced by another one and should resume."""
    rollouts: dict[str, int]
    """Number of rollouts by state, with the state names of the ledger."""
    groups: dict[str, int]
    """Number of groups by state."""
    batches: dict[str, int]
    """Number of batches by state."""
    waiting: Waiting
    """What the next batch is waiting for."""


@dataclass(slots=True, kw_only=True)
class WaitingEnvironment:
    """An environment, and how many of its groups the next batch needs."""

    environment: str
    """Its label."""
    ready_groups: int
    """Number of its groups that are ready, counted up to 1,000 or to the groups of a batch, whichever is more."""
    needed_groups: int
    """Number of its groups that the next batch waits for; 0 if it has no `min_share`."""
    open_groups: int
    """Number of its open groups, among the first 1,000 open groups of the policy."""


@dataclass(slots=True, kw_only=True)
class WaitingAsker:
    """A consumer that waits for a batch."""

    consumer: str | None = None
    """Its name; null if it sends none."""
    since: str
    """Since when it waits. Short pauses between its requests are part of the wait."""
    until: str
    """If it does not ask again until then, it does not wait any more."""


@dataclass(slots=True, kw_only=True)
class WaitingHolder:
    """A batch that a consumer holds."""

    batch_id: str
    """Id of the batch."""
    consumer: str | None = None
    """Who holds it; null if the consumer sent no name."""
    since: str
    """When the lease began."""
    expires_at: str | None = None
    """When the lease ends, unless it is extended."""
    attempt: int
    """Number of the delivery."""


@dataclass(slots=True, kw_only=True)
class Waiting:
    """What the next batch is waiting for."""

    ready_groups: int
    """Number of groups that are ready now."""
    needed_groups: int
    """Number of groups in a full batch."""
    returned_batches: int
    """Number of returned batches, which are delivered first."""
    open_groups: int
    """Number of open groups."""
    fullest: list[OpenGroup]
    """The open groups that need the fewest further rollouts, at most 5."""
    environments: list[WaitingEnvironment] = field(default_factory=list[WaitingEnvironment])
    """The environments that have shares in `batch.environments`, in the order of their labels. If no batch is ready
    although there are enough groups, it waits for those that have fewer ready groups than needed."""
    reserved_rollouts: int = 0
    """Number of rollouts with reserved room that have not been posted."""
    last_post_at: str | None = None
    """When the last rollout was received."""
    dropped_last_hour: dict[str, int]
    """Number of rollouts and groups dropped in the last hour, by rule."""
    stale_last_hour: int
    """Number of groups that became stale in the last hour."""
    asking: list[WaitingAsker] = field(default_factory=list[WaitingAsker])
    """The consumers that wait for a batch at any replica, the longest waiting first, at most 8. What is shown may be 3
    seconds old."""
    holding: list[WaitingHolder] = field(default_factory=list[WaitingHolder])
    """The batches that consumers hold, the longest held first, at most 8."""


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """An open group and the number of rollouts in it."""

    group_id: str
    """Id of the group."""
    state: GroupState
    """State after this post."""
    arrived: int
    """Number of kept and masked rollouts."""
    size: int
    """Size of the group: the number of places for rollouts."""


@dataclass(slots=True, kw_only=True)
class PolicyList:
    """Names of all policies."""

    policies: list[PolicyStatus]
    """Policies, in the order of their names."""
    next: str | None = None
    """Cursor of the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class Stats:
    """Totals of the whole service."""

    policies: dict[str, PolicyStats]
    """Totals of every policy, by name."""
    conserved: bool
    """True when, for every policy, the number received equals the sum over all states."""


@dataclass(slots=True, kw_only=True)
class PolicyStats:
    """Totals of one policy since it was created."""

    received: int
    """Number of receipts with `duplicate = false`."""
    rollouts: dict[str, int]
    """Number of rollouts by state; `forgotten` counts those whose tombstone expired."""
    groups: dict[str, int]
    """Number of groups by state."""
    batches: dict[str, int]
    """Number of batches by state."""
    dropped: dict[str, int]
    """Number of rollouts and groups dropped, by rule."""
    live_bytes: int
    """Bytes of stored payloads that are not yet trained."""
    conserved: bool
    """True when `received` equals the sum of `rollouts`."""


@dataclass(slots=True, kw_only=True)
class KeyRequest:
    """A request for a new key."""

    name: str
    """Who or what the key is for: a label, not an identity."""
    role: Role
    """Role of the key."""
    policies: Sequence[str] | None = None
    """Policies that the key may access: names, in which `*` stands for any characters. All policies when absent."""
    expires_in_s: int | None = None
    """Seconds from now until the key expires; it never expires when absent."""


@dataclass(slots=True, kw_only=True)
class KeyCreated:
    """A new key. Only this answer contains the secret."""

    key: str
    """Value to send as `Authorization: Bearer`."""
    info: KeyInfo
    """The key as it appears in lists."""


@dataclass(slots=True, kw_only=True)
class KeyInfo:
    """A key in a list. It never contains the secret, because the service does not store it."""

    key_id: str
    """Id of the key, which is public: the part between `fb_` and the secret."""
    name: str
    """Who or what the key is for."""
    role: Role
    """Role of the key."""
    policies: list[str]
    """Policies that the key may access."""
    created_at: str
    """When it was created."""
    last_used_at: str | None = None
    """When the key was last accepted; null if never."""
    expires_at: str | None = None
    """When the key expires; null if never."""
    revoked_at: str | None = None
    """When the key was revoked; null if it was not."""


@dataclass(slots=True, kw_only=True)
class KeyPage:
    """A page of keys."""

    keys: list[KeyInfo]
    """Keys, in the order in which they were created."""
    next: str | None = None
    """Value of `after` for the next page; null on the last page."""


@dataclass(slots=True, kw_only=True)
class WhoAmI:
    """Who the caller is, and what it may do."""

    role: Role
    """Role of the caller; `admin` for everybody while the service needs no keys."""
    policies: list[str]
    """Policies that the caller may access: names, in which `*` stands for any characters."""
    key_id: str | None = None
    """Id of the caller's key; null while the service needs no keys."""
    name: str | None = None
    """Who or what the key is for; null while the service needs no keys."""
    keys_required: bool
    """Whether calls need a key."""
    version: str
    """The service's version, e.g. `0.1.0`."""
    at: str
    """The service's time."""


@dataclass(slots=True, kw_only=True)
class Health:
    """The answer that shows that the process is alive."""

    status: str
    """Always `ok`."""
    version: str
    """The service's version, e.g. `0.1.0`."""
