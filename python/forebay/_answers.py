"""Reads answers of inference engines: the exact ids of the prompt, the sampled ids and their log-probabilities.

It is separate from the recorder because it knows the engines' fields and nothing of rollouts. Nothing is ever filled
in: an answer that lacks something is refused, and the error names the field of the request that asks for it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .errors import EngineAborted, RecordError

Labels = Mapping[str, int] | Callable[[str], int | None]
"""What the labels of an engine's weights mean as versions of the policy."""

NO_LOGPROB = -9999.0
"""What vLLM writes if it has no log-probability of a token."""

ABOVE_ZERO_MAX = 1e-3
"""How far above zero a log-probability may be. Engines add in 32 bits or less, so certainty may come out as 1e-6."""

ID_MAX = 2**31 - 1

_ASK_IDS = (
    "Send return_token_ids=True with the request (vLLM from 0.10.2 on), for SGLang also return_prompt_token_ids=True "
    "and return_meta_info=True (from 0.5.13 on). Routers may remove the ids: call the engine itself."
)
_ASK_STREAMED_IDS = (
    "With stream=True, send return_token_ids=True to vLLM, and return_input_ids_in_sglext=True and "
    "return_output_ids_in_sglext=True to SGLang. Routers may remove the ids: call the engine itself."
)
_ASK_LOGPROBS = "Send logprobs=True with the request; for SGLang's /generate, return_logprob=True."
_ASK_PROMPT = "SGLang's /generate does not return the prompt: pass the ids that were sent as prompt_tokens."


@dataclass(frozen=True)
class LabelSpan:
    """The ids `start` to `end` (exclusive) of an answer were sampled by the weights with this label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class Call:
    """One answer of an engine."""

    prompt: array[int]
    tokens: array[int]
    logprobs: array[float]
    finish_reason: str
    stopped_on_token: bool
    label: str | None
    """The label of the weights that sampled the last id, if the engine says it."""
    label_spans: tuple[LabelSpan, ...] | None
    """Which weights sampled which ids, if the engine says it."""


def field(value: object, name: str) -> Any:
    """A field of a dictionary or of an object, such as those of the package `openai`; None if there is none."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name)
    return getattr(value, name, None)


def is_chunk(value: object) -> bool:
    """Whether this is a part of a streamed chat answer."""
    return field(value, "object") == "chat.completion.chunk"


def read(answer: object, prompt_tokens: Sequence[int] | None = None) -> Call:
    """Reads an answer: of a chat endpoint, of completions, of /generate, or the chunks of a streamed chat.

    `prompt_tokens` are the ids that were sent, if the request was made with ids. They are needed where the engine does
    not return them, and are compared with those that it returns.
    """
    if isinstance(answer, (str, bytes)):
        raise RecordError("the answer is a text: pass the engine's whole answer, as a dictionary or an object")
    if is_chunk(answer):
        raise RecordError(
            "the answer is one chunk of a stream: pass the list of all chunks, or read the stream through stream()"
        )
    if _is_stream(answer):
        return _read_chunks(list(cast("Iterable[object]", answer)), prompt_tokens)
    if field(answer, "choices") is not None:
        return _read_choices(answer, prompt_tokens)
    if field(answer, "meta_info") is not None:
        return _read_generate(answer, prompt_tokens)
    error = field(answer, "error")
    if error is not None:
        raise RecordError(f"the engine answered with an error: {error}")
    raise RecordError(
        "the answer has neither `choices` (chat completions and completions) nor `meta_info` (SGLang's /generate)"
    )


def versions(call: Call, at_start: int, labels: Labels | None) -> list[list[int]] | None:
    """The spans [version, start, length] of a call; None if nothing is known but `at_start`.

    `at_start` is the version that was published when the call began. It stands for labels that are no numbers.
    """
    length = len(call.tokens)
    if length == 0:
        return None
    if call.label_spans is not None:
        tiled = _tile(call.label_spans, length, at_start, labels)
        if tiled is not None:
            return tiled
    # A lone label names the weights at the end of the call. The ids before may be older, and the version at the start
    # says how old.
    version = None if call.label is None else _number(call.label, labels)
    return None if version is None else [[min(version, at_start), 0, length]]


def _is_stream(value: object) -> bool:
    # Objects of the package `openai` can be iterated over as well: they yield their fields.
    has_fields = isinstance(value, Mapping) or any(hasattr(value, name) for name in ("model_dump", "choices"))
    return not has_fields and hasattr(cast("object", value), "__iter__")


