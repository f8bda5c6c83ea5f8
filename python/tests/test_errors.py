"""The exceptions against the table of problem types, and what they say."""

from __future__ import annotations

import pickle
import re

import pytest
from stub import Stub, answer, problem
from support import REPOSITORY, client_of

import forebay
from forebay import errors

TABLE = (REPOSITORY / "docs" / "api.md").read_text().split("## Problem types")[1].split("\n## ")[0]
TYPES = [(name, int(status)) for name, status in re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \|", TABLE, re.MULTILINE)]


def test_each_problem_type_has_a_class() -> None:
    assert sorted(name for name, _ in TYPES) == sorted(errors.BY_TYPE)


@pytest.mark.parametrize(("name", "status"), TYPES)
def test_a_class_is_named_as_its_type_and_below_that_of_its_status(name: str, status: int) -> None:
    cls = errors.BY_TYPE[name]
    assert cls.__name__ == "".join(part.capitalize() for part in name.split("-"))
    base = errors.BY_STATUS.get(status, errors.ServiceError)
    assert issubclass(cls, base)
    assert cls.__doc__


def test_an_unknown_type_has_the_class_of_its_status() -> None:
    document = errors.Problem(type="of-a-later-version", title="Something new", status=409)
    assert type(errors.of_problem(document, "POST", "/x", None)) is errors.Conflict
    document.status = 418
    assert type(errors.of_problem(document, "POST", "/x", None)) is errors.ServiceError


def refusal(fb: forebay.Client) -> errors.Invalid:
    with pytest.raises(errors.Invalid) as refused:
        fb.post(
            {"rollout_id": "r", "segments": [{"tokens": [1], "loss_mask": [1]}, {"tokens": [1, 2], "loss_mask": [2]}]}
        )
    return refused.value


def test_a_refusal_says_which_call_failed_and_why(fb: forebay.Client) -> None:
    error = refusal(fb)
    assert (error.method, error.path, error.status, error.type) == ("POST", "/trajectories", 422, "invalid")
    assert [violation.pointer for violation in error.violations] == ["/segments/0/tokens", "/segments/1/loss_mask/0"]
    assert error.request_id and error.request_id == error.problem.instance
    for part in ("POST /trajectories", "422", error.request_id, "/segments/1/loss_mask/0"):
        assert part in str(error)


def test_an_error_goes_through_a_pickle_with_all_it_knows(fb: forebay.Client) -> None:
    error = refusal(fb)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.Invalid
    assert (str(again), again.violations, again.problem) == (str(error), error.violations, error.problem)


def test_a_superseded_trainer_is_told_why_and_what_to_do(fb: forebay.Client, policy: str) -> None:
    with (
        forebay.Trainer(policy, client=fb) as run,
        forebay.Trainer(policy, client=fb),
        pytest.raises(errors.Superseded) as refused,
    ):
        next(iter(run))
    for part in ("another trainer has resumed", "restored from a backup", "start this one again", "last_saved=STEP"):
        assert part in str(refused.value)


def test_no_error_and_no_representation_has_the_key(stub: type[Stub]) -> None:
    key = "fb_secret_key"
    answers = [problem(401, "unauthorized"), problem(503, "overloaded"), answer(500, "oops", media="text/plain")]
    for given in answers:
        fb = client_of(stub(given), key=key, retry=forebay.types.Retry.none())
        with pytest.raises(errors.ForebayError) as refused:
            fb.stats()
        chain: BaseException | None = refused.value
        while chain is not None:
            assert key not in repr(chain) + str(chain) + repr(vars(chain))
            chain = chain.__cause__ or chain.__context__
        assert key not in repr(fb) + str(fb) + repr(fb.config) + repr(forebay.AsyncClient(fb.url, key))
    with pytest.raises(errors.ConfigurationError) as refused:
        forebay.Client("http://127.0.0.1:1", key=key + "\n")
    assert key not in str(refused.value)


def test_the_address_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, why in [
        ("127.0.0.1:8080", "http:// or https://"),
        ("http://", "no host"),
        ("http://host:port", "cannot be the address"),
        ("http://host/?policy=p", "end with the path"),
        ("http://user:secret@host", "use a key"),
    ]:
        with pytest.raises(errors.ConfigurationError, match=why) as refused:
            forebay.Client(url)
        assert "secret" not in str(refused.value)
    monkeypatch.setenv("FOREBAY_URL", "http://elsewhere:1/base/")
    assert forebay.Client().url == "http://elsewhere:1/base/"
