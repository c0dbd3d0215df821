"""Sessions of one suite against both policies, paired item by item. Called by ``run``.

The two sessions of an item start together with the same seed, and a bounded number of items is in flight: at every
moment both servers carry the same load, so that a busy machine slows and fails both alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prodrl.errors import DataError, UnavailableError
from prodrl.evaluate.chat import ChatClient
from prodrl.evaluate.suites import Suite
from prodrl.progress import check_stop

log = logging.getLogger(__name__)

SESSION_SECONDS = 900.0
"""A session that takes longer has failed; without a limit, one hung request would hold the gate for ever."""
MAX_STABLE_FAILURES = 0.2
"""Share of stable's sessions that may fail. An item that fails on both sides counts as a draw, and enough draws would
let any candidate pass: with more, the servers or the suite are broken, and nothing was measured."""


@dataclass(frozen=True)
class Session:
    """The outcome of one item on one side."""

    metrics: dict[str, float]
    """Empty when the session failed."""
    error: str = ""
    """Empty when it did not."""


@dataclass(frozen=True)
class Pair:
    """Both sides of one item."""

    item: str
    seed: int
    candidate: Session
    stable: Session


def choose_items(suite: Suite, name: str, max_items: int, seed: int) -> list[str]:
    """At most ``max_items`` items, drawn without replacement; the same seed draws the same ones.

    Raises:
        DataError: The suite has no item, or ids repeat.
    """
    items = sorted(suite.items())
    if not items:
        raise DataError(f"Evaluation {name}: the suite has no item; check suite and suiteUri")
    if len(set(items)) != len(items):
        raise DataError(f"Evaluation {name}: ids of items repeat; a suite's ids must be unique")
    if len(items) <= max_items:
        return items
    return sorted(random.Random(f"{seed}:{name}").sample(items, max_items))  # noqa: S311  # not for secrecy


def item_seed(seed: int, name: str, item: str) -> int:
    """The sampling seed of an item, the same for both sides; below 2**31, which every engine takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}:{item}".encode()).digest()[:4], "big") >> 1


async def play_pairs(
    suite: Suite,
    seeded_items: Sequence[tuple[str, int]],
    *,
    candidate: ChatClient,
    stable: ChatClient,
    concurrency: int,
    on_pair: Callable[[], None],
) -> list[Pair]:
    """Play every item on both sides.

    Args:
        suite: The suite.
        seeded_items: Item ids with their seeds.
        candidate: The candidate's server.
        stable: Stable's server.
        concurrency: Sessions in flight, over both sides.
        on_pair: Called after each pair.

    Returns:
        One pair an item, in the order given.
    """
    slots = asyncio.Semaphore(max(1, concurrency // 2))

    async def one(item: str, seed: int) -> Pair:
        async with slots:
            check_stop("Evaluation")
            ours, theirs = await asyncio.gather(
                _session(suite, item, candidate, seed), _session(suite, item, stable, seed)
            )
            on_pair()
            return Pair(item=item, seed=seed, candidate=ours, stable=theirs)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item, seed)) for item, seed in seeded_items]
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from faults
    return [task.result() for task in tasks]


async def _session(suite: Suite, item: str, client: ChatClient, seed: int) -> Session:
    try:
        async with asyncio.timeout(SESSION_SECONDS):
            metrics = await suite.play(item, client, seed)
        return Session(metrics={name: float(value) for name, value in metrics.items()})
    except Exception as exc:  # the loop's edge: whatever a suite raises is a failed session, counted as 0
        log.warning("session failed: item %s on %s: %s: %s", item, client.base_url, type(exc).__name__, exc)
        return Session(metrics={}, error=f"{type(exc).__name__}: {exc}"[:300])


def outcomes(pairs: Sequence[Pair], name: str, metric: str) -> tuple[list[float], list[float]]:
    """The metric of every item on both sides; a failed session is 0, never left out.

    Raises:
        DataError: A finished session did not report the metric, or reported something that is not finite.
        UnavailableError: Too many sessions of stable failed: that says nothing about the candidate.
    """
    failed = sum(bool(pair.stable.error) for pair in pairs)
    if failed > MAX_STABLE_FAILURES * len(pairs):
        example = next(pair.stable.error for pair in pairs if pair.stable.error)
        raise UnavailableError(
            f"Evaluation {name}: {failed} of {len(pairs)} sessions of stable failed, for example {example};"
            " look at stable's server and at the suite"
        )
    sides = ([p.candidate for p in pairs], [p.stable for p in pairs])
    ours, theirs = ([_value(session, name, metric) for session in side] for side in sides)
    return ours, theirs


def _value(session: Session, name: str, metric: str) -> float:
    if session.error:
        return 0.0
    if metric not in session.metrics:
        reported = ", ".join(sorted(session.metrics)) or "none"
        raise DataError(
            f"Evaluation {name}: metric {metric!r} was not reported, got {reported}; correct gate.evaluations"
        )
    value = session.metrics[metric]
    if not math.isfinite(value):
        raise DataError(f"Evaluation {name}: metric {metric!r} must be finite, got {value!r}; correct the suite")
    return value
