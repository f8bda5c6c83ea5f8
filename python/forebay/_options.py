"""The arguments of rollouts and sessions, which both clients and both kinds of bundles take by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, TypedDict, cast

from ._answers import Labels
from ._wire import Admission, Sampling, SessionModel
from .errors import ConfigurationError


class CommonOptions(TypedDict, total=False):
    """What rollouts and sessions have in common. Everything may be left out, and None means the same.

    - `rollout_id`: Id of the rollout. Without one it gets a new one.
    - `group_id`: Id of the group: rollouts of one task that are compared with each other.
    - `group_size`: Size of the group in rollouts; that of the policy's rules if it is left out.
    - `data_pass`: Number of the pass over the data set. It is appended to `group_id` and `rollout_id`, as in
      `17.pass2`, because every pass needs ids of its own.
    - `eval`: Name of the suite that this is a result of. It evaluates the policy, is never trained, and has no group.
    - `task`: Name of its task in the suite, with `eval`; `rollout_id` if it is left out.
    - `environment`: Label of the environment.
    - `sampling`: How tokens are sampled.
    - `metadata`: What is kept with the rollout.
    """

    rollout_id: str | None
    group_id: str | None
    group_size: int | None
    data_pass: int | None
    eval: str | None
    task: str | None
    environment: str | None
    sampling: Sampling | Mapping[str, Any] | None
    metadata: Mapping[str, Any] | None


class BundledOptions(CommonOptions, total=False):
    """The arguments of a rollout in a bundle. Everything may be left out, and None means the same.

    - `policy_version`: The version of the weights that generate the rollout. Otherwise that of the `admission`, or the
      current one.
    - `admission`: Room that was reserved for the rollout.
    - `version_labels`: What the labels of the engine's weights mean as versions, if they are not the numbers of the
      versions: a mapping, or a function that may return None.
    - `model`: The name of the model in calls of `chat`, which is otherwise that of the policy.
    - `keep_messages`: Whether the messages of the last call are kept with the rollout, as they are by default.
    """

    policy_version: int | None
    admission: Admission | None
    version_labels: Labels | None
    model: str | None
    keep_messages: bool | None


class RolloutOptions(BundledOptions, total=False):
    """The arguments of a rollout. Everything may be left out, and None means the same.

    - `execution_id`: Id of the execution that the rollout belongs to.
    """

    execution_id: str | None


class SessionOptions(CommonOptions, total=False):
    """The arguments of a session. Everything may be left out, and None means the same.

    - `models`: What the agent's model names stand for: the name of a policy, or None for a model that is not trained.
    - `execution_id`: Id of the execution that the session belongs to.
    - `ttl_s`: Seconds after which the session expires.
    - `idle_s`: Seconds without a call after which the session is parked, or expires if it cannot be resumed.
    - `max_calls`: The most calls.
    - `resume`: Whether a session of this `rollout_id` that is there already is resumed, and stays to be resumed if the
      block ends with an exception.
    """

    models: Mapping[str, SessionModel | str | None] | None
    execution_id: str | None
    ttl_s: int | None
    idle_s: int | None
    max_calls: int | None
    resume: bool | None


def _inherit_arguments(options: type, base: type) -> None:
    """Appends the arguments of the base to the docstring, because `help` does not know the bases of a TypedDict."""
    inherited = inspect.cleandoc(base.__doc__ or "").partition("\n\n")[2]
    options.__doc__ = f"{inspect.cleandoc(options.__doc__ or '')}\n{inherited}"


_inherit_arguments(BundledOptions, CommonOptions)
_inherit_arguments(RolloutOptions, BundledOptions)
_inherit_arguments(SessionOptions, CommonOptions)


def session_request(policy: str | None, options: SessionOptions) -> dict[str, Any]:
    """The arguments of `open_session`."""
    check_names("session", options, SessionOptions.__optional_keys__)
    options = cast("SessionOptions", as_evaluation(options))
    arguments: dict[str, Any] = dict(options)
    data_pass = arguments.pop("data_pass", None)
    if arguments.pop("resume", None) and options.get("rollout_id") is None:
        raise ConfigurationError(
            "a session is found by its rollout when it is resumed, so name the rollout: rollout_id=..."
        )
    evaluation = evaluation_of(
        arguments.pop("eval", None), arguments.pop("task", None), options.get("group_id"), options.get("group_size")
    )
    return arguments | {
        **evaluation,
        "policy": policy,
        "models": _models(options.get("models")),
        "rollout_id": numbered(options.get("rollout_id"), data_pass),
        "group_id": numbered(options.get("group_id"), data_pass),
        "sampling": sampling_of(options),
    }


def check_names(what: str, options: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuses arguments that do not exist, as Python does where a function lists them."""
    if unknown := options.keys() - known:
        raise TypeError(f"a {what} has no argument {', '.join(sorted(unknown))}: it takes {', '.join(sorted(known))}")


def numbered(name: str | None, data_pass: int | None) -> str | None:
    """An id with the number of the pass over the data set."""
    return name if name is None or data_pass is None else f"{name}.pass{data_pass}"


SUITE_VARIABLE = "FOREBAY_EVAL"
"""The environment variable that makes an evaluation of all that a program records: it has the name of the suite."""


def as_evaluation(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a rollout, a session or an admission, which evaluate the policy if the program does.

    So a program that was written for training plays a suite as it is. The group of a rollout is its task then. Ids of
    its own would be those of the last time.
    """
    suite = os.environ.get(SUITE_VARIABLE)
    if not suite or options.get("eval") is not None:
        return {**options}
    task = options.get("task") or numbered(options.get("group_id"), options.get("data_pass"))
    ids = {"rollout_id": None, "group_id": None, "group_size": None, "data_pass": None}
    return {**options, **{name: value for name, value in ids.items() if name in options}, "eval": suite, "task": task}


def evaluation_of(suite: str | None, task: str | None, group_id: str | None, group_size: int | None) -> dict[str, Any]:
    """The fields of a request that evaluates a policy; none if there is no suite. What the service would refuse is
    refused here, before the agent plays the task."""
    if suite is None:
        if task is not None:
            raise ConfigurationError("`task` is the name of a task in a suite, so name the suite: eval=...")
        return {}
    for name, value in (("group_id", group_id), ("group_size", group_size)):
        if value is not None:
            raise ConfigurationError(
                f"a rollout that evaluates the policy has no group, so leave out `{name}`: `task` says which rollouts "
                "play the same task"
            )
    return {"purpose": "eval", "suite": suite, "task": task}


def sampling_of(options: CommonOptions) -> Sampling | None:
    """The sampling, which may be given as a mapping."""
    sampling = options.get("sampling")
    return Sampling(**sampling) if isinstance(sampling, Mapping) else sampling


def _models(models: Mapping[str, SessionModel | str | None] | None) -> dict[str, SessionModel] | None:
    if models is None:
        return None
    return {
        name: stands_for if isinstance(stands_for, SessionModel) else SessionModel(policy=stands_for)
        for name, stands_for in models.items()
    }
