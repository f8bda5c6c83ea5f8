"""The vocabulary of tiny models: a token for each character, and one that opens the messages of each role.

A message is the token of its role, its text and `<eos>`. Nothing follows the end, so a conversation that goes on
extends the ids that were sampled exactly. `forebay-trainer init --tokenizer` takes the folder that is written here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

PAD, BOS, END, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"

ROLES = ("system", "user", "assistant", "tool")

SPECIAL = (PAD, BOS, END, UNKNOWN, *(f"<{role}>" for role in ROLES))

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content }}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


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

    def write(self, folder: Path) -> None:
        """Writes the files of a tokenizer with this vocabulary."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": END,
            "unk_token": UNKNOWN,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        }
        for name, content in (("tokenizer.json", self._tokenizer()), ("tokenizer_config.json", config)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")

    def _tokenizer(self) -> dict[str, Any]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": place, "content": name, **flags} for place, name in enumerate(SPECIAL)],
            "normalizer": None,
            # Every character is a word of its own.
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "[\\s\\S]"},
                "behavior": "Isolated",
                "invert": False,
            },
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": self.ids, "unk_token": UNKNOWN},
        }
