"""Sessions, in which the calls of agents are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .trajectory import Receipt, Sampling, Status

SessionState = Literal["open", "finishing", "finished", "aborted", "expired"]
"""State of a session."""


@dataclass(slots=True, kw_only=True)
class SessionRequest:
    """A request to open a session: one execution of an agent, whose calls are recorded."""

    policy: str | None = None
    """Policy that every model name stands for; `default` when absent. Not together with `models`."""
    models: Mapping[str, SessionModel] | None = None
    """What the model names of the agent stand for, at most 64. `*` stands for all other names. Without it, a call
    with another name is refused."""
    rollout_id: str | None = None
    """Id of the rollout of each policy. If absent, the service creates one, and a repeated request opens another
    session."""
    group_id: str | None = None
    """Id of the group of each policy; if absent, the rollouts are groups of one."""
    group_size: int | None = None
    """Size of the group in rollouts; the policy's `group.size` when absent."""
    environment: str | None = None
    """Label of the environment."""
    execution_id: str | None = None
    """Id of the execution that the session belongs to. If absent, the service creates one when the session ends;
    sessions without one that are finished together share it."""
    sampling: Sampling | None = None
    """How tokens are sampled. It replaces what the agent's calls ask for."""
    ttl_s: int | None = None
    """Seconds after which the session expires; `sessions.ttl_s` of the configuration when absent."""
    idle_s: int | None = None
    """Seconds without a call after which the session expires; `sessions.idle_s` of the configuration when
    absent."""
    max_calls: int | None = None
    """The most calls; `sessions.max_calls` of the configuration when absent, which is also the maximum."""
    metadata: Mapping[str, Any] | None = None
    """JSON object of bounded depth and size, which becomes the metadata of the trajectories."""


@dataclass(slots=True, kw_only=True)
class SessionModel:
    """What a model name of an agent stands for."""

    policy: str | None = None
    """The policy whose rollout the calls belong to. `null` means that calls are forwarded and not recorded, because
    the model is not in training."""


@dataclass(slots=True, kw_only=True)
class SessionOpened:
    """A session that is open. The key is only in this answer and cannot be read again."""

    session_id: str
    """Id of the session."""
    key: str
    """Key for the calls of the agent. It can be used for nothing else."""
    rollout_id: str
    """Id of the rollout of each policy."""
    duplicate: bool
    """Whether the session was opened before, so that only the key is new."""
    base_urls: BaseUrls
    """Where the agent reaches the session."""
    expires_at: str
    """When the session expires, unless it ends before."""


@dataclass(slots=True, kw_only=True)
class BaseUrls:
    """The addresses of a session for the clients of agents."""

    openai: str
    """For clients of OpenAI's APIs. It ends with `/v1`."""
    anthropic: str
    """For clients of Anthropic's API, which append `/v1` themselves."""


@dataclass(slots=True, kw_only=True)
class FinishRequest:
    """A request to finish a session."""

    reward: float | None = None
    """Reward of every policy that is not in `rewards`. It must be finite; the sign of a zero is not kept."""
    rewards: Mapping[str, float] | None = None
    """Rewards by policy."""
    reward_components: Mapping[str, float] | None = None
    """Named parts of the reward, for filters and export. Each name may occur once."""
    status: Status | None = None
    """How the execution ended; `completed` when absent, or `truncated` if a call was refused because a bound of the
    session was reached."""
    metadata: Mapping[str, Any] | None = None
    """JSON object whose members are added to the metadata of the session, and replace members with the same
    names."""
    wait_ms: int | None = None
    """Milliseconds to wait for calls in flight before they are cancelled; 5,000 when absent."""


@dataclass(slots=True, kw_only=True)
class SessionFinish:
    """One session of a request that finishes several of them."""

    session_id: str
    """Id of the session."""
    reward: float | None = None
    """Reward of every policy that is not in `rewards`. It must be finite; the sign of a zero is not kept."""
    rewards: Mapping[str, float] | None = None
    """Rewards by policy."""
    reward_components: Mapping[str, float] | None = None
    """Named parts of the reward, for filters and export. Each name may occur once."""
    status: Status | None = None
    """How the execution ended; `completed` when absent, or `truncated` if a call was refused because a bound of the
    session was reached."""
    metadata: Mapping[str, Any] | None = None
    """JSON object whose members are added to the metadata of the session, and replace members with the same
    names."""
    wait_ms: int | None = None
    """Milliseconds to wait for calls in flight before they are cancelled; 5,000 when absent."""


@dataclass(slots=True, kw_only=True)
class AbortRequest:
    """A request to end a session without a reward."""

    reason: str
    """Why, 1 to 256 bytes."""
    keep: bool | None = None
    """Whether the trajectories have the segments of the recorded calls; `false` when absent."""


@dataclass(slots=True, kw_only=True)
class SessionEnded:
    """A session that has ended, and what became of its rollouts."""

    session_id: str
    """Id of the session."""
    state: SessionState
    """Its state."""
    reason: str | None = None
    """Why it was aborted or expired."""
    duplicate: bool
    """Whether the session had ended before this request, which changed nothing."""
    receipts: list[Receipt]
    """The receipts of its trajectories, one per policy, in the order of the policies' names. They are those of the
    request that ended the session."""
    assembly: SessionAssembly
    """What became of all its calls."""


