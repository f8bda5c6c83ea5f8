"""UUIDs of version 7 (RFC 9562), which sort by the time at which they were made. Python has them from 3.14 on."""

from __future__ import annotations

import os
import time
import uuid


def uuid7() -> str:
    """Returns a new UUIDv7: 48 bits of the time in milliseconds, and 74 random bits."""
    value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(0b11 << 62) | 0b10 << 62
    return str(uuid.UUID(int=value))
