"""What is sent: arrays, masks, and the places of values that are not JSON."""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import Any

import pytest

import forebay
from forebay import _codec, _uuid


class Array:
    """What the client needs of an array of numpy or a tensor of torch."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values[0] if len(self.values) == 1 else list(self.values)


def sent(body: Any) -> Any:
    return json.loads(_codec.encode(body))


def test_arrays_are_sent_as_lists_wherever_they_are() -> None:
    segment = forebay.Segment(tokens=Array(1, 2, 3), loss_mask=Array(1, 0), logprobs=Array(-0.5, 0.0))
    body = sent(forebay.Trajectory(rollout_id="r", segments=(segment,), reward=Array(0.5), metadata={"a": Array(1, 2)}))
    assert body == {
        "rollout_id": "r",
        "reward": 0.5,
        "segments": [{"tokens": [1, 2, 3], "loss_mask": [1, 0], "logprobs": [-0.5, 0.0]}],
        "metadata": {"a": [1, 2]},
    }


@pytest.mark.parametrize("mask", [[True, False], (True, False), Array(True, False)])
def test_masks_of_booleans_are_sent_as_numbers(mask: Any) -> None:
    assert sent(forebay.Segment(tokens=[1, 2, 3], loss_mask=mask))["loss_mask"] == [1, 0]
    assert _codec.encode(forebay.Segment(tokens=[1, 2, 3], loss_mask=mask)).count(b"true") == 0


@pytest.mark.parametrize("kind", [list, tuple, lambda values: Array(*values)])
def test_log_probabilities_that_are_ignored_may_be_missing(kind: Any) -> None:
    nothing = (None, float("-inf"), float("nan"), -9999.0)
    segment = forebay.Segment(
        tokens=[1, 2, 3, 4, 5, 6], loss_mask=[1, 0, 0, 0, 0], logprobs=kind((-0.5, *nothing)),
        teacher_logprobs=kind((-0.5, -0.25, -0.5, -0.5, float("-inf"))),
        advantages=kind((-0.5, float("nan"), 2.0, None, 0.0)),
    )  # fmt: skip
    body = sent(segment)
    assert body["logprobs"] == [-0.5, None, None, None, -9999.0]
    assert body["teacher_logprobs"] == [-0.5, -0.25, -0.5, -0.5, None]
    assert body["advantages"] == [-0.5, None, 2.0, None, 0.0]
    # Where the mask is 1, nothing is made up.
    for values in ([float("-inf"), -0.5], [float("nan"), None]):
        with pytest.raises(_codec.NotEncodable, match="/logprobs/0"):
            _codec.encode(forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 0], logprobs=kind(values)))


def test_fields_with_none_or_the_default_are_left_out() -> None:
    assert sent(forebay.Trajectory(rollout_id=None)) == {}
    rules = forebay.types.PolicyRules(
        group=forebay.types.GroupRules(size=4), batch=forebay.types.BatchRules(), require=["tokens"]
    )
    assert sent(rules) == {"group": {"size": 4}}


def test_an_advantage_is_a_name_or_says_its_kind() -> None:
    gdpo = forebay.types.Gdpo(components={"acc": 1.0})
    rules = forebay.types.PolicyRules(advantage=gdpo)
    assert sent(rules) == {"advantage": {"kind": "gdpo", "components": {"acc": 1.0}}}
    assert _codec.decode(forebay.types.PolicyRules, sent(rules)) == rules
    assert _codec.decode(forebay.types.PolicyRules, {"advantage": "rloo"}).advantage == "rloo"
    for by_turn in (forebay.types.TurnReturn(gamma=0.5), forebay.types.Gigpo(norm="none")):
        rules = forebay.types.PolicyRules(advantage=by_turn)
        assert _codec.decode(forebay.types.PolicyRules, sent(rules)) == rules
    # A kind of a newer service does not keep the rest from being read.
    newer = {"advantage": {"kind": "newer", "k": 1}, "group": {"size": 3}}
    assert _codec.decode(forebay.types.PolicyRules, newer).group.size == 3


BROKEN = [
    ({"segments": [{"tokens": [1, float("nan")]}]}, "/segments/0/tokens/1", "is nan"),
    ({"a": {"b": [0.0, -float("inf")]}}, "/a/b/1", "is -inf"),
    ([{"x": 1}, {"reward": float("inf")}], "/1/reward", "is inf"),
    (forebay.Trajectory(reward=float("nan")), "/reward", "is nan"),
    ({"segments": [forebay.Segment(tokens=[1], loss_mask=[1], logprobs=Array(0.0, float("nan")))]},
     "/segments/0/logprobs/1", "is nan"),
    ({"metadata": {"a/b": {1, 2}}}, "/metadata/a~1b", "is a set"),
    ({"metadata": {"a": b"bytes"}}, "/metadata/a", "is a bytes"),
    ({"metadata": {"a": [{(1, 2): "x"}]}}, "/metadata/a/0", "has the key (1, 2)"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "pointer", "detail"), BROKEN)
def test_what_is_not_json_is_refused_with_its_place(body: Any, pointer: str, detail: str) -> None:
    with pytest.raises(_codec.NotEncodable) as refused:
        _codec.encode(body)
    assert refused.value.pointer == pointer
    assert detail in refused.value.detail


def test_a_body_that_contains_itself_is_refused() -> None:
    body: dict[str, Any] = {}
    body["metadata"] = {"itself": body}
    with pytest.raises(_codec.NotEncodable, match="contains itself"):
        _codec.encode(body)


def test_text_is_sent_as_utf_8() -> None:
    assert _codec.encode({"content": "Grüße 🌊"}) == '{"content":"Grüße 🌊"}'.encode()


def test_half_of_a_surrogate_pair_is_sent_as_an_escape() -> None:
    assert _codec.encode({"\udce9": "\ud83d 🌊"}) == '{"\\udce9":"\\ud83d 🌊"}'.encode()
    assert json.loads(_codec.encode("\ud83d\ude00")) == "😀"


def test_ids_are_uuids_of_version_7_and_sort_by_time() -> None:
    before = time.time_ns() // 1_000_000
    ids = [_uuid.uuid7() for _ in range(1_000)]
    assert len(set(ids)) == 1_000
    assert all(
        re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", made) for made in ids
    )
    made = [uuid.UUID(text).int >> 80 for text in ids]
    assert made == sorted(made)
    assert before <= made[0] <= made[-1] <= time.time_ns() // 1_000_000


def test_each_trajectory_has_an_id_of_its_own_from_the_start() -> None:
    first, second = forebay.Trajectory(), forebay.Trajectory()
    assert first.rollout_id and second.rollout_id and first.rollout_id != second.rollout_id
