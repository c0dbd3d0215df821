"""Timestamps of the API as numbers. Pure: no clock."""

from __future__ import annotations

from datetime import datetime


def unix_ms(timestamp: str | None) -> int:
    """RFC 3339 as Unix milliseconds; None is 0."""
    if timestamp is None:
        return 0
    return int(datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp() * 1000)
