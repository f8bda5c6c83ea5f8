"""The calls of one rollout, as turns of a trajectory. It is separate from the recorder because it makes no calls.

A turn names the one before it (`after`) if its prompt begins with all ids of that turn, so that a long conversation is
not repeated in every turn. Whether a call continues another one is decided by the service alone, from the ids.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator

from ._answers import Call
from ._wire import Turn
from .errors import RecorderFull

TURNS_MAX = 4096
"""The service's `limits.trajectory_segments` unless it is configured otherwise."""

TOKENS_MAX = 2_000_000
"""The service's `limits.trajectory_tokens` unless it is configured otherwise."""


class Turns:
    """The recorded calls. They may be added from several threads."""

    def __init__(self, turns_max: int = TURNS_MAX, tokens_max: int = TOKENS_MAX) -> None:
        self.turns: list[Turn] = []
        self.tokens = 0
        """Ids in the turns, with their prompts as far as they are new."""
        self.is_full = False
        self._turns_max = turns_max
        self._tokens_max = tokens_max
        self._lock = threading.Lock()
        self._paths = _Paths()

    def add(self, call: Call, versions: list[list[int]] | None, agent: str | None, delivered: bool) -> Turn:
        """Appends a call."""
        with self._lock:
            if len(self.turns) >= self._turns_max:
                self.is_full = True
                raise RecorderFull(f"the rollout has {self._turns_max} calls already, so this one was not recorded")
            after, known, state = self._paths.find(call.prompt)
            tokens = self.tokens + len(call.prompt) - known + len(call.tokens)
            if tokens > self._tokens_max:
                self.is_full = True
                raise RecorderFull(f"the rollout would have {tokens} tokens, and may have {self._tokens_max}")
            turn = Turn(
                id=f"c{len(self.turns) + 1}",
                after=after,
                prompt_tokens=call.prompt[known:],
                tokens=call.tokens,
                logprobs=call.logprobs,
                versions=versions,
                finish_reason=call.finish_reason[:256],
                stopped_on_token=call.stopped_on_token or None,
                agent=agent,
                delivered=None if delivered else False,
            )
            self.turns.append(turn)
            self.tokens = tokens
            if len(call.tokens) > 0:
                self._paths.add(str(turn.id), len(call.prompt) + len(call.tokens), state, call.tokens)
            return turn

    def __len__(self) -> int:
        return len(self.turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self.turns)


class _Paths:
    """The ids of every turn with its prompt, as a length and a digest. So memory does not grow with their square."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._turns: dict[bytes, str] = {}

    def find(self, prompt: array[int]) -> tuple[str | None, int, hashlib.blake2b]:
        """The turn with the longest path that the prompt begins with, the length of that path, and the hash of the
        whole prompt."""
        state = hashlib.blake2b(digest_size=16)
        found, known, place = None, 0, 0
        for length in self._lengths:
            if length > len(prompt):
                break
            state.update(prompt[place:length].tobytes())
            place = length
            turn = self._turns.get(state.digest())
            if turn is not None:
                found, known = turn, length
        state.update(prompt[place:].tobytes())
        return found, known, state

    def add(self, turn: str, length: int, prompt: hashlib.blake2b, tokens: array[int]) -> None:
        """Adds the path that consists of a hashed prompt and the sampled ids behind it."""
        prompt.update(tokens.tobytes())
        # Of several turns with the same ids, the first one is named: they are equal in what follows them.
        self._turns.setdefault(prompt.digest(), turn)
        place = bisect_left(self._lengths, length)
        if self._lengths[place : place + 1] != [length]:
            self._lengths.insert(place, length)
