"""From observations to shards in the store: a bounded queue and one writer thread. Started by ``middleware``.

``capture`` offers observations from the event loop and never waits. The thread builds the records, closes a shard when
it is full or old enough, writes it to the spool and brings it to the store; what the store does not take stays in the
spool and is tried again. Whatever is lost is counted.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from prodrl.config import RecorderConfig
from prodrl.errors import RuntimeFault
from prodrl.recorder import record, spool
from prodrl.recorder.counters import Counters
from prodrl.recorder.record import Observation
from prodrl.records import CompletionRecord
from prodrl.store import layout
from prodrl.store.port import Store

logger = logging.getLogger("prodrl.recorder")

MAX_QUEUED_ENTRIES = 32 * 1024 * 1024
"""Head entries that may wait in memory, 12 bytes each."""
MAX_SPOOL_BYTES = 8 * 1024**3
"""Shards that may wait on the disk for a store that does not answer."""
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses after the first, second, ... failed upload in a row."""
CLOSE_SECONDS = 20.0
"""How long the end of the process may wait for the last uploads; the spool keeps the rest."""


class ShardSink:
    """Writes the records of one server process."""

    def __init__(
        self,
        config: RecorderConfig,
        counters: Counters,
        spool_dir: Path,
        writer: str,
        open_store: Callable[[], Store],
    ) -> None:
        self._config = config
        self._counters = counters
        self._spool_dir = spool_dir
        # A restarted server has the same name; the time makes the keys of its shards its own, and ascending.
        self._writer = f"{writer}-{int(time.time() * 1000):013d}"
        self._open_store = open_store
        self._queue: queue.Queue[Observation] = queue.Queue(config.queue_rows)
        self._queued_entries = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._sequence = 0
        self._pending: list[Path] = []
        self._failures = 0
        self._next_try = 0.0
        self._spool: spool.Spool | None = None
        self._store: Store | None = None

    def start(self) -> None:
        """Start the writer thread, once."""
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="prodrl-recorder", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def offer(self, seen: Observation) -> None:
        """Take the observation, or drop and count it."""
        if self._thread is None:
            self.start()
        num_entries = len(seen.entries.ids)
        if self._closing.is_set() or self._queued_entries + num_entries > MAX_QUEUED_ENTRIES:
            self._counters.dropped_queue_full += 1
            return
        try:
            self._queue.put_nowait(seen)
        except queue.Full:
            self._counters.dropped_queue_full += 1
        else:
            self._queued_entries += num_entries

    def close(self) -> None:
        """Write and upload what is waiting, as far as the store answers; may be called more than once."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(CLOSE_SECONDS + 5)

    def _run(self) -> None:
        try:
            self._take_over()
        except OSError:
            logger.exception("Spool %s: cannot be used; nothing is recorded until it can", self._spool_dir)
        rows: list[CompletionRecord] = []
        opened_at = 0.0
        while True:
            # Read before the queue, so that what was offered before the end is still found.
            is_closing = self._closing.is_set()
            seen = self._next(is_closing=is_closing)
            if seen is not None:
                opened_at = opened_at if rows else time.monotonic()
                self._build(seen, rows)
            is_due = time.monotonic() - opened_at >= self._config.flush_seconds or len(rows) >= self._config.flush_rows
            is_last = is_closing and seen is None
            if rows and (is_due or is_last):
                self._write(rows)
                rows = []
            self._upload_when_due()
            if is_last:
                self._finish()
                return

    def _next(self, *, is_closing: bool) -> Observation | None:
        try:
            seen = self._queue.get_nowait() if is_closing else self._queue.get(timeout=0.2)
        except queue.Empty:
            return None
        self._queued_entries -= len(seen.entries.ids)
        return seen

    def _build(self, seen: Observation, rows: list[CompletionRecord]) -> None:
        try:
            rows.append(record.build(seen, self._config))
        except Exception:  # the edge of the loop: one bad observation must not end the writer
            logger.exception("Request %s: cannot be made a record", seen.request_id)
            self._counters.dropped_faults += 1

    def _take_over(self) -> None:
        self._spool = spool.Spool(self._spool_dir, self._writer)
        found, torn = self._spool.take_over()
        self._pending += found
        self._counters.recovered_shards += len(found)
        self._counters.torn_shards += torn

    def _write(self, rows: list[CompletionRecord]) -> None:
        key = layout.record_shard(self._config.policy_digest, self._writer, self._sequence)
        try:
            if self._spool is None:
                self._take_over()
            assert self._spool is not None
            if self._pending and self._spool.size() > MAX_SPOOL_BYTES:
                raise OSError(f"{self._spool.folder} holds more than {MAX_SPOOL_BYTES} bytes")
            self._pending.append(self._spool.write(key, rows))
        except Exception as exc:  # the edge of the loop: a full disk costs records, not the writer
            logger.error("Shard %s: %d records lost, %s", key, len(rows), exc)
            self._counters.dropped_disk += len(rows)
            return
        self._sequence += 1
        self._counters.recorded += len(rows)
        for row in rows:
            self._counters.trainable += row.trainable
            self._counters.untrainable.update(row.reasons)

    def _upload_when_due(self) -> None:
        if self._pending and time.monotonic() >= self._next_try:
            self._upload()

    def _upload(self) -> bool:
        """Bring the oldest shard to the store. Returns whether it is there."""
        path = self._pending[0]
        try:
            if self._store is None:
                self._store = self._open_store()
            self._counters.bytes += spool.upload(self._store, path)
        except Exception as exc:  # the edge of the loop: any fault of a store is a reason to try again
            self._counters.upload_failures += 1
            pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
            self._failures += 1
            self._next_try = time.monotonic() + pause
            level = logging.WARNING if isinstance(exc, RuntimeFault) else logging.ERROR
            logger.log(level, "Shard %s: not uploaded, trying again in %g s: %s", path.name, pause, exc)
            return False
        self._pending.pop(0)
        self._failures = 0
        self._next_try = 0.0
        self._counters.shards += 1
        return True

    def _finish(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._pending and time.monotonic() < deadline:
            if not self._upload():
                time.sleep(min(1.0, max(deadline - time.monotonic(), 0)))
        if self._pending:
            logger.error("Recorder: %d shards stay in %s for the next process", len(self._pending), self._spool_dir)
        if self._spool is not None:
            self._spool.close()