def _read_choices(answer: object, prompt_tokens: Sequence[int] | None) -> Call:
    choices = field(answer, "choices")
    if len(choices) != 1:
        raise RecordError(f"the answer has {len(choices)} choices instead of one: make one request for each answer")
    choice = choices[0]
    meta = field(choice, "meta_info")
    extension = field(answer, "sglext")
    prompt = _first(field(choice, "prompt_token_ids"), field(answer, "prompt_token_ids"), field(extension, "input_ids"))
    sampled = _first(field(choice, "token_ids"), field(choice, "response_token_ids"))
    outputs = field(extension, "output_ids")
    if sampled is None and outputs:
        sampled = outputs[0]
    finish = _finish(field(choice, "finish_reason"), meta)
    count = field(field(answer, "usage"), "completion_tokens")
    tokens, logprobs = _tokens(sampled, _pairs(meta), field(choice, "logprobs"), count, _ASK_IDS)
    label, spans = _labels(choice, field(answer, "metadata"), meta)
    stop = _first(field(choice, "matched_stop"), field(choice, "stop_reason"))
    return Call(
        prompt=_prompt(prompt, prompt_tokens, _ASK_IDS),
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=finish,
        stopped_on_token=_stopped_on_token(finish, stop, tokens),
        label=label,
        label_spans=spans,
    )


def _read_generate(answer: object, prompt_tokens: Sequence[int] | None) -> Call:
    meta = field(answer, "meta_info")
    finish = _finish(None, meta)
    count = field(meta, "completion_tokens")
    tokens, logprobs = _tokens(field(answer, "output_ids"), _pairs(meta), None, count, _ASK_LOGPROBS)
    label, spans = _labels(answer, None, meta)
    return Call(
        prompt=_prompt(field(answer, "prompt_token_ids"), prompt_tokens, _ASK_PROMPT),
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=finish,
        stopped_on_token=_stopped_on_token(finish, field(field(meta, "finish_reason"), "matched"), tokens),
        label=label,
        label_spans=spans,
    )