@dataclass(slots=True, kw_only=True)
class SessionAssembly:
    """What became of the calls of a session. The calls are those in segments and those that were dropped, and the
    sampled tokens are those that are trained, those that were dropped, and those that were trimmed."""

    calls: int
    """Number of calls."""
    segments: int
    """Number of segments that were assembled."""
    breaks: int
    """Number of prompts that share more than 64 ids with an earlier call and then differ from what was recorded.
    Each of them begins a segment that an agent which repeats its history exactly would not need."""
    dropped: SessionDropped
    """Calls that are in no segment, by reason."""
    sampled_tokens: int
    """Tokens that were sampled."""
    trained_tokens: int
    """Sampled tokens that segments train."""
    dropped_tokens: SessionDropped
    """Sampled tokens of the calls that are in no segment, by reason."""
    trimmed: int
    """Sampled stop tokens that are not trained, because the next prompt has another id in their place."""


@dataclass(slots=True, kw_only=True)
class SessionDropped:
    """A number of calls or tokens by the reason for which they are in no segment."""

    empty: int
    """The call sampled no tokens. If that is so of all calls of a policy, its rollout trains nothing and has a
    reward."""
    undelivered: int
    """The agent did not receive the answer, and no other call continues the call."""
    retry: int
    """No other call continues the call, and the same agent sent its prompt again."""
    aborted: int
    """The session was aborted or expired, and its segments were not kept."""


@dataclass(slots=True, kw_only=True)
class SessionInfo:
    """A session."""

    session_id: str
    """Id of the session."""
    state: SessionState
    """Its state."""
    reason: str | None = None
    """Why it was aborted or expired."""
    rollout_id: str
    """Id of the rollout of each policy."""
    group_id: str
    """Id of the group of each policy."""
    environment: str | None = None
    """Label of the environment."""
    execution_id: str | None = None
    """Id of the execution that it belongs to; null until the session ends if it was opened without one."""
    policies: list[SessionPolicy]
    """The policies whose rollouts it records, in the order of their names."""
    models: dict[str, SessionModel]
    """What the model names of the agent stand for."""
    calls: int
    """Number of recorded calls."""
    bytes: int
    """Stored bytes of the recorded calls."""
    full: bool
    """Whether a call was refused because a bound of the session was reached."""
    opened_at: str
    """When it was opened."""
    last_call_at: str | None = None
    """When its last recorded call ended."""
    due_at: str | None = None
    """When it expires, unless a call is recorded or it ends before."""
    expires_at: str
    """When it expires at the latest."""
    ended_at: str | None = None
    """When it ended."""
    receipts: list[Receipt] | None = None
    """The receipts of its trajectories; absent before it ends."""
    assembly: SessionAssembly | None = None
    """What became of its calls; absent before it ends."""


@dataclass(slots=True, kw_only=True)
class SessionPolicy:
    """A policy whose rollout a session records."""

    policy: str
    """Its name."""
    run: int
    """Run in which the session was opened."""
    policy_version: int
    """Weight version that was current when the session was opened."""
    calls: int
    """Number of recorded calls."""
    sampled_tokens: int
    """Number of tokens that were sampled in these calls."""
    special_tokens: int = 0
    """Number of special tokens of the model in the texts of these calls, in the mode `exact`; 0 otherwise."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about these calls, each once: a name, a colon and a sentence. The receipt has them, too."""


@dataclass(slots=True, kw_only=True)
class SessionPage:
    """A page of sessions."""

    sessions: list[SessionInfo]
    """Sessions in the order in which they were opened, or the newest first."""
    next: str | None = None
    """The `after` of the next page; absent on the last page."""
    examined: int
    """Number of sessions that were examined to find those of the page, at most 10,000 in a filtered list."""


@dataclass(slots=True, kw_only=True)
class SessionTurns:
    """The recorded calls of a session."""

    turns: list[SessionTurn]
    """Calls in the order in which they were recorded. They are deleted some time after the session has ended."""


@dataclass(slots=True, kw_only=True)
class SessionTurn:
    """One recorded call."""

    seq: int
    """Its number in the session, from 1."""
    policy: str
    """Policy whose rollout it belongs to."""
    model: str
    """Name of the model that the agent asked for."""
    dialect: str
    """API that the agent used."""
    agent: str | None = None
    """Name of the agent or sub-agent that made it."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    sampled_tokens: int
    """Number of tokens that were sampled."""
    version_assumed: bool = False
    """Whether the engine did not say the version of every sampled token, so that the policy's published version stands
    in."""
    finish_reason: str
    """Why the engine stopped."""
    delivered: bool
    """Whether the agent received the answer."""
    retry_count: int
    """How many times the agent's client says that it has repeated the request."""
    started_at: str
    """When it began."""
    ended_at: str
    """When its answer was complete."""
    outcome: str
    """What became of it: `trained`, or the reason for which it is in no segment: `empty`, `undelivered` or `retry`.
    Later calls can change it while the session is open."""
    break_: SessionBreak | None = field(default=None, metadata={"name": "break"})
    """Where its prompt differs from an earlier call that it should have continued; absent if it does not."""


@dataclass(slots=True, kw_only=True)
class SessionBreak:
    """Where the prompt of a call differs from an earlier call that it should have continued."""

    nearest: int
    """Number of the earlier call that the prompt shares most with."""
    position: int
    """Number of ids that both begin with."""
    cause: str
    """What differs first: `system` (the tools, the arguments of the template, or a system message), `rewrite` (the
    content of a message), `reasoning` (the reasoning of an answer was dropped or changed), `arguments` (those of a tool
    call are the same JSON in another spelling), `tokens` (no message: the same text has other ids), `siblings`
    (several answers are equal to it), or `unknown`."""
    expected: list[int]
    """The next ids of the earlier call, at most 16."""
    found: list[int]
    """The next ids of the prompt, at most 16."""
    expected_text: str | None = None
    """The text of `expected`; absent unless the service has the model's tokenizer, as in the mode `exact`."""
    found_text: str | None = None
    """The text of `found`; absent unless the service has the model's tokenizer."""
