"""The controller's work queue: one entry a key, one worker a key, delayed entries. Called by ``controller``."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

Key = tuple[str, str]
"""Namespace and name."""


class WorkQueue:
    """Keys that are due, each at most once; a key in work is not given out again before ``done``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._in_work: set[Key] = set()
        self._is_closed = False

    def add(self, key: Key, delay_seconds: float = 0.0) -> None:
        """Make the key due; an earlier time of the same key wins."""
        due = self._clock() + delay_seconds
        with self._changed:
            if key in self._due and self._due[key] <= due:
                return
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
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
                waits = [self._heap[0][0] - now] if self._heap and self._heap[0][1] not in self._in_work else []
                waits += [deadline - now] if deadline is not None else []
                self._changed.wait(max(min(waits), 0.0) if waits else None)
            return None

    def done(self, key: Key) -> None:
        """The key's work is over; it may be given out again."""
        with self._changed:
            self._in_work.discard(key)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody; ``get`` gives None from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._due)

    def _pop(self, now: float) -> Key | None:
        held: list[tuple[float, Key]] = []
        found: Key | None = None
        while self._heap and self._heap[0][0] <= now and found is None:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) != due:
                continue  # an earlier time of this key was given out already
            if key in self._in_work:
                held.append((due, key))
                continue
            del self._due[key]
            self._in_work.add(key)
            found = key
        for item in held:
            heapq.heappush(self._heap, item)
        return found
