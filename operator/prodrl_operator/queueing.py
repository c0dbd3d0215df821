"""The controller's work queue: one entry a key, one worker a key, delayed entries. Called by ``controller``.

What happened just now goes before what is only due again: a thousand runs whose turn it is to be looked at must not
keep the one waiting whose Job has ended. Every few turns it is the other way round, so that neither starves.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

Key = tuple[str, str]
"""Namespace and name."""

SPARE = 64
ROUTINE_EVERY = 4
"""So often what is due by time goes first."""


class WorkQueue:
    """Keys that are due, each at most once; a key in work is not given out again before ``done``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._news: dict[Key, None] = {}
        """In the order in which they came."""
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._in_work: set[Key] = set()
        self._turns = 0
        self._is_closed = False

    def add(self, key: Key, delay_seconds: float = 0.0, *, is_routine: bool = False) -> None:
        """Make the key due; an earlier time of the same key wins. Without a delay it is news, unless it is routine."""
        due = self._clock() + delay_seconds
        with self._changed:
            if delay_seconds <= 0 and not is_routine:
                self._news[key] = None
            elif key not in self._due or due < self._due[key]:
                self._due[key] = due
                heapq.heappush(self._heap, (due, key))
                self._tidy()
            self._changed.notify_all()

    def get(self, timeout_seconds: float | None = None) -> Key | None:
        """The next due key; None after ``close`` or the timeout. The caller must call ``done``."""
        deadline = None if timeout_seconds is None else self._clock() + timeout_seconds
        with self._changed:
            while not self._is_closed:
                now = self._clock()
                key = self._pop(now)
                if key is not None:
                    return key
                if deadline is not None and now >= deadline:
                    return None
                waits = [self._heap[0][0] - now] if self._heap else []
                waits += [deadline - now] if deadline is not None else []
                self._changed.wait(max(min(waits), 0.0) if waits else None)
            return None

    def done(self, key: Key) -> None:
        """The key's work is over; it may be given out again."""
        with self._changed:
            self._in_work.discard(key)
            if key in self._due:
                heapq.heappush(self._heap, (self._due[key], key))
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody; ``get`` gives None from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._news.keys() | self._due.keys())

    def _pop(self, now: float) -> Key | None:
        key = self._pop_due(now) if (self._turns + 1) % ROUTINE_EVERY == 0 else None
        key = key or self._pop_news() or self._pop_due(now)
        if key is not None:  # one look answers both
            self._turns += 1
            self._news.pop(key, None)
            self._due.pop(key, None)
            self._in_work.add(key)
        return key

    def _pop_news(self) -> Key | None:
        return next((key for key in self._news if key not in self._in_work), None)

    def _pop_due(self, now: float) -> Key | None:
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            # An earlier time of this key was given out already, or it is in work: then ``done`` puts it back.
            if self._due.get(key) == due and key not in self._in_work:
                return key
        return None

    def _tidy(self) -> None:
        """Later times that an earlier one has overtaken stay behind until then: a day, perhaps."""
        if len(self._heap) > 2 * len(self._due) + SPARE:
            self._heap = [(due, key) for key, due in self._due.items()]
            heapq.heapify(self._heap)
