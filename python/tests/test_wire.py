"""The dataclasses against the OpenAPI document, and every method of the client against its operations."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY

import forebay
from forebay import _codec, _http, _wire

DOCUMENT = json.loads((REPOSITORY / "openapi" / "forebay.json").read_text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]

MINTED = {("Trajectory", "rollout_id")}
"""Fields with a default that the document does not have."""

CLASSES = {name: cls for name, cls in vars(_wire).items() if dataclasses.is_dataclass(cls)}


def properties(name: str) -> tuple[dict[str, Any], set[str]]:
    """The properties of a schema, and which of them are required."""
    schema = SCHEMAS[name]
    parts = [SCHEMAS[part["$ref"].split("/")[-1]] if "$ref" in part else part for part in schema.get("allOf", [schema])]
    found: dict[str, Any] = {}
    required: set[str] = set()
    for part in parts:
        found |= part.get("properties", {})
        required |= set(part.get("required", []))
    return found, required


def test_the_classes_are_those_of_the_document() -> None:
    script = REPOSITORY / "scripts" / "python-wire"
    written = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    assert Path(_wire.__file__).read_text() == written, "run `make generate`, which writes _wire.py"


# Answers in which every field has a value, and in which only the required ones have.


def instance(schema: dict[str, Any], *, is_full: bool) -> Any:
    if "oneOf" in schema:
        parts = [part for part in schema["oneOf"] if part.get("type") != "null"]
        schema = parts[-1 if is_full else 0]
    if "$ref" in schema:
        name = schema["$ref"].split("/")[-1]
        if name not in CLASSES:
            return instance(SCHEMAS[name], is_full=is_full)
        documented, required = properties(name)
        # A minted field is written although it was not sent, so it is sent.
        sent = set(documented) if is_full else required | {wire for owner, wire in MINTED if owner == name}
        return {wire: instance(part, is_full=is_full) for wire, part in documented.items() if wire in sent}
    if "enum" in schema:
        return schema["enum"][-1]
    kind = schema["type"]
    if isinstance(kind, list):
        (kind,) = [part for part in kind if part != "null"]
    if kind == "array":
        return [instance(schema["items"], is_full=is_full)] * (schema.get("minItems") or 2)
    if kind == "object":
        values = schema.get("additionalProperties")
        return {"name": instance(values, is_full=is_full) if isinstance(values, dict) else 1}
    if kind == "boolean":
        # A value that is the default is not written.
        return not schema.get("default", False)
    return {"string": "text", "integer": 3, "number": 0.5}[kind]


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("is_full", [True, False])
def test_an_answer_with_unknown_fields_is_read_and_written_again_without_loss(name: str, is_full: bool) -> None:
    sent = instance({"$ref": f"#/components/schemas/{name}"}, is_full=is_full)
    read = _codec.decode(CLASSES[name], {**sent, "a_field_of_a_later_version": {"x": 1}})
    again = json.loads(_codec.encode(read))
    if not is_full:
        again = {wire: value for wire, value in again.items() if wire in sent}
    assert again == sent


def test_an_answer_that_lacks_a_field_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="Receipt lacks some of .*verdict"):
        _codec.decode(_wire.Receipt, {"policy": "p", "rollout_id": "r"})
    with pytest.raises(ValueError, match="Receipt is not an object"):
        _codec.decode(_wire.Receipt, ["a list"])


# Every operation of the document has a method, which sends what the document says.

T1 = {"rollout_id": "r", "segments": [{"tokens": [1, 2], "loss_mask": [1]}]}

OPERATIONS: dict[str, list[Callable[[forebay.Client], Any]]] = {
    "post_import": [
        lambda fb: fb.import_("chat", [{"messages": [], "reward": 1.0}]),
        lambda fb: fb.import_(
            "atif",
            b'{"schema_version": "ATIF-v1.8"}',
            policy="p",
            environment="e",
            group_size=2,
            policy_version=1,
            prefix="a/",
            reward_at="/extra/score",
            group_at="/extra/task",
            rollout_at="/extra/id",
        ),
    ],
    "post_admission": [
        lambda fb: fb.admit("p", rollouts=8, wait_s=0),
        lambda fb: fb.admit("p", rollouts=8, group_id="g", group_size=2, environment="e", wait_s=0),
        lambda fb: fb.admit("p", rollouts=8, eval="aime24", task="t", wait_s=0),
    ],
    "list_batches": [lambda fb: list(fb.list_batches("p", state="leased", order="newest"))],
    "lease_batch": [
        lambda fb: fb.lease("p"),
        lambda fb: fb.lease("p", consumer="c", request_id="r", wait_ms=5, partial=True, epoch=1),
    ],
    "get_batch": [lambda fb: fb.get_batch("b/1"), lambda fb: fb.get_batch("b/1", shards=2, balance="tokens")],
    "ack_batch": [lambda fb: fb.ack("b", lease="k", step=1, epoch=2)],
    "extend_lease": [lambda fb: fb.extend("b", lease="k", ttl_s=60, epoch=2)],
    "nack_batch": [lambda fb: fb.nack("b", lease="k", reason="r", groups=["g"], epoch=1)],
    "readmit_batch": [lambda fb: fb.readmit("b")],
    "get_samples": [
        lambda fb: fb.samples("b"),
        lambda fb: fb.samples("b", shard=0, shards=2),
        lambda fb: fb.samples("b", columns=["a", "b"]),
        lambda fb: fb.samples_arrow("b", columns=["a"], inner=(0, 1)),
        lambda fb: fb.samples_arrow("b", shard=1, shards=2, balance="squared_tokens"),
    ],
    "get_exports": [
        lambda fb: list(fb.export()),
        lambda fb: list(
            fb.export(
                "p",
                run=1,
                state=["trained", "open"],
                verdict=["kept"],
                min_reward=0.5,
                where="reward > 0.5",
                purpose="eval",
            )
        ),
    ],
    "list_groups": [
        lambda fb: list(
            fb.list_groups("p", group_id="g", batch_id="b", state="open", reason="r", environment="e", order="newest")
        )
    ],
    "close_group": [lambda fb: fb.close_group("p", "g")],
    "discard_group": [lambda fb: fb.discard_group("p", "g", reason="r")],
    "post_scores": [
        lambda fb: fb.score("r", "judge", 0.5),
        lambda fb: fb.score("r", "judge", 0.5, policy="p", scorer="s", rationale="why", replace=True, lease="k"),
        lambda fb: fb.score_all(
            [_wire.ScoreRequest(rollout_id="r", name="judge", value=1.0), {"rollout_id": "r", "name": "a", "value": 0}]
        ),
    ],
    "lease_scores": [
        lambda fb: fb.lease_scores(["judge"]),
        lambda fb: fb.lease_scores(
            ("judge", "tests"),
            policy="p",
            max=2,
            wait_ms=5,
            scorer="s",
            request_id="r",
            ttl_s=60,
            include=("messages", "segments"),
        ),
    ],
    "extend_score_leases": [
        lambda fb: fb.extend_scores(["k"]),
        lambda fb: fb.extend_scores(("k", "l"), policy="p", ttl_s=60),
    ],
    "retry_scores": [lambda fb: fb.retry_scores("judge"), lambda fb: fb.retry_scores("judge", policy="p")],
    "get_scores": [lambda fb: fb.scores("r"), lambda fb: fb.scores("r", policy="p")],
    "put_suite": [
        lambda fb: fb.put_suite("p", "aime24", tasks=30),
        lambda fb: fb.put_suite("p", "aime24", tasks=30, repeats=4, threshold=0.5),
    ],
    "list_evals": [
        lambda fb: fb.evals("p"),
        lambda fb: fb.evals("p", "aime24", before=7, limit=3),
        # As the answer below says.
        lambda fb: fb.wait_evals("p", "text", 3, wait_s=0),
    ],
    "list_eval_tasks": [
        lambda fb: list(fb.eval_tasks("p", "aime24")),
        lambda fb: list(fb.eval_tasks("p", "aime24", 7)),
    ],
    "get_health": [lambda fb: fb.health()],
    "list_keys": [lambda fb: list(fb.list_keys())],
    "create_key": [lambda fb: fb.create_key("n", "train", policies=["p*"], expires_in_s=60)],
    "revoke_key": [lambda fb: fb.revoke_key("k")],
    "list_policies": [lambda fb: list(fb.list_policies())],
    "get_policy": [
        lambda fb: fb.get_policy("p"),
        lambda fb: fb.wait_version("p", above=3, wait_ms=5),
        lambda fb: fb.version("p"),
        lambda fb: next(fb.versions("p")),
    ],
    "put_policy": [lambda fb: fb.put_policy("p", _wire.PolicyRules(group=_wire.GroupRules(size=8)))],
    "patch_policy": [lambda fb: fb.patch_policy("p", {"group": {"size": 8}})],
    "checkpoint": [lambda fb: fb.checkpoint("p", step=1, force=True, epoch=1)],
    "reset_policy": [lambda fb: fb.reset("p", epoch=1)],
    "resume": [lambda fb: fb.resume("p", step=None), lambda fb: fb.resume("p", step=1, force=True, epoch=1)],
    "publish_version": [lambda fb: fb.publish("p", 3, step=1, uri="file:///w", epoch=1)],
    "get_readiness": [lambda fb: fb.is_ready()],
    "list_sessions": [lambda fb: list(fb.list_sessions("p", rollout_id="r", state="open", order="newest"))],
    "open_session": [
        lambda fb: fb.open_session("p"),
        lambda fb: fb.open_session(
            models={"*": _wire.SessionModel(policy="p")},
            rollout_id="r",
            group_id="g",
            group_size=2,
            environment="e",
            execution_id="x",
            sampling=_wire.Sampling(temperature=0.5),
            ttl_s=1,
            idle_s=1,
            max_calls=1,
            metadata={"a": 1},
        ),
        lambda fb: fb.open_session("p", purpose="eval", suite="aime24", task="t"),
    ],
    "finish_sessions": [lambda fb: fb.finish_sessions([_wire.SessionFinish(session_id="s", reward=1.0)] * 2)],
    "get_session": [lambda fb: fb.get_session("s")],
    "resume_session": [lambda fb: fb.resume_session("s"), lambda fb: fb.resume_session("s", attempt=1)],
    "post_media": [lambda fb: fb.upload(b"image")],
    "post_column": [lambda fb: fb.upload_column(b"column")],
    "put_column": [lambda fb: fb.put_column("0" * 64, b"column")],
    "put_media": [lambda fb: fb.put_media("0" * 64, b"image")],
    "get_media": [lambda fb: fb.get_media("0" * 64), lambda fb: fb.get_media("forebay:" + "0" * 64)],
    "save_session_state": [
        lambda fb: fb.save_session_state("s", b"half"),
        lambda fb: fb.save_session_state("s", b"half", call=1, attempt=2),
    ],
    "get_session_state": [lambda fb: fb.get_session_state("s")],
    "abort_session": [lambda fb: fb.abort_session("s", reason="r", keep=True, attempt=1)],
    "finish_session": [
        lambda fb: fb.finish_session(
            "s", reward=1.0, reward_components={"a": 1.0}, status="failed", metadata={"a": 1}, wait_ms=1, attempt=1
        ),
        lambda fb: fb.finish_session("s", rewards={"p": 1.0}),
    ],
    "list_session_turns": [lambda fb: fb.list_session_turns("s")],
    "get_filter_variables": [lambda fb: fb.filter_variables()],
    "try_filters": [
        lambda fb: fb.try_filters("p", []),
        lambda fb: fb.try_filters(
            "p",
            [_wire.FilterRule(name="low", scope="rollout", when="reward < 0.5", action="drop")],
            groups=1,
            environment="e",
            examples=2,
        ),
    ],
    "get_whoami": [lambda fb: fb.whoami()],
    "get_trajectory_content": [
        lambda fb: fb.get_content("p", "r"),
        lambda fb: fb.get_content("p", "r", segment=1, from_=2, limit=3, messages_from=4, messages_limit=5),
    ],
    "get_overview": [lambda fb: list(fb.list_overview())],
    "get_policy_why": [lambda fb: fb.get_why("p")],
    "get_why": [lambda fb: fb.why("r"), lambda fb: fb.why("r", "p")],
    "get_series": [
        lambda fb: fb.get_series(metrics=["received"]),
        lambda fb: fb.get_series("p", metrics=["received", "kept"], from_="t", to="u", step_s=60),
    ],
    "list_steps": [
        lambda fb: list(fb.list_steps("p", order="newest")),
        lambda fb: fb.get_step_buckets("p", from_=1, to=9, points=3),
    ],
    "list_journal": [lambda fb: list(fb.list_journal("p", order="newest"))],
    "get_tokenizer": [lambda fb: fb.get_tokenizer("p")],
    "get_stats": [lambda fb: fb.stats()],
    "get_trajectories": [
        lambda fb: fb.get_trajectory("p", "r"),
        lambda fb: list(
            fb.list_trajectories(
                "p",
                execution_id="x",
                group_id="g",
                verdict="kept",
                reason="r",
                state="open",
                step=1,
                environment="e",
                purpose="eval",
                order="newest",
            )
        ),
    ],
    "post_trajectories": [
        lambda fb: fb.post(T1),
        lambda fb: fb.post([T1, forebay.Trajectory(status="failed")]),
        lambda fb: list(fb.post_many([T1, forebay.Trajectory(status="failed")])),
    ],
}
"""Every way to make each operation."""

OCTETS = "application/octet-stream"

WAYS = [(name, number) for name, ways in OPERATIONS.items() for number in range(len(ways))]


def operations() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for template, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield operation["operationId"], method.upper(), template, operation


def test_every_operation_has_a_method() -> None:
    assert sorted(OPERATIONS) == sorted(name for name, *_ in operations())


@pytest.mark.parametrize(("name", "number"), WAYS)
def test_a_method_sends_and_reads_what_the_document_says(name: str, number: int) -> None:
    ((method, template, operation),) = [rest for found, *rest in operations() if found == name]
    sent: list[_http.Call] = []

    def send(self: Any, call: _http.Call, **_: Any) -> _http.Answer:
        sent.append(call)
        return _http.Answer(200, {}, documented_answer(name, operation, call))

    def stream(self: Any, call: _http.Call, **_: Any) -> Iterator[bytes]:
        sent.append(call)
        yield documented_answer(name, operation, call)

    fb = forebay.Client("http://service.invalid", check_version=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_http.Transport, "send", send)
        patch.setattr(_http.Transport, "stream", stream)
        result = OPERATIONS[name][number](fb)
    assert result is not None
    call = sent[0]
    assert call.method == method
    assert len(call.path.split("/")) == len(template.split("/"))
    for part, given in zip(template.split("/"), call.path.split("/"), strict=True):
        assert part == given or (part.startswith("{") and given)
    known = {part["name"]: part["schema"] for part in operation.get("parameters", []) if part["in"] == "query"}
    assert set(call.query) <= set(known)
    for parameter, value in call.query.items():
        if isinstance(value, int):
            assert value <= known[parameter].get("maximum", value), parameter
    if "requestBody" not in operation:
        assert call.body is None
    elif call.media == _http.NDJSON:
        for line in (call.body or b"").splitlines():
            check(json.loads(line), operation["requestBody"]["content"][_http.NDJSON]["schema"])
    elif call.media == OCTETS:
        assert isinstance(call.body, bytes)
        assert call.media in operation["requestBody"]["content"]
    else:
        assert call.media in operation["requestBody"]["content"]
        check(json.loads(call.body or b""), operation["requestBody"]["content"][call.media]["schema"])


def documented_answer(name: str, operation: dict[str, Any], call: _http.Call) -> bytes:
    """An answer with all documented fields, in the form that the call accepts."""
    response = next(found for status, found in operation["responses"].items() if status in ("200", "201"))
    content = response.get("content", {})
    if call.accept == _http.ARROW:
        return b"a stream"
    if call.accept == _http.NDJSON:
        line = instance(content[_http.NDJSON]["schema"], is_full=True)
        return (json.dumps(line) + "\n").encode() * 2
    if name in ("post_trajectories", "post_scores"):
        kind = "Receipt" if name == "post_trajectories" else "ScoreReceipt"
        receipt = instance({"$ref": f"#/components/schemas/{kind}"}, is_full=True)
        return json.dumps([receipt] * 2 if (call.body or b"").startswith(b"[") else receipt).encode()
    if name == "get_trajectories":
        kind = "TrajectoryStory" if "rollout_id" in call.query else "TrajectoryPage"
        content = {_http.JSON: {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
    if OCTETS in content:
        return b"bytes"
    found = instance(content[_http.JSON]["schema"], is_full=True) if content else None
    # The first page is the last one.
    return json.dumps({**found, "next": None} if isinstance(found, dict) else found).encode()


def check(value: Any, schema: dict[str, Any]) -> None:
    """Whether a body has only documented fields, and all required ones."""
    if "oneOf" in schema:
        options = [part for part in schema["oneOf"] if part.get("type") != "null"]
        schema = next(part for part in options if (part.get("type") == "array") == isinstance(value, list))
    if "$ref" in schema:
        check(value, SCHEMAS[schema["$ref"].split("/")[-1]])
        return
    if isinstance(value, list):
        for item in value:
            check(item, schema["items"])
    elif isinstance(value, dict) and "properties" in schema:
        assert set(schema.get("required", [])) <= set(value) <= set(schema["properties"])
        for wire, held in value.items():
            check(held, schema["properties"][wire])


def test_both_clients_have_the_same_methods() -> None:
    def public(cls: type) -> set[str]:
        return {name for name, member in inspect.getmembers(cls) if not name.startswith("_") and callable(member)}

    assert public(forebay.Client) - public(forebay.AsyncClient) == {"copy", "cancellable"}
    assert public(forebay.AsyncClient) - public(forebay.Client) == {"run"}
    for name in public(forebay.Client) & public(forebay.AsyncClient):
        own = inspect.signature(getattr(forebay.Client, name)).parameters
        assert list(own) == list(inspect.signature(getattr(forebay.AsyncClient, name)).parameters), name
