"""The scripted engine: what a script is given, and what becomes of its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

import forebay
from forebay.testing import Answer, Engine, Request, render

QUESTION: Any = {"role": "user", "content": "2 + 2"}


def ask(url: str, key: str = "none") -> str | None:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as llm:
        return llm.chat.completions.create(model="m", messages=[QUESTION]).choices[0].message.content


def test_a_function_is_given_the_call() -> None:
    seen: list[Request] = []

    def script(request: Request) -> str:
        seen.append(request)
        return "4"

    with Engine(script) as engine:
        assert [ask(engine.base_url) for _ in range(2)] == ["4", "4"]
        assert engine.requests == seen
    first, second = seen
    assert (first.path, first.messages, first.text, first.model) == ("/v1/chat/completions", [QUESTION], "2 + 2", "m")
    assert first.body["messages"] == first.messages and list(first.prompt_tokens) == render([QUESTION])
    assert (first.place, second.place) == (0, 1)


def failing(request: Request) -> Any:
    return {0: lambda: 1 / 0, 1: lambda: None, 2: lambda: pytest.fail("this was not expected")}[request.place]()


def test_an_error_of_the_script_is_answered_printed_and_raised_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Engine(failing) as engine:
        for why in ("ZeroDivisionError: division by zero", "TypeError: the answer of a script must be", "Failed: this"):
            with pytest.raises(openai.InternalServerError, match=why):
                ask(engine.base_url)
    printed = capsys.readouterr().err
    assert "in failing" in printed and "ZeroDivisionError: division by zero" in printed


def test_the_error_of_the_block_goes_before_that_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"), Engine(failing) as engine:
        ask(engine.base_url)
    assert isinstance(engine.error, ZeroDivisionError)
    assert "in failing" in capsys.readouterr().err


def test_an_error_before_an_answer_and_one_in_its_content_are_those_of_the_script() -> None:
    def late() -> None:
        raise LookupError("nothing to wait for")

    for answer, kind in ((Answer("a", before=late), LookupError), (Answer(tool_calls=[("f", {"a": {1}})]), TypeError)):
        with pytest.raises(kind), Engine([answer]) as engine, pytest.raises(openai.InternalServerError):
            ask(engine.base_url)


def test_an_error_that_the_script_wants_is_none() -> None:
    with Engine([Answer("too much", status=429)]) as engine, pytest.raises(openai.RateLimitError, match="too much"):
        ask(engine.base_url)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_is_an_upstream_of_its_kind(kind: Any, tmp_path: Path) -> None:
    config = tmp_path / "forebay.toml"
    with Engine(lambda request: f"{request.text} = 4", kind=kind) as engine:
        config.write_text(
            '[sessions]\nlisten = "127.0.0.1:0"\naudit = 0.0\n'
            f'[[upstream]]\nname = "scripted"\nkind = "{kind}"\nurls = ["{engine.url}"]\n'
        )
        with forebay.Server(config=config) as server, server.client() as fb, fb.session("default") as s:
            assert ask(s.base_url, s.key) == "2 + 2 = 4"
            s.reward = 1.0
    # The probes of the service are no calls of the script.
    assert (s.receipts[0].verdict, len(engine.requests)) == ("kept", 1)
