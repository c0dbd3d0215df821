"""The feedback log: rewards become durable here. Used by ``app``; started and stopped by ``server``.

Group commit: while one segment is being written, everything that arrives waits for the next; a segment is one
immutable object, written whole. An acknowledged reward is in the store; one that is not acknowledged may be, which is
why clients repeat it under the same idempotency key.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prodrl.gateway.feedback import Draft, fingerprint
from prodrl.records import FeedbackEntry
from prodrl.store import layout
from prodrl.store.port import Store

logger = logging.getLogger(__name__)

MAX_WAITING = 20_000
"""Rewards that may wait for their commit; past it new ones are refused."""
MAX_SEGMENT_ENTRIES = 5_000
MAX_INDEX = 200_000
"""Idempotency keys remembered for answering duplicates; ``collect`` drops the duplicates of older ones."""
REBUILT_SEGMENTS = 1_000
"""Segments read at the start to rebuild that memory: a minute of a busy replica at least."""
_READERS = 8
COMMIT_SECONDS = 30.0
"""How long a client waits for its commit."""
_RETRY_SECONDS = 2.0
_KEY = re.compile(r"(?P<writer>.+)-(?P<sequence>\d{10})\.jsonl")


class ConflictError(Exception):
    """The idempotency key was used for another reward."""


class NotDurableError(Exception):
    """The store did not take it (yet); the client must post again."""


@dataclass(frozen=True)
class Receipt:
    """What the client gets for one reward."""

    draft: Draft
    is_duplicate: bool


@dataclass
class _Known:
    content: bytes
    commit: asyncio.Future[None] | None
    """None once it is durable."""


class FeedbackLog:
    """Appends rewards to the store, and remembers recent idempotency keys."""

    def __init__(self, store: Store, writer: str) -> None:
        self._store = store
        self._writer = writer
        self._sequence = 0
        self._index: OrderedDict[str, _Known] = OrderedDict()
        self._waiting: list[tuple[list[FeedbackEntry], asyncio.Future[None]]] = []
        self._num_waiting = 0
        self._wake = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self.is_ready = False
        """The store took a probe object, and the log's end was found."""
        self.failures = 0
        """Commits that the store refused."""

    def start(self) -> None:
        """Begin to look for the log's end, then to commit."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Commit what waits, then stop."""
        self._is_closing = True
        self._wake.set()
        if self._task is not None:
            await self._task

    async def accept(self, drafts: list[Draft], entries: list[FeedbackEntry]) -> list[Receipt]:
        """Make the rewards durable, all or none; returns when they are.

        Raises:
            ConflictError: A key was used before for other content.
            NotDurableError: The store is not taking feedback now.
        """
        if not self.is_ready or self._is_closing or self._num_waiting + len(drafts) > MAX_WAITING:
            raise NotDurableError
        commit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        commit.add_done_callback(_retrieve)
        fresh, waits, receipts = self._sort(drafts, entries, commit)
        if fresh:
            for _, draft in fresh:
                if not draft.is_generated:
                    self._index[draft.key] = _Known(draft.fingerprint(), commit)
            self._waiting.append(([entry for entry, _ in fresh], commit))
            self._num_waiting += len(fresh)
            self._wake.set()
            waits.add(commit)
        if waits:
            _, late = await asyncio.wait(waits, timeout=COMMIT_SECONDS)
            if late or any(wait.cancelled() or wait.exception() for wait in waits):
                raise NotDurableError
        return receipts

    def _sort(
        self, drafts: list[Draft], entries: list[FeedbackEntry], commit: asyncio.Future[None]
    ) -> tuple[list[tuple[FeedbackEntry, Draft]], set[asyncio.Future[None]], list[Receipt]]:
        """The rewards to write, the commits of others to wait for, and everyone's receipt."""
        fresh: list[tuple[FeedbackEntry, Draft]] = []
        waits: set[asyncio.Future[None]] = set()
        receipts: list[Receipt] = []
        here: dict[str, _Known] = {}
        for draft, entry in zip(drafts, entries, strict=True):
            known = here.get(draft.key) or self._index.get(draft.key)
            if known is not None and known.content != draft.fingerprint():
                raise ConflictError(
                    f"Feedback: idempotency key {draft.key.partition(':key:')[2]!r} was used for another reward; "
                    "use a new key to revise it"
                )
            receipts.append(Receipt(draft, is_duplicate=known is not None))
            if known is None:
                here[draft.key] = _Known(draft.fingerprint(), commit)
                fresh.append((entry, draft))
            elif known.commit is not None and known.commit is not commit:
                waits.add(known.commit)
        return fresh, waits, receipts

    async def _run(self) -> None:
        while not self.is_ready and not self._is_closing:
            try:
                await asyncio.to_thread(self._open)
                self.is_ready = True
            except Exception as exc:  # the loop's edge: without a store the gateway still serves
                self.failures += 1
                logger.error("Feedback log %s: cannot be opened, %s; trying again", self._writer, exc)
                await asyncio.sleep(_RETRY_SECONDS)
        while not (self._is_closing and not self._waiting):
            await self._wake.wait()
            await self._commit()
            if not self._waiting and not self._is_closing:
                self._wake.clear()

    async def _commit(self) -> None:
        """Write one segment of what waits."""
        entries: list[FeedbackEntry] = []
        commits: list[asyncio.Future[None]] = []
        while self._waiting and len(entries) < MAX_SEGMENT_ENTRIES:
            batch, commit = self._waiting.pop(0)
            entries += batch
            commits.append(commit)
        if not entries:
            return
        self._num_waiting -= len(entries)
        try:
            await asyncio.to_thread(self._write, entries)
        except Exception as exc:  # the loop's edge: the clients are told, and repeat
            self.failures += 1
            logger.error("Feedback log %s: %d rewards not stored, %s", self._writer, len(entries), exc)
            for entry in entries:
                self._index.pop(entry.idempotency_key, None)
            for commit in commits:
                commit.set_exception(NotDurableError())
            return
        for entry in entries:
            self._remember(entry)
        for commit in commits:
            commit.set_result(None)

    def _remember(self, entry: FeedbackEntry) -> None:
        if ":key:" not in entry.idempotency_key:
            return
        content = fingerprint(entry.trajectory_id, entry.reward, entry.final, entry.metadata)
        self._index[entry.idempotency_key] = _Known(content, None)
        self._index.move_to_end(entry.idempotency_key)
        while len(self._index) > MAX_INDEX:
            key, known = next(iter(self._index.items()))
            if known.commit is not None:
                break
            del self._index[key]

    def _write(self, entries: Iterable[FeedbackEntry]) -> None:
        data = "".join(entry.model_dump_json() + "\n" for entry in entries).encode()
        while True:
            self._sequence += 1
            if self._store.create(layout.feedback_segment(self._writer, self._sequence), data):
                return

    def _open(self) -> None:
        """Find the end of our own segments, and read recent ones for their keys."""
        self._store.check_writable()
        recent: dict[str, list[int]] = {}
        for writer, sequence in self._segments():
            if writer == self._writer:
                self._sequence = max(self._sequence, sequence)
            newest = recent.setdefault(writer, [])
            if len(newest) < REBUILT_SEGMENTS:
                heapq.heappush(newest, sequence)
            else:
                heapq.heappushpop(newest, sequence)
        keys = [layout.feedback_segment(*segment) for segment in _latest(recent, self._writer)]
        with ThreadPoolExecutor(_READERS) as readers:
            for data in readers.map(self._store.get, keys):
                for line in data.splitlines():
                    self._remember(FeedbackEntry.model_validate_json(line))

    def _segments(self) -> Iterator[tuple[str, int]]:
        folder = layout.feedback_segment("", 0).partition("/")[0] + "/"
        for key in self._store.list(folder):
            if match := _KEY.fullmatch(key.removeprefix(folder)):
                yield match["writer"], int(match["sequence"])


def _latest(recent: dict[str, list[int]], own: str) -> list[tuple[str, int]]:
    """At most REBUILT_SEGMENTS segments, newest of each writer first, our own before the others'; oldest first."""
    chosen = [(own, sequence) for sequence in recent.get(own, [])]
    share = max((REBUILT_SEGMENTS - len(chosen)) // max(len(recent) - 1, 1), 0)
    for writer, sequences in recent.items():
        if writer != own and share:
            chosen += [(writer, sequence) for sequence in heapq.nlargest(share, sequences)]
    return sorted(chosen, key=lambda item: item[1])


def _retrieve(commit: asyncio.Future[None]) -> None:
    """Mark the exception as seen: every waiter may have left."""
    if not commit.cancelled():
        commit.exception()


def now_ms() -> int:
    """Unix milliseconds."""
    return int(time.time() * 1000)
