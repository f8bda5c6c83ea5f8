"""The vocabulary of tiny models: a token for each character, and one that opens the messages of each role.

A message is the token of its role, its text and `<eos>`. Nothing follows the end, so a conversation that goes on
extends the ids that were sampled exactly. The ids are those that `forebay-trainer init --alphabet TEXT --chat` gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import ConfigurationError

PAD, BOS, END, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"

ROLES = ("system", "user", "assistant", "tool")

SPECIAL = (PAD, BOS, END, UNKNOWN, *(f"<{role}>" for role in ROLES))


class Vocabulary:
    """The ids of an alphabet."""

    def __init__(self, alphabet: str) -> None:
        names = [*SPECIAL, *alphabet]
        self.ids = {name: place for place, name in enumerate(names)}
        if len(self.ids) < len(names):
            raise ConfigurationError("the alphabet of the task has a character twice")

    def encode(self, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        try:
            return [self.ids[character] for character in text]
        except KeyError as error:
            raise ConfigurationError(f"the alphabet of the task lacks {error} of the text {text!r}") from None

    def message(self, role: str, text: str) -> list[int]:
        """The ids of a message."""
        return [self.ids[f"<{role}>"], *self.encode(text), self.ids[END]]

    def demonstration(self, messages: Iterable[Mapping[str, str]]) -> tuple[list[int], list[int]]:
        """The ids of a conversation, and a mask of those behind the first role token of the assistant: 1 for what the
        assistant says, with its end."""
        tokens: list[int] = []
        mask: list[int] = []
        for message in messages:
            role, ids = message["role"], self.message(message["role"], message["content"])
            says = role == "assistant"
            if says and not mask:
                tokens.append(ids.pop(0))
            tokens += ids
            if mask or says:
                is_opener = [bool(mask) and place == 0 for place in range(len(ids))]
                mask += [int(says and not opener) for opener in is_opener]
        return tokens, mask
