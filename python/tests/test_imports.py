"""Imports of ATIF against the package atif, which is another implementation of the format."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from support import REPOSITORY

import forebay

if sys.version_info >= (3, 11):
    import atif

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the package atif needs Python 3.11")

FILES = REPOSITORY / "tests" / "it" / "imports"

NEWEST: dict[str, Any] = json.loads((FILES / "atif-1.8.json").read_text())

VERSIONS = {f"ATIF-v1.{minor}" for minor in range(9)}

REPLACEMENTS: list[Any] = [None, "x", 1, -1, 1.5, True, [], {}, [1], ["x"], [{}], {"x": 1}]
"""What each value of a document is replaced with."""

LABELS = {"policy": str, "group_id": (str, int), "reward": (int, float)}
"""The labels in `extra` that the documents have or get, and their types."""


def is_accepted_by_the_package(document: Any) -> bool:
    """Without conversions between types of JSON, which docs/imports.md lists as a difference."""
    try:
        atif.Trajectory.model_validate_json(json.dumps(document), strict=True)
    except pydantic.ValidationError:
        return False
    return True


def is_accepted_here(fb: forebay.Client, policy: str, document: Any) -> bool:
    report = fb.import_("atif", [document], policy=policy)
    return not any(refusal.type == "invalid-document" for refusal in report.refusals)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*place, key)
        yield from places(item, (*place, key))


def changed(document: Any, place: tuple[Any, ...], value: Any, *, remove: bool = False) -> Any:
    document = copy.deepcopy(document)
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    if remove:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return document


def variants() -> Iterator[tuple[str, Any]]:
    """The newest document, with each value replaced, removed, and with an unknown field in each object."""
    for place in places(NEWEST):
        yield f"{place} removed", changed(NEWEST, place, None, remove=True)
        for value in REPLACEMENTS:
            yield f"{place} = {value}", changed(NEWEST, place, value)
    objects = [(), *(place for place in places(NEWEST) if isinstance(at(place), dict))]
    for place in objects:
        yield f"{place} has an unknown field", changed(NEWEST, (*place, "unknown"), 1)


def at(place: tuple[Any, ...]) -> Any:
    value: Any = NEWEST
    for key in place:
        value = value[key]
    return value


def trajectories(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield document
    for sub in document.get("subagent_trajectories") or []:
        yield from trajectories(sub)


def is_refused_only_here(document: dict[str, Any]) -> bool:
    """Whether the document differs from what docs/imports.md lists as refused here alone."""
    calls = []
    for trajectory in trajectories(document):
        if trajectory["schema_version"] not in VERSIONS:
            return True
        for step in trajectory["steps"]:
            metrics = step.get("metrics") or {}
            ids, logprobs = metrics.get("completion_token_ids"), metrics.get("logprobs")
            prompt = metrics.get("prompt_token_ids") or []
            if any(not 0 <= token < 2**31 for token in [*(ids or []), *prompt]):
                return True
            if ids is not None and logprobs is not None and len(ids) != len(logprobs):
                return True
            if ids and prompt and not step.get("is_copied_context") and (step.get("llm_call_count") or 1) == 1:
                calls.append(logprobs is not None)
    if len(set(calls)) > 1:
        return True
    extra = document.get("extra") or {}
    labels = {name: extra[name] for name in LABELS if extra.get(name) is not None}
    # For Python, truth values are whole numbers. As rewards they are accepted.
    is_right = [
        isinstance(value, LABELS[name]) and (name == "reward" or not isinstance(value, bool))
        for name, value in labels.items()
    ]
    return not all(is_right)


def without_timestamps(document: dict[str, Any]) -> dict[str, Any]:
    document = copy.deepcopy(document)
    for trajectory in trajectories(document):
        for step in trajectory["steps"]:
            if isinstance(step.get("timestamp"), str):
                del step["timestamp"]
    return document


def explain(document: Any, here: bool) -> bool:
    """Whether a difference is one of those that docs/imports.md lists."""
    if here:
        # The package checks timestamps.
        return is_accepted_by_the_package(without_timestamps(document))
    return is_refused_only_here(document)


@pytest.fixture
def text_policy(fb: forebay.Client, policy: str) -> str:
    """A policy that accepts rollouts without tokens."""
    fb.put_policy(policy, {"require": []})
    return policy


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("atif-1.*.json")))
def test_both_accept_every_version(fb: forebay.Client, text_policy: str, name: str) -> None:
    document = json.loads((FILES / name).read_text())
    assert is_accepted_here(fb, text_policy, document)
    if name.split(".")[1] in ("2", "3", "4", "5", "6"):
        for step in document["steps"]:
            for result in (step.get("observation") or {"results": []})["results"]:
                # Before 1.7 a reference to a sub-agent needs no path.
                for reference in result.get("subagent_trajectory_ref") or []:
                    reference.setdefault("trajectory_path", "helper.json")
    assert is_accepted_by_the_package(document)


def test_both_refuse_what_is_wrong(fb: forebay.Client, text_policy: str) -> None:
    for line in (FILES / "atif-refused.jsonl").read_text().splitlines():
        case = json.loads(line)
        assert not is_accepted_here(fb, text_policy, case["document"]), case["pointer"]
        if is_accepted_by_the_package(case["document"]):
            assert is_refused_only_here(case["document"]), case["pointer"]


def test_both_agree_about_every_variant_apart_from_the_listed_differences(fb: forebay.Client, text_policy: str) -> None:
    count = differences = 0
    for what, document in variants():
        here, there = is_accepted_here(fb, text_policy, document), is_accepted_by_the_package(document)
        count += 1
        if here != there:
            differences += 1
            assert explain(document, here), f"{what}: accepted {'here' if here else 'by the package'} alone"
    assert count > 1_000
    assert differences < count / 10, "the differences are exceptions"


def test_documents_and_bytes_of_a_file_are_imported(fb: forebay.Client, policy: str) -> None:
    report = fb.import_("nemo-gym", (FILES / "nemo-gym.jsonl").read_bytes(), policy=policy, group_size=2, prefix="a/")
    assert (report.stored, report.verdicts.kept, report.refused) == (4, 4, 0)
    again = fb.import_("nemo-gym", (FILES / "nemo-gym.jsonl").read_bytes(), policy=policy, group_size=2, prefix="a/")
    assert (again.stored, again.duplicates) == (0, 4)
    refused = fb.import_("atif", [{"schema_version": "ATIF-v9"}], policy=policy)
    assert [(one.line, one.pointer) for one in refused.refusals] == [(1, "/agent")]