def _read_chunks(chunks: list[object], prompt_tokens: Sequence[int] | None) -> Call:
    """Joins the chunks of one streamed chat answer."""
    prompt = sampled = finish = stop = None
    values: list[Any] = []
    for chunk in chunks:
        error = field(chunk, "error")
        if error is not None:
            raise RecordError(f"the engine ended the stream with an error: {error}")
        if field(chunk, "meta_info") is not None:
            raise RecordError("these are chunks of SGLang's /generate: pass the last one, which contains the others")
        extension = field(chunk, "sglext")
        prompt = _first(prompt, field(chunk, "prompt_token_ids"), field(extension, "input_ids"))
        outputs = field(extension, "output_ids")
        if outputs:
            sampled = list(outputs[0])
        for choice in field(chunk, "choices") or ():
            if field(choice, "index") not in (None, 0):
                raise RecordError("the stream has several choices instead of one: make one request for each answer")
            prompt = _first(prompt, field(choice, "prompt_token_ids"))
            part = field(choice, "token_ids")
            if part is not None:
                sampled = [*(sampled or ()), *part]
            values.extend(_values(field(choice, "logprobs")) or ())
            finish = _first(field(choice, "finish_reason"), finish)
            stop = _first(field(choice, "matched_stop"), field(choice, "stop_reason"), stop)
    if not chunks:
        raise RecordError("the stream has no chunks")
    if finish is None:
        raise RecordError("the stream ended without a finish_reason: the answer is not complete, so it is not recorded")
    finish = _finish(finish, None)
    tokens, logprobs = _tokens(sampled, None, {"token_logprobs": values}, None, _ASK_STREAMED_IDS)
    return Call(
        prompt=_prompt(prompt, prompt_tokens, _ASK_STREAMED_IDS),
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=finish,
        stopped_on_token=_stopped_on_token(finish, stop, tokens),
        label=None,
        label_spans=None,
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _finish(reason: object, meta: object) -> str:
    told = field(meta, "finish_reason")
    meta_reason = told if isinstance(told, str) else field(told, "type")
    # SGLang's chat endpoint may write "stop" for a call that its scheduler aborted.
    reason = meta_reason if meta_reason == "abort" else _first(reason, meta_reason)
    if reason in ("abort", "error"):
        raise EngineAborted(
            f"the engine ended the call with finish_reason {reason!r}, as it does if its weights are replaced: the "
            "answer is not complete, so repeat the call"
        )
    if not isinstance(reason, str) or not reason:
        raise RecordError("the answer has no finish_reason: it is not complete, so it is not recorded")
    return reason


def _stopped_on_token(finish: str, stop: object, tokens: array[int]) -> bool:
    if finish == "length" or not tokens or isinstance(stop, str):
        return False
    if isinstance(stop, int):
        return tokens[-1] == stop
    # An engine does not name the model's own end token.
    return finish in ("stop", "tool_calls", "function_call")


def _pairs(meta: object) -> list[Sequence[Any]] | None:
    """SGLang's log-probability, id and text of each sampled token. It is complete where `logprobs` is too short."""
    return field(meta, "output_token_logprobs")


def _tokens(
    named: object, pairs: list[Sequence[Any]] | None, logprobs: object, count: object, ask: str
) -> tuple[array[int], array[float]]:
    """The sampled ids with their log-probabilities. `count` is the number of ids, if the engine says it."""
    ids = None if named is None else to_ids(named, "token_ids")
    if pairs is not None:
        told = to_ids([pair[1] for pair in pairs], "output_token_logprobs")
        # Some paths of SGLang leave the token out that ended the answer.
        if ids is not None and ids not in (told, told[:-1]):
            raise RecordError("the answer names different ids in token_ids and in output_token_logprobs")
        return told, _logprobs([pair[0] for pair in pairs], len(told))
    if ids is None or (len(ids) == 0 and isinstance(count, int) and count > 0):
        raise RecordError(f"the answer has no token_ids. {ask}")
    for entry, token in zip(field(logprobs, "content") or (), ids, strict=False):
        if field(entry, "token_id") not in (None, token):
            raise RecordError("the answer names different ids in token_ids and in logprobs.content")
    values = _values(logprobs)
    if not values and len(ids) > 0:
        raise RecordError(f"the answer has no log-probabilities. {_ASK_LOGPROBS}")
    return ids, _logprobs(values or [], len(ids))


def _values(logprobs: object) -> list[Any] | None:
    """The log-probabilities of a chat answer or of completions, as they are."""
    entries = field(logprobs, "content")
    return field(logprobs, "token_logprobs") if entries is None else [field(entry, "logprob") for entry in entries]


def _logprobs(values: Sequence[Any], count: int) -> array[float]:
    if len(values) != count:
        raise RecordError(
            f"the answer has {len(values)} log-probabilities for {count} token ids: a part is missing, so nothing is "
            "recorded. In streams, parsers of reasoning and tool calls may leave some out: call without stream."
        )
    for index, value in enumerate(values):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RecordError(f"log-probability {index} of the answer is {value!r}, which is no finite number")
        if value <= NO_LOGPROB:
            raise RecordError(
                f"log-probability {index} of the answer is {value}, which stands for none: start vLLM with "
                "--logprobs-mode processed_logprobs and without speculative decoding"
            )
        if value > ABOVE_ZERO_MAX:
            raise RecordError(
                f"log-probability {index} of the answer is {value}, which is above zero: start vLLM with "
                "--logprobs-mode processed_logprobs, not with a mode of logits"
            )
    return array("d", (min(float(value), 0.0) for value in values))


def _prompt(told: object, sent: Sequence[int] | None, ask: str) -> array[int]:
    given = None if sent is None else to_ids(sent, "prompt_tokens")
    prompt = None if not told else to_ids(told, "prompt_token_ids")
    if prompt is None:
        prompt = given
    elif given is not None and prompt != given:
        raise RecordError("the engine's prompt_token_ids differ from the prompt_tokens that are said to have been sent")
    if not prompt:
        raise RecordError(f"the answer has no prompt_token_ids. {ask}")
    return prompt


def to_ids(value: Any, name: str) -> array[int]:
    """Token ids as 32-bit integers. Arrays and tensors are taken as well."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        ids = array("i", value)
    except OverflowError:
        raise RecordError(f"{name} has an id above {ID_MAX}") from None
    except TypeError:
        raise RecordError(f"{name} must be a list of integers") from None
    if len(ids) > 0 and min(ids) < 0:
        raise RecordError(f"{name} has an id below 0")
    return ids


def _labels(choice: object, *places: object) -> tuple[str | None, tuple[LabelSpan, ...] | None]:
    """What the answer says about the weights, from the place that says most."""
    for place in (choice, *places):
        spans = field(place, "weight_versions")
        if spans is not None:
            return None, tuple(
                LabelSpan(str(field(span, "version")), int(field(span, "start")), int(field(span, "end")))
                for span in spans
            )
    label = _first(*(field(place, "weight_version") for place in places))
    return (None if label is None else str(label)), None


def _tile(spans: Iterable[LabelSpan], length: int, at_start: int, labels: Labels | None) -> list[list[int]] | None:
    """The engine's spans, or None if they are not one behind the other from the first id on."""
    tiled: list[list[int]] = []
    place = 0
    for span in spans:
        if span.start != place or span.end < span.start:
            return None
        version = _number(span.label, labels)
        _extend(tiled, at_start if version is None else version, place, min(span.end, length))
        place = span.end
    if not tiled:
        return None
    # If the engine counted fewer ids, the last span is the best guess for the rest.
    _extend(tiled, tiled[-1][0], place, length)
    return tiled


def _extend(tiled: list[list[int]], version: int, start: int, end: int) -> None:
    if end <= start:
        return
    if tiled and tiled[-1][0] == version:
        tiled[-1][2] += end - start
    else:
        tiled.append([version, start, end - start])


def _number(label: str, labels: Labels | None) -> int | None:
    """The version that a label stands for. A function decides alone; a mapping only for the labels that it has."""
    if callable(labels):
        version = labels(label)
    elif labels is not None and label in labels:
        version = labels[label]
    else:
        text = label.strip()
        version = int(text) if text.isascii() and text.isdigit() else None
    return version if version is not None and version >= 0 else None
