"""A small durable state of a program whose every change belongs to one post, such as a running mean over rewards.

The state and the post that belongs to it are written to one file before the post is made, and the post is removed from
the file afterwards. A program that was killed in between posts the same body again when it starts, and the service
recognises the repeat. So the state changes exactly once for each post, at whatever point the program is killed.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from . import _durable
from ._http import json_body
from ._posts import identified
from ._wire import Receipt, Trajectory
from .errors import ServiceError, StateError

if TYPE_CHECKING:
    from .client import Client

FORMAT = 1
"""The version of the file's format."""

REPEATED = (408, 429, 500, 502, 503, 504)
"""Statuses after which the same post may still be taken."""


class State:
    """A state in a file, with one program at a time.

    `value` is anything that JSON has a form for. It becomes durable only together with a post: change it and pass the
    state to `Client.bundle`, or call `post`. Until then `reload` brings back the value in the file.
    """

    def __init__(self, path: str | os.PathLike[str], default: Any = None) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._held = _durable.lock(self.path.with_name(self.path.name + ".lock"))
        if self._held is None:
            raise StateError(f"{self.path} belongs to a program that is running: a state has one program at a time")
        try:
            self._read(default)
        except BaseException:
            self.close()
            raise

    def _read(self, default: Any) -> None:
        _durable.remove_leftover(self.path)
        try:
            content: Any = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            content = {"format": FORMAT, "value": default, "pending": None}
        except ValueError as error:
            raise StateError(f"{self.path} is not the file of a state: {error}") from None
        if not isinstance(content, dict) or not {"value", "pending"} <= cast("dict[str, Any]", content).keys():
            raise StateError(f"{self.path} is not the file of a state")
        fields = cast("dict[str, Any]", content)
        if fields.get("format") != FORMAT:
            raise StateError(f"{self.path} has the format {fields.get('format')}, and this version reads {FORMAT}")
        self._durable_value: Any = fields["value"]
        self._pending: dict[str, Any] | None = fields["pending"]
        self.value: Any = copy.deepcopy(self._durable_value)
        """The state. A change becomes durable with the next post."""

    @property
    def is_pending(self) -> bool:
        """Whether a post was begun and it is not known whether the service has it; see `recover`."""
        return self._pending is not None

    def reload(self) -> None:
        """Brings back the value in the file."""
        with self._lock:
            self.value = copy.deepcopy(self._durable_value)

    def recover(self, client: Client) -> list[Receipt] | None:
        """Makes the post that was begun when the program was killed. Call it when the program starts.

        Returns its receipts, or None if there is nothing to do.
        """
        with self._lock:
            return None if self._pending is None else self._finish(client)

    def post(self, client: Client, trajectories: Sequence[Trajectory | Mapping[str, Any]]) -> list[Receipt]:
        """Posts trajectories in one commit, and makes the present `value` durable with them.

        If the service refuses them for good, the state keeps its value from before. If it cannot be reached, the post
        stays in the file, and `recover` or the next `post` makes it.
        """
        with self._lock:
            value = copy.deepcopy(self.value)
            if self._pending is not None:
                self._finish(client)
            body = json_body([identified(item) for item in trajectories], "POST", "/trajectories")
            self._write(value, {"body": body.decode(), "before": self._durable_value})
            receipts = self._finish(client)
            self.value = copy.deepcopy(value)
            return receipts

    def close(self) -> None:
        """Lets another program use the state."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, client: Client) -> list[Receipt]:
        assert self._pending is not None
        try:
            receipts = client.post_body(self._pending["body"].encode())
        except ServiceError as error:
            if error.status not in REPEATED:
                self._write(self._pending["before"], None)
                self.reload()
            raise
        self._write(self._durable_value, None)
        return receipts

    def _write(self, value: Any, pending: dict[str, Any] | None) -> None:
        if self._held is None:
            raise StateError(f"the state in {self.path} is closed")
        content: dict[str, Any] = {"format": FORMAT, "value": value, "pending": pending}
        try:
            data = json.dumps(content, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise StateError(f"the state cannot be written as JSON: {error}") from None
        _durable.replace(self.path, data)
        self._durable_value, self._pending = value, pending
