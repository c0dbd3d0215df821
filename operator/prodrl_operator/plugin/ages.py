"""Times for people. Pure. Called by the views."""

from __future__ import annotations

from datetime import datetime

from prodrl_operator.rounds import times

MINUTE, HOUR, DAY = 60, 3600, 86400


def span(seconds: float) -> str:
    """Two units at most, as kubectl writes ages: 95s, 3m12s, 2h5m, 4d3h."""
    whole = max(int(seconds), 0)
    if whole < 2 * MINUTE:
        return f"{whole}s"
    if whole < HOUR:
        return _two(whole, MINUTE, "m", 1, "s")
    return _two(whole, HOUR, "h", MINUTE, "m") if whole < 2 * DAY else _two(whole, DAY, "d", HOUR, "h")


def since(timestamp: str | None, now: datetime) -> str:
    """How long ago; "-" where nothing is stored."""
    return "-" if timestamp is None else span(times.elapsed_seconds(timestamp, now))


def between(started: str | None, finished: str | None, now: datetime) -> str:
    """From one to the other, or until now."""
    if started is None:
        return "-"
    return span(times.elapsed_seconds(started, times.parse(finished) if finished else now))


def _two(whole: int, large: int, large_unit: str, small: int, small_unit: str) -> str:
    rest = whole % large // small
    return f"{whole // large}{large_unit}" + (f"{rest}{small_unit}" if rest else "")
