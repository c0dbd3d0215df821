"""What a replica remembers over a restart: its counters and who sits where. Best effort; used by ``server``.

Two files in the spool folder: ``stats.json`` (replaced whole) and ``conversations.log`` (appended, rewritten at the
start and when it has grown). A kill loses at most the last second. Writing to the page cache is enough: the folder
is as mortal as the pod, and nothing here decides what is trained.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from prodrl.gateway import identity
from prodrl.gateway.routing import Conversations
from prodrl.gateway.stats import Stats

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REWRITE_LINES = 500_000
Row = tuple[str, str, float]
"""Trajectory, digest of its policy, last active (Unix seconds)."""


class Spool:
    """The folder; None as folder remembers nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._stats_path = folder / "stats.json" if folder else None
        self._log_path = folder / "conversations.log" if folder else None
        self._written_changes = -1
        self._lines = 0
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def load_stats(self) -> Stats:
        """The counters of the process before this one, or new ones."""
        try:
            return Stats.restore(json.loads(self._stats_path.read_bytes())) if self._stats_path else Stats()
        except FileNotFoundError:
            return Stats()
        except (OSError, ValueError) as exc:
            logger.warning("Spool %s: counters cannot be read, %s; they begin at 0", self._stats_path, exc)
            return Stats()

    def load_conversations(self, conversations: Conversations, now: float) -> None:
        """Seat the conversations that were active, then shorten the log to them."""
        if self._log_path is None:
            return
        try:
            rows = {trajectory: (digest, at) for trajectory, digest, at in _rows(self._log_path)}
            for trajectory, (digest, at) in sorted(rows.items(), key=lambda item: item[1][1]):
                conversations.hold(trajectory, digest, min(at, now))
            conversations.active(now)
            conversations.take_journal()
            self._rewrite(conversations.items())
        except OSError as exc:
            logger.warning("Spool %s: conversations cannot be read, %s; they may change policy", self._log_path, exc)

    def save(self, stats_changes: int, stats_snapshot: dict[str, object], rows: list[Row], held: list[Row]) -> None:
        """Write what changed. Runs in a thread: its arguments are copies.

        Args:
            stats_changes: ``Stats.changes`` at the time of the snapshot.
            stats_snapshot: ``Stats.snapshot()``.
            rows: Seats taken since the last call.
            held: All seats when the log must be rewritten, else empty.
        """
        try:
            if self._stats_path and stats_changes != self._written_changes:
                _replace(self._stats_path, json.dumps(stats_snapshot))
                self._written_changes = stats_changes
            if held:
                self._rewrite(held)
            elif rows and self._log_path:
                with self._log_path.open("a") as log:
                    log.writelines(map(_line, rows))
                self._lines += len(rows)
        except OSError as exc:
            logger.warning("Spool: not written, %s; a restart forgets the last counters", exc)

    @property
    def is_long(self) -> bool:
        """The log should be rewritten."""
        return self._lines > _REWRITE_LINES

    def _rewrite(self, rows: Iterable[Row]) -> None:
        if self._log_path:
            lines = [_line(row) for row in rows]
            _replace(self._log_path, "".join(lines))
            self._lines = len(lines)


def _line(row: Row) -> str:
    return f"{row[0]} {row[1]} {row[2]:.0f}\n"


def _rows(path: Path) -> Iterator[Row]:
    """The log's lines; one that a kill tore is skipped."""
    if not path.exists():
        return
    with path.open(errors="replace") as log:
        for line in log:
            parts = line.split()
            if (
                len(parts) == 3
                and line.endswith("\n")
                and identity.is_internal(parts[0])
                and _DIGEST.fullmatch(parts[1])
                and parts[2].isdigit()
            ):
                yield parts[0], parts[1], float(parts[2])


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
