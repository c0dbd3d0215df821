"""Stored times, and deadlines that count from them. Pure: ``now`` is an argument everywhere."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from prodrl_operator.api.round import RoundStatus


def stamp(now: datetime, *, precise: bool = False) -> str:
    """RFC 3339 in UTC; whole seconds, as Kubernetes writes them, unless ``precise``."""
    text = now.astimezone(UTC).isoformat(timespec="milliseconds" if precise else "seconds")
    return text.replace("+00:00", "Z")


def parse(timestamp: str) -> datetime:
    """The inverse of :func:`stamp`."""
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00"))


def elapsed_seconds(since: str | None, now: datetime, paused_since: str | None = None) -> float:
    """Seconds from ``since``; a pause stops the count, and a clock that jumped back counts as no time at all."""
    if since is None:
        return 0.0
    end = min(now, parse(paused_since)) if paused_since else now
    return max((end - parse(since)).total_seconds(), 0.0)


def pause(status: RoundStatus, now: datetime) -> RoundStatus:
    """Stop the deadlines of the present step."""
    if status.paused_since is not None:
        return status
    return status.model_copy(update={"paused_since": stamp(now)})


def resume(status: RoundStatus, now: datetime) -> RoundStatus:
    """Let them run again: what they count from moves on by the length of the pause."""
    if status.paused_since is None:
        return status
    length = timedelta(seconds=elapsed_seconds(status.paused_since, now))
    changes: dict[str, object] = {"paused_since": None, "since": _moved(status.since, length)}
    if status.unready_since is not None:
        changes["unready_since"] = _moved(status.unready_since, length)
    canary = status.gate.canary
    if canary is not None:
        moved = canary.model_copy(update={"started": _moved(canary.started, length)})
        changes["gate"] = status.gate.model_copy(update={"canary": moved})
    return status.model_copy(update=changes)


def rearm(status: RoundStatus, now: datetime) -> RoundStatus:
    """After the clock jumped back, deadlines count from now: a stored time in the future never expires soon."""
    present = stamp(now)
    changes: dict[str, object] = {}
    if status.since is not None and parse(status.since) > parse(present):
        changes["since"] = present
    if status.paused_since is not None and parse(status.paused_since) > parse(present):
        changes["paused_since"] = present
    if status.unready_since is not None and parse(status.unready_since) > parse(present):
        changes["unready_since"] = present
    canary = status.gate.canary
    if canary is not None and canary.started is not None and parse(canary.started) > parse(present):
        changes["gate"] = status.gate.model_copy(update={"canary": canary.model_copy(update={"started": present})})
    return status.model_copy(update=changes) if changes else status


def _moved(timestamp: str | None, length: timedelta) -> str | None:
    return None if timestamp is None else stamp(parse(timestamp) + length)
