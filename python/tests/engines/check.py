"""What a rollout must agree with: what the engine sent, and a forward pass of transformers in 32 bits."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from agents import Answer, called
from engine import Exchange
from transformers import AutoModelForCausalLM, AutoTokenizer

from forebay.types import Sample

DIFFERENCE_MAX = 1e-4
"""How far a log-probability of the engine may be from that of transformers."""


@dataclass
class Counts:
    """What was checked of an engine."""

    calls: int = 0
    tokens: int = 0
    difference: float = 0.0
    subjects: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Call:
    """One sampled answer of the engine."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    message: dict[str, Any] | None


class Checker:
    """Checks the rollouts of one engine."""

    def __init__(self, folder: Path) -> None:
        self.counts = Counts()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.stops: list[int] = self._model.generation_config.eos_token_id

    def rollout(self, rows: list[Sample], exchanges: list[Exchange]) -> list[Call]:
        """Checks each trained token of a rollout, and returns the calls in it, the shortest prompt first."""
        made: list[Call] = []
        sampled = [call for exchange in exchanges if (call := sampled_by(exchange))]
        for row in rows:
            tokens, mask, logprobs = row.tokens or [], row.loss_mask or [], row.logprobs or []
            start = len(tokens) - row.response_length
            trained = [start + place for place, is_trained in enumerate(mask) if is_trained]
            at = 0
            while at < len(trained):
                place = trained[at]
                run = 1
                while trained[at + run : at + run + 1] == [place + run]:
                    run += 1
                kept = logprobs[place - start : place - start + run]
                # Other sessions had the same prompt, and an answer of theirs may be the beginning of this one.
                here = (call for call in sampled if self.is_here(call, tokens, place, kept))
                call = max(here, key=lambda call: len(call.tokens), default=None)
                assert call is not None, f"the engine did not send this at {place}: {self.text(tokens[place:])}"
                made.append(call)
                at += min(run, len(call.tokens))
            self.compare(tokens, trained, [logprobs[place - start] for place in trained], row.temperature)
        with self.counts.lock:
            self.counts.calls += len(made)
        return sorted(made, key=lambda call: len(call.prompt))

    def is_here(self, call: Call, tokens: list[int], place: int, kept: list[float]) -> bool:
        """Whether ids with these log-probabilities are what a call sampled behind the ids before them."""
        count = min(len(kept), len(call.tokens))
        # Only a token that ended an answer is left out, if the next prompt does not have it.
        is_whole = count == len(call.tokens) or (count == len(call.tokens) - 1 and call.tokens[-1] in self.stops)
        return (
            is_whole
            and call.prompt == tokens[:place]
            and call.tokens[:count] == tokens[place : place + count]
            and numpy.float32(call.logprobs[:count]).tolist() == numpy.float32(kept[:count]).tolist()
        )

    def compare(self, tokens: list[int], places: list[int], logprobs: list[float], temperature: float) -> None:
        """Compares log-probabilities with those under the full context."""
        difference = (self.forward(tokens, places, temperature) - torch.tensor(logprobs)).abs().max().item()
        assert difference <= DIFFERENCE_MAX, f"a log-probability is {difference} from that of transformers"
        with self.counts.lock:
            self.counts.difference = max(self.counts.difference, difference)
            self.counts.tokens += len(places)

    def forward(self, tokens: list[int], places: list[int], temperature: float) -> torch.Tensor:
        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([tokens])).last_hidden_state[0]
            logits = self._model.lm_head(hidden[torch.tensor(places) - 1]) / temperature
            return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[places].unsqueeze(-1)).squeeze(-1)

    def answers(self, received: list[Answer], calls: list[Call]) -> None:
        """Checks that an agent received what the engine made of the ids."""
        assert len(received) == len(calls)
        for answer, call in zip(received, calls, strict=True):
            message = call.message or self.decoded(call.tokens)
            functions = [tool["function"] for tool in message.get("tool_calls") or []]
            assert answer.text == (message.get("content") or ""), f"{answer} instead of {message}"
            assert answer.reasoning == (message.get("reasoning") or ""), f"{answer} instead of {message}"
            calls = [called(function["name"], function["arguments"]) for function in functions]
            # Half a call that the agent has no part of is left out, if a call before it was sent.
            is_half = len(calls) > 1 and isinstance(calls[-1][1], str)
            is_equal = answer.calls == calls or (is_half and answer.calls == calls[:-1])
            assert is_equal, f"{answer} instead of {message}"
            assert "<|im_end|>" not in f"{answer.text}{answer.reasoning}{answer.calls}"
            assert (answer.prompt_tokens, answer.completion_tokens) == (len(call.prompt), len(call.tokens))

    def decoded(self, tokens: list[int]) -> dict[str, Any]:
        """What an answer says that no parser reads."""
        return {"content": self.tokenizer.decode(tokens, skip_special_tokens=True)}

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens[:40])


