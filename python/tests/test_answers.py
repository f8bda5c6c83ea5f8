"""Answers of inference engines: what is read of them, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from forebay import _answers, testing
from forebay.errors import EngineAborted, RecordError


def vllm_chat(**fields: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [11, 12, 9],
        "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}, {"logprob": -0.3}]},
        **fields,
    }
    return {"choices": [choice], "prompt_token_ids": [1, 2, 3], "usage": {"completion_tokens": 3}}


def sglang_generate(**fields: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.1, 11, None], [-0.2, 12, None], [-0.3, 9, None]],
        "completion_tokens": 3,
        **fields,
    }
    return {"text": "hi", "output_ids": [11, 12, 9], "meta_info": meta}


def chunk(**fields: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [], **fields}


def streamed_vllm() -> list[dict[str, Any]]:
    def part(ids: list[int], finish: str | None = None) -> dict[str, Any]:
        content = [{"logprob": -token / 100} for token in ids]
        return {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}

    return [
        chunk(prompt_token_ids=[1, 2, 3], choices=[{"index": 0, "delta": {"role": "assistant"}}]),
        chunk(choices=[part([11, 12])]),
        chunk(choices=[part([9], "stop")]),
        chunk(usage={"completion_tokens": 3}),
    ]


def read(answer: object, **options: Any) -> tuple[list[int], list[int], list[float], str, bool]:
    call = _answers.read(answer, **options)
    return list(call.prompt), list(call.tokens), list(call.logprobs), call.finish_reason, call.stopped_on_token


EXPECTED = ([1, 2, 3], [11, 12, 9], [-0.1, -0.2, -0.3], "stop", True)


def test_a_chat_answer_of_vllm_is_read() -> None:
    assert read(vllm_chat()) == EXPECTED


def test_an_answer_may_be_an_object() -> None:
    def as_object(value: Any) -> Any:
        if isinstance(value, dict):
            return SimpleNamespace(**{name: as_object(held) for name, held in value.items()})
        return [as_object(item) for item in value] if isinstance(value, list) else value

    assert read(as_object(vllm_chat())) == EXPECTED


def test_a_chat_answer_of_sglang_is_read_from_its_meta_info() -> None:
    answer = vllm_chat(prompt_token_ids=[1, 2, 3], matched_stop=9, **sglang_generate(), logprobs=None)
    answer["choices"][0]["response_token_ids"] = answer["choices"][0].pop("token_ids")
    del answer["prompt_token_ids"]
    assert read(answer) == EXPECTED


def test_an_answer_of_generate_is_read_with_the_ids_that_were_sent() -> None:
    assert read(sglang_generate(), prompt_tokens=[1, 2, 3]) == EXPECTED
    with pytest.raises(RecordError, match="prompt_tokens"):
        read(sglang_generate())


def test_an_answer_of_completions_is_read() -> None:
    answer = vllm_chat(logprobs={"token_logprobs": [-0.1, -0.2, -0.3]})
    assert read(answer) == EXPECTED


def test_the_chunks_of_a_streamed_answer_of_vllm_are_joined() -> None:
    assert read(streamed_vllm()) == ([1, 2, 3], [11, 12, 9], [-0.11, -0.12, -0.09], "stop", True)


def test_the_chunks_of_a_streamed_answer_of_sglang_are_joined() -> None:
    chunks = streamed_vllm()
    del chunks[0]["prompt_token_ids"]
    for each in chunks:
        for choice in each["choices"]:
            choice.pop("token_ids", None)
    chunks.append(chunk(sglext={"input_ids": [1, 2, 3], "output_ids": [[11, 12, 9]]}))
    assert read(chunks) == ([1, 2, 3], [11, 12, 9], [-0.11, -0.12, -0.09], "stop", True)


def test_the_chunks_of_streamed_completions_are_joined() -> None:
    def part(ids: list[int], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
        return {"object": "text_completion", "choices": [{**choice, "finish_reason": finish}]}

    first = part([11])
    first["choices"][0]["prompt_token_ids"] = [1, 2, 3]
    assert read([first, part([12, 9], "stop")]) == ([1, 2, 3], [11, 12, 9], [-0.5] * 3, "stop", True)


def test_ids_may_be_anything_with_tolist() -> None:
    ids = SimpleNamespace(tolist=lambda: [1, 2, 3])
    assert read(sglang_generate(), prompt_tokens=ids) == EXPECTED


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        ("stop", None, True),
        ("tool_calls", None, True),
        ("stop", 9, True),
        ("stop", 7, False),
        ("stop", "</answer>", False),
        ("length", None, False),
        ("repetition", None, False),
    ],
)
def test_the_last_id_is_a_stop_token_only_if_it_ended_the_answer(finish: str, stop: Any, expected: bool) -> None:
    assert _answers.read(vllm_chat(finish_reason=finish, stop_reason=stop)).stopped_on_token is expected


def test_a_log_probability_just_above_zero_is_taken_as_zero() -> None:
    values = [{"logprob": 1e-6}, {"logprob": -0.2}, {"logprob": -0.3}]
    assert list(_answers.read(vllm_chat(logprobs={"content": values})).logprobs) == [0.0, -0.2, -0.3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": None}, "no token_ids. Send return_token_ids=True"),
        ({"logprobs": None}, "no log-probabilities. Send logprobs=True"),
        ({"logprobs": {"content": [{"logprob": -0.1}]}}, "1 log-probabilities for 3 token ids"),
        (
            {"logprobs": {"content": [{"logprob": -0.1}, {"logprob": None}, {"logprob": 0}]}},
            "log-probability 1 .* None",
        ),
        ({"logprobs": {"content": [{"logprob": math.nan}] * 3}}, "no finite number"),
        ({"logprobs": {"content": [{"logprob": -9999.0}] * 3}}, "stands for none"),
        ({"logprobs": {"content": [{"logprob": 0.5}] * 3}}, "above zero"),
        ({"logprobs": {"content": [{"logprob": -1, "token_id": 8}] * 3}}, "names different ids"),
        ({"token_ids": [11, -1, 9]}, "below 0"),
        ({"token_ids": [11, 2**31, 9]}, "above 2147483647"),
        ({"token_ids": [11, 1.5, 9]}, "list of integers"),
        ({"token_ids": []}, "has no token_ids"),
        ({"finish_reason": None}, "no finish_reason"),
        ({"meta_info": {"output_token_logprobs": [[-0.1, 11], [-0.2, 8], [-0.3, 9]]}}, "names different ids"),
    ],
)
def test_an_answer_that_lacks_something_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        _answers.read(vllm_chat(**fields))


def test_an_answer_without_the_ids_of_its_prompt_is_refused() -> None:
    answer = vllm_chat()
    del answer["prompt_token_ids"]
    with pytest.raises(RecordError, match=r"no prompt_token_ids.+return_token_ids=True"):
        _answers.read(answer)


def test_another_prompt_than_the_one_that_was_sent_is_refused() -> None:
    with pytest.raises(RecordError, match="differ"):
        _answers.read(vllm_chat(), prompt_tokens=[1, 2, 4])


@pytest.mark.parametrize("answer", [vllm_chat(finish_reason="abort"), sglang_generate(finish_reason={"type": "abort"})])
def test_an_answer_that_the_engine_aborted_is_refused(answer: Any) -> None:
    with pytest.raises(EngineAborted, match="repeat the call"):
        _answers.read(answer, prompt_tokens=[1, 2, 3])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("hi", "is a text"),
        ({"error": {"message": "too long"}}, "too long"),
        ({"object": "list"}, "neither `choices`"),
        ({"choices": []}, "0 choices"),
        ({"choices": [{}, {}]}, "2 choices"),
        (chunk(), "one chunk"),
        ([], "no chunks"),
        ([chunk(error={"message": "gone"})], "gone"),
        (streamed_vllm()[:2], "without a finish_reason"),
        ([chunk(choices=[{"index": 1}])], "several choices"),
        ([sglang_generate()], "pass the last one"),
    ],
)
def test_what_is_no_complete_answer_is_refused(answer: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        _answers.read(answer)


def spans(said: dict[str, Any], labels: Any = None, at_start: int = 5) -> list[list[int]] | None:
    answer = {**vllm_chat(), "metadata": said}
    return _answers.versions(_answers.read(answer), at_start, labels)


def label(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def test_the_engines_spans_say_which_version_sampled_which_ids() -> None:
    assert spans({"weight_versions": [label("6", 0, 2), label("7", 2, 3)]}) == [[6, 0, 2], [7, 2, 1]]


def test_neighbouring_spans_of_one_version_are_one_span() -> None:
    assert spans({"weight_versions": [label("6", 0, 1), label("6", 1, 3)]}) == [[6, 0, 3]]


def test_ids_behind_the_engines_spans_belong_to_the_last_one() -> None:
    assert spans({"weight_versions": [label("6", 0, 1), label("7", 1, 2)]}) == [[6, 0, 1], [7, 1, 2]]


def test_spans_that_leave_a_gap_are_not_used() -> None:
    assert spans({"weight_versions": [label("6", 1, 3)]}) is None


def test_a_lone_label_is_at_most_the_version_at_the_start() -> None:
    assert spans({"weight_version": "7"}) == [[5, 0, 3]]
    assert spans({"weight_version": "4"}) == [[4, 0, 3]]


def test_a_label_that_is_no_number_stands_for_the_version_at_the_start() -> None:
    assert spans({"weight_version": "default"}) is None
    assert spans({"weight_versions": [label("default", 0, 2), label("7", 2, 3)]}) == [[5, 0, 2], [7, 2, 1]]


def test_labels_can_be_translated() -> None:
    said = {"weight_versions": [label("1", 0, 3)]}
    assert spans(said, {"1": 41}) == [[41, 0, 3]]
    assert spans(said, lambda given: 40 + int(given)) == [[41, 0, 3]]
    assert spans(said, lambda given: None) == [[5, 0, 3]]


def test_an_engine_that_says_nothing_gives_no_spans() -> None:
    assert spans({}) is None


def test_the_scripted_engine_renders_conversations_so_that_they_extend() -> None:
    first = testing.render([{"role": "user", "content": "a"}])
    answer = [*testing.encode("b"), testing.END]
    later = testing.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert later[: len(first) + len(answer)] == first + answer