def sampled_by(exchange: Exchange) -> Call | None:
    """What an engine sampled in an exchange, with log-probabilities of each id."""
    answer = assembled(exchange.answer) if isinstance(exchange.answer, str) else exchange.answer
    if exchange.status != 200 or not isinstance(answer, dict) or not answer.get("choices"):
        return None
    choice = answer["choices"][0]
    tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
    prompt = exchange.request.get("token_ids") or answer.get("prompt_token_ids")
    if tokens is None or logprobs is None or prompt is None:
        return None
    return Call(prompt, tokens, [token["logprob"] for token in logprobs], choice.get("message"))


def assembled(events: str) -> Any:
    """The answer of the endpoint for ids whose parts came as events."""
    parts = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    choices = [part["choices"][0] for part in parts if part.get("choices")]
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    logprobs = [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content") or []]
    prompt = next((part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids")), None)
    whole = {"token_ids": tokens, "logprobs": {"content": logprobs}}
    return {"choices": [whole] if choices else [], "prompt_token_ids": prompt}


def parsed(calls: list[Call], exchanges: list[Exchange]) -> None:
    """Fills in what the endpoint for ids made of the answers, which has no place in their own exchange.

    An answer that was sent in pieces is what the endpoint made of the pieces, if it had to be asked for the last one,
    because it reads a broken tool call in pieces in another way than at once.
    """
    derendered = [exchange for exchange in exchanges if exchange.path.endswith("/derender") and exchange.status == 200]
    found = {
        tuple(exchange.request["generate_response"]["choices"][0]["token_ids"]): exchange.answer["choices"][0][
            "message"
        ]
        for exchange in derendered
        if "generate_response" in exchange.request
    }
    parts = {key_of_part(exchange): exchange for exchange in derendered if "generate_chunk" in exchange.request}
    for call in calls:
        if call.message is None:
            spoken = tuple(call.tokens)
            spoken = spoken if spoken in found else spoken[:-1]
            call.message = in_pieces(spoken, parts) or found.get(spoken)


PartKey = tuple[tuple[int, ...], tuple[int, ...], bool]
"""The ids of an answer up to the end of a part, the sizes of the parts before, and whether the answer ends there."""


def key_of_part(exchange: Exchange) -> PartKey:
    state = exchange.request.get("stream_state") or {}
    choice = exchange.request["generate_chunk"]["choices"][0]
    ids = (state.get("output_token_ids") or []) + choice["token_ids"]
    return tuple(ids), tuple(state.get("output_chunk_lens") or []), choice["finish_reason"] is not None


def in_pieces(spoken: tuple[int, ...], parts: dict[PartKey, Exchange]) -> dict[str, Any] | None:
    """What was made of the pieces of an answer, if its last piece was asked for."""
    key = next((key for key in parts if key[0] == spoken and key[2]), None)
    if key is None:
        return None
    sizes = key[1]
    before = [parts[spoken[:end], sizes[:place], False] for place, end in enumerate(itertools.accumulate(sizes))]
    pieces = [*before, parts[key]]
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for delta in (piece.answer["chunk"]["choices"][0]["delta"] for piece in pieces):
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for tool in delta.get("tool_calls") or []:
            while len(message["tool_calls"]) <= tool["index"]:
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            for name in ("name", "arguments"):
                message["tool_calls"][tool["index"]]["function"][name] += tool["function"].get(name) or ""
    return message
